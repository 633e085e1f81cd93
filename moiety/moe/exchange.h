// The transport inside expert parallelism: how records get from rank to rank
// (docs/spec/ep.md#mapped-memory, docs/spec/ep.md#collectives).
//
// A row on the wire is a record: its parts, then a side part of K floats. The movers of rows
// (row_movers.h) store records at the places that an Exchange gives, announce them, and read those
// that came. The place, and the steps between, are the only difference between ranks that map each
// other's memory (exchange_mapped.h) and ranks that do not (exchange_collective.h).
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "moiety/base/buffer.h"
#include "moiety/base/trace.h"
#include "moiety/comm/gpu_waits.h"
#include "moiety/moe/combine.h"
#include "moiety/moe/ep_group.h"
#include "moiety/moe/findings.h"
#include "moiety/moe/payload_rows.h"

namespace moiety::moe {

inline constexpr int kTokenBlock = 256;  // tokens of one task of prepare's scan
inline constexpr int kMaxTopk = 32;
inline constexpr int kMostDepth = 8;

enum class OpKind : uint8_t {
  kPrepare = 1,
  kDispatch,
  kCombine,
  kCombineBackward,
  kDispatchBackward
};

// The facts that must be equal on all ranks for their rows to fit together.
struct Signature {
  OpKind op = OpKind::kPrepare;
  PayloadFormat format = PayloadFormat::kBF16;
  bool weights = false;  // whether there is a side part, or weights
  Reduction reduction = Reduction::kRank;
  bool early = false;  // rows come before the plan is known: prepare_dispatch
  int64_t row_bytes = 0;
  Epoch plan = 0;  // epoch of the prepare that made the plan; 0 if the operation is a prepare

  uint64_t bits() const;  // bits of the first five fields
  // Whether the homes of a sum read its rows from the owners, if these are direct.
  bool pulls() const;
  // Whether peers reach rows of this operation where they lie, if they are direct.
  bool may_be_direct() const;
};

// word(n) = n 2^20 + Signature::bits(), so that a peer that runs something else in epoch n is seen
// at once.
inline constexpr int kSignatureBits = 20;
constexpr Epoch epoch_of(uint64_t word) { return static_cast<Epoch>(word >> kSignatureBits); }
const char* op_name(uint64_t word);

// A rank's announcement of the operation that it enters: everything that peers compare.
struct Entry {
  uint64_t word = 0;
  int64_t row_bytes = 0;
  Epoch plan = 0;
  bool operator==(const Entry&) const = default;
};
// Bytes of a pair's record: data, then a side part with its value and its number t K + k.
constexpr int64_t pair_record_bytes(int64_t data) {
  return round_up(RowParts{data}.side_at() + 16, 128);
}
inline constexpr int64_t kPairNumber = 4;  // the number's place in the side part

// The bytes of the head of prepare's message, which has counts and is the same for all peers; a
// record for each row follows it.
constexpr int64_t head_bytes(int experts, int ranks) {
  return 128 + round_up(4 * (int64_t{experts} + ranks), 128);
}
constexpr int64_t routing_bytes(int topk) { return 8 + 8 * topk; }

// The rows of one rank for another that memory for `limits` holds.
constexpr int64_t rows_max(const EpLimits& limits) {
  const bool all = limits.peer_rows == 0 || limits.peer_rows > limits.tokens;
  return all ? limits.tokens : limits.peer_rows;
}
// The sizes of records in EpBytes; it also checks the limits that all groups have in common.
EpBytes record_sizes(const ExpertMap& map, const EpLimits& limits, const EpOptions& options,
                     int most_ranks);

// The kinds of records that an operation sends.
enum class Box : uint8_t {
  kRouting,  // prepare's records
  kRows,     // rows j
  kPairs,    // the live pairs of each row: Reduction::kToken
};

// The state of the operation that runs.
struct OperationState {
  Epoch epoch_ = 0;  // in stream order
  Entry entry_;      // of this rank
  Operand operand_;  // of this rank; without rows if it is staged
  bool may_be_direct_ = false, pulls_ = false;
  std::vector<Operand> direct_R_;  // operands of ranks that are direct, where this rank sees them

  Box box_ = Box::kRows;
  std::vector<int64_t> stride_R_;  // bytes of a record for each rank
  int64_t sent_bytes_ = 0;
  std::vector<int64_t> sent_R_;  // numbers of records; 0 for the own rank
  std::vector<std::byte*> out_R_, in_R_;
  std::byte* pairs_in_ = nullptr;
};

// Why an operation failed, as ranks tell each other.
enum class Failure : uint8_t { kLate = 1, kMismatch, kPrepare, kProtocol, kAborted };

// The connection between the ranks of one group: the group's memory, and the operation that runs.
class Exchange : protected OperationState {
 public:
  Exchange(comm::Communicator& comm, const ExpertMap& map, const EpOptions& options);
  virtual ~Exchange() = default;
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;

  virtual EpTransport transport() const = 0;
  int rank() const { return rank_; }
  int ranks() const { return map_.ranks(); }
  const ExpertMap& map() const { return map_; }
  const std::string& name() const { return options_.name; }
  // The epoch of the operation that runs, or ran last.
  Epoch epoch() const { return epoch_; }

