#include "moiety/comm/memory_exchange.h"

#include <cerrno>
#include <cstddef>
#include <cstring>
#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "moiety/base/error.h"
#include "moiety/comm/agree.h"

namespace moiety::comm {
namespace {

[[noreturn]] void fail_with_errno(const char* what) {
  fail(ErrorKind::kUnsupported, "{}: {}", what, std::strerror(errno));
}

struct Address {
  sockaddr_un name{};
  socklen_t length = 0;
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&name); }
};

Address socket_address(const Nonce& nonce) {
  const std::string name = text("moiety-{:016x}{:016x}", nonce[0], nonce[1]);
  Address out;
  out.name.sun_family = AF_UNIX;
  // The leading zero makes the name abstract: there is no file.
  std::memcpy(out.name.sun_path + 1, name.data(), name.size());
  out.length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return out;
}

Descriptor new_socket() {
  Descriptor out(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (out.get() < 0) fail_with_errno("socket");
  return out;
}

Descriptor listen_as(const Nonce& nonce, int peers) {
  Descriptor out = new_socket();
  const Address address = socket_address(nonce);
  if (::bind(out.get(), address.get(), address.length) != 0) fail_with_errno("bind");
  if (::listen(out.get(), peers) != 0) fail_with_errno("listen");
  return out;
}

Memory map(const Descriptor& file, int64_t bytes) {
  void* p = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file.get(), 0);
  if (p == MAP_FAILED) fail_with_errno("mmap");
  return Memory(static_cast<std::byte*>(p), [bytes](std::byte* q) { ::munmap(q, bytes); });
}

