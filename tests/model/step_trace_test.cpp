// The trace of a step that nobody runs, against one that runs: the same calls in the same order,
// with the same work between them.
#include "moiety/model/step_trace.h"

#include <map>

#include "tests/model/harness.h"
#include "tests/model/model_cases.h"

namespace moiety::model {
namespace {

using gtp::Kind;

std::string words(std::span<const gtp::TraceEvent> events,
                  std::span<const gtp::BundleSpec> bundles) {
  std::string out;
  for (const gtp::TraceEvent& e : events) {
    if (!e.same_call) out += std::string("\n") + gtp::name(e.kind);
    if (e.bundle != gtp::kNoBundle) out += " " + bundles[e.bundle].name;
  }
  return out;
}

// Nobody waits for anything: there is one rank.
struct Nobody final : gtp::ParamSource, gtp::GradSink {
  void ensure_ready(gtp::BundleId, const Stream&) override {}
  void on_grad_ready(gtp::WeightId, const Event&) override {}
  void on_grad_late(gtp::WeightId, const Stream&) override {}
};

// The model's weights as an executor of one rank knows them, by parameter.
gtp::Executor make_executor(ModelHarness& h, Nobody& nobody) {
  std::vector<gtp::ShardedWeight> weights;
  std::vector<gtp::Bundle> bundles;
  for (optim::Parameter& p : h.parameters) {
    if (!p.spec.layout) continue;
    p.bundle = static_cast<gtp::BundleId>(bundles.size());
    gtp::Bundle& bundle = bundles.emplace_back(
        gtp::Bundle{.name = p.spec.name, .members = {}, .expert = p.spec.expert});
    const bool several = p.weight.dims() == 3;
    for (int64_t e = 0; e < (several ? p.weight.size(0) : 1); ++e) {
      bundle.members.push_back(static_cast<gtp::WeightId>(weights.size()));
      gtp::ShardedWeight& w = weights.emplace_back();
      w.name = p.spec.name;
      w.layout = *p.spec.layout;
      w.codec = gtp::Codec(p.weight.dtype());
      w.data = several ? p.weight.select(e) : p.weight;
      if (p.trained()) w.main_grad = several ? p.grad.select(e) : p.grad;
    }
  }
  return {std::move(weights), std::move(bundles), {nullptr}, {}, nullptr, nobody, &nobody};
}

class Traced : public testing::TestWithParam<ModelCase> {};
INSTANTIATE_TEST_SUITE_P(Shapes, Traced, testing::ValuesIn(model_cases()),
                         [](const auto& info) { return std::string(info.param.name); });

struct Variant {
  Recompute recompute = Recompute::kNone;
  bool delay_wgrad = false;
  std::vector<std::string> freeze = {};
};
const Variant kVariants[] = {
    {},
    {Recompute::kMoe},
    {Recompute::kFull},
    {Recompute::kNone, true},
    {Recompute::kMoe, true},
    {Recompute::kNone, false, {"embed*", "layers.0.attn*"}},
    {Recompute::kNone, true, {"embed*", "layers.0.*", "*norm*"}},
    {Recompute::kFull, false, {"embed*", "layers.0.*"}},
    {Recompute::kMoe, true, {"*fc1.weight"}},
    {Recompute::kMoe, false, {"*fc2.weight", "*.attn.o.*"}},
    {Recompute::kNone, false, {"embed*", "*norm*", "*.attn.?.weight"}},
    {Recompute::kNone, false, {"embed*", "layers.*"}},
    {Recompute::kNone, false, {"layers.*", "final_norm*"}},
};

TEST_P(Traced, CallsAreThoseOfAStep) {
  const ModelCase& c = GetParam();
  for (const Variant& variant : kVariants) {
    Config config = c.config;
    config.recompute = variant.recompute;
    config.delay_wgrad = variant.delay_wgrad;
    config.freeze = variant.freeze;
    const StepShape shape{.grid = {},
                          .sequences = c.sequences,
                          .seq_len = c.seq_len,
                          .micro_batches = 2,
                          .storage = DType::kFloat32};
    const StepTrace trace = step_trace(config, {}, shape, {});
    gtp::check_trace(trace.events, static_cast<int32_t>(trace.bundles.size()));
    on_ranks(1, [&](comm::Communicator& world) {
      const TestBatch batch(config, c.sequences, c.seq_len, c.documents, 5);
      ModelHarness h(config, DType::kFloat32, world, batch.naive.tokens());
      Nobody nobody;
      gtp::Executor executor = make_executor(h, nobody);
      h.model->bind(h.parameters, &executor);
      const gtp::StepKey key{"train", 2};
      {
        const gtp::StepScope step = executor.begin_step(key, {});
        h.step(batch.batch);
        h.step(batch.batch);
        executor.flush({});
      }
      const std::span<const gtp::TraceEvent> run = executor.trace_of(key);
      ASSERT_EQ(words(trace.events, trace.bundles), words(run, trace.bundles))
          << static_cast<int>(variant.recompute);
      for (size_t i = 0; i < run.size(); ++i) {
        EXPECT_EQ(trace.events[i].work_ns, run[i].work_ns)
            << "event " << i << " of " << words(run.first(i + 1), trace.bundles);
      }
      std::map<std::string, int64_t> elements;
      for (const optim::Parameter& p : h.parameters) {
        elements[p.spec.name] = p.trained() ? p.grad.numel() : 0;
      }
      for (const gtp::BundleSpec& b : trace.bundles) {
        EXPECT_GE(b.reduce.slot, 4 * elements.at(b.name)) << b.name;  // with padding
      }
    });
  }
}

Config large_config() {
  Config c = small_config();
  c.vocab = 1024;
  c.d_model = 512;
  c.heads = 8;
  c.kv_heads = 4;
  c.head_dim = 128;
  c.d_ffn = 256;
  c.router.experts = 8;
  c.layers = 3;
  c.dense_layers = {0};
  c.d_ffn_dense = 1024;
  c.shared_d_ffn = 512;
  return c;
}

double total_work(const StepTrace& trace) {
  double ns = 0;
  for (const gtp::TraceEvent& e : trace.events) ns += e.work_ns;
  return ns;
}

// A memory and links that take no time leave the FLOPs: those of the model, and one product more
// in the backward pass of attention, which forms the scores anew.
TEST(StepTrace, WorkIsTheFlopsOfTheModel) {
  Config c = large_config();
  gtp::Policy policy;
  policy.flops_per_ns = 1;
  policy.memory_bytes_per_ns = policy.bytes_per_ns = 1e30;
  for (const gtp::Grid& grid : {gtp::Grid{},
                                {.tp = 2, .gtp = 2, .dp = 1, .ep = 4},
                                {.tp = 1, .gtp = 4, .dp = 1, .ep = 2, .egtp = 2}}) {
    const StepShape shape{.grid = grid, .sequences = 2, .seq_len = 64, .micro_batches = 3};
    const double tokens = 2 * 64 * 3, scores = tokens * 64 / 2 * 8;  // of a layer
    const double expected = flops_per_token(c, 64) * tokens + 3 * 2 * scores * 128;
    EXPECT_NEAR(total_work(step_trace(c, {}, shape, policy)), expected / grid.tp,
                1e-4 * expected / grid.tp);
  }
}

const gtp::BundleSpec& bundle(const StepTrace& trace, const std::string& name) {
  for (const gtp::BundleSpec& b : trace.bundles) {
    if (b.name == name) return b;
  }
  throw std::out_of_range(name);
}

TEST(StepTrace, BundlesTravelInTheRecipesFormat) {
  const Config c = large_config();
  const StepShape shape{
      .grid = {.tp = 2, .gtp = 2, .dp = 1, .ep = 2, .egtp = 2}, .sequences = 1, .seq_len = 64};
  const auto received = [&](const Precision& precision, const char* name) {
    return bundle(step_trace(c, precision, shape, {}), name).gather_of(gtp::kRowView).received;
  };
  Precision fp8_tensor, mxfp8, nvfp4;
  fp8_tensor.recipe = make_recipe(RecipeKind::kFp8Tensor);
  mxfp8.recipe = make_recipe(RecipeKind::kMxfp8);
  nvfp4.recipe = make_recipe(RecipeKind::kNvfp4);
  nvfp4.kept = {.first = 1, .last = 0};
  // A slice of qkv [2048, 512] over tp is [1024, 512], half of it comes from the peer.
  const int64_t half = 512 * 512, expert_half = 4 * 512 * 512 / 2;
  EXPECT_EQ(received({}, "layers.1.attn.qkv.weight"), 2 * half);
  EXPECT_EQ(received(fp8_tensor, "layers.1.attn.qkv.weight"), half);
  EXPECT_EQ(received(mxfp8, "layers.1.attn.qkv.weight"), half + half / 32);
  EXPECT_EQ(received(nvfp4, "layers.1.attn.qkv.weight"), half / 2 + half / 256);
  EXPECT_EQ(received(nvfp4, "layers.0.attn.qkv.weight"), 2 * half);  // kept in bf16
  EXPECT_EQ(received({}, "layers.1.moe.experts.fc1.weight"), 2 * expert_half);
  EXPECT_EQ(received(mxfp8, "layers.1.moe.experts.fc1.weight"), expert_half + expert_half / 32);
  EXPECT_EQ(received(mxfp8, "embed.weight"), 2 * 256 * 512);  // never quantized
  const StepTrace trace = step_trace(c, mxfp8, shape, {});
  const gtp::BundleSpec& fc2 = bundle(trace, "layers.2.moe.experts.fc2.weight");
  EXPECT_TRUE(fc2.expert && fc2.group == 1 && fc2.group_size == 2 && !fc2.one_payload);
  EXPECT_EQ(fc2.reduce.received, 4 * 4 * 512 * 256 / 2);
  StepShape wide = shape;
  wide.storage = DType::kFloat32;
  EXPECT_EQ(bundle(step_trace(c, {}, wide, {}), "layers.1.attn.o.weight").gather[0].received,
            2 * bundle(step_trace(c, {}, shape, {}), "layers.1.attn.o.weight").gather[0].received);
}

TEST(StepTrace, MakesAPlan) {
  Config c = large_config();
  for (const Recompute mode : {Recompute::kNone, Recompute::kMoe, Recompute::kFull}) {
    c.recompute = mode;
    const StepShape shape{.grid = {.tp = 1, .gtp = 4, .dp = 1, .ep = 2, .egtp = 2},
                          .sequences = 1,
                          .seq_len = 64,
                          .micro_batches = 2};
    const StepTrace trace = step_trace(c, {}, shape, {});
    const gtp::Plan plan = gtp::plan(trace.events, trace.bundles, {});
    EXPECT_EQ(gtp::check_plan(plan, trace.events, trace.bundles, {}), std::nullopt);
    EXPECT_EQ(plan.lanes.size(), 4u);
  }
}

TEST(StepTrace, LayoutsThatDoNotCutTheModelAreNamed) {
  const Config c = large_config();
  const auto message = [&](const gtp::Grid& grid, int64_t seq_len) {
    const StepShape shape{.grid = grid, .sequences = 1, .seq_len = seq_len};
    try {
      step_trace(c, {}, shape, {});
    } catch (const Error& e) {
      return std::string(e.what());
    }
    return std::string();
  };
  EXPECT_NE(message({.tp = 8, .ep = 8}, 64).find("layers.0.attn.qkv.weight"), std::string::npos);
  EXPECT_NE(message({.tp = 2, .ep = 2}, 63).find("tp 2 must divide 63"), std::string::npos);
  EXPECT_NE(message({.gtp = 3, .ep = 3}, 64).find("ep 3 must divide 8"), std::string::npos);
  EXPECT_NE(message({.gtp = 2, .ep = 4}, 64).find("must both be"), std::string::npos);
}

}  // namespace
}  // namespace moiety::model
