// Repeated weights: a model with two depths of multi-token prediction behind its trunk, which share
// one block, and an embedding that is the head too, through the executor with real products:
// planned steps, steps on demand, and one rank that has the whole weights and the data of all.
//
//   h0 = A(e0)            e_k: embeddings of the tokens k places on
//   h1 = B(h0 + e1)       A, B: x + W2 relu(W1 x)
//   h2 = B(h1 + e2)       logits_k = E h_k, and their loss |logits_k - target_k|^2 / 2
//
// A step consumes E six times forward and three times backward (by rows: three and three), B twice,
// and each of them has as many contributions to its gradient. Streams are deferred, as those of
// executor_harness.h: a missing edge is a wrong value.
#include <bit>
#include <cmath>
#include <cstring>
#include <deque>
#include <mutex>

#include <gtest/gtest.h>

#include "moiety/comm/thread_group.h"
#include "moiety/formats/bf16.h"
#include "moiety/gtp/executor.h"
#include "moiety/gtp/transport.h"

namespace moiety::gtp {
namespace {

constexpr int kDepths = 3;                              // the trunk's and two more
constexpr int64_t kVocab = 37, kModel = 18, kFfn = 23;  // no multiples of anything
constexpr int64_t kTokens[] = {7, 5, 0, 9};             // of the sources of data, one to a rank
constexpr int kSteps = 4;
enum : BundleId { kE, kA1, kA2, kB1, kB2, kWeights };

struct Variant {
  const char* name;
  bool recompute = false;  // blocks keep their inputs alone
  bool delayed = false;    // weight gradients of blocks come last, from another stream
  bool by_rows = false;    // the embedding; the head needs its whole
};

void PrintTo(const Variant& v, std::ostream* out) { *out << v.name; }

float normal(uint64_t seed, uint64_t i) {
  uint64_t z = (seed * 0x9E3779B97F4A7C15u) ^ (i * 0xBF58476D1CE4E5B9u);
  for (int k = 0; k < 3; ++k) z = (z ^ (z >> 29)) * 0x94D049BB133111EBu;
  return static_cast<float>(static_cast<double>(z >> 11) * 0x1p-52 - 1);
}

struct Matrix {
  Matrix(int64_t r, int64_t c) : rows(r), cols(c), x(static_cast<size_t>(r * c)) {}
  float* row(int64_t r) { return x.data() + r * cols; }
  int64_t rows, cols;
  std::vector<float> x;
};

// A range of rows for each source.
using Parts = std::vector<Range>;

const bf16* weight_row(const TensorView& w, int64_t n) { return w.data<bf16>() + n * w.stride(0); }

// ---- Products, each element a chain of additions in the order of the inner index.

// y[t] = W x[t]
void product(const TensorView& w_NK, Matrix& x, Matrix& y) {
  for (int64_t t = 0; t < x.rows; ++t) {
    for (int64_t n = 0; n < w_NK.size(0); ++n) {
      float sum = 0;
      for (int64_t k = 0; k < x.cols; ++k) {
        sum += x.row(t)[k] * static_cast<float>(weight_row(w_NK, n)[k]);
      }
      y.row(t)[n] = sum;
    }
  }
}
// dx[t] += W^T dy[t]
void add_input_gradient(const TensorView& w_NK, Matrix& dy, Matrix& dx) {
  for (int64_t t = 0; t < dy.rows; ++t) {
    for (int64_t k = 0; k < dx.cols; ++k) {
      float sum = 0;
      for (int64_t n = 0; n < dy.cols; ++n) {
        sum += dy.row(t)[n] * static_cast<float>(weight_row(w_NK, n)[k]);
      }
      dx.row(t)[k] += sum;
    }
  }
}

// The gradient (+)= the terms of the sources, in their order: what ranks with a source each reduce.
template <class Term>
void sum_sources(const Parts& parts, const View& view, const Term& term) {
  const TensorView& g = view.data;
  for (int64_t n = 0; n < g.size(0); ++n) {
    for (int64_t k = 0; k < g.size(1); ++k) {
      float x = term(parts[0], n, k);
      for (size_t j = 1; j < parts.size(); ++j) x = x + term(parts[j], n, k);
      float& to = g.data<float>()[n * g.stride(0) + k];
      to = view.accumulate ? to + x : x;
    }
  }
}
void weight_gradient(const Parts& parts, Matrix& dy, Matrix& x, const View& view) {
  sum_sources(parts, view, [&](Range part, int64_t n, int64_t k) {
    float sum = 0;
    for (int64_t t = part.begin; t < part.end; ++t) sum += dy.row(t)[n] * x.row(t)[k];
    return sum;
  });
}
void table_gradient(const Parts& parts, const std::vector<int32_t>& token, const bf16* d_TD,
                    const View& view) {
  sum_sources(parts, view, [&](Range part, int64_t v, int64_t k) {
    float sum = 0;
    for (int64_t t = part.begin; t < part.end; ++t) {
      if (token[t] == v) sum += static_cast<float>(d_TD[t * kModel + k]);
    }
    return sum;
  });
}

// The results of a step: of every source in turn, then whole gradients.
struct StepResult {
  std::vector<std::vector<float>> logits{kDepths}, dx{kDepths};  // dx: of e_k
  std::vector<std::vector<float>> grads{kWeights};
};

// The sources [first, first + count) on one rank.
class Stack final : public ParamSource, public GradSink {
 public:
  Stack(comm::Communicator& world, const Variant& v, int first, int count)
      : world_(world), variant_(v), opt_(Stream::deferred()) {
    for (Stream& s : callers_) s = Stream::deferred();
    int64_t end = 0;
    for (int j = 0; j < count; ++j) {
      parts_.push_back({end, end + kTokens[first + j]});
      end = parts_.back().end;
      for (int64_t t = 0; t < kTokens[first + j]; ++t) places_.push_back(100 * (first + j) + t);
    }
    if (world.size() > 1) transport_ = make_transport(world, {.name = "gtp"});
    const int64_t sizes[kWeights][2] = {
        {kVocab, kModel}, {kFfn, kModel}, {kModel, kFfn}, {kFfn, kModel}, {kModel, kFfn}};
    std::vector<Bundle> bundles;
    for (BundleId w = 0; w < kWeights; ++w) bundles.push_back(make_weight(w, sizes[w]));
    ExecutorOptions options;
    options.policy.latency_ns = 2000;
    options.policy.bytes_per_ns = 0.5;
    options.policy.memory_bytes_per_ns = 1;
    options.poison = true;
    options.make_lane = [] { return Stream::deferred(); };
    executor_ =
        std::make_unique<Executor>(weights_, bundles, std::vector<Transport*>{transport_.get()},
                                   options, &world.bootstrap(), *this, this);
    publish();
  }
  ~Stack() override { synchronize(); }

