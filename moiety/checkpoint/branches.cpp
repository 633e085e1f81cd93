#include "moiety/checkpoint/branches.h"

#include <algorithm>
#include <map>
#include <optional>

#include <nlohmann/json.hpp>

#include "moiety/base/json_line.h"
#include "moiety/checkpoint/checkpoint_error.h"
#include "moiety/checkpoint/manifest.h"
#include "moiety/checkpoint/retention.h"

namespace moiety::checkpoint {
namespace {

constexpr uint64_t kLongestList = uint64_t{16} << 20;  // bytes of branches.json

std::string list_path(const std::string& directory) { return directory + "/branches.json"; }

void check(const std::string& path, const BranchList& list) {
  const auto count = static_cast<int64_t>(list.branches.size());
  bool good = list.current >= 1 && list.current <= count && list.next >= 0 && list.next <= count;
  for (int64_t i = 0; i < count; ++i) {
    const Branch& b = list.branches[static_cast<size_t>(i)];
    // Parents are older, so the way to the first ancestor ends.
    good = good && b.number == i + 1 && b.parent >= 0 && b.parent < b.number && b.step >= 0;
  }
  if (!good) refuse("{}: numbers of branches do not fit together", path);
}

void write_branches(const std::string& directory, const BranchList& list, FileSystem& files) {
  std::string branches;
  for (const Branch& b : list.branches) {
    branches += (branches.empty() ? "" : ",\n  ") + JsonLine()
                                                        .add("branch", b.number)
                                                        .add("parent", b.parent)
                                                        .add("step", b.step)
                                                        .add("id", b.id)
                                                        .add("path", b.path)
                                                        .add("given", b.given)
                                                        .add("variant", b.variant)
                                                        .text();
  }
  const std::string text = JsonLine()
                               .add("format", "moiety-branches")
                               .add("version", 1)
                               .add("current", list.current)
                               .add("next", list.next)
                               .raw("branches", "[\n  " + branches + "]")
                               .text();
  const std::string temporary = directory + "/.tmp-branches";
  write_text(files, temporary, text + "\n");
  rename(files, temporary, list_path(directory));
  sync_directory(files, directory);
}

std::optional<std::string> id_of(FileSystem& files, const std::string& path) {
  try {
    return read_manifest(path, files).id;
  } catch (const CheckpointError&) {
    return std::nullopt;
  }
}

// The branch to which the checkpoint with this id belongs; 0 if it is none of the directory's.
int64_t owner_of_id(const std::string& directory, const BranchList& list, const Branch& start,
                    FileSystem& files) {
  if (start.id.empty()) return 0;
  const std::string name = step_name(start.step);
  if (id_of(files, directory + "/" + name) == start.id) return list.owner_of(start.step);
  for (const Branch& b : list.branches) {
    const std::string folder = directory + "/" + branch_name(b.number);
    if (id_of(files, folder + "/" + name) == start.id) return b.number;
  }
  return 0;
}

// The ancestors of branch `next`, and up to which step each of them is one.
std::map<int64_t, int64_t> ancestors(const BranchList& list) {
  std::map<int64_t, int64_t> out;
  int64_t last = list.at(list.next).step;
  for (int64_t b = list.at(list.next).parent; b != 0; b = list.at(b).parent) {
    out[b] = last;
    last = std::min(last, list.at(b).step);
  }
  return out;
}

// Moves the checkpoints out of the directory that are no ancestors of `next`. Run again after a
// crash it does what was left to do.
void move_aside(const std::string& directory, const BranchList& list, FileSystem& files) {
  const std::map<int64_t, int64_t> stay = ancestors(list);
  for (const int64_t step : steps_in(directory, files)) {
    const int64_t owner = list.owner_of(step);
    const auto found = stay.find(owner);
    if (found != stay.end() && step <= found->second) continue;
    const std::string folder = directory + "/" + branch_name(owner);
    if (!size_of(files, folder)) {
      make_directory(files, folder);
      sync_directory(files, directory);
    }
    rename(files, directory + "/" + step_name(step), folder + "/" + step_name(step));
    sync_directory(files, folder);
  }
}

// Moves the checkpoints of `next`'s ancestors back that were once moved aside.
void move_back(const std::string& directory, const BranchList& list, FileSystem& files) {
  for (const auto& [branch, last] : ancestors(list)) {
    const std::string folder = directory + "/" + branch_name(branch);
    for (const int64_t step : steps_in(folder, files)) {
      if (step > last) continue;
      rename(files, folder + "/" + step_name(step), directory + "/" + step_name(step));
      sync_directory(files, directory);
    }
    if (size_of(files, folder) && checkpoint::list(files, folder).empty()) remove(files, folder);
  }
}

void name_latest(const std::string& directory, const Branch& branch, FileSystem& files) {
  const std::string name = step_name(branch.step), path = directory + "/latest";
  if (branch.parent == 0 || !size_of(files, directory + "/" + name)) return remove(files, path);
  write_text(files, directory + "/.tmp-latest", name + "\n");
  rename(files, directory + "/.tmp-latest", path);
}

}  // namespace

int64_t BranchList::owner_of(int64_t step) const {
  int64_t branch = current;
  while (step <= at(branch).step && at(branch).parent != 0) branch = at(branch).parent;
  return branch;
}

std::string branch_name(int64_t number) { return text("branch-{}", number); }

BranchList read_branches(const std::string& directory, FileSystem& files) {
  const std::string path = list_path(directory);
  BranchList list;
  if (!size_of(files, path)) return list;
  try {
    const nlohmann::json json = nlohmann::json::parse(read_text(files, path, kLongestList));
    list.current = json.at("current");
    list.next = json.at("next");
    list.branches.clear();
    for (const nlohmann::json& b : json.at("branches")) {
      list.branches.push_back({b.at("branch"), b.at("parent"), b.at("step"), b.at("id"),
                               b.at("path"), b.at("given"), b.at("variant")});
    }
  } catch (const nlohmann::json::exception& e) {
    refuse("{}: {}", path, e.what());
  }
  check(path, list);
  return list;
}

Branch begin_branch(const std::string& directory, Branch start, FileSystem& files) {
  finish_branching(directory, files);
  if (!size_of(files, directory)) make_directory(files, directory);
  BranchList list = read_branches(directory, files);
  start.parent = owner_of_id(directory, list, start, files);
  const bool unused = !size_of(files, list_path(directory)) && steps_in(directory, files).empty();
  if (unused) list.branches.clear();
  start.number = static_cast<int64_t>(list.branches.size()) + 1;
  list.branches.push_back(start);
  list.next = start.number;
  write_branches(directory, list, files);
  finish_branching(directory, files);
  return start;
}

void finish_branching(const std::string& directory, FileSystem& files) {
  BranchList list = read_branches(directory, files);
  if (list.next == 0) return;
  // Whose a checkpoint in the directory is goes by the current branch: so that is the old one until
  // all of its own are moved aside, and the new one before others come back.
  if (list.current != list.next) {
    move_aside(directory, list, files);
    list.current = list.next;
    write_branches(directory, list, files);
  }
  move_back(directory, list, files);
  name_latest(directory, list.now(), files);
  if (size_of(files, directory + "/best")) update_best(directory, files);
  list.next = 0;
  write_branches(directory, list, files);
}

}  // namespace moiety::checkpoint
