// The model's passes on a GPU against those on a CPU, from equal weights: losses, counts and
// gradients; the same bits every time, and from a captured graph with another batch.
#include "moiety/base/gpu_runtime.h"
#include "moiety/base/graph.h"
#include "moiety/model/decoder.h"
#include "moiety/model/precision.h"
#include "tests/model/gradient_error.h"
#include "tests/model/harness.h"
#include "tests/model/model_cases.h"
#include "tests/support/gpu_test.h"
#include "tests/support/mirror.h"

namespace moiety::model {
namespace {

struct GpuCase {
  ModelCase model;
  std::optional<RecipeKind> recipe = {};
  DType gradients = DType::kFloat32;
};

ModelCase all_kinds_of_layers(const char* name, Recompute recompute, bool delay_wgrad) {
  return model_case(name,
                    [&](Config& c) {
                      take_all_kinds_of_layers(c);
                      c.recompute = recompute;
                      c.delay_wgrad = delay_wgrad;
                    },
                    {.documents = true});
}

std::vector<GpuCase> gpu_cases() {
  std::vector<GpuCase> cases;
  for (const ModelCase& c : model_cases()) cases.push_back({c});
  cases.push_back({all_kinds_of_layers("recompute_none", Recompute::kNone, false)});
  cases.push_back({all_kinds_of_layers("recompute_moe", Recompute::kMoe, false)});
  cases.push_back({all_kinds_of_layers("recompute_full", Recompute::kFull, false)});
  cases.push_back({all_kinds_of_layers("delayed", Recompute::kNone, true)});
  cases.push_back({all_kinds_of_layers("delayed_recompute_full", Recompute::kFull, true)});
  return cases;
}

// In each recipe, dispatched in its format where it has one for that, `plain`; and `late`, whose
// weight gradients wait, kept in bf16.
std::vector<GpuCase> recipe_cases(const ModelCase& plain, const ModelCase& late) {
  const RecipeKind kinds[] = {RecipeKind::kFp8Block, RecipeKind::kMxfp8, RecipeKind::kNvfp4};
  const char* names[] = {"fp8_block", "mxfp8", "nvfp4"};
  const char* late_names[] = {"fp8_block_late_bf16", "mxfp8_late_bf16", "nvfp4_late_bf16"};
  std::vector<GpuCase> cases;
  for (size_t i = 0; i < std::size(kinds); ++i) {
    cases.push_back({plain, kinds[i]});
    cases.back().model.name = names[i];
    cases.push_back({late, kinds[i], DType::kBFloat16});
    cases.back().model.name = late_names[i];
  }
  return cases;
}
std::vector<GpuCase> one_token_cases() {
  return recipe_cases(one_token_case(""), one_token_case("", true));
}
std::vector<GpuCase> document_cases() {
  return recipe_cases(all_kinds_of_layers("", Recompute::kMoe, false),
                      all_kinds_of_layers("", Recompute::kNone, true));
}

void set_recipe(Transformer& model, std::optional<RecipeKind> kind) {
  if (!kind) return;
  Precision precision;
  precision.recipe = make_recipe(*kind);
  precision.seed = 17;
  if (*kind != RecipeKind::kNvfp4) precision.dispatch = precision.recipe->input;
  model.set_precision(precision);
}

// The model of a harness, with its weights, on a GPU.
class OnGpu {
 public:
  OnGpu(const ModelHarness& host, int64_t tokens, comm::Communicator& world, const Stream& stream)
      : stream_(stream), arena_("test", stream.device(), 1 << 12), capacity_(host.capacity) {
    const Config& c = host.model->config();
    const Device device = stream.device();
    if (c.moe_layers() > 0) {
      moe::EpOptions options;
      options.device = device;
      group_.emplace(moe::EpGroup::create(world,
                                          moe::ExpertMap(static_cast<int>(c.router.experts), 1),
                                          ep_limits(c, host.model->storage(), tokens), options));
    }
    model_.emplace(
        c, host.model->storage(),
        ModelContext{.experts = group_ ? &*group_ : nullptr, .world = &world, .device = device});
    for (const optim::Parameter& p : host.parameters) {
      const Tensor& weight = memory_.emplace_back(p.weight.dtype(), p.spec.shape, device);
      copy(weight, p.weight, stream);
      const TensorView view = weight;
      const Tensor& grad = memory_.emplace_back(p.grad.dtype(), p.spec.shape, device);
      parameters_.push_back({.spec = p.spec, .weight = view, .grad = grad});
    }
    const auto from = host.model->states(), to = model_->states();
    for (size_t i = 0; i < to.size(); ++i) copy(to[i].view, from[i].view, stream);
    model_->bind(parameters_);
    sums_ = model_->make_sums();
  }

