// The table of cases of tests/quant on a GPU: inputs copied there, outputs between guard bytes, and
// the CPU reference's results for the same.
#pragma once

#include <string>
#include <vector>

#include "moiety/base/copy.h"
#include "moiety/quant/quantize/quantize_job.h"
#include "tests/quant/cases.h"
#include "tests/support/gpu_test.h"
#include "tests/support/mirror.h"

namespace moiety::quant {

// A copy of a matrix on a GPU with its row stride; gaps hold NaN. Begins `offset` elements past an
// aligned address.
class GpuInput {
 public:
  GpuInput(const TensorView& host, const Stream& stream, int64_t offset = 0) {
    const int64_t stride = std::max(host.stride(0), host.size(1));
    memory_ = Buffer(byte_size(host.dtype(), offset + host.size(0) * stride), stream.device());
    fill_bytes(memory_.view(DType::kUInt8, {memory_.bytes()}), 0xFF, stream);
    const int64_t strides[] = {stride, 1};
    view_ = TensorView(memory_.data() + byte_size(host.dtype(), offset), host.dtype(), host.sizes(),
                       strides, stream.device());
    copy(view_, host, stream);
    stream.synchronize();
  }
  const TensorView& view() const { return view_; }
  operator const TensorView&() const { return view_; }

 private:
  Buffer memory_;
  TensorView view_;
};

// Guarded of tests/quant/cases.h, on a GPU.
class GpuGuarded {
 public:
  static constexpr int64_t kGuard = Guarded::kGuard;

  GpuGuarded(const QuantSpec& spec, int64_t rows, int64_t cols, Directions wanted,
             const Stream& stream, uint8_t poison = 0xA5)
      : GpuGuarded(spec, rows, cols, quantized_sizes(spec, rows, cols, wanted), 1, stream, poison) {
  }
  GpuGuarded(const QuantSpec& spec, int64_t rows, int64_t cols, const QuantizedSizes& sizes,
             int64_t flags, const Stream& stream, uint8_t poison = 0xA5)
      : stream_(stream), poison_(poison) {
    const ArraySpec flag_array{DType::kUInt32, 1, {flags, 0}};
    int64_t bytes = 0;
    for (const ArraySpec* a : {&sizes.row_data, &sizes.row_scales, &sizes.col_data,
                               &sizes.col_scales, &sizes.amax, &sizes.tensor_scale, &flag_array}) {
      bytes += room(*a);
    }
    memory_ = Buffer(bytes, stream.device());
    view_.spec = spec;
    view_.rows = rows;
    view_.cols = cols;
    view_.row_data = place(sizes.row_data);
    view_.row_scales = place(sizes.row_scales);
    view_.col_data = place(sizes.col_data);
    view_.col_scales = place(sizes.col_scales);
    view_.amax = place(sizes.amax);
    view_.tensor_scale = place(sizes.tensor_scale);
    view_.flags = place(flag_array);
    poison_all();
  }
  const QuantizedView& view() const { return view_; }
  operator const QuantizedView&() const { return view_; }

  // Poisons everything, as at first.
  void poison_all() {
    fill_bytes(whole(), poison_, stream_);
    fill_bytes(view_.flags, 0, stream_);
  }
  // The arrays that `host` has.
  void set(const QuantizedView& host) {
    const auto put = [&](const TensorView& to, const TensorView& from) {
      if (to.defined() && from.defined()) copy(to, from, stream_);
    };
    put(view_.row_data, host.row_data);
    put(view_.row_scales, host.row_scales);
    put(view_.col_data, host.col_data);
    put(view_.col_scales, host.col_scales);
    put(view_.amax, host.amax);
    put(view_.tensor_scale, host.tensor_scale);
    put(view_.flags, host.flags);
    stream_.synchronize();
  }
  // Empty if all arrays have the bytes of `expected`, and nothing was written outside of them.
  std::string difference_from(const QuantizedView& expected) const {
    Buffer image(memory_.bytes());
    copy(image.view(DType::kUInt8, {image.bytes()}), whole(), stream_);
    stream_.synchronize();
    const auto here = [&](const TensorView& x) {
      if (!x.defined()) return x;
      return TensorView(image.data() + (static_cast<std::byte*>(x.raw()) - memory_.data()),
                        x.dtype(), x.sizes());
    };
    QuantizedView got = view_;
    for (TensorView* x : {&got.row_data, &got.row_scales, &got.col_data, &got.col_scales, &got.amax,
                          &got.tensor_scale, &got.flags}) {
      *x = here(*x);
    }
    std::string out = difference(got, expected);
    for (const Part& part : parts_) {
      for (int64_t i = part.begin; i < part.begin + part.room; ++i) {
        const bool guard = i < part.begin + kGuard || i >= part.begin + kGuard + part.bytes;
        if (guard && image.data()[i] != std::byte{poison_}) {
          return out +
                 text("wrote at byte {} of an array of {}; ", i - part.begin - kGuard, part.bytes);
        }
      }
    }
    return out;
  }

 private:
  struct Part {
    int64_t begin, room, bytes;
  };
  static int64_t room(const ArraySpec& a) {
    return a.dims == 0 ? 0 : 2 * kGuard + (a.bytes() + 63) / 64 * 64;
  }
  TensorView whole() const { return memory_.view(DType::kUInt8, {memory_.bytes()}); }
  TensorView place(const ArraySpec& a) {
    if (a.dims == 0) return {};
    parts_.push_back({used_, room(a), a.bytes()});
    used_ += room(a);
    return {memory_.data() + parts_.back().begin + kGuard, a.dtype,
            std::span(a.sizes.data(), static_cast<size_t>(a.dims)), memory_.device()};
  }

  Stream stream_;
  uint8_t poison_;
  Buffer memory_;
  int64_t used_ = 0;
  std::vector<Part> parts_;
  QuantizedView view_;
};

// Options of the cases, and what of them lies on the GPU.
class QuantGpuTest : public GpuTest {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (IsSkipped()) return;
    rng_ = Buffer(sizeof(RngState), kGpu);
    set_rng(kTestRng);
  }

  void set_rng(RngState state) {
    copy(rng_.view(DType::kUInt8, {sizeof(RngState)}),
         TensorView(&state, DType::kUInt8, {sizeof(RngState)}), stream);
    stream.synchronize();
  }
  QuantizeOptions gpu_options(QuantizeOptions options = test_options()) const {
    options.rng = reinterpret_cast<const RngState*>(rng_.data());
    return options;
  }

 private:
  Buffer rng_;
};

// The reference's results for X; everything else as in an output of the GPU before anything runs.
inline Guarded reference(const TensorView& x, const QuantSpec& spec, Directions wanted,
                         const QuantizeOptions& options) {
  Guarded out(spec, x.size(0), x.size(1), wanted);
  quantize_reference(make_quantize_job("reference", x, out, options));
  return out;
}

}  // namespace moiety::quant
