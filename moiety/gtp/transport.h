// The transport between a group of peers: shards of weights travel to the ranks that multiply with
// them, and gradients travel back onto the shards (docs/spec/gtp.md#transports). Each group and
// rank has one object.
//
//    transport     gather                         reduce
//    kMapped       peers' shards are copied       peers' send slots are read in place
//    kAllToAll     all-gather                     all-to-all; one reduce-scatter if that has the
//                                                 same bits (two ranks, float32)
//    kRing         all-gather                     reduce-scatter, in the wire dtype
//
// Reduces sum as accumulate.h says, so kMapped and kAllToAll give the same bits; a ring rounds to
// the wire dtype on the way.
//
// Operations run in the order of the stream passed in, the lane; a CPU's inline stream waits for
// peers where it stands. Ranks make the calls of a kind (gathers, reduces, drains) in the same
// order, except for gathers where `gathers_alone`. The order is one over all lanes. Ranks tell each
// other what they reduce or gather together, and nothing of another bundle is added or landed.
//
// Errors: an operation throws Error(kComm) when a peer is later than the deadline, failed or
// aborted, naming edge (docs/spec/gtp.md#edges), lane, operation number, peer, counters and bundle;
// and when ranks make different operations, naming the operation and both bundles, on every rank.
// The transport then stays failed: every later operation throws the same at once.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "moiety/base/deadline.h"
#include "moiety/base/stream.h"
#include "moiety/base/tensor_view.h"
#include "moiety/base/trace.h"
#include "moiety/comm/communicator.h"
#include "moiety/gtp/landing.h"
#include "moiety/gtp/slot_arena.h"

namespace moiety::gtp {

enum class TransportKind : uint8_t { kMapped, kAllToAll, kRing };
const char* name(TransportKind kind);

struct TransportOptions {
  std::string name = "gtp";          // name of the group, for errors
  TraceLane axis = TraceLane::kGtp;  // the axis that waits and operations count for
  Seconds deadline{100};             // limit of every wait; collectives have their communicator's
};

// A bundle as this rank stores it. Everything except the addresses is equal on all ranks of the
// group, and for kMapped the places in memory from `allocate` are equal too.
struct SharedBundle {
  BundleId id = kNoBundle;
  std::string name;
  bool expert = false;
  int32_t bucket = 0;  // the bucket for `publish`
  // The arrays of each member's shard, by Array, without gaps; undefined if the format has none.
  std::vector<std::array<TensorView, 4>> members;
};

struct GatherJob {
  BundleId bundle = kNoBundle;
  const Landing* landing = nullptr;  // outlives the operation
};

struct ReduceShape {
  int members = 1;
  int64_t shard_rows = 0, cols = 0;
  DType wire = DType::kFloat32, main = DType::kFloat32;
};

struct ReduceJob {
  BundleId bundle = kNoBundle;
  // This rank's gradient in the wire dtype, [members, ranks * shard_rows, cols] without gaps. Rows
  // that belong to no rank (Layout::valid) may be anything. In memory from `allocate`.
  TensorView send;
  TensorView scratch;  // uint8, as many bytes as reduce_transfer says; undefined for none
  std::vector<TensorView> main_grads;  // of the own shards: [shard_rows, cols] of each member
  int64_t valid_rows = 0;              // rows of the own shard that exist
  bool first = false;                  // overwrites main_grads
};

// An operation in the form in which ranks tell it each other: two words, without gaps.
struct Subject {
  enum class Action : uint16_t { kGather, kReduce, kReduceRows };
  BundleId bundle = kNoBundle;
  Action action = Action::kGather;
  uint16_t detail = 0;  // for a gather: the arrays that travel, a bit each; else the wire dtype
  int64_t bytes = 0;    // bytes that this rank sends
  bool operator==(const Subject&) const = default;
};
static_assert(sizeof(Subject) == 16);
Subject subject_of(const GatherJob& job);
Subject subject_of(const ReduceJob& job);

// Bytes that came from peers.
struct TransportBytes {
  int64_t gathered = 0, reduced = 0;
};

class Transport {
 public:
  virtual ~Transport() = default;

