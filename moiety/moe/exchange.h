// Inside expert parallelism: a group's symmetric memory, the words that order its use, and the two
// movers of rows that the data operations are made of (spec ep, 5).
//
// A row on the wire is a record: its data, then a side part of K floats, in a region that only its
// sender writes. Flags are words: word(n) = n 2^20 + signature, so a peer that runs something else
// in epoch n is seen at once. Half h = n mod depth of all regions belongs to epoch n: a rank stores
// into a peer's half only when the peer's credit says that it has read all of epoch n - depth.
#pragma once

#include <array>
#include <atomic>
#include <functional>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "moiety/comm/flags.h"
#include "moiety/comm/symmetric_buffer.h"
#include "moiety/moe/combine.h"
#include "moiety/moe/ep_group.h"

namespace moiety::moe {

inline constexpr int kTokenBlock = 256;  // tokens of one task of prepare's scan
inline constexpr int kMaxTopk = 32;
inline constexpr int kMaxRanks = 64;

constexpr int64_t ceil_div(int64_t n, int64_t q) { return (n + q - 1) / q; }
constexpr int64_t round_up(int64_t n, int64_t q) { return ceil_div(n, q) * q; }

enum class OpKind : uint8_t {
  kPrepare = 1,
  kDispatch,
  kCombine,
  kCombineBackward,
  kDispatchBackward
};

// What must be equal on all ranks for their rows to fit together.
struct Signature {
  OpKind op = OpKind::kPrepare;
  DType dtype = DType::kBFloat16;
  bool weights = false;  // with a side part or with weights
  Reduction reduction = Reduction::kRank;
  int64_t row_bytes = 0;

  uint64_t bits() const;
};

// "dispatch(bf16, 14336 B, weights)"
std::string describe(uint64_t signature_bits, int64_t row_bytes);

// Sizes of one row with its side part.
constexpr int64_t side_offset(int64_t data_bytes) { return round_up(data_bytes, 16); }
constexpr int64_t record_bytes(int64_t data_bytes, int topk) {
  return round_up(side_offset(data_bytes) + round_up(4 * topk, 16), 128);
}
constexpr int64_t pair_record_bytes(int64_t data_bytes) {
  return round_up(side_offset(data_bytes) + 16, 128);
}

// Where things are in every rank's memory, in bytes from its base.
struct EpLayout {
  EpBytes bytes;
  int64_t chunks = 0;  // flags of a sender in a half, without prepare's
  int64_t addr = 0, width = 0, head = 0, ready = 0, credit = 0, poison = 0;
  int64_t meta = 0, message = 0;  // of all messages, of one
  int64_t regions = 0, half = 0;
};
EpLayout ep_layout(const ExpertMap& map, const EpLimits& limits, const EpOptions& options);

// An error of the caller's data that a prepare found: equal on all ranks.
struct RecordedError {
  Epoch epoch = 0;
  std::string text;
};

struct EpGroup::Impl {
  comm::Communicator* comm = nullptr;
  ExpertMap map;
  EpOptions options;
  int rank = 0;

  enum class State { kOpen, kReleased, kClosed } state = State::kReleased;
  EpLimits limits;
  EpLayout layout;
  comm::SymmetricBuffer memory;

  Epoch issued = 0;   // host order
  Epoch running = 0;  // stream order
  Event last;         // after the operation issued last

  mutable std::mutex mutex;  // guards failure
  std::string failure;       // why the group is poisoned

  std::vector<RecordedError> errors;
  std::array<int64_t, 3> report{};

  Impl(comm::Communicator& c, ExpertMap m, const EpOptions& o)
      : comm(&c), map(std::move(m)), options(o), rank(c.rank()) {}
  int ranks() const { return map.ranks(); }
  int half() const { return static_cast<int>(running % limits.depth); }
  // Element `index` of an array of words at a rank.
  uint64_t& word(int at, int64_t array, int64_t index) const {
    return reinterpret_cast<uint64_t*>(memory.peer(at) + array)[index];
  }
  // Throws unless an operation may be issued: open, not poisoned.
  void check_usable(const char* operation) const;
  void check_poison() const;
  void allocate(const EpLimits& wanted);
};

// One operation of a group while it runs. Its functions return at once when the group is poisoned.
class Exchange {
 public:
  // Takes the next epoch, waits until all peers have ended epoch n - depth, and tells them that
  // this rank has entered. So everything may be stored afterwards without waiting.
  Exchange(EpGroup::Impl& group, const Signature& signature);

  EpGroup::Impl& group() const { return group_; }
  int rank() const { return group_.rank; }
  int ranks() const { return group_.ranks(); }
  // Peer i of ranks() - 1, in an order that spreads the ranks' stores over their receivers.
  int peer(int i) const { return (rank() + 1 + i) % ranks(); }
  Epoch epoch() const { return epoch_; }
  bool failed() const { return failed_.load(std::memory_order_relaxed); }

  int64_t chunk_rows() const { return group_.options.chunk_rows; }
  int64_t chunks(int64_t rows) const { return ceil_div(rows, chunk_rows()); }
  // Row j that `from` sends to `at`, for records of `stride` bytes.
  std::byte* record(int at, int from, int64_t j, int64_t stride) const;
  // Record `index` of the half's region taken as one array: pair t K + k of Reduction::kToken.
  std::byte* pair_record(int at, int64_t index, int64_t stride) const;
  // prepare's message.
  std::byte* message(int at, int from) const;

