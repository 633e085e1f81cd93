#include "moiety/checkpoint/staging.h"

#include <array>

#include "moiety/base/copy.h"
#include "moiety/base/error.h"
#include "moiety/base/gpu_runtime.h"
#include "moiety/checkpoint/digest.h"

namespace moiety::checkpoint {
namespace {

Buffer host_buffer(Device device, int64_t bytes) {
  const char* what = "piece of a checkpoint";
  try {
    return Buffer::host_for(device, bytes, what);
  } catch (const Error& e) {
    if (device.type == DeviceType::kCpu || e.kind() != ErrorKind::kOutOfMemory) throw;
    return Buffer(bytes, what);
  }
}

}  // namespace

std::byte* Staging::reserve(int64_t bytes, Device device) {
  if (device.type == DeviceType::kCuda) gpu::make_current(device.index);
  if (device.type == DeviceType::kCuda && stream_.device() != device) stream_ = Stream::on(device);
  if (buffer_.bytes() < bytes) {
    buffer_ = {};
    buffer_ = host_buffer(device, bytes);
  }
  return buffer_.data();
}

const std::byte* Staging::fetch(const void* data, int64_t bytes, Device device) {
  if (device.type == DeviceType::kCpu) return static_cast<const std::byte*>(data);
  std::byte* host = reserve(bytes, device);
  copy(TensorView(host, DType::kUInt8, {bytes}),
       TensorView(const_cast<void*>(data), DType::kUInt8, {bytes}, device), stream_);
  stream_.synchronize();
  return host;
}

void Staging::put(const Box& region, const Box& from, const StatePiece& to) {
  const int64_t element_bytes = bits(to.dtype) / 8;
  auto* destination = static_cast<std::byte*>(to.data);
  if (to.device.type == DeviceType::kCpu) {
    return copy_region(region, element_bytes, from, buffer_.data(), to.box, destination);
  }
  for (const RowCopy& c : row_copies(region, element_bytes, from, to.box)) {
    const std::array<int64_t, 2> sizes{c.rows, c.bytes}, from_strides{c.from_pitch, 1},
        to_strides{c.to_pitch, 1};
    copy(TensorView(destination + c.to, DType::kUInt8, sizes, to_strides, to.device),
         TensorView(buffer_.data() + c.from, DType::kUInt8, sizes, from_strides), stream_);
  }
}

Device gpu_of(const char* operation, const StateView& view) {
  Device gpu;
  for (const StatePiece& p : view) {
    if (p.device.type == DeviceType::kCpu) continue;
    MOIETY_CHECK(gpu.type == DeviceType::kCpu || gpu == p.device,
                 "{}: {}/{} is on {}, but others are on {}", operation, p.slot, p.tensor,
                 name(p.device), name(gpu));
    gpu = p.device;
  }
  return gpu;
}

uint64_t digest(const StatePiece& piece, Staging& staging) {
  const auto* data = static_cast<const std::byte*>(piece.data);
  if (piece.device.type == DeviceType::kCpu) {
    return digest(data, piece.dtype, piece.box, piece.shape);
  }
  std::vector<Box> parts;
  cut_box(piece.box, bits(piece.dtype) / 8, kStagingBytes, parts);
  uint64_t sum = 0;
  for (const Box& part : parts) {
    const int64_t bytes = byte_size(piece.dtype, volume(part));
    sum += digest(staging.fetch(data, bytes, piece.device), piece.dtype, part, piece.shape);
    data += bytes;
  }
  return sum;
}

}  // namespace moiety::checkpoint
