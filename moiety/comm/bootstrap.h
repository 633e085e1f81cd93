// What a group of ranks needs before it has anything else: rank, size, an all-gather of short byte
// strings, and a way to tell everyone that it is over. Everything else (memory handles, ids of
// other libraries) is built on it. Host side only, used by set-up and tear-down, never in a step.
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

  // Every rank's bytes, by rank; at most 64 KiB each, lengths may differ. Returns when all have
  // entered. Throws Error(Comm) naming the missing ranks at the deadline, or the abort's text.
  virtual std::vector<std::string> all_gather(std::string_view bytes) = 0;

  // Says that this rank fails; its peers stop within a second. The first text wins. Never throws.
  // Like all of this, for the rank's thread alone.
  virtual void abort(std::string_view text) noexcept = 0;
  // The text of the first abort, which names the rank that called it, or of a rank that was found
  // dead; empty while all is well.
  virtual std::optional<std::string> aborted() const = 0;

  // Limit of every wait of the group.
  virtual Seconds deadline() const = 0;
};

// Throws Error(InvalidArgument) if an all-gather cannot take this many bytes of a rank.
void check_all_gather(std::string_view bytes);
// "rank 2", "ranks 1, 2".
std::string rank_list(const std::vector<int>& ranks);

}  // namespace moiety::comm
