#include "moiety/base/launch.cuh"
#include "moiety/quant/convert/dequantize_device.cuh"
#include "moiety/quant/device_table.h"
#include "moiety/quant/partial_cast/partial_cast_device.cuh"

namespace moiety::quant {
namespace device {
namespace {

// The four elements rounded to bf16.
__device__ Quad<bf16> through_bf16(const Quad<float>& x) {
  return {bf16_word(x[0], x[1]), bf16_word(x[2], x[3])};
}

// The factors of a strip's codes: one value per block, in the warp's shared memory.
struct Factors {
  float* memory;
  int row_bits;  // bits of a row's number in the strip that do not choose the block
  int across;    // blocks side by side
  int mine;      // the one, of those, that has the lane's columns

  static __device__ Factors of(const PartialItem& item, float* memory) {
    const int rows = int(item.block_rows);
    const int across = kStripCols / int(item.block_cols);
    return {memory, rows == 1 ? 0 : rows == 16 ? 4 : 5, across, lane() * across / 32};
  }
  // The factor of the lane's columns in row r.
  __device__ float operator()(int r) const { return memory[(r >> row_bits) * across + mine]; }

  // Fills the factors. All lanes call it; a barrier of the warp must follow.
  __device__ void fill(const PartialJob& job, const PartialTile& tile,
                       const std::byte* reduction) const {
    const PartialItem& item = job.item;
    if (item.row.size() == 0) {
      if (lane() == 0) memory[0] = detail::fp8_tensor_scale(item, job.arrays, reduction).encode;
      return;
    }
    const int64_t row = quotient(tile.row, item.block_rows),
                  col = quotient(tile.col, item.block_cols);
    detail::with_rule(item, reduction, [&](const auto& rule) {
      const auto* words =
          reinterpret_cast<const decltype(rule.word(0))*>(reduction + item.row.offset);
      const int count = (kStripRows >> row_bits) * across;
#pragma unroll 4
      for (int i = lane(); i < count; i += 32) {
        const int64_t r = row + i / across, c = col + i % across;
        const bool exists = r < item.row.rows && c < item.row.cols;
        memory[i] = exists ? rule.encode(words[r * item.row.cols + c]) : 0.0f;
      }
    });
  }
};

// The codes of a quad, with a factor for each element.
template <class C, class Values>
__device__ uint32_t encode_quad(const Values& x, const float (&factor)[kQuad]) {
  if constexpr (Encoder<C>::kBytes == 16) {
    const uint32_t low = encode_pair<C>(x[0] * factor[0], x[1] * factor[1]);
    const uint32_t high = encode_pair<C>(x[2] * factor[2], x[3] * factor[3]);
    return low | high << 16;
  } else {
    uint32_t out = 0;
#pragma unroll
    for (int i = 0; i < kQuad; ++i) out |= encode_e2m1(x[i] * factor[i]) << 4 * i;
    return out;
  }
}

// Stores the codes of a quad whose bit in `mask` is set to p. In a half-owned byte the other half
// stays. With kQuads all or none are stored, and p is aligned to the quad.
template <class C, Access kAccess>
__device__ void store_quad(uint8_t* p, uint32_t codes, uint32_t mask) {
  constexpr int kBits = Encoder<C>::kBytes / 2;  // bits of a code
  using Word = std::conditional_t<kBits == 8, uint32_t, uint16_t>;
  const auto store_all = [&] { *reinterpret_cast<Word*>(p) = Word(codes); };
  if constexpr (kAccess == Access::kQuads) {
    if (mask) store_all();
  } else {
    if (mask == 15 && reinterpret_cast<uintptr_t>(p) % sizeof(Word) == 0) return store_all();
#pragma unroll
    for (int i = 0; i < int(sizeof(Word)); ++i) {
      const uint32_t byte = codes >> 8 * i & 0xFFu;
      const uint32_t owned = kBits == 8 ? (mask >> i & 1) * 3 : mask >> 2 * i & 3;
      if (owned == 3) {
        p[i] = uint8_t(byte);
      } else if (owned != 0) {
        const uint32_t own = owned == 1 ? 0x0Fu : 0xF0u;
        p[i] = uint8_t((p[i] & ~own) | (byte & own));
      }
    }
  }
}

// The places of a thread's codes.
struct Out {
  uint8_t *row, *col;  // of the quad in the strip's first row; col is null unless kMxfp8 has it
  int64_t pitch;
  // For FP4: the mask of pad codes in the quad, the mask of its other codes, and the distance from
  // the quad's first element to the last one of the row.
  uint32_t pads = 0, keep = ~0u;
  int64_t to_last = 0;

  // The pads if this rank writes them: they belong to the owner of the row's last element. `first`
  // is the number of the quad's first element.
  __device__ uint32_t own_pads(int64_t first, int64_t owned) const {
    const int64_t last = first + to_last;
    return 0 <= last && last < owned ? pads : 0;
  }