Descriptor open_memory() {
  Descriptor out(::memfd_create("moiety", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (out.get() < 0) fail_with_errno("memfd_create");
  return out;
}

// Takes the pages now, since a page that cannot be had later ends the process without a word.
void allocate(const Descriptor& file, int64_t bytes) {
  int error = 0;
  do {
    error = ::posix_fallocate(file.get(), 0, bytes);
  } while (error == EINTR);
  if (error == ENOMEM || error == ENOSPC) fail(ErrorKind::kOutOfMemory, "out of memory");
  if (error != 0) fail(ErrorKind::kOutOfMemory, "{}", std::strerror(error));
}

// Seals the file, so that no peer can shorten memory that others have mapped.
void seal(const Descriptor& file) {
  if (::fcntl(file.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    fail_with_errno("sealing");
  }
}

// The message that goes with a descriptor.
struct Greeting {
  uint64_t magic = 0x314d454d59544945ull;
  int64_t rank = 0;
};

// A message of one greeting, with room for one descriptor.
struct Message {
  Greeting greeting;
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  iovec data{&greeting, sizeof(greeting)};
  msghdr header{};

  Message() {
    header.msg_iov = &data;
    header.msg_iovlen = 1;
    header.msg_control = control;
    header.msg_controllen = sizeof(control);
  }
  Message(const Message&) = delete;
  Message& operator=(const Message&) = delete;
};

// Sends without waiting: the connection, and what is sent on it, stay in the peer's queue until the
// peer accepts it.
void send_descriptor(const Nonce& peer, int rank, const Descriptor& file) {
  const Descriptor connection = new_socket();
  const Address address = socket_address(peer);
  if (::connect(connection.get(), address.get(), address.length) != 0) fail_with_errno("connect");
  Message message;
  message.greeting.rank = rank;
  cmsghdr* header = CMSG_FIRSTHDR(&message.header);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(int));
  const int fd = file.get();
  std::memcpy(CMSG_DATA(header), &fd, sizeof(fd));
  if (::sendmsg(connection.get(), &message.header, MSG_NOSIGNAL) != ssize_t{sizeof(Greeting)}) {
    fail_with_errno("sendmsg");
  }
}

bool is_own_user(const Descriptor& connection) {
  ucred credentials{};
  socklen_t length = sizeof(credentials);
  if (::getsockopt(connection.get(), SOL_SOCKET, SO_PEERCRED, &credentials, &length) != 0) {
    fail_with_errno("the peer's credentials");
  }
  return credentials.uid == ::getuid();
}

// Accepts the next connection of this user and ignores those of others who found the socket. All
// peers have sent already, so having to wait is a fault.
Descriptor accept_peer(const Descriptor& listener) {
  constexpr int kMilliseconds = 1000;
  while (true) {
    pollfd waiting{listener.get(), POLLIN, 0};
    if (::poll(&waiting, 1, kMilliseconds) != 1) {
      fail(ErrorKind::kUnsupported, "a connection is missing");
    }
    Descriptor connection(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (connection.get() < 0) fail_with_errno("accept");
    if (is_own_user(connection)) return connection;
  }
}

struct Received {
  int rank = -1;
  Descriptor file;
};

Received receive_descriptor(const Descriptor& listener) {
  const Descriptor connection = accept_peer(listener);
  Message message;
  const ssize_t bytes =
      ::recvmsg(connection.get(), &message.header, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
  if (bytes < 0) fail_with_errno("recvmsg");
  Received out;
  const cmsghdr* header = CMSG_FIRSTHDR(&message.header);
  if (header && header->cmsg_type == SCM_RIGHTS && header->cmsg_len == CMSG_LEN(sizeof(int))) {
    int fd = -1;
    std::memcpy(&fd, CMSG_DATA(header), sizeof(fd));
    out.file = Descriptor(fd);
  }
  if (bytes != ssize_t{sizeof(Greeting)} || message.greeting.magic != Greeting().magic ||
      out.file.get() < 0) {
    fail(ErrorKind::kUnsupported, "a message of {} bytes is not a peer's", bytes);
  }
  out.rank = static_cast<int>(message.greeting.rank);
  return out;
}

Memory map_received(int rank, const Descriptor& file, int64_t bytes) {
  struct stat has {};
  if (::fstat(file.get(), &has) != 0) fail_with_errno("fstat");
  if (has.st_size < bytes) {
    fail(ErrorKind::kUnsupported, "rank {} sent {} bytes of memory, expected {}", rank, has.st_size,
         bytes);
  }
  return map(file, bytes);
}

}  // namespace

Descriptor::~Descriptor() {
  if (fd_ >= 0) ::close(fd_);
}

std::vector<Descriptor> exchange_descriptors(Bootstrap& bootstrap, const std::string& what,
                                             const Descriptor& mine,
                                             const std::vector<Nonce>& nonces) {
  const int me = bootstrap.rank(), ranks = bootstrap.size();
  std::vector<Descriptor> out(ranks);
  Descriptor listener;
  const auto step = [&](const std::string& doing, auto&& run) {
    agree_on(bootstrap, what, doing, ErrorKind::kUnsupported, run);
  };
  step("open a socket", [&] { listener = listen_as(nonces[me], ranks); });
  step("hand over its memory", [&] {
    for (int i = 1; i < ranks; ++i) send_descriptor(nonces[(me + i) % ranks], me, mine);
  });
  step("take its peers' memory", [&] {
    for (int i = 1; i < ranks; ++i) {
      Received received = receive_descriptor(listener);
      const int r = received.rank;
      if (r < 0 || r >= ranks || r == me || out[r].get() >= 0) {
        fail(ErrorKind::kUnsupported, "rank {} sent its memory twice", r);
      }
      out[r] = std::move(received.file);
    }
  });
  return out;
}

std::vector<Memory> exchange_memory(Bootstrap& bootstrap, const std::string& what, int64_t bytes,
                                    const std::vector<Nonce>& nonces) {
  const int me = bootstrap.rank(), ranks = bootstrap.size();
  std::vector<Memory> out(ranks);
  Descriptor file;
  const auto step = [&](const std::string& doing, ErrorKind kind, auto&& run) {
    agree_on(bootstrap, what, doing, kind, run);
  };
  step("open memory", ErrorKind::kUnsupported, [&] { file = open_memory(); });
  step(text("allocate {}", bytes_text(bytes)), ErrorKind::kOutOfMemory,
       [&] { allocate(file, bytes); });
  step("map its memory", ErrorKind::kUnsupported, [&] {
    seal(file);
    out[me] = map(file, bytes);
  });
  const std::vector<Descriptor> files = exchange_descriptors(bootstrap, what, file, nonces);
  step("map its peers' memory", ErrorKind::kUnsupported, [&] {
    for (int r = 0; r < ranks; ++r) {
      if (r != me) out[r] = map_received(r, files[r], bytes);
    }
  });
  return out;
}

}  // namespace moiety::comm
