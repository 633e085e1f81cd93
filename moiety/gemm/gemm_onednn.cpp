// Products by oneDNN's matmul, which others are compared with. It is called on one thread for blocks of few
// shapes, so that the primitives of a model fit in a small cache and bits do not depend on the
// thread count. Rows are taken in blocks of {256, ..., 16} from the first
// row, the last one zero-padded; so are reductions over rows (kNT), which are summed up in fp32.
#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <vector>

#include <dnnl.hpp>
#ifdef _OPENMP
#include <omp.h>
#endif

#include "moiety/base/format.h"
#include "moiety/gemm/gemm_block.h"

namespace moiety::gemm {
namespace {

constexpr int64_t kRowBlock = 256;
constexpr int64_t kColumnBlock = 1024;
constexpr size_t kCachedPrimitives = 512;

using Memory = dnnl::memory;

Memory::data_type onednn_type(DType dtype) {
  return dtype == DType::kBFloat16 ? Memory::data_type::bf16 : Memory::data_type::f32;
}

// out[m, n] (+)= a . b in fp32; each factor is row-major with a row stride, or its transpose.
struct Shape {
  DType dtype;
  int64_t m, n, k;
  bool a_transposed, b_transposed, accumulate;
  int64_t a_stride, b_stride;
  auto operator<=>(const Shape&) const = default;
};

Memory::desc matrix(const Shape& s, int64_t rows, int64_t columns, int64_t stride,
                    bool transposed) {
  const Memory::dims strides = transposed ? Memory::dims{1, stride} : Memory::dims{stride, 1};
  return {{rows, columns}, onednn_type(s.dtype), strides};
}

// The state that a thread needs to run primitives. The limit of one thread holds while primitives
// are made and run, since both depend on it.
class Runner {
 public:
  Runner() : engine_(dnnl::engine::kind::cpu, 0), stream_(engine_) {}

  void run(const Shape& s, const void* a, const void* b, float* out) {
    const OneThread limit;
    auto found = primitives_.find(s);
    if (found == primitives_.end()) {
      if (primitives_.size() >= kCachedPrimitives) primitives_.clear();
      found = primitives_.emplace(s, make(s)).first;
    }
    const Primitive& p = found->second;
    p.matmul.execute(stream_, {{DNNL_ARG_SRC, {p.a, engine_, const_cast<void*>(a)}},
                               {DNNL_ARG_WEIGHTS, {p.b, engine_, const_cast<void*>(b)}},
                               {DNNL_ARG_DST, {p.out, engine_, out}}});
    stream_.wait();
  }

 private:
  struct OneThread {
#ifdef _OPENMP
    const int before = omp_get_max_threads();
    OneThread() { omp_set_num_threads(1); }
    ~OneThread() { omp_set_num_threads(before); }
#endif
  };
  struct Primitive {
    Memory::desc a, b, out;
    dnnl::matmul matmul;
  };

  Primitive make(const Shape& s) const {
    Primitive p{matrix(s, s.m, s.k, s.a_stride, s.a_transposed),
                matrix(s, s.k, s.n, s.b_stride, s.b_transposed),
                {{s.m, s.n}, Memory::data_type::f32, Memory::format_tag::ab},
                {}};
    dnnl::primitive_attr attributes;
    if (s.accumulate) {
      dnnl::post_ops sum;
      sum.append_sum(1.0f);
      attributes.set_post_ops(sum);
    }
    p.matmul = dnnl::matmul({dnnl::matmul::desc(p.a, p.b, p.out), attributes, engine_});
    return p;
  }

