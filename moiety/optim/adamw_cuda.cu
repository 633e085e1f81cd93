// AdamW on GPUs: a warp takes a tile of a run; a thread has four neighbouring elements, 16 bytes of
// fp32.
#include <vector>

#include "moiety/base/launch.cuh"
#include "moiety/formats/octet.cuh"
#include "moiety/optim/adamw_table.h"
#include "moiety/optim/stochastic_bf16.h"
#include "moiety/quant/device_table.h"

namespace moiety::optim::detail {
namespace {

constexpr int kThreads = 256, kWarp = 32, kQuad = 4;
constexpr int64_t kTile = 1024;  // elements

struct TileRun {
  ElementRun run;
  // Pointers to the beginning of its segment.
  const void* grad;
  float* master;
  void* exp_avg;
  void* exp_avg_sq;
  void* weight;  // may be null
  bool narrow_grad, narrow_weight;
  // Whether quads, counted from the segment's first element, can be moved as such: they lie at
  // multiples of their size, and have the words of one Philox block, in order.
  bool quads;
};

struct Tile {
  int64_t begin;
  int32_t elements;
  int32_t run;
};

__device__ void load_quad(const float* p, float (&v)[kQuad]) {
  const float4 x = *reinterpret_cast<const float4*>(p);
  v[0] = x.x, v[1] = x.y, v[2] = x.z, v[3] = x.w;
}
__device__ void load_quad(const bf16* p, float (&v)[kQuad]) {
  const uint2 x = *reinterpret_cast<const uint2*>(p);
  v[0] = low_bf16(x.x), v[1] = high_bf16(x.x);
  v[2] = low_bf16(x.y), v[3] = high_bf16(x.y);
}
__device__ void store_quad(float* p, const float (&v)[kQuad]) {
  *reinterpret_cast<float4*>(p) = make_float4(v[0], v[1], v[2], v[3]);
}
__device__ void store_quad(bf16* p, const float (&v)[kQuad]) {
  *reinterpret_cast<uint2*>(p) = make_uint2(bf16_word(v[0], v[1]), bf16_word(v[2], v[3]));
}

// The values that all elements of a tile share.
template <class M>
struct TileUpdate {
  static constexpr bool kStochastic = sizeof(M) == sizeof(bf16);
  const AdamWConstants& c;
  const AdamWStep& step;
  const TileRun& r;
  float wd;

  __device__ PhiloxBlock words(uint64_t logical, Moment which) const {
    return philox(c.key, moment_counter(logical >> 2, r.run.tensor_id, step.t, which));
  }
  __device__ uint64_t logical(int64_t i) const {
    return r.run.columns.in_tensor(r.run.logical + (i - r.run.begin));
  }

  __device__ void store_moments(M* to, int64_t i, const float (&v)[kQuad], Moment which) const {
    if constexpr (kStochastic) {
      const PhiloxBlock w = words(logical(i), which);
      uint32_t bits[kQuad];
#pragma unroll
      for (int k = 0; k < kQuad; ++k) bits[k] = round_stochastic(v[k], w[k]).bits;
      *reinterpret_cast<uint2*>(to + i) =
          make_uint2(bits[0] | bits[1] << 16, bits[2] | bits[3] << 16);
    } else {
      store_quad(to + i, v);
    }
  }

  // Updates elements [i, i + 4).
  __device__ void quad(int64_t i) const {
    float grad[kQuad], m[kQuad], v[kQuad], p[kQuad];
    M* exp_avg = static_cast<M*>(r.exp_avg);
    M* exp_avg_sq = static_cast<M*>(r.exp_avg_sq);
    load_quad(exp_avg + i, m);
    load_quad(exp_avg_sq + i, v);
    load_quad(r.master + i, p);
    r.narrow_grad ? load_quad(static_cast<const bf16*>(r.grad) + i, grad)
                  : load_quad(static_cast<const float*>(r.grad) + i, grad);
#pragma unroll
    for (int k = 0; k < kQuad; ++k) {
      const AdamWElement e = update_element(c, step, wd, grad[k], {m[k], v[k], p[k]});
      m[k] = e.m, v[k] = e.v, p[k] = e.p;
    }
    store_quad(r.master + i, p);
    store_moments(exp_avg, i, m, Moment::kExpAvg);
    store_moments(exp_avg_sq, i, v, Moment::kExpAvgSq);
    if (!r.weight) return;
    r.narrow_weight ? store_quad(static_cast<bf16*>(r.weight) + i, p)
                    : store_quad(static_cast<float*>(r.weight) + i, p);
  }

