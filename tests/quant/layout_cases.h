// The scale layouts of every format that has one.
#pragma once

#include <vector>

#include "moiety/formats/quantized.h"

namespace moiety::quant {

struct LayoutCase {
  Format format;
  Direction direction;
  ScaleLayout layout;
};
inline std::vector<LayoutCase> layout_cases() {
  std::vector<LayoutCase> out;
  for (const Direction d : {Direction::kRow, Direction::kCol}) {
    for (const Format f : {Format::kFp8Block1x128, Format::kFp8Block128x128}) {
      out.push_back({f, d, ScaleLayout::kSm90MnMajor});
    }
    for (const Format f :
         {Format::kMxfp8, Format::kMxfp8Tile32, Format::kNvfp4, Format::kNvfp4Tile16}) {
      out.push_back({f, d, ScaleLayout::kSm100Swizzled});
      out.push_back({f, d, ScaleLayout::kPadded});
    }
  }
  return out;
}

}  // namespace moiety::quant
