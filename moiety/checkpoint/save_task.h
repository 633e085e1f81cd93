// One rank's part of a save, from its file to the directory's name, without communication, since it
// runs beside a training that communicates. Ranks tell each other through files:
//
//    .tmp-step-<n>-<id>/rank-<r>.done    rank r's file is on the disk (a manifest of one file), or
//                                        what failed there (see report_of)
//
// Rank 0 waits for all of them, checks that the pieces tile every tensor, writes manifest and
// COMMIT, renames the directory and prunes. An error on any rank makes it remove the directory. The
// other ranks see from the name whether the save succeeded.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#include "moiety/checkpoint/rank_file.h"
#include "moiety/checkpoint/saver.h"

namespace moiety::checkpoint {

class SaveTask {
 public:
  // `head` has id and run. `directory` is the directory of all checkpoints.
  SaveTask(RankFile file, Manifest head, int rank, std::string directory,
           const SaveOptions& options, FileSystem& files);

  // The path of a save's temporary directory, which rank 0 has made before run() and all ranks see.
  static std::string temporary_path(const std::string& directory, const Manifest& head);
  // The path that the checkpoint will have.
  const std::string& path() const { return path_; }
  RankFile& file() { return file_; }

  // Does the rank's part. Returns the bytes of all files (on rank 0; of its own elsewhere) when the
  // checkpoint is complete; throws when it is given up.
  uint64_t run();
  // Lets run() end soon, with an error unless the checkpoint is complete already.
  void stop() { stop_ = true; }
  // Removes what the save left; for rank 0, if the save ends before run().
  void discard() const;

 private:
  uint64_t lead();
  uint64_t follow();
  void announce(const std::string& done) const;
  void collect(Manifest& manifest) const;
  void commit(const Manifest& manifest) const;
  void tidy() const;
  void await_verdict() const;

  std::string done_path(int rank) const;
  std::string old_path() const { return directory_ + "/.old-" + head_.id; }

  RankFile file_;
  Manifest head_;
  int rank_;
  std::string directory_, temporary_, path_;
  SaveOptions options_;
  FileSystem& files_;
  std::atomic<bool> stop_ = false;
};

}  // namespace moiety::checkpoint
