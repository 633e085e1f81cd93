#include <algorithm>
#include <array>
#include <cmath>
#include <type_traits>

#include "moiety/base/parallel.h"
#include "moiety/optim/adamw_table.h"
#include "moiety/optim/stochastic_bf16.h"
#include "moiety/quant/random_bytes.h"

namespace moiety::optim::detail {
namespace {

constexpr int64_t kTile = 1024;       // elements whose random words stay in the nearest cache
constexpr int64_t kGrain = 64 << 10;  // elements of a task

// The random words of elements [logical, logical + n); element k has word (logical & 3) + k.
struct TileWords {
  alignas(64) std::array<uint32_t, kTile + 8> words;
};

MOIETY_INLINE void fill_words(TileWords& tile, const PhiloxKey& key, uint32_t t, uint32_t tensor_id,
                              uint64_t logical, int64_t n, Moment which) {
  const uint64_t first = logical >> 2;
  const PhiloxBlock counter = moment_counter(first, tensor_id, t, which);
  const quant::RandomStream stream{key, counter[2], counter[3], 0};
  const auto blocks = static_cast<int64_t>(((logical + n + 3) >> 2) - first);
  // The bytes of a block are its words, in order.
  quant::random_bytes(stream, {first, 0, 1, blocks}, reinterpret_cast<uint8_t*>(&tile.words), 0);
}

// The n <= kTile elements of a gradient from element `at` on; bf16 is widened into `tile`.
MOIETY_INLINE const float* grad_tile(const TensorView& grad, int64_t at, int64_t n, float* tile) {
  if (grad.dtype() == DType::kFloat32) return static_cast<const float*>(grad.raw()) + at;
  const bf16* from = static_cast<const bf16*>(grad.raw()) + at;
  for (int64_t i = 0; i < n; ++i) tile[i] = from[i];
  return tile;
}

// Updates elements [begin, end) of one run; all pointers begin at the segment.
template <class M, class W>
MOIETY_INLINE void update_range(const AdamWConstants& c, const AdamWStep& x, const AdamWArgs& a,
                                const ElementRun& run, int64_t begin, int64_t end) {
  constexpr bool kStochastic = std::is_same_v<M, bf16>;
  float* __restrict master = static_cast<float*>(a.master.raw());
  M* __restrict exp_avg = static_cast<M*>(a.exp_avg.raw());
  M* __restrict exp_avg_sq = static_cast<M*>(a.exp_avg_sq.raw());
  W* __restrict weight = static_cast<W*>(a.weight.raw());
  const AdamWConstants k = c;
  const AdamWStep step = x;
  const float wd = run.decay ? step.wd : 0.0f;
  TileWords avg_words, sq_words;
  alignas(64) std::array<float, kTile> wide;
  for (int64_t at = begin, stop; at < end; at = stop) {
    const int64_t index = run.logical + (at - run.begin);
    stop = std::min(end, at + kTile);
    // Random words belong to consecutive elements of the tensor.
    if constexpr (kStochastic) stop = at + run.columns.stretch(index, stop - at);
    const uint64_t logical = run.columns.in_tensor(index);
    if constexpr (kStochastic) {
      fill_words(avg_words, k.key, step.t, run.tensor_id, logical, stop - at, Moment::kExpAvg);
      fill_words(sq_words, k.key, step.t, run.tensor_id, logical, stop - at, Moment::kExpAvgSq);
    }
    const uint32_t* avg_word = avg_words.words.data() + (logical & 3);
    const uint32_t* sq_word = sq_words.words.data() + (logical & 3);
    const float* __restrict grad = grad_tile(a.grad, at, stop - at, wide.data());
    for (int64_t i = at; i < stop; ++i) {
      const auto [m, v, p] = update_element(
          k, step, wd, grad[i - at],
          {static_cast<float>(exp_avg[i]), static_cast<float>(exp_avg_sq[i]), master[i]});
      if constexpr (kStochastic) {
        exp_avg[i] = round_stochastic(m, avg_word[i - at]);
        exp_avg_sq[i] = round_stochastic(v, sq_word[i - at]);
      } else {
        exp_avg[i] = m;
        exp_avg_sq[i] = v;
      }
      master[i] = p;
      if constexpr (!std::is_same_v<W, NoWeight>) weight[i] = static_cast<W>(p);
    }
  }
}

using UpdateRange = void (*)(const AdamWConstants&, const AdamWStep&, const AdamWArgs&,
                             const ElementRun&, int64_t, int64_t);

MOIETY_SIMD_CLONES
void float_moments_float(const AdamWConstants& c, const AdamWStep& x, const AdamWArgs& a,
                         const ElementRun& run, int64_t begin, int64_t end) {
  update_range<float, float>(c, x, a, run, begin, end);
}
MOIETY_SIMD_CLONES
void float_moments_bf16(const AdamWConstants& c, const AdamWStep& x, const AdamWArgs& a,
                        const ElementRun& run, int64_t begin, int64_t end) {
  update_range<float, bf16>(c, x, a, run, begin, end);
}
MOIETY_SIMD_CLONES
void bf16_moments_float(const AdamWConstants& c, const AdamWStep& x, const AdamWArgs& a,
                        const ElementRun& run, int64_t begin, int64_t end) {
  update_range<bf16, float>(c, x, a, run, begin, end);
}
MOIETY_SIMD_CLONES
void bf16_moments_bf16(const AdamWConstants& c, const AdamWStep& x, const AdamWArgs& a,
                       const ElementRun& run, int64_t begin, int64_t end) {
  update_range<bf16, bf16>(c, x, a, run, begin, end);
}
MOIETY_SIMD_CLONES
void float_moments_alone(const AdamWConstants& c, const AdamWStep& x, const AdamWArgs& a,
                         const ElementRun& run, int64_t begin, int64_t end) {
  update_range<float, NoWeight>(c, x, a, run, begin, end);
}
MOIETY_SIMD_CLONES
void bf16_moments_alone(const AdamWConstants& c, const AdamWStep& x, const AdamWArgs& a,
                        const ElementRun& run, int64_t begin, int64_t end) {
  update_range<bf16, NoWeight>(c, x, a, run, begin, end);
}

UpdateRange choose(DType moments, const TensorView& weight) {
  const bool wide = weight.dtype() == DType::kFloat32;
  if (moments == DType::kFloat32) {
    return !weight.defined() ? float_moments_alone
           : wide            ? float_moments_float
                             : float_moments_bf16;
  }
  return !weight.defined() ? bf16_moments_alone : wide ? bf16_moments_float : bf16_moments_bf16;
}

}  // namespace

void adamw_cpu(const AdamWConstants& c, const AdamWStep& x, const AdamWArgs& a) {
  const UpdateRange update = choose(a.exp_avg.dtype(), a.weight);
  for (const ElementRun& run : a.runs) {
    parallel_for(run.end - run.begin, kGrain, [&](int64_t begin, int64_t end) {
      update(c, x, a, run, run.begin + begin, run.begin + end);
    });
  }
}

}  // namespace moiety::optim::detail