  // A step of one micro-batch, on whatever the gradients hold.
  void enqueue(const Batch& batch) {
    for (optim::Parameter& p : parameters_) p.overwrite = true;
    sums_.clear(stream_);
    const ArenaScope activations(arena_);
    model_->forward(batch, capacity_, sums_, arena_, stream_);
    model_->backward(batch, stream_);
  }
  void settle() {
    stream_.synchronize();
    arena_.settle();
  }
  void poison() {
    for (const optim::Parameter& p : parameters_) fill_bytes(p.grad, 0xff, stream_);
  }

  Tensor gradient(size_t i) const { return on_host(parameters_[i].grad); }
  StepStats stats() const { return sums_.read(stream_); }
  // The result of a step, as bytes.
  std::string bits() const {
    std::string all;
    const auto append = [&](const TensorView& x) {
      const Tensor here = on_host(x);
      all.append(static_cast<const char*>(here.view().raw()), here.view().bytes());
    };
    append(sums_.memory());
    for (const optim::Parameter& p : parameters_) append(p.grad);
    return all;
  }
  Transformer& model() { return *model_; }
  Arena& arena() { return arena_; }

 private:
  Tensor on_host(const TensorView& x) const { return to_host(x, stream_); }

  Stream stream_;
  std::optional<moe::EpGroup> group_;
  std::optional<Transformer> model_;
  std::vector<Tensor> memory_;
  std::vector<optim::Parameter> parameters_;
  StepSums sums_;
  Arena arena_;
  int64_t capacity_;
};

class TransformerGpu : public GpuTest {
 protected:
  static Batch on(const Mirror& m, const Batch& host) {
    Batch out = host;
    out.token_BS = m(host.token_BS);
    out.target_BS = m(host.target_BS);
    out.mask_BS = m(host.mask_BS);
    out.position_BS = m(host.position_BS);
    return out;
  }

  // Two batches, the model on both devices, and the memory of a batch on the GPU.
  struct Subject {
    Subject(const GpuCase& c, DType storage, comm::Communicator& world, const Stream& stream)
        : first(c.model.config, c.model.sequences, c.model.seq_len, c.model.documents, 5),
          second(c.model.config, c.model.sequences, c.model.seq_len, c.model.documents, 6),
          host(c.model.config, storage, world, first.naive.tokens(), &world) {
      for (const Transformer::State& s : host.model->states()) {
        s.view.data<float>()[0] = static_cast<float>(c.model.bias);
      }
      if (c.gradients != DType::kFloat32) {
        for (optim::Parameter& p : host.parameters) {
          p.grad = host.memory.emplace_back(c.gradients, p.spec.shape);
        }
        host.model->bind(host.parameters);
      }
      set_recipe(*host.model, c.recipe);
      gpu.emplace(host, first.naive.tokens(), world, stream);
      set_recipe(gpu->model(), c.recipe);
      memory.emplace(std::initializer_list<TensorView>{first.token, first.target, first.mask,
                                                       first.position, draw},
                     stream);
      batch = on(*memory, first.batch);
      batch.micro_step_at = (*memory)(draw);
    }
    // Loads the contents that the memory has from now on.
    void load(const TestBatch& next, uint64_t micro_step, const Stream& stream) {
      draw.data<uint64_t>()[0] = micro_step;
      copy(batch.token_BS, next.token, stream);
      copy(batch.target_BS, next.target, stream);
      copy(batch.mask_BS, next.mask, stream);
      if (batch.position_BS.defined()) copy(batch.position_BS, next.position, stream);
      copy(batch.micro_step_at, draw, stream);
    }

