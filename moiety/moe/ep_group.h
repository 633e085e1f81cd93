// A group of ranks that exchange tokens and expert outputs: its life, its memory, its errors
// (docs/spec/ep.md#group). The operations are in prepare.h, dispatch.h and combine.h.
//
// A group borrows a communicator (which must outlive it) and owns memory and an epoch. Ranks that
// can map each other's memory store rows straight into it; others exchange them by collectives of a
// communicator that the group splits off for itself. The results are the same bits.
//
// One group serves all layers of a model; a process may hold any number of groups. All ranks issue
// the same operations on a group in the same order, each after the one before (by an event if the
// stream changes). After an operation, in stream order, the caller may overwrite every input and
// read every output, and no peer touches either.
//
// create, reserve, release, attach, detach and close are collective and are called outside of any
// operation.
//
// On a GPU (EpOptions::device) operations are kernels on the caller's stream, which may be captured
// in a graph; the epoch of a captured operation is that of its capture. Tensors and plan memory lie
// on that GPU. A group of one rank has no memory for peers there. Several ranks may share a GPU;
// what goes wrong between them is thrown by the group's next call. A graph finds attached rows where
// they were when it was captured. Over collectives, which GPUs take that do not map each other's
// memory, the communicator's own operations carry blocks of EpLimits::peer_rows records for each
// peer, whatever is in them (Reduction::kToken: K for each row), and graphs that were captured before
// `reserve` took other memory must not be launched any more.
//
// Errors: arguments are checked when an operation is called, with Error(kInvalidArgument) on the
// ranks where they are wrong. A peer that is late, gone, or runs something else poisons the group:
// Error(kComm) on every rank, from the operation that noticed and from every later call except
// close. Over collectives a rank that runs nothing learns of it only when it takes part again. A
// lost capacity under kError and indices >= E are recorded with their epoch: check(epoch).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "moiety/base/deadline.h"
#include "moiety/base/device.h"
#include "moiety/base/stream.h"
#include "moiety/comm/communicator.h"
#include "moiety/comm/symmetric_buffer.h"
#include "moiety/moe/expert_map.h"
#include "moiety/moe/payload.h"

