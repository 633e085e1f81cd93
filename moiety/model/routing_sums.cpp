#include "moiety/model/routing_sums.h"

#include <algorithm>
#include <array>

#include "moiety/base/check_devices.h"
#include "moiety/base/cuda_built.h"
#include "moiety/moe/moe_layer.h"
#include "moiety/nn/loss.h"

namespace moiety::model {
namespace {

template <class T>
void sum_layers_ref(const TensorView& x_LSE, const TensorView& out_SE) {
  const int64_t n = out_SE.numel();
  const T* x = x_LSE.data<T>();
  T* out = out_SE.data<T>();
  std::fill_n(out, n, T(0));
  for (int64_t l = 0; l < x_LSE.size(0); ++l) {
    for (int64_t i = 0; i < n; ++i) out[i] += x[l * n + i];
  }
}

void add_layer(const TensorView& count_SE, const TensorView& info_W, int64_t* pairs,
               int64_t* layer) {
  const int64_t columns = count_SE.size(1);
  for (int64_t s = 0; s < count_SE.size(0); ++s) {
    const int64_t* count = count_SE.data<int64_t>() + s * columns;
    for (int64_t e = 0; e < columns - 1; ++e) pairs[e] += count[e];
  }
  const moe::MoeStats now = moe::moe_stats(info_W);
  layer[kLayerRequired] = std::max(layer[kLayerRequired], now.required);
  layer[kLayerCapacity] = now.capacity;
  layer[kLayerDropped] += now.dropped;
  layer[kLayerOverflow] |= int64_t{now.overflow};
}

}  // namespace

void count_targets(const TargetCount& a, Stream stream) {
  const char* operation = "count_targets";
  const int64_t tokens = a.target_T.numel();
  if (a.target_T.defined()) {
    check_tensor(operation, "target", a.target_T, DType::kInt32, {tokens});
    MOIETY_CHECK(a.target_T.contiguous(), "{}: target is {}", operation, a.target_T.describe());
  }
  if (a.mask_T.defined()) {
    check_tensor(operation, "mask", a.mask_T, DType::kUInt8, {tokens});
    MOIETY_CHECK(a.mask_T.contiguous(), "{}: mask is {}", operation, a.mask_T.describe());
  }
  if (a.routed_T.defined()) {
    check_tensor(operation, "routed", a.routed_T, DType::kUInt8, {tokens});
    MOIETY_CHECK(a.routed_T.contiguous(), "{}: routed is {}", operation, a.routed_T.describe());
  }
  check_tensor(operation, "own", a.own_2, DType::kInt64, {2});
  check_tensor(operation, "scope", a.scope_2, DType::kInt64, {2});
  if (check_devices(operation,
                    {{"target", a.target_T},
                     {"mask", a.mask_T},
                     {"routed", a.routed_T},
                     {"own", a.own_2},
                     {"scope", a.scope_2}},
                    stream)) {
    if constexpr (kCudaBuilt) return count_targets_cuda(a, stream);
    fail_without_cuda(operation);
  }
  stream.run([=] {
    const int32_t* target = a.target_T.data<int32_t>();
    const uint8_t* mask = a.mask_T.data<uint8_t>();
    const uint8_t* routed = a.routed_T.data<uint8_t>();
    int64_t* own = a.own_2.data<int64_t>();
    own[0] = 0;
    own[1] =
        routed ? std::count_if(routed, routed + tokens, [](uint8_t r) { return r != 0; }) : tokens;
    for (int64_t t = 0; t < tokens; ++t) {
      own[0] += target[t] != nn::kIgnoredTarget && (!mask || mask[t] != 0);
    }
    for (int i = 0; i < 2; ++i) a.scope_2.data<int64_t>()[i] = a.in_scope ? own[i] : 0;
  });
}

void add_counts(const RoutingCounts& a, const StepSums& sums, Stream stream) {
  const char* operation = "add_counts";
  const TensorView pairs_LE = sums.pairs_LE(), layer_L4 = sums.layer_L4(), count_2 = sums.count_2();
  const int64_t layers = pairs_LE.size(0);
  if (a.own_2.defined()) check_tensor(operation, "own", a.own_2, DType::kInt64, {2});
  check_tensor(operation, "count", a.count_LSE, DType::kInt64, {layers, -1, pairs_LE.size(1) + 1});
  check_tensor(operation, "info", a.info_LW, DType::kInt64, {layers, -1});
  if (check_devices(
          operation,
          {{"own", a.own_2}, {"count", a.count_LSE}, {"info", a.info_LW}, {"sums", count_2}},
          stream)) {
    if constexpr (kCudaBuilt) return add_counts_cuda(a, sums, stream);
    fail_without_cuda(operation);
  }
  stream.run([=] {
    for (int i = 0; i < 2 && a.own_2.defined(); ++i) {
      count_2.data<int64_t>()[i] += a.own_2.data<int64_t>()[i];
    }
    for (int64_t l = 0; l < layers; ++l) {
      add_layer(a.count_LSE.select(l), a.info_LW.select(l), pairs_LE.select(l).data<int64_t>(),
                layer_L4.select(l).data<int64_t>());
    }
  });
}

void sum_layers(TensorView x_LSE, TensorView out_SE, Stream stream) {
  const char* operation = "sum_layers";
  const DType dtype = out_SE.dtype();
  MOIETY_CHECK(dtype == DType::kInt64 || dtype == DType::kFloat64,
               "{}: out is {}, expected int64 or float64", operation, out_SE.describe());
  check_tensor(operation, "x", x_LSE, dtype, {-1, out_SE.size(0), out_SE.size(1)});
  if (check_devices(operation, {{"x", x_LSE}, {"out", out_SE}}, stream)) {
    if constexpr (kCudaBuilt) return sum_layers_cuda(x_LSE, out_SE, stream);
    fail_without_cuda(operation);
  }
  stream.run([=] {
    dtype == DType::kInt64 ? sum_layers_ref<int64_t>(x_LSE, out_SE)
                           : sum_layers_ref<double>(x_LSE, out_SE);
  });
}

void add_routing_losses(TensorView weight_2, TensorView loss_2, const StepSums& sums,
                        Stream stream) {
  const char* operation = "add_routing_losses";
  const TensorView loss_3 = sums.loss_3();
  check_tensor(operation, "weight", weight_2, DType::kInt64, {2});
  check_tensor(operation, "loss", loss_2, DType::kFloat64, {2});
  if (check_devices(operation, {{"weight", weight_2}, {"loss", loss_2}, {"sums", loss_3}},
                    stream)) {
    if constexpr (kCudaBuilt) return add_routing_losses_cuda(weight_2, loss_2, sums, stream);
    fail_without_cuda(operation);
  }
  stream.run([=] {
    const auto n = static_cast<double>(weight_2.data<int64_t>()[0]);
    for (int i = 0; i < 2; ++i) loss_3.data<double>()[1 + i] += n * loss_2.data<double>()[i];
  });
}

void add_losses(TensorView loss_T, const StepSums& sums, Stream stream) {
  const char* operation = "add_losses";
  const TensorView loss_3 = sums.loss_3();
  check_tensor(operation, "loss", loss_T, DType::kFloat32, {-1});
  MOIETY_CHECK(loss_T.contiguous(), "{}: loss is {}", operation, loss_T.describe());
  if (check_devices(operation, {{"loss", loss_T}, {"sums", loss_3}}, stream)) {
    if constexpr (kCudaBuilt) return add_losses_cuda(loss_T, sums, stream);
    fail_without_cuda(operation);
  }
  stream.run([=] {
    std::array<double, kLossLanes> lane{};
    const float* loss = loss_T.data<float>();
    for (int64_t t = 0; t < loss_T.numel(); ++t) lane[t % kLossLanes] += loss[t];
    for (int half = kLossLanes / 2; half >= 1; half /= 2) {
      for (int l = 0; l < half; ++l) lane[l] += lane[l + half];
    }
    loss_3.data<double>()[0] += lane[0];
  });
}

}  // namespace moiety::model
