// Tensor parallelism: ranks that cut the weights give together what one rank gives.
#include "moiety/model/tensor_parallel.h"

#include "moiety/base/error.h"
#include "moiety/model/parallel_loss.h"
#include "moiety/nn/loss.h"
#include "tests/model/model_cases.h"
#include "tests/model/ranked_model.h"
#include "tests/support/error_of.h"

namespace moiety::model {
namespace {

struct Shape {
  const char* name = "";
  void (*change)(Config&) = [](Config&) {};
  int64_t sequences = 2, seq_len = 12;
  bool documents = false;
  int64_t pad_from = 0;
};

// Four key heads, which up to four ranks cut.
Config config_of(const Shape& shape) {
  Config c = small_config();
  c.heads = 8;
  c.kv_heads = 4;
  c.router.z_coef = 0.05f;
  shape.change(c);
  return c;
}

constexpr Shape kShapes[] = {
    {.name = "moe"},
    {.name = "dense",
     .change =
         [](Config& c) {
           c.dense_layers = {0, 1};
           c.d_ffn_dense = 20;
         }},
    {.name = "dense_and_moe",
     .change =
         [](Config& c) {
           c.dense_layers = {0};
           c.d_ffn_dense = 12;
         }},
    {.name = "shared_expert", .change = [](Config& c) { c.shared_d_ffn = 12; }},
    {.name = "shared_expert_with_gate",
     .change =
         [](Config& c) {
           c.shared_d_ffn = 12;
           c.shared_gate = true;
         }},
    {.name = "gpt_oss_experts",
     .change =
         [](Config& c) {
           take_gpt_oss_experts(c);
           c.glu_interleave = 8;
           c.dense_layers = {0};
           c.d_ffn_dense = 12;
           c.shared_d_ffn = 12;
         }},
    {.name = "squared_relu",
     .change =
         [](Config& c) {
           c.activation = gemm::squared_relu();
           c.dense_layers = {0};
           c.d_ffn_dense = 12;
           c.shared_d_ffn = 12;
         }},
    {.name = "tied", .change = [](Config& c) { c.tie_embeddings = true; }},
    {.name = "odd_vocabulary", .change = [](Config& c) { c.vocab = 257; }},
    {.name = "vocabulary_smaller_than_the_group",
     .change =
         [](Config& c) {
           c.vocab = 3;
           c.tie_embeddings = true;
         }},
    {.name = "a_token_of_a_rank", .sequences = 3, .seq_len = 4},
    {.name = "one_sequence", .sequences = 1, .seq_len = 20},
    {.name = "documents", .documents = true},
    {.name = "padding",
     .change = [](Config& c) { c.aux_scope = AuxScope::kGlobal; },
     .documents = true,
     .pad_from = 7},
    {.name = "no_grouping_no_qk_norm",
     .change =
         [](Config& c) {
           c.heads = 4;
           c.qk_norm = false;
         }},
    {.name = "loss_in_chunks",
     .change =
         [](Config& c) {
           c.loss_chunk = 8;
           c.loss_z_coef = 0.02f;
         }},
    {.name = "loss_in_single_tokens", .change = [](Config& c) { c.loss_chunk = 1; }},
    {.name = "aux_of_all_layers", .change = [](Config& c) { c.router.aux = moe::AuxLoss::kHf; }},
    {.name = "aux_of_sequences",
     .change =
         [](Config& c) {
           c.router.aux = moe::AuxLoss::kSequence;
           c.router.score = moe::Score::kSigmoid;
         }},
};

class TensorParallel : public testing::TestWithParam<std::tuple<int, Shape>> {};
INSTANTIATE_TEST_SUITE_P(Ranks, TensorParallel,
                         testing::Combine(testing::Values(2, 4), testing::ValuesIn(kShapes)),
                         [](const auto& info) {
                           return "tp" + std::to_string(std::get<0>(info.param)) + "_" +
                                  std::get<1>(info.param).name;
                         });

TEST_P(TensorParallel, GivesWhatOneRankGives) {
  const auto& [tp, shape] = GetParam();
  const Config c = config_of(shape);
  expect_equal(
      run_ranked(c, {}, shape.sequences, shape.seq_len, shape.documents, false, shape.pad_from),
      run_ranked(c, {.ranks = tp, .tp = tp}, shape.sequences, shape.seq_len, shape.documents, false,
                 shape.pad_from),
      1e-5);
}

struct GridCase {
  const char* name;
  RankedLayout layout;
  moe::AuxLoss aux;
};
class TensorParallelGrid : public testing::TestWithParam<GridCase> {};
INSTANTIATE_TEST_SUITE_P(
    Layouts, TensorParallelGrid,
    testing::Values(GridCase{"tp2_dp2", {4, 2, 1}, moe::AuxLoss::kSwitch},
                    GridCase{"tp2_ep2", {2, 2, 2}, moe::AuxLoss::kHf},
                    GridCase{"tp2_ep4", {4, 2, 4}, moe::AuxLoss::kSwitch},
                    GridCase{"tp4_ep2", {4, 4, 2}, moe::AuxLoss::kSwitch},
                    GridCase{"tp2_dp2_ep2_sequences", {4, 2, 2}, moe::AuxLoss::kSequence}),
    [](const auto& info) { return std::string(info.param.name); });

TEST_P(TensorParallelGrid, ComposesWithDataAndExpertParallelism) {
  Config c = config_of({});
  c.aux_scope = AuxScope::kGlobal;
  c.shared_d_ffn = 12;
  c.shared_gate = true;
  c.router.aux = GetParam().aux;
  expect_equal(run_ranked(c, {}, 4, 8), run_ranked(c, GetParam().layout, 4, 8), 2e-5);
}

TEST(TensorParallel, EvaluatesToTheSameLoss) {
  Config c = config_of({});
  c.vocab = 50;
  c.loss_chunk = 5;
  c.aux_scope = AuxScope::kGlobal;
  expect_equal(run_ranked(c, {}, 2, 12, true, true),
               run_ranked(c, {.ranks = 4, .tp = 2, .ep = 2}, 2, 12, true, true), 0);
}

// On one rank the loss over slices of the vocabulary has the bits of the loss over all of it.
TEST(TensorParallel, OneSliceHasTheBitsOfTheWhole) {
  on_ranks(1, [](comm::Communicator& world) {
    for (const DType storage : {DType::kFloat32, DType::kBFloat16}) {
      constexpr int64_t kTokens = 12, kModel = 24, kVocab = 75;
      const Tensor x = normal_tensor(storage, {kTokens, kModel}, 1);
      const Tensor head = normal_tensor(storage, {kVocab, kModel}, 2);
      std::vector<int32_t> targets{0, 74, -100, 3, 32, 31, 33, 70, 1, -100, 5, 64};
      const Tensor target = int32_tensor(targets);
      Tensor loss(DType::kFloat32, {kTokens}), dx(storage, {kTokens, kModel}),
          grad(DType::kFloat32, {kVocab, kModel}), workspace(DType::kFloat32, {5, kVocab});
      nn::linear_cross_entropy({.x_TD = x,
                                .head_VD = head,
                                .target_T = target,
                                .mask_T = {},
                                .loss_T = loss,
                                .dx_TD = dx,
                                .grad_VD = grad,
                                .workspace = workspace,
                                .z_coef = 0.1f},
                               {});
      Arena arena("test");
      Tensor loss_cut(DType::kFloat32, {kTokens}), dx_cut(storage, {kTokens, kModel}),
          grad_cut(DType::kFloat32, {kVocab, kModel});
      const Pass pass{.arena = arena,
                      .stream = {},
                      .storage = storage,
                      .sequences = 2,
                      .seq_len = 6,
                      .tp = &world,
                      .rope_table = {},
                      .position_T = {},
                      .document_start_BS = {},
                      .routed_T = {},
                      .h_TD = {},
                      .wide_TD = {}};
      parallel_cross_entropy(pass, {.x_TD = x,
                                    .head_VD = head,
                                    .slice = {0, kVocab},
                                    .target_T = target,
                                    .mask_T = {},
                                    .loss_T = loss_cut,
                                    .dx_TD = dx_cut,
                                    .grad_VD = grad_cut,
                                    .chunk = 5,
                                    .z_coef = 0.1f});
      expect_same_bits(loss, loss_cut, "loss");
      expect_same_bits(dx, dx_cut, "dx");
      expect_same_bits(grad, grad_cut, "grad");
    }
  });
}

// Every element of every logical tensor lies on some rank, weights that are not cut on all; rows of
// no run are padding.
TEST(TensorParallel, EveryElementHasItsPlace) {
  Config c = config_of({});
  c.vocab = 50;
  c.shared_d_ffn = 12;
  c.shared_gate = true;
  c.dense_layers = {0};
  c.d_ffn_dense = 20;
  std::mutex mutex;
  std::map<std::string, std::vector<int>> holders;
  std::map<std::string, bool> cut;
  on_ranks(4, [&](comm::Communicator& world) {
    const auto alone = world.split(world.rank(), 0, "ep");
    ModelHarness h(c, DType::kFloat32, *alone, 8, nullptr, &world);
    const std::lock_guard lock(mutex);
    for (const optim::Parameter& p : h.parameters) {
      for (const optim::LogicalTensor& t : p.spec.tensors) {
        int64_t n = 1;
        for (const int64_t size : t.shape) n *= size;
        holders[t.name].resize(n);
        cut[t.name] = !p.spec.expert && !p.spec.domain.has(gtp::Axis::kTp);
      }
      for_each_element(p.spec, [&](int64_t at, int tensor, int64_t i) {
        ASSERT_LT(at, p.spec.numel());
        ++holders[p.spec.tensors[tensor].name].at(i);
      });
    }
  });
  int cut_tensors = 0;
  for (const auto& [name, count] : holders) {
    cut_tensors += cut[name];
    for (const int n : count) ASSERT_EQ(n, cut[name] ? 1 : 4) << name;
  }
  EXPECT_EQ(cut_tensors, 2 + 2 * 4 + 2 + 2);
}

TEST(TensorParallel, RefusesWhatItCannotCut) {
  Config c = config_of({});
  EXPECT_NE(error_of([&] {
              check_tp(c, {}, 3);
            }).find("parallel.tp=3 must divide model.heads=8 and model.kv_heads=4"),
            std::string::npos);
  c.dense_layers = {0};
  c.d_ffn_dense = 22;
  EXPECT_NE(error_of([&] {
              check_tp(c, {}, 4);
            }).find("mlp.fc1.weight: 44 rows cannot be cut by tp 4, expected a multiple of 8"),
            std::string::npos);
  EXPECT_EQ(error_of([&] { check_tp(c, {}, 2); }), "no error");
  const Precision mxfp8{.recipe = make_recipe(RecipeKind::kMxfp8), .kept = {}};
  EXPECT_NE(error_of([&] {
              check_tp(c, mxfp8, 2);
            }).find("mlp.fc1.weight: 44 rows cannot be cut by tp 2, expected a multiple of 128"),
            std::string::npos)
      << error_of([&] { check_tp(c, mxfp8, 2); });
}

}  // namespace
}  // namespace moiety::model
