#include "moiety/quant/quantize/quantize_kernel.h"

#include <algorithm>

#include "moiety/base/error.h"

namespace moiety::quant {
namespace {

QuantizeKernel wanted(QuantizePass pass, const QuantizeTraits& t) {
  if (t.row_scaled) {
    return {QuantizeFamily::kScaledRows, t.format, t.dtype, t.stochastic, t.col, t.coded};
  }
  if (pass == QuantizePass::kMeasure) {
    const bool own_col = t.want_col && t.rotated;
    return {QuantizeFamily::kMeasure, Format::kFp8Tensor, t.dtype, false, own_col, t.coded};
  }
  const bool shares_codes = is_tile(t.format) || t.format == Format::kFp8Tensor;
  return {shares_codes ? QuantizeFamily::kTiles : QuantizeFamily::kBlocks,
          t.format,
          t.dtype,
          t.stochastic,
          t.col,
          t.coded};
}

template <class List>
bool contains(const List& list, const QuantizeKernel& kernel) {
  return std::find(list.begin(), list.end(), kernel) != list.end();
}

}  // namespace

QuantizeTraits traits_of(const QuantizeJob& job) {
  return {job.spec.format,
          job.dtype,
          job.stochastic(),
          job.spec.row_scaled,
          job.want_col && job.col.data,
          job.spec.rht_col,
          job.want_row,
          job.want_col,
          job.measures_first(),
          job.delayed_scale != nullptr};
}

QuantizeKernel choose_kernel(QuantizePass pass, const QuantizeTraits& traits) {
  const QuantizeKernel kernel = wanted(pass, traits);
  if (contains(kFp8Kernels, kernel) || contains(kMxfp8Kernels, kernel) ||
      contains(kNvfp4Kernels, kernel) || contains(kRequantizeKernels, kernel)) {
    return kernel;
  }
  fail(ErrorKind::kUnsupported, "{}: no kernel for {} from {}{}{}",
       pass == QuantizePass::kMeasure ? "compute_amax" : "quantize", name(traits.format),
       traits.coded ? "codes" : name(traits.dtype), traits.row_scaled ? ", row_scaled" : "",
       traits.col ? ", with col codes" : "");
}

}  // namespace moiety::quant
