#include "moiety/nn/elementwise.h"

#include "moiety/base/cuda_built.h"
#include "moiety/base/math.h"
#include "moiety/base/parallel.h"
#include "moiety/nn/element.h"

namespace moiety::nn {
namespace {

void check_elements(const char* operation, const char* argument, const TensorView& x, DType dtype,
                    int64_t elements) {
  MOIETY_CHECK(x.defined() && x.dtype() == dtype && x.numel() == elements && x.contiguous(),
               "{}: {} is {}, expected {} {} without gaps", operation, argument, x.describe(),
               elements, name(dtype));
}

}  // namespace

void document_starts(TensorView position_BS, TensorView start_BS, Stream stream) {
  const char* operation = "document_starts";
  check_tensor(operation, "position", position_BS, DType::kInt32, {-1, -1});
  for (const auto& [argument, x] : {NamedView{"position", position_BS}, {"start", start_BS}}) {
    check_elements(operation, argument, x, DType::kInt32, position_BS.numel());
  }
  if (check_devices(operation, {{"position", position_BS}, {"start", start_BS}}, stream)) {
    if constexpr (kCudaBuilt) return document_starts_cuda(position_BS, start_BS, stream);
    fail_without_cuda(operation);
  }
  stream.run([=] {
    const int64_t seq_len = position_BS.size(1);
    for (int64_t i = 0; i < position_BS.numel(); ++i) {
      const auto s = static_cast<int32_t>(i % seq_len);
      start_BS.data<int32_t>()[i] = s - position_BS.data<int32_t>()[i];
    }
  });
}

void round_to_bf16(TensorView x, TensorView out, bool accumulate, Stream stream) {
  const char* operation = "round_to_bf16";
  check_elements(operation, "x", x, DType::kFloat32, x.numel());
  check_elements(operation, "out", out, DType::kBFloat16, x.numel());
  if (check_devices(operation, {{"x", x}, {"out", out}}, stream)) {
    if constexpr (kCudaBuilt) return round_to_bf16_cuda(x, out, accumulate, stream);
    fail_without_cuda(operation);
  }
  stream.run([=] {
    const float* in = x.data<float>();
    bf16* to = out.data<bf16>();
    parallel_for(x.numel(), 1 << 14, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        to[i] = bf16(accumulate ? float(to[i]) + in[i] : in[i]);
      }
    });
  });
}

void apply_sigmoid(TensorView x_T, Stream stream) {
  check_elements("sigmoid", "x", x_T, DType::kFloat32, x_T.numel());
  if (check_devices("sigmoid", {{"x", x_T}}, stream)) {
    if constexpr (kCudaBuilt) return apply_sigmoid_cuda(x_T, stream);
    fail_without_cuda("sigmoid");
  }
  stream.run([=] {
    float* x = x_T.data<float>();
    for (int64_t t = 0; t < x_T.numel(); ++t) x[t] = sigmoid(x[t]);
  });
}

void sigmoid_gradient(TensorView s_T, TensorView dy_T, TensorView dx_T, Stream stream) {
  const char* operation = "sigmoid_gradient";
  check_elements(operation, "s", s_T, DType::kFloat32, dx_T.numel());
  check_elements(operation, "dy", dy_T, DType::kFloat32, dx_T.numel());
  check_elements(operation, "dx", dx_T, dx_T.dtype(), dx_T.numel());
  check_element(operation, dx_T.dtype());
  if (on_gpu(operation, dx_T.dtype(), {{"s", s_T}, {"dy", dy_T}, {"dx", dx_T}}, stream)) {
    if constexpr (kCudaBuilt) return sigmoid_gradient_cuda(s_T, dy_T, dx_T, stream);
    fail_without_cuda(operation);
  }
  stream.run([=] {
    const float* s = s_T.data<float>();
    const float* dy = dy_T.data<float>();
    with_element(dx_T.dtype(), [&](auto element) {
      using T = decltype(element);
      T* dx = dx_T.data<T>();
      for (int64_t t = 0; t < s_T.numel(); ++t) dx[t] = static_cast<T>(dy[t] * s[t] * (1 - s[t]));
    });
  });
}

void set_random_state(const RandomState& a, Stream stream) {
  const char* operation = "set_random_state";
  check_tensor(operation, "state", a.state_2, DType::kUInt64, {2});
  if (a.draw_at.defined()) check_tensor(operation, "draw", a.draw_at, DType::kUInt64, {1});
  if (check_devices(operation, {{"state", a.state_2}, {"draw", a.draw_at}}, stream)) {
    if constexpr (kCudaBuilt) return set_random_state_cuda(a, stream);
    fail_without_cuda(operation);
  }
  stream.run([a] {
    a.state_2.data<uint64_t>()[0] = a.seed;
    a.state_2.data<uint64_t>()[1] = a.draw_at.defined() ? *a.draw_at.data<uint64_t>() : a.draw;
  });
}

}  // namespace moiety::nn
