// The router on a GPU has the CPU's bits: from given logits, and whole with float32 products. Those
// of bfloat16 have the bound of gemm.h.
#include <bit>
#include <cmath>
#include <random>

#include "moiety/base/graph.h"
#include "moiety/moe/router_cuda.h"
#include "tests/gemm/groups.h"
#include "tests/moe/router_helpers.h"
#include "tests/support/gpu_test.h"
#include "tests/support/mirror.h"

namespace moiety::moe {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

enum class Logits { kNormal, kTies, kOdd };

void fill_logits(const TensorView& x, Logits kind, uint32_t seed) {
  const std::vector<float> ties = {-1, 0, 0, 1, 1, 2};
  const std::vector<float> odd = {kNan, kInf, -kInf, 0.0f, -0.0f, 1e30f, -1e30f, 200, -200, 1};
  const int64_t experts = x.size(1);
  std::mt19937 rng(seed);
  std::normal_distribution<float> normal(0, 3);
  for (int64_t t = 0; t < x.size(0); ++t) {
    float* row = x.data<float>() + t * experts;
    // Some rows have one odd logit or are all the same.
    const bool few = kind == Logits::kOdd && t % 3 == 0;
    for (int64_t e = 0; e < experts; ++e) {
      const bool special = kind != Logits::kNormal && (!few || e == t % experts);
      const auto& values = kind == Logits::kTies ? ties : odd;
      row[e] = special ? values[rng() % values.size()] : normal(rng);
      if (kind != Logits::kNormal && t % 5 == 4) row[e] = row[0];
    }
  }
}

// Any NaN becomes one of them.
Tensor canonical(const TensorView& x) {
  Tensor out(x.dtype(), x.sizes());
  std::memcpy(out.view().raw(), x.raw(), static_cast<size_t>(x.bytes()));
  for (int64_t i = 0; i < x.numel(); ++i) {
    if (x.dtype() == DType::kFloat32 && std::isnan(x.data<float>()[i])) out.data<float>()[i] = kNan;
    if (x.dtype() == DType::kFloat64 && std::isnan(x.data<double>()[i])) {
      out.data<double>()[i] = kNan;
    }
  }
  return out;
}

void expect_equal(const char* what, const Mirror& m, const TensorView& host) {
  EXPECT_EQ(difference(what, canonical(m.back(host)), canonical(host)), "");
}

// A router whose outputs hold what must be overwritten, and its counterpart on the GPU.
struct Problem : Router {
  Tensor mask_T, bias_E, loss, dlogits, residual;

