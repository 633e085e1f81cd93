// A product, or a part of one, computed by the calling thread: the building block of gemm,
// grouped_gemm and the grouped MLP. Its factors have been read (Product::read_factors). Internal to
// moiety/gemm. Notation, epilogue and bits are those of gemm.h and grouped_gemm.h.
#pragma once

#include <cmath>
#include <cstdint>
#include <string>
#include <type_traits>

#include "moiety/base/simd.h"
#include "moiety/formats/bf16.h"
#include "moiety/gemm/product.h"

namespace moiety::gemm {

// kVector is the code of this folder for AVX2 or AVX-512, with the bits of the reference. kBf16 is
// that of avx512/ for bf16 where the CPU has AVX512-BF16, with the same bits but for subnormals.
// kAmx is that for AMX, whose bits are its own. kOneDnn is for comparisons.
enum class GemmEngine { kAuto, kReference, kVector, kBf16, kAmx, kOneDnn };
const char* name(GemmEngine engine);
// Whether its results are the reference's, subnormals aside. Others are within the bound of gemm.h.
bool has_reference_bits(GemmEngine engine, DType dtype);

// The engine that kAuto stands for, with operands of this dtype on this machine.
GemmEngine automatic_engine(DType dtype);
bool engine_available(GemmEngine engine, DType dtype);

// Throws Error(kUnsupported) unless the engine is available. Zero sizes are legal.
void block_gemm(const Product& block, GemmEngine engine = GemmEngine::kAuto);

// The engines.
void block_gemm_reference(const Product& block);
bool avx2_available();
void block_gemm_avx2(const Product& block);
bool avx512_available();
void block_gemm_avx512(const Product& block);
bool avx512_bf16_available();
void block_gemm_avx512_bf16(const Product& block);  // bf16 operands
bool amx_available();
void block_gemm_amx(const Product& block);  // bf16 operands
bool onednn_available(DType dtype);  // it is built in, and multiplies this dtype on this machine
std::string onednn_version();        // "3.1.1"; empty if it is not built in
void block_gemm_onednn(const Product& block);

// The product slice by slice, with the scales of both operands.
void block_gemm_scaled(const Product& block, GemmEngine engine);

// Throws Error(kInvalidArgument) unless the scales fit an operand of `rows` rows and this
// reduction. `groups` is 1 for a dense product; `each` says that every group has block scales of
// its own.
struct ScaledOperand {
  int64_t rows = 0, reduction = 0, groups = 1;
  bool each = false;
};
void check_scale(const char* operation, const char* argument, const OperandScale& scale,
                 const ScaledOperand& operand);
// Throws Error(kInvalidArgument) unless both operands have block scales or none.
void check_scales(const char* operation, const OperandScale& a, const OperandScale& b,
                  bool transposed_product);

// ---- The epilogue of a tile: rows [i, i + rows), columns [j, j + n). `v` holds the accumulators,
// `stride` apart from row to row, and is overwritten.
template <class Math>
struct AccTile {
  Math* v;
  int64_t stride;
  int64_t i, rows, j, n;
};

namespace detail {

template <class Math, class Old>
MOIETY_INLINE void add_old(const AccTile<Math>& t, Math beta, const void* old, int64_t old_stride) {
  for (int64_t r = 0; r < t.rows; ++r) {
    const Old* p = static_cast<const Old*>(old) + (t.i + r) * old_stride + t.j;
    Math* v = t.v + r * t.stride;
    for (int64_t x = 0; x < t.n; ++x) v[x] = std::fma(beta, static_cast<Math>(p[x]), v[x]);
  }
}

template <class Math, class Bias>
MOIETY_INLINE void add_bias(const AccTile<Math>& t, const void* bias, const Math* scale) {
  const Bias* p = static_cast<const Bias*>(bias) + t.j;
  for (int64_t r = 0; r < t.rows; ++r) {
    Math* v = t.v + r * t.stride;
    if (scale) {
      const Math s = scale[t.i + r];
      for (int64_t x = 0; x < t.n; ++x) v[x] = std::fma(static_cast<Math>(p[x]), s, v[x]);
    } else {
      for (int64_t x = 0; x < t.n; ++x) v[x] = v[x] + static_cast<Math>(p[x]);
    }
  }
}

template <class Math, class Out>
MOIETY_INLINE void store(const AccTile<Math>& t, void* out, int64_t out_stride) {
  for (int64_t r = 0; r < t.rows; ++r) {
    Out* p = static_cast<Out*>(out) + (t.i + r) * out_stride + t.j;
    const Math* v = t.v + r * t.stride;
    for (int64_t x = 0; x < t.n; ++x) p[x] = static_cast<Out>(v[x]);
  }
}

}  // namespace detail

// Storage is the dtype of operands, old, bias and out: float and bf16, or only double.
template <class Math>
MOIETY_INLINE void finish_tile(const Epilogue& e, const AccTile<Math>& t) {
  using namespace detail;
  using Half = std::conditional_t<std::is_same_v<Math, float>, bf16, Math>;
  const float alpha = e.alpha.value, beta = e.beta.value;
  for (const float scale : {e.a_scale.value, e.b_scale.value}) {
    if (scale == 1) continue;
    for (int64_t r = 0; r < t.rows; ++r) {
      for (int64_t x = 0; x < t.n; ++x) t.v[r * t.stride + x] *= scale;
    }
  }
  if (alpha != 1) {
    for (int64_t r = 0; r < t.rows; ++r) {
      for (int64_t x = 0; x < t.n; ++x) t.v[r * t.stride + x] *= alpha;
    }
  }
  if (beta != 0) {
    if (e.old_dtype == dtype_of<Math>) {
      add_old<Math, Math>(t, beta, e.old, e.old_stride);
    } else {
      add_old<Math, Half>(t, beta, e.old, e.old_stride);
    }
  }
  if (e.bias) {
    const Math* scale = static_cast<const Math*>(e.bias_scale);
    if (e.bias_dtype == dtype_of<Math>) {
      add_bias<Math, Math>(t, e.bias, scale);
    } else {
      add_bias<Math, Half>(t, e.bias, scale);
    }
  }
  if (e.out_dtype == dtype_of<Math>) {
    store<Math, Math>(t, e.out, e.out_stride);
  } else {
    store<Math, Half>(t, e.out, e.out_stride);
  }
}

// finish_tile<float> as compiled for vectors, for engines whose own code is not.
void finish_tile_cpu(const Epilogue& e, const AccTile<float>& t);

}  // namespace moiety::gemm
