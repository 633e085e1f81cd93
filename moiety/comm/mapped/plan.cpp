#include "moiety/comm/mapped/plan.h"

#include <algorithm>

#include "moiety/base/error.h"
#include "moiety/base/integer.h"

namespace moiety::comm::mapped {
namespace {

constexpr int64_t kAlignment = 256;
constexpr int64_t kElements = 64;  // sums are cut at multiples of this
constexpr int64_t kPiece = int64_t{64} << 20;

int64_t round_down(int64_t n, int64_t to) { return n / to * to; }

class Planner {
 public:
  Planner(const CollectiveCall& call, const PlanInput& in)
      : call_(call),
        in_(in),
        me_(in.rank),
        ranks_(static_cast<int>(in.memory.size())),
        bytes_(call.bytes()),
        everyone_((ranks_ == kMaxRanks ? ~Peers{0} : (Peers{1} << ranks_) - 1) & ~bit(me_)) {}

  std::vector<Step> make() {
    switch (call_.kind) {
      case Collective::kAllReduce:
        is_small() ? small_all_reduce() : all_reduce();
        break;
      case Collective::kReduceScatter:
        is_small() ? small_reduce_scatter() : reduce_scatter();
        break;
      case Collective::kAllGather:
        is_small() ? small_all_gather() : all_gather();
        break;
      case Collective::kBroadcast:
        is_small() ? small_broadcast() : broadcast();
        break;
      case Collective::kAllToAll:
        all_to_all();
        break;
      case Collective::kBarrier:
        meet(everyone_);
        break;
    }
    return std::move(steps_);
  }

 private:
  static Peers bit(int r) { return Peers{1} << r; }
  bool is_small() const { return bytes_ <= in_.places.small; }
  int64_t element_bytes() const { return byte_size(call_.dtype, 1); }
  std::byte* half_of(int r, int64_t chunk) const {
    return in_.memory[r] + in_.places.staging + (chunk % 2) * in_.places.half;
  }
  // The part of a half that holds one piece for, or of, each rank.
  int64_t slot() const { return round_down(in_.places.half / ranks_, kAlignment); }

  void meet(Peers peers) { steps_.push_back({.kind = Step::Kind::kMeet, .peers = peers}); }
  void copy_rows(const CopyStep& copy) {
    if (copy.bytes == 0 || copy.rows == 0 || copy.to == copy.from) return;
    steps_.push_back({.kind = Step::Kind::kCopy, .copy = copy});
  }
  void copy(std::byte* to, const std::byte* from, int64_t bytes) {
    copy_rows({to, from, bytes, bytes, bytes, 1});
  }
  void add(std::byte* to, std::vector<const std::byte*> sources, int64_t elements,
           bool beside = false) {
    if (elements == 0) return;
    steps_.push_back({.kind = Step::Kind::kSum, .sum = {to, std::move(sources), elements, beside}});
  }
  template <class F>
  void each_peer(F&& f) const {
    // Every rank begins with the next one, so that no rank is read by all at once.
    for (int i = 1; i < ranks_; ++i) f((me_ + i) % ranks_);
  }

  // Sums `elements` elements of all ranks: `own` of this rank, source(r) of a peer.
  template <class Source>
  void sum(std::byte* to, const std::byte* own, Source&& source, int64_t elements) {
    const auto sources_at = [&](auto&& peer) {
      std::vector<const std::byte*> out;
      for (int r = 0; r < ranks_; ++r) out.push_back(r == me_ ? own : peer(r));
      return out;
    };
    if (in_.places.landing < 0) return add(to, sources_at(source), elements);
    const int64_t size = element_bytes();
    if (ranks_ == 2 && to != own) return sum_where_it_lands(to, own, source, elements);
    const int64_t room = in_.places.half / (ranks_ - 1);
    const int64_t piece = round_down(room / size, kElements);
    for (int64_t begin = 0; begin < elements; begin += piece) {
      const int64_t n = std::min(piece, elements - begin);
      const auto landed = [&](int r) {
        return in_.memory[me_] + in_.places.landing +
               ((r - me_ + ranks_) % ranks_ - 1) * piece * size;
      };
      each_peer([&](int r) { copy(landed(r), source(r) + begin * size, n * size); });
      std::vector<const std::byte*> sources = sources_at(landed);
      sources[me_] = own + begin * size;
      add(to + begin * size, std::move(sources), n);
    }
  }

  // Of two ranks the peer's part lands where the sum is to be, so a piece may be summed while the
  // next one lands.
  template <class Source>
  void sum_where_it_lands(std::byte* to, const std::byte* own, Source&& source, int64_t elements) {
    const int64_t size = element_bytes(), piece = kPiece / size;
    for (int64_t begin = 0; begin < elements; begin += piece) {
      const int64_t n = std::min(piece, elements - begin), at = begin * size;
      copy(to + at, source(1 - me_) + at, n * size);
      std::vector<const std::byte*> sources{to + at, to + at};
      sources[me_] = own + at;
      add(to + at, std::move(sources), n, begin + n < elements);
    }
  }

