// A rank of a training run for tests of the executor: shards and their optimizer, callers' streams,
// and what every view and gradient has to be. Streams are deferred: a missing edge is a wrong
// value.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "moiety/base/copy.h"
#include "moiety/comm/thread_group.h"
#include "moiety/formats/bf16.h"
#include "moiety/gtp/executor.h"
#include "tests/gtp/quantized_weights.h"
#include "tests/gtp/traces.h"

namespace moiety::gtp {

struct BundleCase {
  std::string name;
  int64_t rows = 0, cols = 0;
  int experts = 0;     // of this rank; 0: dense
  bool alone = false;  // a group of one rank
  Codec codec{};
  bool trained = true;
  DType main = DType::kFloat32;
};

class Rank;

// The streams that run as soon as something is put on them; the others run when they are waited
// for.
enum class Pace { kLazy, kLanes, kCallers, kOptimizer };

struct TrainingSetup {
  std::vector<BundleCase> bundles;
  int ranks = 2;
  int egtp = 2;  // divides ranks
  Policy policy{};
  TransportKind transport = TransportKind::kMapped;
  Pace pace = Pace::kLazy;
  DType wire = DType::kFloat32;
  bool poison = true;
  bool same_gradients = false;  // in every step
  int64_t compare_scales = 100;
  // Called when the shards of a step are written, before they are published.
  std::function<void(Rank& rank, int64_t step)> on_write;
};

// One call of the executor.
struct ProgramCall {
  Kind kind;
  std::vector<BundleId> bundles;
  int stream = 0;
  double work_ns = 0;
};
using Program = std::vector<ProgramCall>;

inline Program program_of(std::span<const TraceEvent> trace, std::span<const int32_t> streams) {
  Program out;
  size_t position = 0;
  for (const TraceEvent& e : trace) {
    if (e.same_call) {
      out.back().bundles.push_back(e.bundle);
      out.back().work_ns += e.work_ns;
      continue;
    }
    const int stream = streams[position++];
    if (e.kind == Kind::kBegin || e.kind == Kind::kFlush) continue;
    out.push_back({e.kind, {}, stream, e.work_ns});
    if (names_bundle(e.kind)) out.back().bundles.push_back(e.bundle);
  }
  return out;
}
inline Program program_of(TraceMaker maker) {
  const std::vector<TraceEvent> trace = maker.flush();
  return program_of(trace, maker.streams());
}

inline uint64_t mix(std::initializer_list<int64_t> parts) {
  uint64_t z = 0;
  for (const int64_t p : parts) {
    z = (z ^ static_cast<uint64_t>(p)) * 0xBF58476D1CE4E5B9u + 0x9E3779B97F4A7C15u;
    z ^= z >> 29;
  }
  return z;
}
inline uint16_t weight_bits(BundleId b, int64_t expert, int64_t version, int64_t r, int64_t c) {
  return static_cast<uint16_t>(mix({b, expert, version, r, c}) % 0x7F00);
}
// Gradients have different exponents, so that the order of a sum shows.
inline float gradient(int rank, BundleId b, int64_t expert, int64_t salt, int64_t r, int64_t c) {
  const uint64_t h = mix({rank, b, expert, salt, r, c});
  const double m = static_cast<double>(h >> 12) * 0x1p-52 + 0.5;
  return static_cast<float>(std::ldexp(h & 1 ? m : -m, static_cast<int>(h >> 1 & 7)));
}

struct Thrown {};

class Rank final : public ParamSource, public GradSink {
 public:
  Rank(comm::Communicator& world, const TrainingSetup& setup) : world_(world), setup_(setup) {
    make_groups();
    for (size_t b = 0; b < setup.bundles.size(); ++b) make_bundle(static_cast<BundleId>(b));
    place_shards();
    opt_ = Stream::deferred();
    for (Stream& s : callers_) s = Stream::deferred();
    ExecutorOptions options;
    options.policy = setup.policy;
    options.policy.memory_bytes_per_ns = 1;
    options.wire = setup.wire;
    options.poison = setup.poison;
    options.compare_scales = setup.compare_scales;
    options.make_lane = [this] { return lanes_.emplace_back(Stream::deferred()); };
    std::vector<Transport*> transports{dense_.get(), experts_.get()};
    executor_ = std::make_unique<Executor>(weights_, bundles_, transports, options,
                                           &world.bootstrap(), *this, this);
    ready_.resize(bundles_.size());
    logs_.resize(weights_.size());
    for (size_t w = 0; w < weights_.size(); ++w) {
      if (!weights_[w].main_grad.defined()) continue;
      logs_[w] = Tensor(weights_[w].main_grad.dtype(), weights_[w].main_grad.sizes());
    }
    write_shards();
  }
  // Work of the callers and the optimizer ends before its memory does.
  ~Rank() override { synchronize(); }

