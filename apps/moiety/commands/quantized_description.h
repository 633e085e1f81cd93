// The description in a quantized tensor's files: quantized.json.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "moiety/formats/quantized.h"
#include "moiety/quant/rounding.h"

namespace moiety::app {

// Words for the values of ScaleLayout, in its order.
inline constexpr std::array<std::string_view, 4> kLayoutWords{"compact", "sm100", "padded", "sm90"};

struct QuantizedDescription {
  QuantSpec spec;
  std::vector<int64_t> shape;  // as it was given; the last is a row, the others are one dimension
  Directions directions;
  ScaleLayout layout = ScaleLayout::kCompact;
  quant::RngState rng;  // state of stochastic rounding, with tensor_id
  uint32_t tensor_id = 0;
  bool non_finite = false;  // whether inf or NaN was met
  // The crc32c of the array files, by their names; empty in files of older versions.
  std::map<std::string, uint32_t> checksums;

  int64_t rows() const;
  int64_t cols() const { return shape.back(); }
};

// The text ends in the checksums, with its own before them: of all that stands before "crc32c".
std::string to_json(const QuantizedDescription& description);
// Throws DataError naming `path` for a damaged text, also one that has another checksum, and for options that do not go together.
QuantizedDescription parse_quantized_description(const std::string& path, std::string_view json);

}  // namespace moiety::app
