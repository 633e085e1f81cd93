// A layer over all tokens and experts, its dense computation in double, and a rank's share of it
// with the layer on it.
#pragma once

#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "moiety/comm/thread_group.h"
#include "moiety/moe/moe_layer.h"
#include "tests/moe/router_helpers.h"

namespace moiety::moe::whole_layer {

using Values = std::vector<double>;

// The layer over all tokens and all experts; values are those that the dtype stores.
struct Problem {
  MoeConfig config;
  int64_t tokens = 0;
  Values h, dout, router, router_bias, w1, w2, b1, b2, addend, dh_addend;
  std::vector<uint8_t> mask;
  int64_t experts() const { return config.router.experts; }
};

// The results of a forward and a backward pass, over all tokens and experts.
struct Result {
  Values out, dh, d_router, dw1, dw2, db1, db2;
};

inline Values stored(DType dtype, Values v) {
  if (dtype == DType::kBFloat16) {
    for (double& x : v) x = static_cast<float>(bf16(static_cast<float>(x)));
  } else {
    for (double& x : v) x = static_cast<float>(x);
  }
  return v;
}

inline Problem make_problem(const MoeConfig& config, int64_t tokens) {
  const int64_t d = config.model, f = config.ffn, e = config.router.experts;
  const auto values = [&](int64_t n, uint32_t seed, double spread) {
    return stored(config.dtype, random_values(n, seed, spread));
  };
  return {.config = config,
          .tokens = tokens,
          .h = values(tokens * d, 1, 1),
          .dout = values(tokens * d, 2, 1),
          .router = values(e * d, 3, 0.3),
          .router_bias = {},
          .w1 = values(e * 2 * f * d, 4, 0.3),
          .w2 = values(e * d * f, 5, 0.3),
          .b1 = {},
          .b2 = {},
          .addend = {},
          .dh_addend = {},
          .mask = std::vector<uint8_t>(tokens, 1)};
}

inline MoeConfig small_config(DType dtype, Reduction reduction) {
  MoeConfig config;
  config.dtype = dtype;
  config.model = 16;
  config.ffn = 8;
  config.reduction = reduction;
  config.router = {.experts = 6,
                   .top_k = 2,
                   .scale = 1.5f,
                   .aux = AuxLoss::kSwitch,
                   .aux_coef = 0.05f,
                   .z_coef = 0.01f};
  return config;
}

// ---- The dense computation: loops over tokens, choices, columns.

// One pair (token, choice): SwiGLU expert e with weight w, forward and backward.
struct Pair {
  const Problem& p;
  int64_t t, e;
  double w;
  Values a, b, y;  // [F]