  virtual TransportKind kind() const = 0;
  int rank() const { return comm_.rank(); }
  int ranks() const { return comm_.size(); }
  const std::string& name() const { return options_.name; }
  TraceLane axis() const { return options_.axis; }
  comm::Bootstrap& bootstrap() const { return comm_.bootstrap(); }
  // Whether gathers ask nothing of peers except published shards: then a rank may gather what it
  // likes, when it likes.
  virtual bool gathers_alone() const = 0;

  // Zeroed memory, aligned to 4 KiB, for shards and for send slots; the caller keeps it until no
  // rank needs it any more. Collective; the sizes are equal on all ranks.
  virtual SlotArena::Block allocate(const std::string& what, int64_t bytes) = 0;
  // Shares the bundles, once, before the first operation. Collective. Throws
  // Error(kInvalidArgument) on every rank if the ranks' bundles differ.
  void share(std::vector<SharedBundle> bundles);

  // Fills every part of the landing, the own one too; it does not finish the landing.
  virtual void gather(const GatherJob& job, const Stream& lane) = 0;

  // The bytes that a reduce receives and the memory that it takes (slot: the send slot). Throws
  // Error(kInvalidArgument) for dtypes that the transport does not sum: bfloat16 into float32 on a
  // ring.
  virtual BundleSpec::Transfer reduce_transfer(const ReduceShape& shape) const = 0;
  virtual void reduce(const ReduceJob& job, const Stream& lane) = 0;
  // Makes work that is run on `stream` afterwards wait until it may write the send slots of this
  // lane's reduces so far (E6), since peers have read them.
  virtual void await_readers(bool expert, const Stream& stream) = 0;

  // Says that the bucket's shards are written, so peers may gather them (E1). Every rank publishes
  // a bucket equally often: a gather waits until peers have done so as often as this rank.
  virtual void publish(int32_t bucket, const Stream& stream) = 0;
  // Ends the gathers of a step. Called behind the last one, also in a step without gathers.
  virtual void drain(const Stream& lane) = 0;
  // Makes work that is run on `stream` afterwards wait until it may overwrite shards: all peers
  // have drained as often as this rank (E7). Before bundles are shared nobody gathers, and there is
  // nothing to wait for.
  virtual void await_drained(const Stream& stream) = 0;

  // Throws the error that made the transport fail, if one did.
  void check() const;
  const TransportBytes& received() const { return received_; }

 protected:
  Transport(comm::Communicator& comm, TransportOptions options)
      : comm_(comm), options_(std::move(options)) {}

  // Called when the bundles are there and agree. Collective.
  virtual void on_shared() {}
  // Tells peers what this rank knows of a bundle's memory.
  virtual uint64_t place_of(const SharedBundle&) const { return 0; }
  const SharedBundle& bundle(BundleId id) const;
  std::string describe(const Subject& subject) const;
  std::span<const SharedBundle> bundles() const { return bundles_; }
  // Checks the job against the bundle.
  void check_gather(const GatherJob& job) const;
  ReduceShape check_reduce(const ReduceJob& job) const;
  // Fails if the ranks' subjects, by rank, are not all equal. `operation`, equal on all ranks,
  // opens the text.
  void check_subjects(const std::string& operation, std::span<const Subject> subjects);
  // Ends a reduce: chunk j of member e lies at chunks[j] + e * stride bytes.
  static void add_chunks(const ReduceJob& job, const ReduceShape& shape,
                         std::span<std::byte* const> chunks, int64_t stride);
  // Remembers the first failure and throws it.
  [[noreturn]] void fail_with(const std::string& reason);

  comm::Communicator& comm_;
  TransportOptions options_;
  TransportBytes received_;

 private:
  std::vector<SharedBundle> bundles_;  // by id
  bool shared_ = false;
  std::string failure_;
};

// Makes a transport. Collective. The communicator outlives it. Without a wish it is kMapped where
// the ranks can map each other's memory, else kAllToAll. A wish for kMapped where they cannot is
// Error(kUnsupported).
std::unique_ptr<Transport> make_transport(comm::Communicator& comm, TransportOptions options = {},
                                          std::optional<TransportKind> wish = {});

}  // namespace moiety::gtp
