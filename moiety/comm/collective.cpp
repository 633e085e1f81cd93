#include "moiety/comm/collective.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "moiety/base/error.h"
#include "moiety/base/integer.h"
#include "moiety/base/parallel.h"

namespace moiety::comm {
namespace {

const char* name(ReduceOp op) {
  return op == ReduceOp::kSum ? "sum" : op == ReduceOp::kMax ? "max" : "min";
}

void check_contiguous(const char* operation, const char* argument, const TensorView& x) {
  MOIETY_CHECK(x.defined(), "{}: {} is absent", operation, argument);
  MOIETY_CHECK(x.contiguous(), "{}: {} is {}, it must be contiguous", operation, argument,
               x.describe());
  MOIETY_CHECK(x.bytes() * 8 == x.numel() * bits(x.dtype()), "{}: {} is {}, not whole bytes",
               operation, argument, x.describe());
}

void check_reducible(const char* operation, const TensorView& x) {
  switch (x.dtype()) {
    case DType::kFloat64:
    case DType::kFloat32:
    case DType::kBFloat16:
    case DType::kFloat16:
    case DType::kInt64:
    case DType::kInt32:
    case DType::kUInt8:
      return;
    default:
      fail(ErrorKind::kUnsupported, "{}: {} cannot be reduced", operation, moiety::name(x.dtype()));
  }
}

// Checks that `whole` holds one `part` per rank.
void check_parts(const char* operation, int size, const char* part_name, const TensorView& part,
                 const char* whole_name, const TensorView& whole) {
  check_contiguous(operation, part_name, part);
  check_contiguous(operation, whole_name, whole);
  MOIETY_CHECK(part.dtype() == whole.dtype() && whole.numel() == size * part.numel(),
               "{}: {} is {}, {} is {}, expected {} times as many elements", operation, part_name,
               part.describe(), whole_name, whole.describe(), size);
}

const std::byte* bytes_of(const TensorView& x) { return static_cast<std::byte*>(x.raw()); }

// Checks the packed rows of all_to_all; returns the elements of one row.
int64_t check_rows(int size, const char* argument, const TensorView& x,
                   std::span<const int64_t> counts) {
  check_contiguous("all_to_all", argument, x);
  MOIETY_CHECK(x.dims() >= 1 && counts.size() == size_t(size),
               "all_to_all: {} is {} with {} counts for {} ranks", argument, x.describe(),
               counts.size(), size);
  int64_t rows = 0;
  for (const int64_t n : counts) {
    MOIETY_CHECK(n >= 0, "all_to_all: a count of {} is {}", argument, n);
    rows += n;
  }
  MOIETY_CHECK(rows == x.size(0), "all_to_all: {} is {}, its counts sum to {}", argument,
               x.describe(), rows);
  int64_t elements = 1;
  for (int d = 1; d < x.dims(); ++d) elements *= x.size(d);
  MOIETY_CHECK(byte_size(x.dtype(), elements) * 8 == elements * bits(x.dtype()),
               "all_to_all: rows of {} {} are not whole bytes", argument, x.describe());
  return elements;
}

}  // namespace

const char* name(Collective kind) {
  switch (kind) {
    case Collective::kAllReduce:
      return "all_reduce";
    case Collective::kAllGather:
      return "all_gather";
    case Collective::kReduceScatter:
      return "reduce_scatter";
    case Collective::kAllToAll:
      return "all_to_all";
    case Collective::kBroadcast:
      return "broadcast";
    case Collective::kBarrier:
      return "barrier";
  }
  return "unknown";
}

ElementRange part_of(int64_t n, int rank, int ranks) {
  const int64_t length = round_up(ceil_div(n, ranks), 64);
  return {std::min(n, rank * length), std::min(n, (rank + 1) * length)};
}

int64_t rows_before(const std::vector<int64_t>& rows, int rank) {
  return std::accumulate(rows.begin(), rows.begin() + rank, int64_t{0});
}

void copy_bytes(std::byte* to, const std::byte* from, int64_t bytes) {
  if (to == from) return;
  const ByteCopy copy{to, from, bytes};
  copy_bytes({&copy, 1});
}

void copy_bytes(std::span<const ByteCopy> copies) {
  constexpr int64_t kGrain = 1 << 20;
  std::vector<int64_t> first{0};  // task of each
  for (const ByteCopy& c : copies) first.push_back(first.back() + ceil_div(c.bytes, kGrain));
  parallel_tasks(first.back(), [&](int64_t task) {
    const auto i = std::upper_bound(first.begin(), first.end(), task) - first.begin() - 1;
    const ByteCopy& c = copies[static_cast<size_t>(i)];
    const int64_t begin = (task - first[static_cast<size_t>(i)]) * kGrain;
    std::memcpy(c.to + begin, c.from + begin,
                static_cast<size_t>(std::min(kGrain, c.bytes - begin)));
  });
}

CollectiveCall all_reduce_call(const TensorView& x, ReduceOp op) {
  check_contiguous("all_reduce", "x", x);
  check_reducible("all_reduce", x);
  return {.kind = Collective::kAllReduce,
          .dtype = x.dtype(),
          .op = op,
          .elements = x.numel(),
          .send = bytes_of(x),
          .recv = static_cast<std::byte*>(x.raw())};
}

CollectiveCall all_gather_call(int size, const TensorView& send, const TensorView& recv) {
  check_parts("all_gather", size, "send", send, "recv", recv);
  return {.kind = Collective::kAllGather,
          .dtype = send.dtype(),
          .elements = send.numel(),
          .send = bytes_of(send),
          .recv = static_cast<std::byte*>(recv.raw())};
}

CollectiveCall reduce_scatter_call(int size, const TensorView& send, const TensorView& recv,
                                   ReduceOp op) {
  check_parts("reduce_scatter", size, "recv", recv, "send", send);
  check_reducible("reduce_scatter", send);
  return {.kind = Collective::kReduceScatter,
          .dtype = send.dtype(),
          .op = op,
          .elements = recv.numel(),
          .send = bytes_of(send),
          .recv = static_cast<std::byte*>(recv.raw())};
}

CollectiveCall all_to_all_call(int size, const TensorView& send,
                               std::span<const int64_t> send_counts, const TensorView& recv,
                               std::span<const int64_t> recv_counts) {
  const int64_t elements = check_rows(size, "send", send, send_counts);
  const int64_t expected = check_rows(size, "recv", recv, recv_counts);
  MOIETY_CHECK(send.dtype() == recv.dtype() && elements == expected,
               "all_to_all: send is {}, recv is {}: their rows differ", send.describe(),
               recv.describe());
  return {.kind = Collective::kAllToAll,
          .dtype = send.dtype(),
          .elements = elements,
          .send = bytes_of(send),
          .recv = static_cast<std::byte*>(recv.raw()),
          .send_rows = {send_counts.begin(), send_counts.end()},
          .recv_rows = {recv_counts.begin(), recv_counts.end()}};
}

CollectiveCall broadcast_call(int size, const TensorView& x, int root) {
  check_contiguous("broadcast", "x", x);
  MOIETY_CHECK(root >= 0 && root < size, "broadcast: root {} of {} ranks", root, size);
  return {.kind = Collective::kBroadcast,
          .dtype = x.dtype(),
          .root = root,
          .elements = x.numel(),
          .send = bytes_of(x),
          .recv = static_cast<std::byte*>(x.raw())};
}

std::string describe(const CollectiveCall& call) {
  const std::string what =
      text("{}({}[{}]", name(call.kind), moiety::name(call.dtype), call.elements);
  switch (call.kind) {
    case Collective::kBarrier:
      return name(call.kind);
    case Collective::kAllReduce:
    case Collective::kReduceScatter:
      return text("{}, {})", what, name(call.op));
    case Collective::kBroadcast:
      return text("{}, root {})", what, call.root);
    default:
      return what + ")";
  }
}

std::optional<std::string> mismatch(std::span<const CollectiveCall> calls) {
  if (const auto difference = call_mismatch(calls)) return difference;
  if (calls[0].kind != Collective::kAllToAll) return std::nullopt;
  return row_mismatch(calls);
}

std::optional<std::string> call_mismatch(std::span<const CollectiveCall> calls) {
  const auto same = [](const CollectiveCall& a, const CollectiveCall& b) {
    return a.kind == b.kind && a.dtype == b.dtype && a.op == b.op && a.root == b.root &&
           a.elements == b.elements;
  };
  for (size_t r = 1; r < calls.size(); ++r) {
    if (!same(calls[0], calls[r])) {
      return text("rank 0 runs {}, rank {} runs {}", describe(calls[0]), r, describe(calls[r]));
    }
  }
  return std::nullopt;
}

std::optional<std::string> row_mismatch(std::span<const CollectiveCall> calls) {
  for (size_t from = 0; from < calls.size(); ++from) {
    for (size_t to = 0; to < calls.size(); ++to) {
      const int64_t sent = calls[from].send_rows[to];
      const int64_t expected = calls[to].recv_rows[from];
      if (sent != expected) {
        return text("all_to_all: rank {} sends {} rows to rank {}, which expects {}", from, sent,
                    to, expected);
      }
    }
  }
  return std::nullopt;
}

}  // namespace moiety::comm