  Problem(const RouterConfig& c, int64_t tokens, int64_t model, int64_t s, uint32_t seed,
          DType dtype = DType::kFloat32)
      : Router(c, random_values(tokens * model, seed), random_values(c.experts * model, seed + 1),
               dtype, s),
        mask_T(DType::kUInt8, {tokens}),
        bias_E(DType::kFloat32, {c.experts}),
        loss(DType::kFloat64, {2}),
        dlogits(DType::kFloat32, {tokens, c.experts}) {
    for (const Tensor* x : {&idx, &weight, &count, &sum, &dw, &dh, &dlogits}) {
      if (x->view().bytes() > 0) fill_bytes(*x, 0xA5, {});
    }
    for (int64_t t = 0; t < tokens; ++t) mask_T.data<uint8_t>()[t] = t % 7 != 3;
    fill(bias_E, random_values(c.experts, seed + 2, 0.2));
    fill(dweight, random_values(tokens * c.top_k, seed + 3));
    fill(dw, random_values(c.experts * model, seed + 4));
    loss.data<double>()[0] = 0.25;
    loss.data<double>()[1] = 3;
  }
  Mirror mirror(const Stream& stream) const {
    return Mirror({h, w, logits, idx, weight, count, sum, forward_workspace, dweight, scope, dw, dh,
                   backward_workspace, mask_T, bias_E, loss, dlogits, residual},
                  stream);
  }
  RouterForwardArgs forward_args() const {
    return {h, w, bias, mask, logits, idx, weight, {count, sum}, forward_workspace};
  }
  RouterChooseArgs choose_args() const {
    return {.logits_TE = logits,
            .bias_E = bias,
            .mask_T = mask,
            .idx_TK = idx,
            .weight_TK = weight,
            .stats = {count, sum},
            .workspace = forward_workspace};
  }
  RouterChooseBackwardArgs choose_backward_args() const {
    return {logits, idx, dweight, count, scope, dlogits};
  }
  RouterLossArgs loss_args() const { return {{count, sum}, scope, loss}; }
  RouterBackwardArgs backward_args(float dw_beta) const {
    return {h, w, logits, idx, dweight, count, scope, dw, dw_beta, addend, dh, backward_workspace};
  }
};

RouterForwardArgs there(const Mirror& m, const RouterForwardArgs& a) {
  return {m(a.h_TD),      m(a.w_ED),   m(a.bias_E),    m(a.mask_T),
          m(a.logits_TE), m(a.idx_TK), m(a.weight_TK), {m(a.stats.count), m(a.stats.sum)},
          m(a.workspace)};
}
RouterChooseArgs there(const Mirror& m, const RouterChooseArgs& a) {
  return {.logits_TE = m(a.logits_TE),
          .bias_E = m(a.bias_E),
          .mask_T = m(a.mask_T),
          .given_idx_TK = m(a.given_idx_TK),
          .idx_TK = m(a.idx_TK),
          .weight_TK = m(a.weight_TK),
          .stats = {m(a.stats.count), m(a.stats.sum)},
          .workspace = m(a.workspace)};
}
RouterChooseBackwardArgs there(const Mirror& m, const RouterChooseBackwardArgs& a) {
  return {m(a.logits_TE), m(a.idx_TK), m(a.dweight_TK), m(a.count), m(a.scope), m(a.dlogits_TE)};
}
RouterLossArgs there(const Mirror& m, const RouterLossArgs& a) {
  return {{m(a.stats.count), m(a.stats.sum)}, m(a.scope), m(a.loss_2)};
}
RouterBackwardArgs there(const Mirror& m, const RouterBackwardArgs& a) {
  return {m(a.h_TD),  m(a.w_ED),  m(a.logits_TE), m(a.idx_TK),    m(a.dweight_TK), m(a.count),
          m(a.scope), m(a.dw_ED), a.dw_beta,      m(a.addend_TD), m(a.dh_TD),      m(a.workspace)};
}

class RouterGpu : public GpuTest {
 protected:
  // All but the products, from logits that the problem has.
  void check_rows(const Problem& p) {
    const Mirror m = p.mirror(stream);
    const RouterChooseArgs f = p.choose_args();
    router_choose(p.config, f, {});
    router_choose(p.config, there(m, f), stream);
    expect_equal("idx", m, p.idx);
    expect_equal("weight", m, p.weight);
    expect_equal("count", m, p.count);
    expect_equal("sum", m, p.sum);

    p.scope.data<int64_t>()[0] = p.tokens - p.tokens / 3;
    p.scope.data<int64_t>()[1] = p.tokens;
    copy(m(p.scope), p.scope, stream);
    router_losses(p.config, p.loss_args(), {});
    router_losses(p.config, there(m, p.loss_args()), stream);
    expect_equal("loss", m, p.loss);

    const RouterChooseBackwardArgs b = p.choose_backward_args();
    router_choose_backward(p.config, b, {});
    router_choose_backward(p.config, there(m, b), stream);
    expect_equal("dlogits", m, p.dlogits);
    check_pieces(p, m);
  }

  // The three pieces of the gradient of the logits add up to it.
  void check_pieces(const Problem& p, const Mirror& m) {
    const int64_t experts = p.config.experts;
    const Tensor pieces(DType::kBFloat16, {p.tokens, 3 * experts}), there_TX = twin(pieces);
    RouterChooseBackwardArgs b = there(m, p.choose_backward_args());
    b.dlogits_TE = there_TX;
    detail::backward_rows_cuda(p.config, b, {}, stream);
    if (p.tokens > 0) copy(pieces, there_TX, stream);
    stream.synchronize();
    for (int64_t i = 0; i < p.tokens * experts; ++i) {
      const float x = p.dlogits.data<float>()[i];
      const bf16* piece = pieces.data<bf16>() + i / experts * 3 * experts + i % experts;
      const float high = piece[0], middle = piece[experts], low = piece[2 * experts];
      const double sum = double(high) + middle + low;
      const bool good = std::isfinite(float(bf16(x)))
                            ? high == float(bf16(x)) && std::fabs(sum - x) <= 0x1p-134
                            : std::isnan(sum);
      ASSERT_TRUE(good) << text("element {}: {} is {} + {} + {}", i, x, high, middle, low);
    }
  }