  int number() const { return world_.rank(); }
  Executor& executor() { return *executor_; }
  Stream& caller(int s) { return callers_[s]; }
  void drop_executor() { executor_.reset(); }

  // Makes the calls of a step; throws Thrown before call `stop`.
  void calls(const StepKey& key, const Program& program, int stop = -1) {
    begin_counts();
    StepScope scope = executor_->begin_step(key, callers_[0]);
    follow(callers_[1], callers_[0]);
    for (size_t i = 0; i < program.size(); ++i) {
      if (static_cast<int>(i) == stop) throw Thrown{};
      call(program[i]);
      run_ahead();
    }
    if (static_cast<int>(program.size()) == stop) throw Thrown{};
    follow(callers_[0], callers_[1]);
    executor_->flush(callers_[0]);
    executor_->flush(callers_[0]);
    run_ahead();
    check_reports();
  }
  // The optimizer's part: looks at the gradients, writes the next version of the shards.
  void update() {
    follow(opt_, callers_[0]);
    for (Transport* t : {dense_.get(), experts_.get()}) {
      if (t) t->await_drained(opt_);
    }
    opt_.run([this, added = added_, trains = trains()] { check_gradients(added, trains); });
    ++version_;
    write_shards();
  }
  void step(const StepKey& key, const Program& program) {
    calls(key, program);
    update();
  }
  void synchronize() {
    for (const Stream& s : callers_) s.synchronize();
    opt_.synchronize();
  }

  std::vector<std::string> faults;
  std::vector<int> late;               // by bundle, in the step
  std::map<BundleId, int> made_ready;  // ensure_ready in the step
  View last_view;
  int voided = 0;  // abandoned steps that it was told of
  ShardedWeight& weight(BundleId b, int member) {
    return weights_[static_cast<size_t>(bundles_[b].members[static_cast<size_t>(member)])];
  }
  // The bytes of all weights' gradients, as the optimizer saw them last; after `synchronize`.
  std::string gradient_bytes() const {
    std::string out;
    for (const Tensor& x : logs_) {
      if (!x.view().defined()) continue;
      out.append(static_cast<const char*>(x.view().raw()), static_cast<size_t>(x.view().bytes()));
    }
    return out;
  }
  // Called before each call of the executor.
  std::function<void(const ProgramCall&)> before_call;

  // ---- ParamSource, GradSink

  void ensure_ready(BundleId b, const Stream& stream) override {
    ++made_ready[b];
    stream.wait(ready_[b]);
  }
  void on_grad_ready(WeightId w, const Event& event) override {
    ++reports_[w];
    opt_.wait(event);
    opt_.run(
        [this, w] { std::memcpy(logs_[w].view().raw(), weights_[w].main_grad.raw(), bytes(w)); });
  }
  void on_grad_late(WeightId w, const Stream& stream) override {
    --reports_[w];
    if (w == bundles_[bundle_of_[w]].members[0]) ++late[bundle_of_[w]];
    Event read;
    read.record(opt_);
    stream.wait(read);
  }
  void on_step_abandoned() override { ++voided; }

 private:
  // ---- construction

