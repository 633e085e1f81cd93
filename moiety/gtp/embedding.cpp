#include "moiety/gtp/embedding.h"

#include <array>
#include <cstring>
#include <vector>

#include "moiety/base/integer.h"
#include "moiety/base/parallel.h"
#include "moiety/base/trace.h"
#include "moiety/formats/bf16.h"
#include "moiety/nn/embedding_sum.h"

namespace moiety::gtp {
namespace {

constexpr int64_t kTile = 512;        // columns whose sums stay in the nearest cache
constexpr int64_t kGrain = 32 << 10;  // elements of a task
constexpr int64_t kAlignment = 64;    // of the parts of a send slot

int64_t aligned(int64_t bytes) { return round_up(bytes, kAlignment); }

int64_t first_row(const Layout& layout) { return layout.global_box(0).rows.begin; }
// The row of the slice that a token has; -1 if it has none.
int64_t row_of(const Layout& layout, int64_t first, int32_t token) {
  const int64_t row = int64_t{token} - first;
  return row >= 0 && row < layout.real_rows() ? row : -1;
}

void check_float(const char* op, const char* what, const TensorView& x,
                 std::initializer_list<int64_t> sizes) {
  check_tensor(op, what, x, x.dtype(), sizes);
  MOIETY_CHECK((x.dtype() == DType::kFloat32 || x.dtype() == DType::kBFloat16) && x.contiguous(),
               "{}: {} is {}, expected float32 or bfloat16 without gaps", op, what, x.describe());
}

void check_token_rows(const char* op, const Layout& layout, const TensorView& token_T,
                      const char* what, const TensorView& x_TD) {
  check_layout(op, layout);
  MOIETY_CHECK(layout.tp_axis != 1, "{}: tp_axis is 1, expected a table that is cut by rows", op);
  check_tensor(op, "token", token_T, DType::kInt32, {-1});
  MOIETY_CHECK(token_T.contiguous(), "{}: token is {}, expected no gaps", op, token_T.describe());
  check_float(op, what, x_TD, {token_T.size(0), layout.cols});
}

void count_faults(const Layout& layout, const TensorView& token_T, const TensorView& faults) {
  if (!faults.defined()) return;
  auto* out = faults.data<int64_t>();
  const auto* token = token_T.data<int32_t>();
  for (int64_t t = 0; t < token_T.numel(); ++t) {
    if (token[t] >= 0 && token[t] < layout.rows) continue;
    if (out[0]++ == 0) out[1] = t, out[2] = token[t];
  }
}

// out[t] = the row of token[t], which rows(r) finds; zero if it has none.
template <class Rows>
void look_up(const Layout& layout, const TensorView& token_T, const TensorView& out_TD,
             const Rows& rows) {
  const int64_t bytes = byte_size(out_TD.dtype(), layout.cols);
  const int64_t first = first_row(layout);
  const auto* token = token_T.data<int32_t>();
  auto* out = static_cast<std::byte*>(out_TD.raw());
  parallel_for(token_T.numel(), kGrain / layout.cols, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const int64_t row = row_of(layout, first, token[t]);
      if (row < 0) {
        std::memset(out + t * bytes, 0, static_cast<size_t>(bytes));
      } else {
        std::memcpy(out + t * bytes, rows(row), static_cast<size_t>(bytes));
      }
    }
  });
}

void check_lookup(const Layout& layout, const TensorView& token_T, const TensorView& out_TD,
                  const TensorView& faults) {
  check_token_rows("gtp embedding", layout, token_T, "out", out_TD);
  if (faults.defined()) check_tensor("gtp embedding", "faults", faults, DType::kInt64, {3});
}

// A rank's contribution to the rows of one owner: its occurrences, sorted.
struct Source {
  const std::byte* dout = nullptr;
  const int64_t *begin = nullptr, *end = nullptr;
};