  Tensor twin(const Tensor& x) const { return {x.view().dtype(), x.view().sizes(), kGpu}; }
};

class RouterRowsGpu : public RouterGpu, public testing::WithParamInterface<int64_t> {};
INSTANTIATE_TEST_SUITE_P(Experts, RouterRowsGpu, testing::Values(1, 3, 8, 100, 128, 257, 384, 4096),
                         testing::PrintToStringParamName());

// The other options change from case to case, all at different paces.
TEST_P(RouterRowsGpu, HaveTheBitsOfTheCpu) {
  const int64_t experts = GetParam();
  uint32_t n = 0;
  for (const int64_t tokens : {0, 1, 63, 64, 65, 1000}) {
    for (const int64_t top_k : {int64_t{1}, std::min<int64_t>(experts, 32)}) {
      for (const Logits kind : {Logits::kNormal, Logits::kTies, Logits::kOdd}) {
        for (const Score score : {Score::kSoftmax, Score::kSigmoid}) {
          ++n;
          const RouterConfig config{.experts = experts,
                                    .top_k = top_k,
                                    .score = score,
                                    .renormalize = n % 3 != 0,
                                    .scale = n % 2 ? 1.0f : 2.5f,
                                    .aux = static_cast<AuxLoss>(n % 4),
                                    .aux_coef = 0.1f,
                                    .z_coef = n % 5 < 2 ? 0.0f : 0.01f,
                                    .force_balance = n % 11 == 7};
          const int64_t segments = config.aux == AuxLoss::kSequence && tokens % 5 == 0 ? 5 : 1;
          Problem p(config, tokens, 1, segments, n);
          fill_logits(p.logits, kind, n);
          if (n % 7 < 3) p.bias = p.bias_E;
          if (n % 5 < 3) p.mask = p.mask_T;
          SCOPED_TRACE(text("case {}: T={} K={} logits {} {}", n, tokens, top_k, int(kind),
                            score == Score::kSoftmax ? "softmax" : "sigmoid"));
          check_rows(p);
          if (HasFailure()) return;
        }
      }
    }
  }
}

TEST_F(RouterGpu, GroupsHaveTheBitsOfTheCpu) {
  struct Case {
    int64_t experts, groups, group_top_k, top_k;
  };
  uint32_t n = 0;
  for (const Case& c : {Case{6, 2, 1, 2},
                        {6, 6, 4, 3},
                        {64, 8, 4, 8},
                        {256, 8, 4, 8},
                        {130, 13, 3, 6},
                        {512, 4, 4, 8},
                        {4096, 256, 7, 32},
                        {4096, 4096, 9, 9}}) {
    for (const Logits kind : {Logits::kNormal, Logits::kTies, Logits::kOdd}) {
      for (const Score score : {Score::kSoftmax, Score::kSigmoid}) {
        Problem p({.experts = c.experts,
                   .top_k = c.top_k,
                   .score = score,
                   .groups = c.groups,
                   .group_top_k = c.group_top_k},
                  70, 1, 1, ++n);
        fill_logits(p.logits, kind, n);
        if (n % 3 != 0) p.bias = p.bias_E;
        if (kind == Logits::kOdd) p.bias_E.data<float>()[n % c.experts] = n % 2 ? kNan : -kInf;
        SCOPED_TRACE(text("E={} groups={} logits {} {}", c.experts, c.groups, int(kind),
                          score == Score::kSoftmax ? "softmax" : "sigmoid"));
        check_rows(p);
        if (HasFailure()) return;
      }
    }
  }
}

// A choice that is given is taken, but for tokens where it is none.
TEST_F(RouterGpu, GivenChoicesHaveTheBitsOfTheCpu) {
  uint32_t n = 0;
  for (const int64_t experts : {3, 64, 100, 512}) {
    for (const Score score : {Score::kSoftmax, Score::kSigmoid}) {
      const RouterConfig config{.experts = experts, .top_k = 3, .score = score};
      Problem p(config, 130, 1, 1, ++n);
      fill_logits(p.logits, Logits::kNormal, n);
      p.mask = p.mask_T;
      const Tensor given(DType::kInt32, {p.tokens, config.top_k});
      for (int64_t t = 0; t < p.tokens; ++t) {
        int32_t* of_token = given.data<int32_t>() + t * config.top_k;
        for (int64_t k = 0; k < 3; ++k) of_token[k] = int32_t((t * 5 + k) % experts);
        if (t % 9 == 4) of_token[t % 3] = t % 2 ? -1 : int32_t(experts);
      }
      const Mirror m = p.mirror(stream), more({given}, stream);
      RouterChooseArgs here = p.choose_args(), there_args = there(m, here);
      here.given_idx_TK = given;
      there_args.given_idx_TK = more(given);
      router_choose(config, here, {});
      router_choose(config, there_args, stream);
      expect_equal("idx", m, p.idx);
      expect_equal("weight", m, p.weight);
      expect_equal("count", m, p.count);
      expect_equal("sum", m, p.sum);
      const RouterChooseBackwardArgs b = p.choose_backward_args();
      router_choose_backward(config, b, {});
      router_choose_backward(config, there(m, b), stream);
      expect_equal("dlogits", m, p.dlogits);
    }
  }
}

// Captured once, with other data at each replay. Products of float32 have the CPU's chain.
TEST_F(RouterGpu, OneCaptureServesOtherData) {
  for (const AuxLoss aux : {AuxLoss::kSwitch, AuxLoss::kSequence}) {
    const RouterConfig config{
        .experts = 24, .top_k = 4, .aux = aux, .aux_coef = 0.1f, .z_coef = 0.01f};
    Problem p(config, 150, 40, aux == AuxLoss::kSequence ? 3 : 1, 5);
    p.bias = p.bias_E;
    p.mask = p.mask_T;
    p.addend = p.dh;
    Tensor pairs(DType::kInt64, {config.experts}), skip(DType::kInt32, {1});
    const Mirror m = p.mirror(stream), more({pairs, skip}, stream);
    const Graph graph(stream, [&] {
      router_forward(config, there(m, p.forward_args()), stream);
      router_losses(config, there(m, p.loss_args()), stream);
      router_backward(config, there(m, p.backward_args(1)), stream);
      router_update_bias(m(p.bias_E), more(pairs), 0.125f, stream, more(skip));
    });
    for (uint32_t replay = 0; replay < 3; ++replay) {
      Router::fill(p.h, random_values(p.tokens * p.model, 70 + replay));
      Router::fill(p.dh, random_values(p.tokens * p.model, 80 + replay));
      p.scope.data<int64_t>()[0] = 100 + replay;
      p.scope.data<int64_t>()[1] = 128;
      for (int64_t e = 0; e < config.experts; ++e) pairs.data<int64_t>()[e] = (e * 7 + replay) % 5;
      *skip.data<int32_t>() = replay == 1;
      for (const Tensor* x : {&p.h, &p.dh, &p.scope}) copy(m(*x), *x, stream);
      for (const Tensor* x : {&pairs, &skip}) copy(more(*x), *x, stream);
      graph.launch(stream);
      router_forward(config, p.forward_args(), {});
      router_losses(config, p.loss_args(), {});
      router_backward(config, p.backward_args(1), {});
      router_update_bias(p.bias_E, pairs, 0.125f, {}, skip);
      SCOPED_TRACE(text("replay {}", replay));
      expect_equal("logits", m, p.logits);
      expect_equal("idx", m, p.idx);
      expect_equal("weight", m, p.weight);
      expect_equal("count", m, p.count);
      expect_equal("sum", m, p.sum);
      expect_equal("loss", m, p.loss);
      expect_equal("dw", m, p.dw);
      expect_equal("dh", m, p.dh);
      expect_equal("bias", m, p.bias_E);
    }
  }
}

// |got - expected| of a product of `terms` terms, the sum of whose magnitudes is `magnitude`; the
// pieces of an element are together at most 2^-7 larger than it.
bool within_bound(DType dtype, double got, double expected, double magnitude, int64_t terms) {
  const double products = double(terms + 4) * 0x1p-23 * 1.01 * magnitude;
  return std::fabs(got - expected) <= 1.01 * half_ulp(dtype, expected) + products;
}

struct BackwardCase {
  int64_t tokens, model, experts;
  DType dw, addend;  // kUInt8: no addend
  bool in_place;     // the addend is dh
  float dw_beta;
};

// The inputs of a backward pass, its dlogits as the CPU has them, and the results that it must
// have, in double.
struct BackwardExpected {
  const Problem& p;
  const BackwardCase& c;
  std::vector<double> h, w, dlogits, dw, addend;

