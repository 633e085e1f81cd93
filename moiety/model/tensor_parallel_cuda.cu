#include <algorithm>
#include <initializer_list>
#include <limits>

#include "moiety/base/launch.cuh"
#include "moiety/comm/packs.cuh"
#include "moiety/formats/bf16.h"
#include "moiety/model/tensor_parallel_sum.h"
#include "moiety/nn/element.h"

namespace moiety::model {
namespace {

constexpr int kThreads = 256;

// The addend is of type A; null for none.
template <class P, class A, class O>
__global__ void __launch_bounds__(kThreads)
    add_parts_kernel(const P* parts, int64_t ranks, const A* addend, O* out, int64_t n) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= n) return;
  float sum = static_cast<float>(parts[i]);
  for (int64_t r = 1; r < ranks; ++r) sum += static_cast<float>(parts[r * n + i]);
  if (addend) sum += static_cast<float>(addend[i]);
  out[i] = static_cast<O>(sum);
}

// ---- rows in the window of a group (tp_window.h); peers write there, so these are plain loads

constexpr int kFlight = 4;  // packs that a thread has under way

template <class T, int N>
struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Pack {
  T x[N];
};

// The first of a thread's packs; the others follow kThreads apart.
__device__ int64_t first_pack() { return int64_t{blockIdx.x} * kThreads * kFlight + threadIdx.x; }

// The element of `all` that is element i of rank r's rows; in packs, as run is.
__device__ int64_t in_all(const WindowRows& rows, int r, uint32_t i) {
  const auto run = static_cast<uint32_t>(rows.run);
  return (int64_t{i / run} * rows.ranks + r) * run + i % run;
}

template <class P>
__global__ void __launch_bounds__(kThreads)
    show_kernel(const P* own, P* mine, const __grid_constant__ WindowRows rows, P* all, int64_t n) {
  comm::carry_packs<kThreads, kFlight>(
      first_pack(), n, [&](int64_t i) { return own[i]; },
      [&](int64_t i, const P& x) {
        mine[i] = x;
        all[in_all(rows, rows.rank, static_cast<uint32_t>(i))] = x;
      });
}

// n packs of each peer, of which a block has some of one.
template <class P>
__global__ void __launch_bounds__(kThreads)
    fetch_kernel(const __grid_constant__ WindowRows rows, P* all, int64_t n, int64_t blocks) {
  // Every rank begins with the next one, so that no rank is read by all at once.
  const int r = static_cast<int>((rows.rank + 1 + blockIdx.x / blocks) % rows.ranks);
  const int64_t first = blockIdx.x % blocks * kThreads * kFlight + threadIdx.x;
  const P* from = reinterpret_cast<const P*>(rows.at[r]);
  comm::carry_packs<kThreads, kFlight>(
      first, n, [&](int64_t i) { return from[i]; },
      [&](int64_t i, const P& x) { all[in_all(rows, r, static_cast<uint32_t>(i))] = x; });
}

template <class P, class A, class O, int N>
__global__ void __launch_bounds__(kThreads)
    sum_kernel(const __grid_constant__ WindowRows rows, const A* addend, O* out, int64_t n) {
  float sum[kFlight][N];
  const auto each = [&](auto&& f) {
#pragma unroll
    for (int k = 0; k < kFlight; ++k) {
      const int64_t i = first_pack() + k * kThreads;
      if (i < n) f(k, i);
    }
  };
#pragma unroll 2
  for (int r = 0; r < rows.ranks; ++r) {
    const auto* from = reinterpret_cast<const Pack<P, N>*>(rows.at[r]);
    Pack<P, N> part[kFlight];
    each([&](int k, int64_t i) {
      part[k] = from[in_all(rows, rows.rank, static_cast<uint32_t>(i))];
    });
    each([&](int k, int64_t) {
#pragma unroll
      for (int e = 0; e < N; ++e) {
        const auto x = static_cast<float>(part[k].x[e]);
        sum[k][e] = r == 0 ? x : sum[k][e] + x;
      }
    });
  }
  each([&](int k, int64_t i) {
    if (addend) {
      const auto more = reinterpret_cast<const Pack<A, N>*>(addend)[i];
#pragma unroll
      for (int e = 0; e < N; ++e) sum[k][e] += static_cast<float>(more.x[e]);
    }
    Pack<O, N> result;
#pragma unroll
    for (int e = 0; e < N; ++e) result.x[e] = static_cast<O>(sum[k][e]);
    reinterpret_cast<Pack<O, N>*>(out)[i] = result;
  });
}

