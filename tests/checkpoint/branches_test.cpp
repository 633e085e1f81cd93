// Branches of a run's checkpoints: what lies where after a run has gone back.
#include "moiety/checkpoint/branches.h"

#include <filesystem>
#include <map>
#include <random>
#include <set>

#include <gtest/gtest.h>

#include "moiety/base/log.h"
#include "moiety/checkpoint/checkpoint_error.h"
#include "moiety/checkpoint/manifest.h"
#include "moiety/checkpoint/retention.h"
#include "tests/checkpoint/faulty_files.h"
#include "tests/checkpoint/state_testing.h"

namespace moiety::checkpoint {
namespace {

SaveOptions all_kept() {
  SaveOptions options;
  options.keep.last = 0;
  options.verify = false;
  return options;
}

// Saves a checkpoint; its id.
std::string save(const std::string& c, int64_t step) {
  return save_state(tiny_state(), c, Cut::kFlat, 1, step, 1, all_kept()).id;
}

// The ids of the checkpoints in a folder, by step.
std::map<int64_t, std::string> ids_in(const std::string& folder) {
  std::map<int64_t, std::string> ids;
  for (const std::string& name : list(posix(), folder)) {
    if (const auto step = step_of(name)) ids[*step] = read_manifest(folder + "/" + name).id;
  }
  return ids;
}

using Ids = std::map<int64_t, std::string>;

TEST(Branches, GoingBackMovesLaterCheckpointsAside) {
  const TemporaryDirectory directory;
  const std::string c = directory / "c";
  EXPECT_EQ(read_branches(c).now(), Branch{});
  Ids one;
  for (const int64_t step : {2, 4, 6, 8}) one[step] = save(c, step);

  const Branch second = begin_branch(c, {.step = 4, .id = one[4], .path = "p", .given = "g"});
  EXPECT_EQ(second.number, 2);
  EXPECT_EQ(second.parent, 1);
  EXPECT_EQ(ids_in(c), (Ids{{2, one[2]}, {4, one[4]}}));
  EXPECT_EQ(ids_in(c + "/branch-1"), (Ids{{6, one[6]}, {8, one[8]}}));
  EXPECT_EQ(read_text(posix(), c + "/latest", 100), "step-00000004\n");
  EXPECT_EQ(read_branches(c).owner_of(4), 1);
  EXPECT_EQ(read_branches(c).owner_of(5), 2);
  EXPECT_EQ(*find_newest_complete(c), c + "/step-00000004");

  const Ids two{{6, save(c, 6)}, {7, save(c, 7)}};
  EXPECT_EQ(begin_branch(c, {.step = 4, .id = one[4]}).parent, 1);
  EXPECT_EQ(ids_in(c + "/branch-2"), two);

  // Back into branch 1, whose checkpoints up to there come back.
  const Branch fourth = begin_branch(c, {.step = 6, .id = one[6]});
  EXPECT_EQ(fourth.number, 4);
  EXPECT_EQ(fourth.parent, 1);
  EXPECT_EQ(ids_in(c), (Ids{{2, one[2]}, {4, one[4]}, {6, one[6]}}));
  EXPECT_EQ(ids_in(c + "/branch-1"), (Ids{{8, one[8]}}));
  EXPECT_EQ(ids_in(c + "/branch-2"), two);

  // A checkpoint of elsewhere has no ancestors here.
  EXPECT_EQ(begin_branch(c, {.step = 6, .id = std::string(32, 'a')}).parent, 0);
  EXPECT_TRUE(ids_in(c).empty());
  EXPECT_FALSE(size_of(posix(), c + "/latest"));
  EXPECT_EQ(ids_in(c + "/branch-1"), one);
}

TEST(Branches, TheDirectoryHoldsTheCurrentLineageAlone) {
  std::mt19937 random(7);
  for (int round = 0; round < 8; ++round) {
    const TemporaryDirectory directory;
    const std::string c = directory / "c";
    std::vector<Ids> lineages(2);  // by branch
    int64_t now = 1;
    for (int n = 0; n < 8; ++n) {
      Ids& own = lineages[size_t(now)];
      int64_t step = own.empty() ? 0 : own.rbegin()->first;
      for (uint32_t saves = 1 + random() % 3; saves > 0; --saves) {
        step += 1 + random() % 2;
        own[step] = save(c, step);
      }
      // Any checkpoint of any branch.
      const Ids& from = lineages[1 + random() % (lineages.size() - 1)];
      if (from.empty()) continue;
      const auto start = std::next(from.begin(), int64_t(random() % from.size()));
      Ids lineage(from.begin(), std::next(start));
      now = begin_branch(c, {.step = start->first, .id = start->second}).number;
      ASSERT_EQ(now, std::ssize(lineages));
      lineages.push_back(std::move(lineage));
      ASSERT_EQ(ids_in(c), lineages.back()) << "round " << round << ", branch " << now;
    }
    std::set<std::string> all, found;
    for (const Ids& ids : lineages) {
      for (const auto& [step, id] : ids) all.insert(id);
    }
    for (const auto& entry : std::filesystem::recursive_directory_iterator(c)) {
      if (entry.path().filename() != "COMMIT") continue;
      found.insert(read_manifest(entry.path().parent_path().string()).id);
    }
    EXPECT_EQ(found, all) << "a checkpoint is lost";
  }
}

TEST(Branches, AKillOnTheWayIsMadeGood) {
  set_log_level(LogLevel::kOff);
  const TemporaryDirectory start;
  Ids one;
  for (const int64_t step : {2, 4, 6}) one[step] = save(start / "c", step);
  begin_branch(start / "c", {.step = 2, .id = one[2]});
  const std::string late = save(start / "c", 5);
  const Ids before{{2, one[2]}, {5, late}}, after{{2, one[2]}, {4, one[4]}};
  int begun = 0, total = 0;
  // Not kPowerLoss, which takes a rename back without what it replaced.
  for (const Fault fault : {Fault::kKill, Fault::kFail}) {
    bool finished = false;
    for (int n = 0; !finished; ++n, ++total) {
      const TemporaryDirectory directory;
      const std::string c = directory / "c";
      std::filesystem::copy(start / "c", c, std::filesystem::copy_options::recursive);
      FaultyFiles files(fault, n);
      error_of([&] { begin_branch(c, {.step = 4, .id = one[4]}, files); });
      finished = files.calls() <= n;
      recover(c);
      const BranchList list = read_branches(c);
      ASSERT_EQ(list.next, 0);
      EXPECT_EQ(ids_in(c), list.current == 3 ? after : before)
          << "fault " << int(fault) << ", call " << n << ": "
          << read_text(posix(), c + "/branches.json", 1 << 20);
      begun += list.current == 3;
    }
  }
  EXPECT_GT(begun, 3);
  EXPECT_LT(begun, total);
  set_log_level(LogLevel::kInfo);
}

TEST(Branches, ADamagedListIsRefused) {
  const TemporaryDirectory directory;
  const std::string id = save(directory.path(), 4), path = directory / "branches.json";
  begin_branch(directory.path(), {.step = 4, .id = id});
  const std::string good = read_text(posix(), path, 1 << 20);
  for (const auto& [from, to] : std::map<std::string, std::string>{
           {"\"current\":2", "\"current\":3"}, {"\"parent\":1", "\"parent\":2"}, {"{", "["}}) {
    std::string bad = good;
    bad.replace(bad.find(from), from.size(), to);
    write_text(posix(), path, bad);
    EXPECT_NE(error_of([&] { read_branches(directory.path()); }).find(path), std::string::npos);
  }
}

TEST(Retention, TheBestAreKeptAndNamed) {
  const TemporaryDirectory directory;
  const std::string c = directory / "c";
  const std::map<int64_t, std::optional<double>> losses{{1, 3.0}, {2, 2.0}, {3, std::nullopt},
                                                        {4, 2.0}, {5, 4.0}, {6, 2.5}};
  on_ranks(1, [&](int, comm::Bootstrap& bootstrap) {
    RankState state(tiny_state(), Cut::kFlat, 0, 1);
    Saver saver(c, bootstrap, {.keep = {.last = 1, .best = 2}});
    for (const auto& [step, loss] : losses) {
      RunState run = run_state(step, 1);
      run.validation_loss = loss;
      saver.save(state.view(), run, Stream());
    }
    EXPECT_EQ(ids_in(c).size(), 3u);
    EXPECT_TRUE(ids_in(c).contains(2) && ids_in(c).contains(4) && ids_in(c).contains(6));
    EXPECT_EQ(read_text(posix(), c + "/best", 100), "step-00000004\n");
    EXPECT_EQ(read_manifest(c + "/step-00000006").run.validation_loss, 2.5);

    // Where weights are in doubt nothing is removed.
    saver.keep_all(true);
    saver.save(state.view(), run_state(7, 1), Stream());
    EXPECT_EQ(ids_in(c).size(), 4u);
  });
  std::filesystem::remove_all(c + "/step-00000002");
  std::filesystem::remove_all(c + "/step-00000004");
  update_best(c);
  EXPECT_EQ(read_text(posix(), c + "/best", 100), "step-00000006\n");
  std::filesystem::remove_all(c + "/step-00000006");
  update_best(c);
  EXPECT_FALSE(size_of(posix(), c + "/best"));
}

}  // namespace
}  // namespace moiety::checkpoint