// Writes the occurrences of rows in `rows`, counted from its begin, into `out`; returns their end.
int64_t* find_occurrences(const Layout& layout, Range rows, const int32_t* token, int64_t tokens,
                          int64_t* out) {
  const int64_t first = first_row(layout);
  int64_t* end = out;
  for (int64_t t = 0; t < tokens; ++t) {
    const int64_t row = row_of(layout, first, token[t]);
    if (row >= rows.begin && row < rows.end) *end++ = nn::occurrence(row - rows.begin, t);
  }
  std::sort(out, end);
  return end;
}

// Calls take(row, column, n, x) for every row and tile of columns, where x is the sum over the
// sources.
template <class T, class Take>
void sum_rows(std::span<const Source> sources, int64_t rows, int64_t cols, const Take& take) {
  parallel_for(rows, std::max<int64_t>(1, kGrain / cols), [&](int64_t begin, int64_t end) {
    std::array<float, kTile> block, part, x;
    std::vector<Source> of_row(sources.begin(), sources.end());
    for (Source& s : of_row) {
      s.end = std::lower_bound(s.begin, s.end, nn::occurrence(begin, 0));
    }
    for (int64_t row = begin; row < end; ++row) {
      for (size_t j = 0; j < of_row.size(); ++j) {
        Source& s = of_row[j];
        s.begin = s.end;
        while (s.end < sources[j].end && nn::row_of_occurrence(*s.end) == row) ++s.end;
      }
      for (int64_t c = 0; c < cols; c += kTile) {
        const int64_t n = std::min(kTile, cols - c);
        for (size_t j = 0; j < of_row.size(); ++j) {
          const Source& s = of_row[j];
          nn::sum_occurrences(reinterpret_cast<const T*>(s.dout) + c, cols, n, s.begin, s.end,
                              block.data(), j == 0 ? x.data() : part.data());
          if (j == 0) continue;
          for (int64_t i = 0; i < n; ++i) x[i] = x[i] + part[i];
        }
        take(row, c, n, x.data());
      }
    }
  });
}

template <class F>
void with_float(DType dtype, const F& f) {
  dtype == DType::kBFloat16 ? f(bf16()) : f(float());
}

struct SendParts {
  int64_t token, dout, total;
};
// The number of tokens comes first.
SendParts send_parts(int64_t capacity, int64_t cols, DType dout) {
  const int64_t rows = kAlignment + aligned(4 * capacity);
  return {kAlignment, rows, rows + byte_size(dout, capacity * cols)};
}

int64_t tokens_in(const std::byte* send) {
  int64_t tokens = 0;
  std::memcpy(&tokens, send, 8);
  return tokens;
}

template <class Main>
void add_sums(std::span<const Source> sources, const EmbeddingReduceJob& job) {
  const int64_t D = job.layout.cols;
  const int64_t valid = job.layout.valid(job.layout.gtp_rank).size();
  auto* main = job.main_grad.data<Main>();
  if (job.first) {
    std::fill(main + valid * D, main + job.layout.shard_rows() * D, Main(0.0f));
  }
  with_float(job.dout, [&](auto element) {
    sum_rows<decltype(element)>(
        sources, valid, D, [&](int64_t row, int64_t column, int64_t n, const float* x) {
          Main* out = main + row * D + column;
          for (int64_t i = 0; i < n; ++i) {
            out[i] = Main(job.first ? x[i] : static_cast<float>(out[i]) + x[i]);
          }
        });
  });
}

// Sums the owner's part, once all ranks' sends can be read.
void add_own_rows(const EmbeddingReduceJob& job, std::span<std::byte* const> sends,
                  TransportBytes& received) {
  const SendParts parts = send_parts(job.capacity, job.layout.cols, job.dout);
  const int64_t row_bytes = byte_size(job.dout, job.layout.cols);
  const Range own = job.layout.valid(job.layout.gtp_rank);
  std::vector<Source> sources;
  for (size_t j = 0; j < sends.size(); ++j) {
    int64_t* begin = job.workspace.data<int64_t>() + static_cast<int64_t>(j) * job.capacity;
    const int64_t tokens = tokens_in(sends[j]);
    const auto* token = reinterpret_cast<const int32_t*>(sends[j] + parts.token);
    int64_t* end = find_occurrences(job.layout, own, token, tokens, begin);
    sources.push_back({sends[j] + parts.dout, begin, end});
    if (static_cast<int>(j) == job.layout.gtp_rank) continue;
    received.reduced += 4 * tokens + (end - begin) * row_bytes;
  }
  job.main_grad.dtype() == DType::kBFloat16 ? add_sums<bf16>(sources, job)
                                            : add_sums<float>(sources, job);
}

}  // namespace

