// The check of token files while they are first read.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "moiety/data/token_file.h"

namespace moiety::data {

// Checks pieces of token files on a thread of its own, in the order in which they are first read.
// In a file without checksums of pieces a first read asks for all of them, since only the whole has
// a checksum. All functions may be called by several threads.
class BackgroundCheck {
 public:
  explicit BackgroundCheck(std::vector<std::shared_ptr<const TokenFile>> files);
  ~BackgroundCheck();
  BackgroundCheck(const BackgroundCheck&) = delete;
  BackgroundCheck& operator=(const BackgroundCheck&) = delete;

  // Tells that tokens [begin, begin + count) of a file are read. Throws the DataError of the first
  // piece of any file that was found damaged.
  void touch(size_t file, uint64_t begin, uint64_t count);
  // Waits until all pieces that were read are checked, at most `limit_s`, and returns the number of
  // those that are not. Throws as touch does.
  uint64_t settle(double limit_s);

 private:
  struct File {
    explicit File(std::shared_ptr<const TokenFile> tokens);
    std::shared_ptr<const TokenFile> tokens;
    std::unique_ptr<std::atomic<bool>[]> asked;  // by piece
    std::vector<uint32_t> crcs;                  // by piece
    uint64_t left;                               // pieces that have not been checked
  };
  struct Place {
    size_t file;
    uint64_t piece;
  };
  void ask(size_t file, uint64_t piece);
  void work();
  void check(const Place& place);
  void rethrow() const;

  std::vector<File> files_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Place> queue_;  // its front is under way
  bool stop_ = false;
  std::exception_ptr error_;  // written before failed_, read behind it
  std::atomic<bool> failed_ = false;
  std::thread thread_;  // runs from the first piece that is asked for
};

}  // namespace moiety::data
