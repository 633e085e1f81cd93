// The way of gradients to sums: what travels, when, and what is late.
#include <algorithm>
#include <random>

#include "tests/optim/rank_harness.h"

namespace moiety::optim {
namespace {

float random_normal(uint32_t rank, uint32_t i) {
  return normal_from_word(philox({3, 3}, {i, rank, 0, 0})[0]);
}

// Sums are f32 in rank order of what travels, and main_grad stays as it is.
TEST(BucketGradients, SumsAreInRankOrder) {
  struct Case {
    DType main_grad, wire;
  };
  constexpr DType kWide = DType::kFloat32, kNarrow = DType::kBFloat16;
  for (const auto& [main_grad, wire] :
       {Case{kWide, kWide}, Case{kWide, kNarrow}, Case{kNarrow, kNarrow}}) {
    for (const int ranks : {1, 2, 3, 4}) {
      SCOPED_TRACE(text("{} over {}, {} ranks", name(main_grad), name(wire), ranks));
      const int64_t length = 384 * ranks;
      comm::run_thread_ranks(ranks, {Seconds(60)}, [&](Communicator& world) {
        const auto rank = static_cast<uint32_t>(world.rank());
        BucketGradients gradients({.domain = {}, .ranks = ranks, .length = length, .slots = {}},
                                  main_grad, wire, world);
        const auto value = [&](uint32_t r, int64_t i, uint32_t round) {
          const float x = random_normal(r + 10 * round, static_cast<uint32_t>(i));
          return main_grad == kNarrow ? float(bf16(x)) : x;
        };
        const auto fill = [&](uint32_t round) {
          for (int64_t i = 0; i < length; ++i) {
            const float x = value(rank, i, round);
            if (main_grad == kNarrow) {
              gradients.main_grad().data<bf16>()[i] = bf16(x);
            } else {
              gradients.main_grad().data<float>()[i] = x;
            }
          }
        };
        const auto check = [&](uint32_t round) {
          for (int64_t i = 0; i < 384; ++i) {
            const int64_t at = rank * 384 + i;
            float sum = 0;
            for (int r = 0; r < ranks; ++r) {
              float x = value(static_cast<uint32_t>(r), at, round);
              if (wire == kNarrow && ranks > 1) x = float(bf16(x));
              sum = r == 0 ? x : sum + x;
            }
            const TensorView& got = gradients.sum();
            ASSERT_EQ(got.dtype() == kNarrow ? float(got.data<bf16>()[i]) : got.data<float>()[i],
                      sum)
                << i;
            ASSERT_EQ(got.raw() == gradients.main_grad().raw(), ranks == 1);
          }
          const float kept = value(rank, 5, round);
          ASSERT_EQ(main_grad == kNarrow ? float(gradients.main_grad().data<bf16>()[5])
                                         : gradients.main_grad().data<float>()[5],
                    kept);
        };
        fill(0);
        EXPECT_TRUE(gradients.open());
        gradients.reduce(Stream());
        EXPECT_FALSE(gradients.open());
        EXPECT_THROW(gradients.reduce(Stream()), Error);
        gradients.finish(Stream());
        check(0);
        gradients.reopen();
        fill(1);
        gradients.reduce(Stream());
        gradients.finish(Stream());
        check(1);
      });
    }
  }
}

// The small integers of these tests are exact in bfloat16: the wire changes nothing.
TEST(Gradients, TravelInTheDtypeOfTheWire) {
  const auto run = [](Layout layout, DType wire) {
    OptimizerConfig config = small_buckets();
    config.grad_wire = wire;
    return run_layout(layout, config, [](Rank& rank, Communicator& world) {
      for (int step = 0; step < 2; ++step) {
        rank.backward(step, small_integer);
        rank.optimizer().step(input(24 / world.size()), Stream());
      }
    });
  };
  for_each_layout([&](Layout layout) {
    EXPECT_TRUE(same_bits(run(layout, DType::kBFloat16), run(layout, DType::kFloat32)));
  });
}

enum class When {
  kNever,    // nothing is reported
  kAll,      // everything, in an order that is the rank's own
  kSome,     // all but three parameters, one of which is in the first bucket of its domain
  kLate,     // everything half way; then the rest is late
  kLateOne,  // the same, but on rank 0 more comes of one parameter, on the others nothing
  kDown,     // everything, from the last parameter to the first, by on_grads_ready
};

// Two steps whose gradients are reported in several ways.
Whole run_reported(Layout layout, When when, DType wire) {
  OptimizerConfig config = small_buckets();
  config.grad_wire = wire;
  return run_layout(layout, config, [&](Rank& rank, Communicator& world) {
    DistributedOptimizer& optimizer = rank.optimizer();
    std::vector<int> order(optimizer.parameters().size());
    for (size_t p = 0; p < order.size(); ++p) order[p] = static_cast<int>(p);
    std::shuffle(order.begin(), order.end(), std::mt19937(static_cast<unsigned>(world.rank())));
    const auto report = [&](int p) {
      Event done;
      done.record(Stream());
      optimizer.on_grad_ready(p, done);
    };
    const auto add = [&](int p, int step, int first, int last) {
      Parameter& parameter = optimizer.parameters()[p];
      const Communicator& domain = rank.domain(parameter);
      for (int batch = first; batch < last; ++batch) {
        if (batch % domain.size() != domain.rank()) continue;
        Rank::contribute(parameter, step, batch, small_integer);
      }
    };
    for (int step = 0; step < 2; ++step) {
      for (int p = static_cast<int>(order.size()) - 1; when == When::kDown && p >= 0; --p) {
        add(p, step, 0, kBatches);
        optimizer.on_grads_ready(p, Stream());
      }
      for (const int p : order) {
        if (when == When::kDown) break;
        if (when == When::kLateOne) {
          add(p, step, 0, kBatches);
          report(p);
          continue;
        }
        add(p, step, 0, kBatches / 2);
        if (when == When::kLate) {
          report(p);
        } else {
          add(p, step, kBatches / 2, kBatches);
          if (when == When::kAll || (when == When::kSome && p != 1 && p != 12 && p != 4)) report(p);
        }
      }
      for (const int p : order) {
        // The rest of every second parameter is late.
        if (when == When::kLate) {
          optimizer.on_grad_late(p);
          add(p, step, kBatches / 2, kBatches);
          if (p % 2 == 0) report(p);
        }
        // The contribution is taken away and given again.
        if (when == When::kLateOne && world.rank() == 0 && p == 7) {
          optimizer.on_grad_late(p);
          report(p);
        }
      }
      EXPECT_FALSE(optimizer.step(input(24 / world.size()), Stream()).skip);
    }
  });
}

TEST(Gradients, BitsDoNotDependOnWhenTheyAreReported) {
  for_each_layout([](Layout layout) {
    const DType wire = layout.dp == 2 ? DType::kBFloat16 : DType::kFloat32;
    const Whole expected = run_reported(layout, When::kNever, wire);
    for (const When when : {When::kAll, When::kSome, When::kLate, When::kLateOne, When::kDown}) {
      EXPECT_TRUE(same_bits(run_reported(layout, when, wire), expected)) << static_cast<int>(when);
    }
  });
}

TEST(Gradients, MistakesInReportsAreNamed) {
  run_layout(dense_copies(1, 1), small_buckets(), [](Rank& rank, Communicator&) {
    const auto error = [](const auto& body) -> std::string {
      try {
        body();
      } catch (const Error& e) {
        return e.what();
      }
      return "none";
    };
    DistributedOptimizer& optimizer = rank.optimizer();
    EXPECT_EQ(error([&] { optimizer.on_grad_late(1); }),
              "optimizer: norm.weight is late, but was not complete");
    optimizer.on_grad_ready(1, {});
    EXPECT_EQ(error([&] { optimizer.on_grad_ready(1, {}); }),
              "optimizer: the gradient of norm.weight is complete twice");
    EXPECT_EQ(error([&] { optimizer.on_grad_ready(99, {}); }), "optimizer: parameter 99 of 12");
    optimizer.step(input(), Stream());
    EXPECT_EQ(error([&] { optimizer.on_grad_ready(1, {}); }), "none");
  });
}

// NaN in a late gradient: the step is skipped by all.
TEST(Gradients, NanInALateGradientIsSeen) {
  run_layout(kLayouts[14], small_buckets(), [](Rank& rank, Communicator& world) {
    rank.backward(0, small_integer);
    for (int p = 0; p < 12; ++p) rank.optimizer().on_grad_ready(p, {});
    rank.optimizer().on_grad_late(1);
    if (world.rank() == 3) rank.parameter("norm.weight").grad.data<float>()[2] = std::nanf("");
    const StepReport report = rank.optimizer().step(input(), Stream());
    EXPECT_TRUE(report.skip);
    EXPECT_EQ(report.bad, 1);
    EXPECT_EQ(report.bad_parameter, "norm.weight");
  });
}

// Gradients in bfloat16: those of one process and of several are the same sums.
TEST(Gradients, MainGradMayBeNarrow) {
  for (const Layout layout : {kLayouts[0], kLayouts[1], kLayouts[13]}) {
    comm::run_thread_ranks(ranks_of(layout), {Seconds(60)}, [&](Communicator& world) {
      const GridGroups groups(layout, world);
      OptimizerConfig config = small_buckets();
      config.main_grad = DType::kBFloat16;
      DistributedOptimizer optimizer(model_specs(layout, world.rank()), config, groups);
      optimizer.initialize(kSeed, Stream());
      double sumsq = 0;
      for (Parameter& p : optimizer.parameters()) {
        const Communicator& domain = groups.of(p.spec.domain);
        for_each_element(p.spec, [&](int64_t at, const LogicalTensor& tensor, int64_t i) {
          const float g = small_integer(tensor, i, 0, 0);
          p.grad.data<bf16>()[at] = bf16(domain.rank() == 0 ? g : 0.0f);
        });
        p.overwrite = false;
      }
      for (const ParamSpec& spec : model_specs(0, 1)) {
        for_each_element(spec, [&](int64_t, const LogicalTensor& tensor, int64_t i) {
          sumsq += std::pow(double{small_integer(tensor, i, 0, 0)}, 2);
        });
      }
      const StepReport report =
          optimizer.step({.lr = 0.1, .clip = 0, .tokens = world.rank() == 0}, {});
      EXPECT_EQ(report.norm, static_cast<float>(std::sqrt(sumsq)));
    });
  }
}

// A weight that was overwritten on one rank is found before the update hides it.
TEST(Copies, AreComparedNowAndThen) {
  OptimizerConfig config = small_buckets();
  config.compare_copies = 2;
  for (const int damaged_step : {0, 1, 2}) {
    std::vector<std::string> errors(4);
    run_layout({.tp = 2, .dp = 2, .edp = 4}, config, [&](Rank& rank, Communicator& world) {
      for (int step = 0; step < 3; ++step) {
        rank.backward(step, small_integer);
        Parameter& head = rank.parameter("head.weight");
        if (step == damaged_step && world.rank() == 1) head.weight.data<bf16>()[7] = bf16(1.5f);
        try {
          rank.optimizer().step(input(), Stream());
        } catch (const Error& e) {
          errors[world.rank()] = e.what();
          rank.optimizer().publish(Stream());
        }
      }
    });
    for (const std::string& error : errors) {
      EXPECT_EQ(error, damaged_step == 1 ? ""
                                         : "optimizer: ranks 0 and 1 of \"dp\" have different "
                                           "weights at head.weight");
    }
  }
}

}  // namespace
}  // namespace moiety::optim
