// A whole layer of experts on one rank, forward and backward: router, plan, experts, sums. Rows of
// both layouts (moe.layout): the value counts the experts' products, `peak_mib` all memory but the
// weights: tensors of tokens, gradients and what the layer takes while it runs, of which `kept_mib`
// lies between forward and backward. Weight gradients have memory from their products on, the last of
// them, if it is that of w2, where the hidden activation lay: as where a framework makes them. On a
// GPU the step is a graph that is replayed; rows `.host` are the time in which the host enqueues it,
// operation by operation.
#include <cmath>
#include <optional>

#include "bench/gemm/bursts.h"
#include "bench/gemm/expert_shapes.h"
#include "moiety/base/gpu.h"
#include "moiety/base/parallel.h"
#include "moiety/comm/thread_group.h"
#include "moiety/moe/moe_layer.h"

namespace moiety::bench {
namespace {

using namespace moe;

constexpr ExpertShape kCpuShapes[] = {{"c8", 2048, 256, 512, 8, 2}, {"c32", 4096, 512, 256, 32, 4}};

// Weight gradients: what they are, and whether they are added to what is there.
struct Gradients {
  DType dtype = kHalf;
  bool added = false;
};

class Layer {
 public:
  Layer(const ExpertShape& shape, RowLayout layout, const std::optional<RowCopies>& copies,
        const Gradients& gradients, comm::Communicator& world, const Stream& stream)
      : s_(shape),
        stream_(stream),
        config_{.dtype = kHalf,
                .model = s_.model,
                .ffn = s_.ffn,
                .router = {.experts = s_.experts, .top_k = s_.topk},
                .overflow = OverflowPolicy::kDrop,
                .layout = layout,
                .copies = copies},
        group_(EpGroup::create(world, ExpertMap(static_cast<int>(s_.experts), 1),
                               moe_limits(config_, s_.tokens), {.device = stream.device()})),
        layer_(config_, group_),
        arena_("layer", stream.device()),
        gradients_(gradients) {
    const auto random = [&](std::initializer_list<int64_t> sizes, float spread) {
      return random_on_gpu(kHalf, sizes, stream, spread);
    };
    const auto empty = [&](DType dtype, std::initializer_list<int64_t> sizes) {
      Tensor t(dtype, sizes, stream.device());
      tensors_ += t.view().bytes();
      return t;
    };
    h_ = random({s_.tokens, s_.model}, 1);
    dout_ = random({s_.tokens, s_.model}, 0.01f);
    tensors_ = 2 * h_.view().bytes();
    router_ = random({s_.experts, s_.model}, 1 / std::sqrt(float(s_.model)));
    w1_ = random({s_.experts, 2 * s_.ffn, s_.model}, 0.02f);
    w2_ = random({s_.experts, s_.model, s_.ffn}, 0.02f);
    out_ = empty(kHalf, {s_.tokens, s_.model});
    count_ = empty(DType::kInt64, {1, s_.experts + 1});
    sum_ = empty(DType::kFloat64, {1, s_.experts + 1});
    scope_ = empty(DType::kInt64, {2});
    const Tensor scope(DType::kInt64, {2});
    std::fill_n(scope.data<int64_t>(), 2, s_.tokens);
    copy(scope_, scope, stream);
    stream.synchronize();
  }

  // Adds half a normal number to all logits of an expert: column 0 of h is 1, that of the router is
  // the number.
  void skew() {
    const Tensor ones(kHalf, {s_.tokens, 1}), numbers(kHalf, {s_.experts, 1}),
        normal = random_tensor(DType::kFloat32, {s_.experts, 1}, 9);
    for (int64_t t = 0; t < s_.tokens; ++t) ones.data<bf16>()[t] = bf16(1);
    for (int64_t e = 0; e < s_.experts; ++e) {
      numbers.data<bf16>()[e] = bf16(0.5f * normal.data<float>()[e]);
    }
    copy(h_.view().slice(1, 0, 1), ones, stream_);
    copy(router_.view().slice(1, 0, 1), numbers, stream_);
    stream_.synchronize();
  }

