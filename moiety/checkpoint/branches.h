// The branches of a run. A run that goes back to an older checkpoint begins a branch there:
//
//    checkpoints/step-00000004          of branch 1, and where branch 2 begins
//    checkpoints/step-00000006          of branch 2
//    checkpoints/branch-1/step-00000008 moved aside when branch 2 began
//    checkpoints/branches.json          where each branch began; without it there is branch 1 alone
//
// The checkpoints directly in the directory are those of the current branch and its ancestors, so
// whoever takes the newest one follows the last start; those of other branches lie in a folder of
// their own and are never taken nor removed by accident.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "moiety/checkpoint/file_system.h"

namespace moiety::checkpoint {

struct Branch {
  int64_t number = 1;
  int64_t parent = 0;     // branch of the checkpoint that it begins at; 0: it is not of this run
  int64_t step = 0;       // of that checkpoint
  std::string id{};       // its id; empty: the branch begins before the first step
  std::string path{};     // where it was loaded from
  std::string given{};    // the name by which the caller asked for it
  std::string variant{};  // the caller's mark of what it began to try there
  friend bool operator==(const Branch&, const Branch&) = default;
};

struct BranchList {
  std::vector<Branch> branches{Branch{}};  // by number, from 1
  int64_t current = 1;
  int64_t next = 0;  // a branch that is being begun; 0: none

  const Branch& at(int64_t number) const { return branches.at(static_cast<size_t>(number - 1)); }
  const Branch& now() const { return at(current); }
  // The branch to which a checkpoint of this step belongs that lies directly in the directory.
  int64_t owner_of(int64_t step) const;
};

// The branches of a directory of checkpoints. Throws CheckpointError if branches.json is damaged.
BranchList read_branches(const std::string& directory, FileSystem& files = posix());
// The name of a branch's folder: "branch-2".
std::string branch_name(int64_t number);

// Begins a branch at a checkpoint, of which `start` has step, id, path, given and variant; or before
// the first step. Finds its parent by the id, moves the checkpoints aside that are no ancestors, and
// those back that are. Returns it. A crash on the way is made good by finish_branching. For rank 0,
// under the run's lock.
Branch begin_branch(const std::string& directory, Branch start, FileSystem& files = posix());
// Completes the begin of a branch that was interrupted.
void finish_branching(const std::string& directory, FileSystem& files = posix());

}  // namespace moiety::checkpoint