  Pair(const Problem& problem, int64_t token, int64_t expert, double weight)
      : p(problem), t(token), e(expert), w(weight) {
    const int64_t f = p.config.ffn;
    for (int64_t i = 0; i < f; ++i) {
      a.push_back(hidden(i));
      b.push_back(hidden(f + i));
      y.push_back(a[i] * sigmoid(a[i]) * b[i]);
    }
  }
  const double* w1(int64_t row) const {
    return p.w1.data() + (e * 2 * p.config.ffn + row) * p.config.model;
  }
  const double* w2(int64_t row) const {
    return p.w2.data() + (e * p.config.model + row) * p.config.ffn;
  }
  double hidden(int64_t row) const {
    double v = p.b1.empty() ? 0 : p.b1[e * 2 * p.config.ffn + row];
    for (int64_t d = 0; d < p.config.model; ++d) {
      v += w1(row)[d] * p.h[t * p.config.model + d];
    }
    return v;
  }
  void add_output(Values& out) const {
    for (int64_t d = 0; d < p.config.model; ++d) {
      double v = p.b2.empty() ? 0 : p.b2[e * p.config.model + d];
      for (int64_t i = 0; i < p.config.ffn; ++i) v += w2(d)[i] * y[i];
      out[t * p.config.model + d] += w * v;
    }
  }
  // Adds to the gradients; returns that of the weight.
  double add_gradients(Result& r) const {
    const int64_t model = p.config.model, ffn = p.config.ffn;
    const double* dout = p.dout.data() + t * model;
    double dweight = 0;
    for (int64_t d = 0; d < model; ++d) {
      r.db2[e * model + d] += w * dout[d];
      if (!p.b2.empty()) dweight += dout[d] * p.b2[e * model + d];
    }
    for (int64_t i = 0; i < ffn; ++i) {
      double dy = 0;
      for (int64_t d = 0; d < model; ++d) {
        dy += dout[d] * w2(d)[i];
        r.dw2[(e * model + d) * ffn + i] += dout[d] * w * y[i];
      }
      dweight += dy * y[i];
      const double s = sigmoid(a[i]);
      add_hidden_gradient(r, i, dy * w * b[i] * s * (1 + a[i] * (1 - s)));
      add_hidden_gradient(r, ffn + i, dy * w * a[i] * s);
    }
    return dweight;
  }
  void add_hidden_gradient(Result& r, int64_t row, double g) const {
    const int64_t model = p.config.model, at = e * 2 * p.config.ffn + row;
    r.db1[at] += g;
    for (int64_t d = 0; d < model; ++d) {
      r.dw1[at * model + d] += g * p.h[t * model + d];
      r.dh[t * model + d] += g * w1(row)[d];
    }
  }
};

inline Result expected(const Problem& p) {
  const RouterConfig& router = p.config.router;
  const int64_t experts = p.experts(), model = p.config.model, top_k = router.top_k;
  Values logits(p.tokens * experts);
  for (int64_t i = 0; i < p.tokens * experts; ++i) {
    for (int64_t d = 0; d < model; ++d) {
      logits[i] += p.h[i / experts * model + d] * p.router[i % experts * model + d];
    }
  }
  const Routed<double> r = route(router, logits, 1, p.router_bias, p.mask);
  Result out{.out = p.addend.empty() ? Values(p.h.size()) : p.addend,
             .dh = p.dh_addend.empty() ? Values(p.h.size()) : p.dh_addend,
             .d_router = Values(p.router.size()),
             .dw1 = Values(p.w1.size()),
             .dw2 = Values(p.w2.size()),
             .db1 = Values(experts * 2 * p.config.ffn),
             .db2 = Values(experts * model)};
  Values dweight(r.weight.size()), dlogits(logits.size()), dq(experts);
  for (size_t i = 0; i < r.idx.size(); ++i) {
    if (r.idx[i] < 0) continue;
    const Pair pair(p, i / top_k, r.idx[i], r.weight[i]);
    pair.add_output(out.out);
    dweight[i] = pair.add_gradients(out);
  }
  // There are as many valid targets as tokens: n / N = 1.
  for (int64_t e = 0; e < experts; ++e) {
    dq[e] = router.aux_coef * detail::aux_slope(router, r.count[e], r.count[experts]);
  }
  detail::backward_block<double>(
      {router, logits.data(), r.idx.data(), dweight.data(), dlogits.data()}, 0, p.tokens, dq.data(),
      2 * router.z_coef);
  for (int64_t i = 0; i < p.tokens * experts; ++i) {
    for (int64_t d = 0; d < model; ++d) {
      out.d_router[i % experts * model + d] += dlogits[i] * p.h[i / experts * model + d];
      out.dh[i / experts * model + d] += dlogits[i] * p.router[i % experts * model + d];
    }
  }
  return out;
}

// ---- The layer on ranks that are threads.

struct Layout {
  std::string name;
  std::vector<int64_t> tokens;  // of each rank
};

inline const std::vector<Layout>& layouts() {
  static const std::vector<Layout> all = {{"one rank", {24}},
                                          {"two ranks", {11, 13}},
                                          {"a rank without tokens", {10, 0, 14}},
                                          {"four ranks", {6, 1, 9, 8}}};
  return all;
}

inline Tensor tensor_of(DType dtype, std::initializer_list<int64_t> sizes, const Values& v,
                        int64_t begin = 0) {
  Tensor t(dtype, sizes);
  const int64_t n = t.view().numel();
  Router::fill(t, Values(v.begin() + begin, v.begin() + begin + n));
  return t;
}

// One rank's share of a problem, and one layer on it.
struct Rank {
  const Problem& p;
  MoeConfig config;
  comm::Communicator& world;
  int64_t first, tokens, first_expert, local;
  EpGroup group;
  MoeLayer layer;
  Arena arena{"test", 1 << 16};
  MoeSaved saved;
  const gemm::Recipe* recipe = nullptr;  // optional
  Tensor h, dout, addend, dh_addend, mask, router, router_bias, w1, w2, b1, b2;
  Tensor out, dh, d_router, dw1, dw2, db1, db2, count, sum, scope, info;

