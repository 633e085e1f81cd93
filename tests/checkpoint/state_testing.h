// A small training state, cut in several ways over ranks, for the tests of saving and loading.
#pragma once

#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "moiety/base/buffer.h"
#include "moiety/checkpoint/loader.h"
#include "moiety/checkpoint/saver.h"
#include "moiety/comm/thread_group.h"
#include "tests/support/error_of.h"

namespace moiety::checkpoint {

// A directory that disappears with the object.
class TemporaryDirectory {
 public:
  TemporaryDirectory();
  ~TemporaryDirectory();
  const std::string& path() const { return path_; }
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

// The way in which a logical tensor is divided.
enum class Cut {
  kRows,     // the first dimension
  kColumns,  // the last dimension
  kFlat,     // ranges of elements, which begin and end inside of rows
  kBlocks,   // both of the first two dimensions, every second block to the next rank
  kLast,     // everything on the last rank
};

struct LogicalState {
  std::string tensor, slot;
  DType dtype;
  std::vector<int64_t> shape;
};

using State = std::vector<LogicalState>;

// Names of the hard cases are in their tensors' names.
const State& small_state();
// Three tensors, for tests that save and load thousands of times.
const State& tiny_state();

// Element i of a tensor gets a value that only its name, i and `version` decide.
void fill(const StateView& view, int version);
// The number of elements that are not those of `version`.
int64_t differences(const StateView& view, int version);

// The part of a state that one rank owns.
class RankState {
 public:
  RankState(const State& state, Cut cut, int rank, int ranks);
  const StateView& view() const { return view_; }
  void fill(int version) { checkpoint::fill(view_, version); }
  void poison();
  int64_t differences(int version) const { return checkpoint::differences(view_, version); }

 private:
  StateView view_;
  std::vector<Buffer> memory_;
};

RunState run_state(int64_t step, int ranks);

// Body(rank, bootstrap) on so many thread ranks.
void on_ranks(int ranks, const std::function<void(int, comm::Bootstrap&)>& body);

// Saves `version` of a state from a cut over ranks.
SaveResult save_state(const State& state, const std::string& directory, Cut cut, int ranks,
                      int64_t step, int version, SaveOptions options = {},
                      FileSystem& files = posix());
// Loads it under a cut; how many elements are not those of `version`.
int64_t load_state(const State& state, const std::string& path, Cut cut, int ranks, int version,
                   LoadOptions options = {});
// The same with small_state.
SaveResult save_small(const std::string& directory, Cut cut, int ranks, int64_t step, int version,
                      SaveOptions options = {});
int64_t load_small(const std::string& path, Cut cut, int ranks, int version,
                   LoadOptions options = {});

// The version of tiny_state that a checkpoint holds, of [0, 4); throws Error if it cannot be
// loaded, std::runtime_error if it holds none of them. `bootstrap` is of one rank. Cheap: thousands
// are tried.
int version_of(const std::string& path, comm::Bootstrap& bootstrap);

// Few bytes a piece, so that small tensors have many.
SaveOptions small_pieces();

std::string read_file(const std::string& path);
void write_file(const std::string& path, const std::string& bytes);

}  // namespace moiety::checkpoint
