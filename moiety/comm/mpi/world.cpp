#include "moiety/comm/mpi/world.h"

#include <atomic>
#include <cstring>
#include <thread>

#include "moiety/base/error.h"
#include "moiety/comm/flags.h"
#include "moiety/comm/mpi/transfers.h"

namespace moiety::comm::mpi {
namespace {

constexpr auto kProbeInterval = std::chrono::milliseconds(1);
constexpr auto kLookInterval = std::chrono::milliseconds(100);
constexpr Seconds kMessageLimit{0.2};
constexpr Seconds kLastWords{0.02};
constexpr int kAbortKind = 0;
constexpr size_t kLongest = 4000;

}  // namespace

// The board for the text of an abort, in the memory of the host's first rank. The first rank to
// claim it writes the text.
struct World::Board {
  uint64_t claimed;
  uint64_t published;
  char text[kLongest + 1];
};

World::World(const Functions& functions, const MpiGroupOptions& options_in, Processes processes,
             int largest_tag)
    : options(options_in),
      rank(processes.rank),
      size(processes.size),
      functions_(&functions),
      largest_tag_(largest_tag) {
  for (int r = 0; r < size; ++r) {
    if (r != rank) off_board_.push_back(r);
  }
}

void World::meet(std::vector<ProcessIdentity> processes) {
  for (int r = 0; r < size; ++r) {
    if (r != rank && is_visible(processes[r])) watched_.push_back({r, processes[r]});
  }
}

void World::put_up(SymmetricBuffer board, std::vector<bool> on_board) {
  board_memory_ = std::move(board);
  std::erase_if(off_board_, [&](int r) { return on_board[r]; });
}

int64_t World::board_bytes() { return sizeof(Board); }

World::Board* World::board() const {
  return board_memory_ ? reinterpret_cast<Board*>(board_memory_.peer(0)) : nullptr;
}

const Functions& World::functions() const {
  if (silent_) {
    fail(ErrorKind::kComm, "{} is not used any more: {}", functions_->name, stopped_.value_or(""));
  }
  return *functions_;
}

void World::check(int code, const char* what) const {
  if (code == 0) return;
  char text[512];
  functions_->error_text(code, text, sizeof(text));
  fail(ErrorKind::kComm, "{}: {}", what, text);
}

int World::tag(uint64_t group, int kind) const {
  const uint64_t tag = group * kTagsOfAGroup + kind;
  MOIETY_CHECK(tag <= uint64_t(largest_tag_), "communicators: {} groups were made, {} has {}",
               group, functions_->name, largest_tag_ / kTagsOfAGroup);
  return static_cast<int>(tag);
}

void World::silence() noexcept {
  silent_ = true;
  abort("messages to its peers could not be taken back");
}

void World::abort(std::string_view reason) noexcept {
  try {
    read_board();
    if (stopped_) return;
    stop(text("rank {} failed: {}", rank, reason));
    send_abort();
  } catch (...) {  // out of memory: peers see this process end
  }
}

// Ends the world with this reason and puts it on the board for the other ranks of the host.
void World::stop(const std::string& reason) {
  stopped_ = reason.substr(0, kLongest);
  Board* board = this->board();
  if (!board) return;
  uint64_t unclaimed = 0;
  if (!std::atomic_ref(board->claimed).compare_exchange_strong(unclaimed, 1)) return;
  std::memcpy(board->text, stopped_->c_str(), stopped_->size() + 1);
  store_release(board->published, 1);
}

void World::read_board() {
  Board* board = this->board();
  if (!stopped_ && board && load_acquire(board->published) != 0) stopped_ = board->text;
}

void World::send_abort() noexcept {
  if (silent_ || off_board_.empty() || !stopped_) return;
  try {
    message_ = *stopped_;
    Transfers transfers(*this);
    for (const int peer : off_board_) {
      transfers.send(peer, tag(0, kAbortKind), message_.data(), std::ssize(message_));
    }
    // The peers take the messages when they look; a peer that does not is late itself.
    const Deadline limit(kMessageLimit);
    while (!transfers.done() && !limit.expired()) std::this_thread::yield();
  } catch (...) {  // MPI fails as well: peers see this process end
  }
}

void World::receive_abort() {
  int found = 0, peer = 0, bytes = 0;
  check(functions().probe(tag(0, kAbortKind), &found, &peer, &bytes), "probe");
  if (!found) return;
  std::string received(bytes, ' ');
  Transfers transfers(*this);
  transfers.receive(peer, tag(0, kAbortKind), received.data(), bytes);
  const Deadline limit(kMessageLimit);
  while (!transfers.done()) {
    if (limit.expired()) return;  // the sender ended in the middle of it
    std::this_thread::yield();
  }
  if (!stopped_) stop(received);
}

std::optional<std::string> World::dead_peer() const {
  for (const Peer& peer : watched_) {
    if (has_ended(peer.process)) {
      return text("rank {} (process {}) has ended", peer.rank, peer.process.pid);
    }
  }
  return std::nullopt;
}

void World::look_at_peers() {
  last_look_ = Clock::now();
  const auto dead = dead_peer();
  if (!dead) return;
  // The peer may have said more before it ended, and may itself have ended because of another one.
  const Deadline limit(kLastWords);
  do {
    read_board();
    if (!stopped_ && !off_board_.empty() && !silent_) receive_abort();
  } while (!stopped_ && !off_board_.empty() && !limit.expired());
  if (stopped_) return;
  stop(*dead);
  send_abort();
}

std::optional<std::string> World::stopped() {
  read_board();
  if (stopped_) return stopped_;
  const auto now = Clock::now();
  if (!off_board_.empty() && !silent_ && now - last_probe_ > kProbeInterval) {
    last_probe_ = now;
    receive_abort();
  }
  if (!stopped_ && now - last_look_ > kLookInterval) look_at_peers();
  return stopped_;
}

std::optional<std::string> World::look_now() {
  read_board();
  if (!stopped_) look_at_peers();
  return stopped_;
}

}  // namespace moiety::comm::mpi
