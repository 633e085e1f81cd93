#include <cmath>

#include "moiety/base/launch.cuh"
#include "moiety/formats/quantized.h"
#include "moiety/quant/delayed_scaling_cuda.h"
#include "moiety/quant/device_table.h"
#include "moiety/quant/scale_math.h"

namespace moiety::quant {
namespace {

constexpr int kWarp = 32, kThreads = 128, kCopyThreads = 256;

// The state of one tensor.
struct State {
  float* history;
  int64_t length;
  int32_t* position;
  float *scale, *scale_inv, *step_amax;
  uint32_t* flags;  // may be null
  float target;     // the largest value of a code, less the margin
};

State resolve(const DelayedScaling& s) {
  return {s.history.data<float>(),
          s.history.size(0),
          s.position.data<int32_t>(),
          s.scale.data<float>(),
          s.scale_inv.data<float>(),
          s.step_amax.data<float>(),
          nullptr,
          0.0f};
}

__device__ int64_t ring_position(const State& s) {
  return static_cast<uint32_t>(*s.position) % s.length;
}

// The largest value of the history once `newest` stands at `at`, given to all lanes of a warp.
__device__ float largest(const State& s, int64_t at, float newest) {
  uint32_t amax = abs_bits(newest);
  for (int64_t i = threadIdx.x % kWarp; i < s.length; i += kWarp) {
    if (i != at) amax = max(amax, abs_bits(s.history[i]));
  }
  return __uint_as_float(__reduce_max_sync(0xFFFFFFFFu, amax));
}

// One warp per tensor.
__global__ void __launch_bounds__(kThreads)
    update_states(const State* states, int64_t count, AmaxAlgorithm algorithm,
                  const int32_t* skip) {
  const int64_t i = int64_t{blockIdx.x} * (kThreads / kWarp) + threadIdx.x / kWarp;
  if (i >= count) return;
  const State s = states[i];
  const float newest = *s.step_amax;
  const int64_t at = ring_position(s);
  const float amax = algorithm == AmaxAlgorithm::kMax ? largest(s, at, newest) : newest;
  __syncwarp();  // all lanes have read
  if (threadIdx.x % kWarp != 0) return;
  *s.step_amax = 0;
  if (skip && *skip != 0) return;
  if (!is_finite(newest)) {
    if (s.flags) atomicOr(s.flags, kFlagNonFinite);
    return;
  }
  if (newest == 0) return;
  s.history[at] = newest;
  *s.position = static_cast<int32_t>((at + 1) % s.length);
  const Fp8Scale scale = fp8_scale_of(capped_quotient(s.target, amax));
  *s.scale = scale.encode;
  *s.scale_inv = scale.decode;
}

__global__ void __launch_bounds__(kCopyThreads) copy_oldest_first(State s, float* out) {
  const int64_t i = int64_t{blockIdx.x} * kCopyThreads + threadIdx.x;
  if (i < s.length) out[i] = s.history[(ring_position(s) + i) % s.length];
}

}  // namespace

struct DelayedScalingTable::Device {
  Buffer states;
  int64_t count;
  AmaxAlgorithm algorithm;
};

namespace detail {

std::shared_ptr<const DelayedScalingTable::Device> make_delayed_scaling_table(
    std::span<const DelayedScalingItem> items, AmaxAlgorithm algorithm, int margin,
    moiety::Device device) {
  std::vector<State> states;
  for (const DelayedScalingItem& item : items) {
    states.push_back(resolve(item.state));
    if (item.flags.defined()) states.back().flags = item.flags.data<uint32_t>();
    states.back().target = std::ldexp(fp8_max_of(item.element), -margin);
  }
  const Stream stream = Stream::on(device);
  auto table = std::make_shared<DelayedScalingTable::Device>();
  table->states = upload(states, "table of delayed scales", stream);
  table->count = std::ssize(states);
  table->algorithm = algorithm;
  stream.synchronize();
  return table;
}

void update_delayed_scales_cuda(const DelayedScalingTable::Device& table, const int32_t* skip,
                                const Stream& stream) {
  launch("update_delayed_scales", update_states,
         {blocks_for(table.count, kThreads / kWarp), kThreads}, stream,
         reinterpret_cast<const State*>(table.states.data()), table.count, table.algorithm, skip);
}

void oldest_first_cuda(const DelayedScaling& state, const TensorView& out_L, const Stream& stream) {
  const State s = resolve(state);
  launch("oldest_first", copy_oldest_first, {blocks_for(s.length, kCopyThreads), kCopyThreads},
         stream, s, out_L.data<float>());
}

}  // namespace detail
}  // namespace moiety::quant
