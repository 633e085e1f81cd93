// The formats between which columns are made anew, for tests of every device.
#pragma once

#include <vector>

#include "tests/quant/cases.h"

namespace moiety::quant {

// Those of rows; for groups those that have no tensor scale.
inline std::vector<QuantSpec> row_specs(bool grouped) {
  QuantSpec any_scale = QuantSpec::of(Format::kFp8Block1x128);
  any_scale.pow2_scales = false;
  any_scale.element = DType::kE5M2;
  QuantSpec nvfp4 = QuantSpec::of(Format::kNvfp4), each_row = nvfp4;
  each_row.row_scaled = true;
  std::vector<QuantSpec> out = {QuantSpec::of(Format::kFp8Block1x128), any_scale,
                                QuantSpec::of(Format::kMxfp8), each_row};
  if (!grouped) out.push_back(nvfp4);
  return out;
}

// The outputs that have a col direction of their own.
inline std::vector<SpecCase> col_cases() {
  std::vector<SpecCase> cases = spec_cases();
  std::erase_if(cases, [](const SpecCase& c) {
    return c.spec.row_scaled || c.spec.format == Format::kMxfp8Tile32;
  });
  return cases;
}

}  // namespace moiety::quant