  void step() {
    const ArenaScope all(arena_);
    const auto make_dw1 = [&] {
      return arena_.tensor(gradients_.dtype, {s_.experts, 2 * s_.ffn, s_.model});
    };
    const auto make_dw2 = [&] {
      return arena_.tensor(gradients_.dtype, {s_.experts, s_.model, s_.ffn});
    };
    const gemm::GroupScalar beta{gradients_.added ? 1.0f : 0.0f, {}};
    gemm::GradTarget w1{{}, beta}, w2{{}, beta};
    // What is added to stays from step to step, since it is always at the same place.
    if (gradients_.added) w1.grad = make_dw1();
    if (gradients_.added) w2.grad = make_dw2();
    const int64_t before = arena_.in_use();
    MoeSaved saved;
    const MoeWeights weights = this->weights();
    layer_.forward({.weights = weights,
                    .h_TD = h_,
                    .mask_T = {},
                    .addend = {},
                    .capacity = s_.rows(),
                    .out_TD = out_,
                    .stats = {count_, sum_},
                    .info = {}},
                   &saved, arena_, stream_);
    kept_ = arena_.in_use() - before;
    // In other layouts the product of the last gradient reads rows that backward makes.
    const bool last = layer_.in_place() && !gradients_.added;
    // That of w2 is the very last where it is larger than the rows that its product reads.
    const bool both = last && s_.experts * s_.model > s_.rows();
    MoeGradientRows rows;
    if (both) {
      w2.grad = behind(saved.rows.hidden_CH);
      rows.inner_CF = arena_.tensor(kHalf, {s_.rows(), s_.ffn});
    } else if (!gradients_.added) {
      w2.grad = make_dw2();
    }
    if (!last && !gradients_.added) w1.grad = make_dw1();
    const TensorView dh = arena_.tensor(kHalf, {s_.tokens, s_.model}),
                     d_router = arena_.tensor(gradients_.dtype, {s_.experts, s_.model});
    layer_.backward({.weights = weights,
                     .grads = {.router_ED = d_router,
                               .w1 = last ? gemm::GradTarget{} : w1,
                               .w2 = both ? gemm::GradTarget{} : w2,
                               .b1_LH = {},
                               .b2_LD = {}},
                     .h_TD = h_,
                     .dout_TD = dout_,
                     .addend = {},
                     .count = count_,
                     .scope = scope_,
                     .dh_TD = dh,
                     .gradient = rows},
                    saved, arena_, stream_);
    if (!last) return;
    const auto make = [&](const gemm::GradTarget& dw1, const gemm::GradTarget& dw2) {
      layer_.backward_weights({.weights = weights,
                               .w1 = dw1,
                               .w2 = dw2,
                               .rows = {},
                               .gradient = rows,
                               .h_TD = h_,
                               .dout_TD = dout_},
                              saved, arena_, stream_);
    };
    make({make_dw1(), beta}, {});
    if (both && whole_) make({}, w2);
  }

  MoeWeights weights() const {
    return {.router_ED = router_,
            .router_bias_E = {},
            .w1 = w1_.view(),
            .w2 = w2_.view(),
            .b1_LH = {},
            .b2_LD = {}};
  }

  // Memory for the gradient of w2 where the hidden activation lies, whose gradient is read for the
  // last time before, and behind it what that is too small by. Before the arena is settled tensors
  // need not lie behind each other; then that gradient is not made.
  TensorView behind(const TensorView& hidden) {
    const int64_t bytes =
        byte_size(gradients_.dtype, s_.experts * s_.model * s_.ffn) - hidden.bytes();
    if (bytes > 0) {
      const auto* more = arena_.tensor(DType::kUInt8, {bytes}).raw();
      whole_ = more == static_cast<std::byte*>(hidden.raw()) + hidden.bytes();
      if (!whole_) return {};
    }
    return {hidden.raw(), gradients_.dtype, {s_.experts, s_.model, s_.ffn}, hidden.device()};
  }