const char* name(EmbeddingPath path) { return path == EmbeddingPath::kTable ? "table" : "rows"; }

EmbeddingTraffic embedding_traffic(const Layout& layout, int64_t tokens, DType storage,
                                   DType wire) {
  const int64_t peers = layout.gtp_size - 1, D = layout.cols;
  const BundleSpec::Rows rows = embedding_rows(layout, tokens, storage);
  return {.table = peers * layout.shard_rows() * (byte_size(storage, D) + byte_size(wire, D)),
          .rows = rows.lookup + rows.reduce.received};
}

BundleSpec::Rows embedding_rows(const Layout& layout, int64_t tokens, DType storage) {
  const int64_t peers = layout.gtp_size - 1, row = byte_size(storage, layout.cols);
  return {.tokens = tokens,
          .lookup = peers * tokens * row / layout.gtp_size,
          .reduce = {.received = peers * tokens * (row + 4),
                     .slot = embedding_send_bytes(tokens, layout.cols, storage),
                     .scratch = 8 * layout.gtp_size * tokens}};
}

void check_tokens(const Layout& layout, TensorView faults) {
  check_tensor("gtp embedding", "faults", faults, DType::kInt64, {3});
  const auto* f = faults.data<int64_t>();
  MOIETY_CHECK(f[0] == 0,
               "embedding: token {} at position {} is outside the vocabulary of {} ({} such)", f[2],
               f[1], layout.rows, f[0]);
}

void embedding_lookup(const Layout& layout, TensorView table_MD, TensorView token_T,
                      TensorView out_TD, TensorView faults, Stream stream) {
  check_lookup(layout, token_T, out_TD, faults);
  check_tensor("gtp embedding", "table", table_MD, out_TD.dtype(),
               {layout.padded_rows(), layout.cols});
  MOIETY_CHECK(table_MD.contiguous(), "gtp embedding: table is {}, expected no gaps",
               table_MD.describe());
  stream.run([=] {
    const TraceSpan span(TraceLane::kCompute, "embedding", {{"tokens", token_T.numel()}});
    count_faults(layout, token_T, faults);
    const auto* table = static_cast<const std::byte*>(table_MD.raw());
    const int64_t bytes = byte_size(out_TD.dtype(), layout.cols);
    look_up(layout, token_T, out_TD, [=](int64_t row) { return table + row * bytes; });
  });
}

void embedding_lookup(MappedTransport& transport, BundleId bundle, const Layout& layout,
                      TensorView token_T, TensorView out_TD, TensorView faults, Stream stream) {
  check_lookup(layout, token_T, out_TD, faults);
  stream.run([=, &transport] {
    const TraceSpan span(transport.axis(), "embedding rows", {{"tokens", token_T.numel()}});
    count_faults(layout, token_T, faults);
    const std::vector<const std::byte*> shards = transport.await_shards(bundle, Array::kRowData, 0);
    const int64_t bytes = byte_size(out_TD.dtype(), layout.cols), s = layout.shard_rows();
    look_up(layout, token_T, out_TD,
            [&](int64_t row) { return shards[row / s] + row % s * bytes; });
    const int64_t first = first_row(layout);
    TransportBytes received;
    for (int64_t t = 0; t < token_T.numel(); ++t) {
      const int64_t row = row_of(layout, first, token_T.data<int32_t>()[t]);
      if (row >= 0 && row / s != layout.gtp_rank) received.gathered += bytes;
    }
    transport.count_received(received);
  });
}

