// The MoE layer on a GPU: experts that read rows through maps give the bits of rows that are copied,
// on the kernels of every GPU and, where there are any, on Hopper's, whichever product reads a copy.
#include "moiety/moe/moe_layer.h"

#include <map>
#include <optional>
#include <span>
#include <string>

#include "moiety/base/copy.h"
#include "moiety/base/graph.h"
#include "moiety/comm/thread_group.h"
#include "tests/support/bits.h"
#include "tests/support/gpu_test.h"
#include "tests/support/tensors.h"

namespace moiety::moe {
namespace {

struct Sizes {
  const char* name;
  int64_t tokens, model, ffn, experts, top_k;
};
// ffn below and above the sizes at which Hopper's products read copies, and one that has no
// alignment for them.
constexpr Sizes kSizes[] = {{"few columns", 300, 64, 40, 6, 2},
                            {"h is copied", 200, 128, 1152, 4, 2},
                            {"all read copies", 150, 72, 2080, 3, 2},
                            {"every GPU's kernels", 130, 60, 28, 5, 3}};

struct Options {
  bool recompute = false, delay = false;
  bool addend = true;  // to the gradient of h
  int64_t capacity = -1;
  std::optional<QuantSpec> dispatch = {};
  const gemm::Recipe* recipe = nullptr;
  std::optional<gemm::MlpPath> path = {};
  bool own = false;  // the layer has its own rows of gradients
  std::optional<RowCopies> copies = {};
};

class LayerOnGpu : public GpuTest {
 protected:
  Tensor upload(const Tensor& host) {
    Tensor out(host.view().dtype(), host.view().sizes(), kGpu);
    copy(out, host, stream);
    stream.synchronize();
    return out;
  }

