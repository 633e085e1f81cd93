// Writes checkpoints. Every rank writes what it owns into a file of its own, all of it under a
// temporary name; the directory gets its name when everything is on the disk. A crash at any point
// leaves the old checkpoints, or the old and the new one, never a mixture.
#pragma once

#include <cstdint>
#include <string>

#include "moiety/base/stream.h"
#include "moiety/checkpoint/manifest.h"
#include "moiety/comm/bootstrap.h"

namespace moiety::checkpoint {

struct SaveOptions {
  int keep_last = 3;   // newest complete checkpoints that are kept; 0 keeps all
  int keep_every = 0;  // steps whose multiples are kept besides; 0: none
  bool verify = true;  // read every file back
  int64_t piece_bytes = int64_t{64} << 20;  // limit of a piece
};

struct SaveResult {
  std::string path;
  std::string id;
  uint64_t bytes = 0;  // of all files
};

class Saver {
 public:
  // `directory` ("runs/x/checkpoints") is one file system for all ranks; its parent exists.
  Saver(std::string directory, comm::Bootstrap& bootstrap, SaveOptions options = {},
        FileSystem& files = posix());

  // Collective. Returns when step-<n> is on the disk and older checkpoints are pruned; a checkpoint
  // of the same step is replaced. The config and state of rank 0 are saved. If one rank fails, all
  // throw the same Error, the temporary directory is removed, and older checkpoints stay. What
  // fails behind the commit (`latest`, pruning) is logged as a warning.
  SaveResult save(const StateView& view, const RunState& run, Stream stream);

 private:
  // Writes this rank's file; what is in it, as a manifest of one file.
  Manifest write_file(const StateView& view, const Manifest& head,
                      const std::string& temporary) const;
  void report(const Manifest& part, const std::string& temporary) const;
  void commit(Manifest head, const std::string& temporary, SaveResult& result) const;
  void tidy(const Manifest& head) const;
  std::string old_path(const Manifest& head) const;

  std::string directory_;
  comm::Bootstrap& bootstrap_;
  SaveOptions options_;
  FileSystem& files_;
};

}  // namespace moiety::checkpoint
