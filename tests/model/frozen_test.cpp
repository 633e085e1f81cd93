// Steps with frozen parameters: the gradients of the others keep their bits, nothing else is
// computed or kept.
#include "moiety/model/frozen.h"

#include <cmath>

#include "moiety/model/precision.h"
#include "tests/model/harness.h"
#include "tests/model/model_cases.h"
#include "tests/support/error_of.h"

namespace moiety::model {
namespace {

using Globs = std::vector<std::string>;

TEST(Glob, MatchesWholeNames) {
  for (const auto& [glob, name, matches] :
       std::initializer_list<std::tuple<const char*, const char*, bool>>{
           {"embed.weight", "embed.weight", true},
           {"embed", "embed.weight", false},
           {"*", "", true},
           {"", "", true},
           {"", "a", false},
           {"?", "", false},
           {"embed*", "embed.weight", true},
           {"*weight", "embed.weight", true},
           {"*.router.*", "layers.0.moe.router.bias", true},
           {"*.router.?*", "layers.0.moe.router.", false},
           {"layers.1.*", "layers.11.attn.o.weight", false},
           {"layers.?.*", "layers.7.attn.o.weight", true},
           {"*a*b", "aabab", true},
           {"*a*b", "aaba", false},
           {"**", "x", true},
           {"[ab]", "a", false},
           {"*ab*ab*ab", "abab", false}}) {
    EXPECT_EQ(glob_matches(glob, name), matches) << glob << " " << name;
  }
}

Config every_kind() {
  Config c = small_config();
  take_all_kinds_of_layers(c);
  c.layers = 3;
  c.aux_scope = AuxScope::kMicroBatch;
  c.expert_bias = true;
  c.row_layout = moe::RowLayout::kExpert;
  return c;
}

std::string refusal(const Config& config, const Globs& globs) {
  Config c = config;
  c.freeze = globs;
  return error_of([&] { check(c); });
}

TEST(Frozen, RefusalsNameTheGlobOrTheTensor) {
  const Config c = every_kind();
  EXPECT_EQ(refusal(c, {"embed*", "layers.0.*", "*.router.*"}), kNoError);
  EXPECT_NE(refusal(c, {"embed*", "layer.0.*"}).find("train.freeze: \"layer.0.*\" matches no"),
            std::string::npos);
  EXPECT_NE(refusal(c, {"layers.3.*"}).find("\"layers.3.*\" matches no"), std::string::npos);
  EXPECT_NE(refusal(c, {"*.fc1.weight0"}).find("matches no"), std::string::npos);
  EXPECT_NE(refusal(c, {""}).find("\"\" matches no"), std::string::npos);
  EXPECT_NE(refusal(c, {"*.attn.q.weight"})
                .find("layers.0.attn.q.weight is frozen and layers.0.attn.k.weight is not"),
            std::string::npos);
  EXPECT_NE(refusal(c, {"*.attn.[qk].weight"}).find("matches no"), std::string::npos);
  EXPECT_NE(refusal(c, {"*"}).find("all parameters are frozen"), std::string::npos);
  Config tied = c;
  tied.tie_embeddings = true;
  EXPECT_NE(refusal(tied, {"head*"}).find("\"head*\" matches no"), std::string::npos);
  EXPECT_EQ(refusal(c, {"head*"}), kNoError);
}

// Every name of a checkpoint, and the globs that freeze each parameter.
std::vector<Globs> parameters_of(const Config& c) {
  std::vector<Globs> all;
  on_ranks(1, [&](comm::Communicator& world) {
    const ModelHarness h(c, DType::kFloat32, world, 8);
    for (const optim::Parameter& p : h.parameters) {
      Globs& names = all.emplace_back();
      for (const optim::LogicalTensor& t : p.spec.tensors) names.push_back(t.name);
    }
  });
  return all;
}

TEST(Frozen, EveryTensorHasItsName) {
  for (const ModelCase& m : model_cases()) {
    for (const Globs& globs : parameters_of(m.config)) {
      Config c = m.config;
      c.freeze = globs;
      on_ranks(1, [&](comm::Communicator& world) {
        const ModelHarness h(c, DType::kFloat32, world, 8);
        for (const optim::Parameter& p : h.parameters) {
          EXPECT_EQ(p.spec.frozen, p.spec.tensors[0].name == globs[0]) << m.name;
        }
      });
    }
    for (int64_t l = 0; l < m.config.layers; ++l) {
      const std::string bias = text("layers.{}.moe.router.bias", l);
      EXPECT_EQ(refusal(m.config, {bias}) == kNoError, m.config.is_moe(l)) << m.name;
    }
  }
}

struct StepBits {
  std::map<std::string, std::string> gradients;
  double loss = 0, aux = 0;
  int64_t peak = 0;
};

struct Mode {
  DType storage = DType::kFloat32;
  int ranks = 1;
  std::optional<RecipeKind> recipe = {};
};

// Two micro-batches; by rank.
std::vector<StepBits> run_step(const Config& c, const Mode& mode = {}, double bias = 0) {
  std::vector<StepBits> all(mode.ranks);
  on_ranks(mode.ranks, [&](comm::Communicator& world) {
    const TestBatch batch(c, 2, 12, false, 5 + world.rank());
    ModelHarness h(c, mode.storage, world, batch.naive.tokens());
    for (const Transformer::State& s : h.model->states()) {
      s.view.data<float>()[0] = static_cast<float>(bias);
    }
    if (mode.recipe) {
      Precision precision;
      precision.recipe = make_recipe(*mode.recipe);
      precision.seed = 17;
      h.model->set_precision(precision);
    }
    StepBits& out = all[world.rank()];
    for (int micro_step = 0; micro_step < 2; ++micro_step) {
      const StepStats stats = h.step(batch.batch);
      out.loss += stats.loss_sum;
      out.aux += stats.aux_sum;
    }
    for (const optim::Parameter& p : h.parameters) {
      out.gradients[p.spec.name].assign(static_cast<const char*>(p.grad.raw()), p.grad.bytes());
    }
    out.peak = h.arena.peak();
  });
  return all;
}

// The bytes that the harness puts into gradients before the first step.
std::map<std::string, std::string> untouched(const Config& c, const Mode& mode) {
  std::map<std::string, std::string> all;
  on_ranks(1, [&](comm::Communicator& world) {
    const ModelHarness h(c, mode.storage, world, 24);
    for (const optim::Parameter& p : h.parameters) {
      all[p.spec.name].assign(static_cast<const char*>(p.grad.raw()), p.grad.bytes());
    }
  });
  return all;
}

void expect_same_gradients(const Config& config, const std::vector<Globs>& lists,
                           const Mode& mode = {}, double bias = 0) {
  const std::vector<StepBits> whole = run_step(config, mode, bias);
  for (const Globs& globs : lists) {
    SCOPED_TRACE(globs.front() + ", " + std::to_string(globs.size()));
    Config c = config;
    c.freeze = globs;
    const Frozen frozen(c);
    const std::vector<StepBits> some = run_step(c, mode, bias);
    for (int r = 0; r < mode.ranks; ++r) {
      EXPECT_EQ(some[r].loss, whole[r].loss);
      EXPECT_EQ(some[r].aux, whole[r].aux);
      // A frozen norm's gradient goes nowhere, but takes its place.
      EXPECT_LE(some[r].peak, whole[r].peak + 4 * c.d_model + 128);
      if (mode.ranks > 1) continue;
      const auto before = untouched(c, mode);
      for (const auto& [name, bits] : some[r].gradients) {
        EXPECT_TRUE(bits == (frozen(name) ? before : whole[r].gradients).at(name)) << name;
      }
    }
    for (int r = 0; r < mode.ranks; ++r) {
      for (const auto& [name, bits] : some[r].gradients) {
        EXPECT_TRUE(frozen(name) || bits == whole[r].gradients.at(name)) << name;
      }
    }
  }
}

// Each parameter frozen alone, and each one trained alone.
std::vector<Globs> one_and_all_but_one(const Config& c) {
  const std::vector<Globs> parameters = parameters_of(c);
  std::vector<Globs> lists = parameters;
  for (size_t only = 0; only < parameters.size(); ++only) {
    Globs& rest = lists.emplace_back();
    for (size_t p = 0; p < parameters.size(); ++p) {
      if (p != only) rest.insert(rest.end(), parameters[p].begin(), parameters[p].end());
    }
  }
  return lists;
}

std::vector<Globs> some_lists() {
  return {{"embed*", "layers.0.*", "*.router.*"},
          {"*.experts.*"},
          {"*.experts.fc1.*"},
          {"*.experts.fc2.*"},
          {"*norm*"},
          {"layers.*", "embed*"},
          {"embed*", "layers.0.*", "layers.1.*", "layers.2.attn*", "layers.2.mlp_norm*"},
          {"*.attn.*", "*.shared.*", "*.mlp.*"}};
}

class FrozenShapes : public testing::TestWithParam<ModelCase> {};
INSTANTIATE_TEST_SUITE_P(Shapes, FrozenShapes, testing::ValuesIn(model_cases()),
                         [](const auto& info) { return std::string(info.param.name); });

TEST_P(FrozenShapes, GradientsOfTheOthersKeepTheirBits) {
  const ModelCase& m = GetParam();
  Config c = m.config;
  c.aux_scope = AuxScope::kMicroBatch;
  expect_same_gradients(c, one_and_all_but_one(c), {}, m.bias);
}

TEST(Frozen, GradientsKeepTheirBitsInEveryMode) {
  for (const Recompute recompute : {Recompute::kNone, Recompute::kMoe, Recompute::kFull}) {
    for (const bool delay : {false, true}) {
      for (const moe::RowLayout layout : {moe::RowLayout::kExpert, moe::RowLayout::kRank}) {
        Config c = every_kind();
        c.recompute = recompute;
        c.delay_wgrad = delay;
        c.row_layout = layout;
        expect_same_gradients(c, one_and_all_but_one(c), {DType::kBFloat16});
      }
    }
  }
}

TEST(Frozen, GradientsKeepTheirBitsOverRanksAndInRecipes) {
  Config c = every_kind();
  for (const bool delay : {false, true}) {
    c.delay_wgrad = delay;
    expect_same_gradients(c, some_lists(), {DType::kBFloat16, 2});
    for (const RecipeKind kind :
         {RecipeKind::kFp8Tensor, RecipeKind::kFp8Block, RecipeKind::kMxfp8, RecipeKind::kNvfp4}) {
      expect_same_gradients(c, some_lists(), {DType::kBFloat16, 1, kind});
    }
  }
  c.tie_embeddings = true;
  expect_same_gradients(c, {{"embed*"}, {"layers.*"}, {"layers.*", "final_norm*"}});
}

TEST(Frozen, LayersBeforeTheFirstTrainedOneKeepNothing) {
  Config c = every_kind();
  c.dense_layers = {};
  const auto kept = [&](int64_t layers, const Globs& globs) {
    Config more = c;
    more.layers = layers;
    more.freeze = globs;
    int64_t bytes = 0;
    on_ranks(1, [&](comm::Communicator& world) {
      const TestBatch batch(more, 2, 12, false, 1);
      ModelHarness h(more, DType::kBFloat16, world, batch.naive.tokens());
      const StepSums sums = h.model->make_sums();
      const ArenaScope activations(h.arena);
      h.model->forward(batch.batch, h.capacity, sums, h.arena, {});
      bytes = h.arena.in_use();
    });
    return bytes;
  };
  // A layer that is passed keeps the counts of its routing.
  const int64_t counts = 2 * 8 * (c.router.experts + 1) + 16 * 8;
  const int64_t three = kept(3, {"embed*", "layers.0.*"});
  EXPECT_LT(three, kept(3, {}));
  EXPECT_NEAR(double(kept(5, {"embed*", "layers.0.*", "layers.1.*", "layers.2.*"}) - three),
              2.0 * counts, 128);
  // Rows that came to the experts are read by the gradient of their first weight alone.
  const int64_t tokens = 24, ranks = 1;
  const int64_t rows =
      moe::worst_capacity(static_cast<int>(ranks), tokens, static_cast<int>(c.router.top_k), 4, 1);
  EXPECT_EQ(kept(3, {}) - kept(3, {"*.experts.fc1.weight"}), 3 * rows * c.d_model * 2);
  EXPECT_EQ(kept(3, {}), kept(3, {"*.experts.fc2.weight"}));
}

// The arrangement of Config::freeze as sums of products that are left out.
TEST(Frozen, FlopsCountTheGradientsThatAreComputed) {
  Config c = every_kind();
  const double whole = flops_per_token(c, 12), pair = flops_per_pair(c);
  const auto with = [&](const Globs& globs) {
    Config frozen = c;
    frozen.freeze = globs;
    return flops_per_token(frozen, 12);
  };
  const double head = 2.0 * double(c.vocab * c.d_model);
  EXPECT_EQ(whole - with({"head*"}), head);
  EXPECT_EQ(whole - with({"embed*"}), 0);
  EXPECT_EQ(whole - with({"*norm*", "*.bias"}), 0);
  EXPECT_EQ(whole - with({"*.router.weight"}), 2 * 2.0 * double(c.d_model * c.router.experts));
  EXPECT_EQ(whole - with({"*.experts.*"}),
            2 * 2.0 * double(c.router.top_k * 3 * c.d_ffn * c.d_model));
  // Forward and the weight gradient of the head alone.
  EXPECT_EQ(with({"embed*", "layers.*", "final_norm*"}), (whole - 3 * head) / 3 + 2 * head);
  Config frozen = c;
  frozen.freeze = {"embed*", "layers.*"};
  EXPECT_EQ(flops_per_pair(frozen), pair / 3);
}

TEST(Frozen, RouterBiasStays) {
  Config c = small_config();
  c.freeze = {"layers.1.*.router.bias"};
  on_ranks(1, [&](comm::Communicator& world) {
    ModelHarness h(c, DType::kFloat32, world, 8);
    Tensor pairs(DType::kInt64, {2, c.router.experts});
    for (int64_t i = 0; i < pairs.view().numel(); ++i) pairs.data<int64_t>()[i] = i % 3;
    h.model->update_router_bias(pairs, 0.5f, {});
    double moved = 0, stayed = 0;
    for (int64_t e = 0; e < c.router.experts; ++e) {
      moved += std::abs(h.model->states()[0].view.data<float>()[e]);
      stayed += std::abs(h.model->states()[1].view.data<float>()[e]);
    }
    EXPECT_GT(moved, 0);
    EXPECT_EQ(stayed, 0);
  });
}

}  // namespace
}  // namespace moiety::model
