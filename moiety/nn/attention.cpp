#include "moiety/nn/attention.h"

#include "moiety/base/check_devices.h"
#include "moiety/base/cuda_built.h"
#include "moiety/base/trace.h"
#include "moiety/nn/attention_cuda.h"
#include "moiety/nn/element.h"

namespace moiety::nn {
namespace {

void check_heads(const char* operation, const char* argument, const TensorView& x, DType dtype,
                 std::initializer_list<int64_t> sizes) {
  check_tensor(operation, argument, x, dtype, sizes);
  MOIETY_CHECK(x.stride(-1) == 1, "{}: {} is {}: a head must be contiguous", operation, argument,
               x.describe());
}

void check_forward(const char* operation, const AttentionArgs& a) {
  const TensorView& q = a.q_BSGMC;
  const DType dtype = q.dtype();
  check_element(operation, dtype);
  check_heads(operation, "q", q, dtype, {-1, -1, -1, -1, -1});
  const int64_t sequences = q.size(0), queries = q.size(1), groups = q.size(2), heads = q.size(3);
  const int64_t head_dim = q.size(4);
  MOIETY_CHECK(head_dim >= 2 && head_dim <= 256 && head_dim % 2 == 0,
               "{}: head_dim={} must be even, at most 256", operation, head_dim);
  check_heads(operation, "k", a.k_BSGC, dtype, {sequences, -1, groups, head_dim});
  check_heads(operation, "v", a.v_BSGC, dtype, {sequences, a.k_BSGC.size(1), groups, head_dim});
  MOIETY_CHECK(queries <= a.k_BSGC.size(1), "{}: {} queries, {} keys", operation, queries,
               a.k_BSGC.size(1));
  check_heads(operation, "o", a.o_BSGMC, dtype, {sequences, queries, groups, heads, head_dim});
  check_tensor(operation, "lse", a.lse_BGMS, compute_dtype(dtype),
               {sequences, groups, heads, queries});
  MOIETY_CHECK(a.lse_BGMS.contiguous(), "{}: lse is {}", operation, a.lse_BGMS.describe());
  if (a.document_start_BS.defined()) {
    check_tensor(operation, "document_start", a.document_start_BS, DType::kInt32,
                 {sequences, queries});
    MOIETY_CHECK(a.document_start_BS.contiguous(), "{}: document_start must be contiguous",
                 operation);
  }
}

void check_backward(const char* operation, const AttentionBackwardArgs& a) {
  check_forward(operation, a.forward);
  const TensorView& q = a.forward.q_BSGMC;
  const TensorView& k = a.forward.k_BSGC;
  const auto like_q = {q.size(0), q.size(1), q.size(2), q.size(3), q.size(4)};
  const auto like_k = {k.size(0), k.size(1), k.size(2), k.size(3)};
  check_heads(operation, "do", a.do_BSGMC, q.dtype(), like_q);
  check_heads(operation, "dq", a.dq_BSGMC, q.dtype(), like_q);
  check_heads(operation, "dk", a.dk_BSGC, q.dtype(), like_k);
  check_heads(operation, "dv", a.dv_BSGC, q.dtype(), like_k);
}

void check_documents(const char* operation, const AttentionArgs& a) {
  if (!a.document_start_BS.defined()) return;
  const int64_t queries = a.q_BSGMC.size(1), offset = a.k_BSGC.size(1) - queries;
  for (int64_t b = 0; b < a.q_BSGMC.size(0); ++b) {
    const int32_t* start = a.document_start_BS.data<int32_t>() + b * queries;
    for (int64_t i = 0; i < queries; ++i) {
      MOIETY_CHECK(start[i] >= (i ? start[i - 1] : 0) && start[i] <= offset + i,
                   "{}: document start {} of query {} in sequence {}", operation, start[i], i, b);
    }
  }
}

void check_workspace(const char* operation, const TensorView& x) {
  if (!x.defined()) return;
  check_tensor(operation, "workspace", x, DType::kUInt8, {-1});
  const uintptr_t alignment = x.device().type == DeviceType::kCuda ? 256 : 64;
  MOIETY_CHECK(x.contiguous() && reinterpret_cast<uintptr_t>(x.raw()) % alignment == 0,
               "{}: workspace {} at {} is not contiguous and aligned to {}", operation,
               x.describe(), x.raw(), alignment);
}

// Whether the operation runs on a GPU, found while checking that everything it reads and writes is
// with the stream.
bool on_gpu(const char* operation, const AttentionArgs& a, const Stream& stream) {
  check_workspace(operation, a.workspace);
  return check_devices(operation,
                       {{"q", a.q_BSGMC},
                        {"k", a.k_BSGC},
                        {"v", a.v_BSGC},
                        {"document_start", a.document_start_BS},
                        {"o", a.o_BSGMC},
                        {"lse", a.lse_BGMS},
                        {"workspace", a.workspace}},
                       stream);
}

bool on_gpu(const char* operation, const AttentionBackwardArgs& a, const Stream& stream) {
  check_workspace(operation, a.workspace);
  check_devices(operation,
                {{"do", a.do_BSGMC},
                 {"dq", a.dq_BSGMC},
                 {"dk", a.dk_BSGC},
                 {"dv", a.dv_BSGC},
                 {"delta", a.delta_BGMS},
                 {"workspace", a.workspace}},
                stream);
  if (!on_gpu(operation, a.forward, stream)) return false;
  const TensorView& lse = a.forward.lse_BGMS;
  check_tensor(operation, "delta", a.delta_BGMS, lse.dtype(),
               {lse.size(0), lse.size(1), lse.size(2), lse.size(3)});
  MOIETY_CHECK(a.delta_BGMS.contiguous(), "{}: delta is {}", operation, a.delta_BGMS.describe());
  return true;
}

// FLOPs of the two products of forward, for profiles; half of the keys come after their query.
double causal_flops(const AttentionArgs& a) {
  return 2.0 * double(a.q_BSGMC.numel()) * double(a.k_BSGC.size(1));
}

}  // namespace

void attention(const AttentionArgs& a, Stream stream) {
  check_forward("attention", a);
  if (on_gpu("attention", a, stream)) {
    if constexpr (kCudaBuilt) return attention_cuda(a, stream);
    fail_without_cuda("attention");
  }
  stream.run([=] {
    const TraceSpan span(TraceLane::kCompute, "attention",
                         {{"sequences", a.q_BSGMC.size(0)},
                          {"queries", a.q_BSGMC.size(1)},
                          {"flops", causal_flops(a)}});
    check_documents("attention", a);
    a.q_BSGMC.dtype() == DType::kFloat64 ? attention_ref(a) : attention_cpu(a);
  });
}

int64_t attention_workspace(const AttentionArgs& a, Stream stream) {
  check_forward("attention", a);
  if (!on_gpu("attention", a, stream)) return 0;
  if constexpr (kCudaBuilt) return attention_workspace_cuda(a, stream);
  fail_without_cuda("attention");
}

int64_t attention_backward_workspace(const AttentionBackwardArgs& a, Stream stream) {
  const char* operation = "attention_backward";
  check_backward(operation, a);
  if (!on_gpu(operation, a, stream)) return 0;
  if constexpr (kCudaBuilt) return attention_backward_workspace_cuda(a, stream);
  fail_without_cuda(operation);
}

void attention_backward(const AttentionBackwardArgs& a, Stream stream) {
  const char* operation = "attention_backward";
  check_backward(operation, a);
  const TensorView& q = a.forward.q_BSGMC;
  if (on_gpu(operation, a, stream)) {
    if constexpr (kCudaBuilt) return attention_backward_cuda(a, stream);
    fail_without_cuda(operation);
  }
  stream.run([=] {
    const TraceSpan span(TraceLane::kCompute, operation,
                         {{"sequences", q.size(0)},
                          {"queries", q.size(1)},
                          {"flops", 2.5 * causal_flops(a.forward)}});
    check_documents(operation, a.forward);
    q.dtype() == DType::kFloat64 ? attention_backward_ref(a) : attention_backward_cpu(a);
  });
}

QkvHeads split_heads(const TensorView& qkv, int64_t sequences, int64_t heads, int64_t kv_heads,
                     int64_t head_dim) {
  MOIETY_CHECK(qkv.dims() == 2 && qkv.contiguous() && sequences >= 1 &&
                   qkv.size(0) % sequences == 0 && heads % kv_heads == 0 &&
                   qkv.size(1) == (heads + 2 * kv_heads) * head_dim,
               "split_heads: {} for {} sequences, {} heads, {} kv heads of {}", qkv.describe(),
               sequences, heads, kv_heads, head_dim);
  const int64_t per_group = heads / kv_heads;
  const TensorView all =
      qkv.reshape({sequences, qkv.size(0) / sequences, kv_heads, per_group + 2, head_dim});
  const auto one_head = [&](int64_t n) {
    const TensorView part = all.slice(3, n, n + 1);
    const std::array<int64_t, 4> sizes{part.size(0), part.size(1), part.size(2), head_dim};
    const std::array<int64_t, 4> strides{part.stride(0), part.stride(1), part.stride(2), 1};
    return TensorView(part.raw(), part.dtype(), sizes, strides, part.device());
  };
  const TensorView rows = qkv.reshape({qkv.size(0), kv_heads, per_group + 2, head_dim});
  return {all.slice(3, 0, per_group), one_head(per_group), one_head(per_group + 1),
          rows.slice(2, 0, per_group + 1)};
}

}  // namespace moiety::nn
