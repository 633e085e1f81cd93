// The saving of checkpoints, beside training or while it waits. Every rank writes what it owns into
// its own file, under a temporary name; the directory gets its name when everything is on the disk.
// A crash at any point leaves the old checkpoints, or the old and the new one, never a mixture.
//
//    Saver saver("runs/x/checkpoints", world.bootstrap());
//    saver.start(view, run, stream);            // returns after a copy of the state was made
//    ... training steps; at every step border:
//    if (auto report = saver.poll()) ...        // tells once how a save ended
//    saver.wait();                              // before the end: the same answer on all ranks
//
// The background never communicates: ranks tell each other through files (save_task.h), so ranks
// may be threads or processes. One save runs at a time.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "moiety/base/buffer.h"
#include "moiety/base/deadline.h"
#include "moiety/base/stream.h"
#include "moiety/checkpoint/manifest.h"
#include "moiety/checkpoint/retention.h"
#include "moiety/comm/bootstrap.h"
#include "moiety/data/tokenizer.h"

namespace moiety::checkpoint {

struct SaveOptions {
  Keep keep;           // what is pruned when a save is complete; best > 0 writes `best` too
  bool verify = true;  // read every file back
  int64_t piece_bytes = int64_t{64} << 20;       // limit of a piece
  Seconds deadline{3600};                        // for the slowest rank's file
  std::vector<data::TokenizerFile> tokenizer{};  // files that lie beside the manifest
};

struct SaveResult {
  int64_t step = 0;
  std::string path;
  std::string id;
  uint64_t bytes = 0;          // of all files; before wait() only rank 0 knows the others' bytes
  double seconds = 0;          // from the call to the end of the save
  double blocked_seconds = 0;  // the part of `seconds` for which the caller was held up
};

// The end of a save, good if `error` is empty. On rank 0 the error names the rank that failed, its
// file and the system's words; other ranks may know only that rank 0 gave the checkpoint up.
struct SaveReport {
  SaveResult result;
  std::string error;
};

class Saver {
 public:
  // `directory` ("runs/x/checkpoints") is on one file system for all ranks; its parent exists.
  Saver(std::string directory, comm::Bootstrap& bootstrap, SaveOptions options = {},
        FileSystem& files = posix());
  // Gives a save under way two seconds to end, then gives it up, since peers may be gone. Call
  // wait() if the save is to be kept.
  ~Saver();
  Saver(const Saver&) = delete;
  Saver& operator=(const Saver&) = delete;

  // Starts a save of `view`. Collective. Returns when the state was copied, behind the work on
  // `stream`; the state is then free to change. State on a GPU is copied to pinned memory, and
  // `stream` is of that GPU. A checkpoint of the same step is replaced, older ones are pruned. The
  // config and state of rank 0 are saved.
  //
  // Waits (logged) for a save that is still under way. Where there is no memory for the copy,
  // returns when this rank's file is written (logged). Throws, the same on all ranks, if ranks
  // disagree, an argument is wrong, or the temporary directory cannot be made; nothing is left
  // then. Every later failure comes from poll() and wait().
  void start(const StateView& view, const RunState& run, Stream stream);

  // The end of the last save: once, when it is known. Never waits; not collective. Ranks that want
  // to know call it at least once between two starts.
  std::optional<SaveReport> poll();

  // Waits for the save that was started last. Collective. All ranks return rank 0's result or throw
  // the same error: the checkpoint is complete, or nothing of it is left and older ones stay. A
  // failure behind the commit (`latest`, pruning) is logged as a warning. Empty if no save was
  // started. A second call gives the same answer.
  std::optional<SaveResult> wait();

  // Runs start() and wait() without the copy: the caller's threads write.
  SaveResult save(const StateView& view, const RunState& run, Stream stream);

  // From the next save on, removes older checkpoints or leaves all of them.
  void keep_all(bool all) { keeps_all_ = all; }

  // Takes the memory for the copy of such a state beforehand. It is no error if there is too
  // little.
  void reserve(const StateView& view);

 private:
  class Job;
  // The collective part of a save.
  std::unique_ptr<Job> agree(const StateView& view, const RunState& run, const Stream& stream);
  // Waits for the job under way and takes over its result.
  void finish();
  bool reserve(uint64_t bytes, Device device);

  std::string directory_;
  comm::Bootstrap& bootstrap_;
  SaveOptions options_;
  bool keeps_all_ = false;
  FileSystem& files_;
  Buffer snapshot_;
  std::unique_ptr<Job> job_;  // under way; reads the snapshot
  std::optional<SaveReport> last_;
  std::string last_report_;  // report of its error (together.h)
  bool told_ = true;         // last_ was returned by poll() or wait()
};

}  // namespace moiety::checkpoint