  // -- The group's memory, while all ranks are between operations.

  // Takes memory for `limits` in place of the old memory. Collective. Throws the same on all ranks;
  // then nothing has changed.
  virtual void allocate(const EpLimits& limits) = 0;
  // Lets go of the memory when all ranks are here. Collective.
  virtual void release() = 0;
  const EpBytes& bytes() const { return bytes_; }
  // The reason why the group is poisoned; empty if it is not.
  virtual std::string failure() const;

  // -- Buffers of all ranks, between operations: EpGroup::attach.

  void attach(const comm::SymmetricBuffer& buffer) { attached_.push_back(buffer); }
  // The place of an attached buffer among them; -1 if it is none.
  int place_of(const comm::SymmetricBuffer& buffer) const;
  // The place of the one that holds these rows; -1 if none does.
  int place_of(const Operand& operand) const;
  void detach(int place) { attached_[place] = {}; }
  void detach_all() { attached_.clear(); }

  // -- An operation. Its functions return at once when the group is poisoned. Only out, in,
  // before_store and announce may be called by other threads than the rank's, since functions that
  // wait may call the rank's communicator.

  // Takes the next epoch. It may wait for peers to end older ones, so that everything may be stored
  // afterwards without waiting.
  void begin(const Signature& signature, const Operand& operand = {});
  // Begins the next operation beside the one that runs, which waits for `turn`. Needs depth 2 and
  // mapped memory. The older one is finished first; then it is the newer one's turn.
  void begin_beside(const Signature& signature);
  // Changes between the two operations.
  void turn() { std::swap(static_cast<OperationState&>(*this), aside_); }
  // Ends the operation: everything that peers sent has been read. Throws if the group is poisoned.
  void finish();

  bool failed() const { return failed_.load(std::memory_order_relaxed); }
  // Peer i of ranks() - 1, in an order that spreads the ranks' stores over their receivers.
  int peer(int i) const { return (rank() + 1 + i) % ranks(); }
  int64_t chunk_rows() const { return options_.chunk_rows; }
  int64_t chunks(int64_t rows) const { return ceil_div(rows, chunk_rows()); }
  int64_t rows_max() const { return moe::rows_max(limits_); }

  // Makes room for this operation's records of `stride` bytes, sent_R[r] of them for rank r. The
  // own rank's entry does not count, here and below. Records for ranks that are direct have
  // `direct_stride` bytes. Where ranks may be direct this waits for all to enter the operation.
  void open(Box box, int64_t stride, std::span<const int64_t> sent_R, int64_t direct_stride = 0);
  // Whether peers reach the operand of rank r where it lies. Known after `open`.
  bool direct(int r) const { return direct_R_[r].base; }
  // Its row `slot`.
  std::byte* direct_row(int r, int64_t slot) const {
    return direct_R_[r].base + slot * direct_R_[r].stride;
  }
  // Bytes that the operation sends.
  int64_t sent_bytes() const { return sent_bytes_; }
  // The place for record i to rank `to`; for Box::kPairs the place for pair number t K + k at home,
  // which is the i-th for `to`.
  std::byte* out(int to, int64_t i) const { return out_R_[to] + i * stride_R_[to]; }
  std::byte* pair_out(int to, int64_t pair, int64_t i) const {
    return out(to, place_of_pair_ ? i : pair);
  }
  // Must be called before records are stored (EpOptions::before_store).
  void before_store() const;
  // Announces that chunk `chunk` for `to` is stored.
  virtual void announce(int to, int64_t chunk) = 0;
  // For prepare: sends the head; all records are stored.
  virtual void send_head(const std::byte* head) = 0;
  // The head of a peer; null if the group is poisoned.
  virtual const std::byte* await_head(int from) = 0;
  // Ends the stores, and returns when the received_R[s] records of every rank s are here.
  virtual void transfer(std::span<const int64_t> received_R) = 0;
  // Record i from rank `from`.
  const std::byte* in(int from, int64_t i) const { return in_R_[from] + i * stride_R_[rank()]; }
  const std::byte* pair_in(int64_t pair) const {
    return pairs_in_ + (place_of_pair_ ? place_of_pair_[pair] : pair) * stride_R_[rank()];
  }

  // Stops this rank and, as far as the transport can, all others, with a short form of `why`.
  using Failure = moe::Failure;
  void poison(Failure failure, int about, const std::string& why);

 protected:
  virtual void enter() = 0;
  virtual void leave() = 0;
  // Finds the ranks whose operands peers reach where they lie, this one among them.
  virtual void find_direct() {}
  // Decides the places of this operation's records.
  virtual void place() = 0;
  virtual void spread_poison(Failure, int /*about*/) {}
  // Stops only this rank, which learned of another rank's `why`; the first reason stays.
  void stop(const std::string& why);
  // Poisons the group because the peer runs something else.
  void poison_mismatch(int peer, const Entry& entry);

  comm::Communicator& comm_;
  const ExpertMap& map_;
  const EpOptions& options_;
  const int rank_;
  EpLimits limits_;
  EpBytes bytes_;

