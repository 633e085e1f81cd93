#include <cmath>
#include <limits>
#include <map>
#include <mutex>
#include <optional>

#include "moiety/base/log.h"
#include "moiety/base/outside_capture.h"
#include "moiety/model/attention_cuda.h"
#include "moiety/model/cudnn_sdpa.h"

namespace moiety::model {
namespace {

// Shorter sequences are less than a tile of its kernels.
constexpr int64_t kShortest = 128;
// Of one launch.
constexpr int64_t kMostWorkspace = int64_t{2} << 30;

// How many dimensions of [sequences, groups, heads] a launch covers. q has no single stride over
// its heads where they lie in groups beside keys and values (attention.h): then the groups of one
// sequence are a launch's batch.
enum class Cover { kAll, kSequence, kGroup };

SdpaStrides strides_of(const HeadStrides& x, Cover cover, bool one_head) {
  if (cover != Cover::kAll) return {x.group, x.head ? x.head : x.group, x.row};
  return {x.sequence, one_head ? x.group : x.head, x.row};
}

SdpaShape shape_of(const AttentionJob& job, Cover cover) {
  const bool all = cover == Cover::kAll, one_head = job.heads == 1;
  SdpaShape s;
  s.backward = job.d_out.data != nullptr;
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

// Bytes of dS, which backward's workspace holds besides what does not grow with the square.
int64_t square_bytes(const SdpaShape& s) {
  const int64_t length = (s.length + 127) / 128 * 128;
  return s.backward ? s.batch * s.heads * length * length * 2 : 0;
}

// The largest launches that are possible.
std::optional<Cover> cover_of(const AttentionJob& job) {
  bool one_stride = true;
  for (const HeadStrides* x : {&job.q, &job.o, &job.d_out, &job.dq}) {
    one_stride &= x->group == job.heads * x->head;
  }
  for (const Cover cover : {Cover::kAll, Cover::kSequence, Cover::kGroup}) {
    if (cover == Cover::kAll && job.heads > 1 && !one_stride) continue;
    if (square_bytes(shape_of(job, cover)) <= kMostWorkspace) return cover;
  }
  return std::nullopt;
}

// What a GPU keeps between calls.
class Context {
 public:
  static Context& of(int device) {
    static std::mutex mutex;
    // Not destroyed: the CUDA run time may end before it.
    static auto& contexts = *new std::map<int, Context>;
    const std::lock_guard lock(mutex);
    return contexts.try_emplace(device).first->second;
  }

  // Null if cuDNN does not take the shape.
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

  // Launches of one call, in order.
  class Launcher {
   public:
    Launcher(Context& context, const CudnnPlan& plan, cudaStream_t stream)
        : context_(context),
          plan_(plan),
          lock_(context.mutex_),
          workspace_(context.workspace(stream, plan.workspace_bytes())) {
      cudnn_check(cudnn().set_stream(context.handle_, stream), "cudnnSetStream");
    }
    void run(std::span<const CudnnBinding> bindings) const {
      plan_.run(context_.handle_, bindings, workspace_);
    }

   private:
    Context& context_;
    const CudnnPlan& plan_;
    std::lock_guard<std::mutex> lock_;
    void* workspace_;
  };

 private:
  // Graphs that were captured with a smaller one keep it.
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

// Whether it computes the job as attention.h says. Before 9.16 backward reads past the end of
// lengths that are no multiple of 128.
bool fits(const AttentionJob& job) {
  const bool any_length = !job.d_out.data || cudnn().version >= 91600;
  return job.cudnn && job.dtype == DType::kBFloat16 && job.head_dim % 32 == 0 &&
         !job.document_start && job.queries == job.keys && job.queries >= kShortest &&
         (any_length || job.queries % 128 == 0);
}

struct Chosen {
  Cover cover = Cover::kAll;
  const CudnnPlan* plan = nullptr;
};

Chosen choose(const AttentionJob& job, int device) {
  if (!cudnn().available || !fits(job)) return {};
  const std::optional<Cover> cover = cover_of(job);
  if (!cover) return {};
  const CudaDeviceGuard guard(device);
  return {*cover, Context::of(device).plan(shape_of(job, *cover))};
}

const void* at(const HeadStrides& x, int64_t sequence, int64_t group) {
  return static_cast<const uint16_t*>(x.data) + sequence * x.sequence + group * x.group;
}

// The launch that begins with this sequence and group.
void launch(const AttentionJob& job, const Context::Launcher& launcher, int64_t sequence,
            int64_t group) {
  constexpr float kMinus = -std::numeric_limits<float>::infinity(), kUnit = 1;
  const int64_t row = (sequence * job.groups + group) * job.heads * job.queries;
  std::vector<CudnnBinding> bindings{{kQ, at(job.q, sequence, group)},
                                     {kK, at(job.k, sequence, group)},
                                     {kV, at(job.v, sequence, group)},
                                     {kO, at(job.o, sequence, group)},
                                     {kLse, job.lse + row},
                                     {kScale, &job.scale},
                                     {kMinusInfinity, &kMinus}};
  if (job.d_out.data) {
    bindings.insert(bindings.end(), {{kDOut, at(job.d_out, sequence, group)},
                                     {kDelta, job.delta + row},
                                     {kDq, at(job.dq, sequence, group)},
                                     {kDk, at(job.dk, sequence, group)},
                                     {kDv, at(job.dv, sequence, group)},
                                     {kOne, &kUnit}});
  }
  launcher.run(bindings);
}

}  // namespace

bool cudnn_takes(const AttentionJob& job, int device) { return choose(job, device).plan; }

void attention_cudnn(const AttentionJob& job, const Stream& stream) {
  const int device = stream.device().index;
  const auto [cover, plan] = choose(job, device);
  const CudaDeviceGuard guard(device);
  const Context::Launcher launcher(Context::of(device), *plan,
                                   static_cast<cudaStream_t>(stream.cuda_stream()));
  const int64_t sequences = cover == Cover::kAll ? 1 : job.sequences;
  const int64_t groups = cover == Cover::kGroup ? job.groups : 1;
  for (int64_t b = 0; b < sequences; ++b) {
    for (int64_t g = 0; g < groups; ++g) launch(job, launcher, b, g);
  }
}

const CudnnStatus& cudnn_status() {
  static const CudnnStatus status{cudnn().available, cudnn().version, cudnn().text};
  return status;
}

}  // namespace moiety::model
