#include "moiety/optim/weight_store.h"

#include "moiety/base/copy.h"
#include "moiety/base/error.h"
#include "moiety/optim/initialize.h"
#include "moiety/optim/state_pieces.h"

namespace moiety::optim {

WeightStore::WeightStore(std::vector<ParamSpec> specs, DType storage, Device device)
    : specs_(std::move(specs)) {
  MOIETY_CHECK(storage == DType::kFloat32 || storage == DType::kBFloat16,
               "weight store: {} must be float32 or bfloat16", name(storage));
  check_specs(specs_);
  parameters_.resize(specs_.size());
  for (size_t p = 0; p < specs_.size(); ++p) parameters_[p].spec = specs_[p];
  for (const BucketLayout& layout : layout_buffers(specs_, gtp::Grid{})) {
    Bucket& b = buckets_.emplace_back();
    b.layout = layout;
    b.runs = segment_runs(specs_, layout, 0);
    b.memory = Buffer(byte_size(storage, layout.length), device, "weights");
    b.weights = b.memory.view(storage, {layout.length});
    for (const BucketLayout::Slot& slot : layout.slots) {
      Parameter& p = parameters_[slot.parameter];
      p.weight = slot_view(b.weights, slot, p.spec);
    }
  }
}

void WeightStore::stage() {
  for (Bucket& b : buckets_) {
    if (b.staging.defined()) continue;
    b.staging = b.weights;
    if (!b.staged()) continue;
    b.staging_memory = Buffer(byte_size(DType::kFloat32, b.layout.length), "loaded weights");
    b.staging = b.staging_memory.view(DType::kFloat32, {b.layout.length});
  }
}

StateView WeightStore::state_view() {
  stage();
  StateView view;
  for (const Bucket& b : buckets_) append_pieces(specs_, b.runs, "weight", b.staging, view);
  return view;
}

void WeightStore::publish(Stream stream) {
  for (Bucket& b : buckets_) {
    MOIETY_CHECK(b.staging.defined(), "weight store: publish without state_view before it");
    if (b.staged()) {
      Tensor there;
      TensorView loaded = b.staging;
      if (b.weights.device() != loaded.device()) {
        there = Tensor(DType::kFloat32, loaded.sizes(), b.weights.device(), "loaded weights");
        copy(there, loaded, stream);
        loaded = there;
      }
      round_weights(loaded, b.weights, stream);
      stream.synchronize();
    }
    b.staging = TensorView();
    b.staging_memory = Buffer();
  }
}

void WeightStore::initialize(uint64_t seed, Stream stream) {
  stage();
  for (Bucket& b : buckets_) optim::initialize(specs_, b.runs, seed, b.staging, Stream());
  publish(stream);
}

}  // namespace moiety::optim