    TestBatch first, second;
    Tensor draw{DType::kUInt64, {1}};
    ModelHarness host;
    std::optional<OnGpu> gpu;
    std::optional<Mirror> memory;
    Batch batch;
  };

  // Losses and gradients, the latter relative to the largest element of the parameter or a
  // hundredth of that of all. Where bf16 rounds, a gradient counts as a whole: its difference to
  // its length.
  void compare(const GpuCase& c, DType storage, double loss_bound, double gradient_bound) {
    on_ranks(1, [&](comm::Communicator& world) {
      Subject s(c, storage, world, stream);
      const StepStats want = s.host.step(s.first.batch);
      s.gpu->enqueue(s.batch);
      const StepStats got = s.gpu->stats();
      EXPECT_EQ(got.targets, want.targets);
      EXPECT_EQ(got.tokens, want.tokens);
      double loss_error = relative(got.loss_sum, want.loss_sum);
      loss_error = std::max(loss_error, relative(got.aux_sum, want.aux_sum));
      loss_error = std::max(loss_error, relative(got.z_sum, want.z_sum));
      EXPECT_LE(loss_error, loss_bound);
      if (c.recipe) return compare_recipe(s, gradient_bound);
      if (storage == DType::kFloat32) compare_layers(got, want);
      double all = 0, worst = 0;
      for (const optim::Parameter& p : s.host.parameters) all = std::max(all, largest(p.grad));
      std::string where;
      for (size_t i = 0; i < s.host.parameters.size(); ++i) {
        const optim::Parameter& p = s.host.parameters[i];
        const Tensor gradient = s.gpu->gradient(i);
        const double error = storage == DType::kFloat32
                                 ? largest(gradient, p.grad) / std::max(largest(p.grad), all / 100)
                                 : length(gradient, p.grad) / std::max(length(p.grad), all / 100);
        EXPECT_LE(error, gradient_bound) << p.spec.name;
        if (error >= worst) where = p.spec.name;
        worst = std::max(worst, error);
      }
      RecordProperty("loss_error", text("{:.2e}", loss_error));
      RecordProperty("gradient_error", text("{:.2e} of {}", worst, where));
    });
  }

  // Each gradient by its own length; of sequences in which attention rounds, all of them as one.
  static void compare_recipe(const Subject& s, double bound) {
    std::vector<Tensor> got;
    for (size_t i = 0; i < s.host.parameters.size(); ++i) got.push_back(s.gpu->gradient(i));
    double off = 0, all = 0;
    for (size_t i = 0; i < got.size(); ++i) {
      const TensorView& want = s.host.parameters[i].grad;
      off += std::pow(length(got[i], want), 2);
      all += std::pow(length(want), 2);
    }
    const double whole = std::sqrt(off / all);
    const GradientErrors errors = gradient_errors(s.host.parameters, got, bound);
    if (s.first.token.view().size(1) > 1) {
      EXPECT_LE(whole, bound);
    } else {
      for (const std::string& name : errors.wrong) ADD_FAILURE() << name << " is off";
    }
    RecordProperty("gradient_error", text("{:.2e} of {}", errors.largest, errors.where));
    RecordProperty("whole_gradient_error", text("{:.2e}", whole));
  }

  static void compare_layers(const StepStats& got, const StepStats& want) {
    ASSERT_EQ(got.moe.size(), want.moe.size());
    for (size_t l = 0; l < want.moe.size(); ++l) {
      EXPECT_EQ(got.moe[l].expert_pairs, want.moe[l].expert_pairs);
      EXPECT_EQ(got.moe[l].required, want.moe[l].required);
      EXPECT_EQ(got.moe[l].capacity, want.moe[l].capacity);
      EXPECT_EQ(got.moe[l].dropped, want.moe[l].dropped);
      EXPECT_EQ(got.moe[l].overflow, want.moe[l].overflow);
    }
  }

