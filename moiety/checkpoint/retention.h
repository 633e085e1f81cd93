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

// Removes complete checkpoints except the newest `keep_last` (0: keeps all), those whose step is a
// multiple of `keep_every` (0: none), and `keep_step`.
void prune(const std::string& directory, int keep_last, int keep_every, int64_t keep_step,
           FileSystem& files = posix());

}  // namespace moiety::checkpoint
