#include "moiety/quant/delayed_scaling.h"

#include <vector>

#include "moiety/base/check_devices.h"
#include "moiety/base/cuda_built.h"
#include "moiety/base/trace.h"
#include "moiety/quant/delayed_scaling_cuda.h"

namespace moiety::quant {
namespace {

// A larger margin makes the scales of ordinary maxima overflow or vanish.
constexpr int kMaxMargin = 64;

void check_state(const char* operation, const DelayedScaling& state) {
  check_tensor(operation, "history", state.history, DType::kFloat32, {-1});
  MOIETY_CHECK(state.history.size(0) >= 1 && state.history.contiguous(),
               "{}: history is {}, expected at least one value without gaps", operation,
               state.history.describe());
  check_tensor(operation, "position", state.position, DType::kInt32, {1});
  check_tensor(operation, "scale", state.scale, DType::kFloat32, {1});
  check_tensor(operation, "scale_inv", state.scale_inv, DType::kFloat32, {1});
  check_tensor(operation, "step_amax", state.step_amax, DType::kFloat32, {1});
}

void check_place(const char* operation, const DelayedScalingItem& item, Device place) {
  const DelayedScaling& s = item.state;
  check_devices(operation,
                {{"history", s.history},
                 {"position", s.position},
                 {"scale", s.scale},
                 {"scale_inv", s.scale_inv},
                 {"step_amax", s.step_amax},
                 {"flags", item.flags}},
                place);
}

}  // namespace

struct DelayedScalingTable::Impl {
  std::vector<DelayedScalingItem> items;
  AmaxAlgorithm algorithm;
  int margin;
  moiety::Device place;                  // place of all states
  std::shared_ptr<const Device> device;  // set if that is a GPU
};

DelayedScalingTable::DelayedScalingTable(std::span<const DelayedScalingItem> items,
                                         AmaxAlgorithm algorithm, int margin)
    : impl_(new Impl{{items.begin(), items.end()}, algorithm, margin, {}, {}}) {
  const char* op = "DelayedScalingTable";
  MOIETY_CHECK(margin >= -kMaxMargin && margin <= kMaxMargin, "{}: margin={} is not in [-{}, {}]",
               op, margin, kMaxMargin, kMaxMargin);
  if (!items.empty()) impl_->place = items[0].state.history.device();
  for (const DelayedScalingItem& item : items) {
    check_state(op, item.state);
    check_place(op, item, impl_->place);
    MOIETY_CHECK(item.element == DType::kE4M3 || item.element == DType::kE5M2,
                 "{}: element is {}, expected e4m3 or e5m2", op, name(item.element));
    if (item.flags.defined()) check_tensor(op, "flags", item.flags, DType::kUInt32, {1});
  }
  if (impl_->place.type == DeviceType::kCpu) return;
  require_device(op, impl_->place);
  if constexpr (kCudaBuilt) {
    impl_->device =
        detail::make_delayed_scaling_table(impl_->items, algorithm, margin, impl_->place);
  }
}

DelayedScalingTable::~DelayedScalingTable() = default;
DelayedScalingTable::DelayedScalingTable(DelayedScalingTable&&) noexcept = default;
DelayedScalingTable& DelayedScalingTable::operator=(DelayedScalingTable&&) noexcept = default;

std::span<const DelayedScalingItem> DelayedScalingTable::items() const { return impl_->items; }
AmaxAlgorithm DelayedScalingTable::algorithm() const { return impl_->algorithm; }
int DelayedScalingTable::margin() const { return impl_->margin; }
const DelayedScalingTable::Device* DelayedScalingTable::device() const {
  return impl_->device.get();
}

void update_delayed_scales(const DelayedScalingTable& table, Stream stream, TensorView skip) {
  const char* op = "update_delayed_scales";
  if (table.items().empty()) return;
  const TensorView& any = table.items()[0].state.history;
  if (skip.defined()) check_tensor(op, "skip", skip, DType::kInt32, {1});
  check_devices(op, {{"history", any}, {"skip", skip}}, stream);
  const int32_t* skips = skip.defined() ? skip.data<int32_t>() : nullptr;
  if (table.device()) {
    if constexpr (kCudaBuilt) {
      return detail::update_delayed_scales_cuda(*table.device(), skips, stream);
    }
    fail_without_cuda(op);
  }
  stream.run([&table, skips] {
    const TraceSpan span(TraceLane::kCompute, "update_delayed_scales",
                         {{"tensors", static_cast<int64_t>(table.items().size())}});
    detail::update_delayed_scales_cpu(table, skips);
  });
}

void scale_from_history(const DelayedScaling& state, DType element, int margin) {
  const char* op = "scale_from_history";
  check_state(op, state);
  check_place(op, {state}, {});
  MOIETY_CHECK(element == DType::kE4M3 || element == DType::kE5M2,
               "{}: element is {}, expected e4m3 or e5m2", op, name(element));
  detail::scale_from_history_cpu(state, element, margin);
}

void oldest_first(const DelayedScaling& state, TensorView out_L, Stream stream) {
  const char* op = "oldest_first";
  check_state(op, state);
  check_tensor(op, "out_L", out_L, DType::kFloat32, {state.history.size(0)});
  MOIETY_CHECK(out_L.contiguous(), "{}: out_L is {}", op, out_L.describe());
  check_place(op, {state}, stream.device());
  if (check_devices(op, {{"out_L", out_L}}, stream)) {
    if constexpr (kCudaBuilt) return detail::oldest_first_cuda(state, out_L, stream);
    fail_without_cuda(op);
  }
  stream.run([state, out_L] { detail::oldest_first_cpu(state, out_L); });
}

}  // namespace moiety::quant
