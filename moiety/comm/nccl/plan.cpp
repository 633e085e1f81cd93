#include "moiety/comm/nccl/plan.h"

#include <algorithm>
#include <utility>

#include "moiety/base/integer.h"

namespace moiety::comm::nccl {
namespace {

constexpr int64_t kElements = 64;        // parts are cut at multiples of this
constexpr int64_t kGathered = 64 << 10;  // an all_reduce of so many bytes is gathered and summed

class Planner {
 public:
  Planner(const CollectiveCall& call, const PlanInput& in)
      : call_(call), in_(in), size_(byte_size(call.dtype, 1)) {}

  std::vector<Step> make() {
    switch (call_.kind) {
      case Collective::kAllReduce:
        all_reduce();
        break;
      case Collective::kReduceScatter:
        reduce_scatter();
        break;
      case Collective::kAllGather:
        gather(send(), call_.bytes(), call_.recv);
        break;
      case Collective::kBroadcast:
        broadcast();
        break;
      case Collective::kAllToAll:
        all_to_all();
        break;
      case Collective::kBarrier:
        break;
    }
    return std::move(steps_);
  }

 private:
  // Only receives write.
  std::byte* send() const { return const_cast<std::byte*>(call_.send); }
  // The most elements that each rank may have in staging.
  int64_t part_in_staging() const {
    return in_.staging_bytes / in_.ranks / size_ / kElements * kElements;
  }
  std::byte* slot(int rank, int64_t elements) const {
    return in_.staging + rank * elements * size_;
  }

  Step& add(Step::Kind kind) {
    steps_.emplace_back().kind = kind;
    return steps_.back();
  }
  Step& exchange() {
    Step& step = add(Step::Kind::kExchange);
    step.sends.resize(in_.ranks);
    step.receives.resize(in_.ranks);
    return step;
  }
  void gather(std::byte* own, int64_t bytes, std::byte* all) {
    if (bytes == 0) return;
    Step& step = add(Step::Kind::kGather);
    step.own = {own, bytes};
    step.all = {all, bytes * in_.ranks};
  }
  void broadcast() {
    if (call_.bytes() == 0) return;
    Step& step = add(Step::Kind::kBroadcast);
    step.all = {call_.recv, call_.bytes()};
    step.root = call_.root;
  }

  // to := op over what all ranks have sent to this one, of which `own` is its own part and the
  // others lie in staging, `slots` elements apart.
  void sum(std::byte* to, const std::byte* own, int64_t slots, int64_t elements) {
    if (elements == 0) return;
    Step& step = add(Step::Kind::kSum);
    step.sum.to = to;
    step.sum.elements = elements;
    for (int r = 0; r < in_.ranks; ++r) {
      step.sum.sources.push_back(r == in_.rank ? own : slot(r, slots));
    }
  }

  void reduce_scatter() {
    const int64_t n = call_.elements, most = part_in_staging();
    for (int64_t begin = 0; begin < n; begin += most) {
      const int64_t part = std::min(most, n - begin);
      const int64_t slots = round_up(part, kElements);
      const auto of = [&](int r) { return send() + (r * n + begin) * size_; };
      Step& step = exchange();
      for (int r = 0; r < in_.ranks; ++r) {
        if (r == in_.rank) continue;
        step.sends[r] = {of(r), part * size_};
        step.receives[r] = {slot(r, slots), part * size_};
      }
      sum(call_.recv + begin * size_, of(in_.rank), slots, part);
    }
  }

  void all_reduce() {
    const int64_t n = call_.elements;
    if (n == 0) return;
    const bool fits = n <= part_in_staging();
    if (fits && call_.bytes() <= kGathered) {
      gather(send(), call_.bytes(), in_.staging);
      return sum(call_.recv, send(), n, n);
    }
    for (int64_t begin = 0; begin < n;) {
      const int64_t part =
          std::min(part_in_staging(), round_up((n - begin + in_.ranks - 1) / in_.ranks, kElements));
      const int64_t length = std::min(n - begin, part * in_.ranks);
      reduce_chunk(call_.recv + begin * size_, part, length);
      begin += length;
    }
  }

  // Reduces `length` elements of x, of which rank r sums those from r * part.
  void reduce_chunk(std::byte* x, int64_t part, int64_t length) {
    const auto begin = [&](int r) { return std::min(r * part, length); };
    const auto piece = [&](int r) {
      return Piece{x + begin(r) * size_, (begin(r + 1) - begin(r)) * size_};
    };
    const Piece own = piece(in_.rank);
    {
      Step& step = exchange();
      for (int r = 0; r < in_.ranks; ++r) {
        if (r == in_.rank) continue;
        step.sends[r] = piece(r);
        step.receives[r] = {slot(r, part), own.bytes};
      }
    }
    sum(own.data, own.data, part, own.bytes / size_);
    if (length == part * in_.ranks) return gather(own.data, own.bytes, x);
    Step& step = exchange();
    for (int r = 0; r < in_.ranks; ++r) {
      if (r == in_.rank) continue;
      step.sends[r] = own;
      step.receives[r] = piece(r);
    }
  }

  void all_to_all() {
    const int64_t row = call_.bytes();
    Step step;
    step.sends.resize(in_.ranks);
    step.receives.resize(in_.ranks);
    std::byte *from = send(), *to = call_.recv;
    for (int r = 0; r < in_.ranks; ++r) {
      step.sends[r] = {from, call_.send_rows[r] * row};
      step.receives[r] = {to, call_.recv_rows[r] * row};
      from += step.sends[r].bytes;
      to += step.receives[r].bytes;
    }
    const Piece own_from = std::exchange(step.sends[in_.rank], {});
    const Piece own_to = std::exchange(step.receives[in_.rank], {});
    steps_.push_back(std::move(step));
    if (own_from.bytes == 0) return;
    Step& copy = add(Step::Kind::kCopy);
    copy.own = own_from;
    copy.all = own_to;
  }

  const CollectiveCall& call_;
  const PlanInput& in_;
  int64_t size_;
  std::vector<Step> steps_;
};

}  // namespace

std::vector<Step> plan(const CollectiveCall& call, const PlanInput& input) {
  return Planner(call, input).make();
}

}  // namespace moiety::comm::nccl
