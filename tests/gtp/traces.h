// Traces for tests and benchmarks of the planner: of models, and random ones.
#pragma once

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "moiety/gtp/plan.h"

namespace moiety::gtp {

struct TraceCase {
  std::vector<BundleSpec> bundles;
  std::vector<TraceEvent> trace;
  std::vector<int32_t> streams;  // of the caller, by position
  Policy policy;
};

inline BundleSpec bundle_of(std::string name, int64_t bytes, int group_size = 2) {
  BundleSpec b;
  b.name = std::move(name);
  b.group_size = group_size;
  const int64_t received = bytes * (group_size - 1) / group_size;
  b.gather = {{{received, bytes, 0}, {received, bytes, 0}, {received, bytes, 0}}};
  b.reduce = {2 * received, 2 * bytes, received};
  return b;
}

// Puts a trace together, call by call.
class TraceMaker {
 public:
  explicit TraceMaker(float work_ns = 0) : work_ns_(work_ns) { call(Kind::kBegin, kNoBundle, 0); }

  TraceMaker& fwd(BundleId b) { return call(Kind::kFwd, b); }
  TraceMaker& bwd(BundleId b) { return call(Kind::kBwd, b); }
  TraceMaker& again(BundleId b) { return call(Kind::kRecompute, b); }
  // Adds a bundle to the call before.
  TraceMaker& also(BundleId b) {
    events_.push_back({events_.back().kind, b, true, 0});
    return *this;
  }
  TraceMaker& buffer(BundleId b) { return call(Kind::kGradBuffer, b); }
  TraceMaker& grad(BundleId b) { return call(Kind::kGrad, b, 0); }
  TraceMaker& wgrad(BundleId b) { return buffer(b).grad(b); }
  TraceMaker& cut() { return call(Kind::kCut, kNoBundle, 0); }
  TraceMaker& on(int32_t stream) {
    stream_ = stream;
    return *this;
  }
  TraceMaker& work(float ns) {
    work_ns_ = ns;
    return *this;
  }
  TraceMaker& call(Kind kind, BundleId b) { return call(kind, b, work_ns_); }

  std::vector<TraceEvent> flush() {
    call(Kind::kFlush, kNoBundle, 0);
    return events_;
  }
  const std::vector<int32_t>& streams() const { return streams_; }

 private:
  TraceMaker& call(Kind kind, BundleId b, float work_ns) {
    events_.push_back({kind, b, false, work_ns});
    streams_.push_back(
        kind == Kind::kBegin || kind == Kind::kFlush || kind == Kind::kCut ? 0 : stream_);
    return *this;
  }

  float work_ns_;
  int32_t stream_ = 0;
  std::vector<TraceEvent> events_;
  std::vector<int32_t> streams_;
};

// ---- random ones

class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed) {}
  // A number in [low, high].
  int of(int low, int high) {
    return low + static_cast<int>(engine_() % static_cast<uint64_t>(high - low + 1));
  }
  bool chance(int percent) { return of(1, 100) <= percent; }
  uint64_t word() { return engine_(); }

 private:
  std::mt19937_64 engine_;
};

inline BundleSpec random_bundle(Random& random, int index) {
  static constexpr int64_t kBytes[] = {1 << 20, 3 << 20, 8 << 20};
  const bool expert = random.chance(40);
  BundleSpec b = bundle_of("b" + std::to_string(index), kBytes[random.of(0, 2)],
                           random.chance(85) ? random.of(2, 4) : 1);
  b.expert = expert;
  b.group = expert ? 1 : random.of(0, 5) / 5 * 2;
  b.one_payload = random.chance(60);
  b.gather[2].slot *= b.one_payload && random.chance(50) ? 2 : 1;
  b.gather[1].scratch = random.chance(30) ? b.gather[1].slot : 0;
  return b;
}

inline Policy random_policy(Random& random) {
  Policy p;
  p.latency_ns = random.of(0, 3) * 5e3;
  p.bytes_per_ns = random.of(1, 300);
  p.slack = random.of(0, 8) / 4.0;
  p.max_ahead_dense = random.of(1, 8);
  p.max_ahead_expert = random.of(1, 64);
  p.keep_span = random.of(0, 6);
  if (random.chance(50)) p.keep_bytes = int64_t{random.of(0, 40)} << 20;
  if (random.chance(50)) p.send_bytes = int64_t{random.of(0, 40)} << 20;
  p.cross_cuts = random.chance(70);
  return p;
}

// A step of a model: blocks forward and backward, micro-batches on one stream or interleaved on
// two, recomputation of some blocks, blocks that are used again, delayed weight gradients.
class ModelTrace {
 public:
  ModelTrace(Random& random, int blocks, int per_block)
      : random_(random), blocks_(blocks), per_block_(per_block) {
    for (int i = 0; i < blocks; ++i) order_.push_back(i);
    const int depths = random.chance(30) ? random.of(1, 3) : 0;
    for (int d = 0; d < depths; ++d) order_.push_back(blocks - 1);  // a shared block
    for (int i = 0; i < blocks; ++i) recomputes_.push_back(random.chance(40));
    fused_ = random.chance(30);
    delays_ = random.chance(30);
    cuts_ = random.chance(40) ? random.of(1, 20) : 0;
  }