  // What peers read in place is free when they say so. The halves of the staging are free too for an
  // operation that begins with the first one, if this one ended with the second: whoever has come to
  // the last chunk has read the one before.
  void leave(int64_t chunks) {
    if (in_.direct || chunks % 2 != 0) meet(everyone_);
  }

  // ---- large operands

  // In place a part's destination on each rank is in memory that this one may write, which is faster
  // than to read.
  bool pushes() const { return call_.send == call_.recv + me_ * bytes_; }

  void all_gather() {
    int64_t chunks = 0;
    copy(call_.recv + me_ * bytes_, call_.send, bytes_);
    if (in_.direct) {
      meet(everyone_);
      each_peer([&](int r) {
        if (pushes()) {
          copy(in_.direct->at[r] + (me_ - r) * bytes_, call_.send, bytes_);
        } else {
          copy(call_.recv + r * bytes_, in_.direct->at[r], bytes_);
        }
      });
    } else {
      const int64_t half = in_.places.half;
      for (; chunks * half < bytes_; ++chunks) {
        const int64_t c = chunks;
        const int64_t n = std::min(half, bytes_ - c * half);
        copy(half_of(me_, c), call_.send + c * half, n);
        meet(everyone_);
        each_peer([&](int r) { copy(call_.recv + r * bytes_ + c * half, half_of(r, c), n); });
      }
    }
    leave(chunks);
  }

  void broadcast() {
    int64_t chunks = 0;
    const bool root = me_ == call_.root;
    if (in_.direct) {
      meet(everyone_);
      if (!root) copy(call_.recv, in_.direct->at[call_.root], bytes_);
    } else {
      const int64_t half = in_.places.half;
      for (; chunks * half < bytes_; ++chunks) {
        const int64_t c = chunks;
        const int64_t n = std::min(half, bytes_ - c * half);
        if (root) copy(half_of(me_, c), call_.send + c * half, n);
        meet(everyone_);
        if (!root) copy(call_.recv + c * half, half_of(call_.root, c), n);
      }
    }
    leave(chunks);
  }

  void reduce_scatter() {
    int64_t chunks = 0;
    const int64_t size = element_bytes();
    if (in_.direct) {
      meet(everyone_);
      sum(
          call_.recv, call_.send + me_ * bytes_,
          [&](int r) { return in_.direct->at[r] + me_ * bytes_; }, call_.elements);
    } else {
      const int64_t piece = round_down(slot() / size, kElements);
      for (int64_t begin = 0; begin < call_.elements; ++chunks, begin += piece) {
        const int64_t c = chunks;
        const int64_t n = std::min(piece, call_.elements - begin);
        const auto stage = [&](int first, int rows) {
          copy_rows({half_of(me_, c) + first * slot(), call_.send + first * bytes_ + begin * size,
                     n * size, slot(), bytes_, rows});
        };
        stage(0, me_);
        stage(me_ + 1, ranks_ - me_ - 1);
        meet(everyone_);
        sum(
            call_.recv + begin * size, call_.send + me_ * bytes_ + begin * size,
            [&](int r) { return half_of(r, c) + me_ * slot(); }, n);
      }
    }
    leave(chunks);
  }

  void all_reduce() {
    if (in_.direct) {
      all_reduce_at([&](int r) { return in_.direct->at[r]; }, call_.elements);
      return;
    }
    const int64_t size = element_bytes();
    const int64_t piece = round_down(in_.places.half / size, kElements);
    int64_t chunk = 0;
    for (int64_t begin = 0; begin < call_.elements; ++chunk, begin += piece) {
      const int64_t n = std::min(piece, call_.elements - begin);
      copy(half_of(me_, chunk), call_.send + begin * size, n * size);
      all_reduce_at([&](int r) { return half_of(r, chunk); }, n);
      copy(call_.recv + begin * size, half_of(me_, chunk), n * size);
    }
  }

  // Each rank sums its part and brings it to all ranks, in place: nobody else reads or writes that
  // part of any rank's. When all have done so, nobody touches another one's memory any more.
  template <class Base>
  void all_reduce_at(Base&& base, int64_t elements) {
    const int64_t size = element_bytes();
    const ElementRange own = part_of(elements, me_, ranks_);
    const int64_t n = own.end - own.begin;
    const auto part = [&](int r) { return base(r) + own.begin * size; };
    meet(everyone_);
    if (in_.places.landing >= 0) {
      sum(part(me_), part(me_), part, n);
      each_peer([&](int r) { copy(part(r), part(me_), n * size); });
    } else if (n > 0) {
      SumStep step{.to = part(me_), .sources = {}, .elements = n};
      for (int r = 0; r < ranks_; ++r) step.sources.push_back(part(r));
      each_peer([&](int r) { step.also.push_back(part(r)); });
      steps_.push_back({.kind = Step::Kind::kSum, .sum = std::move(step)});
    }
    meet(everyone_);
  }

