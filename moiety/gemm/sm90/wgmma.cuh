// Products of warp groups: 64 rows by N columns by 16 elements of the reduction, bfloat16 operands
// in shared memory, fp32 accumulators in registers.
//
// Thread t of the group, in warp w = t / 32 with lane l, has d[4j + 2e + i]: row 16w + 8e + l / 4,
// column 8j + 2(l % 4) + i.
#pragma once

#include "moiety/gemm/sm90/device.cuh"

namespace moiety::gemm::sm90 {

__device__ __forceinline__ void products_begin() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void products_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kNewest>
__device__ __forceinline__ void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kNewest) : "memory");
}

// An operand in shared memory: atoms of 8 rows of 128 bytes, whose pieces of 16 bytes are swizzled
// by their row. If the reduction runs along its rows, `next_block` bytes lie between 64 of its
// columns and the next 64.
// `offset`: bytes to it from the address, a constant, so that parts of a stage share what is computed.
__device__ __forceinline__ uint64_t operand(uint32_t address, uint32_t next_block,
                                            uint32_t offset = 0) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62, kNextAtom = uint64_t{1024 >> 4} << 32;
  const uint32_t low = (next_block >> 4 << 16 | (address & 0x3FFFF) >> 4) + (offset >> 4);
  return kSwizzle128 | kNextAtom | low;
}

// d = a b, and with `add` d + a b, of so many columns. Turned: the reduction runs along the operand's
// rows. A product of each number of columns is an instruction of its own, with half as many sums; more
// sums than that are left as they are.
template <int kColumns>
struct Wgmma;

#define MOIETY_4_SUMS(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define MOIETY_16_SUMS(i) \
  MOIETY_4_SUMS(i), MOIETY_4_SUMS(i + 4), MOIETY_4_SUMS(i + 8), MOIETY_4_SUMS(i + 12)
#define MOIETY_48_SUMS MOIETY_16_SUMS(0), MOIETY_16_SUMS(16), MOIETY_16_SUMS(32)
#define MOIETY_64_SUMS MOIETY_48_SUMS, MOIETY_16_SUMS(48)
#define MOIETY_96_SUMS MOIETY_64_SUMS, MOIETY_16_SUMS(64), MOIETY_16_SUMS(80)
#define MOIETY_16_NAMES "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define MOIETY_24_NAMES MOIETY_16_NAMES ", %16, %17, %18, %19, %20, %21, %22, %23"
#define MOIETY_32_NAMES MOIETY_24_NAMES ", %24, %25, %26, %27, %28, %29, %30, %31"
#define MOIETY_40_NAMES MOIETY_32_NAMES ", %32, %33, %34, %35, %36, %37, %38, %39"
#define MOIETY_48_NAMES MOIETY_40_NAMES ", %40, %41, %42, %43, %44, %45, %46, %47"
#define MOIETY_52_NAMES MOIETY_48_NAMES ", %48, %49, %50, %51"
#define MOIETY_56_NAMES MOIETY_52_NAMES ", %52, %53, %54, %55"
#define MOIETY_60_NAMES MOIETY_56_NAMES ", %56, %57, %58, %59"
#define MOIETY_64_NAMES MOIETY_60_NAMES ", %60, %61, %62, %63"
#define MOIETY_68_NAMES MOIETY_64_NAMES ", %64, %65, %66, %67"
#define MOIETY_96_NAMES                                                                \
  MOIETY_64_NAMES                                                                      \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define MOIETY_128_NAMES                                                                           \
  MOIETY_96_NAMES                                                                                  \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
// `at_a` to `at_turned_b`: the numbers of the operands after the sums.
#define MOIETY_WGMMA(columns, names, at_a, at_b, at_add, at_turned_a, at_turned_b, ...)         \
  template <>                                                                                   \
  struct Wgmma<columns> {                                                                       \
    template <bool kATurned, bool kBTurned, int kHeld>                                          \
    static __device__ __forceinline__ void run(float (&d)[kHeld], uint64_t a, uint64_t b,       \
                                               bool add) {                                      \
      static_assert(kHeld >= columns / 2);                                                      \
      asm volatile(                                                                             \
          "{\n"                                                                                 \
          ".reg .pred p;\n"                                                                     \
          "setp.ne.b32 p, %" #at_add                                                            \
          ", 0;\n"                                                                              \
          "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32.bf16.bf16 {" names "}, %" #at_a \
          ", %" #at_b ", p, 1, 1, %" #at_turned_a ", %" #at_turned_b                            \
          ";\n"                                                                                 \
          "}"                                                                                   \
          : __VA_ARGS__                                                                         \
          : "l"(a), "l"(b), "r"(int(add)), "n"(int(kATurned)), "n"(int(kBTurned)));             \
    }                                                                                           \
  }
MOIETY_WGMMA(32, MOIETY_16_NAMES, 16, 17, 18, 19, 20, MOIETY_16_SUMS(0));
MOIETY_WGMMA(64, MOIETY_32_NAMES, 32, 33, 34, 35, 36, MOIETY_16_SUMS(0), MOIETY_16_SUMS(16));
MOIETY_WGMMA(96, MOIETY_48_NAMES, 48, 49, 50, 51, 52, MOIETY_48_SUMS);
MOIETY_WGMMA(104, MOIETY_52_NAMES, 52, 53, 54, 55, 56, MOIETY_48_SUMS, MOIETY_4_SUMS(48));
MOIETY_WGMMA(112, MOIETY_56_NAMES, 56, 57, 58, 59, 60, MOIETY_48_SUMS, MOIETY_4_SUMS(48),
             MOIETY_4_SUMS(52));
MOIETY_WGMMA(120, MOIETY_60_NAMES, 60, 61, 62, 63, 64, MOIETY_48_SUMS, MOIETY_4_SUMS(48),
             MOIETY_4_SUMS(52), MOIETY_4_SUMS(56));
MOIETY_WGMMA(128, MOIETY_64_NAMES, 64, 65, 66, 67, 68, MOIETY_64_SUMS);
MOIETY_WGMMA(136, MOIETY_68_NAMES, 68, 69, 70, 71, 72, MOIETY_64_SUMS, MOIETY_4_SUMS(64));
MOIETY_WGMMA(192, MOIETY_96_NAMES, 96, 97, 98, 99, 100, MOIETY_96_SUMS);
MOIETY_WGMMA(256, MOIETY_128_NAMES, 128, 129, 130, 131, 132, MOIETY_96_SUMS, MOIETY_16_SUMS(96),
             MOIETY_16_SUMS(112));
#undef MOIETY_WGMMA

// Of as many columns as there are sums for.
template <bool kATurned, bool kBTurned, int kHeld>
__device__ __forceinline__ void multiply(float (&d)[kHeld], uint64_t a, uint64_t b, bool add) {
  Wgmma<2 * kHeld>::template run<kATurned, kBTurned>(d, a, b, add);
}

}  // namespace moiety::gemm::sm90
