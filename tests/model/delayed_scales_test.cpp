// Delayed scaling in the model: which tensors have histories, what a step records, and that a step
// that repeats computes what current scaling computes.
#include "moiety/model/delayed_scales.h"

#include <algorithm>
#include <array>
#include <map>
#include <set>

#include "moiety/model/precision.h"
#include "moiety/quant/quantize.h"
#include "tests/model/harness.h"
#include "tests/model/model_cases.h"

namespace moiety::model {
namespace {

Precision fp8_tensor(int64_t amax_history) {
  Precision p;
  p.recipe = make_recipe(RecipeKind::kFp8Tensor);
  p.amax_history = amax_history;
  return p;
}

// What a checkpoint would hold, by name.
std::map<std::string, std::vector<double>> histories(DelayedScales& scales) {
  std::map<std::string, std::vector<double>> out;
  for (const auto& [name, view] : scales.histories({})) out[name] = values(view);
  return out;
}

TEST(DelayedScales, EveryLinearHasTwoTensors) {
  const Config c = layers_of_all_kinds();
  std::vector<std::string> names;
  int64_t count = 0;
  for (const ScaledTensor& t : scaled_tensors(c)) {
    names.push_back(t.name);
    EXPECT_EQ(t.count, t.expert ? c.router.experts : 1);
    EXPECT_EQ(t.gradient, t.name.ends_with(".amax_dy"));
    EXPECT_EQ(t.expert, t.name.find("experts") != std::string::npos);
    count += t.count;
  }
  const std::vector<std::string> first{
      "layers.0.attn.qkv.amax_x", "layers.0.attn.qkv.amax_dy", "layers.0.attn.o.amax_x",
      "layers.0.attn.o.amax_dy",  "layers.0.mlp.fc1.amax_x",   "layers.0.mlp.fc1.amax_dy",
      "layers.0.mlp.fc2.amax_x",  "layers.0.mlp.fc2.amax_dy",  "layers.1.attn.qkv.amax_x"};
  ASSERT_EQ(names.size(), 3u * 4 + 4 + 2 * 8);
  EXPECT_TRUE(std::equal(first.begin(), first.end(), names.begin()));
  EXPECT_EQ(count, 3 * 4 + 4 + 2 * 4 + 2 * 4 * c.router.experts);
  EXPECT_EQ(delayed_scale_bytes(c, 16), count * 21 * 4);
  // They are the linears that a recipe quantizes.
  on_ranks(1, [&](comm::Communicator& world) {
    ModelHarness h(c, DType::kBFloat16, world, 8);
    h.model->set_precision(fp8_tensor(4));
    std::set<std::string> weights, quantized;
    for (const ScaledTensor& t : scaled_tensors(c)) weights.insert(t.weight);
    for (const optim::ParamSpec& spec : h.model->parameter_specs()) {
      if (spec.format) quantized.insert(spec.name);
    }
    EXPECT_EQ(weights, quantized);
  });
}

// Casts a value as a linear does; returns the decode scale that it had.
float cast(float value, const quant::DelayedScaling& state, DType element) {
  Tensor x(DType::kFloat32, {1, 16});
  x.data<float>()[3] = value;
  QuantSpec spec = QuantSpec::of(Format::kFp8Tensor);
  spec.element = element;
  const QuantizedTensor q(spec, 1, 16, {true, false});
  quant::QuantizeOptions options;
  options.delayed = &state;
  quant::quantize(x, q, options, {});
  return q.view().tensor_scale.data<float>()[0];
}

// The rule by hand, with a history of three steps: a step is cast with the largest value of the
// three before, whatever it sees itself.
TEST(DelayedScales, HistoryByHand) {
  Config c = small_config();
  c.layers = 1;
  c.dense_layers = {0};
  c.d_ffn_dense = 48;
  DelayedScales scales(c, 3, {}, {});
  const std::string w = "layers.0.attn.o.weight";
  const auto x = [&](float v, bool records = true) {
    return cast(v, scales.input(w, records), DType::kE4M3);
  };
  const auto dy = [&](float v) { return cast(v, scales.gradient(w), DType::kE5M2); };
  const auto history = [&](const char* tensor) {
    return histories(scales).at(std::string("layers.0.attn.o.") + tensor);
  };
  const auto end = [&](int32_t skipped = 0) {
    Tensor skip(DType::kInt32, {1});
    *skip.data<int32_t>() = skipped;
    scales.update(nullptr, skip, {});
  };
  using List = std::vector<double>;
  EXPECT_EQ(x(7), 1.0f);  // nothing is known yet
  EXPECT_EQ(x(3.5f), 1.0f);
  EXPECT_EQ(dy(56), 1.0f);
  end();
  EXPECT_EQ(history("amax_x"), (List{0, 0, 7}));  // two casts, one step
  EXPECT_EQ(history("amax_dy"), (List{0, 0, 56}));
  EXPECT_EQ(x(3.5f), 0x1p-6f);  // 448 = 64 * 7
  EXPECT_EQ(dy(28), 0x1p-10f);  // 57344 = 1024 * 56
  end();
  EXPECT_EQ(history("amax_x"), (List{0, 7, 3.5}));
  EXPECT_EQ(x(100, false), 0x1p-6f);  // evaluation leaves no trace
  end();                              // and no tensor was cast
  EXPECT_EQ(history("amax_x"), (List{0, 7, 3.5}));
  EXPECT_EQ(x(1e6f), 0x1p-6f);
  end(1);  // a step that never was
  EXPECT_EQ(history("amax_x"), (List{0, 7, 3.5}));
  EXPECT_EQ(x(1.75f), 0x1p-6f);
  end();
  EXPECT_EQ(x(1.75f), 0x1p-6f);
  end();
  EXPECT_EQ(history("amax_x"), (List{3.5, 1.75, 1.75}));  // 7 has left
  EXPECT_EQ(x(1), 0x1p-7f);
  EXPECT_EQ(history("amax_dy"), (List{0, 56, 28}));

  // Longer and shorter histories keep the newest values.
  for (const int64_t length : {1, 2, 3, 5}) {
    DelayedScales other(c, length, {}, {});
    for (const DelayedScales::History& to : other.make_room(3)) {
      const List from = histories(scales).at(to.name);
      for (int64_t i = 0; i < 3; ++i) put(to.values, i, from[i]);
    }
    other.adopt({});
    List expected = {0, 0, 3.5, 1.75, 1.75};
    expected.erase(expected.begin(), expected.end() - length);
    EXPECT_EQ(histories(other).at("layers.0.attn.o.amax_x"), expected);
    EXPECT_EQ(cast(1, other.input(w, true), DType::kE4M3), length < 3 ? 0x1p-8f : 0x1p-7f);
    EXPECT_EQ(cast(1, other.input("layers.0.mlp.fc1.weight", true), DType::kE4M3), 1.0f);
  }
}

// The loss and every gradient, as bytes.
std::string step_bits(ModelHarness& h, const Batch& batch) {
  for (optim::Parameter& p : h.parameters) p.overwrite = true;
  const StepStats stats = h.step(batch);
  std::string all(reinterpret_cast<const char*>(&stats.loss_sum), sizeof(double));
  for (const optim::Parameter& p : h.parameters) {
    all.append(static_cast<const char*>(p.grad.raw()), p.grad.bytes());
  }
  return all;
}

// The same batch over and over: each step the next linear finds its own largest value in a history
// of one step, until all do. Then the step is that of current scaling.
TEST(DelayedScales, AStepThatRepeatsIsThatOfCurrentScaling) {
  const Config c = layers_of_all_kinds();
  const TestBatch batch(c, 2, 12, false, 1);
  on_ranks(1, [&](comm::Communicator& world) {
    ModelHarness h(c, DType::kBFloat16, world, 24);
    h.model->set_precision(fp8_tensor(0));
    EXPECT_EQ(h.model->delayed_scales(), nullptr);
    const std::string current = step_bits(h, batch.batch);
    h.model->set_precision(fp8_tensor(1));
    int steps = 0;
    for (std::string before, now; before.empty() || now != before; ++steps) {
      before = now;
      now = step_bits(h, batch.batch);
      if (steps == 0) {
        EXPECT_TRUE(now != current);  // it had scale 1
      }
      h.model->update_scales({}, {});
      ASSERT_LT(steps, 40);
    }
    EXPECT_GT(steps, 3);
    EXPECT_TRUE(step_bits(h, batch.batch) == current);
  });
}

// Recomputation and weight gradients that wait cast a tensor again, evaluation casts others; the
// histories are those of the plain step.
TEST(DelayedScales, RecomputationAndEvaluationChangeNoHistory) {
  const auto run = [](Recompute recompute, bool delay, bool evaluates) {
    Config c = layers_of_all_kinds();
    c.recompute = recompute;
    c.delay_wgrad = delay;
    std::string bits;
    on_ranks(1, [&](comm::Communicator& world) {
      ModelHarness h(c, DType::kBFloat16, world, 24);
      h.model->set_precision(fp8_tensor(4));
      for (int step = 0; step < 3; ++step) {
        bits += step_bits(h, TestBatch(c, 2, 12, false, step).batch);
        if (evaluates) {
          const StepSums sums = h.model->make_sums();
          h.model->evaluate(TestBatch(c, 2, 12, false, 99).batch, h.capacity, sums, h.arena, {});
        }
        h.model->update_scales({}, {});
      }
      for (const auto& [name, list] : histories(*h.model->delayed_scales())) {
        EXPECT_GT(list.back(), 0) << name;
        bits.append(reinterpret_cast<const char*>(list.data()), 8 * list.size());
      }
    });
    return bits;
  };
  const std::string plain = run(Recompute::kNone, false, false);
  EXPECT_TRUE(run(Recompute::kNone, false, true) == plain);
  EXPECT_TRUE(run(Recompute::kMoe, false, false) == plain);
  EXPECT_TRUE(run(Recompute::kMoe, true, true) == plain);
  EXPECT_TRUE(run(Recompute::kFull, false, false) == plain);
}

// Ranks that share the experts, each with a part of the batch, have the histories of one with all
// of it: forward of the first layer is the same, so are the values that its linears see. Further on
// routing losses are those of a rank's tokens, and choices of experts may flip.
TEST(DelayedScales, RanksHaveOneHistory) {
  const Config c = layers_of_all_kinds();
  const TestBatch all(c, 4, 12, false, 1);
  std::map<std::string, std::vector<double>> expected;
  on_ranks(1, [&](comm::Communicator& world) {
    ModelHarness h(c, DType::kBFloat16, world, 48, &world);
    h.model->set_precision(fp8_tensor(2));
    h.step(all.batch);
    h.model->update_scales({}, {});
    expected = histories(*h.model->delayed_scales());
  });
  std::array<std::map<std::string, std::vector<double>>, 2> seen;
  on_ranks(2, [&](comm::Communicator& world) {
    ModelHarness h(c, DType::kBFloat16, world, 24, &world);
    h.model->set_precision(fp8_tensor(2));
    h.step(all.part(2 * world.rank(), 2 * world.rank() + 2));
    h.model->update_scales({}, {});
    seen[world.rank()] = histories(*h.model->delayed_scales());
  });
  EXPECT_EQ(seen[0], seen[1]);
  for (const auto& [name, list] : seen[0]) {
    const std::vector<double>& one = expected.at(name);
    const bool same = name.starts_with("layers.0.") && name.ends_with("_x");
    for (size_t i = 0; i < list.size(); ++i) {
      EXPECT_NEAR(list[i], one[i], same ? 0 : 0.4 * one[i]) << name << " " << i;
    }
  }
}

}  // namespace
}  // namespace moiety::model