bool aligned(std::initializer_list<const void*> all) {
  return std::all_of(all.begin(), all.end(),
                     [](const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; });
}

// The rows with a run, of `length` units, in packs of n, whose number kernels have in 32 bits.
WindowRows in_packs(WindowRows rows, int64_t length, int64_t n) {
  rows.run = length / n;
  MOIETY_CHECK(rows.run * rows.sequences <= std::numeric_limits<uint32_t>::max(),
               "tensor parallelism: {} pieces of {} in an operand", rows.run * rows.sequences, n);
  return rows;
}

// Calls f(a pack of bytes, the rows in such packs, the packs of a rank).
template <class F>
void with_byte_packs(const WindowRows& rows, DType dtype, bool wide, F&& f) {
  const int64_t bytes = byte_size(dtype, rows.run);
  const auto go = [&](auto pack) {
    const WindowRows packed = in_packs(rows, bytes, sizeof(pack));
    f(pack, packed, packed.run * rows.sequences);
  };
  if (wide && bytes % 16 == 0) {
    go(Pack<uint32_t, 4>{});
  } else {
    go(uint8_t{});
  }
}

}  // namespace

void show_rows_cuda(TensorView own, std::byte* mine, const WindowRows& rows, TensorView all,
                    const Stream& stream) {
  with_byte_packs(rows, own.dtype(), aligned({own.raw(), mine, all.raw()}),
                  [&](auto pack, const WindowRows& packed, int64_t n) {
                    using P = decltype(pack);
                    launch("show_rows", show_kernel<P>,
                           {blocks_for(n, kThreads * kFlight), kThreads}, stream,
                           static_cast<const P*>(own.raw()), reinterpret_cast<P*>(mine), packed,
                           static_cast<P*>(all.raw()), n);
                  });
}

void fetch_rows_cuda(const WindowRows& rows, TensorView all, const Stream& stream) {
  with_byte_packs(rows, all.dtype(), aligned({rows.at[0], all.raw()}),
                  [&](auto pack, const WindowRows& packed, int64_t n) {
                    using P = decltype(pack);
                    const int64_t blocks = blocks_for(n, kThreads * kFlight);
                    launch("fetch_rows", fetch_kernel<P>, {(rows.ranks - 1) * blocks, kThreads},
                           stream, packed, static_cast<P*>(all.raw()), n, blocks);
                  });
}

void sum_rows_cuda(const WindowRows& rows, DType dtype, TensorView addend, TensorView out,
                   const Stream& stream) {
  const DType addend_dtype = addend.defined() ? addend.dtype() : out.dtype();
  nn::with_storage(dtype, [&](auto p) {
    nn::with_storage(addend_dtype, [&](auto a) {
      nn::with_storage(out.dtype(), [&](auto o) {
        using P = decltype(p);
        using A = decltype(a);
        using O = decltype(o);
        const auto go = [&]<int N>() {
          const int64_t n = rows.sequences * rows.run / N;
          launch("sum_rows", sum_kernel<P, A, O, N>, {blocks_for(n, kThreads * kFlight), kThreads},
                 stream, in_packs(rows, rows.run, N), addend.data<A>(), out.data<O>(), n);
        };
        constexpr int kWide = 16 / int{sizeof(P)};
        const bool wide =
            aligned({rows.at[0], out.raw(), addend.defined() ? addend.raw() : nullptr});
        if (wide && rows.run % kWide == 0) {
          go.template operator()<kWide>();
        } else {
          go.template operator()<1>();
        }
      });
    });
  });
}

void add_parts_cuda(TensorView parts, int64_t ranks, TensorView addend, TensorView out,
                    const Stream& stream) {
  const int64_t n = out.numel();
  const DType addend_dtype = addend.defined() ? addend.dtype() : out.dtype();
  nn::with_storage(parts.dtype(), [&](auto p) {
    nn::with_storage(addend_dtype, [&](auto a) {
      nn::with_storage(out.dtype(), [&](auto o) {
        using P = decltype(p);
        using A = decltype(a);
        using O = decltype(o);
        launch("add_parts", add_parts_kernel<P, A, O>, {blocks_for(n, kThreads), kThreads}, stream,
               parts.data<P>(), ranks, addend.data<A>(), out.data<O>(), n);
      });
    });
  });
}

}  // namespace moiety::model