  const ExecutorCounts& counts() const { return executor_->counts(); }

  // A training step; its results are there behind `synchronize`.
  void step(const StepKey& key, const Variant& variant) {
    variant_ = variant;
    results_.emplace_back();
    reports_.assign(kWeights, 0);
    StepScope scope = executor_->begin_step(key, main());
    follow(side(), main());
    forward();
    backward();
    follow(main(), side());
    executor_->flush(main());
    for (const int n : reports_) EXPECT_EQ(n, 1) << "reports of a weight";
    update();
  }
  void synchronize() {
    for (const Stream& s : callers_) s.synchronize();
    opt_.synchronize();
    memory_.clear();
  }
  // The parts of this rank's sources and shards, behind those of the ranks before.
  void add_to(std::vector<StepResult>& all) const {
    all.resize(results_.size());
    const auto append = [](const auto& from, auto& to) {
      for (size_t i = 0; i < from.size(); ++i)
        to[i].insert(to[i].end(), from[i].begin(), from[i].end());
    };
    for (size_t s = 0; s < all.size(); ++s) {
      append(results_[s].logits, all[s].logits);
      append(results_[s].dx, all[s].dx);
      append(results_[s].grads, all[s].grads);
    }
  }

  void ensure_ready(BundleId, const Stream& stream) override { stream.wait(ready_); }
  void on_grad_ready(WeightId w, const Event& event) override {
    ++reports_[w];
    opt_.wait(event);
    opt_.run([this, w, to = &results_.back().grads[w]] {
      const auto rows = weights_[w].layout.valid(world_.rank()).size();
      const float* g = weights_[w].main_grad.data<float>();
      to->assign(g, g + rows * weights_[w].layout.cols);
    });
  }
  void on_grad_late(WeightId, const Stream&) override { ADD_FAILURE() << "a late gradient"; }

