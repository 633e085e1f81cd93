// A rank as a trainer has it, whose steps the test makes itself, to look at weights, executor,
// optimizer and memory.
#pragma once

#include <filesystem>
#include <functional>

#include "apps/moiety/config/train_options.h"
#include "moiety/base/arena.h"
#include "moiety/base/parallel.h"
#include "moiety/checkpoint/loader.h"
#include "moiety/checkpoint/saver.h"
#include "moiety/comm/thread_group.h"
#include "moiety/data/batch_loader.h"
#include "moiety/train/amax_histories.h"
#include "moiety/train/evaluation.h"
#include "moiety/train/expert_capacity.h"
#include "moiety/train/gathering.h"
#include "moiety/train/precision.h"
#include "moiety/train/rank_model.h"
#include "tests/apps/train_helpers.h"
#include "tests/support/model_batch.h"

namespace moiety::app {

inline Options options_of(const Arguments& arguments) {
  std::vector<std::string> overrides;
  for (const std::string& a : arguments) {
    if (a.starts_with("--run=")) overrides.push_back("--run.dir=" + a.substr(6));
    if (a.starts_with("--ranks=")) overrides.push_back("--run." + a.substr(2));
    if (a.find('.') < a.find('=')) overrides.push_back(a);
  }
  return load_config({}, overrides).options;
}
inline train::TrainConfig config_of(const Arguments& arguments) {
  return train_config(options_of(arguments));
}

// The objects that a trainer holds on a rank.
struct Rank {
  Rank(const train::TrainConfig& c, comm::Communicator& world,
       std::optional<gtp::EmbeddingPath> embedding = {})
      : config(c),
        grid(check_layout(c)),
        tokens(c.pass_tokens()),
        model(c, grid, tokens, world),
        gathering(c, model.groups(), int64_t{1} << 33, embedding),
        optimizer(training_specs(c, model.transformer(), grid, world.rank()),
                  {.weights = storage_dtype(c), .main_grad = c.optim.grad_dtype}, model.groups(),
                  gathering.peers(false), gathering.peers(true)),
        capacity(c, model.transformer(), tokens / grid.tp) {
    set_thread_budget(1);
    model.transformer().bind(optimizer.parameters(), gathering.bind(optimizer));
    optimizer.initialize(1, Stream());
  }
  int64_t passes_of_step() const { return micro_steps(config, grid); }
  optim::StepReport step(int64_t number, const std::string& kind) {
    const int64_t per_pass = config.train.micro_batch * train::data_ranks(grid);
    const int64_t passes = passes_of_step();
    const auto source = data::synthetic_source("markov", config.data.seq_len, 264, 1);
    data::BatchBuffer batch(config.train.micro_batch, config.data.seq_len, {});
    const model::StepSums sums = model.transformer().make_sums();
    {
      const auto scope = gathering.begin_step(kind.c_str(), passes);
      for (int64_t m = 0; m < passes; ++m) {
        std::vector<data::SampleRef> samples(config.train.micro_batch);
        const int rank = train::data_rank(grid, model.world().rank());
        for (size_t b = 0; b < samples.size(); ++b) {
          samples[b].index =
              uint64_t((number * passes + m) * per_pass) + uint64_t(rank) * samples.size() + b;
        }
        batch.fill(*source, samples);
        const ArenaScope activations(arena);
        model::Batch pass = model_batch(batch.batch());
        pass.micro_step = uint64_t(number * passes + m);
        pass.first_token = rank * tokens;
        pass.all_tokens = train::data_ranks(grid) * tokens;
        if (on_pass) on_pass(m, pass);
        model.transformer().forward(pass, capacity.rows(), sums, arena, Stream());
        model.transformer().backward(pass, Stream());
      }
      gathering.flush();
      model.transformer().check_tokens();
    }
    const model::StepStats stats = sums.read();
    return optimizer.step({.lr = 0.01,
                           .weight_decay = 0.1,
                           .clip = 1,
                           .tokens = stats.targets,
                           .losses = {stats.loss_sum, stats.aux_sum, stats.z_sum}},
                          Stream());
  }

  // Sees the micro-batches before they are run.
  std::function<void(int64_t pass, const model::Batch& batch)> on_pass;

  const train::TrainConfig& config;
  train::Grid grid;
  int64_t tokens;
  train::RankModel model;
  train::WeightGathering gathering;
  optim::DistributedOptimizer optimizer;
  train::ExpertCapacity capacity;
  Arena arena{"activations"};
};

template <class Body>
void run_ranks(const Arguments& arguments, Body&& body,
               std::optional<gtp::EmbeddingPath> embedding = {}) {
  const train::TrainConfig config = config_of(arguments);
  comm::run_thread_ranks(int(config.run.ranks), {}, [&](comm::Communicator& world) {
    Rank rank(config, world, embedding);
    body(rank);
    rank.model.close();
  });
}

// Loads a checkpoint under the layout of these arguments, and saves what the ranks hold then.
inline void save_again(const std::string& from, const Arguments& arguments) {
  const std::string to = options_of(arguments).run.dir;
  std::filesystem::create_directories(to);
  run_ranks(arguments, [&](Rank& rank) {
    comm::Bootstrap& ranks = rank.model.world().bootstrap();
    optim::StateView view = rank.optimizer.state_view();
    const optim::StateView biases = rank.model.router_biases();
    optim::StateView loaded = view;
    loaded.insert(loaded.end(), biases.begin(), biases.end());
    checkpoint::RunState state = checkpoint::load(
        from, loaded, {.may_leave = [](std::string_view s) { return s == train::kHistorySlot; }},
        ranks);
    model::Transformer& model = rank.model.transformer();
    train::load_histories(from, model, rank.model.world(), Stream());
    const optim::StateView histories = train::saved_histories(model, Stream());
    loaded.insert(loaded.end(), histories.begin(), histories.end());
    state.layout = train::rank_layout(rank.grid);
    rank.optimizer.publish(Stream());
    checkpoint::Saver(to + "/checkpoints", ranks)
        .save(rank.model.world().rank() == 0 ? loaded : view, state, Stream());
  });
}

}  // namespace moiety::app
