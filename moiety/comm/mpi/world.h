// A process's view of the world of processes in which it is a rank: the way to MPI, the peers and
// whether they live, and whether the world has come to its end.
//
// Once a rank fails, all is over: there is no way back to a state in which MPI's messages fit each
// other. A failing rank tells its text to the ranks of its host through a board in shared memory,
// which a rank that computes notices too, and to all others by a message.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "moiety/comm/mpi/functions.h"
#include "moiety/comm/mpi_group.h"
#include "moiety/comm/process.h"
#include "moiety/comm/symmetric_buffer.h"

namespace moiety::comm::mpi {

class World {
 public:
  World(const Functions& functions, const MpiGroupOptions& options, Processes processes,
        int largest_tag);

  const MpiGroupOptions options;
  const int rank;
  const int size;

  // Tells which processes the ranks are; those that this process can see are watched from now on.
  void meet(std::vector<ProcessIdentity> processes);
  // The board: memory that the ranks of this host share for the text of an abort; `on_board` is by
  // rank of the world. Without a board, and for ranks that are not on it, messages carry the text.
  static int64_t board_bytes();
  void put_up(SymmetricBuffer board, std::vector<bool> on_board);

  // The table of functions; throws Error(kComm) if MPI must not be called any more.
  const Functions& functions() const;
  // Throws Error(kComm) naming what failed if the code is not 0.
  void check(int code, const char* what) const;
  // Ends all calls of MPI: messages that could not be taken back are under way, and the memory that
  // they use may go. The world has ended.
  void silence() noexcept;
  bool silent() const { return silent_; }

  // Tells everyone `rank 1 failed: TEXT`; the first text wins.
  void abort(std::string_view text) noexcept;
  // The reason for the end of the world, if it has ended. Looks at the board at every call, for
  // messages every millisecond, at the peers every 100.
  std::optional<std::string> stopped();
  // The same, but looks at everything now.
  std::optional<std::string> look_now();

  // Numbers for groups: every rank of a split proposes one and all take the largest, so two groups
  // that share two ranks never have the same.
  uint64_t next_group() const { return next_group_; }
  void take_group(uint64_t number) { next_group_ = number + 1; }
  // The tag of messages of kind `kind` in a group; group 0 stands for this class itself.
  int tag(uint64_t group, int kind) const;

 private:
  struct Board;
  using Clock = std::chrono::steady_clock;

  Board* board() const;
  void stop(const std::string& text);
  void read_board();
  void receive_abort();
  void send_abort() noexcept;
  std::optional<std::string> dead_peer() const;
  void look_at_peers();

  const Functions* functions_;
  const int largest_tag_;
  bool silent_ = false;
  uint64_t next_group_ = 1;

  struct Peer {
    int rank;
    ProcessIdentity process;
  };
  std::vector<Peer> watched_;
  Clock::time_point last_look_{};

  SymmetricBuffer board_memory_;
  std::vector<int> off_board_;  // ranks that are told by messages
  Clock::time_point last_probe_{};

  std::optional<std::string> stopped_;
  std::string message_;  // message of an abort while it is under way
};

inline constexpr int kTagsOfAGroup = 4;

}  // namespace moiety::comm::mpi