 private:
  // The tensors that a block keeps for its backward pass.
  struct BlockPass {
    BundleId w1 = kA1, w2 = kA2;
    Matrix *x = nullptr, *u = nullptr, *a = nullptr, *y = nullptr;
  };

  const Stream& main() const { return callers_[0]; }
  const Stream& side() const { return callers_[1]; }
  static void follow(const Stream& stream, const Stream& other) {
    Event e;
    e.record(other);
    stream.wait(e);
  }
  int64_t tokens() const { return parts_.back().end; }
  Matrix* matrix(int64_t cols) { return &memory_.emplace_back(tokens(), cols); }

  Bundle make_weight(BundleId w, const int64_t (&sizes)[2]) {
    ShardedWeight& weight = weights_.emplace_back();
    weight.name = text("weight {}", w);
    weight.layout.rows = sizes[0];
    weight.layout.cols = sizes[1];
    weight.layout.gtp_rank = world_.rank();
    weight.layout.gtp_size = world_.size();
    const int64_t s = weight.layout.shard_rows();
    if (transport_) {
      blocks_.push_back(transport_->allocate("shard", 2 * s * sizes[1]));
      weight.data = {blocks_.back().memory.raw(), DType::kBFloat16, {s, sizes[1]}};
    } else {
      weight.data = tensors_.emplace_back(DType::kBFloat16, std::initializer_list{s, sizes[1]});
    }
    weight.main_grad = tensors_.emplace_back(DType::kFloat32, std::initializer_list{s, sizes[1]});
    const Range valid = weight.layout.valid(world_.rank());
    for (int64_t i = 0; i < valid.size() * sizes[1]; ++i) {
      const auto at = static_cast<uint64_t>(valid.begin * sizes[1] + i);
      weight.data.data<bf16>()[i] = bf16(0.4f * normal(1 + static_cast<uint64_t>(w), at));
    }
    return {.name = weight.name,
            .members = {w},
            .row_tokens = w == kE && variant_.by_rows && transport_ ? int64_t{9} : 0};
  }

  TensorView read(BundleId w, Phase phase, const Stream& stream) {
    return executor_->materialize(w, phase, {0, 4000}, stream).data;
  }

  // ---- forward

  std::vector<int32_t> tokens_at(int depth) const {
    std::vector<int32_t> out;
    for (const int64_t p : places_) {
      const float x = normal(77, static_cast<uint64_t>(p + depth + 31 * int64_t(results_.size())));
      out.push_back(static_cast<int32_t>(std::abs(x) * float(kVocab)) % int32_t{kVocab});
      if (p % 3 == 0) out.back() = p % 2 == 0 ? 15 : 16;  // repeated; a border of shards
    }
    return out;
  }

