// A model with its parameters, expert group and batch, for the tests of the whole.
#pragma once

#include <functional>
#include <memory>
#include <optional>

#include "moiety/base/parallel.h"
#include "moiety/base/rng.h"
#include "moiety/comm/thread_group.h"
#include "moiety/model/transformer.h"
#include "tests/model/naive_model.h"
#include "tests/support/tensors.h"

namespace moiety::model {

// Element i of a logical tensor, as a test initializes it: about twice as wide as in training, so
// that no part of the model is negligible.
inline float test_weight(const optim::ParamSpec& spec, int tensor, int64_t i) {
  const float x = init_normal(7, tensor_id(spec.tensors[tensor].name), i);
  switch (spec.init) {
    case optim::InitKind::kOnes:
      return 1 + 0.1f * x;
    case optim::InitKind::kZeros:
      return 0.1f * x;
    default:
      return spec.init_std * x;
  }
}

// Calls f(memory element, tensor, logical element) for every element of the parameter.
inline void for_each_element(const optim::ParamSpec& spec,
                             const std::function<void(int64_t, int, int64_t)>& f) {
  for (const optim::RowRun& run : spec.row_map) {
    const int64_t columns = spec.tensors[run.tensor].row_elements();
    for (int64_t row = 0; row < run.rows; ++row) {
      for (int64_t c = 0; c < spec.row_elements; ++c) {
        f((run.memory_row + row) * spec.row_elements + c, run.tensor,
          (run.logical_row + row) * columns + spec.first_column + c);
      }
    }
  }
}

struct ModelHarness {
  // `tokens`: own ones of a rank.
  ModelHarness(const Config& config, DType storage, comm::Communicator& experts, int64_t tokens,
               comm::Communicator* world = nullptr, comm::Communicator* tp = nullptr,
               const moe::EpOptions& ep = {}) {
    if (config.moe_layers() > 0) {
      group.emplace(moe::EpGroup::create(
          experts, moe::ExpertMap(static_cast<int>(config.router.experts), experts.size()),
          ep_limits(config, storage, tokens), ep));
    }
    model.emplace(config, storage,
                  ModelContext{.experts = group ? &*group : nullptr, .tp = tp, .world = world});
    for (const optim::ParamSpec& spec : model->parameter_specs()) {
      memory.emplace_back(storage, spec.shape);
      memory.emplace_back(DType::kFloat32, spec.shape);
      parameters.push_back({.spec = spec,
                            .weight = memory[memory.size() - 2],
                            .grad = memory.back(),
                            .overwrite = true});
      fill_normal(memory.back(), 1);  // poison: the first contribution overwrites
      for_each_element(spec, [&](int64_t at, int tensor, int64_t i) {
        put(parameters.back().weight, at, test_weight(spec, tensor, i));
      });
    }
    model->bind(parameters);
    capacity = model->moe_capacity(-1, tokens);
  }

  // Weights by checkpoint name, as stored.
  Weights weights() const {
    Weights out;
    for (const optim::Parameter& p : parameters) {
      for (const optim::LogicalTensor& t : p.spec.tensors) {
        int64_t n = 1;
        for (const int64_t s : t.shape) n *= s;
        out[t.name].resize(n);
      }
      for_each_element(p.spec, [&](int64_t at, int tensor, int64_t i) {
        out[p.spec.tensors[tensor].name][i] = get(p.weight, at);
      });
    }
    for (const Transformer::State& s : model->states()) out[s.name] = values(s.view);
    return out;
  }
  // Gradients by checkpoint name.
  Weights gradients() const {
    Weights out;
    for (const optim::Parameter& p : parameters) {
      for_each_element(p.spec, [&](int64_t at, int tensor, int64_t i) {
        std::vector<double>& g = out[p.spec.tensors[tensor].name];
        if (static_cast<int64_t>(g.size()) <= i) g.resize(i + 1);
        g[i] = get(p.grad, at);
      });
    }
    return out;
  }

  StepStats step(const Batch& batch) {
    const StepSums sums = model->make_sums();
    ArenaScope activations(arena);
    model->forward(batch, capacity, sums, arena, {});
    model->backward(batch, {});
    return sums.read();
  }

  std::optional<moe::EpGroup> group;
  std::optional<Transformer> model;
  std::vector<Tensor> memory;
  std::vector<optim::Parameter> parameters;
  int64_t capacity = 0;
  Arena arena{"test"};
};

// A batch of a Markov-like text with some targets left out.
struct TestBatch {
  TestBatch(const Config& c, int64_t sequences, int64_t seq_len, bool documents, unsigned seed)
      : token(DType::kInt32, {sequences, seq_len}),
        target(DType::kInt32, {sequences, seq_len}),
        mask(DType::kUInt8, {sequences, seq_len}),
        position(DType::kInt32, {sequences, seq_len}),
        routed(DType::kUInt8, {sequences, seq_len}) {
    std::mt19937 engine(seed);
    naive.sequences = sequences;
    naive.seq_len = seq_len;
    for (int64_t t = 0; t < sequences * seq_len; ++t) {
      naive.token.push_back(static_cast<int32_t>(engine() % c.vocab));
      naive.target.push_back(t % 7 == 3 ? -100 : static_cast<int32_t>(engine() % c.vocab));
      naive.mask.push_back(t % 5 != 2);
      const int64_t s = t % seq_len;
      if (documents) naive.position.push_back(static_cast<int32_t>(s < 5 ? s : (s - 5) % 4));
    }
    std::copy(naive.token.begin(), naive.token.end(), token.data<int32_t>());
    std::copy(naive.target.begin(), naive.target.end(), target.data<int32_t>());
    std::copy(naive.mask.begin(), naive.mask.end(), mask.data<uint8_t>());
    std::copy(naive.position.begin(), naive.position.end(), position.data<int32_t>());
    batch = {token, target, mask, documents ? position.view() : TensorView()};
  }
  // Makes the last tokens of the odd sequences padding.
  void pad(int64_t from) {
    const int64_t seq_len = naive.seq_len;
    for (int64_t t = 0; t < naive.sequences * seq_len; ++t) {
      const bool pads = t / seq_len % 2 == 1 && t % seq_len >= from;
      routed.data<uint8_t>()[t] = !pads;
      if (pads) target.data<int32_t>()[t] = -100;
    }
    batch.routed_BS = routed;
  }
  // Sequences [begin, end) as views.
  Batch part(int64_t begin, int64_t end) const {
    const auto cut = [&](const TensorView& x) { return x.defined() ? x.slice(0, begin, end) : x; };
    return {cut(batch.token_BS), cut(batch.target_BS), cut(batch.mask_BS), cut(batch.position_BS),
            cut(batch.routed_BS)};
  }
  Tensor token, target, mask, position, routed;
  Batch batch;
  NaiveBatch naive;
};

// Models are small and the machine is shared: one thread computes.
inline void on_ranks(int ranks, const std::function<void(comm::Communicator&)>& body) {
  comm::run_thread_ranks(ranks, {}, [&](comm::Communicator& world) {
    set_thread_budget(1);
    body(world);
  });
}

}  // namespace moiety::model
