// A group of ranks that exchange tokens and expert outputs: its life, its memory, its errors
// (spec ep, 1, 5.4 and 8). The operations are in prepare.h, dispatch.h and combine.h.
//
// A group borrows a communicator (which must outlive it) and owns symmetric memory and an epoch.
// One group serves all layers of a model; a process may hold any number of groups. All ranks issue
// the same operations on a group in the same order, each after the last (by an event if the stream
// changes). After an operation, in stream order, the caller may overwrite every input and read
// every output, and no peer touches either.
//
// create, reserve, release and close are collective and are called outside of any operation.
//
// Errors. Arguments are checked when an operation is called: Error(InvalidArgument) on the ranks
// where they are wrong. A peer that is late, gone, or runs something else poisons the group:
// Error(Comm) on every rank, from the operation that noticed and from every later call but close. A
// lost capacity under kError and indices >= E are recorded with their epoch: check(epoch).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "moiety/base/deadline.h"
#include "moiety/base/stream.h"
#include "moiety/comm/communicator.h"
#include "moiety/moe/expert_map.h"

namespace moiety::moe {

// Number of an operation within a group, from 1.
using Epoch = int64_t;

// What a row is made of.
enum class PayloadFormat : uint8_t { kBF16, kFP16, kFP32 };

// The largest batch that the group's memory is made for. Equal on all ranks.
struct EpLimits {
  int64_t tokens = 0;                           // T_max of a rank
  int64_t model = 0;                            // D
  int topk = 0;                                 // K, at most 32
  PayloadFormat widest = PayloadFormat::kBF16;  // format of the largest row
  int depth = 2;             // 1 or 2 halves: 2 hides a latency, 1 takes half the memory
  bool rank_fp32 = false;    // Reduction::kRankFp32 is used
  bool token_order = false;  // Reduction::kToken is used
};

struct EpOptions {
  std::string name = "ep";
  Seconds deadline{100};  // of every wait inside an operation
  int chunk_rows = 16;    // rows that are announced to the receiver together
  // Tests: called before stores into a peer's memory, by the thread that is about to make them.
  std::function<void()> before_store = {};
};

// Bytes of symmetric memory per rank, exactly.
struct EpBytes {
  int64_t record = 0;         // one row of dispatch with its side part
  int64_t record_reduce = 0;  // one row of combine
  int64_t pair = 0;           // one row of Reduction::kToken, 0 without token_order
  int64_t regions = 0;        // the receive regions of all halves
  int64_t meta = 0;           // the routing messages of prepare
  int64_t words = 0;          // flags
  int64_t loss = 0;           // rounding up to whole pages
  int64_t total = 0;          // of the symmetric buffer: regions + meta + words + loss
};

// A handle to move. Its destructor lets go without waiting for peers: what they still store has a
// place to land (symmetric_buffer.h).
class EpGroup {
 public:
  static EpGroup create(comm::Communicator& comm, ExpertMap map, const EpLimits& limits,
                        const EpOptions& options);
  static EpBytes bytes(const ExpertMap& map, const EpLimits& limits, const EpOptions& options);

  // Grows the memory to hold `limits` too; nothing happens if they fit. Plans stay valid.
  void reserve(const EpLimits& limits);
  // Frees the memory. An operation before the next reserve is an error.
  void release();
  // Frees the memory when all ranks are here; the end of a group, poisoned or not.
  void close();

  // Throws if the group is poisoned. No wait.
  void check() const;
  // Waits for the operation `epoch`; throws the first error recorded at or before it (a lost
  // capacity under kError, an index >= E), the same on every rank, and forgets those records.
  void check(Epoch epoch);
  // Writes int64 [3] in stream order: operations under kReport that lost pairs, their largest
  // required rows of a rank, their lost pairs in the group; then starts again from zero.
  void take_report(TensorView report, Stream stream);

  const std::string& name() const;
  int rank() const;
  int ranks() const;
  const ExpertMap& map() const;
  int local_experts() const { return map().local_count(rank()); }
  // What the memory is made for, and its bytes; zero while released.
  const EpLimits& limits() const;
  EpBytes bytes() const;
  // Of the operation issued last; 0 before the first.
  Epoch epoch() const;

  struct Impl;  // exchange.h
  const std::shared_ptr<Impl>& impl() const { return impl_; }

 private:
  explicit EpGroup(std::shared_ptr<Impl> impl);
  std::shared_ptr<Impl> impl_;
};

}  // namespace moiety::moe
