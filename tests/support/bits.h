// Values compared as bits: signs of zeros and payloads of NaN count.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "moiety/base/tensor_view.h"

namespace moiety {

inline uint32_t bits_of(float x) { return std::bit_cast<uint32_t>(x); }

inline bool same_bits(float a, float b) { return bits_of(a) == bits_of(b); }

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

// Of tensors on the host, without gaps. Absent is the same as absent alone.
inline bool same_bits(const TensorView& a, const TensorView& b) {
  return a.defined() == b.defined() && a.bytes() == b.bytes() &&
         (a.bytes() == 0 || std::memcmp(a.raw(), b.raw(), static_cast<size_t>(a.bytes())) == 0);
}

inline std::vector<uint32_t> bits_of(const TensorView& float32) {
  const auto* bits = static_cast<const uint32_t*>(float32.raw());
  return {bits, bits + float32.numel()};
}

// The bytes of a tensor on the host, without gaps; "" if it is absent.
inline std::string bytes_of(const TensorView& x) {
  return x.defined() ? std::string(static_cast<const char*>(x.raw()), x.bytes()) : "";
}

// An object's memory as the tensor of bytes that operations take structs in.
template <class T>
TensorView byte_view(T& x) {
  return {&x, DType::kUInt8, {sizeof(T)}};
}

}  // namespace moiety
