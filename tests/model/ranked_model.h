// A model on several ranks (threads), and what all of them together give: losses and gradients in
// the order of checkpoints, summed over the ranks.
#pragma once

#include <mutex>

#include "tests/model/harness.h"

namespace moiety::model {

struct RankedLayout {
  int ranks = 1, tp = 1, ep = 1;
};

struct RankedResult {
  StepStats stats;
  Weights gradients;
};

inline void add(RankedResult& total, const StepStats& s, const Weights& gradients) {
  total.stats.add(s);
  for (const auto& [name, g] : gradients) {
    std::vector<double>& sum = total.gradients[name];
    if (sum.size() < g.size()) sum.resize(g.size());
    for (size_t i = 0; i < g.size(); ++i) sum[i] += g[i];
  }
}

// Data ranks share the batch; on each `tp` ranks have the same sequences.
inline RankedResult run_ranked(const Config& config, const RankedLayout& layout, int64_t sequences,
                               int64_t seq_len, bool documents = false, bool evaluate = false,
                               int64_t pad_from = 0) {
  RankedResult total;
  std::mutex mutex;
  on_ranks(layout.ranks, [&](comm::Communicator& world) {
    const int rank = world.rank(), data_rank = rank / layout.tp;
    const int64_t own = sequences / (layout.ranks / layout.tp);
    TestBatch batch(config, sequences, seq_len, documents, 1);
    if (pad_from > 0) batch.pad(pad_from);
    const auto experts = world.split(rank / layout.ep, rank, "ep");
    const auto tp = world.split(data_rank, rank, "tp");
    ModelHarness h(config, DType::kFloat32, *experts, own * seq_len / layout.tp, &world, tp.get());
    const Batch part = batch.part(data_rank * own, (data_rank + 1) * own);
    StepStats stats;
    if (evaluate) {
      const StepSums sums = h.model->make_sums();
      h.model->evaluate(part, h.capacity, sums, h.arena, {});
      stats = sums.read();
    } else {
      stats = h.step(part);
    }
    const std::lock_guard lock(mutex);
    add(total, stats, evaluate ? Weights() : h.gradients());
  });
  return total;
}

inline void expect_equal(const RankedResult& one, const RankedResult& many, double bound) {
  EXPECT_EQ(many.stats.targets, one.stats.targets);
  EXPECT_EQ(many.stats.tokens, one.stats.tokens);
  EXPECT_NEAR(many.stats.loss_sum, one.stats.loss_sum, 1e-5 * one.stats.loss_sum);
  EXPECT_NEAR(many.stats.aux_sum, one.stats.aux_sum, 1e-5 * one.stats.aux_sum);
  EXPECT_NEAR(many.stats.z_sum, one.stats.z_sum, 1e-5 * one.stats.z_sum);
  ASSERT_EQ(many.stats.moe.size(), one.stats.moe.size());
  for (size_t l = 0; l < one.stats.moe.size(); ++l) {
    EXPECT_EQ(many.stats.moe[l].expert_pairs, one.stats.moe[l].expert_pairs);
  }
  ASSERT_EQ(many.gradients.size(), one.gradients.size());
  for (const auto& [name, g] : one.gradients) {
    double scale = 0;
    for (const double v : g) scale = std::max(scale, std::abs(v));
    ASSERT_EQ(many.gradients.at(name).size(), g.size()) << name;
    for (size_t i = 0; i < g.size(); ++i) {
      ASSERT_NEAR(many.gradients.at(name)[i], g[i], bound * scale) << name << " element " << i;
    }
  }
}

}  // namespace moiety::model
