// The first means of communication of a group of ranks: rank, size, an all-gather of short byte
// strings, and a way to tell everyone that the run is over. Everything else (memory handles, ids of
// other libraries) is built on it. It runs on the host, in set-up and tear-down, never in a step.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "moiety/base/deadline.h"

namespace moiety::comm {

class Bootstrap {
 public:
  virtual ~Bootstrap() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;

  // Returns the bytes of every rank, by rank, when all have entered. At most 64 KiB per rank;
  // lengths may differ. Throws Error(kComm) naming the missing ranks at the deadline, or with the
  // abort's text.
  virtual std::vector<std::string> all_gather(std::string_view bytes) = 0;

  // Tells the peers that this rank fails; they stop within a second. The first text wins. Never
  // throws. Called, like all functions here, by the rank's own thread.
  virtual void abort(std::string_view text) noexcept = 0;
  // The text of the first abort, which names the rank that called it, or of a rank that was found
  // dead; empty while nothing is wrong.
  virtual std::optional<std::string> aborted() const = 0;

  // Limit of every wait in the group.
  virtual Seconds deadline() const = 0;
};

// Throws Error(kInvalidArgument) if `bytes` is more than an all-gather takes from one rank.
void check_all_gather(std::string_view bytes);
// The ranks as text for errors: "rank 2", "ranks 1, 2".
std::string rank_list(const std::vector<int>& ranks);

}  // namespace moiety::comm