  void run(const std::string& name, const Rates& dense, bool steady) {
    do {  // finds out how much memory it takes
      step();
      stream_.synchronize();
    } while (arena_.settle());
    MOIETY_CHECK(whole_, "moe_layer_bench: no memory for the gradient of w2 behind its place");
    const bool gpu = stream_.device().type == DeviceType::kCuda;
    Burst burst;
    if (gpu) {
      const Graph graph(stream_, [&] { step(); });
      burst = bursts([&] { graph.launch(stream_); }, steady, stream_);
    } else {
      burst.from_rest = measure([&](int64_t) { step(); });
    }
    const double flop = 18.0 * double(s_.rows()) * double(s_.model * s_.ffn);
    Row row{name, s_.name, tera(flop, burst.from_rest.ms), "TFLOP/s", burst.from_rest};
    row.device = stream_.device();
    row.more = text(R"("layout": "{}", "experts": "{}", "kept_mib": {:.0f}, "peak_mib": {:.0f})",
                    moe::name(layer_.layout()), layer_.path().describe(), double(kept_) / 0x1p20,
                    double(arena_.peak() + tensors_) / 0x1p20);
    if (gradients_.dtype != kHalf || gradients_.added) {
      row.more += text(R"(, "gradient": "{}{}")", moiety::name(gradients_.dtype),
                       gradients_.added ? ", added" : "");
    }
    if (gpu) {
      row.more += text(R"(, "dense": {:.1f}, "share": {:.3f}, "least_ms": {:.3f})", dense.from_rest,
                       row.value / dense.from_rest, burst.from_rest.least);
    }
    if (gpu && steady) row.more += steady_fields(burst, flop, dense);
    print(row);
    if (gpu) {
      const Timing host = host_time([&] { step(); }, 16, stream_);
      Row eager{text("{}.host", name), s_.name, host.ms * 1e3, "us", host};
      eager.device = stream_.device();
      print(eager);
    }
    group_.close();
  }

 private:
  ExpertShape s_;
  Stream stream_;
  MoeConfig config_;
  EpGroup group_;
  MoeLayer layer_;
  Arena arena_;
  Gradients gradients_;
  int64_t tensors_ = 0, kept_ = 0;  // bytes
  bool whole_ = true;               // all gradients are made
  Tensor h_, dout_, router_, w1_, w2_, out_, count_, sum_, scope_;
};

void run(Options& options) {
  std::string device = "cpu", shape, layout, gradient = "bf16", copied;
  int threads = core_count();
  bool steady = false, skewed = false, added = false;
  std::vector<std::string> shapes = expert_shape_names();
  for (const ExpertShape& s : kCpuShapes) shapes.push_back(s.name);
  options.choice("--device", device, {"cpu", "cuda"}, "where")
      .choice("--shape", shape, shapes, "one alone; else all of the device")
      .choice("--layout", layout, {"expert", "rank"}, "one alone; else both")
      .word("--copies", copied,
            "products that read copies of rows, f forward, g gradients of rows, w those of "
            "weights, such as fw, or -; without it what the layer chooses")
      .choice("--gradient", gradient, {"bf16", "fp32"}, "type of weight gradients")
      .flag("--added", added, "weight gradients are added to what is there, else overwritten")
      .number("--threads", threads, "of a CPU")
      .flag("--steady", steady, "on a GPU: also bursts of a second")
      .flag("--skewed", skewed, "also with half a normal number added to the logits of an expert");
  if (!options.parse()) return;
  const bool gpu = device == "cuda";
  const Gradients gradients{gradient == "bf16" ? kHalf : DType::kFloat32, added};
  std::optional<RowCopies> copies;
  if (!copied.empty()) {
    const auto has = [&](char c) { return copied.find(c) != std::string::npos; };
    copies = RowCopies{.forward = has('f'), .gradient = has('g'), .weight_gradient = has('w')};
  }
  if (gpu) require_device("moe_layer_bench", kGpu);
  comm::run_thread_ranks(1, {}, [&](comm::Communicator& world) {
    set_thread_budget(threads);
    const Stream stream = gpu ? Stream::on(kGpu) : Stream();
    const Rates dense = gpu ? dense_rates(steady, stream) : Rates{};
    const auto run_shape = [&](const ExpertShape& s) {
      if (!shape.empty() && shape != s.name) return;
      for (const auto& [name, wanted] : {std::pair{"moe_layer", RowLayout::kRank},
                                         std::pair{"moe_layer.copies", RowLayout::kExpert}}) {
        if (!layout.empty() && layout != moe::name(wanted)) continue;
        for (const bool hot : {false, true}) {
          if (hot && !skewed) continue;
          Layer layer(s, wanted, copies, gradients, world, stream);
          if (hot) layer.skew();
          layer.run(hot ? text("{}.skewed", name) : std::string(name), dense, steady);
        }
      }
    };
    if (gpu) {
      for (const ExpertShape& s : kExpertShapes) run_shape(s);
    } else {
      for (const ExpertShape& s : kCpuShapes) run_shape(s);
    }
  });
}

}  // namespace
}  // namespace moiety::bench

int main(int argc, char** argv) {
  return moiety::bench::run_main(argc, argv, "A whole layer of experts, forward and backward.",
                                 moiety::bench::run);
}