  BackwardExpected(const Problem& problem, const BackwardCase& shape)
      : p(problem), c(shape), h(Router::read(p.h)), w(Router::read(p.w)), dw(Router::read(p.dw)) {
    router_choose_backward(p.config, p.choose_backward_args(), {});
    dlogits = Router::read(p.dlogits);
    if (p.addend.defined()) addend = Router::read(p.addend);
  }
  void check_dw(const TensorView& got) const {
    const std::vector<double> values = Router::read(got);
    for (int64_t i = 0; i < c.experts * c.model; ++i) {
      const int64_t e = i / c.model, d = i % c.model;
      double sum = c.dw_beta * dw[i], magnitude = std::fabs(sum);
      for (int64_t t = 0; t < c.tokens; ++t) {
        const double term = dlogits[t * c.experts + e] * h[t * c.model + d];
        sum += term;
        magnitude += std::fabs(term);
      }
      ASSERT_TRUE(within_bound(c.dw, values[i], sum, magnitude, c.tokens))
          << text("dw[{}, {}] is {}, expected {}", e, d, values[i], sum);
    }
  }
  void check_dh(const TensorView& got) const {
    const std::vector<double> values = Router::read(got);
    for (int64_t i = 0; i < c.tokens * c.model; ++i) {
      const int64_t t = i / c.model, d = i % c.model;
      double sum = addend.empty() ? 0 : addend[i], magnitude = std::fabs(sum);
      for (int64_t e = 0; e < c.experts; ++e) {
        const double term = dlogits[t * c.experts + e] * w[e * c.model + d];
        sum += term;
        magnitude += std::fabs(term);
      }
      ASSERT_TRUE(within_bound(DType::kBFloat16, values[i], sum, magnitude, 3 * c.experts))
          << text("dh[{}, {}] is {}, expected {}", t, d, values[i], sum);
    }
  }
};

// Called, called again and replayed from a graph, with the same bits.
TEST_F(RouterGpu, BackwardOfBf16IsWithinTheBound) {
  const DType f32 = DType::kFloat32, half = DType::kBFloat16, none = DType::kUInt8;
  for (const BackwardCase& c : {BackwardCase{130, 40, 12, f32, none, false, 1},
                                {130, 7, 12, half, half, false, 1},
                                {1, 24, 5, f32, f32, false, 0},
                                {1000, 136, 24, f32, f32, false, 1},
                                {1000, 136, 8, half, half, true, 1},
                                {517, 64, 128, half, f32, false, 0},
                                {2999, 264, 100, f32, f32, false, 1},
                                {700, 2056, 65, half, f32, false, 0},
                                {129, 8, 3, f32, none, false, 0},
                                {1500, 136, 64, f32, none, false, 1},
                                {300, 64, 130, f32, f32, false, 1},
                                {4096, 256, 32, f32, half, false, 1}}) {
    SCOPED_TRACE(text("T={} D={} E={} dw {} addend {} beta {}", c.tokens, c.model, c.experts,
                      name(c.dw), name(c.addend), c.dw_beta));
    const RouterConfig config{.experts = c.experts,
                              .top_k = 3,
                              .score = c.experts % 3 ? Score::kSoftmax : Score::kSigmoid,
                              .aux = AuxLoss::kHf,
                              .aux_coef = 0.1f,
                              .z_coef = 0.01f};
    Problem p(config, c.tokens, c.model, 1, 9, half);
    p.forward();
    p.dw = Tensor(c.dw, {c.experts, c.model});
    Router::fill(p.dw, random_values(c.experts * c.model, 5));
    Router::fill(p.dh, random_values(c.tokens * c.model, 6));
    if (c.addend != none && !c.in_place) {
      p.residual = Tensor(c.addend, {c.tokens, c.model});
      Router::fill(p.residual, random_values(c.tokens * c.model, 7));
    }
    if (c.addend != none) p.addend = c.in_place ? p.dh : p.residual;
    const BackwardExpected expected(p, c);
    const Mirror m = p.mirror(stream);
    const RouterBackwardArgs args = there(m, p.backward_args(c.dw_beta));
    const Graph graph(stream, [&] { router_backward(config, args, stream); });
    Tensor dw, dh;
    for (int run = 0; run < 3; ++run) {
      copy(args.dw_ED, p.dw, stream);
      copy(args.dh_TD, p.dh, stream);
      run == 2 ? graph.launch(stream) : router_backward(config, args, stream);
      if (run == 0) {
        dw = m.back(p.dw);
        dh = m.back(p.dh);
        expected.check_dw(dw);
        expected.check_dh(dh);
      } else {
        EXPECT_TRUE(same_bits(m.back(p.dw), dw)) << "dw, run " << run;
        EXPECT_TRUE(same_bits(m.back(p.dh), dh)) << "dh, run " << run;
      }
    }
    if (HasFailure()) return;
  }
}

// A frozen router: the gradient of h has the same bits.
TEST_F(RouterGpu, RowsDoNotDependOnTheGradientOfWeights) {
  const RouterConfig config{.experts = 40, .top_k = 3};
  Problem p(config, 1000, 136, 1, 9, DType::kBFloat16);
  p.forward();
  p.residual = Tensor(DType::kFloat32, {p.tokens, p.model});
  Router::fill(p.residual, random_values(p.tokens * p.model, 7));
  p.addend = p.residual;
  const Mirror m = p.mirror(stream);
  RouterBackwardArgs args = there(m, p.backward_args(0));
  router_backward(config, args, stream);
  const Tensor dh = m.back(p.dh);
  fill_bytes(args.dh_TD, 0xA5, stream);
  args.dw_ED = {};
  router_backward(config, args, stream);
  EXPECT_TRUE(same_bits(m.back(p.dh), dh));
}

// The guard of a step has to see them.
TEST_F(RouterGpu, WhatIsNotFiniteReachesTheGradientsOfBf16) {
  const RouterConfig config{
      .experts = 16, .top_k = 2, .score = Score::kSigmoid, .renormalize = false};
  for (const float odd : {kNan, kInf, -kInf}) {
    Problem p(config, 70, 24, 1, 3, DType::kBFloat16);
    p.forward();
    p.dweight.data<float>()[33 * config.top_k] = odd;
    const int64_t expert = p.idx.data<int32_t>()[33 * config.top_k];
    const Mirror m = p.mirror(stream);
    router_backward(config, there(m, p.backward_args(0)), stream);
    const Tensor dw = m.back(p.dw), dh = m.back(p.dh);
    for (int64_t i = 0; i < dw.view().numel(); ++i) {
      EXPECT_EQ(std::isfinite(dw.data<float>()[i]), i / p.model != expert) << i;
    }
    for (int64_t i = 0; i < dh.view().numel(); ++i) {
      EXPECT_EQ(std::isfinite(float(dh.data<bf16>()[i])), i / p.model != 33) << i;
    }
  }
}

TEST_F(RouterGpu, NoTokens) {
  const RouterConfig config{.experts = 5, .top_k = 2, .aux = AuxLoss::kSwitch, .aux_coef = 1};
  Problem p(config, 0, 8, 1, 1);
  const Mirror m = p.mirror(stream);
  router_forward(config, there(m, p.forward_args()), stream);
  router_losses(config, there(m, p.loss_args()), stream);
  router_backward(config, there(m, p.backward_args(0)), stream);
  p.forward();
  router_losses(config, p.loss_args(), {});
  p.backward();
  expect_equal("count", m, p.count);
  expect_equal("sum", m, p.sum);
  expect_equal("loss", m, p.loss);
  expect_equal("dw", m, p.dw);
}

TEST_F(RouterGpu, BiasOfAnyNumberOfExperts) {
  for (const int64_t experts : {1, 3, 256, 1000}) {
    Tensor bias(DType::kFloat32, {experts}), count(DType::kInt64, {experts});
    Router::fill(bias, random_values(experts, 1));
    for (int64_t e = 0; e < experts; ++e) count.data<int64_t>()[e] = e * 7919 % 13;
    const Mirror m({bias, count}, stream);
    router_update_bias(m(bias), m(count), 0.001f, stream);
    router_update_bias(bias, count, 0.001f, {});
    expect_equal("bias", m, bias);
  }
}

TEST_F(RouterGpu, RefusesTensorsOfTheHost) {
  const RouterConfig config{.experts = 5, .top_k = 2};
  Problem p(config, 3, 8, 1, 1);
  const Mirror m = p.mirror(stream);
  RouterForwardArgs f = there(m, p.forward_args());
  f.idx_TK = p.idx;
  EXPECT_NE(error_of([&] { router_forward(config, f, stream); }).find("idx_TK"), std::string::npos);
  RouterBackwardArgs b = there(m, p.backward_args(0));
  b.scope = p.scope;
  EXPECT_NE(error_of([&] { router_backward(config, b, stream); }).find("scope"), std::string::npos);
  RouterLossArgs l = there(m, p.loss_args());
  l.loss_2 = p.loss;
  EXPECT_NE(error_of([&] { router_losses(config, l, stream); }).find("loss_2"), std::string::npos);
}

}  // namespace
}  // namespace moiety::moe