  void make_groups() {
    const int R = world_.size(), EP = R / setup_.egtp;
    dense_comm_ = world_.split(0, world_.rank(), "gtp");
    expert_comm_ = world_.split(world_.rank() % EP, world_.rank() / EP, "egtp");
    first_expert_rank_ = world_.rank() % EP;
    expert_stride_ = EP;
    const auto transport = [&](comm::Communicator& comm, const char* name) {
      TransportOptions options;
      options.name = name;
      options.deadline = Seconds(60);
      return comm.size() > 1 ? make_transport(comm, options, setup_.transport) : nullptr;
    };
    dense_ = transport(*dense_comm_, "gtp");
    experts_ = transport(*expert_comm_, "egtp");
  }

  // World ranks that share the bundle.
  std::vector<int> peers(BundleId b) const {
    const BundleCase& c = setup_.bundles[b];
    if (c.alone) return {world_.rank()};
    std::vector<int> out;
    const int size = c.experts > 0 ? expert_comm_->size() : world_.size();
    for (int i = 0; i < size; ++i) {
      out.push_back(c.experts > 0 ? first_expert_rank_ + i * expert_stride_ : i);
    }
    return out;
  }

  void make_bundle(BundleId b) {
    const BundleCase& c = setup_.bundles[b];
    const std::vector<int> ranks = peers(b);
    Bundle bundle{c.name, {}, c.experts > 0, c.experts > 0, b % 2, ScaleLayout::kCompact};
    ShardedWeight w;
    w.layout.rows = c.rows;
    w.layout.cols = c.cols;
    w.layout.align = c.codec.align();
    w.layout.gtp_size = static_cast<int>(ranks.size());
    w.layout.gtp_rank =
        static_cast<int>(std::find(ranks.begin(), ranks.end(), world_.rank()) - ranks.begin());
    w.codec = c.codec;
    const int64_t s = w.layout.shard_rows();
    const int members = std::max(1, c.experts);
    if (c.codec.quantized()) {
      const GatherShape shape{c.codec, s, c.cols, w.layout.gtp_size, members, {}};
      for (uint32_t v = 0; v < kVersions; ++v) quantized_[b].emplace_back(shape, v);
    }
    const Tensor& grads =
        grads_.emplace_back(c.main, std::initializer_list<int64_t>{members, s, c.cols});
    for (int e = 0; e < members; ++e) {
      w.name = text("{}.{}", c.name, e);
      w.expert = c.experts > 0 ? first_expert_rank_ * c.experts + e : -1;
      if (c.trained) w.main_grad = grads.view().select(e);
      bundle.members.push_back(static_cast<WeightId>(weights_.size()));
      bundle_of_.push_back(b);
      weights_.push_back(w);
    }
    bundles_.push_back(bundle);
  }

