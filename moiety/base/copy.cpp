#include "moiety/base/copy.h"

#include <algorithm>
#include <cstring>

#include "moiety/base/gpu_runtime.h"

namespace moiety {
namespace {

gpu::Rows rows_of(const char* operation, const TensorView& x) {
  auto* data = static_cast<std::byte*>(x.raw());
  if (x.contiguous()) return {data, x.bytes(), x.bytes(), 1};
  const TensorView row(x.raw(), x.dtype(), x.sizes().subspan(1), x.strides().subspan(1));
  const int64_t width = bits(x.dtype()), pitch_bits = x.stride(0) * width;
  MOIETY_CHECK(row.contiguous() && x.stride(0) >= row.numel() && pitch_bits % 8 == 0 &&
                   row.numel() * width % 8 == 0,
               "{}: {} is not a run of contiguous rows of whole bytes", operation, x.describe());
  return {data, row.bytes(), pitch_bits / 8, x.size(0)};
}

// Cuts the contiguous one of the two into the rows of the other.
void match(gpu::Rows& a, const gpu::Rows& b) {
  if (a.count == 1 && b.count > 1) a = {a.data, b.bytes, b.bytes, b.count};
}

bool is_cpu(const TensorView& x) { return x.device().type == DeviceType::kCpu; }

}  // namespace

void copy(TensorView dst, TensorView src, Stream stream) {
  const bool same = dst.defined() && src.defined() && dst.dtype() == src.dtype() &&
                    std::ranges::equal(dst.sizes(), src.sizes());
  MOIETY_CHECK(same, "copy: dst is {}, src is {}", dst.describe(), src.describe());
  const Device device = stream.device();
  const bool host = device.type == DeviceType::kCpu;
  MOIETY_CHECK(!host || (is_cpu(dst) && is_cpu(src)),
               "copy: dst is on {}, src is on {}, the stream is the CPU's", name(dst.device()),
               name(src.device()));
  if (dst.numel() == 0) return;
  gpu::Rows to = rows_of("copy", dst), from = rows_of("copy", src);
  match(to, from);
  match(from, to);
  if (!host) return gpu::copy_rows(device.index, to, from, stream.cuda_stream());
  stream.run([=] {
    for (int64_t i = 0; i < to.count; ++i) {
      std::memcpy(to.data + i * to.pitch, from.data + i * from.pitch, to.bytes);
    }
  });
}

Tensor to_host(TensorView src, const Stream& stream) {
  Tensor out(src.dtype(), src.sizes());
  copy(out, src, stream);
  stream.synchronize();
  return out;
}

void fill_bytes(TensorView dst, uint8_t value, Stream stream) {
  MOIETY_CHECK(dst.defined(), "fill_bytes: dst is absent");
  check_device("fill_bytes", "dst", dst, stream);
  if (dst.numel() == 0) return;
  const gpu::Rows rows = rows_of("fill_bytes", dst);
  const Device device = stream.device();
  if (device.type == DeviceType::kCuda) {
    return gpu::fill_rows(device.index, rows, value, stream.cuda_stream());
  }
  stream.run([=] {
    for (int64_t i = 0; i < rows.count; ++i) {
      std::memset(rows.data + i * rows.pitch, value, rows.bytes);
    }
  });
}

}  // namespace moiety
