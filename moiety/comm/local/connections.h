// Messages between this process and its peers over stream sockets, one to each, with the meaning
// that MPI gives them (mpi/functions.h): messages of one sender with one tag arrive in order, and
// those of other tags do not hold each other up.
//
// A message is a header and its bytes. Bytes that a receive waits for are read to where they belong;
// short messages that come before their receive are kept, long ones stay in the socket until it is
// there. Nothing here waits, but for 50 us where it has found nothing many times. A peer that is gone
// makes no error: messages to and from it are never complete, and who waits for them looks whether
// the peer lives (mpi/world.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <unordered_map>
#include <vector>

namespace moiety::comm::local {

class Connections {
 public:
  using Request = uint64_t;
  // A message that is longer than the memory of its receive; other results of `test` are 0.
  static constexpr int kTooLong = 1;
  // Longer messages stay in the socket until there is a receive for them.
  static constexpr int64_t kLongestKept = 1 << 20;

  // Takes over the sockets, by rank; -1 where there is none, as for this rank itself.
  explicit Connections(const std::vector<int>& sockets);
  ~Connections();
  Connections(const Connections&) = delete;
  Connections& operator=(const Connections&) = delete;

  Request send(const void* data, int bytes, int peer, int tag);
  Request receive(void* data, int bytes, int peer, int tag);
  // Carries all messages on. True if this one is complete or was cancelled; it is then gone, and
  // `code` says how it ended.
  bool test(Request request, int* code);
  // Gives up a receive. Its memory is not touched any more.
  void cancel(Request request);
  // Whether a message with this tag is here, which nobody waits for; its sender and length.
  bool probe(int tag, int* peer, int* bytes);

 private:
  struct Header {
    int32_t tag = 0;
    int32_t bytes = 0;
  };
  struct Sending {
    Request request;
    Header header;
    const std::byte* data;
    int64_t written;  // of header and data
  };
  struct Wanted {
    Request request = 0;
    int tag = 0;
    std::byte* to = nullptr;
    int64_t bytes = 0;
  };
  struct Kept {
    int tag;
    std::vector<std::byte> bytes;
  };
  enum class Place { kUnknown, kReceive, kKept, kNowhere };
  // The message that is coming in.
  struct Coming {
    Header header;
    int64_t header_read = 0, read = 0;
    Place place = Place::kUnknown;
    Wanted receive;               // of kReceive
    std::vector<std::byte> kept;  // of kKept
  };
  struct Peer {
    int socket = -1;
    bool takes = false, gives = false;  // whether it still reads, and writes
    std::deque<Sending> sending;
    std::deque<Wanted> wanted;
    std::deque<Kept> kept;
    Coming coming;
  };

  void progress();
  void write(Peer& peer);
  void read(Peer& peer);
  // Reads once; the bytes read, 0 if there are none now or no more at all.
  int64_t read_some(Peer& peer, void* to, int64_t most);
  // The receive that a message with this tag is for, taken from the list; request 0: there is none.
  static Wanted take_wanted(Peer& peer, int tag);
  // Whether the message is long and has no receive yet.
  static bool is_held(const Peer& peer);
  void place(Peer& peer);
  void arrive(Peer& peer);

  std::vector<Peer> peers_;
  std::unordered_map<Request, int> ended_;  // requests that are complete, and how
  Request last_ = 0;
  int idle_ = 0;  // times in a row that nothing had come
};

}  // namespace moiety::comm::local