  // Places shards in memory that peers see: a block for each group.
  void place_shards() {
    for (const bool alone : {false, true}) {
      for (const bool expert : {false, true}) {
        Transport* t = expert ? experts_.get() : dense_.get();
        std::vector<WeightId> mine;
        int64_t total = 0;
        for (WeightId w = 0; w < static_cast<WeightId>(weights_.size()); ++w) {
          const bool moved = weights_[w].layout.gtp_size > 1;
          if ((bundles_[bundle_of_[w]].expert != expert) || moved == alone) continue;
          mine.push_back(w);
          total += shard_bytes(w);
        }
        if (total == 0) continue;
        std::byte* at;
        if (alone) {
          at = local_.emplace_back(total, "shards", 256).data();
        } else {
          shared_.push_back(t->allocate("shards", total));
          at = static_cast<std::byte*>(shared_.back().memory.raw());
        }
        for (const WeightId w : mine) at = place(w, at);
      }
    }
  }
  const Weights& weights_at(BundleId b, int64_t version) const {
    return quantized_.at(b)[static_cast<size_t>(version % kVersions)];
  }
  const QuantizedView& quantized_shard(WeightId w, int64_t version = 0) const {
    const BundleId b = bundle_of_[w];
    const int e = w - bundles_[b].members[0];
    return weights_at(b, version).shards[weights_[w].layout.gtp_rank][e].view();
  }
  int64_t shard_bytes(WeightId w) const {
    const ShardedWeight& x = weights_[w];
    if (!x.codec.quantized()) return up(2 * x.layout.shard_rows() * x.layout.cols);
    int64_t sum = 0;
    for (int a = 0; a < 4; ++a) sum += up(array_of(quantized_shard(w), Array(a)).bytes());
    return sum;
  }
  static int64_t up(int64_t n) { return (n + 255) / 256 * 256; }
  std::byte* place(WeightId w, std::byte* at) {
    ShardedWeight& x = weights_[w];
    if (!x.codec.quantized()) {
      x.data = TensorView(at, DType::kBFloat16, {x.layout.shard_rows(), x.layout.cols});
      return at + shard_bytes(w);
    }
    x.quantized = quantized_shard(w);
    TensorView* arrays[] = {&x.quantized.row_data, &x.quantized.row_scales, &x.quantized.col_data,
                            &x.quantized.col_scales};
    for (TensorView* a : arrays) {
      if (!a->defined()) continue;
      *a = TensorView(at, a->dtype(), a->sizes());
      at += up(a->bytes());
    }
    for (TensorView* value : {&x.quantized.amax, &x.quantized.tensor_scale}) {
      if (!value->defined()) continue;
      const Buffer& own = local_.emplace_back(value->bytes(), "values of a tensor", 256);
      *value = own.view(value->dtype(), value->sizes());
    }
    // Column views are made of the row codes where that can be done.
    if (x.codec.one_payload()) x.quantized.col_data = {};
    return at;
  }

  // ---- the optimizer

  void write_shards() {
    opt_.run([this, version = version_] {
      for (size_t w = 0; w < weights_.size(); ++w) {
        ShardedWeight& x = weights_[w];
        if (x.main_grad.defined()) std::memset(x.main_grad.raw(), 0xFF, bytes(w));
        if (x.codec.quantized()) {
          write_quantized(static_cast<WeightId>(w), version);
          continue;
        }
        auto* bits = static_cast<uint16_t*>(x.data.raw());
        const Range valid = x.layout.valid(x.layout.gtp_rank);
        const int64_t row0 = x.layout.gtp_rank * x.layout.shard_rows();
        for (int64_t r = 0; r < x.layout.shard_rows(); ++r) {
          const bool exists = row0 + r >= valid.begin && row0 + r < valid.end;
          for (int64_t c = 0; c < x.layout.cols; ++c) {
            *bits++ = exists ? weight_bits(bundle_of_[w], x.expert, version, row0 + r, c) : 0;
          }
        }
      }
      if (setup_.on_write) setup_.on_write(*this, version);
    });
    for (Transport* t : {dense_.get(), experts_.get()}) {
      if (!t) continue;
      const int32_t buckets = buckets_of(t == experts_.get());
      for (int32_t bucket = 0; bucket < buckets; ++bucket) t->publish(bucket, opt_);
    }
    for (Event& e : ready_) e.record(opt_);
  }
  void write_quantized(WeightId w, int64_t version) {
    const auto write = [](const TensorView& to, const TensorView& from) {
      if (to.defined()) std::memcpy(to.raw(), from.raw(), static_cast<size_t>(to.bytes()));
    };
    const QuantizedView &to = weights_[w].quantized, &from = quantized_shard(w, version);
    for (int a = 0; a < 4; ++a) write(array_of(to, Array(a)), array_of(from, Array(a)));
    write(to.amax, from.amax);
    write(to.tensor_scale, from.tensor_scale);
  }
  // The number of buckets that the group's bundles are in; a transport counts up to the largest.
  int32_t buckets_of(bool expert) const {
    int32_t count = 0;
    for (size_t b = 0; b < bundles_.size(); ++b) {
      if (bundles_[b].expert == expert && !setup_.bundles[b].alone) {
        count = std::max(count, bundles_[b].bucket + 1);
      }
    }
    return count;
  }

