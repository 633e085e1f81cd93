#include "moiety/optim/initialize.h"

#include <algorithm>
#include <cstring>

#include "moiety/base/parallel.h"
#include "moiety/base/rng.h"
#include "moiety/formats/bf16.h"

namespace moiety::optim {
namespace {

constexpr int64_t kGrain = 16 << 10;

// Elements [begin, end) of the logical tensor.
void fill_normal(uint64_t seed, uint32_t tensor_id, float std, int64_t begin, int64_t end,
                 float* out) {
  parallel_for(end - begin, kGrain, [&](int64_t first, int64_t last) {
    init_normals(seed, tensor_id, static_cast<uint64_t>(begin + first), last - first, std,
                 out + first);
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
      const int64_t n = run.end - run.begin;
      if (spec.init == InitKind::kNormal) {
        fill_normal(seed, run.tensor_id, spec.init_std, run.logical, run.logical + n, out);
      } else {
        std::fill(out, out + n, spec.init == InitKind::kOnes ? 1.0f : 0.0f);
      }
    }
  });
}

void round_weights(TensorView master, TensorView weight, Stream stream) {
  const int64_t n = master.numel();
  check_tensor("round_weights", "master", master, DType::kFloat32, {n});
  check_tensor("round_weights", "weight", weight,
               weight.dtype() == DType::kBFloat16 ? DType::kBFloat16 : DType::kFloat32, {n});
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
