// Which kernels normalize rows on a GPU: pure choices from lists of all kernels, so that tests hold
// them without a GPU. norm_cuda.cu and norm_backward_cuda.cu instantiate the lists. Internal to
// moiety/nn.
#pragma once

#include <array>
#include <cstdint>

#include "moiety/base/dtype.h"

namespace moiety::nn {

enum class NormFamily : uint8_t {
  kShort,  // a group of lanes has a row, and a lane has eight elements of it
  kLong,   // a warp has a row
  kRing,   // backward: rows pass through a ring in shared memory
  kAny,    // kLong, for rows that begin anywhere
};

struct NormKernel {
  NormFamily family;
  DType dtype;
  int64_t columns;  // elements of a row that stay in registers; 0: none
  friend constexpr bool operator==(const NormKernel&, const NormKernel&) = default;
};

// In the order of the choice.
inline constexpr std::array kNormKernels = {
    NormKernel{NormFamily::kShort, DType::kFloat32, 64},
    NormKernel{NormFamily::kShort, DType::kFloat32, 128},
    NormKernel{NormFamily::kShort, DType::kFloat32, 256},
    NormKernel{NormFamily::kLong, DType::kFloat32, 1024},
    NormKernel{NormFamily::kLong, DType::kFloat32, 2048},
    NormKernel{NormFamily::kLong, DType::kFloat32, 4096},
    NormKernel{NormFamily::kAny, DType::kFloat32, 256},
    NormKernel{NormFamily::kShort, DType::kBFloat16, 64},
    NormKernel{NormFamily::kShort, DType::kBFloat16, 128},
    NormKernel{NormFamily::kShort, DType::kBFloat16, 256},
    NormKernel{NormFamily::kLong, DType::kBFloat16, 2048},
    NormKernel{NormFamily::kLong, DType::kBFloat16, 4096},
    NormKernel{NormFamily::kLong, DType::kBFloat16, 8192},
    NormKernel{NormFamily::kAny, DType::kBFloat16, 256},
};
inline constexpr std::array kNormBackwardKernels = {
    NormKernel{NormFamily::kShort, DType::kFloat32, 64},
    NormKernel{NormFamily::kShort, DType::kFloat32, 128},
    NormKernel{NormFamily::kShort, DType::kFloat32, 256},
    NormKernel{NormFamily::kRing, DType::kFloat32, 2048},
    NormKernel{NormFamily::kRing, DType::kFloat32, 4096},
    NormKernel{NormFamily::kLong, DType::kFloat32, 0},
    NormKernel{NormFamily::kAny, DType::kFloat32, 0},
    NormKernel{NormFamily::kShort, DType::kBFloat16, 64},
    NormKernel{NormFamily::kShort, DType::kBFloat16, 128},
    NormKernel{NormFamily::kShort, DType::kBFloat16, 256},
    NormKernel{NormFamily::kRing, DType::kBFloat16, 2048},
    NormKernel{NormFamily::kRing, DType::kBFloat16, 4096},
    NormKernel{NormFamily::kRing, DType::kBFloat16, 8192},
    NormKernel{NormFamily::kLong, DType::kBFloat16, 0},
    NormKernel{NormFamily::kAny, DType::kBFloat16, 0},
};

// Norm and rope in one pass: heads of exactly so many elements. kAny stands for the two operations
// one after the other.
inline constexpr std::array kNormRopeKernels = {
    NormKernel{NormFamily::kShort, DType::kFloat32, 64},
    NormKernel{NormFamily::kShort, DType::kFloat32, 128},
    NormKernel{NormFamily::kShort, DType::kFloat32, 256},
    NormKernel{NormFamily::kShort, DType::kBFloat16, 64},
    NormKernel{NormFamily::kShort, DType::kBFloat16, 128},
    NormKernel{NormFamily::kShort, DType::kBFloat16, 256},
};

struct NormTraits {
  DType dtype = DType::kFloat32;
  int64_t columns = 0;
  bool octets = false;  // whether octets_fit (octet.cuh) holds for all tensors
  bool addend = false;  // backward
};
NormKernel choose_norm(const NormTraits& traits);
NormKernel choose_norm_rope(const NormTraits& traits);

// The ring of kRing: `stages` of 2^log rows.
struct NormRing {
  static constexpr int kMostStages = 16, kMostLog = 4;
  int stages = 0, log = kMostLog;
  int tensors = 0;        // of a row: x, dy and perhaps the addend
  int64_t row_bytes = 0;  // of all of them
  constexpr int64_t bytes() const { return (stages * row_bytes) << log; }
};
// `shared_bytes`: the most that a ring may take.
NormRing norm_ring(const NormTraits& traits, int64_t shared_bytes);
NormKernel choose_norm_backward(const NormTraits& traits, const NormRing& ring);

}  // namespace moiety::nn