  // There was a gradient, or by its plan there was to be one.
  bool trains() const {
    const bool added = std::any_of(added_.begin(), added_.end(),
                                   [](const auto& salts) { return !salts.second.empty(); });
    const int64_t departures = executor_ ? executor_->counts().departures : departures_;
    return added || (departures > departures_ &&
                     std::any_of(reports_.begin(), reports_.end(), [](int n) { return n > 0; }));
  }
  using Salts = std::map<BundleId, std::vector<int64_t>>;
  // The sum in rank order, or, where a ring sums in another, how far from the exact one it may be.
  struct Expected {
    float sum = 0;
    double exact = 0, bound = 0;
  };
  Expected expected(WeightId w, const Salts& added, int64_t r, int64_t c) const {
    const BundleId b = bundle_of_[w];
    const auto found = added.find(b);
    Expected out;
    if (found == added.end()) return out;
    const bool narrow = wire(b) == DType::kBFloat16;
    const std::vector<int> ranks = peers(b);
    double size = 0;
    bool first = true;
    for (const int64_t salt : found->second) {
      float x = 0;
      for (const int rank : ranks) {
        float g = gradient(rank, b, weights_[w].expert, salt, r, c);
        if (narrow) g = round_bf16(g);
        x = rank == ranks[0] ? g : x + g;
        out.exact += g;
        size += std::abs(g);
      }
      out.sum = first ? x : out.sum + x;
      first = false;
      if (setup_.bundles[b].main == DType::kBFloat16) out.sum = round_bf16(out.sum);
    }
    if (setup_.transport == TransportKind::kRing && ranks.size() > 1) {
      const double roundings = static_cast<double>(ranks.size() + found->second.size()) - 2;
      out.bound = roundings * (narrow ? 0x1p-8 : 0x1p-24) * size;
    }
    return out;
  }
  static float round_bf16(float x) { return static_cast<float>(bf16(x)); }
  DType wire(BundleId b) const {
    if (peers(b).size() == 1) return setup_.bundles[b].main;
    return setup_.bundles[b].main == DType::kBFloat16 ? DType::kBFloat16 : setup_.wire;
  }
  void check_gradients(const Salts& added, bool trains) {
    for (WeightId w = 0; w < static_cast<WeightId>(weights_.size()) && trains; ++w) {
      const ShardedWeight& x = weights_[w];
      if (!x.main_grad.defined()) continue;
      const Range valid = x.layout.valid(x.layout.gtp_rank);
      const int64_t row0 = x.layout.gtp_rank * x.layout.shard_rows();
      for (int64_t r = 0; r < x.layout.shard_rows(); ++r) {
        // At G = 1 nobody writes rows that do not exist.
        const bool exists = row0 + r < valid.end;
        if (!exists && x.layout.gtp_size == 1) continue;
        for (int64_t c = 0; c < x.layout.cols; ++c) {
          const Expected want = exists ? expected(w, added, row0 + r, c) : Expected();
          const int64_t i = r * x.layout.cols + c;
          const float got = logs_[w].view().dtype() == DType::kFloat32
                                ? logs_[w].data<float>()[i]
                                : round_bf16(static_cast<float>(logs_[w].data<bf16>()[i]));
          if (want.bound > 0 ? std::abs(got - want.exact) > want.bound
                             : std::memcmp(&got, &want.sum, 4) != 0) {
            return fault(text("version {}: main_grad of {} at {}, {} is {}, expected {}", version_,
                              x.name, r, c, got, want.sum));
          }
        }
      }
    }
  }
  void fault(const std::string& what) {
    if (faults.size() < 10) faults.push_back(text("rank {}: {}", world_.rank(), what));
  }
  size_t bytes(WeightId w) const { return static_cast<size_t>(weights_[w].main_grad.bytes()); }
  size_t bytes(size_t w) const { return bytes(static_cast<WeightId>(w)); }

  // ---- a step

