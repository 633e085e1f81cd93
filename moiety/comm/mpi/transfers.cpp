#include "moiety/comm/mpi/transfers.h"

#include <algorithm>
#include <thread>

#include "moiety/base/deadline.h"
#include "moiety/base/error.h"
#include "moiety/comm/mpi/world.h"

namespace moiety::comm::mpi {

template <class Post>
void Transfers::post(int peer, int64_t bytes, bool incoming, Post&& post_piece) {
  const int64_t largest = world_->options.largest_message;
  for (int64_t at = 0; at < bytes; at += largest) {
    Message message{0, peer, incoming};
    const int piece = static_cast<int>(std::min(largest, bytes - at));
    const int code = post_piece(at, piece, &message.request);
    world_->check(code, incoming ? "receive" : "send");
    messages_.push_back(message);
  }
}

void Transfers::send(int peer, int tag, const void* data, int64_t bytes) {
  const Functions& mpi = world_->functions();
  const auto* from = static_cast<const std::byte*>(data);
  post(peer, bytes, false, [&](int64_t at, int piece, Request* request) {
    return mpi.send(from + at, piece, peer, tag, request);
  });
}

void Transfers::receive(int peer, int tag, void* data, int64_t bytes) {
  const Functions& mpi = world_->functions();
  auto* to = static_cast<std::byte*>(data);
  post(peer, bytes, true, [&](int64_t at, int piece, Request* request) {
    return mpi.receive(to + at, piece, peer, tag, request);
  });
}

bool Transfers::done() {
  if (messages_.empty()) return true;
  if (world_->silent()) return false;
  const Functions& mpi = world_->functions();
  std::erase_if(messages_, [&](Message& message) {
    int done = 0;
    world_->check(mpi.test(&message.request, &done), message.incoming ? "receive" : "send");
    return done != 0;
  });
  return messages_.empty();
}

std::vector<int> Transfers::peers() const {
  std::vector<int> out;
  for (const Message& message : messages_) out.push_back(message.peer);
  std::sort(out.begin(), out.end());
  out.erase(std::unique(out.begin(), out.end()), out.end());
  return out;
}

void Transfers::cancel() noexcept {
  constexpr Seconds kLimit{0.1};
  if (messages_.empty() || world_->silent()) return messages_.clear();
  try {
    const Functions& mpi = world_->functions();
    for (Message& message : messages_) {
      if (message.incoming) world_->check(mpi.cancel(&message.request), "cancel");
    }
    const Deadline limit(kLimit);
    while (!done() && !limit.expired()) std::this_thread::yield();
  } catch (...) {  // MPI itself fails
  }
  if (!messages_.empty()) world_->silence();
  messages_.clear();
}

}  // namespace moiety::comm::mpi