  // What two steps that add up store, by name.
  std::map<std::string, std::string> steps(const Sizes& s, DType dtype, RowLayout layout,
                                           const Options& o, bool captured = false) {
    std::map<std::string, std::string> result;
    comm::run_thread_ranks(1, {}, [&](comm::Communicator& world) {
      const MoeConfig config{.dtype = dtype,
                             .model = s.model,
                             .ffn = s.ffn,
                             .router = {.experts = s.experts,
                                        .top_k = s.top_k,
                                        .aux = AuxLoss::kSwitch,
                                        .aux_coef = 0.01f},
                             .path = o.path,
                             .overflow = OverflowPolicy::kDrop,
                             .alignment = 8,
                             .layout = layout,
                             .copies = o.copies};
      EpGroup group = EpGroup::create(world, ExpertMap(static_cast<int>(s.experts), 1),
                                      moe_limits(config, s.tokens), {.device = kGpu});
      MoeLayer layer(config, group);
      layer.set_dispatch(o.dispatch);
      const auto values = [&](std::initializer_list<int64_t> sizes, uint32_t seed) {
        return upload(normal_tensor(dtype, sizes, seed));
      };
      const auto empty = [&](DType type, std::initializer_list<int64_t> sizes) {
        return Tensor(type, sizes, kGpu);
      };
      const DType single = DType::kFloat32;
      const int64_t hidden = config.activation.hidden(s.ffn);
      const Tensor h = values({s.tokens, s.model}, 1), dout = values({s.tokens, s.model}, 2),
                   router = values({s.experts, s.model}, 3),
                   w1 = values({s.experts, hidden, s.model}, 4),
                   w2 = values({s.experts, s.model, s.ffn}, 5), b1 = values({s.experts, hidden}, 6),
                   b2 = values({s.experts, s.model}, 7),
                   addend = upload(normal_tensor(single, {s.tokens, s.model}, 8)),
                   out = empty(dtype, {s.tokens, s.model}), dh = empty(dtype, {s.tokens, s.model}),
                   d_router = empty(single, {s.experts, s.model}),
                   dw1 = empty(single, {s.experts, hidden, s.model}),
                   dw2 = empty(single, {s.experts, s.model, s.ffn}),
                   db1 = empty(single, {s.experts, hidden}),
                   db2 = empty(single, {s.experts, s.model}),
                   count = empty(DType::kInt64, {1, s.experts + 1}),
                   sum = empty(DType::kFloat64, {1, s.experts + 1});
      const Tensor scope_host(DType::kInt64, {2});
      std::fill_n(scope_host.data<int64_t>(), 2, s.tokens);
      const Tensor scope = upload(scope_host);
      MoeWeights weights{.router_ED = router,
                         .router_bias_E = {},
                         .w1 = w1.view(),
                         .w2 = w2.view(),
                         .b1_LH = b1,
                         .b2_LD = b2};
      if (o.recipe) {
        weights.quantized_1 = {o.recipe, {{}, w1}};
        weights.quantized_2 = {o.recipe, {{}, w2}};
      }
      const int64_t capacity = o.capacity >= 0 ? o.capacity
                                               : worst_capacity(1, s.tokens, int(s.top_k),
                                                                int(s.experts), config.alignment);
      Arena arena("test", kGpu);
      const auto step = [&](float beta) {
        const ArenaScope all(arena);
        MoeSaved saved;
        layer.forward({.weights = weights,
                       .h_TD = h,
                       .mask_T = {},
                       .addend = addend,
                       .capacity = capacity,
                       .out_TD = out,
                       .stats = {count, sum},
                       .info = {},
                       .recompute = o.recompute},
                      &saved, arena, stream);
        MoeRows rows;
        if (o.recompute) {
          rows = layer.make_rows(capacity, arena);
          layer.rows_again(weights, h, saved, rows, nullptr, arena, stream);
        }
        const gemm::GroupScalar scalar{beta, {}};
        const gemm::GradTarget to_w1{dw1.view(), scalar}, to_w2{dw2.view(), scalar}, none;
        MoeGradientRows gradient;
        if (!o.own) {
          gradient = layer.make_gradient_rows(capacity, arena);
          layer.receive_gradient(saved, dout, gradient, nullptr, stream);
        } else if (o.delay) {
          gradient.inner_CF = arena.tensor(dtype, {capacity, s.ffn});
        }
        layer.backward({.weights = weights,
                        .grads = {.router_ED = d_router,
                                  .router_beta = beta,
                                  .w1 = o.delay ? none : to_w1,
                                  .w2 = o.delay ? none : to_w2,
                                  .b1_LH = db1,
                                  .b2_LD = db2,
                                  .bias_beta = scalar},
                        .h_TD = h,
                        .dout_TD = dout,
                        .addend = o.addend ? addend.view() : TensorView(),
                        .count = count,
                        .scope = scope,
                        .dh_TD = dh,
                        .rows = rows,
                        .gradient = gradient},
                       saved, arena, stream);
        if (!o.delay) return;
        layer.backward_weights({.weights = weights,
                                .w1 = to_w1,
                                .w2 = to_w2,
                                .rows = rows,
                                .gradient = gradient,
                                .h_TD = h,
                                .dout_TD = dout},
                               saved, arena, stream);
      };
      step(0);
      if (captured) {
        stream.synchronize();
        arena.settle();
        const Graph graph(stream, [&] { step(1); });
        graph.launch(stream);
      } else {
        step(1);
      }
      for (const auto& [what, x] :
           {std::pair{"out", &out}, std::pair{"dh", &dh}, std::pair{"d_router", &d_router},
            std::pair{"dw1", &dw1}, std::pair{"dw2", &dw2}, std::pair{"db1", &db1},
            std::pair{"db2", &db2}, std::pair{"count", &count}}) {
        result[what] = bytes_of(to_host(*x, stream));
      }
      group.close();
    });
    return result;
  }

  void expect_same_bits(const Sizes& s, DType dtype, const Options& o) {
    const auto copies = steps(s, dtype, RowLayout::kExpert, o),
               maps = steps(s, dtype, RowLayout::kRank, o);
    for (const auto& [what, bytes] : copies) {
      EXPECT_TRUE(maps.at(what) == bytes) << s.name << ", " << name(dtype) << ": " << what;
    }
  }
};

TEST_F(LayerOnGpu, RowsReadThroughMapsGiveTheBitsOfCopies) {
  for (const Sizes& s : kSizes) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
      for (const Options& o : std::initializer_list<Options>{{},
                                                             {.recompute = true},
                                                             {.delay = true},
                                                             {.recompute = true, .delay = true},
                                                             {.capacity = s.tokens},
                                                             {.capacity = 0}}) {
        SCOPED_TRACE(text("recompute {}, delay {}, capacity {}", o.recompute, o.delay, o.capacity));
        expect_same_bits(s, dtype, o);
      }
    }
  }
}