  static void follow(const Stream& stream, const Stream& other) {
    Event e;
    e.record(other);
    stream.wait(e);
  }
  void run_ahead() {
    if (setup_.pace == Pace::kLanes) {
      for (const Stream& lane : lanes_) lane.synchronize();
    } else if (setup_.pace == Pace::kCallers) {
      for (const Stream& s : callers_) s.synchronize();
    } else if (setup_.pace == Pace::kOptimizer) {
      opt_.synchronize();
    }
  }
  void begin_counts() {
    departures_ = executor_->counts().departures;
    reports_.assign(weights_.size(), 0);
    late.assign(bundles_.size(), 0);
    made_ready.clear();
    added_.clear();
    used_.clear();
  }
  void check_reports() {
    for (size_t w = 0; w < weights_.size(); ++w) {
      const int want = weights_[w].main_grad.defined() && trains();
      if (reports_[w] != want) {
        fault(text("{} was reported {} times, expected {}", weights_[w].name, reports_[w], want));
      }
    }
    for (const BundleId b : used_) {
      if (made_ready[b] != 1) {
        fault(text("{} was made ready {} times", bundles_[b].name, made_ready[b]));
      }
    }
  }

  void call(const ProgramCall& c) {
    if (before_call) before_call(c);
    const Stream& stream = callers_[c.stream];
    const Work work{.flops = 0, .bytes = c.work_ns};
    used_.insert(c.bundles.begin(), c.bundles.end());
    if (is_consume(c.kind)) {
      std::vector<View> views(c.bundles.size());
      const Phase phase = c.kind == Kind::kFwd   ? Phase::kFwd
                          : c.kind == Kind::kBwd ? Phase::kBwd
                                                 : Phase::kRecompute;
      executor_->materialize(c.bundles, phase, work, views, stream);
      for (size_t i = 0; i < views.size(); ++i) read(c.bundles[i], phase, views[i], stream);
      return;
    }
    if (c.kind == Kind::kGradBuffer) {
      const BundleId b = c.bundles[0];
      last_view = executor_->grad_buffer(b, stream);
      const int64_t version = setup_.same_gradients ? 0 : version_;
      const auto salt = static_cast<int64_t>(100 * version + added_[b].size());
      stream.run([this, b, salt, view = last_view] { write_gradient(b, salt, view); });
      open_[b] = salt;
    } else if (c.kind == Kind::kGrad) {
      executor_->reduce(c.bundles[0], stream);
      added_[c.bundles[0]].push_back(open_[c.bundles[0]]);
    } else {
      executor_->cut();
    }
    executor_->note_work(work);
  }

