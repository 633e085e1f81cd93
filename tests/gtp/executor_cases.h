// A small model and the steps that are run with it, on ranks that are threads or processes.
#pragma once

#include <vector>

#include "tests/gtp/executor_harness.h"

namespace moiety::gtp {

// A model with rows that are no multiple of anything, ranks of nothing but padding, a bundle that
// is not cut, one that nobody uses and one that is not trained.
enum : BundleId { kEmbed, kQkv, kFc1, kFc2, kDense, kHead, kAlone, kUnused, kFrozen };
inline std::vector<BundleCase> model() {
  return {{.name = "embed", .rows = 50, .cols = 12},
          {.name = "qkv", .rows = 48, .cols = 24},
          {.name = "fc1", .rows = 40, .cols = 20, .experts = 2},
          {.name = "fc2", .rows = 20, .cols = 17, .experts = 2},
          {.name = "dense", .rows = 17, .cols = 40},
          {.name = "head", .rows = 50, .cols = 12},
          {.name = "alone", .rows = 30, .cols = 8, .experts = 2, .alone = true},
          {.name = "unused", .rows = 16, .cols = 16},
          {.name = "frozen", .rows = 24, .cols = 9, .trained = false}};
}

struct Named {
  const char* name;
  Program program;
};
inline std::vector<Named> programs() {
  TraceMaker plain(20000);
  plain.fwd(kEmbed).fwd(kQkv).fwd(kFrozen).fwd(kFc1).fwd(kFc2).fwd(kAlone).fwd(kDense).fwd(kHead);
  TraceMaker backward = plain;
  backward.bwd(kHead).wgrad(kHead).bwd(kDense).wgrad(kDense).bwd(kAlone).wgrad(kAlone).bwd(kFc2);
  backward.wgrad(kFc2).bwd(kFc1).wgrad(kFc1).bwd(kFrozen).bwd(kQkv).wgrad(kQkv).wgrad(kEmbed);
  TraceMaker again = plain;
  again.bwd(kHead).wgrad(kHead).again(kFc1).also(kFc2).bwd(kFc2).wgrad(kFc2).bwd(kFc1);
  again.wgrad(kFc1).again(kQkv).bwd(kQkv).wgrad(kQkv);
  TraceMaker shared(10000);  // a block that is used at two depths, embedding and head tied
  shared.fwd(kEmbed).fwd(kQkv).fwd(kDense).fwd(kEmbed).fwd(kQkv).fwd(kDense).fwd(kEmbed);
  shared.bwd(kEmbed).wgrad(kEmbed).bwd(kDense).wgrad(kDense).bwd(kQkv).wgrad(kQkv).bwd(kEmbed);
  shared.wgrad(kEmbed).bwd(kDense).wgrad(kDense).bwd(kQkv).wgrad(kQkv).wgrad(kEmbed);
  TraceMaker delayed = plain;
  delayed.bwd(kHead).bwd(kDense).bwd(kAlone).bwd(kFc2).bwd(kFc1).bwd(kQkv);
  for (const BundleId b : {kHead, kDense, kAlone, kFc2, kFc1, kQkv, kEmbed}) delayed.wgrad(b);
  TraceMaker batches(30000);  // two micro-batches on streams of their own, their ends apart
  batches.on(0).fwd(kQkv).fwd(kFc1).fwd(kAlone).on(1).fwd(kQkv).fwd(kFc1).fwd(kAlone).cut();
  batches.on(0).bwd(kAlone).wgrad(kAlone).bwd(kFc1).wgrad(kFc1).on(1).bwd(kAlone).wgrad(kAlone);
  batches.bwd(kFc1).wgrad(kFc1).cut().on(0).bwd(kQkv).wgrad(kQkv).on(1).bwd(kQkv).wgrad(kQkv);
  TraceMaker crossed(10000);  // what is read on one stream, and reduced and read on the other
  crossed.on(0).fwd(kDense).on(1).fwd(kQkv).on(0).wgrad(kDense).on(1).bwd(kAlone).wgrad(kAlone);
  crossed.on(0).bwd(kAlone).wgrad(kAlone);
  TraceMaker open(5000);  // several gradients at a time
  open.fwd(kQkv).fwd(kDense).buffer(kQkv).buffer(kDense).buffer(kHead).grad(kDense).buffer(kFc1);
  open.grad(kQkv).wgrad(kQkv).grad(kFc1).grad(kHead);
  return {{"backward", program_of(backward)},
          {"recompute", program_of(again)},
          {"shared", program_of(shared)},
          {"delayed", program_of(delayed)},
          {"crossed", program_of(crossed)},
          {"batches", program_of(batches)},
          {"open", program_of(open)},
          {"forward", program_of(plain)},
          {"nothing", {}}};
}

// Transfers take as long as work, so that some are looked ahead and some are not.
inline TrainingSetup setup_of(int ranks, int egtp, Pace pace) {
  TrainingSetup out;
  out.bundles = model();
  out.ranks = ranks;
  out.egtp = egtp;
  out.pace = pace;
  out.policy.latency_ns = 5000;
  out.policy.bytes_per_ns = 0.05;
  return out;
}

// Runs three steps of each program, the first on demand, the others as planned.
inline void three_steps(Rank& rank, const std::vector<Named>& programs) {
  int64_t planned = 0;
  for (const Named& p : programs) {
    for (int i = 0; i < 3; ++i) rank.step({p.name, 1}, p.program);
    const ExecutorCounts& counts = rank.executor().counts();
    EXPECT_EQ(counts.planned, planned += 2) << p.name;
    EXPECT_TRUE(counts.step.planned);
  }
  EXPECT_EQ(rank.executor().counts().departures, 0);
}

}  // namespace moiety::gtp
