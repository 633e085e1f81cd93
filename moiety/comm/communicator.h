// Collective operations among the ranks of a group. All ranks issue the same operations in the same
// order with the same sizes.
//
// An operation returns a Ticket at once; after `ticket.wait()` its outputs are valid and its inputs
// free. Waiting first completes the operations that were issued earlier on the communicator, so
// tickets may be waited for in any order. A ticket that is dropped waits in its destructor, which
// can only log an error. After an error every later operation of the communicator throws it again.
//
// Sums are taken in rank order in fp32 (fp64 and integers in their own type) and rounded once to
// the tensor's dtype, so results are the same bits on every rank and in every run. Tensors are
// contiguous. Reductions take float64, float32, bfloat16, float16, int32, int64 and uint8;
// operations that only move bytes take any dtype.
//
// On a GPU's stream, with tensors of that GPU, an operation is enqueued and its ticket is complete
// at once: in the order of the stream its outputs are valid and its inputs free. Sums have the same
// bits as on a CPU. Ranks whose GPUs cannot map each other's memory throw Error(kUnsupported). What
// goes wrong there later is thrown by `synchronize` and by the communicator's next operation; until
// then the stream goes on, with undefined outputs, and never hangs. All ranks of a GPU enqueue the
// operations of all their communicators in one order.
//
// Errors: Error(kInvalidArgument) for views that do not fit; Error(kComm), naming communicator,
// operation, rank and peer, when a peer is late (the deadline), issues another operation, or
// aborted.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "moiety/base/deadline.h"
#include "moiety/base/stream.h"
#include "moiety/base/tensor_view.h"
#include "moiety/comm/bootstrap.h"

namespace moiety::comm {

enum class ReduceOp { kSum, kMax, kMin };

class [[nodiscard]] Ticket {
 public:
  class Operation {
   public:
    virtual ~Operation() = default;
    virtual void wait() = 0;
  };

  Ticket() = default;
  explicit Ticket(std::shared_ptr<Operation> operation) : operation_(std::move(operation)) {}
  Ticket(Ticket&&) = default;
  Ticket& operator=(Ticket&& other);
  ~Ticket();

  // Blocks until the operation is complete. A ticket without an operation is complete.
  void wait();

 private:
  std::shared_ptr<Operation> operation_;
};

class SymmetricBuffer;

// What operations on a GPU's streams take; equal on all ranks.
struct GpuLinkOptions {
  // Memory of each rank for operands that lie outside attached buffers; at least 1 MiB.
  int64_t staging_bytes = int64_t{32} << 20;
  // The most blocks of a kernel that reads peers' memory, 1 to 64; without influence on results.
  int sum_blocks = 12;
  // Whether reductions run beside other work of the GPU: then copies bring the peers' parts, and
  // many short blocks sum them, which a stream of low priority keeps out of the way. The same bits.
  bool beside_compute = false;
};

// Memory that ranks share on GPUs comes in pieces of so many bytes.
inline constexpr int64_t kGpuMemoryUnit = int64_t{2} << 20;
// Bytes of a rank's GPU that a communicator of so many ranks takes when it is prepared.
int64_t gpu_link_bytes(int ranks, const GpuLinkOptions& options = {});

class Communicator {
 public:
  virtual ~Communicator() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual const std::string& name() const = 0;
  // The group's own bootstrap, with the ranks and size of the group.
  virtual Bootstrap& bootstrap() = 0;
  // Whether ranks may use symmetric memory; false keeps it off even where they could map it.
  virtual bool may_map_memory() const { return true; }

  // x := op of x over all ranks.
  virtual Ticket all_reduce(TensorView x, ReduceOp op, Stream stream) = 0;
  // recv [size * n] := the ranks' send [n], by rank. send may be this rank's part of recv.
  virtual Ticket all_gather(TensorView send, TensorView recv, Stream stream) = 0;
  // recv [n] := op over all ranks of part `rank` of send [size * n]. recv may be that part of send.
  virtual Ticket reduce_scatter(TensorView send, TensorView recv, ReduceOp op, Stream stream) = 0;
  // Sends send_counts[r] rows (of the first dimension) to rank r and receives recv_counts[r] from
  // it; both tensors are packed by rank. Two ranks' counts of what passes between them must agree.
  virtual Ticket all_to_all(TensorView send, std::span<const int64_t> send_counts, TensorView recv,
                            std::span<const int64_t> recv_counts, Stream stream) = 0;
  // x := x of rank `root`.
  virtual Ticket broadcast(TensorView x, int root, Stream stream) = 0;
  // Returns when all ranks have entered.
  virtual void barrier() = 0;

  // Makes what operations on the streams of this rank's GPU need, and loads their kernels.
  // Collective. Without it the first such operation does so, which then cannot be in a capture; a
  // second call does nothing. A rank computes on one GPU. Throws what `SymmetricBuffer::create`
  // throws.
  virtual void prepare(Device gpu, const GpuLinkOptions& options = {}) = 0;
  // From now on operands that lie in this buffer, at the same place on all ranks, are read by peers
  // where they are. Collective: all ranks attach the same buffers, which have this group's ranks,
  // in the same order. The buffer is forgotten when it is closed.
  virtual void attach(const SymmetricBuffer& buffer) = 0;
  // Returns when the work on the stream is done, as stream.synchronize() does, but ends the waits
  // of this communicator's operations if a peer aborts, and throws their errors.
  virtual void synchronize(const Stream& stream) = 0;
  // Returns when the event is complete, as event.wait() does, but ends the waits of the operations
  // of this rank's communicators, this one and all that came of it or it came of, if a peer aborts
  // or one of them has failed; then throws the error.
  virtual void wait(const Event& event) { event.wait(); }
  // While `alone` is true each operation on a GPU's stream, on any of those communicators, runs by
  // itself: the ranks of this one wait for what their GPUs have to do, meet on the host, enqueue it,
  // and wait for it, so that no kernel waits on a GPU while a host allocates, frees or loads there,
  // which may wait for all kernels, or while the GPU does something for the first time.
  // All of them then enqueue the same number of operations, none in a capture. Not collective.
  virtual void run_alone(bool alone) { static_cast<void>(alone); }

  // Forms sub-groups: ranks that pass the same color are one group, ordered by (key, rank).
  // Collective. A rank with a negative color takes part and gets null.
  virtual std::unique_ptr<Communicator> split(int color, int key, const std::string& name) = 0;

 private:
  friend bool mappable(Communicator& comm, Device device);  // moiety/comm/symmetric_buffer.h
  std::optional<bool> mappable_[2];                         // by type of device, once it is known
};

}  // namespace moiety::comm
