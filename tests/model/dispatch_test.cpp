// Tokens' rows that travel to their experts quantized (precision.dispatch): what experts read, what
// goes over the wire, and that neither depends on the layout.
#include <cstring>
#include <set>

#include "moiety/base/trace.h"
#include "moiety/model/precision.h"
#include "moiety/quant/dequantize.h"
#include "moiety/quant/quantize.h"
#include "tests/model/harness.h"
#include "tests/model/model_cases.h"
#include "tests/support/bits.h"

namespace moiety::model {
namespace {

Config moe_config() {
  Config c = small_config();
  c.d_model = 160;  // a second block of 128 that is short
  c.shared_d_ffn = 16;
  return c;
}

struct Format {
  const char* name;
  QuantSpec spec;
  RecipeKind kind;
  RecipeOptions options;
};

std::vector<Format> formats() {
  QuantSpec exact = QuantSpec::of(moiety::Format::kFp8Block1x128);
  exact.pow2_scales = false;
  return {{"fp8_block", QuantSpec::of(moiety::Format::kFp8Block1x128), RecipeKind::kFp8Block, {}},
          {"fp8_block with exact scales", exact, RecipeKind::kFp8Block, {.pow2_scales = false}},
          {"mxfp8", QuantSpec::of(moiety::Format::kMxfp8), RecipeKind::kMxfp8, {}}};
}

// The rows of x [T, D], quantized and back.
Tensor quantized_and_back(const QuantSpec& spec, const TensorView& x) {
  const QuantizedTensor codes(spec, x.size(0), x.size(1), {true, false});
  quant::quantize(x, codes.view(), {}, {});
  Tensor out(DType::kBFloat16, x.sizes());
  quant::dequantize(codes.view(), Direction::kRow, out, {}, {});
  return out;
}

// Every row that an expert has is that of a token, quantized once and dequantized.
struct RowsOfExperts final : TensorProbe {
  void enter(int64_t, bool) override {}
  void stored(const StoredTensor& t) override {
    if (t.operation != "dispatch" || t.name != "rows") return;
    const TensorView& h = *t.inputs.begin();
    const Tensor expected = quantized_and_back(spec, h);
    std::set<std::string> rows, plain;
    for (int64_t r = 0; r < h.size(0); ++r) {
      rows.insert(bytes_of(expected.view().select(r)));
      plain.insert(bytes_of(h.select(r)));
    }
    const auto see = [&](int64_t r) {
      const std::string row = bytes_of(t.view.select(r));
      EXPECT_TRUE(rows.contains(row));
      changed += !plain.contains(row);
      ++seen;
    };
    if (!t.rows) {  // each token's row once, which experts read through maps
      for (int64_t r = 0; r < t.view.size(0); ++r) see(r);
      return;
    }
    for (int64_t e = 0; e < t.rows->count_L.numel(); ++e) {
      const int64_t begin = t.rows->begin_L1.data<int64_t>()[e];
      for (int64_t i = 0; i < t.rows->count_L.data<int64_t>()[e]; ++i) see(begin + i);
    }
  }
  QuantSpec spec;
  int64_t seen = 0, changed = 0;
};

TEST(QuantizedDispatch, ExpertsReadEachTokensRowDequantized) {
  Config c = moe_config();
  const TestBatch batch(c, 2, 12, false, 1);
  for (int i = 0; i < 2 * static_cast<int>(formats().size()); ++i) {
    const Format f = formats()[i / 2];
    c.row_layout = i % 2 ? moe::RowLayout::kExpert : moe::RowLayout::kRank;
    const int64_t copies = i % 2 ? c.router.top_k : 1;
    on_ranks(1, [&](comm::Communicator& world) {
      ModelHarness h(c, DType::kBFloat16, world, batch.naive.tokens());
      Precision precision;
      precision.dispatch = f.spec;
      h.model->set_precision(precision);
      RowsOfExperts probe;
      probe.spec = f.spec;
      h.model->set_probe(&probe);
      h.step(batch.batch);
      EXPECT_EQ(probe.seen, c.layers * batch.naive.tokens() * copies) << f.name;
      EXPECT_GT(probe.changed, probe.seen / 2) << f.name;
    });
  }
}

struct Step {
  double loss = 0;
  std::map<std::string, std::string> gradients;
};

Step step_of(const Config& c, const Precision& precision, const TestBatch& batch) {
  Step out;
  on_ranks(1, [&](comm::Communicator& world) {
    ModelHarness h(c, DType::kBFloat16, world, batch.naive.tokens());
    h.model->set_precision(precision);
    out.loss = h.step(batch.batch).loss_sum;
    for (const optim::Parameter& p : h.parameters) out.gradients[p.spec.name] = bytes_of(p.grad);
  });
  return out;
}

double relative_distance(const std::string& a, const std::string& b) {
  double difference = 0, norm = 0;
  for (size_t i = 0; i < a.size(); i += sizeof(float)) {
    float x = 0, y = 0;
    std::memcpy(&x, &a[i], sizeof(float));
    std::memcpy(&y, &b[i], sizeof(float));
    difference += double(x - y) * (x - y);
    norm += double(y) * y;
  }
  return std::sqrt(difference / norm);
}

// Blocks lie along a row, so the codes are those that the recipe would make of the row at its
// expert: the same step, but for fc1's weight gradient, whose blocks lie along tokens and are made
// of the dequantized rows. With scales that are powers of two this is the same again, since codes
// of 3 bits behind the point round alike under either scale, as long as they are no subnormals.
TEST(QuantizedDispatch, TheRecipesOwnFormatChangesOneGradientAlone) {
  for (const auto& [layers, changed] : {std::pair(1, 1), std::pair(2, 2)}) {
    Config c = moe_config();
    c.layers = layers;
    const TestBatch batch(c, 2, 12, false, 1);
    for (const Format& f : formats()) {
      Precision precision;
      precision.recipe = make_recipe(f.kind, f.options);
      ASSERT_EQ(precision.recipe->input, f.spec);
      const Step plain = step_of(c, precision, batch);
      precision.dispatch = f.spec;
      const Step quantized = step_of(c, precision, batch);
      EXPECT_EQ(quantized.loss, plain.loss) << f.name;
      int different = 0;
      for (const auto& [name, gradient] : plain.gradients) {
        if (name.ends_with("experts.fc1.weight")) {
          different += quantized.gradients.at(name) != gradient;
          EXPECT_LT(relative_distance(quantized.gradients.at(name), gradient), 0.05)
              << f.name << " " << name;
        } else {
          EXPECT_EQ(quantized.gradients.at(name), gradient) << f.name << " " << name;
        }
      }
      EXPECT_EQ(different, f.options.pow2_scales ? 0 : changed) << f.name;
    }
  }
}

TEST(QuantizedDispatch, LayersThatStayInBf16SendBf16) {
  Config c = moe_config();
  c.layers = 2;
  const TestBatch batch(c, 2, 12, false, 1);
  Precision kept, sent;
  kept.recipe = sent.recipe = make_recipe(RecipeKind::kMxfp8);
  kept.kept = sent.kept = {2, 0};
  sent.dispatch = QuantSpec::of(moiety::Format::kMxfp8);
  EXPECT_EQ(step_of(c, sent, batch).gradients, step_of(c, kept, batch).gradients);
}

// With partial sums by token nothing depends on the places of the experts.
TEST(QuantizedDispatch, LossesDoNotDependOnExpertParallelism) {
  Config c = moe_config();
  c.combine = moe::Reduction::kToken;
  for (const Format& f : formats()) {
    std::vector<std::vector<double>> losses;
    for (const int ep : {1, 2, 4}) {
      losses.emplace_back(4);
      on_ranks(4, [&](comm::Communicator& world) {
        const TestBatch batch(c, 1, 12, false, 3 + world.rank());
        const auto experts = world.split(world.rank() / ep, world.rank(), "ep");
        ModelHarness h(c, DType::kBFloat16, *experts, batch.naive.tokens());
        Precision precision;
        precision.dispatch = f.spec;
        h.model->set_precision(precision);
        losses.back()[world.rank()] = h.step(batch.batch).loss_sum;
      });
    }
    EXPECT_EQ(losses[1], losses[0]) << f.name;
    EXPECT_EQ(losses[2], losses[0]) << f.name;
  }
}

// A record: codes, scales and the weights of the K choices, each part up to 16 bytes, the whole up
// to 128. Every token goes to both ranks.
TEST(QuantizedDispatch, BytesOnTheWireAreThoseOfTheRecord) {
  Config c = moe_config();
  c.d_model = 512;
  c.router.top_k = 4;
  const auto up = [](int64_t n, int64_t q) { return (n + q - 1) / q * q; };
  const auto record = [&](int64_t data, int64_t scales) {
    return up(up(data, 16) + up(scales, 16) + up(4 * c.router.top_k, 16), 128);
  };
  const std::vector<std::tuple<const char*, std::optional<QuantSpec>, int64_t>> cases{
      {"bf16", std::nullopt, record(2 * 512, 0)},
      {"fp8_block", formats()[0].spec, record(512, 4 * 4)},
      {"mxfp8", formats()[2].spec, record(512, 16)}};
  for (const auto& [name, format, bytes] : cases) {
    std::atomic<int64_t> spans = 0;
    on_ranks(2, [&](comm::Communicator& world) {
      const TestBatch batch(c, 1, 12, false, 3 + world.rank());
      ModelHarness h(c, DType::kBFloat16, world, batch.naive.tokens());
      Precision precision;
      precision.dispatch = format;
      h.model->set_precision(precision);
      Trace trace;
      set_current_trace(&trace);
      h.step(batch.batch);
      set_current_trace(nullptr);
      for (const TraceEvent& e : trace.events) {
        const std::string_view span = e.name;
        if (e.lane != TraceLane::kEp || e.args[0].name == nullptr) continue;
        if (span == "dispatch") {
          EXPECT_EQ(e.args[0].value, double(12 * bytes)) << name;
          ++spans;
        } else if (span == "combine_backward") {  // in the storage type
          EXPECT_EQ(e.args[0].value, double(12 * record(2 * 512, 0))) << name;
        }
      }
    });
    EXPECT_EQ(spans, 2 * c.layers) << name;
  }
}

TEST(QuantizedDispatch, WhatItCannotBe) {
  on_ranks(1, [](comm::Communicator& world) {
    Precision precision;
    precision.dispatch = QuantSpec::of(moiety::Format::kMxfp8);
    ModelHarness wide(moe_config(), DType::kFloat32, world, 8);
    EXPECT_THROW(wide.model->set_precision(precision), Error);
    precision.dispatch = QuantSpec::of(moiety::Format::kNvfp4);
    ModelHarness h(moe_config(), DType::kBFloat16, world, 8);
    EXPECT_THROW(h.model->set_precision(precision), Error);
  });
}

}  // namespace
}  // namespace moiety::model
