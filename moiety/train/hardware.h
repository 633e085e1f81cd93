// The GPUs that planning and MFU know.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

#include "moiety/train/config.h"

namespace moiety::train {

// A GPU: dense TFLOP/s (0: not there), bytes of memory, TB/s of it, GB/s of a link and of the
// network per rank and direction, and the number of ranks that links connect.
struct Hardware {
  const char* name;
  double bf16, fp8, mxfp8, fp4;
  int64_t memory;
  double bandwidth, link, network;
  int domain;

  // The TFLOP/s under a recipe; a format that the device lacks is multiplied as bf16.
  double rate(Recipe recipe) const {
    const double own = recipe == Recipe::kFp8Tensor  ? fp8
                       : recipe == Recipe::kFp8Block ? fp8
                       : recipe == Recipe::kMxfp8    ? mxfp8
                       : recipe == Recipe::kNvfp4    ? fp4
                                                     : bf16;
    return own > 0 ? own : bf16;
  }
};

inline constexpr int64_t kGB = 1000000000;
inline constexpr std::array<Hardware, 5> kHardware{
    {{"a100", 312, 0, 0, 0, 80 * kGB, 2.0, 300, 25, 8},
     {"h100", 989, 1979, 0, 0, 80 * kGB, 3.35, 450, 50, 8},
     {"h200", 989, 1979, 0, 0, 141 * kGB, 4.8, 450, 50, 8},
     {"b200", 2250, 4500, 4500, 9000, 180 * kGB, 8.0, 900, 50, 8},
     {"gb200", 2500, 5000, 5000, 10000, 186 * kGB, 8.0, 900, 50, 72}}};

// The row of a GPU that calls itself, for example, "NVIDIA H100 80GB HBM3"; null if there is none.
const Hardware* find_hardware(std::string_view gpu_name);

}  // namespace moiety::train
