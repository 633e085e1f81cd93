#include "moiety/optim/initialize.h"

#include <algorithm>

#include "moiety/base/buffer.h"
#include "moiety/base/check_devices.h"
#include "moiety/base/copy.h"
#include "moiety/base/cuda_built.h"
#include "moiety/base/parallel.h"
#include "moiety/base/rng.h"
#include "moiety/formats/bf16.h"

namespace moiety::optim {
namespace {

constexpr int64_t kGrain = 16 << 10;
constexpr int64_t kStaging = 16 << 20;  // elements that are drawn for a GPU at a time

// Draws elements [begin, end) of the segment, all in the run.
void fill_normal(uint64_t seed, float std, const ElementRun& run, int64_t begin, int64_t end,
                 float* out) {
  parallel_for(end - begin, kGrain, [&](int64_t first, int64_t last) {
    for (int64_t at = first, n; at < last; at += n) {
      const int64_t index = run.logical + begin - run.begin + at;
      n = run.columns.stretch(index, last - at);
      init_normals(seed, run.tensor_id, static_cast<uint64_t>(run.columns.in_tensor(index)), n, std,
                   out + at);
    }
  });
}

// Draws elements [begin, end) of the segment, with zeros between the runs.
void draw(std::span<const ParamSpec> specs, std::span<const ElementRun> runs, uint64_t seed,
          int64_t begin, int64_t end, float* out) {
  int64_t at = begin;
  for (const ElementRun& run : runs) {
    const int64_t from = std::max(run.begin, begin), to = std::min(run.end, end);
    if (from >= to) continue;
    std::fill(out + (at - begin), out + (from - begin), 0.0f);
    const ParamSpec& spec = specs[run.parameter];
    if (spec.init == InitKind::kNormal) {
      fill_normal(seed, spec.init_std, run, from, to, out + (from - begin));
    } else {
      std::fill(out + (from - begin), out + (to - begin),
                spec.init == InitKind::kOnes ? 1.0f : 0.0f);
    }
    at = to;
  }
  std::fill(out + (at - begin), out + (end - begin), 0.0f);
}

}  // namespace

void initialize(std::span<const ParamSpec> specs, std::span<const ElementRun> runs, uint64_t seed,
                TensorView master, Stream stream) {
  check_tensor("initialize", "master", master, DType::kFloat32, {-1});
  const int64_t n = master.numel();
  if (!check_devices("initialize", {{"master", master}}, stream)) {
    return stream.run([=] { draw(specs, runs, seed, 0, n, master.data<float>()); });
  }
  const Tensor staging(DType::kFloat32, {std::min(n, kStaging)}, "initial weights");
  for (int64_t begin = 0; begin < n; begin += kStaging) {
    const int64_t end = std::min(n, begin + kStaging);
    draw(specs, runs, seed, begin, end, staging.data<float>());
    // Staging is not pinned, so the copy has read it when it returns.
    copy(master.slice(0, begin, end), staging.view().slice(0, 0, end - begin), stream);
  }
}

void round_weights(TensorView master, TensorView weight, Stream stream) {
  const int64_t n = master.numel();
  check_tensor("round_weights", "master", master, DType::kFloat32, {n});
  check_tensor("round_weights", "weight", weight,
               weight.dtype() == DType::kBFloat16 ? DType::kBFloat16 : DType::kFloat32, {n});
  if (check_devices("round_weights", {{"master", master}, {"weight", weight}}, stream)) {
    if constexpr (kCudaBuilt) return round_weights_cuda(master, weight, stream);
    fail_without_cuda("round_weights");
  }
  stream.run([=] {
    const float* from = master.data<float>();
    parallel_for(n, kGrain, [&](int64_t begin, int64_t end) {
      if (weight.dtype() == DType::kFloat32) {
        std::copy(from + begin, from + end, weight.data<float>() + begin);
      } else {
        bf16* to = weight.data<bf16>();
        for (int64_t i = begin; i < end; ++i) to[i] = bf16(from[i]);
      }
    });
  });
}

}  // namespace moiety::optim
