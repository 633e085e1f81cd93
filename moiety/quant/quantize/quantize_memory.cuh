// Units of sixteen elements or codes between memory and registers, for quantization kernels. Rows
// may begin at any address: they are read and written as the aligned vectors that hold them.
#pragma once

#include <cstdint>

#include "moiety/formats/octet.cuh"

namespace moiety::quant::device {

constexpr int kUnit = 16;  // elements of a row that one thread holds; a block of NVFP4
constexpr uint32_t kWarp = 0xFFFFFFFFu;

// n elements as they lie in memory: two bf16 or one float32 per word.
template <class T, int n>
struct Elements {
  static constexpr int kWords = n * int(sizeof(T)) / 4;
  uint32_t word[kWords];

  __device__ float operator[](int i) const {
    if constexpr (sizeof(T) == 4) {
      return __uint_as_float(word[i]);
    } else {
      return i % 2 ? high_bf16(word[i / 2]) : low_bf16(word[i / 2]);
    }
  }
};
template <class T>
using Unit = Elements<T, kUnit>;

// The bytes that may be read: [begin, end).
struct ByteRange {
  const uint8_t *begin, *end;
};

template <int n>
struct alignas(4 * n) Vector {
  uint32_t word[n];
};

// n words from any address. load() reads the vectors that hold them, so that several windows wait
// together; words() shifts them into place.
template <int n>
struct Window {
  static constexpr int kVector = n < 4 ? n : 4;
  uint32_t raw[n + kVector] = {};
  uint32_t shift = 0;  // bytes of `raw` before the first

  // Loads from `from`; words past the end of `all` are 0.
  __device__ void load(const void* from, const ByteRange& all) {
    const auto* p = static_cast<const uint8_t*>(from);
    shift = uint32_t(reinterpret_cast<uintptr_t>(p)) % (4 * kVector);
    const uint8_t* q = p - shift;
    if (q >= all.begin && q + 4 * n + (shift ? 4 * kVector : 0) <= all.end) {
#pragma unroll
      for (int i = 0; i < n + kVector; i += kVector) {
        if (i == n && shift == 0) continue;
        const auto v = *reinterpret_cast<const Vector<kVector>*>(q + 4 * i);
#pragma unroll
        for (int w = 0; w < kVector; ++w) raw[i + w] = v.word[w];
      }
      return;
    }
    shift = 0;  // at either end of the extent: byte by byte
#pragma unroll 1
    for (int i = 0; i < 4 * n; ++i) {
      const uint32_t byte = p + i < all.end ? p[i] : 0;
#pragma unroll
      for (int w = 0; w < n; ++w) {
        raw[w] = __funnelshift_r(raw[w], w + 1 < n ? raw[w + 1] : byte, 8);
      }
    }
  }
  __device__ void words(uint32_t (&out)[n]) const {
    uint32_t v[n + kVector];
#pragma unroll
    for (int w = 0; w < n + kVector; ++w) v[w] = raw[w];
    if constexpr (kVector >= 4) move<2>(v);
    if constexpr (kVector >= 2) move<1>(v);
#pragma unroll
    for (int w = 0; w < n; ++w) out[w] = __funnelshift_r(v[w], v[w + 1], 8 * (shift % 4));
  }

 private:
  template <int words>
  __device__ void move(uint32_t (&v)[n + kVector]) const {
#pragma unroll
    for (int w = 0; w + words < n + kVector; ++w) v[w] = shift & 4 * words ? v[w + words] : v[w];
  }
};

// Keeps the first `valid` elements, of `bits` bits each, of n words; the others become 0.
template <int bits, int n>
__device__ void keep_first(uint32_t (&word)[n], int64_t valid) {
  constexpr int kEach = 32 / bits;
#pragma unroll
  for (int w = 0; w < n; ++w) {
    const int64_t keep = valid - w * kEach;
    if (keep <= 0) {
      word[w] = 0;
    } else if (keep < kEach) {
      word[w] &= (1u << bits * int(keep)) - 1;
    }
  }
}

// Loads the unit at p, which is aligned to kBytes (8 or 16).
template <int kBytes = 16, class T>
__device__ Unit<T> load_unit(const T* p) {
  Unit<T> out;
#pragma unroll
  for (int i = 0; i < Unit<T>::kWords; i += kBytes / 4) {
    if constexpr (kBytes == 16) {
      const uint4 v = __ldg(reinterpret_cast<const uint4*>(p) + i / 4);
      out.word[i] = v.x;
      out.word[i + 1] = v.y;
      out.word[i + 2] = v.z;
      out.word[i + 3] = v.w;
    } else {
      const uint2 v = __ldg(reinterpret_cast<const uint2*>(p) + i / 2);
      out.word[i] = v.x;
      out.word[i + 1] = v.y;
    }
  }
  return out;
}

// A unit at any address, of which not all elements may exist; the others are +0.
template <class T>
struct RaggedUnit {
  Window<Unit<T>::kWords> window;
  int valid;