  static __device__ Out of(const PartialJob& job, const PartialTile& tile) {
    const PartialItem& item = job.item;
    const int64_t c = tile.col + lane() * kQuad;
    const bool fp4 = is_fp4(item.spec.format);
    const int64_t at = tile.row * item.pitch + (fp4 ? c / 2 : c) - job.origin;
    Out out{job.arrays.row + at, job.arrays.col ? job.arrays.col + at : nullptr, item.pitch};
    out.to_last = item.cols - 1 - c;
    if (fp4 && c < 2 * item.pitch && out.to_last < kQuad - 1) {
      const int elements = max(int(out.to_last) + 1, 0);
      out.pads = 15u & ~((1u << elements) - 1);
      out.keep = (1u << 4 * elements) - 1;
    }
    return out;
  }
};

template <class C, class T, bool kThroughBf16, bool kCol, Access kAccess>
__device__ void cast_elements(const Strip<T>& strip, const Out& out, const Factors& factors,
                              const float (&col_factor)[kQuad]) {
  // Rows whose elements are loaded together.
  constexpr int kRows = kAccess == Access::kQuads ? 8 : 4;
  for (int r0 = 0; r0 < strip.rows; r0 += kRows) {
    Quad<T> loaded[kRows];
    strip.template load<kAccess>(r0, loaded);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int r = r0 + i;
      if (r >= strip.rows) break;
      uint32_t mask = strip.template mask<kAccess>(r);
      if (kAccess == Access::kElements) mask |= out.pads;
      if (kAccess == Access::kEdges) {
        mask |= out.own_pads(strip.first + r * strip.cols, strip.owned);
      }
      const float f = factors(r);
      const float factor[kQuad] = {f, f, f, f};
      const auto x = [&] {
        if constexpr (kThroughBf16) {
          return through_bf16(loaded[i]);
        } else {
          return loaded[i];
        }
      }();
      store_quad<C, kAccess>(out.row + r * out.pitch, encode_quad<C>(x, factor) & out.keep, mask);
      if constexpr (kCol) {
        store_quad<C, kAccess>(out.col + r * out.pitch, encode_quad<C>(x, col_factor), mask);
      }
    }
  }
}

// Calls body(codec, element, through_bf16) with the types of a job. A bf16 master is not rounded
// again: only NaNs would change, and all of them have one code.
template <class Body>
__device__ void with_types(const PartialJob& job, Body&& body) {
  const auto with_master = [&](auto codec) {
    if (job.arrays.bf16_master) {
      body(codec, bf16{}, std::false_type{});
    } else if (job.item.spec.through_bf16) {
      body(codec, float{}, std::true_type{});
    } else {
      body(codec, float{}, std::false_type{});
    }
  };
  if (is_fp4(job.item.spec.format)) {
    with_master(E2M1{});
  } else {
    with_codec(job.item.spec, with_master);
  }
}

// Whether quads of codes are aligned in memory and none of them has pads.
__device__ bool is_aligned(const PartialJob& job, const PartialTile& tile, const Out& out) {
  const int bytes = is_fp4(job.item.spec.format) ? 2 : 4;
  const uintptr_t at = reinterpret_cast<uintptr_t>(out.row) | reinterpret_cast<uintptr_t>(out.col);
  const bool pads = bytes == 2 && tile.cols % kUnit != 0;
  return (at | uintptr_t(out.pitch)) % bytes == 0 && !pads;
}

__device__ void cast_strip(const PartialJob& job, const PartialTile& tile,
                           const std::byte* reduction, float* memory) {
  const PartialItem& item = job.item;
  const Out out = Out::of(job, tile);
  Access access = access_of(job, tile);
  if (access == Access::kQuads && !is_aligned(job, tile, out)) access = Access::kElements;
  const Factors factors = Factors::of(item, memory);
  factors.fill(job, tile, reduction);
  float col_factor[kQuad] = {};
  if (item.want_col) {
    const int column = lane() * kQuad;
    const auto* words = reinterpret_cast<const uint8_t*>(reduction + item.col.offset) +
                        tile.row / kStripRows * item.col.cols + tile.col;
#pragma unroll
    for (int i = 0; i < kQuad; ++i) {
      if (column + i < tile.cols) col_factor[i] = UE8M0::inverse(words[column + i]);
    }
  }
  __syncwarp();
  with_types(job, [&](auto codec, auto element, auto through) {
    using C = decltype(codec);
    using T = decltype(element);
    constexpr bool kThrough = decltype(through)::value;
    const auto strip = Strip<T>::of(job, tile);
    const auto cast = [&](auto col) {
      with_access(access, [&](auto way) {
        cast_elements<C, T, kThrough, col.value, way.value>(strip, out, factors, col_factor);
      });
    };
    if constexpr (Encoder<C>::kBytes == 16) {
      if (out.col) return cast(std::true_type{});
    }
    cast(std::false_type{});
  });
}

__device__ void flag_non_finite(const PartialArrays& arrays) {
  if (arrays.flags) atomicOr(arrays.flags, kFlagNonFinite);
}

__device__ void store_scales(const PartialJob& job, const PartialScales& piece,
                             const std::byte* reduction) {
  const PartialBlocks& blocks = piece.col ? job.item.col : job.item.row;
  void* const scales = piece.col ? job.arrays.col_scales : job.arrays.row_scales;
  bool finite = true;
  detail::with_rule(job.item, reduction, [&](const auto& rule) {
    const auto* words = reinterpret_cast<const decltype(rule.word(0))*>(reduction + blocks.offset);
    auto* out = static_cast<decltype(rule.stored(0))*>(scales);
#pragma unroll 4
    for (int64_t b = piece.begin + lane(); b < piece.end; b += 32) {
      const auto word = __ldg(words + b);
      out[b] = rule.stored(word);
      finite = finite && rule.finite(word);
    }
  });
  if (!finite) flag_non_finite(job.arrays);
}

// Stores amax and scale of the tensor as a whole.
__device__ void store_tensor_scale(const PartialJob& job, const std::byte* reduction) {
  const PartialItem& item = job.item;
  const PartialArrays& arrays = job.arrays;
  if (arrays.tensor_scale) {
    arrays.tensor_scale[0] = detail::tensor_decode_scale(item, arrays, reduction);
    if (item.want_col) arrays.tensor_scale[1] = 1.0f;
  }
  if (item.tensor_word < 0) return;
  const float amax = detail::tensor_amax(item, reduction);
  arrays.amax[0] = amax;
  if (item.delayed) raise(arrays.step_amax, abs_bits(amax));
  if (!is_finite(amax)) flag_non_finite(arrays);
}

// Casts strips of codes, then pieces of scales, then the tensors, thirty-two per warp.
__global__ void __launch_bounds__(32 * kPartialWarps, 6)
    cast_strips(const __grid_constant__ PartialWork work, const std::byte* reduction) {
  __shared__ float factors[kPartialWarps][kStripRows * kStripCols / kUnit];
  int64_t i = warp_number();
  if (i < work.strip_count) {
    const PartialTile tile = work.strips[i];
    return cast_strip(work.jobs[tile.item], tile, reduction, factors[threadIdx.x / 32]);
  }
  i -= work.strip_count;
  if (i < work.piece_count) {
    const PartialScales piece = work.pieces[i];
    return store_scales(work.jobs[piece.item], piece, reduction);
  }
  i = (i - work.piece_count) * 32 + lane();
  if (i < work.job_count) store_tensor_scale(work.jobs[i], reduction);
}

}  // namespace
}  // namespace device

