// Element types of tensors. The byte formats (FP8, FP4, UE8M0) are tags here; their codecs are in
// moiety/formats.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace moiety {

struct bf16;  // moiety/formats/bf16.h
struct fp16;  // moiety/formats/fp16.h

enum class DType : uint8_t {
  kFloat64,
  kFloat32,
  kBFloat16,
  kFloat16,
  kInt64,
  kInt32,
  kUInt64,
  kUInt32,
  kUInt8,
  kE4M3,
  kE5M2,
  kUE8M0,
  kE2M1,  // two elements a byte
};

// Bits of one element; 4 for kE2M1.
constexpr int bits(DType t) {
  switch (t) {
    case DType::kFloat64:
    case DType::kInt64:
    case DType::kUInt64:
      return 64;
    case DType::kFloat32:
    case DType::kInt32:
    case DType::kUInt32:
      return 32;
    case DType::kBFloat16:
    case DType::kFloat16:
      return 16;
    case DType::kE2M1:
      return 4;
    default:
      return 8;
  }
}

// Bytes that n elements take, packed.
constexpr int64_t byte_size(DType t, int64_t n) { return (n * bits(t) + 7) / 8; }

// "float32", "bfloat16", ...
const char* name(DType t);

template <class T>
struct DTypeOf;
template <>
struct DTypeOf<double> {
  static constexpr DType value = DType::kFloat64;
};
template <>
struct DTypeOf<float> {
  static constexpr DType value = DType::kFloat32;
};
template <>
struct DTypeOf<bf16> {
  static constexpr DType value = DType::kBFloat16;
};
template <>
struct DTypeOf<fp16> {
  static constexpr DType value = DType::kFloat16;
};
template <>
struct DTypeOf<int64_t> {
  static constexpr DType value = DType::kInt64;
};
template <>
struct DTypeOf<int32_t> {
  static constexpr DType value = DType::kInt32;
};
template <>
struct DTypeOf<uint64_t> {
  static constexpr DType value = DType::kUInt64;
};
template <>
struct DTypeOf<uint32_t> {
  static constexpr DType value = DType::kUInt32;
};
template <>
struct DTypeOf<uint8_t> {
  static constexpr DType value = DType::kUInt8;
};

template <class T>
inline constexpr DType dtype_of = DTypeOf<std::remove_const_t<T>>::value;

}  // namespace moiety
