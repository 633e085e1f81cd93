#include <cmath>
#include <limits>
#include <map>
#include <mutex>
#include <optional>

#include "moiety/base/log.h"
#include "moiety/base/outside_capture.h"
#include "moiety/base/per_device.h"
#include "moiety/base/trace.h"
#include "moiety/nn/attention_cuda.h"
#include "moiety/nn/cudnn_sdpa.h"

namespace moiety::nn {
namespace {

// The shortest sequence for cuDNN; a shorter one is less than a tile of its kernels.
constexpr int64_t kShortest = 128;
// Bytes of workspace that one launch may take.
constexpr int64_t kMostWorkspace = int64_t{2} << 30;
// Rows of all heads that keep a GPU busy: 1024 tiles.
constexpr int64_t kFullLaunch = 1024 * 128;

// The part of [sequences, groups, heads] that a launch covers. Where q's heads lie in groups beside
// keys and values (attention.h), q has no single stride over its heads: then q is packed, or the
// groups of one sequence are a launch's batch.
enum class Cover { kAll, kSequence, kGroup };

SdpaStrides strides_of(const HeadStrides& x, Cover cover, bool one_head) {
  if (cover != Cover::kAll) return {x.group, x.head ? x.head : x.group, x.row};
  return {x.sequence, one_head ? x.group : x.head, x.row};
}

SdpaShape shape_of(const AttentionJob& job, Cover cover) {
  const bool all = cover == Cover::kAll, one_head = job.heads == 1;
  SdpaShape s;
  s.backward = job.backward;
  s.batch = all ? job.sequences : cover == Cover::kSequence ? job.groups : 1;
  s.kv_heads = all ? job.groups : 1;
  s.heads = s.kv_heads * job.heads;
  s.length = job.queries;
  s.head_dim = job.head_dim;
  for (const auto& [to, from] : {std::pair{&s.q, &job.q}, std::pair{&s.o, &job.o},
                                 std::pair{&s.d_out, &job.d_out}, std::pair{&s.dq, &job.dq}}) {
    *to = strides_of(*from, cover, one_head);
  }
  for (const auto& [to, from] : {std::pair{&s.k, &job.k}, std::pair{&s.v, &job.v},
                                 std::pair{&s.dk, &job.dk}, std::pair{&s.dv, &job.dv}}) {
    *to = strides_of(*from, cover, true);
  }
  return s;
}

// Bytes of dS in backward's workspace: the part that grows with the square of the length.
int64_t square_bytes(const SdpaShape& s) {
  const int64_t length = (s.length + 127) / 128 * 128;
  return s.backward ? s.batch * s.heads * length * length * 2 : 0;
}

// The strides of heads without gaps.
HeadStrides packed(const AttentionJob& job, void* data) {
  const int64_t group = job.heads * job.head_dim, row = job.groups * group;
  return {data, job.queries * row, row, group, job.head_dim};
}

int64_t packed_bytes(const AttentionJob& job) {
  const int64_t elements = job.sequences * job.queries * job.groups * job.heads * job.head_dim;
  return (2 * elements + 255) / 256 * 256;
}

// Whether the heads of each group and token lie at equal distances, so that one copy packs them.
bool can_be_packed(const AttentionJob& job, const HeadStrides& x) {
  return !x.data || (x.head == job.head_dim && x.row == job.groups * x.group &&
                     x.sequence == job.queries * x.row);
}

// The way in which a call is cut into launches.
struct Way {
  Cover cover = Cover::kAll;
  bool pack = false;  // q is packed before the launch, dq spread after it
};

// The way with the fewest launches. q is only copied where launches of one sequence would be small.
std::optional<Way> way_of(const AttentionJob& job) {
  const auto one_stride = [&](const HeadStrides& x) {
    return job.heads == 1 || x.group == job.heads * x.head;
  };
  const auto fits = [&](Cover cover) {
    return square_bytes(shape_of(job, cover)) <= kMostWorkspace;
  };
  if (one_stride(job.o) && one_stride(job.d_out) && fits(Cover::kAll)) {
    if (one_stride(job.q) && one_stride(job.dq)) return Way{};
    if (job.sequences > 1 && job.groups * job.heads * job.queries < kFullLaunch &&
        can_be_packed(job, job.q) && can_be_packed(job, job.dq)) {
      return Way{Cover::kAll, true};
    }
  }
  for (const Cover cover : {Cover::kSequence, Cover::kGroup}) {
    if (fits(cover)) return Way{cover, false};
  }
  return std::nullopt;
}

// The state that a GPU keeps between calls: plans and workspaces.
class Context {
 public:
  // The plan of the shape; null if cuDNN does not take it.
  const CudnnPlan* plan(const SdpaShape& shape) {
    const std::lock_guard lock(mutex_);
    const auto [it, is_new] = plans_.try_emplace(shape);
    if (is_new) {
      try {
        const OutsideCapture relaxed;
        if (!handle_) cudnn_check(cudnn().create(&handle_), "cudnnCreate");
        it->second = sdpa_plan(handle_, shape);
      } catch (const Error& e) {
        log(LogLevel::kWarning, "attention: Moiety's kernels in place of cuDNN's: {}", e.what());
      }
    }
    return it->second ? &*it->second : nullptr;
  }