namespace detail {

std::shared_ptr<const PartialGpuTable> make_partial_gpu_table(const PartialCastTable::Impl& table,
                                                              Device device) {
  const PartialCastPlan::Impl& plan = *table.plan;
  std::vector<device::PartialJob> jobs;
  std::vector<PartialTile> strips;
  std::vector<PartialScales> pieces;
  for (size_t i = 0; i < plan.items.size(); ++i) {
    const PartialItem& item = plan.items[i];
    const int64_t origin = item.start < item.end ? position(item, item.start) : 0;
    jobs.push_back({item, table.arrays[i], origin});
    add_tiles(strips, item, static_cast<int32_t>(i), kStrips);
  }
  for (PartialScales piece : plan.scales) {
    const int64_t end = piece.end;
    for (; piece.begin < end; piece.begin = piece.end) {
      piece.end = std::min(piece.begin + device::kPieceScales, end);
      pieces.push_back(piece);
    }
  }
  const char* what = "table of partial casts";
  const Stream stream = Stream::on(device);
  auto out = std::make_shared<PartialGpuTable>();
  out->jobs = upload(jobs, what, stream);
  out->strips = upload(strips, what, stream);
  out->pieces = upload(pieces, what, stream);
  out->work = {reinterpret_cast<const device::PartialJob*>(out->jobs.data()),
               reinterpret_cast<const PartialTile*>(out->strips.data()),
               reinterpret_cast<const PartialScales*>(out->pieces.data()),
               std::ssize(jobs),
               std::ssize(strips),
               std::ssize(pieces)};
  stream.synchronize();
  return out;
}

void partial_cast_cuda(const PartialGpuTable& table, const TensorView& reduction,
                       const Stream& stream) {
  const device::PartialWork& work = table.work;
  const int64_t warps = work.strip_count + work.piece_count + blocks_for(work.job_count, 32);
  launch("partial_cast", device::cast_strips,
         {blocks_for(warps, device::kPartialWarps), 32 * device::kPartialWarps}, stream, work,
         static_cast<const std::byte*>(reduction.raw()));
}

}  // namespace detail
}  // namespace moiety::quant