  // To be called before data is stored into a peer's memory (EpOptions::before_store).
  void before_store() const;
  // Chunk `chunk` for `to` is complete.
  void announce(int to, int64_t chunk);
  // Blocks until it is; false if the group is poisoned.
  bool await(int from, int64_t chunk, int64_t chunks_of_sender);
  void announce_message(int to) { announce(to, group_.layout.chunks); }
  bool await_message(int from) { return await(from, group_.layout.chunks, 0); }

  // Stops all ranks: `why` here, a short form of it at the peers.
  enum class Failure : uint8_t { kLate = 1, kMismatch, kPrepare, kProtocol, kAborted };
  void poison(Failure failure, int about, const std::string& why);

  // All that peers stored in this epoch has been seen and read. Throws if the group is poisoned.
  void finish();

 private:
  struct Awaited {
    int from;
    int64_t chunk = -1, of = 0;  // a credit; a message
  };
  bool wait(uint64_t& word, int shift, Epoch wanted, const Awaited& awaited);
  void post(uint64_t& word, uint64_t value) const;
  std::string late_text(uint64_t word, int shift, Epoch wanted, const Awaited& awaited) const;
  std::string mismatch_text(int peer, uint64_t seen) const;

  EpGroup::Impl& group_;
  Signature signature_;
  Epoch epoch_;
  int half_;
  uint64_t word_;  // word(n)
  std::atomic<bool> failed_{false};
};

// Runs body(Exchange&) as the group's next operation.
template <class Body>
Epoch issue(EpGroup& group, const Signature& signature, const Stream& stream, Body&& body) {
  const std::shared_ptr<EpGroup::Impl>& impl = group.impl();
  const Epoch epoch = ++impl->issued;
  stream.run([impl, signature, body = std::forward<Body>(body)] {
    Exchange exchange(*impl, signature);
    if (!exchange.failed()) body(exchange);
    exchange.finish();
  });
  impl->last.record(stream);
  return epoch;
}

// The rows of a matrix, the elements of a vector, of a view that may be strided or absent.
class Rows {
 public:
  explicit Rows(const TensorView& x)
      : base_(static_cast<std::byte*>(x.raw())),
        stride_(x.defined() ? x.stride(0) * bits(x.dtype()) / 8 : 0) {}
  std::byte* operator[](int64_t i) const { return base_ + i * stride_; }
  template <class T>
  T* as(int64_t i) const {
    return reinterpret_cast<T*>((*this)[i]);
  }

 private:
  std::byte* base_;
  int64_t stride_;
};

// Throws unless the group may run, the plan is one of its plans and fits its memory.
void check_plan(const char* operation, const EpGroup& group, const EpPlan& plan);
// Throws unless `x` is [rows, D] of a payload type, each row contiguous. `model` -1: any.
void check_rows(const char* operation, const char* argument, const TensorView& x, int64_t rows,
                int64_t model);
// Throws unless a row of the operation fits the records that were reserved.
void check_record(const char* operation, const EpGroup& group, const EpPlan& plan,
                  const TensorView& rows, Reduction reduction);

// Fills the plan's tensors.
void make_plan(Exchange& exchange, const EpPlan& plan, const PrepareArgs& args);

// Sends x[t] (and the K weights of t) once to every rank with a pair alive of t. For every row that
// arrives with a pair alive, own tokens' included: expand(row, weights or null, its K slots). Rows
// are expanded in any order and by several threads.
using ExpandRow =
    std::function<void(const std::byte* row, const float* weights, const int32_t* slot_K)>;
void copy_rows(Exchange& exchange, const EpPlan& plan, const TensorView& x_TD,
               const TensorView& w_TK, const ExpandRow& expand);

// Zeroes the padding rows of every local expert, and the tail up to C if asked; in `values` too.
void zero_padding(const EpPlan& plan, const TensorView& rows_CD, const TensorView& values_C,
                  bool tail);

// out[t] := sum of y over the pairs alive of t, weighted by slot_w if given, + addend; and
// side_TK[t, k] := side[slot], 0 for pairs not alive. At most one of slot_w and side is given.
struct SumArgs {
  TensorView y_CD, slot_w = {}, side = {}, addend = {}, out_TD, side_TK = {};
  Reduction reduction = Reduction::kRank;
};
void sum_rows(Exchange& exchange, const EpPlan& plan, const SumArgs& args);

// Checks what combine and dispatch_backward have in common and issues sum_rows.
struct SumNames {
  const char *operation, *y, *out;
  OpKind kind;
};
void issue_sum(EpGroup& group, const EpPlan& plan, const SumNames& names, const SumArgs& args,
               const Stream& stream);

// One row: out := round(weight x); the dot product of two rows in the order of lane_sum.
void scale_row(DType type, float weight, const std::byte* x, std::byte* out, int64_t n);
float dot_row(DType type, const std::byte* x, const std::byte* y, int64_t n);

}  // namespace moiety::moe
