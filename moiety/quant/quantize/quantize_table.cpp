#include "moiety/quant/quantize/quantize_table.h"

#include "moiety/base/cuda_built.h"
#include "moiety/quant/quantize/quantize_cuda.h"

namespace moiety::quant {
namespace {

// The device of a tensor's arrays, which is the same for all of them.
moiety::Device place_of(const QuantizedView& out) {
  for (const TensorView* view : {&out.row_data, &out.col_data, &out.tensor_scale}) {
    if (view->defined()) return view->device();
  }
  return {};
}

}  // namespace

QuantizeTable::Impl::Impl(std::span<const QuantizeItem> given) : items(given.begin(), given.end()) {
  for (QuantizeItem& item : items) {
    if (!item.options.delayed) continue;
    delayed.push_back(*item.options.delayed);
    item.options.delayed = &delayed.back();
  }
  for (const QuantizeItem& item : items) {
    if (!item.x.defined()) break;
    jobs.push_back(make_quantize_job("quantize_many", item.x, item.out, item.options));
    jobs.back().skip = jobs.front().skip;
  }
  try {
    for (const QuantizeItem& item : items) {
      if (is_mxfp8(item.out.spec.format)) continue;
      transposes.push_back(make_transpose_job(item.out));
    }
  } catch (const Error& error) {
    no_transposes = error;
  }
  if (!items.empty()) place = place_of(items.front().out);
  for (const QuantizeItem& item : items) {
    MOIETY_CHECK(place_of(item.out) == place, "quantize table: item {} is on {}, the first on {}",
                 &item - items.data(), name(place_of(item.out)), name(place));
  }
  if (place.type == DeviceType::kCpu) return;
  require_device("quantize table", place);
  if constexpr (kCudaBuilt) {
    if (!jobs.empty()) device_jobs = make_device_table(jobs, place);
    if (!no_transposes && !transposes.empty()) {
      device_transposes = make_transpose_table(transposes, place);
    }
  }
}

void QuantizeTable::Impl::check_stream(const char* operation, const Stream& stream) const {
  MOIETY_CHECK(stream.device() == place, "{}: the tensors are on {}, the stream on {}", operation,
               name(place), name(stream.device()));
}

QuantizeTable::QuantizeTable(std::span<const QuantizeItem> items)
    : impl_(std::make_unique<Impl>(items)) {}
QuantizeTable::~QuantizeTable() = default;
QuantizeTable::QuantizeTable(QuantizeTable&&) noexcept = default;
QuantizeTable& QuantizeTable::operator=(QuantizeTable&&) noexcept = default;

std::span<const QuantizeItem> QuantizeTable::items() const { return impl_->items; }
const QuantizeTable::Device* QuantizeTable::device() const { return impl_->device_jobs.get(); }

}  // namespace moiety::quant
