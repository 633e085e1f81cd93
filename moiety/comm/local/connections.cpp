#include "moiety/comm/local/connections.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

namespace moiety::comm::local {
namespace {

// Bytes that are read from one peer before it is the next one's turn.
constexpr int64_t kTurn = 8 << 20;
constexpr int kIdle = 30;
constexpr long kPause = 50000;  // nanoseconds
// What sockets hold, as far as the system lets them.
constexpr int kSocketBytes = 4 << 20;

bool would_wait(int error) { return error == EAGAIN || error == EWOULDBLOCK || error == EINTR; }

}  // namespace

Connections::Connections(const std::vector<int>& sockets) : peers_(sockets.size()) {
  for (size_t r = 0; r < sockets.size(); ++r) {
    if (sockets[r] < 0) continue;
    peers_[r].socket = sockets[r];
    peers_[r].takes = peers_[r].gives = true;
    for (const int option : {SO_SNDBUF, SO_RCVBUF}) {
      ::setsockopt(sockets[r], SOL_SOCKET, option, &kSocketBytes, sizeof(kSocketBytes));
    }
  }
}

Connections::~Connections() {
  for (const Peer& peer : peers_) {
    if (peer.socket >= 0) ::close(peer.socket);
  }
}

Connections::Request Connections::send(const void* data, int bytes, int peer, int tag) {
  Peer& to = peers_[peer];
  to.sending.push_back({++last_, {tag, bytes}, static_cast<const std::byte*>(data), 0});
  const Request out = last_;
  if (to.sending.size() == 1) write(to);
  return out;
}

Connections::Request Connections::receive(void* data, int bytes, int peer, int tag) {
  Peer& from = peers_[peer];
  const Request out = ++last_;
  const auto found = std::find_if(from.kept.begin(), from.kept.end(),
                                  [&](const Kept& kept) { return kept.tag == tag; });
  if (found == from.kept.end()) {
    from.wanted.push_back({out, tag, static_cast<std::byte*>(data), bytes});
    return out;
  }
  const int64_t size = std::ssize(found->bytes);
  if (size > 0 && size <= bytes) std::memcpy(data, found->bytes.data(), size_t(size));
  ended_[out] = size <= bytes ? 0 : kTooLong;
  from.kept.erase(found);
  return out;
}

bool Connections::test(Request request, int* code) {
  auto found = ended_.find(request);
  if (found == ended_.end()) {
    progress();
    found = ended_.find(request);
  }
  if (found == ended_.end()) return false;
  *code = found->second;
  ended_.erase(found);
  return true;
}

void Connections::cancel(Request request) {
  for (Peer& peer : peers_) {
    if (std::erase_if(peer.wanted, [&](const Wanted& w) { return w.request == request; }) > 0) {
      ended_[request] = 0;
    }
    Coming& in = peer.coming;
    if (in.place == Place::kReceive && in.receive.request == request) {
      in.place = Place::kNowhere;
      ended_[request] = 0;
    }
  }
}

bool Connections::probe(int tag, int* peer, int* bytes) {
  progress();
  for (size_t r = 0; r < peers_.size(); ++r) {
    for (const Kept& kept : peers_[r].kept) {
      if (kept.tag != tag) continue;
      *peer = static_cast<int>(r);
      *bytes = static_cast<int>(kept.bytes.size());
      return true;
    }
  }
  return false;
}

Connections::Wanted Connections::take_wanted(Peer& peer, int tag) {
  const auto found = std::find_if(peer.wanted.begin(), peer.wanted.end(),
                                  [&](const Wanted& w) { return w.tag == tag; });
  if (found == peer.wanted.end()) return {};
  const Wanted out = *found;
  peer.wanted.erase(found);
  return out;
}

bool Connections::is_held(const Peer& peer) {
  const Coming& in = peer.coming;
  return in.header_read == sizeof(Header) && in.place == Place::kUnknown &&
         in.header.bytes > kLongestKept &&
         std::none_of(peer.wanted.begin(), peer.wanted.end(),
                      [&](const Wanted& w) { return w.tag == in.header.tag; });
}

void Connections::progress() {
  std::vector<pollfd> fds;
  std::vector<Peer*> of;
  for (Peer& peer : peers_) {
    short events = 0;
    if (peer.takes && !peer.sending.empty()) events |= POLLOUT;
    if (peer.gives && !is_held(peer)) events |= POLLIN;
    if (events == 0) continue;
    fds.push_back({peer.socket, events, 0});
    of.push_back(&peer);
  }
  if (fds.empty()) return;
  // Who finds nothing again and again lets the peer have the core, and wakes when something comes.
  const timespec pause{0, idle_ < kIdle ? 0 : kPause};
  if (::ppoll(fds.data(), fds.size(), &pause, nullptr) <= 0) {
    ++idle_;
    return;
  }
  idle_ = 0;
  for (size_t i = 0; i < fds.size(); ++i) {
    if (fds[i].events & POLLOUT && fds[i].revents & (POLLOUT | POLLERR | POLLHUP)) write(*of[i]);
    if (fds[i].events & POLLIN && fds[i].revents & (POLLIN | POLLERR | POLLHUP)) read(*of[i]);
  }
}

void Connections::write(Peer& peer) {
  while (peer.takes && !peer.sending.empty()) {
    Sending& out = peer.sending.front();
    const int64_t all = int64_t{sizeof(Header)} + out.header.bytes;
    std::array<iovec, 2> parts;
    int count = 0;
    if (out.written < int64_t{sizeof(Header)}) {
      parts[count++] = {reinterpret_cast<std::byte*>(&out.header) + out.written,
                        sizeof(Header) - size_t(out.written)};
    }
    const int64_t sent = std::max<int64_t>(0, out.written - int64_t{sizeof(Header)});
    if (sent < out.header.bytes) {
      parts[count++] = {const_cast<std::byte*>(out.data) + sent, size_t(out.header.bytes - sent)};
    }
    msghdr message{};
    message.msg_iov = parts.data();
    message.msg_iovlen = size_t(count);
    const ssize_t bytes = ::sendmsg(peer.socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (bytes < 0) {
      if (!would_wait(errno)) peer.takes = false;
      return;
    }
    out.written += bytes;
    if (out.written < all) return;
    ended_[out.request] = 0;
    peer.sending.pop_front();
  }
}

int64_t Connections::read_some(Peer& peer, void* to, int64_t most) {
  const ssize_t bytes = ::recv(peer.socket, to, size_t(most), MSG_DONTWAIT);
  if (bytes == 0 || (bytes < 0 && !would_wait(errno))) peer.gives = false;
  return std::max<ssize_t>(0, bytes);
}

void Connections::read(Peer& peer) {
  std::array<std::byte, 64 << 10> nowhere;
  for (int64_t turn = 0; turn < kTurn && peer.gives;) {
    Coming& in = peer.coming;
    const int64_t header_left = int64_t{sizeof(Header)} - in.header_read;
    if (header_left > 0) {
      const int64_t bytes =
          read_some(peer, reinterpret_cast<std::byte*>(&in.header) + in.header_read, header_left);
      in.header_read += bytes;
      if (bytes < header_left) return;
    }
    if (is_held(peer)) return;
    if (in.place == Place::kUnknown) place(peer);
    const int64_t left = in.header.bytes - in.read;
    if (left > 0) {
      std::byte* const to = in.place == Place::kReceive ? in.receive.to + in.read
                            : in.place == Place::kKept  ? in.kept.data() + in.read
                                                        : nowhere.data();
      const bool lost = in.place == Place::kNowhere;
      const int64_t bytes =
          read_some(peer, to, lost ? std::min<int64_t>(left, std::ssize(nowhere)) : left);
      in.read += bytes;
      turn += bytes;
      if (bytes == 0) return;
    }
    if (in.read == in.header.bytes) arrive(peer);
  }
}

// Decides where the bytes of the message go whose header is there.
void Connections::place(Peer& peer) {
  Coming& in = peer.coming;
  in.receive = take_wanted(peer, in.header.tag);
  if (in.receive.request == 0) {
    in.place = Place::kKept;
    in.kept.resize(size_t(in.header.bytes));
  } else if (in.receive.bytes < in.header.bytes) {
    in.place = Place::kNowhere;
    ended_[in.receive.request] = kTooLong;
  } else {
    in.place = Place::kReceive;
  }
}

// Ends a message whose bytes are all here.
void Connections::arrive(Peer& peer) {
  Coming in = std::move(peer.coming);
  peer.coming = {};
  if (in.place == Place::kReceive) ended_[in.receive.request] = 0;
  if (in.place != Place::kKept) return;
  // A receive may have come while the bytes were read.
  const Wanted wanted = take_wanted(peer, in.header.tag);
  if (wanted.request == 0) {
    peer.kept.push_back({in.header.tag, std::move(in.kept)});
    return;
  }
  const bool fits = in.header.bytes <= wanted.bytes;
  if (fits && in.header.bytes > 0) std::memcpy(wanted.to, in.kept.data(), in.kept.size());
  ended_[wanted.request] = fits ? 0 : kTooLong;
}

}  // namespace moiety::comm::local
