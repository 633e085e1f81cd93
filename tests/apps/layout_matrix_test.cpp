// The same training under every layout of up to eight ranks: tp of 1 and 2, gtp of 1 to 4, and all
// dp, ep and egtp that go with them, 157 layouts. A run of the tests takes some that between them
// have every pair of degrees of two axes; all of them take minutes of many cores:
//
//   export GTEST_TOTAL_SHARDS=16 GTEST_ALSO_RUN_DISABLED_TESTS=1
//   for i in $(seq 0 15); do
//     GTEST_SHARD_INDEX=$i bin/tests_apps --gtest_filter='DISABLED_All/Layouts.*' &
//   done; wait
#include <array>
#include <filesystem>
#include <set>

#include "tests/apps/train_rank.h"

namespace moiety::app {
namespace {

namespace fs = std::filesystem;
using gtp::Grid;
using train::data_ranks, train::rank_count;

std::string name_of(const Grid& g) {
  return text("tp{}gtp{}dp{}_ep{}egtp{}edp{}", g.tp, g.gtp, g.dp, g.ep, g.egtp, g.edp);
}

std::vector<Grid> all_layouts() {
  std::vector<Grid> all;
  const auto experts = [&](Grid g) {
    const int ranks = rank_count(g);
    for (g.ep = 1; g.ep <= ranks; ++g.ep) {
      for (g.egtp = 1; g.ep * g.egtp <= ranks; ++g.egtp) {
        g.edp = ranks / (g.ep * g.egtp);
        if (g.ep * g.egtp * g.edp == ranks) all.push_back(g);
      }
    }
  };
  for (const int tp : {1, 2}) {
    for (const int gtp : {1, 2, 3, 4}) {
      for (int dp = 1; tp * gtp * dp <= 8; ++dp) experts({.tp = tp, .gtp = gtp, .dp = dp});
    }
  }
  return all;
}

// (axis, degree, axis, degree).
using DegreePair = std::array<int, 4>;
std::set<DegreePair> pairs_of(const Grid& g) {
  const std::array degrees{g.tp, g.gtp, g.dp, g.ep, g.egtp};
  std::set<DegreePair> pairs;
  for (int a = 0; a < int(degrees.size()); ++a) {
    for (int b = 0; b < a; ++b) pairs.insert({a, degrees[a], b, degrees[b]});
  }
  return pairs;
}

// Layouts that have every pair that a layout has; each the one with most pairs that are new.
std::vector<Grid> covering_layouts() {
  const std::vector<Grid> all = all_layouts();
  std::set<DegreePair> seen;
  const auto news = [&](const Grid& g) {
    int64_t count = 0;
    for (const DegreePair& p : pairs_of(g)) count += !seen.contains(p);
    return count;
  };
  std::vector<Grid> chosen;
  for (;;) {
    const Grid best = *std::ranges::max_element(all, {}, [&](const Grid& g) { return news(g); });
    if (news(best) == 0) return chosen;
    seen.merge(pairs_of(best));
    chosen.push_back(best);
  }
}

struct LayoutCase {
  Grid grid;
  std::string kind;
};
void PrintTo(const LayoutCase& c, std::ostream* out) { *out << name_of(c.grid) << " " << c.kind; }

constexpr const char* kRecipes[] = {"bf16", "fp8_tensor", "fp8_block", "mxfp8", "nvfp4"};
constexpr const char* kKinds[] = {"adamw", "descent", "resumed"};

// All kinds and recipes of every layout.
std::vector<LayoutCase> all_cases() {
  std::vector<LayoutCase> all;
  for (const Grid& g : all_layouts()) {
    for (const char* kind : kKinds) all.push_back({g, kind});
    for (const char* recipe : kRecipes) all.push_back({g, recipe});
  }
  return all;
}

// One descent of each layout, which hides nothing, and the other kinds in turn.
std::vector<LayoutCase> covering_cases() {
  std::vector<LayoutCase> all;
  const std::array others{"adamw", "bf16", "fp8_tensor", "fp8_block", "resumed", "mxfp8", "nvfp4"};
  for (const Grid& g : covering_layouts()) {
    all.push_back({g, others[all.size() / 2 % others.size()]});
    all.push_back({g, "descent"});
  }
  return all;
}

bool is_recipe(const std::string& kind) {
  return std::ranges::find(kRecipes, kind) != std::end(kRecipes);
}

// Experts that ep divides, sequences of a step that the data ranks divide, and slices of tp that
// are whole blocks of the recipe.
struct Sizes {
  explicit Sizes(const LayoutCase& c) {
    const int ranks = rank_count(c.grid);
    experts = ranks % 3 == 0 ? 6 : ranks == 5 || ranks == 7 ? ranks : 8;
    sequences = experts % 2 == 0 ? experts : 2 * experts;
    if (is_recipe(c.kind) && c.grid.tp > 1) width = c.kind == "fp8_block" ? 256 : 64;
  }
  int experts, sequences, width = 0;
};

// A dense layer and one of experts with a shared one. Most matrices do not fill their shards.
Arguments matrix_run(const std::string& directory, const Grid& g, const Sizes& sizes,
                     const std::string& kind) {
  Arguments arguments = tiny(directory, rank_count(g), g.ep) +
                        Arguments{text("--parallel.tp={}", g.tp),
                                  text("--parallel.gtp={}", g.gtp),
                                  text("--parallel.egtp={}", g.egtp),
                                  text("--train.micro_batch={}", sizes.sequences / data_ranks(g)),
                                  text("--train.global_batch={}", sizes.sequences),
                                  text("--moe.experts={}", sizes.experts),
                                  "--train.steps=20",
                                  "--checkpoint.interval=0",
                                  "--model.kv_heads=4",
                                  "--model.dense_layers=[0]",
                                  "--model.d_ffn_dense=48",
                                  "--moe.shared_d_ffn=16",
                                  "--moe.shared_gate",
                                  "--router.z_coef=0.001",
                                  "--run.seed=3"};
  if (kind == "descent") return arguments + kDescent;
  if (!is_recipe(kind)) return arguments + Arguments{"--router.bias_rate=0.001"};
  arguments.push_back("--precision.recipe=" + kind);
  if (sizes.width == 0) return arguments;
  return arguments + Arguments{"--optim.lr=0.002", text("--model.d_model={}", sizes.width),
                               text("--model.d_ffn_dense={}", sizes.width),
                               text("--moe.shared_d_ffn={}", sizes.width)};
}

// A run that several cases are compared with, made once.
std::string shared_run(const Grid& grid, const LayoutCase& c, const Arguments& more = {}) {
  static const TemporaryDirectory dir;
  const Sizes sizes(c);
  const std::string name = text("{}_{}_{}_{}", name_of(grid), c.kind, sizes.experts, sizes.width);
  if (!fs::exists(dir / name)) train(matrix_run(dir / name, grid, sizes, c.kind) + more);
  return dir / name;
}

class Layouts : public testing::TestWithParam<LayoutCase> {
 protected:
  Arguments run_of(const std::string& directory) const {
    return matrix_run(directory, GetParam().grid, Sizes(GetParam()), GetParam().kind);
  }