  std::vector<TraceEvent> make(std::vector<int32_t>& streams) {
    const int batches = random_.of(1, 3);
    const bool backward = random_.chance(85), interleaved = batches > 1 && random_.chance(30);
    for (int m = 0; m < batches; ++m) {
      maker_.on(interleaved ? m % 2 : 0);
      forward();
      if (!backward) continue;
      // The next one's forward may come first.
      if (interleaved && m + 1 < batches) {
        maker_.on((m + 1) % 2);
        forward();
        maker_.on(m % 2);
        this->backward();
        maker_.on((m + 1) % 2);
        ++m;
      }
      this->backward();
    }
    const std::vector<TraceEvent> out = maker_.flush();
    streams = maker_.streams();
    return out;
  }

 private:
  BundleId bundle(int block, int i) const { return block * per_block_ + i; }
  TraceMaker& step() {
    if (cuts_ > 0 && random_.chance(cuts_)) maker_.cut();
    return maker_.work(static_cast<float>(random_.of(0, 4) * 10000));
  }
  void consume(Kind kind, int block) {
    for (int i = 0; i < per_block_; ++i) {
      if (fused_ && i % 2 == 1) {
        maker_.also(bundle(block, i));
      } else {
        step().call(kind, bundle(block, i));
      }
    }
  }
  void forward() {
    for (const int block : order_) consume(Kind::kFwd, block);
  }
  void backward() {
    std::vector<BundleId> late;
    for (size_t n = order_.size(); n-- > 0;) {
      const int block = order_[n];
      if (recomputes_[block]) consume(Kind::kRecompute, block);
      for (int i = per_block_; i-- > 0;) {
        // The embedding has no data gradient.
        if (n > 0 || i > 0) step().bwd(bundle(block, i));
        if (delays_) {
          late.push_back(bundle(block, i));
        } else {
          step().wgrad(bundle(block, i));
        }
      }
    }
    for (const BundleId b : late) step().wgrad(b);
  }

  Random& random_;
  int blocks_, per_block_;
  std::vector<int> order_;
  std::vector<bool> recomputes_;
  bool fused_ = false, delays_ = false;
  int cuts_ = 0;
  TraceMaker maker_;
};

// No order but that of the rules: every consume and gradient anywhere.
inline std::vector<TraceEvent> wild_trace(Random& random, int bundles) {
  TraceMaker maker;
  std::vector<bool> open(bundles);
  const int calls = random.of(0, 60);
  for (int i = 0; i < calls; ++i) {
    maker.work(static_cast<float>(random.of(0, 3) * 7000));
    const BundleId b = random.of(0, bundles - 1);
    const int what = random.of(0, 9);
    if (what < 3) {
      maker.fwd(b);
    } else if (what < 5) {
      maker.bwd(b);
    } else if (what < 6) {
      maker.again(b);
    } else if (what < 9) {
      open[b] ? maker.grad(b) : maker.buffer(b);
      open[b] = !open[b];
    } else {
      maker.cut();
    }
  }
  for (BundleId b = 0; b < bundles; ++b) {
    if (open[b]) maker.grad(b);
  }
  return maker.flush();
}

inline TraceCase random_case(uint64_t seed) {
  Random random(seed);
  TraceCase out;
  const int blocks = random.of(1, 6), per_block = random.of(1, 4);
  for (int i = 0; i < blocks * per_block; ++i) out.bundles.push_back(random_bundle(random, i));
  // Blocks are alike, as those of models are.
  if (random.chance(60)) {
    for (int i = per_block; i < blocks * per_block; ++i) {
      out.bundles[i] = out.bundles[i % per_block];
    }
  }
  out.policy = random_policy(random);
  if (random.chance(70)) {
    out.trace = ModelTrace(random, blocks, per_block).make(out.streams);
  } else {
    out.trace = wild_trace(random, blocks * per_block);
  }
  return out;
}

// The same step, in which forward passes read rows of bundle `b` and gradients are of rows, some of
// them: whole weights may be read and written in between (embedding.h).
inline TraceCase by_rows(TraceCase c, BundleId b, Random& random) {
  BundleSpec& spec = c.bundles[b];
  spec.rows = {.tokens = 9, .lookup = 1000, .reduce = {3000, 5000, 700}};
  TraceCase out{c.bundles, {}, {}, c.policy};
  size_t position = 0;
  for (size_t i = 0; i < c.trace.size(); ++i) {
    TraceEvent e = c.trace[i];
    const TraceEvent* const next = i + 1 < c.trace.size() ? &c.trace[i + 1] : nullptr;
    if (e.bundle == b && spec.group_size > 1 && random.chance(70)) {
      if (e.kind == Kind::kFwd && !e.same_call && !next->same_call) e.kind = Kind::kRows;
      if (e.kind == Kind::kGradBuffer && next->kind == Kind::kGrad && next->bundle == b) {
        e.kind = Kind::kRowsGrad;
      }
    }
    if (!c.streams.empty() && !e.same_call) out.streams.push_back(c.streams[position]);
    position += !e.same_call;
    out.trace.push_back(e);
    if (e.kind != Kind::kRowsGrad) continue;
    ++i;  // and its kGrad
    ++position;
  }
  return out;
}

}  // namespace moiety::gtp