  __device__ M round_moment(int64_t i, float x, Moment which) const {
    if constexpr (kStochastic) {
      const uint64_t at = logical(i);
      const PhiloxBlock w = words(at, which);
      const uint32_t low = at & 1 ? w[1] : w[0], high = at & 1 ? w[3] : w[2];
      return round_stochastic(x, at & 2 ? high : low);
    } else {
      return x;
    }
  }
  __device__ void one(int64_t i) const {
    M* exp_avg = static_cast<M*>(r.exp_avg);
    M* exp_avg_sq = static_cast<M*>(r.exp_avg_sq);
    const float grad = r.narrow_grad ? float(static_cast<const bf16*>(r.grad)[i])
                                     : static_cast<const float*>(r.grad)[i];
    const AdamWElement e =
        update_element(c, step, wd, grad, {float(exp_avg[i]), float(exp_avg_sq[i]), r.master[i]});
    r.master[i] = e.p;
    exp_avg[i] = round_moment(i, e.m, Moment::kExpAvg);
    exp_avg_sq[i] = round_moment(i, e.v, Moment::kExpAvgSq);
    if (!r.weight) return;
    if (r.narrow_weight) {
      static_cast<bf16*>(r.weight)[i] = bf16(e.p);
    } else {
      static_cast<float*>(r.weight)[i] = e.p;
    }
  }
};

template <class M>
__global__ void __launch_bounds__(kThreads)
    update_tiles(const AdamWConstants c, const AdamWStep* __restrict__ at,
                 const TileRun* __restrict__ runs, const Tile* __restrict__ tiles, int64_t count) {
  const int64_t warp = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / kWarp;
  if (warp >= count) return;
  const Tile tile = tiles[warp];
  const AdamWStep step = *at;
  if (step.skip) return;
  const TileRun r = runs[tile.run];
  const TileUpdate<M> update{c, step, r, r.run.decay ? step.wd : 0.0f};
  const int64_t end = tile.begin + tile.elements;
  for (int64_t i = tile.begin / kQuad * kQuad + kQuad * (threadIdx.x % kWarp); i < end;
       i += kQuad * kWarp) {
    if (r.quads && i >= tile.begin && i + kQuad <= end) {
      update.quad(i);
      continue;
    }
    for (int64_t k = i; k < i + kQuad; ++k) {
      if (k >= tile.begin && k < end) update.one(k);
    }
  }
}

bool aligned(const TensorView& x) {
  return reinterpret_cast<uintptr_t>(x.raw()) % byte_size(x.dtype(), kQuad) == 0;
}

bool words_fit(const ElementRun& run) {
  const ColumnRange& columns = run.columns;
  const bool whole = columns.whole();
  return (run.logical - run.begin) % kQuad == 0 &&
         (whole ||
          (columns.first % kQuad == 0 && columns.count % kQuad == 0 && columns.all % kQuad == 0));
}

TileRun make_run(const AdamWArgs& a, const ElementRun& run) {
  const bool narrow_moments = a.exp_avg.dtype() == DType::kBFloat16;
  bool quads = !narrow_moments || words_fit(run);
  for (const TensorView* x : {&a.grad, &a.master, &a.exp_avg, &a.exp_avg_sq, &a.weight}) {
    quads = quads && aligned(*x);
  }
  return {.run = run,
          .grad = a.grad.raw(),
          .master = a.master.data<float>(),
          .exp_avg = a.exp_avg.raw(),
          .exp_avg_sq = a.exp_avg_sq.raw(),
          .weight = a.weight.raw(),
          .narrow_grad = a.grad.dtype() == DType::kBFloat16,
          .narrow_weight = a.weight.dtype() == DType::kBFloat16,
          .quads = quads};
}

}  // namespace

struct AdamWDeviceTable {
  bool narrow_moments;
  int64_t tile_count;
  Buffer runs, tiles;
};

std::shared_ptr<const AdamWDeviceTable> make_device_table(std::span<const AdamWArgs> segments,
                                                          Device device) {
  std::vector<TileRun> runs;
  std::vector<Tile> tiles;
  for (const AdamWArgs& a : segments) {
    for (const ElementRun& run : a.runs) {
      const auto index = static_cast<int32_t>(runs.size());
      runs.push_back(make_run(a, run));
      // Every tile except the first begins at a multiple of its size.
      for (int64_t at = run.begin, stop; at < run.end; at = stop) {
        stop = std::min(run.end, (at / kTile + 1) * kTile);
        tiles.push_back({at, static_cast<int32_t>(stop - at), index});
      }
    }
  }
  const Stream stream = Stream::on(device);
  auto table = std::make_shared<const AdamWDeviceTable>(AdamWDeviceTable{
      segments[0].exp_avg.dtype() == DType::kBFloat16, static_cast<int64_t>(tiles.size()),
      quant::upload(runs, "runs of the optimizer", stream),
      quant::upload(tiles, "tiles of the optimizer", stream)});
  stream.synchronize();
  return table;
}

void adamw_cuda(const AdamWConstants& constants, TensorView step, const AdamWDeviceTable& table,
                const Stream& stream) {
  launch("adamw", table.narrow_moments ? update_tiles<bf16> : update_tiles<float>,
         {blocks_for(table.tile_count, kThreads / kWarp), kThreads}, stream, constants,
         static_cast<const AdamWStep*>(step.raw()),
         reinterpret_cast<const TileRun*>(table.runs.data()),
         reinterpret_cast<const Tile*>(table.tiles.data()), table.tile_count);
}

}  // namespace moiety::optim::detail