  std::atomic<bool> failed_{false};
  std::vector<comm::SymmetricBuffer> attached_;
  int32_t* place_of_pair_ = nullptr;  // null if pairs lie at their numbers

 private:
  OperationState aside_;      // of an operation that waits for its turn
  mutable std::mutex mutex_;  // guards failure_
  std::string failure_;
};

struct GpuState;  // exchange_cuda.h
namespace peers {
class PeerExchange;  // peers/peer_exchange.h
}

struct EpGroup::Impl {
  comm::Communicator* comm = nullptr;
  ExpertMap map;
  EpOptions options;

  enum class State { kOpen, kReleased, kClosed } state = State::kReleased;
  EpLimits limits;
  Epoch issued = 0;  // in the order of the host

  // Set on a CPU.
  std::unique_ptr<Exchange> exchange;
  Event last;  // after the operation issued last
  Findings findings;

  // Set on a GPU: memory of a group of one rank, or the exchange of several. The last stream is
  // kept and no event, since waiting for a stream also waits for launches of a graph.
  Buffer gpu_state;
  std::shared_ptr<peers::PeerExchange> peers;
  std::optional<comm::GpuWatch> watch;  // of its waits
  Stream last_stream;                   // of the operation issued last
  std::optional<Stream> side;           // gpu_exchange.h
  EpBytes gpu_bytes;

  Impl(comm::Communicator& c, ExpertMap m, const EpOptions& o)
      : comm(&c), map(std::move(m)), options(o) {}
  // Throws unless an operation may be issued, which needs an open group that is not poisoned.
  void check_usable(const char* operation) const;
  void check_poison() const;
  // Throws unless the stream is of the group's device.
  void check_stream(const char* operation, const Stream& stream) const;
  bool on_gpu() const { return options.device.type == DeviceType::kCuda; }
  GpuState* gpu() const { return reinterpret_cast<GpuState*>(gpu_state.data()); }
  // Whether operations are kernels, and not functions of the exchange.
  bool by_kernels() const { return on_gpu() || peers; }
  const EpBytes& bytes() const { return on_gpu() ? gpu_bytes : exchange->bytes(); }
  // Enqueues an operation of `peers`, alone while the communicator's run so.
  template <class Operation>
  void among_peers(const Stream& stream, Operation&& operation) {
    comm::enqueue(*comm, stream, [&] { operation(*peers); });
  }
  // Counts an operation of a GPU, whose kernels are on the stream; returns its epoch.
  Epoch count_on_gpu(const Stream& stream) {
    last_stream = stream;
    return ++issued;
  }
  // Returns when the operation issued last has happened.
  void wait() const;
  // The first finding at or before `epoch`, as in Findings::take.
  std::optional<Finding> take_finding(Epoch epoch);
  void allocate_on_gpu(const EpLimits& wanted);
  void free_memory();
  // Checks that all ranks ask for the same. Collective.
  void compare(const EpLimits& wanted) const;
  // Returns when all ranks are here between operations, for attach or detach, with equal `what`.
  void meet_outside(const char* operation, const std::string& what) const;
};

// Throws unless there is memory for the rows of an operation on their way, or peers reach them.
void check_staging(const EpGroup& group, const Signature& signature, const Operand& operand);

// Runs body(Exchange&) as the group's next operation. Peers may reach its `operand`.
template <class Body>
Epoch issue(EpGroup& group, const Signature& signature, const Operand& operand,
            const Stream& stream, Body&& body) {
  check_staging(group, signature, operand);
  const std::shared_ptr<EpGroup::Impl>& impl = group.impl();
  const Epoch epoch = ++impl->issued;
  stream.run([impl, signature, operand, body = std::forward<Body>(body)] {
    Exchange& exchange = *impl->exchange;
    TraceSpan span(TraceLane::kEp, op_name(static_cast<uint64_t>(signature.op)));
    exchange.begin(signature, operand);
    if (!exchange.failed()) body(exchange);
    exchange.finish();
    span.add({"bytes", exchange.sent_bytes()});
  });
  impl->last.record(stream);
  return epoch;
}

// Throws unless the group may run on the stream, and the plan is one of its plans and fits its
// memory.
void check_plan(const char* operation, const EpGroup& group, const EpPlan& plan,
                const Stream& stream);
// Throws unless a record of `bytes`, with a row of `rows`, fits the records that memory was
// reserved for.
void check_record(const char* operation, const EpGroup& group, const Payload& rows, int64_t bytes);

// Checks the arguments of a prepare and returns its plan, whose tensors have no values yet.
EpPlan check_prepare(EpGroup& group, const PrepareArgs& args, TensorView plan_memory,
                     const Stream& stream);
// Fills the plan's tensors. It calls `between`, if that is set, when the own rows are numbered and
// sent, and the peers' counts are not known: of the maps, rows_RR has this rank's row alone, row_TR
// rows that may turn out dead, row_end_BR its values.
void make_plan(Exchange& exchange, const EpPlan& plan, const PrepareArgs& args, Findings& findings,
               const std::function<void()>& between = {});

}  // namespace moiety::moe