  // x (+)= the rows of the tokens.
  void embed(int depth, Matrix* e) {
    const auto& token = tokens_[depth] = tokens_at(depth);
    if (by_rows()) {
      Tensor& rows =
          tensors_.emplace_back(DType::kBFloat16, std::initializer_list{tokens(), kModel});
      executor_->look_up(kE, token_view(depth), rows, {}, {0, 4000}, main());
      main().run([=, view = rows.view()] {
        for (size_t i = 0; i < e->x.size(); ++i) e->x[i] = static_cast<float>(view.data<bf16>()[i]);
      });
      return;
    }
    const TensorView table = read(kE, Phase::kFwd, main());
    main().run([=, this] {
      for (int64_t t = 0; t < tokens(); ++t) {
        const bf16* row = weight_row(table, token[t]);
        for (int64_t k = 0; k < kModel; ++k) e->row(t)[k] = static_cast<float>(row[k]);
      }
    });
  }
  bool by_rows() const { return variant_.by_rows && transport_; }
  TensorView token_view(int depth) {
    std::vector<int32_t>& kept = token_memory_.emplace_back(tokens_[depth]);
    kept.resize(kept.size() + 1);  // its address exists without tokens, too
    return {kept.data(), DType::kInt32, {tokens()}};
  }

  // u and a, which a block forgets under recomputation.
  void enter_block(BlockPass& b, Phase phase) {
    b.u = matrix(kFfn), b.a = matrix(kFfn);
    const TensorView w1 = read(b.w1, phase, main());
    main().run([w1, b] {
      product(w1, *b.x, *b.u);
      for (size_t i = 0; i < b.u->x.size(); ++i) b.a->x[i] = std::max(b.u->x[i], 0.0f);
    });
  }
  BlockPass block(BundleId w1, BundleId w2, Matrix* x) {
    BlockPass b{w1, w2, x, nullptr, nullptr, matrix(kModel)};
    enter_block(b, Phase::kFwd);
    const TensorView w = read(w2, Phase::kFwd, main());
    main().run([w, b] {
      product(w, *b.a, *b.y);
      for (size_t i = 0; i < b.y->x.size(); ++i) b.y->x[i] += b.x->x[i];
    });
    return b;
  }

  void forward() {
    for (int k = 0; k < kDepths; ++k) {
      Matrix* const x = matrix(kModel);
      embed(k, x);
      if (k > 0) {
        Matrix* const h = blocks_of_step_[k - 1].y;
        main().run([=] {
          for (size_t i = 0; i < x->x.size(); ++i) x->x[i] = h->x[i] + x->x[i];
        });
      }
      blocks_of_step_[k] = k == 0 ? block(kA1, kA2, x) : block(kB1, kB2, x);
      logits_[k] = matrix(kVocab);
      const TensorView head = read(kE, Phase::kFwd, main());
      const BlockPass& b = blocks_of_step_[k];
      Matrix* const l = logits_[k];
      main().run([=, this, h = b.y, out = &results_.back().logits[k]] {
        product(head, *h, *l);
        *out = l->x;
        for (int64_t t = 0; t < tokens(); ++t) {
          for (int64_t v = 0; v < kVocab; ++v) {
            const auto at = static_cast<uint64_t>((places_[t] * kDepths + k) * kVocab + v);
            l->row(t)[v] -= normal(99, at);
          }
        }
      });
    }
  }

  // ---- backward