  void all_to_all() {
    const auto sent = [&](int r) { return call_.send_rows[r] * bytes_; };
    const auto received = [&](int r) { return call_.recv_rows[r] * bytes_; };
    const auto from = [&](int r) { return call_.send + rows_before(call_.send_rows, r) * bytes_; };
    const auto to = [&](int r) { return call_.recv + rows_before(call_.recv_rows, r) * bytes_; };
    const auto larger = [&](int r) { return std::max(sent(r), received(r)); };
    copy(to(me_), from(me_), sent(me_));
    // What two ranks send each other goes the small way or the large one, by what both know.
    Peers large = 0;
    int64_t most = 0;
    Step small{.kind = Step::Kind::kSmall};
    small.small.peers.resize(ranks_);
    for (int r = 0; r < ranks_; ++r) {
      if (r == me_) continue;
      if (larger(r) > in_.places.small) {
        large |= bit(r);
        most = std::max(most, larger(r));
        continue;
      }
      small.peers |= bit(r);
      small.small.peers[r] = {from(r), sent(r), to(r), received(r)};
    }
    if (small.peers) steps_.push_back(std::move(small));
    const int64_t piece = slot();
    for (int64_t c = 0; c * piece < most; ++c) {
      const auto left = [&](int64_t bytes) { return std::min(piece, bytes - c * piece); };
      Peers now = 0;
      each_peer([&](int r) {
        if (!(large & bit(r)) || left(larger(r)) <= 0) return;
        now |= bit(r);
        if (left(sent(r)) > 0) {
          copy(half_of(me_, c) + r * piece, from(r) + c * piece, left(sent(r)));
        }
      });
      meet(now);
      each_peer([&](int r) {
        if ((now & bit(r)) && left(received(r)) > 0) {
          copy(to(r) + c * piece, half_of(r, c) + me_ * piece, left(received(r)));
        }
      });
    }
    if (large) meet(large);
  }

  // ---- small operands

  // One step that meets everyone; fill(r, peer) says what goes to and comes from a peer.
  template <class Fill>
  void small(Fill&& fill, std::byte* sum = nullptr) {
    Step step{.kind = Step::Kind::kSmall, .peers = everyone_};
    step.small.sum = sum;
    step.small.elements = sum ? call_.elements : 0;
    step.small.peers.resize(ranks_);
    for (int r = 0; r < ranks_; ++r) fill(r, step.small.peers[r]);
    steps_.push_back(std::move(step));
  }

  void small_all_reduce() {
    small(
        [&](int r, SmallStep::Peer& peer) {
          peer.send = call_.send;
          if (r != me_) peer.send_bytes = peer.recv_bytes = bytes_;
        },
        call_.recv);
  }
  void small_reduce_scatter() {
    small(
        [&](int r, SmallStep::Peer& peer) {
          peer.send = call_.send + r * bytes_;
          if (r != me_) peer.send_bytes = peer.recv_bytes = bytes_;
        },
        call_.recv);
  }
  void small_all_gather() {
    copy(call_.recv + me_ * bytes_, call_.send, bytes_);
    small([&](int r, SmallStep::Peer& peer) {
      if (r != me_) peer = {call_.send, bytes_, call_.recv + r * bytes_, bytes_};
    });
  }
  void small_broadcast() {
    small([&](int r, SmallStep::Peer& peer) {
      if (r == me_) return;
      if (me_ == call_.root) peer = {.send = call_.send, .send_bytes = bytes_};
      if (r == call_.root) peer = {.recv = call_.recv, .recv_bytes = bytes_};
    });
  }

  const CollectiveCall& call_;
  const PlanInput& in_;
  const int me_, ranks_;
  const int64_t bytes_;
  const Peers everyone_;
  std::vector<Step> steps_;
};

}  // namespace

Places places_of(int ranks, const GpuLinkOptions& options) {
  MOIETY_CHECK(ranks >= 2 && ranks <= kMaxRanks, "mapped memory: {} ranks, at most {} can be",
               ranks, kMaxRanks);
  MOIETY_CHECK(options.staging_bytes >= 1 << 20, "staging_bytes is {}, at least 1 MiB is needed",
               options.staging_bytes);
  Places out;
  int64_t end = 0;
  const auto take = [&](int64_t bytes) {
    const int64_t begin = end;
    end = round_up(end + bytes, kAlignment);
    return begin;
  };
  out.control = take(sizeof(Control));
  out.posts = take(ranks * 2 * int64_t(sizeof(Post)));
  out.poison = take(8);
  out.faults = take(ranks * int64_t(sizeof(Fault)));
  out.small = ranks <= 16 ? 64 << 10 : 16 << 10;
  out.exchange = take(ranks * 2 * out.small);
  out.half = round_down(options.staging_bytes / 2, 4096);
  out.staging = take(2 * out.half);
  if (options.beside_compute) out.landing = take(out.half);
  out.bytes = end;
  return out;
}

std::vector<Step> plan(const CollectiveCall& call, const PlanInput& input) {
  return Planner(call, input).make();
}

}  // namespace moiety::comm::mapped

namespace moiety::comm {

int64_t gpu_link_bytes(int ranks, const GpuLinkOptions& options) {
  return round_up(mapped::places_of(ranks, options).bytes, kGpuMemoryUnit);
}

}  // namespace moiety::comm
