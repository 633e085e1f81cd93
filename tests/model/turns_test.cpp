// Micro-batches that take turns (ep.overlap = micro_batch): the bits of one after the other, and an
// order in which the one computes while the other's rows are under way.
#include <algorithm>

#include "moiety/base/trace.h"
#include "moiety/model/precision.h"
#include "tests/model/harness.h"
#include "tests/model/model_cases.h"
#include "tests/support/error_of.h"

namespace moiety::model {
namespace {

constexpr int kBatches = 3;

struct Case {
  ModelCase c;
  DType storage = DType::kBFloat16;
  std::optional<RecipeKind> recipe = {};
  moe::EpOptions ep = {};
};

// The batches of a rank, with the random numbers of their place in the run.
struct Batches {
  Batches(const Case& run, int rank) {
    for (int m = 0; m < kBatches; ++m) {
      test.emplace_back(run.c.config, run.c.sequences, run.c.seq_len, run.c.documents,
                        unsigned(5 + rank + 10 * m));
      batch.push_back(test.back().batch);
      batch.back().micro_step = uint64_t(m);
    }
  }
  std::vector<TestBatch> test;
  std::vector<Batch> batch;
};

struct Turns {
  explicit Turns(const Case& run, comm::Communicator& world, const Config& config)
      : batches(run, world.rank()),
        h(config, run.storage, world, batches.test[0].naive.tokens(), nullptr, nullptr, run.ep) {
    for (const Transformer::State& s : h.model->states()) {
      s.view.data<float>()[0] = static_cast<float>(run.c.bias);
    }
    if (!run.recipe) return;
    Precision precision;
    precision.recipe = make_recipe(*run.recipe);
    precision.seed = 17;
    if (!is_tensor_scaled(precision.recipe->input.format)) {
      precision.dispatch = precision.recipe->input;
    }
    h.model->set_precision(precision);
  }

  // Losses, counts and gradients of a step over all batches, as bytes.
  std::string step() {
    const StepSums sums = h.model->make_sums();
    const ArenaScope mine(h.arena), others(other);
    Arena* const arenas[] = {&h.arena, &other};
    h.model->forward(batches.batch[0], h.capacity, sums, h.arena, {});
    for (int m = 1; m < kBatches; ++m) {
      h.model->backward_and_forward(batches.batch[m - 1], batches.batch[m], h.capacity, sums,
                                    *arenas[m % 2], {});
    }
    h.model->backward(batches.batch[kBatches - 1], {});
    const StepStats stats = sums.read();
    std::string bits;
    for (const double sum : {stats.loss_sum, stats.aux_sum, stats.z_sum}) {
      bits.append(reinterpret_cast<const char*>(&sum), sizeof(sum));
    }
    for (const MoeLayerStats& layer : stats.moe) {
      for (const int64_t pairs : layer.expert_pairs) bits += text("{} ", pairs);
      bits += text("{} {} ", layer.required, layer.dropped);
    }
    for (const optim::Parameter& p : h.parameters) {
      bits.append(static_cast<const char*>(p.grad.raw()), size_t(p.grad.bytes()));
    }
    return bits;
  }

