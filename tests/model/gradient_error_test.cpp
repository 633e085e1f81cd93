// The comparison of gradients under a recipe, for two runs on a CPU: of the same model, and of one
// that differs as devices may.
#include "tests/model/gradient_error.h"

#include "moiety/model/precision.h"
#include "tests/model/harness.h"

namespace moiety::model {
namespace {

TEST(GradientError, IsOfTheLength) {
  const Tensor x = normal_tensor(DType::kFloat32, {50}, 1), zero(DType::kFloat32, {50});
  const Tensor less(DType::kFloat32, {50});
  for (int64_t i = 0; i < 50; ++i) put(less, i, 0.9 * get(x, i));
  EXPECT_EQ(length_error(x, x), 0);
  EXPECT_EQ(length_error(zero, zero), 0);
  EXPECT_NEAR(length_error(less, x), 0.1, 1e-6);
  EXPECT_NEAR(length_error(zero, x), 1, 1e-12);
  EXPECT_TRUE(std::isinf(length_error(x, zero)));
  put(less, 7, std::nan(""));
  EXPECT_TRUE(std::isinf(length_error(less, x)));
}

// The model in one recipe, and its gradients at first.
struct Subject {
  Subject(RecipeKind kind, bool delay_wgrad, comm::Communicator& world)
      : c(one_token_case("", delay_wgrad)),
        batch(c.config, c.sequences, c.seq_len, c.documents, 5),
        host(c.config, DType::kBFloat16, world, batch.naive.tokens(), &world) {
    Precision precision;
    precision.recipe = make_recipe(kind);
    precision.seed = 17;
    if (!is_tensor_scaled(precision.recipe->input.format)) {
      precision.dispatch = precision.recipe->input;
    }
    host.model->set_precision(precision);
    host.step(batch.batch);
    for (const optim::Parameter& p : host.parameters) {
      first.push_back(converted(p.grad, p.grad.dtype()));
    }
  }
  void step_again() {
    for (optim::Parameter& p : host.parameters) p.overwrite = true;
    host.step(batch.batch);
  }
  GradientErrors errors() const {
    return gradient_errors(host.parameters, first, kRecipeGradientBound);
  }

  ModelCase c;
  TestBatch batch;
  ModelHarness host;
  std::vector<Tensor> first;
};

constexpr RecipeKind kKinds[] = {RecipeKind::kFp8Tensor, RecipeKind::kFp8Block, RecipeKind::kMxfp8,
                                 RecipeKind::kNvfp4};

// Each gradient in turn is nine tenths of what it should be; or its last row is missing.
TEST(GradientError, SeesAGradientOfNineTenths) {
  for (const RecipeKind kind : kKinds) {
    on_ranks(1, [&](comm::Communicator& world) {
      Subject s(kind, false, world);
      s.step_again();
      EXPECT_EQ(s.errors().largest, 0);
      size_t seen = 0;
      for (size_t i = 0; i < s.first.size(); ++i) {
        const TensorView g = s.first[i];
        const Tensor before = converted(g, g.dtype());
        for (int64_t e = 0; e < g.numel(); ++e) put(g, e, 0.9 * get(g, e));
        const GradientErrors errors = s.errors();
        const std::string& name = s.host.parameters[i].spec.name;
        // Over one key the gradients of q and k are nothing but rounding.
        if (name.find("q_norm") == std::string::npos && name.find("k_norm") == std::string::npos) {
          EXPECT_EQ(errors.wrong, std::vector{name});
          EXPECT_NEAR(errors.largest, 0.1, 1e-3);
          ++seen;
        }
        std::memcpy(g.raw(), before.view().raw(), static_cast<size_t>(g.bytes()));
      }
      EXPECT_EQ(seen, s.first.size() - 8);
    });
  }
}

// One element of the embedding is off by one rounding, as an activation may be on another device.
TEST(GradientError, LeavesRoomForARounding) {
  for (const RecipeKind kind : kKinds) {
    on_ranks(1, [&](comm::Communicator& world) {
      Subject s(kind, true, world);
      for (optim::Parameter& p : s.host.parameters) {
        if (p.spec.name == "embed.weight") ++static_cast<uint16_t*>(p.weight.raw())[100];
      }
      s.step_again();
      const GradientErrors errors = s.errors();
      EXPECT_TRUE(errors.wrong.empty()) << errors.where << " is off by " << errors.largest;
      EXPECT_GT(errors.largest, 0);
    });
  }
}

}  // namespace
}  // namespace moiety::model
