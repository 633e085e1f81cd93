// The model's account of itself, and the accumulation of its gradients.

#include "tests/model/harness.h"
#include "tests/model/model_cases.h"
#include "tests/support/error_of.h"

namespace moiety::model {
namespace {

using optim::InitKind;
using optim::ParameterClass;

Config full_config() {
  Config c = small_config();
  c.dense_layers = {0};
  c.d_ffn_dense = 24;
  c.shared_d_ffn = 8;
  c.shared_gate = true;
  c.decay_embeddings = false;
  return c;
}

struct Expected {
  std::vector<int64_t> shape;
  InitKind init;
  float std;
  bool decay;
  ParameterClass kind;
};

TEST(ModelState, LogicalTensorsAreThoseOfTheCheckpoint) {
  Config c = full_config();
  c.expert_bias = true;
  const float std = c.init_std, out = std / std::sqrt(2 * 2.0f);
  using enum ParameterClass;
  std::map<std::string, Expected> expected{
      {"embed.weight", {{40, 32}, InitKind::kNormal, std, false, kEmbedding}},
      {"layers.0.mlp.fc1.weight", {{48, 32}, InitKind::kNormal, std, true, kDense}},
      {"layers.0.mlp.fc2.weight", {{32, 24}, InitKind::kNormal, out, true, kDense}},
      {"layers.1.moe.router.weight", {{4, 32}, InitKind::kNormal, std, true, kRouter}},
      {"layers.1.moe.experts.fc1.weight", {{4, 32, 32}, InitKind::kNormal, std, true, kExpert}},
      {"layers.1.moe.experts.fc2.weight", {{4, 32, 16}, InitKind::kNormal, out, true, kExpert}},
      {"layers.1.moe.experts.fc1.bias", {{4, 32}, InitKind::kZeros, 0, false, kExpert}},
      {"layers.1.moe.experts.fc2.bias", {{4, 32}, InitKind::kZeros, 0, false, kExpert}},
      {"layers.1.moe.shared.fc1.weight", {{16, 32}, InitKind::kNormal, std, true, kDense}},
      {"layers.1.moe.shared.fc2.weight", {{32, 8}, InitKind::kNormal, out, true, kDense}},
      {"layers.1.moe.shared.gate.weight", {{1, 32}, InitKind::kNormal, std, true, kDense}},
      {"final_norm.weight", {{32}, InitKind::kOnes, 0, false, kDense}},
      {"head.weight", {{40, 32}, InitKind::kNormal, std, true, kDense}}};
  for (const std::string l : {"layers.0.", "layers.1."}) {
    expected[l + "attn_norm.weight"] = {{32}, InitKind::kOnes, 0, false, kDense};
    expected[l + "mlp_norm.weight"] = {{32}, InitKind::kOnes, 0, false, kDense};
    expected[l + "attn.q.weight"] = {{32, 32}, InitKind::kNormal, std, true, kDense};
    expected[l + "attn.k.weight"] = {{16, 32}, InitKind::kNormal, std, true, kDense};
    expected[l + "attn.v.weight"] = {{16, 32}, InitKind::kNormal, std, true, kDense};
    expected[l + "attn.o.weight"] = {{32, 32}, InitKind::kNormal, out, true, kDense};
    expected[l + "attn.q_norm.weight"] = {{8}, InitKind::kOnes, 0, false, kDense};
    expected[l + "attn.k_norm.weight"] = {{8}, InitKind::kOnes, 0, false, kDense};
  }
  on_ranks(1, [&](comm::Communicator& world) {
    const ModelHarness h(c, DType::kFloat32, world, 4);
    int64_t numbers = 0;
    for (const optim::ParamSpec& spec : h.model->parameter_specs()) {
      numbers += spec.numel();
      EXPECT_EQ(spec.expert, spec.kind == kExpert);
      for (const optim::LogicalTensor& tensor : spec.tensors) {
        ASSERT_TRUE(expected.count(tensor.name)) << tensor.name;
        const Expected& e = expected[tensor.name];
        EXPECT_EQ(tensor.shape, e.shape) << tensor.name;
        EXPECT_EQ(spec.init, e.init) << tensor.name;
        EXPECT_FLOAT_EQ(spec.init_std, e.std) << tensor.name;
        EXPECT_EQ(spec.decay, e.decay) << tensor.name;
        EXPECT_EQ(spec.kind, e.kind) << tensor.name;
        expected.erase(tensor.name);
      }
    }
    for (const auto& [name, e] : expected) ADD_FAILURE() << name << " is missing";
    EXPECT_EQ(numbers, parameter_count(c));
    ASSERT_EQ(h.model->states().size(), 1u);
    EXPECT_EQ(h.model->states()[0].name, "layers.1.moe.router.bias");
    EXPECT_EQ(h.model->states()[0].view.size(0), 4);
  });
}

// Interleaving and one view for each expert are matters of memory: logical tensors and loss are the
// same to the bit. So are gradients, unless interleaving changes the order of the sum over fc1's rows.
TEST(ModelState, TheOrderInMemoryIsNotTheModels) {
  Config plain = full_config();
  take_gpt_oss_experts(plain);
  for (const auto& [interleave, indexed] : {std::pair(8, false), {0, true}, {8, true}}) {
    Config c = plain;
    c.glu_interleave = interleave;
    c.indexed_experts = indexed;
    on_ranks(1, [&](comm::Communicator& world) {
      const TestBatch batch(c, 2, 6, false, 1);
      ModelHarness one(plain, DType::kFloat32, world, 12), other(c, DType::kFloat32, world, 12);
      EXPECT_EQ(one.weights(), other.weights());
      EXPECT_EQ(one.step(batch.batch).loss_sum, other.step(batch.batch).loss_sum);
      const Weights expected = one.gradients(), got = other.gradients();
      EXPECT_TRUE(interleave > 0 || expected == got);
      for (const auto& [name, g] : expected) {
        for (size_t i = 0; i < g.size(); ++i) {
          ASSERT_NEAR(g[i], got.at(name)[i], 1e-5) << name << " element " << i;
        }
      }
    });
  }
}

TEST(ModelState, InterleavedRowsOfGateAndUpAlternate) {
  on_ranks(1, [](comm::Communicator& world) {
    Config c = small_config();
    c.expert_bias = true;
    c.glu_interleave = 8;
    const ModelHarness h(c, DType::kFloat32, world, 4);
    for (const optim::Parameter& p : h.parameters) {
      const bool weight = p.spec.name.ends_with("layers.0.moe.experts.fc1.weight");
      if (!weight && !p.spec.name.ends_with("layers.0.moe.experts.fc1.bias")) continue;
      const int64_t n = weight ? 8 : 1;  // rows of a block
      EXPECT_EQ(p.spec.row_elements, weight ? c.d_model : 8);
      ASSERT_EQ(p.spec.row_map.size(), 16u);
      for (int64_t e = 0; e < 4; ++e) {
        const int64_t blocks[] = {0, 2, 1, 3};  // two of the gate, two of up, in turn
        for (int64_t b = 0; b < 4; ++b) {
          const optim::RowRun& r = p.spec.row_map[4 * e + b];
          EXPECT_EQ(r.memory_row, (4 * e + b) * n);
          EXPECT_EQ(r.logical_row, (4 * e + blocks[b]) * n);
          EXPECT_EQ(r.rows, n);
        }
      }
    }
  });
}

TEST(ModelState, QkvLiesInGroups) {
  on_ranks(1, [&](comm::Communicator& world) {
    const ModelHarness h(small_config(), DType::kFloat32, world, 4);
    const optim::ParamSpec& spec = h.parameters[2].spec;
    ASSERT_EQ(spec.name, "layers.0.attn.qkv.weight");
    // Two query heads of 8 rows, k, v; twice.
    const std::vector<std::array<int64_t, 4>> runs{{0, 0, 0, 16},   {16, 1, 0, 8}, {24, 2, 0, 8},
                                                   {32, 0, 16, 16}, {48, 1, 8, 8}, {56, 2, 8, 8}};
    ASSERT_EQ(spec.row_map.size(), runs.size());
    for (size_t i = 0; i < runs.size(); ++i) {
      const optim::RowRun& r = spec.row_map[i];
      EXPECT_EQ((std::array<int64_t, 4>{r.memory_row, r.tensor, r.logical_row, r.rows}), runs[i]);
    }
  });
}

TEST(ModelState, MicroBatchesAccumulateAndOverwriteStartsAnew) {
  Config c = full_config();
  c.expert_bias = true;
  on_ranks(1, [&](comm::Communicator& world) {
    const TestBatch a(c, 2, 6, false, 1), b(c, 2, 6, false, 2);
    ModelHarness h(c, DType::kFloat32, world, 12);
    const auto restart = [&] {
      for (optim::Parameter& p : h.parameters) p.overwrite = true;
    };
    h.step(a.batch);
    const Weights first = h.gradients();
    for (const optim::Parameter& p : h.parameters) EXPECT_FALSE(p.overwrite) << p.spec.name;
    restart();
    h.step(b.batch);
    const Weights second = h.gradients();
    h.step(a.batch);
    const Weights sum = h.gradients();
    restart();
    h.step(a.batch);
    const Weights again = h.gradients();
    for (const auto& [name, g] : sum) {
      double scale = 0;
      for (const double v : g) scale = std::max(scale, std::abs(v));
      for (size_t i = 0; i < g.size(); ++i) {
        ASSERT_NEAR(g[i], first.at(name)[i] + second.at(name)[i], 1e-5 * scale) << name;
        ASSERT_EQ(again.at(name)[i], first.at(name)[i]) << name << " is the same in every run";
      }
    }
  });
}

TEST(ModelState, TellsWhichPathComputesTheExperts) {
  on_ranks(1, [](comm::Communicator& world) {
    const ModelHarness experts(full_config(), DType::kFloat32, world, 4);
    ASSERT_NE(experts.model->expert_path(), nullptr);
    const Config c = full_config();
    const gemm::PathReport expected = gemm::choose_grouped_mlp(
        {.dtype = DType::kFloat32, .model = c.d_model, .ffn = c.d_ffn}, Device{});
    EXPECT_EQ(experts.model->expert_path()->describe(), expected.describe());
    Config dense = full_config();
    dense.dense_layers = {0, 1};
    const ModelHarness none(dense, DType::kFloat32, world, 4);
    EXPECT_EQ(none.model->expert_path(), nullptr);
    Config required = full_config();
    required.path = gemm::MlpPath::kReference;
    const ModelHarness reference(required, DType::kFloat32, world, 4);
    EXPECT_EQ(reference.model->expert_path()->path, gemm::MlpPath::kReference);
    required.path = gemm::MlpPath::kSm90;
    EXPECT_NE(error_of([&] { ModelHarness(required, DType::kFloat32, world, 4); },
                       ErrorKind::kUnsupported)
                  .find("sm90 is a path of GPUs"),
              std::string::npos);
  });
}

TEST(ModelState, ThreadsDoNotChangeTheBits) {
  const Config c = full_config();
  on_ranks(1, [&](comm::Communicator& world) {
    const TestBatch batch(c, 3, 70, false, 1);
    std::vector<Weights> gradients;
    for (const int threads : {1, 3}) {
      set_thread_budget(threads);
      ModelHarness h(c, DType::kBFloat16, world, 210);
      h.step(batch.batch);
      gradients.push_back(h.gradients());
    }
    EXPECT_EQ(gradients[0], gradients[1]);
  });
}

TEST(ModelState, NothingIsReadBeforeTheStreamHasRun) {
  const Config c = full_config();
  on_ranks(1, [&](comm::Communicator& world) {
    const TestBatch batch(c, 2, 10, true, 1);
    ModelHarness h(c, DType::kFloat32, world, 20), deferred(c, DType::kFloat32, world, 20);
    const StepStats expected = h.step(batch.batch);
    const Stream stream = Stream::deferred();
    const StepSums sums = deferred.model->make_sums();
    deferred.model->forward(batch.batch, deferred.capacity, sums, deferred.arena, stream);
    deferred.model->backward(batch.batch, stream);
    EXPECT_EQ(sums.read().targets, 0) << "not yet";
    const StepStats stats = sums.read(stream);
    EXPECT_EQ(stats.loss_sum, expected.loss_sum);
    EXPECT_EQ(stats.aux_sum, expected.aux_sum);
    EXPECT_EQ(deferred.gradients(), h.gradients());
  });
}

TEST(ModelState, BindRefusesWhatItDidNotAskFor) {
  on_ranks(1, [&](comm::Communicator& world) {
    ModelHarness h(small_config(), DType::kFloat32, world, 4);
    std::vector<optim::Parameter> few(h.parameters.begin(), h.parameters.end() - 1);
    EXPECT_THROW(h.model->bind(few), Error);
    std::vector<optim::Parameter> swapped = h.parameters;
    std::swap(swapped[0], swapped[1]);
    EXPECT_THROW(h.model->bind(swapped), Error);
    std::vector<optim::Parameter> half = h.parameters;
    const Tensor bf16(DType::kBFloat16, half[0].spec.shape);
    half[0].weight = bf16;
    EXPECT_THROW(h.model->bind(half), Error);
    // Without gradients there is evaluation alone.
    std::vector<optim::Parameter> frozen = h.parameters;
    for (optim::Parameter& p : frozen) p.grad = {};
    h.model->bind(frozen);
    const TestBatch batch(small_config(), 1, 4, false, 1);
    const StepSums sums = h.model->make_sums();
    h.model->evaluate(batch.batch, h.capacity, sums, h.arena, {});
    EXPECT_GT(sums.read().loss_sum, 0);
    EXPECT_THROW(h.model->forward(batch.batch, h.capacity, sums, h.arena, {}), Error);
    EXPECT_THROW(h.model->backward(batch.batch, {}), Error);
  });
}

TEST(ModelState, BiasMovesTowardsTheIdleExperts) {
  on_ranks(1, [&](comm::Communicator& world) {
    ModelHarness h(small_config(), DType::kFloat32, world, 4);
    Tensor pairs(DType::kInt64, {2, 4});
    const int64_t counts[] = {10, 0, 4, 2, 4, 4, 4, 4};
    std::copy(counts, counts + 8, pairs.data<int64_t>());
    h.model->update_router_bias(pairs, 0.125f, {});
    const auto bias = h.model->states();
    EXPECT_EQ(values(bias[0].view), (std::vector<double>{-0.125, 0.125, 0, 0.125}));
    EXPECT_EQ(values(bias[1].view), (std::vector<double>{0, 0, 0, 0}));
  });
}

TEST(ModelState, ShortCapacityIsReported) {
  Config c = small_config();
  c.overflow = moe::OverflowPolicy::kReport;
  on_ranks(1, [&](comm::Communicator& world) {
    const TestBatch batch(c, 2, 10, false, 1);
    ModelHarness h(c, DType::kFloat32, world, 20);
    EXPECT_EQ(h.capacity, 40);
    EXPECT_EQ(h.model->moe_capacity(1.25, 20), 50);
    h.capacity = 30;
    const StepStats stats = h.step(batch.batch);
    EXPECT_TRUE(stats.overflow());
    EXPECT_EQ(stats.required(), 40);
    for (const MoeLayerStats& layer : stats.moe) {
      EXPECT_EQ(layer.capacity, 30);
      EXPECT_EQ(layer.dropped, 10);
    }
    h.capacity = stats.required();
    EXPECT_FALSE(h.step(batch.batch).overflow());
  });
}

}  // namespace
}  // namespace moiety::model
