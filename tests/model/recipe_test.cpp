// The model under the recipes: what is quantized, and that results do not depend on who keeps the
// weights, on threads, or on anything but the recipe and the random numbers' place.
#include <cstring>

#include "moiety/model/precision.h"
#include "moiety/quant/quantize.h"
#include "tests/model/harness.h"
#include "tests/model/model_cases.h"

namespace moiety::model {
namespace {

constexpr RecipeKind kKinds[] = {RecipeKind::kFp8Tensor, RecipeKind::kFp8Block, RecipeKind::kMxfp8,
                                 RecipeKind::kNvfp4};

Precision precision_of(RecipeKind kind, const RecipeOptions& options = {}) {
  Precision p;
  p.recipe = make_recipe(kind, options);
  p.seed = 17;
  return p;
}

TEST(Recipe, FormatsAreThoseOfTheTable) {
  const gemm::Recipe whole = make_recipe(RecipeKind::kFp8Tensor);
  EXPECT_EQ(whole.weight, QuantSpec::of(Format::kFp8Tensor));
  EXPECT_EQ(whole.input, whole.weight);
  EXPECT_EQ(whole.gradient.format, Format::kFp8Tensor);
  EXPECT_EQ(whole.gradient.element, DType::kE5M2);
  EXPECT_THROW(make_recipe(RecipeKind::kFp8Tensor, {.weight_2d = true}), Error);
  const gemm::Recipe fp8 = make_recipe(RecipeKind::kFp8Block);
  EXPECT_EQ(fp8.weight, QuantSpec::of(Format::kFp8Block128x128));
  EXPECT_EQ(fp8.input, QuantSpec::of(Format::kFp8Block1x128));
  EXPECT_EQ(fp8.gradient, fp8.input);
  EXPECT_TRUE(fp8.weight.pow2_scales && fp8.input.pow2_scales);
  const gemm::Recipe fp32_scales = make_recipe(RecipeKind::kFp8Block, {.pow2_scales = false});
  EXPECT_FALSE(fp32_scales.weight.pow2_scales || fp32_scales.input.pow2_scales ||
               fp32_scales.gradient.pow2_scales);
  const gemm::Recipe mxfp8 = make_recipe(RecipeKind::kMxfp8);
  EXPECT_EQ(mxfp8.weight, QuantSpec::of(Format::kMxfp8));
  EXPECT_EQ(mxfp8.gradient, mxfp8.input);
  EXPECT_EQ(make_recipe(RecipeKind::kMxfp8, {.weight_2d = true}).weight.format,
            Format::kMxfp8Tile32);
  const gemm::Recipe nvfp4 = make_recipe(RecipeKind::kNvfp4);
  EXPECT_EQ(nvfp4.weight, QuantSpec::of(Format::kNvfp4Tile16));
  EXPECT_TRUE(nvfp4.input.rht_col && nvfp4.gradient.rht_col);
  EXPECT_EQ(nvfp4.input.rounding, Rounding::kNearest);
  EXPECT_EQ(nvfp4.gradient.rounding, Rounding::kStochastic);
  const gemm::Recipe plain =
      make_recipe(RecipeKind::kNvfp4, {.rht = false, .stochastic = false, .weight_2d = false});
  EXPECT_EQ(plain.weight, QuantSpec::of(Format::kNvfp4));
  EXPECT_EQ(plain.input, plain.weight);
  EXPECT_EQ(plain.gradient, plain.weight);
  EXPECT_THROW(make_recipe(RecipeKind::kFp8Block, {.weight_2d = false}), Error);
}

TEST(Recipe, LayersInBf16) {
  const auto kept = [](RecipeKind kind, int64_t layers) {
    const KeptLayers k = kept_layers(kind, layers);
    return std::pair{k.first, k.last};
  };
  EXPECT_EQ(kept(RecipeKind::kNvfp4, 62), std::pair(int64_t{2}, int64_t{8}));
  EXPECT_EQ(kept(RecipeKind::kNvfp4, 8), std::pair(int64_t{1}, int64_t{1}));
  EXPECT_EQ(kept(RecipeKind::kNvfp4, 33), std::pair(int64_t{2}, int64_t{5}));
  EXPECT_EQ(kept(RecipeKind::kNvfp4, 7), std::pair(int64_t{0}, int64_t{0}));
  EXPECT_EQ(kept(RecipeKind::kMxfp8, 62), std::pair(int64_t{0}, int64_t{0}));
  EXPECT_EQ(kept(RecipeKind::kFp8Block, 62), std::pair(int64_t{0}, int64_t{0}));
  EXPECT_EQ(kept(RecipeKind::kFp8Tensor, 62), std::pair(int64_t{0}, int64_t{0}));
}

// Names of parameters that have a format.
std::set<std::string> formatted(Transformer& model, const Precision& precision) {
  model.set_precision(precision);
  std::set<std::string> names;
  for (const optim::ParamSpec& spec : model.parameter_specs()) {
    if (spec.format) names.insert(spec.name);
  }
  return names;
}

TEST(Recipe, ConcernsLinearsOfLayersAlone) {
  on_ranks(1, [](comm::Communicator& world) {
    ModelHarness h(layers_of_all_kinds(), DType::kBFloat16, world, 8);
    using Names = std::set<std::string>;
    const Names layer0{"layers.0.attn.qkv.weight", "layers.0.attn.o.weight",
                       "layers.0.mlp.fc1.weight", "layers.0.mlp.fc2.weight"};
    const auto moe_layer = [](const std::string& l, bool attention) {
      Names names{l + "moe.experts.fc1.weight", l + "moe.experts.fc2.weight",
                  l + "moe.shared.fc1.weight", l + "moe.shared.fc2.weight"};
      if (attention) names.insert({l + "attn.qkv.weight", l + "attn.o.weight"});
      return names;
    };
    Names all = layer0;
    all.merge(moe_layer("layers.1.", true));
    all.merge(moe_layer("layers.2.", true));
    for (const RecipeKind kind : kKinds) EXPECT_EQ(formatted(*h.model, precision_of(kind)), all);
    EXPECT_EQ(formatted(*h.model, {}), Names());
    Precision some = precision_of(RecipeKind::kMxfp8);
    some.kept = {1, 1};
    some.attention_linears = false;
    EXPECT_EQ(formatted(*h.model, some), moe_layer("layers.1.", false));
    // These are quantized for every use.
    EXPECT_EQ(formatted(*h.model, precision_of(RecipeKind::kNvfp4, {.weight_2d = false})), Names());
    ModelHarness wide(layers_of_all_kinds(), DType::kFloat32, world, 8);
    EXPECT_THROW(wide.model->set_precision(precision_of(RecipeKind::kMxfp8)), Error);
  });
}

// The result of a step: the loss and every gradient, as bytes.
std::string step_bits(ModelHarness& h, const Batch& batch) {
  for (optim::Parameter& p : h.parameters) p.overwrite = true;
  const StepStats stats = h.step(batch);
  std::string all(reinterpret_cast<const char*>(&stats.loss_sum), sizeof(double));
  for (const optim::Parameter& p : h.parameters) {
    all.append(static_cast<const char*>(p.grad.raw()), p.grad.bytes());
  }
  return all;
}

// Puts the weights into the formats that the specs ask for, as an optimizer does.
struct InFormats {
  explicit InFormats(ModelHarness& h) {
    const std::vector<optim::ParamSpec> specs = h.model->parameter_specs();
    for (size_t i = 0; i < specs.size(); ++i) {
      optim::Parameter& p = h.parameters[i];
      if (!specs[i].format) continue;
      const TensorView w = p.weight.dims() == 3
                               ? p.weight
                               : p.weight.reshape({1, p.weight.size(0), p.weight.size(1)});
      for (int64_t e = 0; e < w.size(0); ++e) {
        owned.push_back(std::make_unique<QuantizedTensor>(
            *specs[i].format, w.size(1), w.size(2),
            Directions{true, specs[i].format->format == Format::kMxfp8}));
        quant::quantize(w.select(e), *owned.back(), {}, {});
        p.quantized.push_back(*owned.back());
      }
      p.weight = TensorView();
    }
    h.model->bind(h.parameters);
  }
  std::vector<std::unique_ptr<QuantizedTensor>> owned;
};

struct OptionCase {
  const char* name;
  RecipeKind kind;
  RecipeOptions options;
};
const std::vector<OptionCase> kOptionCases{
    {"fp8_tensor", RecipeKind::kFp8Tensor, {}},
    {"fp8_block", RecipeKind::kFp8Block, {}},
    {"fp8_block_fp32_scales", RecipeKind::kFp8Block, {.pow2_scales = false}},
    {"mxfp8", RecipeKind::kMxfp8, {}},
    {"mxfp8_tiles", RecipeKind::kMxfp8, {.weight_2d = true}},
    {"nvfp4", RecipeKind::kNvfp4, {}},
    {"nvfp4_no_rht", RecipeKind::kNvfp4, {.rht = false}},
    {"nvfp4_nearest", RecipeKind::kNvfp4, {.stochastic = false}},
    {"nvfp4_rows", RecipeKind::kNvfp4, {.weight_2d = false}}};

TEST(Recipe, WeightsInTheirFormatThreadsAndRepetitionGiveTheSameBits) {
  const Config c = layers_of_all_kinds();
  const TestBatch batch(c, 2, 12, false, 1);
  std::map<std::string, std::string> seen;
  for (const OptionCase& option : kOptionCases) {
    on_ranks(1, [&](comm::Communicator& world) {
      ModelHarness h(c, DType::kBFloat16, world, 24);
      const std::string plain = step_bits(h, batch.batch);
      h.model->set_precision(precision_of(option.kind, option.options));
      const std::string bits = step_bits(h, batch.batch);
      EXPECT_TRUE(bits != plain) << option.name;
      {
        const ThreadBudget budget(3);
        EXPECT_TRUE(step_bits(h, batch.batch) == bits) << option.name;
      }
      Batch next = batch.batch;
      next.micro_step = 1;
      const bool random = option.kind == RecipeKind::kNvfp4 && option.options.stochastic;
      EXPECT_EQ(step_bits(h, next) != bits, random) << option.name;
      next.micro_step = 0;
      next.first_token = 32;
      next.all_tokens = 64;
      EXPECT_EQ(step_bits(h, next) != bits, random) << option.name;
      for (const auto& [name, other] : seen) {
        EXPECT_TRUE(other != bits || (name == "mxfp8" && option.kind == RecipeKind::kMxfp8))
            << option.name << " is " << name;
      }
      seen[option.name] = bits;
      const InFormats formats(h);
      EXPECT_TRUE(step_bits(h, batch.batch) == bits) << option.name;
      Precision none;
      EXPECT_NO_THROW(h.model->set_precision(none));
    });
  }
}

TEST(Recipe, KeepingAllLayersIsBf16) {
  const Config c = layers_of_all_kinds();
  const TestBatch batch(c, 2, 12, false, 1);
  on_ranks(1, [&](comm::Communicator& world) {
    ModelHarness h(c, DType::kBFloat16, world, 24);
    const std::string plain = step_bits(h, batch.batch);
    for (const RecipeKind kind : kKinds) {
      Precision p = precision_of(kind);
      p.kept = {1, 2};
      h.model->set_precision(p);
      EXPECT_TRUE(step_bits(h, batch.batch) == plain);
      p.kept = {1, 1};
      h.model->set_precision(p);
      EXPECT_TRUE(step_bits(h, batch.batch) != plain);
    }
  });
}

// Gradients point where those of bf16 do: closer the more bits there are.
TEST(Recipe, GradientsAreNearThoseOfBf16) {
  const Config c = layers_of_all_kinds();
  const TestBatch batch(c, 4, 16, false, 1);
  const std::map<RecipeKind, double> least{{RecipeKind::kFp8Tensor, 0.95},
                                           {RecipeKind::kFp8Block, 0.95},
                                           {RecipeKind::kMxfp8, 0.95},
                                           {RecipeKind::kNvfp4, 0.7}};
  on_ranks(1, [&](comm::Communicator& world) {
    ModelHarness h(c, DType::kBFloat16, world, 64);
    const StepStats expected_stats = h.step(batch.batch);
    const Weights expected = h.gradients();
    for (const auto& [kind, cosine] : least) {
      h.model->set_precision(precision_of(kind));
      for (optim::Parameter& p : h.parameters) p.overwrite = true;
      const StepStats stats = h.step(batch.batch);
      EXPECT_NEAR(stats.loss_sum, expected_stats.loss_sum, 0.02 * expected_stats.loss_sum);
      double dot = 0, a = 0, b = 0;
      for (const auto& [name, g] : h.gradients()) {
        if (name.find("router") != std::string::npos) continue;  // a flipped choice is a jump
        const std::vector<double>& e = expected.at(name);
        for (size_t i = 0; i < g.size(); ++i) {
          dot += g[i] * e[i];
          a += g[i] * g[i];
          b += e[i] * e[i];
        }
      }
      EXPECT_GT(dot / std::sqrt(a * b), cosine) << static_cast<int>(kind);
      EXPECT_LT(dot / std::sqrt(a * b), 0.99999) << static_cast<int>(kind);
    }
  });
}

}  // namespace
}  // namespace moiety::model