  void backward() {
    std::vector<std::function<void()>> later;
    Matrix* carried = nullptr;  // the gradient of h_k from the depth behind it
    for (int k = kDepths - 1; k >= 0; --k) {
      BlockPass b = blocks_of_step_[k];
      Matrix* const d = matrix(kModel);
      const TensorView head = read(kE, Phase::kBwd, main());
      main().run([=, l = logits_[k]] {
        if (carried) d->x = carried->x;
        add_input_gradient(head, *l, *d);
      });
      gradient(kE, logits_[k], b.y, main());
      if (variant_.recompute) enter_block(b, Phase::kRecompute);
      Matrix* const da = matrix(kFfn);
      const TensorView w2 = read(b.w2, Phase::kBwd, main());
      main().run([=] {
        add_input_gradient(w2, *d, *da);
        for (size_t i = 0; i < da->x.size(); ++i) da->x[i] = b.u->x[i] > 0 ? da->x[i] : 0.0f;
      });
      Matrix* const dx = matrix(kModel);
      const TensorView w1 = read(b.w1, Phase::kBwd, main());
      main().run([=, out = &results_.back().dx[k]] {
        dx->x = d->x;
        add_input_gradient(w1, *da, *dx);
        *out = dx->x;
      });
      const auto gradients = [=, this](const Stream& stream) {
        gradient(b.w2, d, b.a, stream);
        gradient(b.w1, da, b.x, stream);
      };
      if (variant_.delayed) {
        later.emplace_back([=, this] { gradients(side()); });
      } else {
        gradients(main());
      }
      embedding_gradient(k, dx);
      carried = dx;
    }
    follow(side(), main());
    for (const auto& f : later) f();
  }

  void gradient(BundleId w, Matrix* dy, Matrix* x, const Stream& stream) {
    const View view = executor_->grad_buffer(w, stream);
    stream.run([=, this] { weight_gradient(parts_, *dy, *x, view); });
    executor_->reduce(w, stream);
  }
  // Computes it from dx rounded to the table's dtype, in which rows travel.
  void embedding_gradient(int depth, Matrix* dx) {
    Tensor& rounded =
        tensors_.emplace_back(DType::kBFloat16, std::initializer_list{tokens(), kModel});
    main().run([=, to = rounded.data<bf16>()] {
      for (size_t i = 0; i < dx->x.size(); ++i) to[i] = bf16(dx->x[i]);
    });
    if (by_rows()) {
      executor_->add_rows(kE, token_view(depth), rounded, {0, 4000}, main());
      return;
    }
    const View view = executor_->grad_buffer(kE, main());
    main().run([=, this, token = tokens_[depth], d = rounded.data<bf16>()] {
      table_gradient(parts_, token, d, view);
    });
    executor_->reduce(kE, main());
  }

  // ---- the optimizer: gradient descent

  void update() {
    follow(opt_, main());
    if (transport_) transport_->await_drained(opt_);
    opt_.run([this] {
      for (const ShardedWeight& w : weights_) {
        const int64_t count = w.layout.valid(world_.rank()).size() * w.layout.cols;
        for (int64_t i = 0; i < count; ++i) {
          bf16& x = w.data.data<bf16>()[i];
          x = bf16(static_cast<float>(x) - 5e-4f * w.main_grad.data<float>()[i]);
        }
        std::memset(w.main_grad.raw(), 0xFF, static_cast<size_t>(w.main_grad.bytes()));
      }
    });
    publish();
  }
  void publish() {
    if (transport_) transport_->publish(0, opt_);
    ready_.record(opt_);
  }