  // The state as tp2 x gtp2 has saved it: the same bits in memory, and ten steps more.
  void resume(const TemporaryDirectory& dir) const {
    const Arguments keep{"--checkpoint.interval=3", "--checkpoint.keep_last=10",
                         "--train.steps=13"};
    const Grid source{.tp = 2, .gtp = 2, .dp = 1, .ep = 1, .egtp = 2, .edp = 2};
    const std::string whole = shared_run(source, GetParam(), keep);
    const std::string saved = checkpoint_path(whole, 3);
    save_again(saved, run_of(dir / "again") + keep);
    EXPECT_EQ(digests(checkpoint_path(dir / "again", 3)), digests(saved));
    fs::create_directories(dir / "run/checkpoints");
    fs::copy(saved, checkpoint_path(dir / "run", 3));
    train(run_of(dir / "run") + keep);
    EXPECT_EQ(steps(dir / "run").size(), 10u);
    expect_near(dir / "run", whole, 1e-4);
  }
};

TEST_P(Layouts, TrainAsOneRank) {
  const LayoutCase& c = GetParam();
  const TemporaryDirectory dir;
  if (c.kind == "resumed") return resume(dir);
  const std::string one = shared_run({}, c);
  EXPECT_EQ(steps(one).size(), 20u);
  EXPECT_LT(steps(one).at(20)["loss"].get<double>(), steps(one).at(1)["loss"].get<double>() - 0.2);
  train(run_of(dir / "run"));
  is_recipe(c.kind) ? expect_losses_near(dir / "run", one, 0.01)
                    : expect_near(dir / "run", one, 1e-4);
}

std::string case_name(const testing::TestParamInfo<LayoutCase>& info) {
  return name_of(info.param.grid) + "_" + info.param.kind;
}
INSTANTIATE_TEST_SUITE_P(Cover, Layouts, testing::ValuesIn(covering_cases()), case_name);
INSTANTIATE_TEST_SUITE_P(DISABLED_All, Layouts, testing::ValuesIn(all_cases()), case_name);

}  // namespace
}  // namespace moiety::app