  static TensorView rows_of(const TensorView& data, int e) {
    return data.dims() == 3 ? data.select(e) : data;
  }
  void write_gradient(BundleId b, int64_t salt, const View& view) {
    for (size_t e = 0; e < bundles_[b].members.size(); ++e) {
      const TensorView x = rows_of(view.data, static_cast<int>(e));
      const int64_t expert = weights_[bundles_[b].members[e]].expert;
      for (int64_t r = 0; r < x.size(0); ++r) {
        for (int64_t c = 0; c < x.size(1); ++c) {
          const float g = gradient(world_.rank(), b, expert, salt, r, c);
          const int64_t i = r * x.stride(0) + c;
          if (x.dtype() == DType::kFloat32) {
            float& to = x.data<float>()[i];
            to = view.accumulate ? to + g : g;
          } else {
            bf16& to = x.data<bf16>()[i];
            to = bf16(view.accumulate ? static_cast<float>(to) + round_bf16(g) : g);
          }
        }
      }
    }
  }
  void read(BundleId b, Phase phase, const View& view, const Stream& stream) {
    last_view = view;
    const std::vector<QuantizedView> quantized(view.quantized.begin(), view.quantized.end());
    stream.run([=, this, data = view.data, version = version_] {
      const auto members = static_cast<int>(bundles_[b].members.size());
      for (int e = 0; e < members; ++e) {
        if (setup_.bundles[b].codec.quantized()) {
          check_quantized_view(b, e, phase, quantized[e], version);
        } else {
          check_data(b, e, rows_of(data, e), version);
        }
      }
    });
  }
  void check_data(BundleId b, int e, const TensorView& x, int64_t version) {
    const ShardedWeight& w = weights_[bundles_[b].members[e]];
    if (x.size(0) != w.layout.rows || x.size(1) != w.layout.cols) return fault("a view's shape");
    for (int64_t r = 0; r < x.size(0); ++r) {
      for (int64_t c = 0; c < x.size(1); ++c) {
        const uint16_t got = static_cast<uint16_t*>(x.raw())[r * x.stride(0) + c];
        if (got != weight_bits(b, w.expert, version, r, c)) {
          return fault(text("version {}: {} at {}, {} is {:04x}, expected {:04x}", version, w.name,
                            r, c, got, weight_bits(b, w.expert, version, r, c)));
        }
      }
    }
  }
  void check_quantized_view(BundleId b, int e, Phase phase, const QuantizedView& got,
                            int64_t version) {
    const QuantizedView whole =
        first_rows(weights_at(b, version).whole[e].view(), setup_.bundles[b].rows);
    const bool col = phase == Phase::kBwd;
    const Format format = whole.spec.format;
    const auto expect = [&](const char* what, const TensorView& x, const TensorView& y) {
      if (!y.defined()) return;
      if (!x.defined()) return fault(text("{} of {} is not there", what, bundles_[b].name));
      for (int64_t r = 0; r < y.size(0); ++r) {
        const size_t width = static_cast<size_t>(byte_size(y.dtype(), y.size(1)));
        if (std::memcmp(x.select(r).raw(), y.select(r).raw(), width) != 0) {
          return fault(
              text("version {}: {} of {} differs in row {}", version, what, bundles_[b].name, r));
        }
      }
    };
    const bool rows = !col || format == Format::kMxfp8Tile32;
    if (rows) expect("row_data", got.row_data, whole.row_data);
    if (rows || is_tile(format)) expect("row_scales", got.row_scales, whole.row_scales);
    if (col) expect("col_data", got.col_data, whole.col_data);
    if (col && !is_tile(format)) expect("col_scales", got.col_scales, whole.col_scales);
    const auto value = [&](const char* what, const TensorView& x, const TensorView& y) {
      if (y.defined() && x.data<float>()[col] != y.data<float>()[col]) fault(what);
    };
    value("amax", got.amax, whole.amax);
    value("tensor_scale", got.tensor_scale, whole.tensor_scale);
  }

  comm::Communicator& world_;
  const TrainingSetup setup_;
  std::unique_ptr<comm::Communicator> dense_comm_, expert_comm_;
  int first_expert_rank_ = 0, expert_stride_ = 1;
  std::unique_ptr<Transport> dense_, experts_;
  std::vector<ShardedWeight> weights_;
  std::vector<BundleId> bundle_of_;
  std::vector<Bundle> bundles_;
  static constexpr uint32_t kVersions = 3;  // of quantized weights, in turn
  std::map<BundleId, std::vector<Weights>> quantized_;
  std::vector<Tensor> grads_, logs_;
  std::vector<SlotArena::Block> shared_;
  std::vector<Buffer> local_;
  std::vector<Stream> lanes_;
  Stream opt_, callers_[2];
  std::vector<Event> ready_;
  int64_t version_ = 0;
  int64_t departures_ = 0;  // before the step
  std::vector<int> reports_;
  Salts added_;                       // contributions of the step
  std::map<BundleId, int64_t> open_;  // their salts
  std::set<BundleId> used_;
  std::unique_ptr<Executor> executor_;
};

// Runs a rank; expects no fault.
inline void run_rank(comm::Communicator& world, const TrainingSetup& setup,
                     const std::function<void(Rank&)>& body) {
  Rank rank(world, setup);
  body(rank);
  rank.synchronize();
  for (const std::string& f : rank.faults) ADD_FAILURE() << f;
}

// Every rank a thread.
inline void run_ranks(const TrainingSetup& setup, const std::function<void(Rank&)>& body) {
  comm::run_thread_ranks(setup.ranks, {.deadline = Seconds(60)},
                         [&](comm::Communicator& world) { run_rank(world, setup, body); });
}

}  // namespace moiety::gtp