  comm::Communicator& world_;
  Variant variant_;
  Parts parts_;                  // rows of the sources
  std::vector<int64_t> places_;  // by row: what token and target are made of
  std::unique_ptr<Transport> transport_;
  std::vector<ShardedWeight> weights_;
  std::vector<SlotArena::Block> blocks_;
  std::deque<Tensor> tensors_;
  std::deque<Matrix> memory_;
  std::deque<std::vector<int32_t>> token_memory_;
  std::vector<int32_t> tokens_[kDepths];
  BlockPass blocks_of_step_[kDepths];
  Matrix* logits_[kDepths] = {};
  Stream callers_[2], opt_;
  Event ready_;
  std::vector<int> reports_;
  std::deque<StepResult> results_;
  std::unique_ptr<Executor> executor_;
};

enum class Mode { kOnDemand, kPlanned, kLeavesItsPlan };
constexpr Mode kModes[] = {Mode::kOnDemand, Mode::kPlanned, Mode::kLeavesItsPlan};

// The steps of a run, put together from its ranks. In the last mode every other step has the calls
// of the opposite variant under the key of all steps.
std::vector<StepResult> train(const Variant& v, int ranks, int sources, Mode mode) {
  Variant other = v;
  if (mode == Mode::kLeavesItsPlan) other.recompute = !v.recompute, other.delayed = !v.delayed;
  std::vector<StepResult> all;
  std::mutex mutex;
  comm::run_thread_ranks(ranks, {.deadline = Seconds(60)}, [&](comm::Communicator& world) {
    const int each = sources / ranks;
    Stack stack(world, v, world.rank() * each, each);
    for (int s = 0; s < kSteps; ++s) {
      stack.step({mode == Mode::kOnDemand ? text("train {}", s) : "train", 1}, s % 2 ? other : v);
    }
    stack.synchronize();
    EXPECT_EQ(stack.counts().planned, mode == Mode::kPlanned ? kSteps - 1 : 0);
    EXPECT_EQ(stack.counts().departures, mode == Mode::kLeavesItsPlan ? kSteps - 1 : 0);
    for (int r = 0; r < ranks; ++r) {
      if (r == world.rank()) {
        const std::lock_guard lock(mutex);
        stack.add_to(all);
      }
      world.barrier();
    }
  });
  return all;
}

std::string difference(const char* what, const std::vector<std::vector<float>>& got,
                       const std::vector<std::vector<float>>& want) {
  for (size_t i = 0; i < want.size(); ++i) {
    if (got[i].size() != want[i].size()) {
      return text("{} {}: {} elements, expected {}", what, i, got[i].size(), want[i].size());
    }
    for (size_t j = 0; j < want[i].size(); ++j) {
      const float a = got[i][j], b = want[i][j];
      if (std::bit_cast<uint32_t>(a) == std::bit_cast<uint32_t>(b)) continue;
      return text("{} {} at {}: {}, expected {}", what, i, j, a, b);
    }
  }
  return "";
}

void expect_equal(const std::vector<StepResult>& got, const std::vector<StepResult>& want) {
  ASSERT_EQ(got.size(), want.size());
  for (size_t s = 0; s < want.size(); ++s) {
    SCOPED_TRACE(text("step {}", s));
    EXPECT_EQ(difference("logits", got[s].logits, want[s].logits), "");
    EXPECT_EQ(difference("dx", got[s].dx, want[s].dx), "");
    EXPECT_EQ(difference("gradient", got[s].grads, want[s].grads), "");
  }
}

class MtpStackVariant : public testing::TestWithParam<Variant> {};
INSTANTIATE_TEST_SUITE_P(Variants, MtpStackVariant,
                         testing::Values(Variant{"plain"}, Variant{"recompute", true},
                                         Variant{"delayed", false, true},
                                         Variant{"recompute_delayed", true, true},
                                         Variant{"rows", false, false, true},
                                         Variant{"rows_recompute_delayed", true, true, true}),
                         [](const auto& info) { return std::string(info.param.name); });

TEST_P(MtpStackVariant, AnyExecutionIsTheReplicatedOne) {
  for (const int ranks : {2, 3, 4}) {
    for (const Mode mode : kModes) {
      SCOPED_TRACE(text("{} ranks, mode {}", ranks, static_cast<int>(mode)));
      const std::vector<StepResult> replicated = train(GetParam(), 1, ranks, mode);
      EXPECT_TRUE(std::isfinite(replicated.back().logits[0][0]));
      EXPECT_NE(replicated[1].grads[kB1], replicated[0].grads[kB1]);
      expect_equal(train(GetParam(), ranks, ranks, mode), replicated);
    }
  }
}

TEST(MtpStack, RecomputationChangesNoBit) {
  for (const bool by_rows : {false, true}) {
    const auto run = [&](bool recompute) {
      return train({"", recompute, false, by_rows}, 3, 3, Mode::kPlanned);
    };
    expect_equal(run(true), run(false));
  }
}

}  // namespace
}  // namespace moiety::gtp
