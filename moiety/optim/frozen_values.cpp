#include "moiety/optim/frozen_values.h"

#include <algorithm>

#include "moiety/base/copy.h"
#include "moiety/formats/bf16.h"
#include "moiety/optim/initialize.h"

namespace moiety::optim {
namespace {

void widen(const TensorView& from, const TensorView& to) {
  const int64_t n = from.numel();
  float* out = to.data<float>();
  if (from.dtype() == DType::kFloat32) {
    std::copy_n(from.data<float>(), n, out);
  } else {
    std::copy_n(from.data<bf16>(), n, out);
  }
}

}  // namespace

FrozenValues::FrozenValues(int64_t elements, DType storage, Device device)
    : elements_(elements), storage_(storage), device_(device) {}

const TensorView& FrozenValues::open(const BucketWeights& weights) {
  if (open_.view().defined()) return open_.view();
  open_ = Tensor(DType::kFloat32, {elements_}, {}, "frozen weights");
  const TensorView& own = weights.own_storage();
  const TensorView values = own.defined() ? own : kept_.view();
  if (values.defined()) widen(to_host(values, Stream::on(device_)), open_);
  return open_.view();
}

void FrozenValues::publish(BucketWeights& weights, const Stream& stream) {
  TensorView master = open(weights);
  if (device_.type == DeviceType::kCuda) {
    master_ = Tensor(DType::kFloat32, {elements_}, device_, "frozen weights");
    copy(master_, master, stream);
    master = master_;
  }
  const TensorView& own = weights.own_storage();
  if (own.defined()) {
    kept_ = Tensor();
  } else if (!kept_.view().defined()) {
    kept_ = Tensor(storage_, {elements_}, device_, "frozen weights");
  }
  round_weights(master, own.defined() ? own : kept_.view(), stream);
  weights.set_master(master);
}

void FrozenValues::close(const Stream& stream) {
  if (master_.view().defined()) stream.synchronize();
  open_ = Tensor();
  master_ = Tensor();
}

}  // namespace moiety::optim