  Batches batches;
  ModelHarness h;
  Arena other{"other"};
};

std::vector<std::string> bits_of(const Case& run, const Config& config) {
  std::vector<std::string> bits(2);
  on_ranks(2, [&](comm::Communicator& world) {
    Turns turns(run, world, config);
    EXPECT_EQ(turns.h.model->takes_turns(), config.overlap == moe::Overlap::kMicroBatch);
    bits[size_t(world.rank())] = turns.step();
  });
  return bits;
}

void expect_same_bits(const Case& run) {
  Config config = run.c.config;
  const std::vector<std::string> expected = bits_of(run, config);
  config.overlap = moe::Overlap::kMicroBatch;
  for (const Recompute recompute : {Recompute::kNone, Recompute::kMoe, Recompute::kFull}) {
    for (const bool delayed : {false, true}) {
      config.recompute = recompute;
      config.delay_wgrad = delayed;
      EXPECT_TRUE(bits_of(run, config) == expected)
          << run.c.name << ", recompute " << int(recompute) << (delayed ? ", delayed" : "");
    }
  }
}

TEST(Turns, AreTheSameBits) {
  for (const ModelCase& c : model_cases()) {
    if (c.config.moe_layers() > 0 && c.config.router.experts % 2 == 0) expect_same_bits({c});
  }
}

ModelCase all_kinds_of_layers() {
  return model_case("all_kinds", [](Config& c) {
    take_all_kinds_of_layers(c);
    take_gpt_oss_experts(c);
    c.aux_scope = AuxScope::kMicroBatch;
    c.tie_embeddings = true;
  });
}

TEST(Turns, OfRecipesAreTheSameBits) {
  for (const RecipeKind kind : {RecipeKind::kFp8Block, RecipeKind::kNvfp4}) {
    expect_same_bits({all_kinds_of_layers(), DType::kBFloat16, kind});
  }
}

TEST(Turns, OverCollectivesAreTheSameBits) {
  expect_same_bits(
      {all_kinds_of_layers(), DType::kFloat32, {}, {.transport = moe::EpTransport::kCollectives}});
}

TEST(Turns, WithFrozenLayersAreTheSameBits) {
  Case run{all_kinds_of_layers()};
  run.c.config.freeze = {"embed*", "layers.0.*", "layers.2.moe.experts.*"};
  run.c.config.tie_embeddings = false;
  expect_same_bits(run);
}

std::vector<std::string> spans_of_turn(moe::Overlap overlap) {
  Case run{model_case("two_layers", [](Config&) {})};
  run.c.config.overlap = overlap;
  std::vector<std::string> names;
  on_ranks(2, [&](comm::Communicator& world) {
    Turns turns(run, world, run.c.config);
    const StepSums sums = turns.h.model->make_sums();
    const std::vector<Batch>& b = turns.batches.batch;
    turns.h.model->forward(b[0], turns.h.capacity, sums, turns.h.arena, {});
    Trace trace;
    if (world.rank() == 0) set_current_trace(&trace);
    turns.h.model->backward_and_forward(b[0], b[1], turns.h.capacity, sums, turns.other, {});
    set_current_trace(nullptr);
    for (const TraceEvent& e : trace.events) {
      const std::string_view what = e.name;
      const bool exchange = e.lane == TraceLane::kEp && what != "wait";
      const bool computes = what.starts_with("grouped_mlp") || what == "attention";
      if (exchange || computes) names.emplace_back(what);
    }
    turns.h.model->backward(b[1], {});
  });
  return names;
}

// Each exchange runs behind what the other batch has computed since its rows set out.
TEST(Turns, ComputeWhileRowsOfTheOtherBatchAreUnderWay) {
  const std::vector<std::string> spans = spans_of_turn(moe::Overlap::kMicroBatch);
  std::vector<std::string> expected;
  for (int layer = 0; layer < 2; ++layer) {
    // Backward's gradient comes in behind forward's attention, forward's rows behind the experts'
    // backward pass, the gradients go home behind forward's experts, and theirs behind the rest.
    for (const char* name : {"attention", "combine_backward", "grouped_mlp_backward_data",
                             "grouped_mlp_backward_weights", "prepare", "dispatch", "grouped_mlp",
                             "dispatch_backward", "combine"}) {
      expected.emplace_back(name);
    }
  }
  EXPECT_EQ(spans, expected);
  EXPECT_EQ(spans_of_turn(moe::Overlap::kNone).front(), "combine_backward");
}

TEST(Turns, NeedAnArenaEach) {
  const Case run{
      model_case("two_layers", [](Config& c) { c.overlap = moe::Overlap::kMicroBatch; })};
  on_ranks(2, [&](comm::Communicator& world) {
    Turns turns(run, world, run.c.config);
    const StepSums sums = turns.h.model->make_sums();
    const std::vector<Batch>& b = turns.batches.batch;
    ModelHarness& h = turns.h;
    h.model->forward(b[0], h.capacity, sums, h.arena, {});
    EXPECT_EQ(
        error_of([&] { h.model->backward_and_forward(b[0], b[1], h.capacity, sums, h.arena, {}); },
                 ErrorKind::kInvalidArgument),
        "model: two batches on the same arena");
    h.model->backward(b[0], {});
  });
}

}  // namespace
}  // namespace moiety::model
