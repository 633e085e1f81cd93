// Activation recomputation and delayed weight gradients: the bits of a step do not change, what
// forward leaves does.
#include "moiety/model/precision.h"
#include "tests/model/harness.h"
#include "tests/model/model_cases.h"

namespace moiety::model {
namespace {

struct Mode {
  Recompute recompute = Recompute::kNone;
  bool delay_wgrad = false;
  moe::RowLayout layout = moe::RowLayout::kAuto;  // of one rank
};
constexpr Mode kModes[] = {{Recompute::kMoe},
                           {Recompute::kFull},
                           {Recompute::kNone, true},
                           {Recompute::kMoe, true},
                           {Recompute::kFull, true},
                           {Recompute::kNone, false, moe::RowLayout::kExpert},
                           {Recompute::kMoe, true, moe::RowLayout::kExpert}};

template <class T>
void append(std::string& bits, T value) {
  bits.append(reinterpret_cast<const char*>(&value), sizeof(value));
}

// The result of two micro-batches: losses, counts and gradients, as bytes.
std::string step_bits(ModelHarness& h, const Batch& batch) {
  for (optim::Parameter& p : h.parameters) p.overwrite = true;
  std::string bits;
  for (const uint64_t micro_step : {0, 1}) {
    Batch next = batch;
    next.micro_step = micro_step;
    const StepStats stats = h.step(next);
    for (const double sum : {stats.loss_sum, stats.aux_sum, stats.z_sum}) append(bits, sum);
    append(bits, stats.targets);
    for (const MoeLayerStats& layer : stats.moe) {
      for (const int64_t pairs : layer.expert_pairs) append(bits, pairs);
      append(bits, layer.required);
      append(bits, layer.dropped);
    }
  }
  for (const optim::Parameter& p : h.parameters) {
    bits.append(static_cast<const char*>(p.grad.raw()), p.grad.bytes());
  }
  return bits;
}

struct Case {
  ModelCase c;
  DType storage = DType::kFloat32;
  int ranks = 1;
  std::optional<RecipeKind> recipe = {};
  int64_t capacity = -1;  // -1: of any routing
  moe::EpTransport transport = moe::EpTransport::kAuto;
};

// The results by rank.
std::vector<std::string> run_bits(const Case& run, const Mode& mode) {
  std::vector<std::string> all(run.ranks);
  Config config = run.c.config;
  config.recompute = mode.recompute;
  config.delay_wgrad = mode.delay_wgrad;
  config.row_layout = mode.layout;
  on_ranks(run.ranks, [&](comm::Communicator& world) {
    const TestBatch batch(config, run.c.sequences, run.c.seq_len, run.c.documents,
                          5 + world.rank());
    ModelHarness h(config, run.storage, world, batch.naive.tokens(), nullptr, nullptr,
                   {.transport = run.transport});
    if (run.capacity >= 0) h.capacity = run.capacity;
    for (const Transformer::State& s : h.model->states()) {
      s.view.data<float>()[0] = static_cast<float>(run.c.bias);
    }
    if (run.recipe) {
      Precision precision;
      precision.recipe = make_recipe(*run.recipe);
      precision.seed = 17;
      if (!is_tensor_scaled(precision.recipe->input.format)) {
        precision.dispatch = precision.recipe->input;
      }
      h.model->set_precision(precision);
    }
    all[world.rank()] = step_bits(h, batch.batch);
  });
  return all;
}

void expect_equal_bits(const Case& run) {
  const std::vector<std::string> kept = run_bits(run, {});
  for (const Mode& mode : kModes) {
    EXPECT_TRUE(run_bits(run, mode) == kept)
        << run.c.name << ", " << name(run.storage) << ", mode " << static_cast<int>(mode.recompute)
        << (mode.delay_wgrad ? ", delayed" : "") << ", rows " << moe::name(mode.layout);
  }
}

class Recomputed : public testing::TestWithParam<ModelCase> {};
INSTANTIATE_TEST_SUITE_P(Shapes, Recomputed, testing::ValuesIn(model_cases()),
                         [](const auto& info) { return std::string(info.param.name); });

TEST_P(Recomputed, StepIsBitwiseTheSame) {
  expect_equal_bits({GetParam()});
  expect_equal_bits({GetParam(), DType::kBFloat16});
}

TEST(Recompute, StepOverTwoRanksIsBitwiseTheSame) {
  for (const ModelCase& c : model_cases()) {
    const bool spreads = c.config.moe_layers() > 0 && c.config.router.experts % 2 == 0;
    if (spreads) expect_equal_bits({c, DType::kBFloat16, 2});
  }
}

ModelCase all_kinds_of_layers() {
  return model_case("all_kinds", [](Config& c) {
    c.layers = 3;
    c.dense_layers = {0};
    c.d_ffn_dense = 48;
    c.shared_d_ffn = 16;
    c.shared_gate = true;
    c.tie_embeddings = true;
  });
}

TEST(Recompute, StepOverCollectivesIsBitwiseTheSame) {
  Case run{all_kinds_of_layers(), DType::kBFloat16, 2};
  const std::vector<std::string> mapped = run_bits(run, {Recompute::kFull});
  run.transport = moe::EpTransport::kCollectives;
  expect_equal_bits(run);
  EXPECT_EQ(run_bits(run, {Recompute::kFull}), mapped);
}

TEST(Recompute, RecipesAreBitwiseTheSame) {
  for (const RecipeKind kind :
       {RecipeKind::kFp8Tensor, RecipeKind::kFp8Block, RecipeKind::kMxfp8, RecipeKind::kNvfp4}) {
    for (const int ranks : {1, 2}) {
      expect_equal_bits({all_kinds_of_layers(), DType::kBFloat16, ranks, kind});
    }
  }
}

// Rows that the first routing dropped stay dropped, and are counted once.
TEST(Recompute, DropsAreThoseOfForward) {
  ModelCase c = all_kinds_of_layers();
  c.config.overflow = moe::OverflowPolicy::kDrop;
  const Case run{c, DType::kBFloat16, 2, {}, 20};
  EXPECT_NE(run_bits(run, {}), run_bits({c, DType::kBFloat16, 2}, {}));
  expect_equal_bits(run);
}

TEST(Recompute, EvaluationKeepsNothingAndIsTheSame) {
  Config c = all_kinds_of_layers().config;
  const TestBatch batch(c, 2, 12, false, 1);
  std::vector<double> losses;
  for (const Recompute mode : {Recompute::kNone, Recompute::kMoe, Recompute::kFull}) {
    c.recompute = mode;
    on_ranks(1, [&](comm::Communicator& world) {
      ModelHarness h(c, DType::kBFloat16, world, batch.naive.tokens());
      const StepSums sums = h.model->make_sums();
      h.model->evaluate(batch.batch, h.capacity, sums, h.arena, {});
      EXPECT_EQ(h.arena.in_use(), 0);
      losses.push_back(sums.read().loss_sum);
      EXPECT_EQ(h.step(batch.batch).loss_sum, losses.back());
    });
  }
  EXPECT_EQ(losses, std::vector<double>(3, losses[0]));
}

struct Memory {
  int64_t kept = 0, peak = 0;
};

Memory memory_of(Config config, const Mode& mode, const TestBatch& batch) {
  config.recompute = mode.recompute;
  config.delay_wgrad = mode.delay_wgrad;
  Memory memory;
  on_ranks(1, [&](comm::Communicator& world) {
    ModelHarness h(config, DType::kBFloat16, world, batch.naive.tokens());
    const StepSums sums = h.model->make_sums();
    const ArenaScope activations(h.arena);
    h.model->forward(batch.batch, h.capacity, sums, h.arena, {});
    memory.kept = h.arena.in_use();
    h.model->backward(batch.batch, {});
    memory.peak = h.arena.peak();
  });
  return memory;
}

int64_t aligned(int64_t bytes) { return (bytes + 63) / 64 * 64; }

// A layer more keeps its input and its routing, and nothing else.
TEST(Recompute, FullKeepsInputAndRoutingOfALayer) {
  Config c = small_config();
  const TestBatch batch(c, 2, 64, false, 1);
  const int64_t tokens = 128, topk = c.router.top_k, experts = c.router.experts;
  moe::PrepareArgs args;
  args.idx_TK = TensorView(nullptr, DType::kInt32, {tokens, topk});
  args.capacity = moe::worst_capacity(1, tokens, static_cast<int>(topk), 4, 1);
  const int64_t plan = moe::plan_bytes(moe::ExpertMap(static_cast<int>(experts), 1),
                                       ep_limits(c, DType::kBFloat16, tokens), args);
  const int64_t x = tokens * c.d_model * 2;
  const int64_t routing =
      aligned(plan) + aligned(tokens * experts * 4) + 2 * aligned(tokens * topk * 4);
  // The model's counts of a layer: pairs, sums and info words.
  const auto layer_of = [&](Recompute recompute) {
    c.layers = 6;
    const int64_t six = memory_of(c, {recompute}, batch).kept;
    c.layers = 38;
    return double(memory_of(c, {recompute}, batch).kept - six) / 32;
  };
  const double statistics = 2 * 8.0 * (experts + 1) + 16 * 8;
  EXPECT_NEAR(layer_of(Recompute::kFull), double(aligned(x) + routing) + statistics, 16);
  const int64_t attention = aligned(tokens * c.qkv_size() * 2) +
                            aligned(tokens * c.heads * c.head_size() * 2) +
                            aligned(tokens * c.heads * 4);
  EXPECT_NEAR(layer_of(Recompute::kMoe), double(2 * aligned(x) + attention + routing) + statistics,
              16);
}

TEST(Recompute, ThePeakFalls) {
  for (const int64_t dense : {0, 12}) {
    Config c = all_kinds_of_layers().config;
    c.layers = 12;
    c.dense_layers.clear();
    for (int64_t l = 0; l < dense; ++l) c.dense_layers.push_back(l);
    const TestBatch batch(c, 2, 64, false, 1);
    const int64_t none = memory_of(c, {}, batch).peak,
                  moe = memory_of(c, {Recompute::kMoe}, batch).peak,
                  full = memory_of(c, {Recompute::kFull}, batch).peak;
    if (dense == 0) {
      EXPECT_LT(moe, 0.75 * double(none));
    } else {
      EXPECT_EQ(moe, none);  // no experts
    }
    EXPECT_LT(full, 0.6 * double(moe));
  }
}

// The tensors that one layer leaves for its weight gradients outlive it, whatever the number of
// layers.
TEST(DelayedWeightGradients, TakeTheMemoryOfOneLayer) {
  Config c = small_config();
  const TestBatch batch(c, 2, 64, false, 1);
  const auto more = [&](int64_t layers) {
    c.layers = layers;
    return memory_of(c, {Recompute::kNone, true}, batch).peak - memory_of(c, {}, batch).peak;
  };
  const int64_t two = more(2);
  EXPECT_GE(two, 0);
  EXPECT_EQ(more(9), two);
  // FC2's input, and h and the gradient of out; with copies rows of dy and dx in their place.
  const int64_t inner = c.router.top_k * c.d_ffn;
  EXPECT_LE(two, 128 * (2 * c.d_model + inner) * 2 + 1024);
  c.row_layout = moe::RowLayout::kExpert;
  EXPECT_LE(more(2), 128 * (2 * c.router.top_k * c.d_model + inner) * 2 + 1024);
}

// Sees when the experts' gradients of a layer are stored, and when the gradient of rows comes.
struct OrderOfExperts final : TensorProbe {
  void enter(int64_t l, bool) override { layer = l; }
  void stored(const StoredTensor& t) override {
    const bool weight = t.operation.find("experts.fc") != std::string_view::npos;
    if (t.name == "gradient" && weight) order += " w" + std::to_string(layer);
    if (t.operation == "combine" && t.name == "dy") order += " c" + std::to_string(layer);
    if (t.operation == "dispatch" && t.name == "dh") order += " d" + std::to_string(layer);
  }
  int64_t layer = -1;
  std::string order;
};

TEST(DelayedWeightGradients, RunBehindTheNextLayersFirstExchange) {
  Config c = small_config();
  c.layers = 4;
  c.dense_layers = {1};
  c.d_ffn_dense = 16;
  c.row_layout = moe::RowLayout::kExpert;
  const TestBatch batch(c, 2, 12, false, 1);
  for (const auto& [delay, expected] : {std::pair(false, " c3 d3 w3 w3 c2 d2 w2 w2 c0 d0 w0 w0"),
                                        std::pair(true, " c3 d3 c2 w3 w3 d2 c0 w2 w2 d0 w0 w0")}) {
    c.delay_wgrad = delay;
    on_ranks(1, [&](comm::Communicator& world) {
      ModelHarness h(c, DType::kFloat32, world, batch.naive.tokens());
      OrderOfExperts probe;
      h.model->set_probe(&probe);
      h.step(batch.batch);
      EXPECT_EQ(probe.order, expected);
    });
  }
}

}  // namespace
}  // namespace moiety::model