namespace moiety::moe {

// The number of an operation within a group, from 1.
using Epoch = int64_t;

// The largest batch that the group's memory is made for; equal on all ranks.
struct EpLimits {
  int64_t tokens = 0;  // T_max, tokens of a rank
  int64_t model = 0;   // D
  int topk = 0;        // K, at most 32
  // The format of the largest row. Rows of all formats that are no longer fit, too. Sums need
  // floating-point rows, so memory for quantized rows alone may be too short for them.
  PayloadFormat widest = PayloadFormat::kBF16;
  // Parts of memory, 1 to 8, that operations use in turn: with 1 an operation waits until all have
  // ended the one before, more hide that and take as much memory more.
  int depth = 2;
  bool rank_fp32 = false;    // whether Reduction::kRankFp32 is used
  bool token_order = false;  // whether Reduction::kToken is used
  // P, the rows that a rank may send to another; 0 allows all. A token whose row there would be
  // number P or later loses its pairs of that rank before anything is counted; the overflow policy
  // of prepare tells the consequence.
  int64_t peer_rows = 0;
  // Whether there is memory for rows on their way. Without it, over mapped memory, rows must be
  // where peers reach them (EpGroup::attach): others, and sums that are not read by the homes, are
  // Error(kUnsupported).
  bool staged = true;
};

// The way in which rows move; equal on all ranks.
enum class EpTransport : uint8_t {
  kAuto,         // kMapped where the ranks can map each other's memory, else kCollectives
  kMapped,       // stores into the peers' memory; at most 64 ranks
  kCollectives,  // all-to-all of the communicator, whose deadline holds; at most 1024 ranks
};

// Whether rows in attached memory (EpGroup::attach) are reached by peers where they lie, with the
// same bits; equal on all ranks. Each call and each rank decides by address, so some ranks may have
// their rows there and others not.
enum class ZeroCopy : uint8_t {
  kOff,   // all rows go through the group's memory, and no rank waits for another's address
  kAuto,  // rows of dispatch and of combine_backward without weights are stored into their slots;
  // rows of combine and dispatch_backward under kToken without weights are read by the homes
};

// What is computed beside an exchange among ranks (ep.overlap); the same bits.
enum class Overlap : uint8_t {
  kNone,
  kWgrad,       // the experts' weight gradients, beside the exchange that brings dh home
  kShared,      // the shared expert, beside the first exchange of forward and that of backward
  kMicroBatch,  // another micro-batch, beside every one: model/transformer.h
  kAuto,        // kWgrad on GPUs, kNone on CPUs
};

struct EpOptions {
  std::string name = "ep";
  Seconds deadline{100};  // limit of every wait inside an operation
  int chunk_rows = 16;    // rows that are announced to the receiver together
  EpTransport transport = EpTransport::kAuto;
  ZeroCopy zero_copy = ZeroCopy::kOff;  // has no effect over collectives
  // The multiprocessors whose worth of a GPU's blocks pushes rows to experts beside the others; at
  // most half of all, 0 for 24. No bit depends on it, and it may differ between ranks.
  int comm_sms = 0;
  // where operations run: a CPU for all ranks, or a GPU for each
  Device device = {};
  // For tests: called before something goes to a peer, by the thread that is about to send it; on a
  // GPU by the one that launches the kernel.
  std::function<void()> before_store = {};
};

// The exact bytes of a rank's memory. A single rank on a GPU has none: the total is 0, and the
// sizes of records tell which rows fit the limits. Several have pieces of 2 MiB, and one more for
// what kernels know of the group.
struct EpBytes {
  int64_t record = 0;         // one row of dispatch with its side part
  int64_t record_reduce = 0;  // one row of combine
  int64_t pair = 0;           // one row of Reduction::kToken; 0 without token_order
  int64_t regions = 0;  // mapped: memory that peers store into, over all halves; else packed rows
  int64_t meta = 0;     // prepare's messages; over collectives also headers and an index
  int64_t words = 0;    // flags; mapped only
  int64_t loss = 0;     // lost by rounding up
  int64_t total = 0;    // regions + meta + words + loss
};

// A handle to a group, which can be moved. Its destructor lets go without waiting for peers: their
// late stores have a place to land (symmetric_buffer.h).
class EpGroup {
 public:
  static EpGroup create(comm::Communicator& comm, ExpertMap map, const EpLimits& limits,
                        const EpOptions& options);
  // The bytes of a group. A pure function, for which kAuto counts as kMapped.
  static EpBytes bytes(const ExpertMap& map, const EpLimits& limits, const EpOptions& options);

  // Grows the memory to hold `limits` too; does nothing if they fit. Plans stay valid.
  void reserve(const EpLimits& limits);
  // Frees the memory. An operation before the next reserve is an error.
  void release();
  // Lets peers reach rows in this buffer, of all the group's ranks, until `detach` or `close`. On a
  // poisoned group its contents are undefined until then. Error(kInvalidArgument) under kOff.
  void attach(const comm::SymmetricBuffer& buffer);
  void detach(const comm::SymmetricBuffer& buffer);
  // Frees the memory when all ranks are here: the end of a group, poisoned or not.
  void close();

  // Throws Error(kComm) if the group is known to be poisoned; does not wait.
  void check() const;
  // Waits for the operation `epoch` (on a GPU for all operations on the last one's stream, so for
  // launches of a graph too). Throws the first error recorded at or before it (a lost capacity
  // under kError, an index >= E), the same on every rank, and forgets those records.
  void check(Epoch epoch);
  // Writes int64 [3] in stream order: the number of operations under kReport that lost pairs, the
  // largest number of rows that a rank required in them, and the pairs that they lost in the group.
  // Then the counts start again from zero.
  void take_report(TensorView report, Stream stream);

  const std::string& name() const;
  int rank() const;
  int ranks() const;
  const ExpertMap& map() const;
  Device device() const;
  ZeroCopy zero_copy() const;  // kOff over collectives
  int local_experts() const { return map().local_count(rank()); }
  // kMapped or kCollectives; on a GPU kMapped.
  EpTransport transport() const;
  // The limits that the memory is made for, and its bytes; zero while released.
  const EpLimits& limits() const;
  EpBytes bytes() const;
  // The epoch of the operation issued last; 0 before the first.
  Epoch epoch() const;

  struct Impl;  // exchange.h
  const std::shared_ptr<Impl>& impl() const { return impl_; }

 private:
  explicit EpGroup(std::shared_ptr<Impl> impl);
  std::shared_ptr<Impl> impl_;
};

}  // namespace moiety::moe
