#include "moiety/nn/cudnn_sdpa.h"

namespace moiety::nn {
namespace {

constexpr cudnnDataType_t kBf16 = CUDNN_DATA_BFLOAT16, kFp32 = CUDNN_DATA_FLOAT;

// The graph of one pass and the sizes of the tensors in it.
class SdpaGraph {
 public:
  explicit SdpaGraph(const SdpaShape& shape) : s_(shape) {}

  void forward();
  void backward();
  CudnnPlan plan(cudnnHandle_t handle) const { return g_.plan(handle); }

 private:
  CudnnDims sizes(int64_t rows, int64_t columns) const {
    return {s_.batch, s_.heads, rows, columns};
  }
  CudnnDims scores() const { return sizes(s_.length, s_.length); }
  CudnnDims rows() const { return sizes(s_.length, 1); }

  // The tensor [length, C] of each head; transposed it is [C, length] in the same memory.
  CudnnTensor heads(int64_t id, const SdpaStrides& x, int64_t heads) {
    return g_.bound(id, kBf16, {s_.batch, heads, s_.length, s_.head_dim},
                    {x.batch, x.head, x.row, 1});
  }
  CudnnTensor transposed(int64_t id, const SdpaStrides& x) {
    return g_.bound(id, kBf16, {s_.batch, s_.kv_heads, s_.head_dim, s_.length},
                    {x.batch, x.head, 1, x.row});
  }
  CudnnTensor statistics(int64_t id) { return g_.bound(id, kFp32, rows(), packed_strides(rows())); }

  CudnnTensor pointwise(const CudnnGraph::Pointwise& p, cudnnDataType_t type = kFp32) {
    const CudnnTensor out = g_.temporary(p.x.sizes, p.x.strides, type);
    g_.pointwise(p, out);
    return out;
  }
  CudnnTensor product(const CudnnTensor& a, const CudnnTensor& b) {
    const CudnnTensor out = g_.temporary(sizes(a.sizes[2], b.sizes[3]));
    g_.matmul(a, b, out);
    return out;
  }
  CudnnTensor reduced(cudnnReduceTensorOp_t op, const CudnnTensor& x) {
    const CudnnTensor out = g_.temporary(rows());
    g_.reduce(op, x, out);
    return out;
  }
  // x with -inf where a key comes after its query.
  CudnnTensor masked(const CudnnTensor& x) {
    const CudnnTensor minus_infinity = g_.by_value(kMinusInfinity);
    const CudnnTensor query =
        pointwise({CUDNN_POINTWISE_GEN_INDEX, x, {}, {}, 2}, CUDNN_DATA_INT32);
    const CudnnTensor key = pointwise({CUDNN_POINTWISE_GEN_INDEX, x, {}, {}, 3}, CUDNN_DATA_INT32);
    const CudnnTensor seen = pointwise({CUDNN_POINTWISE_CMP_GE, query, &key}, CUDNN_DATA_BOOLEAN);
    return pointwise({CUDNN_POINTWISE_BINARY_SELECT, x, &minus_infinity, &seen});
  }
  // x^T of every head, rounded to bf16.
  CudnnTensor turned(const CudnnTensor& x) {
    const CudnnTensor out = g_.temporary(
        scores(), {s_.heads * s_.length * s_.length, s_.length * s_.length, 1, s_.length}, kBf16);
    g_.view(x, out);
    return out;
  }
  // Multiplies a b into the gradient of the key or value heads, summed over the query heads of
  // each.
  void gradient(const CudnnTensor& a, const CudnnTensor& b, const CudnnTensor& out) {
    if (s_.heads == s_.kv_heads) return g_.matmul(a, b, out);
    const CudnnTensor of_heads = g_.temporary(sizes(s_.length, s_.head_dim), kBf16);
    g_.matmul(a, b, of_heads);
    g_.reduce(CUDNN_REDUCE_TENSOR_ADD, of_heads, out);
  }

  const SdpaShape& s_;
  CudnnGraph g_;
};

void SdpaGraph::forward() {
  const CudnnTensor q = heads(kQ, s_.q, s_.heads), kt = transposed(kK, s_.k);
  const CudnnTensor v = heads(kV, s_.v, s_.kv_heads), o = heads(kO, s_.o, s_.heads);
  const CudnnTensor scale = g_.by_value(kScale), lse = statistics(kLse);

  const CudnnTensor s = masked(pointwise({CUDNN_POINTWISE_MUL, product(q, kt), &scale}));
  const CudnnTensor max = reduced(CUDNN_REDUCE_TENSOR_MAX, s);
  const CudnnTensor shifted = pointwise({CUDNN_POINTWISE_SUB, s, &max});
  const CudnnTensor e = pointwise({CUDNN_POINTWISE_EXP, shifted});
  const CudnnTensor sum = reduced(CUDNN_REDUCE_TENSOR_ADD, e);
  const CudnnTensor log = pointwise({CUDNN_POINTWISE_LOG, sum});
  g_.pointwise({CUDNN_POINTWISE_ADD, max, &log}, lse);
  const CudnnTensor p = pointwise({CUDNN_POINTWISE_DIV, e, &sum}, kBf16);
  g_.matmul(p, v, o);
}

void SdpaGraph::backward() {
  const CudnnTensor q = heads(kQ, s_.q, s_.heads), o = heads(kO, s_.o, s_.heads);
  const CudnnTensor kt = transposed(kK, s_.k), vt = transposed(kV, s_.v);
  const CudnnTensor d_out = heads(kDOut, s_.d_out, s_.heads), dq = heads(kDq, s_.dq, s_.heads);
  const CudnnTensor dk = heads(kDk, s_.dk, s_.kv_heads), dv = heads(kDv, s_.dv, s_.kv_heads);
  const CudnnTensor scale = g_.by_value(kScale), one = g_.by_value(kOne);
  const CudnnTensor lse = statistics(kLse), delta = statistics(kDelta);

  // The factor 1 stands in the place of dropout's factor.
  const CudnnTensor of_columns = g_.temporary(sizes(s_.length, s_.head_dim));
  g_.pointwise({CUDNN_POINTWISE_MUL, d_out, &o}, of_columns);
  g_.pointwise({CUDNN_POINTWISE_MUL, reduced(CUDNN_REDUCE_TENSOR_ADD, of_columns), &one}, delta);

  const CudnnTensor s = pointwise({CUDNN_POINTWISE_MUL, product(q, kt), &scale});
  const CudnnTensor p =
      pointwise({CUDNN_POINTWISE_EXP, masked(pointwise({CUDNN_POINTWISE_SUB, s, &lse}))});
  gradient(turned(p), d_out, dv);

  const CudnnTensor dp = pointwise({CUDNN_POINTWISE_SUB, product(d_out, vt), &delta});
  const CudnnTensor ds =
      pointwise({CUDNN_POINTWISE_MUL, pointwise({CUDNN_POINTWISE_MUL, dp, &p}), &scale});
  gradient(turned(ds), q, dk);

  const CudnnTensor k = g_.temporary({s_.batch, s_.kv_heads, s_.length, s_.head_dim},
                                     {s_.k.batch, s_.k.head, s_.k.row, 1}, kBf16);
  g_.view(kt, k);
  g_.matmul(ds, k, dq);
}

}  // namespace

CudnnPlan sdpa_plan(cudnnHandle_t handle, const SdpaShape& shape) {
  SdpaGraph graph(shape);
  shape.backward ? graph.backward() : graph.forward();
  return graph.plan(handle);
}

}  // namespace moiety::nn
