// The steps of operations among GPU ranks (moiety/moe/peers), run on the host: a machine of
// StepExchange whose blocks are a few threads each, a warp every one, with real barriers; blocks of
// a grid run one after the other in any order, since no step may need two of them at a time.
#pragma once

#include <atomic>
#include <deque>
#include <random>
#include <thread>

#include "moiety/moe/peers/step_exchange.h"
#include "tests/moe/ep_helpers.h"

namespace moiety::moe {

class HostLive {
 public:
  void add(int k, int64_t slot) { live_.push_back({k, slot}); }
  int count() const { return static_cast<int>(live_.size()); }
  int64_t first() const { return live_.empty() ? -1 : live_[0].second; }
  template <class F>
  void each(F&& f) const {
    for (const auto& [k, slot] : live_) f(k, slot);
  }
  template <int most, class F>
  void batches(F&& f) const {
    for (int first = 0; first < count(); first += most) {
      f(first == 0, std::min(most, count() - first),
        [&](int i) { return live_[first + i].second; });
    }
  }

 private:
  std::vector<std::pair<int, int64_t>> live_;
};

class HostWarp {
 public:
  template <class F>
  void each(int64_t n, F&& f) {
    for (int64_t i = 0; i < n; ++i) f(i);
  }
  template <class F>
  void lanes(F&& f) {
    for (int lane = 0; lane < 32; ++lane) f(lane);
  }
  template <class F>
  uint64_t bits(int n, F&& f) {
    uint64_t out = 0;
    for (int i = 0; i < n; ++i) out |= f(i);
    return out;
  }
  template <class Has, class Use>
  int64_t number(int64_t n, Has&& has, Use&& use) {
    int64_t count = 0;
    for (int64_t i = 0; i < n; ++i) {
      if (has(i)) use(i, count++);
    }
    return count;
  }
  template <class Has, class F>
  void find(int64_t n, Has&& has, F&& f) {
    for (int64_t i = 0; i < n; ++i) {
      if (has(i)) f(i);
    }
  }
  template <class F, class Use>
  int32_t prefix(int64_t n, F&& f, Use&& use) {
    int32_t sum = 0;
    for (int64_t i = 0; i < n; ++i) use(i, sum += f(i));
    return sum;
  }
  template <class F>
  int32_t sum(int64_t n, F&& f) {
    int32_t sum = 0;
    for (int64_t i = 0; i < n; ++i) sum += f(i);
    return sum;
  }
  template <class Key, class Take, class Add>
  void same(int64_t begin, int64_t end, Key&& key, Take&& take, Add&& add) {
    for (int64_t i = begin; i < end; ++i) {
      const int k = key(i);
      if (k < 0) continue;
      take(i, k, 0);
      add(k, 1);
    }
  }
  template <class Slot>
  HostLive live(int n, Slot&& slot) {
    HostLive out;
    for (int k = 0; k < n; ++k) {
      if (slot(k) >= 0) out.add(k, slot(k));
    }
    return out;
  }
  template <class F>
  void one(F&& f) {
    f();
  }
  void sync() {}
  template <class F, class Use>
  void fold(F&& f, Use&& use) {
    float v[32];
    for (int lane = 0; lane < 32; ++lane) v[lane] = f(lane);
    for (int o = 16; o >= 1; o /= 2) {
      for (int lane = 0; lane < o; ++lane) v[lane] += v[lane + o];
    }
    use(v[0]);
  }
};

// What the threads of a block share.
struct HostBlock {
  explicit HostBlock(int threads, int64_t shared_bytes)
      : warps(threads), memory(static_cast<size_t>(shared_bytes + 64) / 8) {}
  void sync() {
    const int round = rounds.load(std::memory_order_acquire);
    if (arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == warps) {
      arrived.store(0, std::memory_order_relaxed);
      rounds.store(round + 1, std::memory_order_release);
    }
    while (rounds.load(std::memory_order_acquire) == round) std::this_thread::yield();
  }
  int warps;
  std::atomic<int> arrived = 0, rounds = 0;
  std::vector<uint64_t> memory;
  unsigned long long total = 0;
};

class HostTeam {
 public:
  HostTeam(HostBlock& shared, int warp, int64_t block, int64_t blocks)
      : shared_(shared), warp_(warp), block_(block), blocks_(blocks) {}
  int64_t block() const { return block_; }
  int64_t blocks() const { return blocks_; }
  HostTeam part(int64_t first, int64_t count) const {
    return {shared_, warp_, block_ - first, count};
  }
  template <class F>
  void each(int64_t n, F&& f) {
    for (int64_t first = warp_ * 32; first < n; first += shared_.warps * 32) {
      for (int64_t i = first; i < std::min(n, first + 32); ++i) f(i);
    }
  }
  template <class F>
  void each_warp(int64_t n, F&& f) {
    HostWarp warp;
    for (int64_t i = warp_; i < n; i += shared_.warps) f(warp, i);
  }
  template <class F>
  void grid_warps(int64_t n, F&& f, int64_t before = 0) {
    HostWarp warp;
    const int64_t step = blocks_ * warps();
    const int64_t first = (block_ * warps() + warp_ + step - before % step) % step;
    for (int64_t i = first; i < n; i += step) f(warp, i);
  }
  int64_t warps() const { return shared_.warps; }
  template <class F>
  void one(F&& f) {
    if (warp_ == 0) f();
  }
  void sync() { shared_.sync(); }
  bool any(bool x) {
    return sum(shared_.warps * 32, [&](int64_t) { return x; }) != 0;
  }
  template <class F>
  int64_t sum(int64_t n, F&& f) {
    int64_t mine = 0;
    each(n, [&](int64_t i) { mine += f(i); });
    return total(mine);
  }
  int64_t total(int64_t x) {
    sync();
    if (warp_ == 0) shared_.total = 0;
    sync();
    peers::add(&shared_.total, static_cast<unsigned long long>(x));
    sync();
    return static_cast<int64_t>(shared_.total);
  }
  template <class F, class Use>
  void scan(int64_t n, F&& f, Use&& use) {
    sync();
    int64_t sum = 0;
    for (int64_t i = 0; i < n && warp_ == 0; ++i) {
      const int64_t v = f(i);
      use(i, sum);
      sum += v;
    }
    sync();
  }
  template <class T>
  T* shared(int64_t offset) const {
    return reinterpret_cast<T*>(reinterpret_cast<std::byte*>(shared_.memory.data()) + offset);
  }

