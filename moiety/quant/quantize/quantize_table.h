// The contents of a QuantizeTable besides its items. Internal to moiety/quant.
#pragma once

#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "moiety/quant/convert/transpose_cuda.h"
#include "moiety/quant/quantize/quantize_job.h"

namespace moiety::quant {

struct QuantizeTable::Impl {
  explicit Impl(std::span<const QuantizeItem> given);
  // Throws Error(kInvalidArgument) unless the stream is on the device of the tensors.
  void check_stream(const char* operation, const Stream& stream) const;

  std::vector<QuantizeItem> items;
  std::deque<DelayedScaling> delayed;    // targets of the options' pointers
  std::vector<QuantizeJob> jobs;         // jobs of the items up to the first one without x
  std::vector<TransposeJob> transposes;  // jobs of the items that have something to transpose
  std::optional<Error> no_transposes;    // the reason why the items cannot all be transposed
  moiety::Device place;                  // place of all tensors
  // Set on a GPU, if there is something to do.
  std::shared_ptr<const Device> device_jobs;
  std::shared_ptr<const TransposeTable> device_transposes;
};

}  // namespace moiety::quant