void embedding_gradient(const Layout& layout, TensorView dout_TD, TensorView token_T,
                        TensorView send_MD, TensorView workspace, Stream stream) {
  const char* op = "gtp embedding gradient";
  check_token_rows(op, layout, token_T, "dout", dout_TD);
  check_float(op, "send", send_MD, {layout.padded_rows(), layout.cols});
  check_tensor(op, "workspace", workspace, DType::kInt64, {token_T.size(0)});
  stream.run([=] {
    const TraceSpan span(TraceLane::kCompute, "embedding gradient", {{"tokens", token_T.numel()}});
    const Range rows{0, layout.real_rows()};
    int64_t* begin = workspace.data<int64_t>();
    const int64_t* end =
        find_occurrences(layout, rows, token_T.data<int32_t>(), token_T.numel(), begin);
    const Source source{static_cast<const std::byte*>(dout_TD.raw()), begin, end};
    with_float(send_MD.dtype(), [&](auto wire) {
      using Wire = decltype(wire);
      auto* send = send_MD.data<Wire>();
      with_float(dout_TD.dtype(), [&](auto element) {
        sum_rows<decltype(element)>({&source, 1}, rows.end, layout.cols,
                                    [&](int64_t row, int64_t column, int64_t n, const float* x) {
                                      Wire* out = send + row * layout.cols + column;
                                      for (int64_t i = 0; i < n; ++i) out[i] = Wire(x[i]);
                                    });
      });
    });
  });
}

int64_t embedding_send_bytes(int64_t capacity, int64_t cols, DType dout) {
  return send_parts(capacity, cols, dout).total;
}

void embedding_send(const Layout& layout, TensorView dout_TD, TensorView token_T, int64_t capacity,
                    TensorView send, Stream stream) {
  const char* op = "gtp embedding send";
  check_token_rows(op, layout, token_T, "dout", dout_TD);
  MOIETY_CHECK(token_T.size(0) <= capacity, "{}: {} tokens, expected at most {}", op,
               token_T.size(0), capacity);
  const SendParts parts = send_parts(capacity, layout.cols, dout_TD.dtype());
  check_tensor(op, "send", send, DType::kUInt8, {parts.total});
  stream.run([=] {
    const int64_t tokens = token_T.numel();
    auto* to = static_cast<std::byte*>(send.raw());
    std::memcpy(to, &tokens, 8);
    if (tokens == 0) return;
    std::memcpy(to + parts.token, token_T.raw(), static_cast<size_t>(token_T.bytes()));
    std::memcpy(to + parts.dout, dout_TD.raw(), static_cast<size_t>(dout_TD.bytes()));
  });
}

void embedding_reduce(MappedTransport& transport, const EmbeddingReduceJob& job, Stream lane) {
  const char* op = "gtp embedding reduce";
  const Layout& layout = job.layout;
  check_layout(op, layout);
  MOIETY_CHECK(layout.gtp_size == transport.ranks() && layout.gtp_rank == transport.rank(),
               "{}: the layout is of gtp rank {} of {}, the transport of {} of {}", op,
               layout.gtp_rank, layout.gtp_size, transport.rank(), transport.ranks());
  check_tensor(op, "send", job.send, DType::kUInt8,
               {embedding_send_bytes(job.capacity, layout.cols, job.dout)});
  transport.check_send(job.bundle, job.send);
  check_float(op, "main_grad", job.main_grad, {layout.shard_rows(), layout.cols});
  check_tensor(op, "workspace", job.workspace, DType::kInt64, {transport.ranks() * job.capacity});
  lane.run([=, &transport] {
    const int64_t tokens = tokens_in(static_cast<const std::byte*>(job.send.raw()));
    const TraceSpan span(transport.axis(), "embedding reduce", {{"tokens", tokens}});
    TransportBytes received;
    const Subject subject{.bundle = job.bundle,
                          .action = Subject::Action::kReduceRows,
                          .detail = static_cast<uint16_t>(job.dout),
                          .bytes = job.send.bytes()};
    transport.exchange(subject, job.send, [&](std::span<std::byte* const> sends) {
      add_own_rows(job, sends, received);
    });
    transport.count_received(received);
  });
}

}  // namespace moiety::gtp