  // What the launches of one call need; the next call waits until this is gone.
  struct Session {
    std::unique_lock<std::mutex> lock;
    cudnnHandle_t handle = nullptr;
    std::byte *packed = nullptr, *workspace = nullptr;  // memory of the call, and of its plan
  };
  // `given` is that memory, or null for the stream's own.
  Session session(const CudnnPlan& plan, int64_t packed_bytes, void* given, cudaStream_t stream) {
    std::unique_lock lock(mutex_);
    void* memory = given ? given : workspace(stream, packed_bytes + plan.workspace_bytes());
    auto* const packed = static_cast<std::byte*>(memory);
    cudnn_check(cudnn().set_stream(handle_, stream), "cudnnSetStream");
    return {std::move(lock), handle_, packed, packed + packed_bytes};
  }

 private:
  // Graphs that were captured with a smaller workspace keep using that one.
  void* workspace(cudaStream_t stream, int64_t bytes) {
    if (bytes == 0) return nullptr;
    std::map<int64_t, void*>& of_stream = workspaces_[stream];
    if (const auto it = of_stream.lower_bound(bytes); it != of_stream.end()) return it->second;
    const OutsideCapture relaxed;
    void* out = nullptr;
    if (cudaMalloc(&out, bytes) == cudaErrorMemoryAllocation) {
      cudaGetLastError();
      fail(ErrorKind::kOutOfMemory, "attention: no {} bytes for the workspace of cuDNN", bytes);
    }
    MOIETY_CUDA_CHECK(cudaGetLastError());
    return of_stream[bytes] = out;
  }

