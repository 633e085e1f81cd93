#include "moiety/train/step/step_feed.h"

#include <cstring>

namespace moiety::train {
namespace {

constexpr int64_t kHead = 64;  // bytes before the tensors: the number of the micro-step

}  // namespace

BatchFeed::BatchFeed(int64_t sequences, int64_t seq_len, data::BatchParts parts, int64_t ahead,
                     Device device, int64_t held)
    : sequences_(sequences),
      seq_len_(seq_len),
      tensor_bytes_(padded_bytes(byte_size(DType::kInt32, sequences * seq_len))),
      parts_(parts),
      ring_(kHead + (2 + int64_t{parts.positions} + int64_t{parts.padding}) * tensor_bytes_, ahead,
            device, "batches", held) {}

void BatchFeed::put(const data::Batch& batch, uint64_t micro_step) {
  std::byte* at = ring_.slot(put_++);
  std::memcpy(at, &micro_step, sizeof(micro_step));
  at += kHead;
  for (const TensorView* x :
       {&batch.token_BS, &batch.target_BS, &batch.position_BS, &batch.routed_BS}) {
    if (!x->defined()) continue;
    std::memcpy(at, x->raw(), static_cast<size_t>(x->bytes()));
    at += tensor_bytes_;
  }
}

model::Batch BatchFeed::fetch(const Stream& stream) {
  ring_.fetch(stream);
  auto* at = static_cast<std::byte*>(ring_.block().raw());
  const Device device = ring_.block().device();
  model::Batch batch;
  batch.micro_step_at = TensorView(at, DType::kUInt64, {1}, device);
  at += kHead;
  const auto next = [&](DType dtype = DType::kInt32) {
    const TensorView x(at, dtype, {sequences_, seq_len_}, device);
    at += tensor_bytes_;
    return x;
  };
  batch.token_BS = next();
  batch.target_BS = next();
  if (parts_.positions) batch.position_BS = next();
  if (parts_.padding) batch.routed_BS = next(DType::kUInt8);
  return batch;
}

}  // namespace moiety::train