 private:
  HostBlock& shared_;
  int warp_;
  int64_t block_, blocks_;
};

// How steps run: the warps of a block, the most blocks of a grid, the seed of the blocks' order.
struct HostShape {
  int warps = 2;
  int64_t blocks = 3;
  unsigned seed = 1;
  int multiprocessors = 132;
  std::function<void(const char* step)> before = {};  // called before a step
};

class HostMachine {
 public:
  explicit HostMachine(const HostShape& shape)
      : shape_(shape), random_(shape.seed), page_(std::make_shared<peers::FaultPage>()) {}

  comm::SymmetricBuffer share(comm::Communicator& comm, const std::string& name, int64_t bytes) {
    return comm::SymmetricBuffer::create(comm, name, bytes);
  }
  static std::shared_ptr<Buffer> own(int64_t bytes) {
    auto memory = std::make_shared<Buffer>(bytes);
    std::memset(memory->data(), 0, static_cast<size_t>(bytes));
    return memory;
  }
  static void write(std::byte* to, const void* from, int64_t bytes) {
    std::memcpy(to, from, static_cast<size_t>(bytes));
  }
  static void read(void* to, const std::byte* from, int64_t bytes) {
    std::memcpy(to, from, static_cast<size_t>(bytes));
  }
  peers::FaultPage* page() const { return page_.get(); }
  int64_t blocks() const { return shape_.blocks; }
  int multiprocessors() const { return shape_.multiprocessors; }
  void end(const Stream&, comm::Bootstrap&) {}
  void wait(const Stream&, comm::Bootstrap&) {}
  static bool captured(const Stream&) { return false; }
  void ready(comm::Communicator& comm) { comm.bootstrap().all_gather(""); }

  template <class Step>
  void launch(const char* name, const Step& step, const peers::LaunchSize& size, const Stream&) {
    if (shape_.before) shape_.before(name);
    if constexpr (requires { Step::kTogether; }) return together(step, size);
    std::vector<int64_t> order(static_cast<size_t>(size.blocks));
    for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int64_t>(i);
    std::shuffle(order.begin(), order.end(), random_);
    HostBlock shared(shape_.warps, size.shared_bytes);
    const auto run = [&](int warp) {
      for (const int64_t block : order) {
        HostTeam team(shared, warp, block, size.blocks);
        step(team);
        team.sync();
        // What is left in a block's memory must mean nothing to the next.
        if (warp == 0) std::fill(shared.memory.begin(), shared.memory.end(), ~uint64_t{0});
        team.sync();
      }
    };
    std::vector<std::jthread> others;
    for (int warp = 1; warp < shape_.warps; ++warp) others.emplace_back(run, warp);
    run(0);
  }

 private:
  // All blocks of a step at the same time, since some wait for another.
  template <class Step>
  void together(const Step& step, const peers::LaunchSize& size) const {
    std::deque<HostBlock> blocks;
    std::vector<std::jthread> threads;
    for (int64_t b = 0; b < size.blocks; ++b) {
      HostBlock& shared = blocks.emplace_back(shape_.warps, size.shared_bytes);
      for (int warp = 0; warp < shape_.warps; ++warp) {
        threads.emplace_back([&step, &shared, &size, warp, b] {
          HostTeam team(shared, warp, b, size.blocks);
          step(team);
        });
      }
    }
  }

  HostShape shape_;
  std::mt19937 random_;
  std::shared_ptr<peers::FaultPage> page_;
};

using HostExchange = peers::StepExchange<HostMachine>;

// Lets the group's operations run as steps from now on. Collective.
inline HostExchange& run_as_steps(EpGroup& group, comm::Communicator& world,
                                  const HostShape& shape) {
  EpGroup::Impl& g = *group.impl();
  auto made = std::make_shared<HostExchange>(HostMachine(shape), *g.comm, g.map, g.options);
  made->allocate(g.limits);
  // Reading what nobody stored shows.
  std::byte* const memory = made->memory().local();
  std::memset(memory + made->layout().meta, 0xFF, made->memory().bytes() - made->layout().meta);
  g.peers = made;
  world.barrier();
  return *made;
}

}  // namespace moiety::moe
