// A collective operation as data: what a rank asks for, checked; shared by the transports.
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
  // Elements: of x (all_reduce, broadcast), of a rank's part (all_gather, reduce_scatter), of a row
  // (all_to_all).
  int64_t elements = 0;
  const std::byte* send = nullptr;  // x, where there is one tensor
  std::byte* recv = nullptr;
  std::vector<int64_t> send_rows{};  // all_to_all, by rank
  std::vector<int64_t> recv_rows{};

  int64_t bytes() const { return byte_size(dtype, elements); }
};

// How an all_reduce of n elements is divided among ranks: part `rank`, in whole cache lines.
struct ElementRange {
  int64_t begin = 0, end = 0;
};
ElementRange part_of(int64_t n, int rank, int ranks);
// The sum of rows[0, rank).
int64_t rows_before(const std::vector<int64_t>& rows, int rank);

// Copies with the calling thread's budget of cores; nothing to do if `to` is `from`.
void copy_bytes(std::byte* to, const std::byte* from, int64_t bytes);
// Of several, apart from each other, all at once: small ones too have all of the cores.
struct ByteCopy {
  std::byte* to;
  const std::byte* from;
  int64_t bytes;
};
void copy_bytes(std::span<const ByteCopy> copies);

// They check the arguments of the Communicator's operation of that name, for `rank` of `size`;
// Error(InvalidArgument) names operation and argument.
CollectiveCall all_reduce_call(const TensorView& x, ReduceOp op);
CollectiveCall all_gather_call(int size, const TensorView& send, const TensorView& recv);
CollectiveCall reduce_scatter_call(int size, const TensorView& send, const TensorView& recv,
                                   ReduceOp op);
CollectiveCall all_to_all_call(int size, const TensorView& send,
                               std::span<const int64_t> send_counts, const TensorView& recv,
                               std::span<const int64_t> recv_counts);
CollectiveCall broadcast_call(int size, const TensorView& x, int root);

// "all_reduce(float32[16], sum)": kind, dtype, elements, and what else must agree.
std::string describe(const CollectiveCall& call);

// If the calls of the ranks do not fit each other: a sentence that is the same on every rank, such
// as "rank 0 runs all_reduce(float32[16], sum), rank 1 runs broadcast(float32[16], root 0)".
std::optional<std::string> mismatch(std::span<const CollectiveCall> calls);
// Its two halves: all but the rows; the rows of calls that are all_to_all of the same tensors.
std::optional<std::string> call_mismatch(std::span<const CollectiveCall> calls);
std::optional<std::string> row_mismatch(std::span<const CollectiveCall> calls);

}  // namespace moiety::comm
