// Processes of which one is started with another value of a key, for every key of the table.
#include "apps/moiety/config/ranks.h"

#include <optional>
#include <set>

#include <gtest/gtest.h>

#include "tests/support/mpi/world.h"

namespace moiety::app {
namespace {

using comm::testing::world;

// Another legal value of a key than its default, as an argument has it.
class OtherValue {
 public:
  explicit OtherValue(const Key& key) : rule_(key.rule) {}

  std::string operator()(const bool* v) const { return *v ? "false" : "true"; }
  std::string operator()(const int64_t* v) const {
    const double step = double(rule_.multiple);
    const double up = std::max(double(*v) + step, rule_.min);
    return text("{}", int64_t(up <= rule_.max ? up : double(*v) - step));
  }
  std::string operator()(const double* v) const {
    for (const double x : {*v / 2, *v + 0.01, rule_.min + 0.01}) {
      if (x != *v && x > rule_.min && x < rule_.max) return text("{}", x);
    }
    return "none";
  }
  std::string operator()(const std::optional<double>* v) const {
    const double number = v->value_or(1);
    return (*this)(&number);
  }
  std::string operator()(const std::string* v) const {
    for (const std::string_view choice : rule_.choices) {
      if (choice != *v && !choice.empty()) return std::string(choice);
    }
    return *v + "other";
  }
  std::string operator()(const std::vector<int64_t>*) const { return "[1]"; }
  std::string operator()(const std::vector<std::string>*) const { return "a.tok"; }
  std::string operator()(const std::vector<data::WeightedPath>*) const { return "a.tok"; }

 private:
  const Rule& rule_;
};

// Every rank's view of a launch in which the last one has this argument too.
std::string difference_with(const std::string& argument) {
  std::vector<std::string> arguments;
  if (world().rank() == world().size() - 1) arguments.push_back(argument);
  return first_difference(world().bootstrap(), facts_of(load_config({}, arguments)));
}

TEST(Ranks, EveryKeyIsTheSameOnAllRanksOrDeclaredByHost) {
  const int last = world().size() - 1;
  std::set<std::string> by_host;
  for (const Key& key : option_keys()) {
    Options defaults;
    const std::string other = std::visit(OtherValue(key), key.field(defaults));
    const std::string found = difference_with(text("--{}={}", key.full_name(), other));
    if (key.among_ranks == AmongRanks::kByHost) {
      by_host.insert(key.full_name());
      EXPECT_EQ(found, "") << key.full_name();
      continue;
    }
    const Config changed = load_config({}, std::vector{text("--{}={}", key.full_name(), other)});
    EXPECT_EQ(found, text("rank {} has {} = {} (command line), rank 0 {}", last, key.full_name(),
                          value_text(key, changed.options), value_text(key, defaults)));
  }
  EXPECT_EQ(by_host,
            (std::set<std::string>{"data.tokenizer", "data.train", "data.valid", "run.device",
                                   "run.dir", "run.init_from", "run.share_gpus", "run.threads"}));
}

TEST(Ranks, TheLowestRankThatDiffersIsNamedOnAllRanks) {
  const std::vector<RankFact> facts{{"a", "1", "default"},
                                    {"b", text("{}", world().rank() > 0), "c.toml:3"}};
  EXPECT_EQ(first_difference(world().bootstrap(), facts),
            "rank 1 has b = true (c.toml:3), rank 0 false");
  const std::vector<RankFact> fewer(facts.begin(), facts.end() - (world().rank() > 0));
  EXPECT_EQ(first_difference(world().bootstrap(), fewer),
            "rank 1 runs another build of Moiety than rank 0, with other keys");
  EXPECT_EQ(
      first_difference(world().bootstrap(), {{"a", "1", "rank " + std::to_string(world().rank())}}),
      "");
}

}  // namespace
}  // namespace moiety::app
