#include "moiety/comm/nccl/link.h"

#include <algorithm>
#include <exception>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "moiety/base/copy.h"
#include "moiety/base/cuda_built.h"
#include "moiety/base/deadline.h"
#include "moiety/base/error.h"
#include "moiety/base/integer.h"
#include "moiety/base/log.h"
#include "moiety/comm/agree.h"
#include "moiety/comm/mapped/fault_text.h"
#include "moiety/comm/mapped/link.h"
#include "moiety/comm/reduce.h"

namespace moiety::comm::nccl {
namespace {

constexpr int64_t kAlignment = 256;
constexpr int64_t kLaunchesAhead = 512;  // Note [Few operations under way] of mapped/link_cuda.cpp
constexpr int64_t kLaunchesOfMarks = 5;

uint64_t load(const uint64_t& word) { return __atomic_load_n(&word, __ATOMIC_ACQUIRE); }

mapped::Meeting meeting_of(const CollectiveCall& call, int rank, int ranks) {
  mapped::Meeting out{
      .peers = 0, .first = 1, .call = mapped::pair_call(call, 0), .up = {}, .down = {}};
  if (call.kind != Collective::kAllToAll) return out;
  for (int r = 0; r < ranks; ++r) {
    out.up[r] = rank < r ? call.send_rows[r] : call.recv_rows[r];
    out.down[r] = rank < r ? call.recv_rows[r] : call.send_rows[r];
  }
  return out;
}

// Keeps what operations that were given up may still use until the process ends.
void keep(std::shared_ptr<void> memory) {
  static std::mutex mutex;
  static auto& kept = *new std::vector<std::shared_ptr<void>>;
  const std::lock_guard lock(mutex);
  kept.push_back(std::move(memory));
}

// The twins of the kernels, for tests.
void open_on_host(const Desk& desk, const mapped::Meeting& meeting) {
  const uint64_t count = ++*desk.count;
  for (int peer = 0; peer < desk.ranks; ++peer) {
    PairCall call = meeting.call;
    call.up = meeting.up[peer];
    call.down = meeting.down[peer];
    desk.outbox[peer] = {mapped::make_word(count, mapped::signature(call)), call};
    desk.page->mine[peer] = desk.outbox[peer];
  }
  desk.page->started = count;
}

void compare_on_host(const Desk& desk) {
  for (int peer = 0; peer < desk.ranks; ++peer) {
    if (peer == desk.rank) continue;
    if (desk.page->theirs[peer].word != desk.outbox[peer].word) desk.page->found = peer + 1;
  }
}

}  // namespace

void check_possible(Bootstrap& bootstrap, Device gpu, const std::string& why, const Functions& f) {
  if (const std::optional<SharedGpu> shared = find_shared_gpu(bootstrap, gpu)) {
    throw UsageError("{}: ranks {} and {} share {}, which NCCL refuses", why, shared->first,
                     shared->second, name(gpu));
  }
  agree(bootstrap, f.available ? "" : text("{}, and there is no NCCL: {}", why, f.text),
        ErrorKind::kCuda);
}

Link::Link(Communicator& comm, Device device, const GpuLinkOptions& options,
           const Functions& functions, std::shared_ptr<Group> group, const Stream& lane)
    : comm_(&comm), device_(device), lane_(lane), group_(std::move(group)) {
  const int ranks = comm.size();
  MOIETY_CHECK(ranks <= kMaxRanks && options.staging_bytes >= 1 << 20,
               "{}: {} ranks with {} bytes of staging; at most {} ranks with at least 1 MiB are "
               "possible",
               label(), ranks, options.staging_bytes, kMaxRanks);
  const int64_t posts = round_up(ranks * int64_t(sizeof(Post)), kAlignment);
  memory_ = std::make_shared<Memory>();
  agree_on(comm.bootstrap(), label(), "allocate", ErrorKind::kOutOfMemory, [&] {
    memory_->gpu = Buffer(posts + kAlignment + options.staging_bytes, device, "staging for NCCL");
    memory_->page = Buffer::host_for(device, sizeof(Page), "page of NCCL's operations");
  });
  std::byte* const base = memory_->gpu.data();
  desk_ = {.page = reinterpret_cast<Page*>(memory_->page.data()),
           .outbox = reinterpret_cast<Post*>(base),
           .count = reinterpret_cast<uint64_t*>(base + posts),
           .rank = comm.rank(),
           .ranks = ranks};
  input_ = {.rank = comm.rank(),
            .ranks = ranks,
            .staging = base + posts + kAlignment,
            .staging_bytes = options.staging_bytes};
  if constexpr (kCudaBuilt) {
    if (on_gpu()) load_mark_kernels(), mapped::load_kernels(device.index);
  }
  // Note [Events are made early] of mapped/link_cuda.cpp.
  for (Event* event : {&before_, &after_, &last_, &marks_[0], &marks_[1]}) event->record(lane_);
  if (!group_) group_ = Group::join(functions, comm.bootstrap(), label(), device.index);
  warm_up();
  // Nobody enqueues an operation before all have allocated and loaded.
  comm.bootstrap().all_gather("");
}

Link::~Link() {
  try {
    const Deadline deadline(comm_->bootstrap().deadline() + Seconds(1));
    Backoff backoff;
    const auto over = [&] {
      return !failure_.empty() || std::uncaught_exceptions() > 0 || comm_->bootstrap().aborted();
    };
    while (!over() && !last_.complete() && !deadline.expired()) backoff.pause();
    if (!over() && last_.complete()) return;
    group_->abort();
    keep(memory_);
  } catch (const std::exception& e) {
    log(LogLevel::kError, "{}: {}", label(), e.what());
  }
}

std::string Link::label() const { return text("communicator \"{}\" over NCCL", comm_->name()); }

// Operations of each kind, small and large: NCCL connects ranks when they first need it.
void Link::warm_up() {
  const int64_t most = input_.staging_bytes / (2 * input_.ranks) / kAlignment * kAlignment;
  const auto run = [group = group_, memory = memory_, lane = lane_, stream = raw_lane(),
                    input = input_, most]() -> int {
    const Functions& f = group->functions();
    int code = 0;
    const auto also = [&](int result) { code = code ? code : result; };
    for (const int64_t bytes : {kAlignment, most}) {
      std::byte* const half = input.staging + input.ranks * bytes;
      also(f.all_gather(input.staging, half, size_t(bytes), group->get(), stream));
      also(f.broadcast(input.staging, size_t(bytes), 0, group->get(), stream));
      also(f.begin());
      for (int r = 0; r < input.ranks && code == 0; ++r) {
        if (r == input.rank) continue;
        also(f.send(input.staging + r * bytes, size_t(bytes), r, group->get(), stream));
        also(f.receive(half + r * bytes, size_t(bytes), r, group->get(), stream));
      }
      also(f.end());
    }
    try {
      lane.synchronize();
    } catch (const std::exception& e) {
      log(LogLevel::kError, "NCCL's first operations: {}", e.what());
      also(1);
    }
    return code;
  };
  const int code = run_within_deadline(comm_->bootstrap(), label(), run);
  group_->check(code, "its first operations");
}

void Link::attach(const SymmetricBuffer& /*buffer*/) {
  fail(ErrorKind::kUnsupported, "{}: attach: its ranks share no memory", label());
}

void Link::open(const CollectiveCall& call) {
  const mapped::Meeting meeting = meeting_of(call, desk_.rank, desk_.ranks);
  if (!on_gpu()) return open_on_host(desk_, meeting);
  if constexpr (kCudaBuilt) open_on_gpu(desk_, meeting, lane_);
}

void Link::close() {
  if (!on_gpu()) return void(desk_.page->closed = *desk_.count);
  if constexpr (kCudaBuilt) close_on_gpu(desk_, lane_);
}

void Link::exchange_posts() {
  Step posts;
  posts.sends.resize(desk_.ranks);
  posts.receives.resize(desk_.ranks);
  for (int r = 0; r < desk_.ranks; ++r) {
    if (r == desk_.rank) continue;
    posts.sends[r] = {reinterpret_cast<std::byte*>(desk_.outbox + r), sizeof(Post)};
    posts.receives[r] = {reinterpret_cast<std::byte*>(desk_.page->theirs + r), sizeof(Post)};
  }
  enqueue(posts, {});
  if (!on_gpu()) return compare_on_host(desk_);
  if constexpr (kCudaBuilt) compare_on_gpu(desk_, lane_);
}

void Link::enqueue(const Step& step, const CollectiveCall& call) {
  const Functions& f = group_->functions();
  void* const group = group_->get();
  void* const lane = raw_lane();
  switch (step.kind) {
    case Step::Kind::kExchange: {
      int code = f.begin();
      for (int r = 0; r < desk_.ranks && code == 0; ++r) {
        const Piece &out = step.sends[r], &in = step.receives[r];
        if (out.bytes > 0) code = f.send(out.data, size_t(out.bytes), r, group, lane);
        if (in.bytes > 0 && code == 0) code = f.receive(in.data, size_t(in.bytes), r, group, lane);
      }
      const int ended = f.end();
      return group_->check(code ? code : ended, "ncclSend and ncclRecv");
    }
    case Step::Kind::kGather:
      return group_->check(
          f.all_gather(step.own.data, step.all.data, size_t(step.own.bytes), group, lane),
          "ncclAllGather");
    case Step::Kind::kBroadcast:
      return group_->check(
          f.broadcast(step.all.data, size_t(step.all.bytes), step.root, group, lane),
          "ncclBroadcast");
    case Step::Kind::kCopy: {
      const auto bytes_at = [&](std::byte* data) {
        return TensorView(data, DType::kUInt8, {step.own.bytes}, device_);
      };
      return copy(bytes_at(step.all.data), bytes_at(step.own.data), lane_);
    }
    case Step::Kind::kSum:
      if (!on_gpu()) {
        std::vector<const void*> sources(step.sum.sources.begin(), step.sum.sources.end());
        return reduce(step.sum.to, sources, step.sum.elements, call.dtype, call.op);
      }
      if constexpr (kCudaBuilt) mapped::sum(step.sum, call.dtype, call.op, 0, lane_);
  }
}

void Link::issue(const CollectiveCall& call, const Stream& stream) {
  check();
  MOIETY_CHECK(stream.device() == device_,
               "communicator \"{}\": {} on a stream of {}, it works on {}", comm_->name(),
               describe(call), name(stream.device()), name(device_));
  const std::vector<Step> steps = plan(call, input_);
  before_.record(stream);
  lane_.wait(before_);
  open(call);
  exchange_posts();
  if (!on_gpu()) check();  // the posts have come
  for (const Step& step : steps) enqueue(step, call);
  close();
  after_.record(lane_);
  stream.wait(after_);
  keep_close(stream, kLaunchesOfMarks + std::ssize(steps));
}

void Link::keep_close(const Stream& stream, int64_t launches) {
  if constexpr (kCudaBuilt) {
    if (!on_gpu() || in_capture(stream)) return;
    last_.record(lane_);
    launches_ += launches;
    if (launches_ < kLaunchesAhead / 2) return;
    launches_ = 0;
    Event& mark = marks_[++marked_ % 2];
    GpuWaits* const own[] = {this};
    mapped::wait(mark, own, comm_->name(), comm_->bootstrap());
    mark.record(lane_);
  }
}

std::string Link::fault(FaultKind kind, Seconds waited) const {
  const Page& page = *desk_.page;
  mapped::Fault f{.kind = kind,
                  .rank = desk_.rank,
                  .peer = desk_.rank == 0 ? 1 : 0,
                  .operation = page.started,
                  .count = page.started,
                  .word = 0,
                  .nanoseconds = uint64_t(waited.count() * 1e9),
                  .mine = {},
                  .theirs = {}};
  if (kind == FaultKind::kMismatch) {
    f.peer = int(page.found - 1);
  } else {
    for (int r = desk_.ranks - 1; r >= 0; --r) {
      if (r != desk_.rank && mapped::count_of(page.theirs[r].word) < f.count) f.peer = r;
    }
  }
  f.mine = page.mine[f.peer].call;
  f.theirs = page.theirs[f.peer].call;
  f.word = page.theirs[f.peer].word;
  return mapped::fault_text(comm_->name(), f, comm_->bootstrap().aborted().value_or(""));
}

void Link::fail_with(const std::string& text) const {
  if (failure_.empty()) failure_ = text;
  group_->abort();
}

// A post that did not come: the communicator was aborted, and the bootstrap soon says by whom.
void Link::await_reason() const {
  Backoff backoff;
  for (const Deadline soon(Seconds(2)); !comm_->bootstrap().aborted() && !soon.expired();) {
    backoff.pause();
  }
}

bool Link::failed() const {
  if (!failure_.empty()) return true;
  const Page& page = *desk_.page;
  if (const uint64_t found = load(page.found); found != 0) {
    const bool came = mapped::count_of(page.theirs[found - 1].word) >= page.started;
    if (!came) await_reason();
    return fail_with(fault(came ? FaultKind::kMismatch : FaultKind::kAborted, {})), true;
  }
  // A peer that is gone makes errors of NCCL's too; the bootstrap soon says who that is.
  const std::string error = group_->error();
  if (!error.empty()) {
    if (!error_since_) error_since_.emplace(Seconds(2));
    if (error_since_->expired()) {
      return fail_with(text("{}: rank {}: {}", label(), desk_.rank, error)), true;
    }
  }
  const uint64_t closed = load(page.closed), started = load(page.started);
  if (started == closed) return false;
  if (started != seen_) {
    seen_ = started;
    open_since_ = Deadline(comm_->bootstrap().deadline());
  }
  if (!open_since_.expired()) return false;
  fail_with(fault(FaultKind::kLate, open_since_.elapsed()));
  return true;
}

void Link::end_waits() {
  if (!failure_.empty()) return;
  if (load(desk_.page->started) != load(desk_.page->closed)) {
    fail_with(fault(FaultKind::kAborted, {}));
  }
  group_->abort();
}

void Link::check() {
  if (failed()) throw_error(ErrorKind::kComm, failure_);
}

std::shared_ptr<Group> Link::split(int color, int key) {
  return group_->split(comm_->bootstrap(), label(), color, key);
}

}  // namespace moiety::comm::nccl
