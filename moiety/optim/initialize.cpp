#include "moiety/optim/initialize.h"

#include <algorithm>
#include <cstring>

#include "moiety/base/check_devices.h"
#include "moiety/base/parallel.h"
#include "moiety/base/rng.h"
#include "moiety/formats/bf16.h"

namespace moiety::optim {
namespace {

constexpr int64_t kGrain = 16 << 10;

void fill_normal(uint64_t seed, float std, const ElementRun& run, float* out) {
  parallel_for(run.end - run.begin, kGrain, [&](int64_t first, int64_t last) {
    for (int64_t at = first, n; at < last; at += n) {
      const int64_t index = run.logical + at;
      n = run.columns.stretch(index, last - at);
      init_normals(seed, run.tensor_id, static_cast<uint64_t>(run.columns.in_tensor(index)), n, std,
                   out + at);
    }
  });
}

}  // namespace

void initialize(std::span<const ParamSpec> specs, std::span<const ElementRun> runs, uint64_t seed,
                TensorView master, Stream stream) {
  check_tensor("initialize", "master", master, DType::kFloat32, {-1});
  stream.run([=] {
    for (const ElementRun& run : runs) {
      const ParamSpec& spec = specs[run.parameter];
      float* out = master.data<float>() + run.begin;
      if (spec.init == InitKind::kNormal) {
        fill_normal(seed, spec.init_std, run, out);
      } else {
        std::fill(out, out + (run.end - run.begin), spec.init == InitKind::kOnes ? 1.0f : 0.0f);
      }
    }
  });
}

void round_weights(TensorView master, TensorView weight, Stream stream) {
  const int64_t n = master.numel();
  check_tensor("round_weights", "master", master, DType::kFloat32, {n});
  check_tensor("round_weights", "weight", weight,
               weight.dtype() == DType::kBFloat16 ? DType::kBFloat16 : DType::kFloat32, {n});
  if (check_devices("round_weights", {{"master", master}, {"weight", weight}}, stream)) {
    return round_weights_cuda(master, weight, stream);
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