  // `count` elements exist (perhaps <= 0).
  __device__ void load(const T* p, int64_t count, const ByteRange& all) {
    valid = int(max(min(count, int64_t{kUnit}), int64_t{0}));
    if (valid > 0) window.load(p, all);
  }
  __device__ Unit<T> unit() const {
    Unit<T> out;
    window.words(out.word);
    if (valid < kUnit) keep_first<8 * int(sizeof(T))>(out.word, valid);
    return out;
  }
};

// The codes of sixteen values in order: 16 bytes, or 8 with two codes a byte.
struct Codes {
  uint32_t word[4];
};

// Keeps the first `valid` codes; the others become 0.
template <int kBytes>
__device__ void clear_past(Codes* codes, int64_t valid) {
  if constexpr (kBytes == 16) {
    keep_first<8>(codes->word, valid);
  } else {
    uint32_t word[2] = {codes->word[0], codes->word[1]};
    keep_first<4>(word, valid);
    codes->word[0] = word[0];
    codes->word[1] = word[1];
  }
}

// Loads and stores kBytes at p, which is aligned to as many.
template <int kBytes>
__device__ Codes load_codes(const uint8_t* p) {
  const auto v = *reinterpret_cast<const Vector<kBytes / 4>*>(p);
  Codes out{};
#pragma unroll
  for (int w = 0; w < kBytes / 4; ++w) out.word[w] = v.word[w];
  return out;
}
template <int kBytes>
__device__ void store_codes(uint8_t* p, const Codes& codes) {
  if constexpr (kBytes == 16) {
    *reinterpret_cast<uint4*>(p) = *reinterpret_cast<const uint4*>(codes.word);
  } else {
    *reinterpret_cast<uint2*>(p) = make_uint2(codes.word[0], codes.word[1]);
  }
}

// Stores the first `bytes` (perhaps <= 0) of n words to p, one by one.
template <int n>
__device__ void store_bytes(uint8_t* p, const uint32_t (&word)[n], int64_t bytes) {
#pragma unroll
  for (int i = 0; i < 4 * n; ++i) {
    if (i < bytes) p[i] = uint8_t(word[i / 4] >> 8 * (i % 4));
  }
}

// Stores a run that may begin at any address, of which kLanes lanes hold sixteen bytes each. p is
// the place of the lane's bytes; `bytes` (perhaps < 0) is the length of the run from there on, or
// kNoRun in all lanes of it. Shifted by the misalignment, lanes hold whole vectors, except for the
// first lane, which holds both ends of the run. All lanes of a warp call it.
constexpr int64_t kNoRun = -16;
template <int kLanes>
__device__ void store_run(uint8_t* p, const uint32_t (&mine)[4], int64_t bytes) {
  const int lane = threadIdx.x % kLanes;
  const int shift = int(reinterpret_cast<uintptr_t>(p) % 16);
  uint32_t v[8];
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    v[w] = __shfl_sync(kWarp, mine[w], lane + kLanes - 1, kLanes);
    v[4 + w] = mine[w];
  }
#pragma unroll
  for (int w = 7; w >= 2; --w) v[w] = shift & 8 ? v[w - 2] : v[w];
#pragma unroll
  for (int w = 7; w >= 3; --w) v[w] = shift & 4 ? v[w - 1] : v[w];
  Vector<4> out;
#pragma unroll
  for (int w = 0; w < 4; ++w) out.word[w] = __funnelshift_l(v[3 + w], v[4 + w], 8 * (shift % 4));
  // The number of bytes of `out` before the end of the run.
  const int end = shift + int(max(min(bytes, int64_t{16 * kLanes}), kNoRun));
  uint8_t* to = p - shift;
  const int ends = lane == 0 ? shift : 0;  // bytes of `out` that are the last of the run
  if (ends == 0 && end >= 16) {
    *reinterpret_cast<Vector<4>*>(to) = out;
    return;
  }
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    const auto skip = [&](int byte) { return byte < ends ? 16 * kLanes : 0; };
    const int at = 4 * w + skip(4 * w);
    if (skip(4 * w + 3) == skip(4 * w) && at + 4 <= end) {
      *reinterpret_cast<uint32_t*>(to + at) = out.word[w];
    } else {
#pragma unroll
      for (int b = 4 * w; b < 4 * w + 4; ++b) {
        if (b + skip(b) < end) to[b + skip(b)] = uint8_t(out.word[w] >> 8 * (b % 4));
      }
    }
  }
}

// Not inlined, since the code for aligned rows would then spread over the instruction cache.
__device__ __noinline__ inline void store_ragged_run(uint8_t* p, uint4 codes, int bytes) {
  const uint32_t word[4] = {codes.x, codes.y, codes.z, codes.w};
  store_run<8>(p, word, bytes);
}

// Stores the codes of a row that eight lanes hold, sixteen each: `bytes` from p on, as above.
// `vector` says that p is aligned to kBytes and that all of a lane's codes exist or none. All lanes
// of a warp call it.
template <int kBytes>
__device__ void store_code_run(uint8_t* p, const Codes& codes, int64_t bytes, bool vector) {
  if (kBytes == 8 || vector) {
    if (bytes > 0) store_codes<kBytes>(p, codes);
  } else {
    const uint32_t(&w)[4] = codes.word;
    store_ragged_run(p, make_uint4(w[0], w[1], w[2], w[3]),
                     int(max(min(bytes, int64_t{128}), kNoRun)));
  }
}

}  // namespace moiety::quant::device