  static double relative(double a, double b) {
    return std::abs(a - b) / std::max(std::abs(b), 1e-3);
  }
  // Largest and sum of squares of x, or of its difference to y.
  static double largest(const TensorView& x, const TensorView& y = {}) {
    double out = 0;
    for (int64_t i = 0; i < x.numel(); ++i) {
      const double d = get(x, i) - (y.defined() ? get(y, i) : 0);
      out = std::isnan(d) ? 1e30 : std::max(out, std::abs(d));
    }
    return out;
  }
  static double length(const TensorView& x, const TensorView& y = {}) {
    double out = 0;
    for (int64_t i = 0; i < x.numel(); ++i) {
      const double d = get(x, i) - (y.defined() ? get(y, i) : 0);
      out += d * d;
    }
    return std::isnan(out) ? 1e30 : std::sqrt(out);
  }

  // Eager steps, steps at other addresses of the arena, and replays of a graph.
  void expect_same_bits_every_time(const GpuCase& c, DType storage) {
    on_ranks(1, [&](comm::Communicator& world) {
      Subject s(c, storage, world, stream);
      OnGpu& gpu = *s.gpu;
      std::string expected[2];
      for (const int n : {0, 1}) {
        s.load(n == 0 ? s.first : s.second, 3 + n, stream);
        gpu.enqueue(s.batch);
        expected[n] = gpu.bits();
        gpu.settle();
        gpu.poison();
        gpu.enqueue(s.batch);
        EXPECT_TRUE(gpu.bits() == expected[n]) << "batch " << n << ", again";
      }
      EXPECT_FALSE(expected[0] == expected[1]);
      const Graph graph(stream, [&] { gpu.enqueue(s.batch); });
      for (const int n : {0, 1, 0}) {
        s.load(n == 0 ? s.first : s.second, 3 + n, stream);
        gpu.poison();
        graph.launch(stream);
        EXPECT_TRUE(gpu.bits() == expected[n]) << "batch " << n << ", from the graph";
      }
    });
  }
};

class ModelGpu : public TransformerGpu, public testing::WithParamInterface<GpuCase> {};
INSTANTIATE_TEST_SUITE_P(Shapes, ModelGpu, testing::ValuesIn(gpu_cases()),
                         [](const auto& info) { return std::string(info.param.model.name); });

TEST_P(ModelGpu, Fp32IsThatOfTheCpu) { compare(GetParam(), DType::kFloat32, 1e-6, 1e-5); }
TEST_P(ModelGpu, Bf16IsThatOfTheCpu) { compare(GetParam(), DType::kBFloat16, 1e-2, 5e-2); }
TEST_P(ModelGpu, Fp32HasTheSameBitsEveryTime) {
  expect_same_bits_every_time(GetParam(), DType::kFloat32);
}
TEST_P(ModelGpu, Bf16HasTheSameBitsEveryTime) {
  expect_same_bits_every_time(GetParam(), DType::kBFloat16);
}

class RecipeGpu : public TransformerGpu, public testing::WithParamInterface<GpuCase> {};
INSTANTIATE_TEST_SUITE_P(Kinds, RecipeGpu, testing::ValuesIn(one_token_cases()),
                         [](const auto& info) { return std::string(info.param.model.name); });

// The bound is derived in tests/model/gradient_error.h.
TEST_P(RecipeGpu, IsNearTheCpu) {
  compare(GetParam(), DType::kBFloat16, 2e-3, kRecipeGradientBound);
}

class RecipeDocumentsGpu : public RecipeGpu {};
INSTANTIATE_TEST_SUITE_P(Kinds, RecipeDocumentsGpu, testing::ValuesIn(document_cases()),
                         [](const auto& info) { return std::string(info.param.model.name); });

// Attention rounds otherwise on every device, and the casts of four layers make much of that.
TEST_P(RecipeDocumentsGpu, PointsWhereTheCpuDoes) {
  compare(GetParam(), DType::kBFloat16, 3e-2, GetParam().recipe == RecipeKind::kNvfp4 ? 0.6 : 0.3);
}
TEST_P(RecipeDocumentsGpu, HasTheSameBitsEveryTime) {
  expect_same_bits_every_time(GetParam(), DType::kBFloat16);
}

TEST_F(TransformerGpu, EvaluationGivesTheLossOfTraining) {
  const GpuCase c{all_kinds_of_layers("", Recompute::kNone, false)};
  on_ranks(1, [&](comm::Communicator& world) {
    Subject s(c, DType::kFloat32, world, stream);
    OnGpu& gpu = *s.gpu;
    gpu.enqueue(s.batch);
    const StepSums sums = gpu.model().make_sums();
    gpu.model().evaluate(s.batch, s.host.capacity, sums, gpu.arena(), stream);
    EXPECT_EQ(sums.read(stream).loss_sum, gpu.stats().loss_sum);
    EXPECT_EQ(sums.read(stream).aux_sum, gpu.stats().aux_sum);
    EXPECT_EQ(gpu.arena().in_use(), 0);
  });
}

// Heads that cuDNN, tiles and the plain kernel take: a long beginning at once, single tokens behind
// it, and two sequences at a time.
class DecoderGpu : public TransformerGpu,
                   public testing::WithParamInterface<std::tuple<int64_t, DType>> {
 protected:
  static constexpr int64_t kPositions = 160;

  static GpuCase decoder_case() {
    const auto [head_dim, storage] = GetParam();
    GpuCase c{all_kinds_of_layers("", Recompute::kNone, false)};
    Config& config = c.model.config;
    config.head_dim = head_dim;
    // Choices of experts may part where bf16 rounds otherwise.
    if (storage == DType::kBFloat16) config.dense_layers = {0, 1, 2, 3};
    c.model.sequences = 1;
    c.model.seq_len = kPositions;
    c.model.documents = false;
    return c;
  }
  static std::vector<std::vector<Decoder::Continuation>> calls(const int32_t* token) {
    return {{{0, {token, 140}}},
            {{0, {token + 140, 1}}},
            {{0, {token + 141, 1}}, {1, {token, 3}}},
            {{1, {token + 3, 4}}},
            {{1, {token + 7, 1}}}};
  }
};
INSTANTIATE_TEST_SUITE_P(Heads, DecoderGpu,
                         testing::Combine(testing::Values(8, 32, 64, 80, 96, 128, 256),
                                          testing::Values(DType::kFloat32, DType::kBFloat16)),
                         [](const auto& info) {
                           return text("{}_of_{}", name(std::get<1>(info.param)),
                                       std::get<0>(info.param));
                         });

TEST_P(DecoderGpu, GivesTheLogitsOfTheCpuEveryTime) {
  const GpuCase c = decoder_case();
  const DType storage = std::get<DType>(GetParam());
  const double bound = storage == DType::kFloat32 ? 2e-5 : 5e-2;
  on_ranks(1, [&](comm::Communicator& world) {
    Subject s(c, storage, world, stream);
    Decoder host(*s.host.model, 2, kPositions), decoder(s.gpu->model(), 2, kPositions);
    std::vector<Tensor> first;
    for (const int again : {0, 1}) {
      size_t call = 0;
      for (const auto& parts : calls(s.first.token.data<int32_t>())) {
        const auto n = static_cast<int64_t>(parts.size());
        const Tensor there(DType::kFloat32, {n, c.model.config.vocab}, kGpu);
        const int64_t before = gpu::activity().allocations;
        decoder.append(parts, there, s.gpu->arena(), stream);
        const int64_t allocations = gpu::activity().allocations - before;
        Tensor got = to_host(there, stream);
        if (again) {
          EXPECT_EQ(allocations, 0) << "call " << call;
          expect_same_bits(got, first[call], text("call {}", call));
        } else {
          const Tensor want(DType::kFloat32, {n, c.model.config.vocab});
          host.append(parts, want, s.host.arena, {});
          EXPECT_LE(largest(got, want), bound * largest(want)) << "call " << call;
          first.push_back(std::move(got));
        }
        ++call;
      }
      for (const int64_t sequence : {0, 1}) decoder.clear(sequence);
    }
  });
}

}  // namespace
}  // namespace moiety::model
