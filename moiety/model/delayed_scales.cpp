#include "moiety/model/delayed_scales.h"

#include <algorithm>

#include "moiety/base/copy.h"
#include "moiety/base/error.h"
#include "moiety/model/parameters.h"

namespace moiety::model {
namespace {

void add(std::vector<ScaledTensor>& list, const std::string& linear, int64_t experts = 0) {
  for (const bool gradient : {false, true}) {
    list.push_back({.name = linear + (gradient ? ".amax_dy" : ".amax_x"),
                    .weight = linear + ".weight",
                    .expert = experts > 0,
                    .count = std::max<int64_t>(experts, 1),
                    .gradient = gradient});
  }
}

int64_t histories_of(const std::vector<ScaledTensor>& tensors) {
  int64_t count = 0;
  for (const ScaledTensor& t : tensors) count += t.count;
  return count;
}

DType element_of(const ScaledTensor& t) { return t.gradient ? DType::kE5M2 : DType::kE4M3; }

}  // namespace

std::vector<ScaledTensor> scaled_tensors(const Config& c) {
  std::vector<ScaledTensor> list;
  for (int64_t l = 0; l < c.layers; ++l) {
    const std::string prefix = layer_prefix(l);
    for (const char* name : {"attn.qkv", "attn.o"}) add(list, prefix + name);
    for (const char* name : {"fc1", "fc2"}) {
      if (!c.is_moe(l)) add(list, prefix + "mlp." + name);
      if (c.is_moe(l)) add(list, prefix + "moe.experts." + name, c.router.experts);
      if (c.is_moe(l) && c.shared_d_ffn > 0) add(list, prefix + "moe.shared." + name);
    }
  }
  return list;
}

int64_t delayed_scale_bytes(const Config& config, int64_t length) {
  constexpr int64_t kWords = 5;  // position, scale, its inverse, what was recorded, what was not
  return histories_of(scaled_tensors(config)) * (length + kWords) * int64_t{sizeof(float)};
}

DelayedScales::DelayedScales(const Config& config, int64_t length, OwnExperts own, Device device)
    : tensors_(scaled_tensors(config)), length_(length), count_(histories_of(tensors_)) {
  MOIETY_CHECK(length >= 1, "delayed scales: a history of {} steps", length);
  const char* name = "delayed scales";
  history_NL_ = Tensor(DType::kFloat32, {count_, length}, device, name);
  position_N_ = Tensor(DType::kInt32, {count_}, device, name);
  scale_N_ = Tensor(DType::kFloat32, {count_}, device, name);
  scale_inv_N_ = Tensor(DType::kFloat32, {count_}, device, name);
  step_amax_N_ = Tensor(DType::kFloat32, {count_}, device, name);
  unrecorded_N_ = Tensor(DType::kFloat32, {count_}, device, name);
  std::vector<quant::DelayedScalingItem> items;
  int64_t first = 0;
  for (const ScaledTensor& t : tensors_) {
    for (int64_t i = first; i < first + t.count; ++i) {
      quant::DelayedScaling one = state(i, 1, step_amax_N_);
      one.history = one.history.select(0);
      items.push_back({.state = one, .element = element_of(t)});
    }
    const int64_t begin = first + (t.expert ? own.first : 0), n = t.expert ? own.count : 1;
    Linear& linear = linears_[t.weight];
    (t.gradient ? linear.gradient : linear.input) = state(begin, n, step_amax_N_);
    if (!t.gradient) linear.unrecorded = state(begin, n, unrecorded_N_);
    first += t.count;
  }
  if (!items.empty()) table_.emplace(items);
  make_room(length);
  adopt(Stream::on(device));
}

quant::DelayedScaling DelayedScales::state(int64_t first, int64_t count,
                                           const TensorView& step_amax) const {
  const auto part = [&](const TensorView& all) { return all.slice(0, first, first + count); };
  return {part(history_NL_), part(position_N_), part(scale_N_), part(scale_inv_N_),
          part(step_amax)};
}

const quant::DelayedScaling& DelayedScales::input(const std::string& weight, bool records) const {
  const Linear& linear = linears_.at(weight);
  return records ? linear.input : linear.unrecorded;
}

const quant::DelayedScaling& DelayedScales::gradient(const std::string& weight) const {
  return linears_.at(weight).gradient;
}

void DelayedScales::update(comm::Communicator* world, const TensorView& skip,
                           const Stream& stream) {
  if (!table_) return;
  if (world) {
    // Magnitudes order as the integers of their bits: NaN over infinity over all others.
    const TensorView bits_N(step_amax_N_.view().raw(), DType::kInt32, {count_},
                            step_amax_N_.view().device());
    world->all_reduce(bits_N, comm::ReduceOp::kMax, stream).wait();
  }
  quant::update_delayed_scales(*table_, stream, skip);
}

std::vector<DelayedScales::History> DelayedScales::views_of(const Tensor& values_NL) const {
  std::vector<History> out;
  int64_t first = 0;
  for (const ScaledTensor& t : tensors_) {
    out.push_back({t.name, values_NL.view().slice(0, first, first + t.count)});
    first += t.count;
  }
  return out;
}

std::vector<DelayedScales::History> DelayedScales::histories(const Stream& stream) {
  on_host_ = to_host(history_NL_, stream);
  const Tensor position_N = to_host(position_N_, stream);
  for (int64_t i = 0; i < count_; ++i) {
    float* row = on_host_.data<float>() + i * length_;
    std::rotate(row, row + position_N.data<int32_t>()[i], row + length_);
  }
  return views_of(on_host_);
}

std::vector<DelayedScales::History> DelayedScales::make_room(int64_t saved_length) {
  on_host_ = Tensor(DType::kFloat32, {count_, saved_length});
  return views_of(on_host_);
}

void DelayedScales::adopt(const Stream& stream) {
  const int64_t saved = on_host_.view().size(1), kept = std::min(saved, length_);
  Tensor history_NL(DType::kFloat32, {count_, length_}), position_N(DType::kInt32, {count_}),
      scale_N(DType::kFloat32, {count_}), scale_inv_N(DType::kFloat32, {count_}),
      step_amax_N(DType::kFloat32, {count_});
  int64_t i = 0;
  for (const ScaledTensor& t : tensors_) {
    for (const int64_t end = i + t.count; i < end; ++i) {
      const float* from = on_host_.data<float>() + i * saved;
      std::copy(from + saved - kept, from + saved,
                history_NL.data<float>() + (i + 1) * length_ - kept);
      quant::scale_from_history({.history = history_NL.view().select(i),
                                 .position = position_N.view().slice(0, i, i + 1),
                                 .scale = scale_N.view().slice(0, i, i + 1),
                                 .scale_inv = scale_inv_N.view().slice(0, i, i + 1),
                                 .step_amax = step_amax_N.view().slice(0, i, i + 1)},
                                element_of(t));
    }
  }
  for (const auto& [to, from] :
       {std::pair{&history_NL_, &history_NL}, std::pair{&position_N_, &position_N},
        std::pair{&scale_N_, &scale_N}, std::pair{&scale_inv_N_, &scale_inv_N},
        std::pair{&step_amax_N_, &step_amax_N}, std::pair{&unrecorded_N_, &step_amax_N}}) {
    copy(*to, *from, stream);
  }
  stream.synchronize();
  on_host_ = Tensor();
}

}  // namespace moiety::model