  dnnl::engine engine_;
  dnnl::stream stream_;
  std::map<Shape, Primitive> primitives_;
};

Runner& runner() {
  thread_local Runner instance;
  return instance;
}

template <class T>
T* scratch(int64_t elements, int which) {
  thread_local std::array<std::vector<T>, 3> buffers;
  std::vector<T>& buffer = buffers[which];
  if (static_cast<int64_t>(buffer.size()) < elements) buffer.resize(elements);
  return buffer.data();
}

// 256, or the smallest of {16, 32, 64, 128, 256} that holds the rest.
int64_t padded_rows(int64_t rest) {
  int64_t rows = 16;
  while (rows < rest && rows < kRowBlock) rows *= 2;
  return rows;
}

template <class T>
struct Factor {
  const T* data;
  int64_t stride;
};

// Rows [row, row + rows), then zeros up to `padded`, of columns [column, column + columns).
template <class T>
Factor<T> factor(const ProductOperand& x, int64_t row, int64_t rows, int64_t padded, int64_t column,
                 int64_t columns, int which) {
  if (!x.source && rows == padded) return {x.row<T>(row) + column, x.stride};
  T* out = scratch<T>(padded * columns, which);
  for (int64_t r = 0; r < padded; ++r) {
    const T* in = r < rows ? x.row<T>(row + r) : nullptr;
    if (in) {
      std::memcpy(out + r * columns, in + column, columns * sizeof(T));
    } else {
      std::fill_n(out + r * columns, columns, T{});
    }
  }
  return {out, columns};
}

// Computes rows [i, i + m) and columns [j, j + n) of y = x w^T or dx = dy w into `acc` [padded, n].
template <class T>
void rows_block(const Product& g, int64_t i, int64_t m, int64_t padded, int64_t j, int64_t n,
                float* acc) {
  const bool transposed = g.op == GemmOp::kTN;
  const Factor<T> a = factor<T>(g.a, i, m, padded, 0, g.k, 0);
  const Factor<T> b =
      transposed ? Factor<T>{g.b.row<T>(j), g.b.stride} : factor<T>(g.b, 0, g.k, g.k, j, n, 1);
  runner().run({g.dtype, padded, n, g.k, false, transposed, false, a.stride, b.stride}, a.data,
               b.data, acc);
}

// The same for dw = dy^T x, a sum over g.k rows.
template <class T>
void reduction_block(const Product& g, int64_t i, int64_t m, int64_t j, int64_t n, float* acc) {
  for (int64_t p = 0; p < g.k; p += kRowBlock) {
    const int64_t rows = std::min(kRowBlock, g.k - p), padded = padded_rows(rows);
    const Factor<T> a = factor<T>(g.a, p, rows, padded, i, m, 0);
    const Factor<T> b = factor<T>(g.b, p, rows, padded, j, n, 1);
    runner().run({g.dtype, m, n, padded, true, false, p > 0, a.stride, b.stride}, a.data, b.data,
                 acc);
  }
}

template <class T>
void product(const Product& g) {
  const int64_t end = g.row + g.m, column_end = g.column + g.n;
  for (int64_t j = g.column; j < column_end; j += kColumnBlock) {
    const int64_t n = std::min(kColumnBlock, column_end - j);
    for (int64_t i = g.row; i < end; i += kRowBlock) {
      const int64_t m = std::min(kRowBlock, end - i), padded = padded_rows(m);
      float* acc = scratch<float>(padded * n, 2);
      if (g.k == 0) {
        std::fill_n(acc, padded * n, 0.0f);
      } else if (g.op == GemmOp::kNT) {
        reduction_block<T>(g, i, m, j, n, acc);
      } else {
        rows_block<T>(g, i, m, padded, j, n, acc);
      }
      finish_tile_cpu(g.epilogue, {acc, n, i, m, j, n});
    }
  }
}

}  // namespace

std::string onednn_version() {
  const dnnl_version_t& v = *dnnl_version();
  return text("{}.{}.{}", v.major, v.minor, v.patch);
}

bool onednn_available(DType dtype) {
  if (dtype != DType::kBFloat16) return dtype == DType::kFloat32;
  const auto isa = static_cast<unsigned>(dnnl::get_effective_cpu_isa());
  const auto least = static_cast<unsigned>(dnnl::cpu_isa::avx512_core);
  return (isa & least) == least;
}

void block_gemm_onednn(const Product& block) {
  if (block.dtype == DType::kFloat32) {
    product<float>(block);
  } else {
    product<bf16>(block);
  }
}

}  // namespace moiety::gemm
