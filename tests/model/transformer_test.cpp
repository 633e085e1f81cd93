// The whole model against the naive one in double: losses, logits, statistics and gradients.
#include "moiety/model/transformer.h"

#include "moiety/base/copy.h"
#include "moiety/model/decoder.h"
#include "tests/model/harness.h"
#include "tests/model/model_cases.h"

namespace moiety::model {
namespace {

class Model : public testing::TestWithParam<ModelCase> {};
INSTANTIATE_TEST_SUITE_P(Shapes, Model, testing::ValuesIn(model_cases()),
                         [](const auto& info) { return std::string(info.param.name); });

struct Subject {
  Subject(const ModelCase& c, DType storage, comm::Communicator& world)
      : batch(c.config, c.sequences, c.seq_len, c.documents, 5),
        harness(c.config, storage, world, batch.naive.tokens()) {
    for (const Transformer::State& s : harness.model->states()) {
      s.view.data<float>()[0] = static_cast<float>(c.bias);
    }
  }
  TestBatch batch;
  ModelHarness harness;
};

TEST_P(Model, LossAndStatisticsMatchTheNaiveModel) {
  const ModelCase& c = GetParam();
  on_ranks(1, [&](comm::Communicator& world) {
    Subject s(c, DType::kFloat32, world);
    const StepStats stats = s.harness.step(s.batch.batch);
    const NaiveResult naive = naive_forward(c.config, s.harness.weights(), s.batch.naive);
    int64_t targets = 0;
    for (int64_t t = 0; t < s.batch.naive.tokens(); ++t) targets += s.batch.naive.is_target(t);
    EXPECT_EQ(stats.targets, targets);
    EXPECT_EQ(stats.tokens, s.batch.naive.tokens());
    const double n = double(targets);
    EXPECT_NEAR(stats.loss_sum / n, naive.loss_sum / n, 1e-6 * (1 + naive.loss_sum / n));
    const bool has_aux = c.config.router.aux != moe::AuxLoss::kNone;
    EXPECT_NEAR(stats.aux_sum / n, has_aux ? naive.aux : 0, 1e-5);
    EXPECT_NEAR(stats.z_sum / n, naive.z, 1e-5 * (1 + naive.z));
    ASSERT_EQ(stats.moe.size(), naive.choice.size());
    for (size_t l = 0; l < naive.choice.size(); ++l) {
      std::vector<int64_t> pairs(c.config.router.experts);
      for (const int64_t e : naive.choice[l]) ++pairs[e];
      EXPECT_EQ(stats.moe[l].expert_pairs, pairs) << "MoE layer " << l;
      EXPECT_EQ(stats.moe[l].dropped, 0);
      EXPECT_FALSE(stats.moe[l].overflow);
      EXPECT_EQ(stats.moe[l].required, int64_t(naive.choice[l].size()));
    }
  });
}

// Compares, for every logical tensor, the derivative of the naive objective along a direction, by
// central differences in double, with the gradient that the model computed in float. The direction
// is the gradient itself with random factors, so that no element is without weight.
TEST_P(Model, GradientsMatchDifferencesOfTheNaiveObjective) {
  const ModelCase& c = GetParam();
  on_ranks(1, [&](comm::Communicator& world) {
    Subject s(c, DType::kFloat32, world);
    s.harness.step(s.batch.batch);
    Weights weights = s.harness.weights();
    const Choice choice = naive_forward(c.config, weights, s.batch.naive).choice;
    std::mt19937 engine(3);
    for (const auto& [tensor, g] : s.harness.gradients()) {
      double squares = 0;
      for (const double v : g) squares += v * v;
      const double norm = std::sqrt(squares);
      // An embedding row without a token, an expert without tokens: zeros are exact.
      std::vector<double> direction;
      double along = 0, length = 0;
      for (const double v : g) {
        const double noise = std::normal_distribution<double>(0, 1)(engine);
        direction.push_back(v * (1 + 0.5 * noise) +
                            0.1 * noise * norm / std::sqrt(double(g.size())));
        along += v * direction.back();
        length += direction.back() * direction.back();
      }
      if (norm == 0) direction.assign(g.size(), length = 1);
      const double h = 1e-5 / std::sqrt(length);
      const std::vector<double> old = weights.at(tensor);
      const auto objective = [&](double step) {
        for (size_t i = 0; i < old.size(); ++i) weights[tensor][i] = old[i] + step * direction[i];
        return naive_forward(c.config, weights, s.batch.naive, choice).objective;
      };
      const double difference = (objective(h) - objective(-h)) / (2 * h);
      weights[tensor] = old;
      EXPECT_NEAR(along, difference, 1e-4 * norm * std::sqrt(length) + 1e-7) << tensor;
    }
  });
}

// Forward asks for weights before it reads them: with weights that are there only when they have been
// asked for, the bits are the same.
TEST_P(Model, ForwardAsksForWeightsBeforeItReadsThem) {
  const ModelCase& c = GetParam();
  on_ranks(1, [&](comm::Communicator& world) {
    Subject s(c, DType::kFloat32, world);
    ModelHarness& h = s.harness;
    const StepStats expected = h.step(s.batch.batch);
    std::vector<std::vector<double>> weights;
    for (const optim::Parameter& p : h.parameters) {
      weights.push_back(values(p.weight));
      fill_bytes(p.weight, 0xFF, {});  // NaN
    }
    int there = 0;
    const StepSums sums = h.model->make_sums();
    const ArenaScope activations(h.arena);
    h.model->forward(s.batch.batch, h.capacity, sums, h.arena, {}, [&](int end) {
      EXPECT_GE(end, there);
      for (; there < end; ++there) {
        const TensorView& w = h.parameters[there].weight;
        for (int64_t i = 0; i < w.numel(); ++i) put(w, i, weights[there][i]);
      }
    });
    EXPECT_EQ(there, static_cast<int>(weights.size()));
    h.model->backward(s.batch.batch, {});
    const StepStats stats = sums.read();
    EXPECT_EQ(stats.loss_sum, expected.loss_sum);
    EXPECT_EQ(stats.aux_sum, expected.aux_sum);
  });
}

// Backward tells from which parameter on gradients are complete: nothing is added to them afterwards.
TEST_P(Model, BackwardTellsWhichGradientsAreComplete) {
  const ModelCase& c = GetParam();
  on_ranks(1, [&](comm::Communicator& world) {
    Subject s(c, DType::kFloat32, world);
    ModelHarness& h = s.harness;
    const StepSums sums = h.model->make_sums();
    const ArenaScope activations(h.arena);
    h.model->forward(s.batch.batch, h.capacity, sums, h.arena, {});
    int last = static_cast<int>(h.parameters.size());
    std::vector<std::vector<double>> told(h.parameters.size());
    h.model->backward(s.batch.batch, {}, [&](int first) {
      EXPECT_LE(first, last);
      for (; last > first; --last) told[last - 1] = values(h.parameters[last - 1].grad);
    });
    EXPECT_EQ(last, 0);
    for (size_t p = 0; p < told.size(); ++p) {
      EXPECT_EQ(told[p], values(h.parameters[p].grad)) << h.parameters[p].spec.name;
    }
  });
}

TEST_P(Model, EvaluationGivesTheLossOfTrainingAndLeavesNothing) {
  on_ranks(1, [&](comm::Communicator& world) {
    Subject s(GetParam(), DType::kBFloat16, world);
    const StepSums sums = s.harness.model->make_sums();
    s.harness.model->evaluate(s.batch.batch, s.harness.capacity, sums, s.harness.arena, {});
    const StepStats stats = sums.read();
    EXPECT_EQ(s.harness.arena.in_use(), 0);
    const StepStats trained = s.harness.step(s.batch.batch);
    EXPECT_EQ(stats.loss_sum, trained.loss_sum);
    EXPECT_EQ(stats.aux_sum, trained.aux_sum);
    EXPECT_EQ(stats.targets, trained.targets);
    EXPECT_EQ(s.harness.arena.in_use(), 0);
  });
}

TEST_P(Model, Bf16StaysNearFloat) {
  ModelCase c = GetParam();
  c.config.router.top_k = c.config.router.experts;  // rounding cannot change the choice
  c.config.router.group_top_k = c.config.router.groups;
  on_ranks(1, [&](comm::Communicator& world) {
    Subject s(c, DType::kBFloat16, world), exact(c, DType::kFloat32, world);
    // The same weights in both: those of bf16.
    for (size_t p = 0; p < s.harness.parameters.size(); ++p) {
      const TensorView from = s.harness.parameters[p].weight,
                       to = exact.harness.parameters[p].weight;
      for (int64_t i = 0; i < from.numel(); ++i) put(to, i, get(from, i));
    }
    const StepStats a = s.harness.step(s.batch.batch), b = exact.harness.step(exact.batch.batch);
    EXPECT_NEAR(a.loss_sum, b.loss_sum, 0.01 * b.loss_sum);
    double difference = 0, squares = 0;
    const Weights g = s.harness.gradients(), h = exact.harness.gradients();
    for (const auto& [tensor, v] : h) {
      for (size_t i = 0; i < v.size(); ++i) {
        difference += std::pow(v[i] - g.at(tensor)[i], 2);
        squares += v[i] * v[i];
      }
    }
    EXPECT_LT(std::sqrt(difference), 0.05 * std::sqrt(squares));
  });
}

TEST_P(Model, DecoderGivesTheLogitsOfTheNaiveModel) {
  const ModelCase& c = GetParam();
  if (c.documents) return;  // a decoder continues one document
  on_ranks(1, [&](comm::Communicator& world) {
    Subject s(c, DType::kFloat32, world);
    const NaiveResult naive = naive_forward(c.config, s.harness.weights(), s.batch.naive);
    Decoder decoder(*s.harness.model, c.sequences, c.seq_len);
    Tensor logits(DType::kFloat32, {c.sequences, c.config.vocab});
    const auto expect_logits = [&](int64_t part, int64_t sequence, int64_t position) {
      for (int64_t v = 0; v < c.config.vocab; ++v) {
        const double expected =
            naive.logits[(sequence * c.seq_len + position) * c.config.vocab + v];
        ASSERT_NEAR(get(logits, part * c.config.vocab + v), expected, 2e-5)
            << "sequence " << sequence << " position " << position << " logit " << v;
      }
    };
    const auto tokens = [&](int64_t sequence, int64_t begin, int64_t end) {
      const int32_t* row = s.batch.naive.token.data() + sequence * c.seq_len;
      return std::span<const int32_t>(row + begin, row + end);
    };
    // Prompts of different lengths, one by one, in falling order of the sequences.
    for (int64_t b = c.sequences - 1; b >= 0; --b) {
      const int64_t prompt = std::min(c.seq_len, 1 + b * 3);
      const Decoder::Continuation part{b, tokens(b, 0, prompt)};
      decoder.append({&part, 1}, logits.view().slice(0, 0, 1), s.harness.arena, {});
      expect_logits(0, b, prompt - 1);
    }
    // Then all that have room together, one token each and two for the first.
    while (true) {
      std::vector<Decoder::Continuation> parts;
      for (int64_t b = 0; b < c.sequences; ++b) {
        const int64_t begin = decoder.length(b);
        const int64_t end = std::min(c.seq_len, begin + (b == 0 ? 2 : 1));
        if (begin < end) parts.push_back({b, tokens(b, begin, end)});
      }
      if (parts.empty()) break;
      decoder.append(parts, logits.view().slice(0, 0, parts.size()), s.harness.arena, {});
      for (size_t p = 0; p < parts.size(); ++p) {
        expect_logits(p, parts[p].sequence, decoder.length(parts[p].sequence) - 1);
      }
    }
  });
}

}  // namespace
}  // namespace moiety::model
