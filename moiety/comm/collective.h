// A collective operation as data: the call of one rank, checked. The transports share it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "moiety/comm/communicator.h"

namespace moiety::comm {

enum class Collective : uint8_t {
  kAllReduce,
  kAllGather,
  kReduceScatter,
  kAllToAll,
  kBroadcast,
  kBarrier
};

const char* name(Collective kind);

struct CollectiveCall {
  Collective kind = Collective::kBarrier;
  DType dtype = DType::kUInt8;
  ReduceOp op = ReduceOp::kSum;
  int root = 0;
  // Number of elements: of x (all_reduce, broadcast), of a rank's part (all_gather,
  // reduce_scatter), or of a row (all_to_all).
  int64_t elements = 0;
  const std::byte* send = nullptr;  // x, if the operation has one tensor
  std::byte* recv = nullptr;
  std::vector<int64_t> send_rows{};  // rows of all_to_all, by rank
  std::vector<int64_t> recv_rows{};

  int64_t bytes() const { return byte_size(dtype, elements); }
};

// The share of rank `rank` of an all_reduce of n elements, in whole cache lines.
struct ElementRange {
  int64_t begin = 0, end = 0;
};
ElementRange part_of(int64_t n, int rank, int ranks);
// The sum of rows[0, rank).
int64_t rows_before(const std::vector<int64_t>& rows, int rank);

// Copies with the calling thread's budget of cores; does nothing if `to` is `from`.
void copy_bytes(std::byte* to, const std::byte* from, int64_t bytes);
// Copies several ranges, which do not overlap, all at once, so that small ones too have all cores.
struct ByteCopy {
  std::byte* to;
  const std::byte* from;
  int64_t bytes;
};
void copy_bytes(std::span<const ByteCopy> copies);

// Calls with checked arguments: each function is for the Communicator's operation of that name, on
// `rank` of `size`. Error(kInvalidArgument) names the operation and the argument.
CollectiveCall all_reduce_call(const TensorView& x, ReduceOp op);
CollectiveCall all_gather_call(int size, const TensorView& send, const TensorView& recv);
CollectiveCall reduce_scatter_call(int size, const TensorView& send, const TensorView& recv,
                                   ReduceOp op);
CollectiveCall all_to_all_call(int size, const TensorView& send,
                               std::span<const int64_t> send_counts, const TensorView& recv,
                               std::span<const int64_t> recv_counts);
CollectiveCall broadcast_call(int size, const TensorView& x, int root);

// The parts of a call that must agree, as text: "all_reduce(float32[16], sum)".
std::string describe(const CollectiveCall& call);

// A sentence if the calls of the ranks do not fit each other. It is the same on every rank, such as
// "rank 0 runs all_reduce(float32[16], sum), rank 1 runs broadcast(float32[16], root 0)".
std::optional<std::string> mismatch(std::span<const CollectiveCall> calls);
// The two halves of `mismatch`: call_mismatch compares everything but the rows; row_mismatch
// compares the rows of calls that are all_to_all of the same tensors.
std::optional<std::string> call_mismatch(std::span<const CollectiveCall> calls);
std::optional<std::string> row_mismatch(std::span<const CollectiveCall> calls);

}  // namespace moiety::comm
