// The interface between the host side of quantization on GPUs and its kernels: one source file per
// family of formats.
#pragma once

#include <array>
#include <span>

#include "moiety/base/launch.cuh"
#include "moiety/quant/quantize/quantize_kernel.h"
#include "moiety/quant/quantize/quantize_source.cuh"

namespace moiety::quant::device {

constexpr int kScaledRows = 4;  // rows in a tile of row-scaled jobs

struct QuantizeLaunch {
  QuantizeKernel is;
  void (*kernel)(Source);
  int64_t shared_bytes = 0;
  int run = 1;  // tiles of a single job that a block casts in turn
};

std::span<const QuantizeLaunch> fp8_launches();
std::span<const QuantizeLaunch> mxfp8_launches();
std::span<const QuantizeLaunch> nvfp4_launches();
std::span<const QuantizeLaunch> requantize_launches();

// The launches of one call, in order, over one source.
struct Launches {
  struct One {
    const char* name;
    void (*kernel)(Source);
    LaunchShape shape;
  };
  Source source;
  std::array<One, 3> all{};
  int count = 0;

  std::span<const One> each() const { return std::span(all).first(static_cast<size_t>(count)); }
  // All but the first begin while the one before them runs.
  void add(const char* name, void (*kernel)(Source), int64_t blocks, int64_t shared_bytes = 0) {
    all.at(static_cast<size_t>(count)) = {
        name, kernel, {blocks, kThreads, shared_bytes, count > 0}};
    ++count;
  }
};

}  // namespace moiety::quant::device
