#include <algorithm>
#include <utility>

#include "moiety/base/cuda_check.cuh"
#include "moiety/base/gpu_runtime.h"
#include "moiety/base/log.h"
#include "moiety/comm/fault_pages.h"
#include "moiety/comm/mapped/fault_text.h"
#include "moiety/comm/mapped/link.h"

namespace moiety::comm::mapped {
namespace {

// The id of the capture that the stream is in; 0: none.
uint64_t capture_of(const Stream& stream) {
  cudaStreamCaptureStatus status{};
  unsigned long long id = 0;
  MOIETY_CUDA_CHECK(cudaStreamGetCaptureInfo(static_cast<cudaStream_t>(stream.cuda_stream()),
                                             &status, &id, nullptr, nullptr, nullptr, nullptr));
  return status == cudaStreamCaptureStatusActive ? id : 0;
}

// Note [Few operations under way]
//
// A queue of the GPU takes some thousand launches. The thread that stands before a full one holds a
// lock of the driver without which no other thread of the process makes an event or a stream; and
// where that thread's rank is the one whose operation the full queue waits for, all stand still. So
// the host waits for the GPU before a queue can fill: at most kAhead operations of a link are under
// way, which is more than the GPU needs never to wait for the host. A graph is one launch.
constexpr uint64_t kAhead = 64;

// Note [Events are made early]
//
// A copy to or from host memory that is not pinned holds the same lock until it is done. Where what
// it waits for on the GPU waits for another rank of the process, and that rank makes an event, the
// two stand still; so what operations record is made before there are any.

FaultPages<FaultPage>& fault_pages() {
  static auto& pages = *new FaultPages<FaultPage>("fault page of a communicator");
  return pages;
}

// The copies at the beginning of these steps that one kernel makes, in any order.
std::span<const Step> joined_copies(std::span<const Step> steps) {
  size_t n = 0;
  const auto depends = [&](const CopyStep& copy) {
    return std::any_of(steps.begin(), steps.begin() + n, [&](const Step& before) {
      return copy.from < before.copy.to + before.copy.bytes &&
             before.copy.to < copy.from + copy.bytes;
    });
  };
  while (n < std::min<size_t>(steps.size(), kMostMoves) && steps[n].kind == Step::Kind::kCopy &&
         joins_copy(steps[n].copy) && !depends(steps[n].copy)) {
    ++n;
  }
  return steps.first(n);
}

}  // namespace

Link::Link(Communicator& comm, Device gpu, const GpuLinkOptions& options)
    : comm_(&comm),
      gpu_(gpu),
      waiting_(gpu, text("comm \"{}\"", comm.name()), 1),
      options_(options) {
  MOIETY_CHECK(options.sum_blocks >= 1 && options.sum_blocks <= 64,
               "communicator \"{}\": sum_blocks is {}, 1 to 64 are possible", comm.name(),
               options.sum_blocks);
  const Places places = places_of(comm.size(), options);
  memory_ = SymmetricBuffer::create(comm, text("{}, link", comm.name()), places.bytes, gpu);
  for (int r = 0; r < comm.size(); ++r) parts_.push_back(memory_.peer(r));
  load_kernels(gpu.index);
  if (options.beside_compute) sums_ = Stream::external(gpu, moiety::gpu::create_lane(gpu.index));
  region_ = {.base = parts_[0],
             .stride = parts_[1] - parts_[0],
             .rank = comm.rank(),
             .ranks = comm.size(),
             .places = places,
             .control = reinterpret_cast<Control*>(memory_.local() + places.control),
             .page = fault_pages().take(),
             .deadline_ns = static_cast<uint64_t>(comm.bootstrap().deadline().count() * 1e9)};
  const Stream own = Stream::external(gpu, cudaStreamPerThread);
  for (Event* event : {&last_, &last_captured_, &landed_, &summed_, &marks_[0], &marks_[1]}) {
    event->record(own);
  }
  // Nobody enqueues an operation before all have allocated and loaded.
  comm.bootstrap().all_gather("");
}

Link::~Link() {
  try {
    const Deadline deadline(comm_->bootstrap().deadline() + Seconds(1));
    Backoff backoff;
    while (!last_.complete() && !deadline.expired()) backoff.pause();
    // A kernel may still write to the page of a link that has not come to its end.
    if (last_.complete()) fault_pages().give_back(region_.page);
    if (options_.beside_compute) moiety::gpu::destroy_stream(gpu_.index, sums_.cuda_stream());
  } catch (const std::exception& e) {
    log(LogLevel::kError, "communicator \"{}\": {}", comm_->name(), e.what());
  }
}

void Link::attach(const SymmetricBuffer& buffer) {
  attached_.attach(text("communicator \"{}\"", comm_->name()), comm_->size(), buffer);
}

std::string Link::abort_text() const { return comm_->bootstrap().aborted().value_or(""); }

void Link::check() {
  if (failure_.empty() && failed()) {
    failure_ = fault_text(comm_->name(), region_.page->fault, abort_text());
  }
  if (!failure_.empty()) throw_error(ErrorKind::kComm, failure_);
}

void Link::follow(const Stream& stream) {
  const uint64_t capture = capture_of(stream);
  const bool moved = any_ && last_stream_ != stream.cuda_stream();
  // An event of a capture means nothing outside of it, nor the reverse: whoever launches graphs
  // orders them.
  if (moved && capture == capture_) stream.wait(capture ? last_captured_ : last_);
  capture_ = capture;
  last_stream_ = stream.cuda_stream();
  any_ = true;
}

Meeting Link::meeting_of(const CollectiveCall& call, int64_t place) const {
  Meeting out{.peers = 0, .first = 1, .call = pair_call(call, place), .up = {}, .down = {}};
  if (call.kind != Collective::kAllToAll) return out;
  const int me = region_.rank;
  for (int r = 0; r < region_.ranks; ++r) {
    out.up[r] = me < r ? call.send_rows[r] : call.recv_rows[r];
    out.down[r] = me < r ? call.recv_rows[r] : call.send_rows[r];
  }
  return out;
}

void Link::enqueue(const Step& step, const CollectiveCall& call, Meeting& meeting,
                   const Stream& stream) {
  switch (step.kind) {
    case Step::Kind::kCopy: {
      const CopyStep& c = step.copy;
      if (!options_.beside_compute && copies_by_kernel(c)) return copy_by_kernel(c, stream);
      const moiety::gpu::Rows to{c.to, c.bytes, c.to_pitch, c.rows};
      const moiety::gpu::Rows from{const_cast<std::byte*>(c.from), c.bytes, c.from_pitch, c.rows};
      return moiety::gpu::copy_rows(gpu_.index, to, from, stream.cuda_stream());
    }
    case Step::Kind::kSum: {
      enqueue_sum(step.sum, call, stream);
      const int64_t bytes = byte_size(call.dtype, step.sum.elements);
      for (std::byte* to : step.sum.also) {
        enqueue({.kind = Step::Kind::kCopy, .copy = {to, step.sum.to, bytes, bytes, bytes, 1}},
                call, meeting, stream);
      }
      return;
    }
    case Step::Kind::kMeet:
      meeting.peers = step.peers;
      meet(region_, meeting, stream);
      break;
    case Step::Kind::kSmall:
      meeting.peers = step.peers;
      exchange_small(region_, meeting, step.small, call.dtype, call.op, stream);
      break;
  }
  meeting.first = 0;
}

size_t Link::enqueue_joined(std::span<const Step> steps, const CollectiveCall& call,
                            Meeting& meeting, const Stream& stream) {
  if (options_.beside_compute || steps[0].kind != Step::Kind::kMeet) return 0;
  const bool sums = steps.size() > 1 && steps[1].kind == Step::Kind::kSum;
  if (sums && !joins_sum(steps[1].sum)) return 0;
  const auto copies = sums ? steps.first(0) : joined_copies(steps.subspan(1));
  size_t out = sums ? 2 : 1 + copies.size();
  if (out == 1) return 0;
  const bool leave = out < steps.size() && steps[out].kind == Step::Kind::kMeet &&
                     steps[out].peers == steps[0].peers;
  meeting.peers = steps[0].peers;
  if (sums) {
    join_sum(region_, meeting, steps[1].sum, call.dtype, call.op, leave, options_.sum_blocks,
             stream);
  } else {
    join_copies(region_, meeting, copies, leave, options_.sum_blocks, stream);
  }
  meeting.first = 0;
  return out + (leave ? 1 : 0);
}

void Link::enqueue_sum(const SumStep& step, const CollectiveCall& call, const Stream& stream) {
  if (!options_.beside_compute) return sum(step, call.dtype, call.op, options_.sum_blocks, stream);
  if (!step.beside) return sum(step, call.dtype, call.op, 0, stream);
  landed_.record(stream);
  sums_.wait(landed_);
  sum(step, call.dtype, call.op, 0, sums_);
  sums_run_ = true;
}

void Link::join_sums(const Stream& stream) {
  if (!std::exchange(sums_run_, false)) return;
  summed_.record(sums_);
  stream.wait(summed_);
}

void Link::issue(const CollectiveCall& call, const Stream& stream) {
  check();
  MOIETY_CHECK(stream.device() == gpu_, "communicator \"{}\": {} on a stream of {}, it works on {}",
               comm_->name(), describe(call), name(stream.device()), name(gpu_));
  const auto direct = call.bytes() > region_.places.small
                          ? attached_.find(call, region_.rank, region_.ranks)
                          : std::nullopt;
  follow(stream);
  Meeting meeting = meeting_of(call, direct ? direct->place : 0);
  const PlanInput input{.rank = region_.rank,
                        .memory = parts_,
                        .places = region_.places,
                        .direct = direct ? &*direct : nullptr};
  const std::vector<Step> steps = plan(call, input);
  for (std::span<const Step> left = steps; !left.empty();) {
    const size_t joined = enqueue_joined(left, call, meeting, stream);
    if (joined == 0) enqueue(left[0], call, meeting, stream);
    left = left.subspan(std::max<size_t>(joined, 1));
  }
  join_sums(stream);
  (capture_ ? last_captured_ : last_).record(stream);
  keep_close(stream);
}

bool Link::failed() const { return __atomic_load_n(&region_.page->found, __ATOMIC_ACQUIRE) != 0; }

void Link::end_waits() { __atomic_store_n(&region_.page->abort, 1, __ATOMIC_RELEASE); }

void Link::keep_close(const Stream& stream) {
  if (capture_ != 0 || ++issued_ % (kAhead / 2) != 0) return;
  Event& mark = marks_[issued_ / (kAhead / 2) % 2];
  GpuWaits* const own[] = {this};
  wait(mark, own, comm_->name(), comm_->bootstrap());
  mark.record(stream);
}

void wait(const Event& event, std::span<GpuWaits* const> all, const std::string& name,
          Bootstrap& bootstrap) {
  Backoff backoff;
  std::optional<Deadline> leave;  // waits end soon after an abort or a fault, work may take longer
  GpuWaits* first = nullptr;      // what failed by itself
  while (!event.complete()) {
    backoff.pause();
    if (!backoff.time_to_look()) continue;
    const auto failed =
        std::find_if(all.begin(), all.end(), [](const GpuWaits* waits) { return waits->failed(); });
    if (!leave && (failed != all.end() || bootstrap.aborted())) {
      if (failed != all.end()) first = *failed;
      for (GpuWaits* waits : all) waits->end_waits();
      leave.emplace(Seconds(10));
    }
    if (leave && leave->expired()) break;
  }
  if (first) first->check();
  for (GpuWaits* waits : all) waits->check();
  if (!leave) return;
  fail(ErrorKind::kComm, "communicator \"{}\": {}", name, bootstrap.aborted().value_or(""));
}

}  // namespace moiety::comm::mapped
