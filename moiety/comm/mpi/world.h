// What a process knows of the world of processes it is a rank of: the way to MPI, who its peers are
// and whether they live, and whether the world has come to its end.
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

  // Who the ranks are; from now on those that this process can see are watched.
  void meet(std::vector<ProcessIdentity> processes);
  // The ranks of this host share memory for the text of an abort; `on_board` by rank of the world.
  // Without a board, or for ranks that are not on it, messages carry the text.
  static int64_t board_bytes();
  void put_up(SymmetricBuffer board, std::vector<bool> on_board);

  // The table, unless MPI must not be called any more: then Error(Comm).
  const Functions& functions() const;
  // Throws Error(Comm) naming what failed if the code is not 0.
  void check(int code, const char* what) const;
  // No call of MPI from now on: messages that could not be taken back are under way, and the memory
  // that they use may go. The world has ended.
  void silence() noexcept;
  bool silent() const { return silent_; }

  // `rank 1 failed: TEXT`, to everyone; the first text wins.
  void abort(std::string_view text) noexcept;
  // What ended the world, if something did; looks for it: at the board at every call, for messages
  // every millisecond, at the peers every 100.
  std::optional<std::string> stopped();
  // The same, but looks at everything now.
  std::optional<std::string> look_now();

  // Numbers of groups: every rank of a split proposes one and all take the largest, so two groups
  // that share two ranks never have the same.
  uint64_t next_group() const { return next_group_; }
  void take_group(uint64_t number) { next_group_ = number + 1; }
  // The tag of messages of kind `kind` in a group; group 0 is not a group but this class's own.
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
  std::string message_;  // of abort, while it is under way
};

inline constexpr int kTagsOfAGroup = 4;

}  // namespace moiety::comm::mpi