  Rank(const Problem& problem, const Layout& layout, comm::Communicator& w)
      : p(problem),
        config(problem.config),
        world(w),
        first(std::accumulate(layout.tokens.begin(), layout.tokens.begin() + w.rank(), int64_t{0})),
        tokens(layout.tokens[w.rank()]),
        group(EpGroup::create(
            w, ExpertMap(static_cast<int>(p.experts()), w.size()),
            moe_limits(config, *std::max_element(layout.tokens.begin(), layout.tokens.end())), {})),
        layer(config, group) {
    const int64_t d = config.model, f = config.ffn;
    local = group.local_experts();
    first_expert = local > 0 ? group.map().experts_of(w.rank())[0] : 0;
    const DType dtype = config.dtype;
    h = tensor_of(dtype, {tokens, d}, p.h, first * d);
    dout = tensor_of(dtype, {tokens, d}, p.dout, first * d);
    if (!p.addend.empty()) addend = tensor_of(DType::kFloat32, {tokens, d}, p.addend, first * d);
    if (!p.dh_addend.empty()) dh_addend = tensor_of(dtype, {tokens, d}, p.dh_addend, first * d);
    mask = Tensor(DType::kUInt8, {tokens});
    std::copy_n(p.mask.begin() + first, tokens, mask.data<uint8_t>());
    router = tensor_of(dtype, {p.experts(), d}, p.router);
    if (!p.router_bias.empty())
      router_bias = tensor_of(DType::kFloat32, {p.experts()}, p.router_bias);
    w1 = tensor_of(dtype, {local, 2 * f, d}, p.w1, first_expert * 2 * f * d);
    w2 = tensor_of(dtype, {local, d, f}, p.w2, first_expert * d * f);
    if (!p.b1.empty()) b1 = tensor_of(dtype, {local, 2 * f}, p.b1, first_expert * 2 * f);
    if (!p.b2.empty()) b2 = tensor_of(dtype, {local, d}, p.b2, first_expert * d);
    out = Tensor(dtype, {tokens, d});
    dh = Tensor(dtype, {tokens, d});
    d_router = Tensor(DType::kFloat32, {p.experts(), d});
    dw1 = Tensor(DType::kFloat32, {local, 2 * f, d});
    dw2 = Tensor(DType::kFloat32, {local, d, f});
    db1 = Tensor(DType::kFloat32, {local, 2 * f});
    db2 = Tensor(DType::kFloat32, {local, d});
    count = Tensor(DType::kInt64, {1, p.experts() + 1});
    sum = Tensor(DType::kFloat64, {1, p.experts() + 1});
    scope = Tensor(DType::kInt64, {2});
    info = Tensor(DType::kInt64, {16});
  }
  int64_t ample() const {
    return worst_capacity(group.ranks(), group.limits().tokens,
                          static_cast<int>(config.router.top_k), static_cast<int>(local),
                          config.alignment);
  }
  MoeWeights weights() const {
    MoeWeights all{.router_ED = router,
                   .router_bias_E = router_bias,
                   .w1 = w1.view(),
                   .w2 = w2.view(),
                   .b1_LH = b1,
                   .b2_LD = b2};
    if (recipe) {
      all.quantized_1 = {recipe, {{}, w1}};
      all.quantized_2 = {recipe, {{}, w2}};
    }
    return all;
  }
  MoeStats forward(int64_t capacity, bool save = true) {
    layer.forward({.weights = weights(),
                   .h_TD = h,
                   .mask_T = mask,
                   .addend = addend,
                   .capacity = capacity,
                   .out_TD = out,
                   .stats = {count, sum},
                   .info = info},
                  save ? &saved : nullptr, arena, {});
    return moe_stats(info);
  }
  // The losses are taken over the tokens of all ranks.
  void backward(float beta = 0) {
    world.all_reduce(count, comm::ReduceOp::kSum, {}).wait();
    std::fill_n(scope.data<int64_t>(), 2, count.data<int64_t>()[p.experts()]);
    const gemm::GroupScalar scalar{beta, {}};
    layer.backward({.weights = weights(),
                    .grads = {.router_ED = d_router,
                              .router_beta = beta,
                              .w1 = {dw1.view(), scalar},
                              .w2 = {dw2.view(), scalar},
                              .b1_LH = b1.view().defined() ? db1.view() : TensorView{},
                              .b2_LD = b2.view().defined() ? db2.view() : TensorView{},
                              .bias_beta = scalar},
                    .h_TD = h,
                    .dout_TD = dout,
                    .addend = dh_addend,
                    .count = count,
                    .scope = scope,
                    .dh_TD = dh},
                   saved, arena, {});
  }
  // Puts this rank's part where it belongs; the router's gradient is summed over the ranks.
  void collect(Result& r) {
    const int64_t d = config.model, f = config.ffn;
    world.all_reduce(d_router, comm::ReduceOp::kSum, {}).wait();
    const auto put = [](Values& to, int64_t at, const TensorView& from) {
      const Values v = Router::read(from);
      std::copy(v.begin(), v.end(), to.begin() + at);
    };
    put(r.out, first * d, out);
    put(r.dh, first * d, dh);
    put(r.dw1, first_expert * 2 * f * d, dw1);
    put(r.dw2, first_expert * d * f, dw2);
    put(r.db1, first_expert * 2 * f, db1);
    put(r.db2, first_expert * d, db2);
    if (world.rank() == 0) put(r.d_router, 0, d_router);
  }
};

inline void on_ranks(const Problem& p, const Layout& layout,
                     const std::function<void(Rank&)>& body) {
  comm::run_thread_ranks(static_cast<int>(layout.tokens.size()), {},
                         [&](comm::Communicator& world) {
                           Rank rank(p, layout, world);
                           body(rank);
                           rank.group.close();
                         });
}

inline Result empty_result(const Problem& p) {
  return {.out = Values(p.h.size()),
          .dh = Values(p.h.size()),
          .d_router = Values(p.router.size()),
          .dw1 = Values(p.w1.size()),
          .dw2 = Values(p.w2.size()),
          .db1 = Values(p.experts() * 2 * p.config.ffn),
          .db2 = Values(p.experts() * p.config.model)};
}

inline Result computed(const Problem& p, const Layout& layout) {
  Result result = empty_result(p);
  on_ranks(p, layout, [&](Rank& rank) {
    const MoeStats stats = rank.forward(rank.ample());
    EXPECT_FALSE(stats.overflow);
    EXPECT_EQ(stats.dropped, 0);
    rank.backward();
    rank.collect(result);
  });
  return result;
}

}  // namespace moiety::moe::whole_layer
