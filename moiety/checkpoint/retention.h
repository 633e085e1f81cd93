// The directory of a run's checkpoints: which of them are complete, and which are removed.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "moiety/checkpoint/file_system.h"

namespace moiety::checkpoint {

// The name of a step's checkpoint, "step-00001000", and the step of a name (empty if it is none).
std::string step_name(int64_t step);
std::optional<int64_t> step_of(std::string_view name);
// The steps that have a directory, complete or not, newest first.
std::vector<int64_t> steps_in(const std::string& directory, FileSystem& files = posix());

struct CheckpointList {
  std::vector<std::string> complete;    // paths, newest first
  std::vector<std::string> damaged;     // a sentence for each step-<n> that is not complete
  std::vector<std::string> unreadable;  // those of them that the system did not let be read
};
// Lists the checkpoints. One is complete if it is named step-<n>, COMMIT matches the manifest, and
// every file has its size.
CheckpointList list_checkpoints(const std::string& directory, FileSystem& files = posix());
// The newest complete checkpoint. Damaged ones that are newer are named in the log; one that may
// not be read, or a disk that fails, is an Error(kIo).
std::optional<std::string> find_newest_complete(const std::string& directory,
                                                FileSystem& files = posix());

// Removes what interrupted saves left. A checkpoint that was moved away for a newer one of its step
// gets its name back if that one never came. For rank 0, when a run starts and holds its lock.
void recover(const std::string& directory, FileSystem& files = posix());

// The checkpoints that are kept: the newest `last` (0: all of them), those whose step is a multiple
// of `every` (0: none), and the `best` with the lowest validation losses (0: none).
struct Keep {
  int last = 3;
  int every = 0;
  int best = 0;
};
// Removes complete checkpoints except those that are kept, and `keep_step`.
void prune(const std::string& directory, const Keep& keep, int64_t keep_step,
           FileSystem& files = posix());

// Writes the name of the complete checkpoint with the lowest validation loss (of several the
// newest) to the file `best`, which goes away if there is none.
void update_best(const std::string& directory, FileSystem& files = posix());

}  // namespace moiety::checkpoint
