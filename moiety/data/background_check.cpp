#include "moiety/data/background_check.h"

#include <chrono>

#include "moiety/base/error.h"

namespace moiety::data {

BackgroundCheck::File::File(std::shared_ptr<const TokenFile> file)
    : tokens(std::move(file)),
      asked(new std::atomic<bool>[tokens->pieces()]()),
      crcs(tokens->pieces()),
      left(tokens->pieces()) {}

BackgroundCheck::BackgroundCheck(std::vector<std::shared_ptr<const TokenFile>> files) {
  for (auto& file : files) files_.emplace_back(std::move(file));
}

BackgroundCheck::~BackgroundCheck() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void BackgroundCheck::touch(size_t file, uint64_t begin, uint64_t count) {
  rethrow();
  if (count == 0) return;
  const TokenFileHeader& header = files_[file].tokens->header();
  uint64_t piece = begin * header.token_bytes / kPieceBytes;
  uint64_t last = ((begin + count) * header.token_bytes - 1) / kPieceBytes;
  if (files_[file].asked[piece] && files_[file].asked[last] && last - piece <= 1) return;
  if (!(header.flags & kPiecesHaveChecksums)) {
    piece = 0;
    last = files_[file].tokens->pieces() - 1;
  }
  for (; piece <= last; ++piece) ask(file, piece);
}

void BackgroundCheck::ask(size_t file, uint64_t piece) {
  if (files_[file].asked[piece].exchange(true)) return;
  const std::lock_guard lock(mutex_);
  queue_.push_back({file, piece});
  if (!thread_.joinable()) thread_ = std::thread([this] { work(); });
  changed_.notify_all();
}

void BackgroundCheck::rethrow() const {
  if (failed_) std::rethrow_exception(error_);
}

void BackgroundCheck::work() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return stop_ || !queue_.empty(); });
    if (stop_) return;
    const Place place = queue_.front();
    lock.unlock();
    try {
      check(place);
    } catch (...) {
      error_ = std::current_exception();
      failed_ = true;
    }
    lock.lock();
    queue_.pop_front();
    if (failed_) stop_ = true;
    changed_.notify_all();
  }
}

void BackgroundCheck::check(const Place& place) {
  File& file = files_[place.file];
  const TokenFile::PieceCheck piece = file.tokens->check_piece(place.piece);
  if (!piece.fault.empty()) throw DataError("{}", piece.fault);
  file.crcs[place.piece] = piece.crc32c;
  if (--file.left == 0) file.tokens->check_whole(file.crcs);
}

uint64_t BackgroundCheck::settle(double limit_s) {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, std::chrono::duration<double>(limit_s),
                    [&] { return queue_.empty() || failed_; });
  rethrow();
  return queue_.size();
}

}  // namespace moiety::data