// Without an addend Hopper sums rows beside the router's products, up to 128 experts and 8 choices.
TEST_F(LayerOnGpu, RowsSummedBesideTheRouterHaveTheBitsOfSums) {
  for (const Sizes& s : {Sizes{"128 experts", 700, 264, 64, 100, 8},
                         {"64 experts", 1000, 128, 40, 64, 4},
                         {"few", 1, 8, 16, 3, 3},
                         {"many slices", 5000, 520, 32, 20, 1},
                         {"too many choices", 200, 128, 40, 64, 9},
                         {"no alignment", 130, 60, 28, 5, 3}}) {
    for (const Options& o : std::initializer_list<Options>{
             {.addend = false}, {.delay = true, .addend = false, .capacity = s.tokens}}) {
      SCOPED_TRACE(text("delay {}, capacity {}", o.delay, o.capacity));
      expect_same_bits(s, DType::kBFloat16, o);
    }
    const auto eager = steps(s, DType::kBFloat16, RowLayout::kRank, {.addend = false}),
               replayed = steps(s, DType::kBFloat16, RowLayout::kRank, {.addend = false}, true);
    for (const auto& [what, bytes] : eager) EXPECT_TRUE(replayed.at(what) == bytes) << what;
  }
}

// Then FC2's input lies where the gradient of rows will, and FC2's weight gradient comes first.
TEST_F(LayerOnGpu, RowsOfGradientsOfItsOwnGiveTheSameBits) {
  for (const Sizes& s : kSizes) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
      const auto given = steps(s, dtype, RowLayout::kRank, {.addend = false});
      for (const Options& o : std::initializer_list<Options>{
               {.addend = false, .own = true},
               {.recompute = true, .addend = false, .own = true},
               {.delay = true, .addend = false, .own = true},
               {.addend = false, .own = true, .copies = RowCopies{true, false, true}},
               {.addend = false, .own = true, .copies = RowCopies{true, true, true}}}) {
        const auto own = steps(s, dtype, RowLayout::kRank, o, !o.recompute);
        for (const auto& [what, bytes] : given) {
          EXPECT_TRUE(own.at(what) == bytes) << s.name << ", " << name(dtype) << ": " << what;
        }
      }
    }
  }
}

TEST_F(LayerOnGpu, QuantizedRowsReadThroughMapsGiveTheBitsOfCopies) {
  QuantSpec exact = QuantSpec::of(Format::kFp8Block1x128),
            tiles = QuantSpec::of(Format::kFp8Block128x128);
  exact.pow2_scales = tiles.pow2_scales = false;
  const QuantSpec mxfp8 = QuantSpec::of(Format::kMxfp8), nvfp4 = QuantSpec::of(Format::kNvfp4);
  const Sizes& s = kSizes[1];
  for (const auto& [weight, input] :
       {std::pair{tiles, exact}, std::pair{mxfp8, mxfp8}, std::pair{nvfp4, nvfp4}}) {
    const gemm::Recipe recipe{weight, input, input};
    for (const std::optional<QuantSpec>& dispatch :
         {std::optional<QuantSpec>{}, std::optional(exact), std::optional(mxfp8)}) {
      SCOPED_TRACE(text("{}, rows as {}", name(input.format),
                        dispatch ? name(dispatch->format) : "bfloat16"));
      expect_same_bits(s, DType::kBFloat16, {.dispatch = dispatch, .recipe = &recipe});
      expect_same_bits(s, DType::kBFloat16,
                       {.recompute = true, .delay = true, .dispatch = dispatch, .recipe = &recipe});
    }
  }
  expect_same_bits(s, DType::kBFloat16, {.dispatch = mxfp8});
}

TEST_F(LayerOnGpu, FusedExpertsGiveTheBitsOfSeparateSteps) {
  if (gpu_properties(0).major != 9) GTEST_SKIP() << gpu_properties(0).name << " is no Hopper";
  for (const Sizes& s : std::span(kSizes).first(3)) {
    for (const RowLayout layout : {RowLayout::kExpert, RowLayout::kRank}) {
      const auto apart = steps(s, DType::kBFloat16, layout, {.path = gemm::MlpPath::kSm90}),
                 fused = steps(s, DType::kBFloat16, layout, {.path = gemm::MlpPath::kSm90Fused});
      for (const auto& [what, bytes] : apart) {
        EXPECT_TRUE(fused.at(what) == bytes) << s.name << ", " << name(layout) << ": " << what;
      }
    }
  }
}

TEST_F(LayerOnGpu, ACapturedStepHasTheSameBits) {
  for (const Sizes& s : kSizes) {
    const auto eager = steps(s, DType::kBFloat16, RowLayout::kRank, {}),
               replayed = steps(s, DType::kBFloat16, RowLayout::kRank, {}, true);
    for (const auto& [what, bytes] : eager) EXPECT_TRUE(replayed.at(what) == bytes) << what;
  }
}

}  // namespace
}  // namespace moiety::moe
