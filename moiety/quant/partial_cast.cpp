#include "moiety/quant/partial_cast.h"

#include <cstring>

#include "moiety/base/check_devices.h"
#include "moiety/base/cuda_built.h"
#include "moiety/base/trace.h"
#include "moiety/quant/cpu_path.h"
#include "moiety/quant/partial_cast/partial_cast_cuda.h"

namespace moiety::quant {
namespace {

constexpr const char* kTable = "PartialCastTable";

bool is_master(DType t) { return t == DType::kFloat32 || t == DType::kBFloat16; }

void check_codes(const char* argument, const TensorView& x, int64_t bytes) {
  MOIETY_CHECK(x.defined() && x.contiguous() && x.bytes() == bytes,
               "{}: {} of a shard is {}, expected {} bytes", kTable, argument, x.describe(), bytes);
}

void check_arrays(const PartialCastItem& item, const PartialCastArrays& a, size_t i) {
  MOIETY_CHECK(a.out.spec == item.spec && a.out.rows == item.rows && a.out.cols == item.cols,
               "{}: array {} is a {} x {} {}, the plan's item a {} x {} {}", kTable, i, a.out.rows,
               a.out.cols, name(a.out.spec.format), item.rows, item.cols, name(item.spec.format));
  MOIETY_CHECK(a.out.layout == ScaleLayout::kCompact, "{}: scales of array {} are {}", kTable, i,
               name(a.out.layout));
  const int64_t n = item.end - item.start;
  if (n > 0) {
    MOIETY_CHECK(is_master(a.master.dtype()), "{}: master {} is {}, expected float32 or bfloat16",
                 kTable, i, a.master.describe());
    check_tensor(kTable, "master", a.master, a.master.dtype(), {n});
    MOIETY_CHECK(a.master.contiguous(), "{}: master {} is {}", kTable, i, a.master.describe());
  }
  QuantizedView whole = a.out;
  if (a.shard_only) {
    const ByteRange range = shard_bytes(item.spec, item.rows, item.cols, item.start, item.end);
    if (n > 0) check_codes("row_data", whole.row_data, range.end - range.begin);
    if (n > 0 && item.col) check_codes("col_data", whole.col_data, range.end - range.begin);
    whole.row_data = whole.col_data = {};
  } else {
    MOIETY_CHECK(n == 0 || whole.row_data.defined(), "{}: item {} has no row_data", kTable, i);
    MOIETY_CHECK(n == 0 || !item.col || whole.col_data.defined(), "{}: item {} has no col_data",
                 kTable, i);
  }
  check_quantized(kTable, whole);
  const QuantizedSizes sizes =
      quantized_sizes(item.spec, item.rows, item.cols, {.row = true, .col = item.col});
  const auto check_there = [&](const char* argument, const TensorView& x, const ArraySpec& size) {
    MOIETY_CHECK(size.dims == 0 || x.defined(), "{}: item {} ({}) has no {}", kTable, i,
                 name(item.spec.format), argument);
  };
  check_there("row_scales", whole.row_scales, sizes.row_scales);
  if (item.col) check_there("col_scales", whole.col_scales, sizes.col_scales);
  check_there("amax", whole.amax, sizes.amax);
  if (is_tensor_scaled(item.spec.format)) {
    check_there("tensor_scale", whole.tensor_scale, sizes.tensor_scale);
  }
  MOIETY_CHECK(item.delayed == (a.delayed != nullptr), "{}: item {} is {}planned as delayed",
               kTable, i, item.delayed ? "" : "not ");
}

// The device of an item's arrays.
Device place_of(const PartialCastArrays& a) {
  const QuantizedView& v = a.out;
  return v.row_scales.defined() ? v.row_scales.device() : v.tensor_scale.device();
}

void check_place(const PartialCastArrays& a, Device place, size_t i) {
  const std::string item = text("{}, item {}", kTable, i);
  const QuantizedView& v = a.out;
  const DelayedScaling delayed = a.delayed ? *a.delayed : DelayedScaling();
  check_devices(item.c_str(),
                {{"master", a.master},
                 {"row_data", v.row_data},
                 {"row_scales", v.row_scales},
                 {"col_data", v.col_data},
                 {"col_scales", v.col_scales},
                 {"amax", v.amax},
                 {"tensor_scale", v.tensor_scale},
                 {"flags", v.flags},
                 {"delayed.scale", delayed.scale},
                 {"delayed.scale_inv", delayed.scale_inv},
                 {"delayed.step_amax", delayed.step_amax}},
                place);
}

detail::PartialArrays resolve(const detail::PartialItem& item, const PartialCastArrays& a) {
  const QuantizedView& v = a.out;
  const int64_t skip = a.shard_only || item.start == item.end ? 0 : position(item, item.start);
  const auto codes = [&](const TensorView& x) {
    return x.defined() && item.start < item.end ? static_cast<uint8_t*>(x.raw()) + skip : nullptr;
  };
  detail::PartialArrays out;
  out.master = a.master.raw();
  out.bf16_master = a.master.dtype() == DType::kBFloat16;
  out.row = codes(v.row_data);
  out.row_scales = v.row_scales.raw();
  if (item.want_col) {
    out.col = codes(v.col_data);
    out.col_scales = static_cast<uint8_t*>(v.col_scales.raw());
  }
  out.amax = static_cast<float*>(v.amax.raw());
  out.tensor_scale = static_cast<float*>(v.tensor_scale.raw());
  out.flags = static_cast<uint32_t*>(v.flags.raw());
  if (a.delayed) {
    check_tensor(kTable, "delayed.scale", a.delayed->scale, DType::kFloat32, {1});
    check_tensor(kTable, "delayed.scale_inv", a.delayed->scale_inv, DType::kFloat32, {1});
    check_tensor(kTable, "delayed.step_amax", a.delayed->step_amax, DType::kFloat32, {1});
    out.delayed_scale = a.delayed->scale.data<float>();
    out.delayed_scale_inv = a.delayed->scale_inv.data<float>();
    out.step_amax = a.delayed->step_amax.data<float>();
  }
  return out;
}

std::byte* check_call(const char* operation, const PartialCastPlan& plan,
                      const PartialCastTable& table, const TensorView& reduction,
                      const Stream& stream) {
  MOIETY_CHECK(table.impl().plan == &plan.impl(), "{}: the table was made for another plan",
               operation);
  MOIETY_CHECK(plan.items().empty() || stream.device() == table.impl().place,
               "{}: the tensors are on {}, the stream on {}", operation, name(table.impl().place),
               name(stream.device()));
  check_device(operation, "reduction", reduction, stream);
  check_tensor(operation, "reduction", reduction, DType::kUInt8, {plan.reduction_bytes()});
  MOIETY_CHECK(reduction.contiguous() && reinterpret_cast<uintptr_t>(reduction.raw()) % 16 == 0,
               "{}: reduction is not aligned to 16 bytes", operation);
  return static_cast<std::byte*>(reduction.raw());
}

}  // namespace

PartialCastTable::PartialCastTable(const PartialCastPlan& plan,
                                   std::span<const PartialCastArrays> arrays)
    : impl_(new Impl) {
  impl_->plan = &plan.impl();
  MOIETY_CHECK(arrays.size() == plan.items().size(), "{}: {} arrays for {} items", kTable,
               arrays.size(), plan.items().size());
  if (!arrays.empty()) impl_->place = place_of(arrays[0]);
  for (size_t i = 0; i < arrays.size(); ++i) {
    check_arrays(plan.items()[i], arrays[i], i);
    check_place(arrays[i], impl_->place, i);
    impl_->arrays.push_back(resolve(plan.impl().items[i], arrays[i]));
  }
  if (impl_->place.type == DeviceType::kCpu) return;
  require_device(kTable, impl_->place);
  if constexpr (kCudaBuilt) impl_->gpu = detail::make_partial_gpu_table(*impl_, impl_->place);
}

PartialCastTable::~PartialCastTable() = default;
PartialCastTable::PartialCastTable(PartialCastTable&&) noexcept = default;
PartialCastTable& PartialCastTable::operator=(PartialCastTable&&) noexcept = default;

void partial_amax(const PartialCastPlan& plan, const PartialCastTable& table, TensorView reduction,
                  Stream stream) {
  std::byte* const words = check_call("partial_amax", plan, table, reduction, stream);
  if (plan.items().empty()) return;
  if (table.impl().gpu) {
    if constexpr (kCudaBuilt)
      return detail::partial_amax_cuda(*table.impl().gpu, reduction, stream);
    fail_without_cuda("partial_amax");
  }
  stream.run([work = &table.impl(), words] {
    const TraceSpan span(TraceLane::kCompute, "partial_amax",
                         {{"tensors", work->plan->items.size()}});
    detail::by_reference() ? detail::partial_amax_ref(*work, words)
                           : detail::partial_amax_cpu(*work, words);
  });
}

void partial_cast(const PartialCastPlan& plan, const PartialCastTable& table, TensorView reduction,
                  Stream stream) {
  const std::byte* const words = check_call("partial_cast", plan, table, reduction, stream);
  if (plan.items().empty()) return;
  if (table.impl().gpu) {
    if constexpr (kCudaBuilt)
      return detail::partial_cast_cuda(*table.impl().gpu, reduction, stream);
    fail_without_cuda("partial_cast");
  }
  stream.run([work = &table.impl(), words] {
    const TraceSpan span(TraceLane::kCompute, "partial_cast",
                         {{"tensors", work->plan->items.size()}});
    detail::by_reference() ? detail::partial_cast_ref(*work, words)
                           : detail::partial_cast_cpu(*work, words);
  });
}

}  // namespace moiety::quant