  std::mutex mutex_;
  cudnnHandle_t handle_ = nullptr;
  std::map<SdpaShape, std::optional<CudnnPlan>> plans_;
  std::map<cudaStream_t, std::map<int64_t, void*>> workspaces_;
};

// Whether cuDNN computes the job as attention.h says. Before 9.16 its backward reads past the end
// of lengths that are no multiple of 128.
bool fits(const AttentionJob& job) {
  const bool any_length = !job.backward || cudnn().version >= 91600;
  return job.cudnn && job.dtype == DType::kBFloat16 && job.head_dim % 32 == 0 &&
         !job.document_start && job.queries == job.keys && job.queries >= kShortest &&
         (any_length || job.queries % 128 == 0);
}

struct Chosen {
  Way way;
  const CudnnPlan* plan = nullptr;
};

Chosen choose(const AttentionJob& job, int device) {
  if (!cudnn().available || !fits(job)) return {};
  const std::optional<Way> way = way_of(job);
  if (!way) return {};
  AttentionJob planned = job;
  if (way->pack) {
    planned.q = packed(job, job.q.data);
    planned.dq = packed(job, job.dq.data);
  }
  const CudaDeviceGuard guard(device);
  return {*way, per_device<Context>(device).plan(shape_of(planned, way->cover))};
}

// Bytes for packed heads, which come before the plan's own.
int64_t bytes_to_pack(const AttentionJob& job, const Way& way) {
  return way.pack ? (job.backward ? 2 : 1) * packed_bytes(job) : 0;
}

const void* at(const HeadStrides& x, int64_t sequence, int64_t group) {
  return static_cast<const uint16_t*>(x.data) + sequence * x.sequence + group * x.group;
}

// The tensors of the launch that begins with this sequence and group.
std::vector<CudnnBinding> bindings_of(const AttentionJob& job, int64_t sequence, int64_t group) {
  static constexpr float kMinus = -std::numeric_limits<float>::infinity(), kUnit = 1;
  const int64_t row = (sequence * job.groups + group) * job.heads * job.queries;
  std::vector<CudnnBinding> bindings{{kQ, at(job.q, sequence, group)},
                                     {kK, at(job.k, sequence, group)},
                                     {kV, at(job.v, sequence, group)},
                                     {kO, at(job.o, sequence, group)},
                                     {kLse, job.lse + row},
                                     {kScale, &job.scale},
                                     {kMinusInfinity, &kMinus}};
  if (job.backward) {
    bindings.insert(bindings.end(), {{kDOut, at(job.d_out, sequence, group)},
                                     {kDelta, job.delta + row},
                                     {kDq, at(job.dq, sequence, group)},
                                     {kDk, at(job.dk, sequence, group)},
                                     {kDv, at(job.dv, sequence, group)},
                                     {kOne, &kUnit}});
  }
  return bindings;
}

}  // namespace

bool cudnn_takes(const AttentionJob& job, int device) { return choose(job, device).plan; }

int64_t attention_cudnn_workspace(const AttentionJob& job, int device) {
  const auto [way, plan] = choose(job, device);
  return plan ? bytes_to_pack(job, way) + plan->workspace_bytes() : 0;
}

void attention_cudnn(const AttentionJob& job, const TensorView& given, const Stream& stream) {
  const int device = stream.device().index;
  const auto [way, plan] = choose(job, device);
  const TraceSpan span(TraceLane::kCompute,
                       job.backward ? "attention_backward cudnn" : "attention cudnn");
  const CudaDeviceGuard guard(device);
  const auto cuda_stream = static_cast<cudaStream_t>(stream.cuda_stream());
  const int64_t tokens = job.sequences * job.queries * job.groups, width = job.heads * job.head_dim;
  const int64_t packed_size = bytes_to_pack(job, way);
  MOIETY_CHECK(!given.defined() || given.bytes() >= packed_size + plan->workspace_bytes(),
               "attention: workspace is {}, expected at least {} bytes", given.describe(),
               packed_size + plan->workspace_bytes());
  const Context::Session session =
      per_device<Context>(device).session(*plan, packed_size, given.raw(), cuda_stream);
  const auto copy = [&](const HeadStrides& to, const HeadStrides& from) {
    MOIETY_CUDA_CHECK(cudaMemcpy2DAsync(to.data, 2 * to.group, from.data, 2 * from.group, 2 * width,
                                        tokens, cudaMemcpyDeviceToDevice, cuda_stream));
  };
  AttentionJob launched = job;
  if (way.pack) {
    launched.q = packed(job, session.packed);
    if (job.backward) launched.dq = packed(job, session.packed + packed_bytes(job));
    copy(launched.q, job.q);
  }
  const int64_t sequences = way.cover == Cover::kAll ? 1 : job.sequences;
  const int64_t groups = way.cover == Cover::kGroup ? job.groups : 1;
  for (int64_t b = 0; b < sequences; ++b) {
    for (int64_t g = 0; g < groups; ++g) {
      const CudnnDescriptor pack = plan->pack(bindings_of(launched, b, g), session.workspace);
      cudnn_check(cudnn().execute(session.handle, plan->get(), pack.get()), "cudnnBackendExecute");
    }
  }
  if (way.pack && job.backward) copy(job.dq, launched.dq);
}

int64_t cudnn_workspace(const AttentionSizes& sizes) {
  AttentionJob job;
  job.backward = true;
  job.sequences = sizes.sequences;
  job.queries = job.keys = sizes.length;
  job.groups = sizes.kv_heads;
  job.heads = sizes.heads / sizes.kv_heads;
  job.head_dim = sizes.head_dim;
  // The strides are those that split_heads leaves; the addresses do not matter.
  const int64_t group = (job.heads + 2) * job.head_dim, row = job.groups * group;
  job.k = job.v = job.dk = job.dv = {&job, sizes.length * row, row, group};
  job.q = job.dq = {&job, sizes.length * row, row, group, job.head_dim};
  job.o = job.d_out = packed(job, &job);
  if (!cudnn().available || !fits(job)) return 0;
  const std::optional<Way> way = way_of(job);
  if (!way) return 0;
  return square_bytes(shape_of(job, way->cover)) + (way->pack ? 2 * packed_bytes(job) : 0);
}

const CudnnStatus& cudnn_status() {
  static const CudnnStatus status{cudnn().available, cudnn().version, cudnn().text};
  return status;
}

}  // namespace moiety::nn
