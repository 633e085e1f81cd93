// The distributed optimizer under many layouts: the same bits wherever sums are exact.
#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <mutex>

#include <gtest/gtest.h>

#include "moiety/optim/step_words.h"
#include "moiety/optim/weight_store.h"
#include "tests/optim/rank_harness.h"

namespace moiety::optim {
namespace {

TEST(Distributed, InitialWeightsAreThoseOfTheLogicalTensors) {
  for_each_layout([](Layout layout) {
    const Whole whole = run_layout(layout, small_buckets(), [](Rank&, Communicator&) {});
    for (const ParamSpec& spec : model_specs(0, 1)) {
      for (const LogicalTensor& tensor : spec.tensors) {
        const auto& w = whole.at("weight/" + tensor.name);
        ASSERT_EQ(static_cast<int64_t>(w.size()), numel(tensor));
        for (int64_t i = 0; i < numel(tensor); ++i) {
          const float expected = spec.init == InitKind::kOnes
                                     ? 1.0f
                                     : 0.02f * init_normal(kSeed, tensor_id(tensor.name), i);
          ASSERT_EQ(w[i], expected) << tensor.name << " " << i;
          ASSERT_EQ(whole.at("exp_avg/" + tensor.name)[i], 0);
        }
      }
    }
  });
}

// FC1 of a gated FFN, gate and up rows interleaved by `interleave` (0: plain order), of a part that
// tp and gtp cut.
ParamSpec gated_spec(const Layout& grid, int rank, int64_t interleave) {
  constexpr int64_t kWidth = 48;
  ParamSpec spec = matrix_spec("fc1.weight", 2 * kWidth, kModel);
  if (interleave > 0) {
    spec.row_map.clear();
    for (int64_t f = 0; f < kWidth; f += interleave) {
      for (const int64_t half : {0, 1}) {
        spec.row_map.push_back({2 * f + half * interleave, 0, half * kWidth + f, interleave});
      }
    }
  }
  const int64_t unit = std::max<int64_t>(1, 2 * interleave);
  return cut(spec, {.tp_axis = 0, .align = 10, .tp_unit = unit}, grid, rank);
}

// The same full weight for every tp and gtp, interleaved or not; padding is zero.
TEST(Distributed, InitialWeightsDoNotDependOnTpGtpOrInterleaving) {
  for (int tp = 1; tp <= 4; ++tp) {
    for (int gtp = 1; gtp <= 4; ++gtp) {
      const Layout grid{.tp = tp, .gtp = gtp, .edp = tp * gtp};
      for (const int64_t interleave : {0, 2, 4}) {
        Whole whole;
        std::mutex mutex;
        comm::run_thread_ranks(tp * gtp, {Seconds(60)}, [&](Communicator& world) {
          const GridGroups groups(grid, world);
          DistributedOptimizer optimizer({gated_spec(grid, world.rank(), interleave)},
                                         small_buckets(DType::kFloat32), groups);
          optimizer.initialize(kSeed, Stream());
          const Parameter& p = optimizer.parameters()[0];
          for (const int64_t i : padding(p.spec)) EXPECT_EQ(p.weight.data<float>()[i], 0);
          const std::lock_guard lock(mutex);
          put_together(optimizer.state_view(), whole);
        });
        const std::vector<float>& w = whole.at("weight/fc1.weight");
        int64_t wrong = 0;
        for (size_t i = 0; i < w.size(); ++i) {
          wrong += w[i] != 0.02f * init_normal(kSeed, tensor_id("fc1.weight"), i);
        }
        EXPECT_EQ(wrong, 0) << grid_text(grid) << ", interleave " << interleave;
      }
    }
  }
}

// Integer gradients add up exactly in any order: every layout gives the same bits, with fp32 and
// with stochastically rounded moments.
TEST(Distributed, LayoutsGiveTheSameBits) {
  for (const DType moments : {DType::kFloat32, DType::kBFloat16}) {
    Whole expected;
    std::vector<float> norms;
    for_each_layout([&](Layout layout) {
      const Whole whole = run_layout(
          layout, small_buckets(DType::kBFloat16, moments), [&](Rank& rank, Communicator& world) {
            for (int step = 0; step < 3; ++step) {
              rank.backward(step, small_integer);
              const StepReport report = rank.optimizer().step(input(24 / world.size()), Stream());
              EXPECT_EQ(report.t, step + 1);
              EXPECT_EQ(report.tokens, 24);
              EXPECT_EQ(report.losses,
                        (std::vector<double>{0.5 * world.size(), 2.0 * world.size()}));
              EXPECT_LT(report.coef, 1.0);
              if (ranks_of(layout) == 1) norms.push_back(report.norm);
              EXPECT_EQ(report.norm, norms[step]);
            }
          });
      if (ranks_of(layout) == 1) expected = whole;
      EXPECT_TRUE(same_bits(whole, expected));
    });
  }
}

// The norm, and that of each class, counts every logical element once: the same gradients, under
// every grid of up to eight ranks that divides the heads.
TEST(Distributed, NormsAreThoseOfOneProcess) {
  std::vector<Layout> grids;
  for (int ranks = 1; ranks <= 8; ++ranks) {
    for (const Layout& grid : all_grids(ranks)) {
      if (kHeads % grid.tp == 0) grids.push_back(grid);
    }
  }
  EXPECT_EQ(grids.size(), 238u);
  struct Case {
    Gradient gradient;
    double tolerance;
  };
  for (const auto& [gradient, tolerance] : {Case{small_integer, 1e-14}, Case{lone_normal, 1e-12}}) {
    std::array<double, kParameterClasses> sumsq{};
    for (const ParamSpec& spec : model_specs(0, 1)) {
      for_each_element(spec, [&](int64_t, const LogicalTensor& tensor, int64_t i) {
        double sum = 0;
        for (int batch = 0; batch < kBatches; ++batch) sum += gradient(tensor, i, 0, batch);
        sumsq[static_cast<int>(spec.kind)] += sum * sum;
      });
    }
    const double total = sumsq[0] + sumsq[1] + sumsq[2] + sumsq[3];
    for (const Layout& layout : grids) {
      SCOPED_TRACE(grid_text(layout));
      run_layout(layout, small_buckets(), [&](Rank& rank, Communicator& world) {
        rank.backward(0, gradient);
        StepInput in = input(world.rank() == 0 ? 3 : 0);
        const double limit = std::sqrt(total) / 6;  // half the norm: coef shows it in double
        in.clip = limit;
        const StepReport report = rank.optimizer().step(in, Stream());
        const double norm = limit / report.coef - 1e-6;
        EXPECT_NEAR(norm, std::sqrt(total) / 3, tolerance * norm);
        EXPECT_EQ(report.norm, static_cast<float>(1.0 / 3 * std::sqrt(total)));
        for (int c = 0; c < kParameterClasses; ++c) {
          EXPECT_FLOAT_EQ(report.class_norms[c], static_cast<float>(std::sqrt(sumsq[c]) / 3));
        }
      });
    }
  }
}

// SGD-like check of scale against the textbook in double: Adam hides factors, its moments do not.
TEST(Distributed, MomentsHoldTheMeanGradient) {
  for_each_layout([](Layout layout) {
    const Whole whole =
        run_layout(layout, small_buckets(DType::kFloat32), [](Rank& rank, Communicator& world) {
          for (int step = 0; step < 2; ++step) {
            rank.backward(step, small_integer);
            StepInput in = input(24 / world.size());
            in.clip = 0;
            rank.optimizer().step(in, Stream());
          }
        });
    for (const auto& [key, exp_avg] : whole) {
      if (key.rfind("exp_avg/", 0) != 0) continue;
      const LogicalTensor tensor{key.substr(8), {}};
      for (size_t i = 0; i < exp_avg.size(); ++i) {
        std::array<double, 2> g{};
        for (int step = 0; step < 2; ++step) {
          for (int batch = 0; batch < kBatches; ++batch) {
            g[step] += small_integer(tensor, i, step, batch) / 24.0;
          }
        }
        ASSERT_NEAR(exp_avg[i], 0.1 * (0.9 * g[0] + g[1]), 1e-6) << key;
        ASSERT_NEAR(whole.at("exp_avg_sq/" + tensor.name)[i],
                    0.05 * (0.95 * g[0] * g[0] + g[1] * g[1]), 1e-6);
      }
    }
  });
}

TEST(Distributed, ParametersWithoutContributionCountAsZero) {
  for (const Layout layout : {kLayouts[0], kLayouts[3], kLayouts[6], kLayouts[15]}) {
    const auto run = [&](bool explicit_zeros) {
      return run_layout(layout, small_buckets(), [&](Rank& rank, Communicator&) {
        rank.backward(0, small_integer);
        rank.optimizer().step(input(), Stream());
        // Only `head` on rank 0's side, and experts not at all.
        Parameter& head = rank.parameter("head.weight");
        for (Parameter& p : rank.optimizer().parameters()) {
          EXPECT_TRUE(p.overwrite);
          if (explicit_zeros) {
            Rank::contribute(p, 1, 0, [](const LogicalTensor&, int64_t, int, int) { return 0.0f; });
          }
        }
        Rank::contribute(head, 1, 0, small_integer);
        rank.optimizer().step(input(), Stream());
      });
    };
    EXPECT_TRUE(same_bits(run(false), run(true)));
  }
}

using Poison = std::function<void(Rank&, Communicator&)>;

struct BadValue {
  const char* name;
  Poison poison;
  const char* parameter;
};

// Element i of the tensor, where the rank has it.
void set(Rank& rank, const std::string& name, int64_t i, float value) {
  Parameter& p = rank.parameter(name);
  for_each_element(p.spec, [&](int64_t at, const LogicalTensor&, int64_t logical) {
    if (logical == i) p.grad.data<float>()[at] = value;
  });
}

// A step with a bad gradient changes nothing, on any rank; the next one is as if it had not been.
TEST(Distributed, BadGradientsAreSkipped) {
  const float inf = std::numeric_limits<float>::infinity();
  const std::vector<BadValue> cases{
      {"nan on one rank",
       [](Rank& r, Communicator& w) {
         if (w.rank() == w.size() - 1) set(r, "router.weight", 3, std::nanf(""));
       },
       "router.weight"},
      {"inf and -inf that a sum would make nan",
       [inf](Rank& r, Communicator& w) { set(r, "norm.weight", 5, w.rank() == 0 ? inf : -inf); },
       "norm.weight"},
      {"two parameters, the first is named",
       [inf](Rank& r, Communicator&) {
         set(r, "experts.fc2.weight", 100, -inf);
         set(r, "experts.fc1.weight", 185, inf);
       },
       "experts.fc1.weight"}};
  for (const BadValue& bad : cases) {
    SCOPED_TRACE(bad.name);
    for_each_layout([&](Layout layout) {
      const auto run = [&](bool with_bad) {
        return run_layout(layout, small_buckets(), [&](Rank& rank, Communicator& world) {
          rank.backward(0, small_integer);
          rank.optimizer().step(input(), Stream());
          if (with_bad) {
            Whole before, after;
            put_together(rank.optimizer().state_view(), before);
            rank.backward(7, small_integer);
            bad.poison(rank, world);
            const StepReport report = rank.optimizer().step(input(), Stream());
            EXPECT_TRUE(report.skip);
            EXPECT_FALSE(report.halt);
            EXPECT_EQ(report.t, 1);
            EXPECT_EQ(report.skips_in_row, 1);
            EXPECT_GE(report.bad, 1);
            EXPECT_EQ(report.bad_parameter, bad.parameter);
            EXPECT_GE(report.bad_rank, 0);
            EXPECT_LT(report.bad_rank, world.size());
            put_together(rank.optimizer().state_view(), after);
            EXPECT_TRUE(same_bits(before, after));
          }
          rank.backward(1, small_integer);
          const StepReport report = rank.optimizer().step(input(), Stream());
          EXPECT_FALSE(report.skip);
          EXPECT_EQ(report.t, 2);
          EXPECT_EQ(report.bad_parameter, "");
        });
      };
      EXPECT_TRUE(same_bits(run(true), run(false)));
    });
  }
}

TEST(Distributed, ABadElementIsFoundByItsOwner) {
  run_layout(dense_copies(4, 1), small_buckets(), [](Rank& rank, Communicator& world) {
    rank.backward(0, small_integer);
    if (world.rank() == 2) set(rank, "embed.weight", 245, std::nanf(""));  // its last element
    const StepReport report = rank.optimizer().step(input(), Stream());
    EXPECT_EQ(report.bad, 1);
    int owner = -1;
    for (const StatePiece& piece : rank.optimizer().state_view()) {
      if (piece.tensor == "embed.weight" && piece.slot == "weight" &&
          piece.box.start[0] + piece.box.size[0] == 41 &&
          piece.box.start[1] + piece.box.size[1] == kModel) {
        owner = world.rank();
      }
    }
    EXPECT_TRUE(owner < 0 || report.bad_rank == owner) << report.bad_rank;
  });
}

TEST(Distributed, PaddingIsNotLookedAt) {
  run_layout(dense_copies(3, 1), small_buckets(), [](Rank& rank, Communicator&) {
    rank.backward(0, small_integer);
    Parameter& norm = rank.parameter("norm.weight");  // 6 elements, the next starts at 128
    norm.grad.data<float>()[kModel] = std::nanf("");
    const StepReport report = rank.optimizer().step(input(), Stream());
    EXPECT_EQ(report.bad, 0);
    EXPECT_FALSE(report.skip);
    EXPECT_TRUE(std::isfinite(report.norm));
  });
}

TEST(Distributed, TokensMayBeMissingOnOneRankButNotOnAll) {
  run_layout(dense_copies(3, 3), small_buckets(), [](Rank& rank, Communicator& world) {
    rank.backward(0, small_integer);
    StepReport report = rank.optimizer().step(input(world.rank() == 1 ? 5 : 0), Stream());
    EXPECT_FALSE(report.skip);
    EXPECT_EQ(report.tokens, 5);
    rank.backward(1, small_integer);
    report = rank.optimizer().step(input(0), Stream());
    EXPECT_TRUE(report.skip);
    EXPECT_EQ(report.t, 1);
  });
}

TEST(Distributed, OverflowHaltsAllRanksUntilTheStepIsRepeated) {
  const auto run = [](bool overflow) {
    return run_layout(dense_copies(4, 2), small_buckets(), [&](Rank& rank, Communicator& world) {
      if (overflow) {
        rank.backward(0, lone_normal);
        StepInput in = input();
        in.overflow = world.rank() == 2;
        in.required = 100 + world.rank() * (world.rank() == 2 ? 50 : 1);
        in.flags = 1u << world.rank();
        StepReport report = rank.optimizer().step(in, Stream());
        EXPECT_TRUE(report.skip && report.halt && report.overflow);
        EXPECT_EQ(report.required, 200);
        EXPECT_EQ(report.flags, 15u);
        EXPECT_EQ(report.skips_in_row, 0);
        rank.backward(0, small_integer);  // enqueued before the host looked
        report = rank.optimizer().step(input(), Stream());
        EXPECT_TRUE(report.skip && report.halt);
        EXPECT_FALSE(report.overflow);
        rank.optimizer().clear_halt();
      }
      rank.backward(0, small_integer);
      EXPECT_FALSE(rank.optimizer().step(input(), Stream()).skip);
    });
  };
  EXPECT_TRUE(same_bits(run(true), run(false)));
}

// The caller gives memory for the words, and reads nothing before the report.
TEST(Distributed, AnEnqueuedStepIsAStep) {
  for (const Layout layout : {kLayouts[0], kLayouts[2], kLayouts[15]}) {
    const auto run = [&](bool enqueued) {
      return run_layout(layout, small_buckets(), [&](Rank& rank, Communicator& world) {
        DistributedOptimizer& optimizer = rank.optimizer();
        for (int step = 0; step < 3; ++step) {
          rank.backward(step, small_integer);
          if (step == 1 && world.rank() == 0) set(rank, "norm.weight", 2, std::nanf(""));
          const StepInput in = input(24 / world.size());
          StepReport report;
          if (enqueued) {
            std::vector<double> words = input_words(in), out(report_word::kCount + 2);
            const auto view = [](std::vector<double>& x) {
              return TensorView(x.data(), DType::kFloat64, {static_cast<int64_t>(x.size())});
            };
            optimizer.enqueue(view(words), view(out), Stream());
            report = optimizer.read_report(view(out));
            EXPECT_EQ(*optimizer.skip().data<int32_t>(), report.skip);
            words.resize(input_word::kCount + kMaxStepLosses + 1);
            EXPECT_THROW(optimizer.enqueue(view(words), view(out), Stream()), Error);
          } else {
            report = optimizer.step(in, Stream());
          }
          EXPECT_EQ(report.skip, step == 1);
          EXPECT_EQ(report.bad_parameter, step == 1 ? "norm.weight" : "");
          EXPECT_EQ(report.t, step == 2 ? 2 : 1);
          EXPECT_EQ(report.losses[1], 2.0 * world.size());
          EXPECT_EQ(optimizer.step_state().t, report.t);
        }
      });
    };
    EXPECT_TRUE(same_bits(run(true), run(false)));
  }
}

// State saved under one layout and loaded under another goes on as if nothing had been.
TEST(Distributed, StateMovesBetweenLayouts) {
  const OptimizerConfig config = small_buckets(DType::kBFloat16, DType::kBFloat16);
  StepState saved;
  const Whole middle = run_layout(dense_copies(4, 2), config, [&](Rank& rank, Communicator& world) {
    for (int step = 0; step < 2; ++step) {
      rank.backward(step, small_integer);
      rank.optimizer().step(input(24 / world.size()), Stream());
    }
    if (world.rank() == 0) saved = rank.optimizer().step_state();
  });
  const Whole expected = run_layout(dense_copies(1, 1), config, [](Rank& rank, Communicator&) {
    for (int step = 0; step < 3; ++step) {
      rank.backward(step, small_integer);
      rank.optimizer().step(input(24), Stream());
    }
  });
  for_each_layout([&](Layout layout) {
    const Whole resumed = run_layout(layout, config, [&](Rank& rank, Communicator& world) {
      for (const StatePiece& piece : rank.optimizer().state_view()) {
        const auto& from = middle.at(piece.slot + "/" + piece.tensor);
        for_each_in_piece(piece, [&](int64_t k, int64_t i) {
          if (piece.dtype == DType::kFloat32) {
            static_cast<float*>(piece.data)[k] = from[i];
          } else {
            static_cast<bf16*>(piece.data)[k] = bf16(from[i]);
          }
        });
      }
      rank.optimizer().publish(Stream());
      StepState state;
      state.t = saved.t;
      state.set_losses(saved.last_losses());
      rank.optimizer().restore(state);
      EXPECT_EQ(rank.optimizer().step_state().b2pow, saved.b2pow);
      rank.check_weights(middle);
      rank.backward(2, small_integer);
      EXPECT_EQ(rank.optimizer().step(input(24 / world.size()), Stream()).t, 3);
    });
    EXPECT_TRUE(same_bits(resumed, expected));
  });
}

TEST(WeightStore, RoundsWhatIsLoadedAndStartsLikeTheOptimizer) {
  const Whole whole =
      run_layout(dense_copies(2, 1), small_buckets(), [](Rank& rank, Communicator&) {
        rank.backward(0, small_integer);
        rank.optimizer().step(input(), Stream());
      });
  const Whole fresh = run_layout(dense_copies(1, 1), small_buckets(), [](Rank&, Communicator&) {});
  for (const DType storage : {DType::kFloat32, DType::kBFloat16}) {
    for (const int ep : {0, 1}) {
      WeightStore store(model_specs(ep, 2), storage);
      const auto check = [&](const Whole& expected) {
        for (const Parameter& p : store.parameters()) {
          EXPECT_FALSE(p.grad.defined());
          for_each_element(p.spec, [&](int64_t at, const LogicalTensor& tensor, int64_t i) {
            const float w = expected.at("weight/" + tensor.name)[i];
            if (storage == DType::kFloat32) {
              ASSERT_EQ(p.weight.data<float>()[at], w);
            } else {
              ASSERT_EQ(p.weight.data<bf16>()[at].bits, bf16(w).bits);
            }
          });
        }
      };
      for (const StatePiece& piece : store.state_view()) {
        ASSERT_EQ(piece.slot, "weight");
        ASSERT_EQ(piece.dtype, DType::kFloat32);
        for_each_in_piece(piece, [&](int64_t k, int64_t i) {
          static_cast<float*>(piece.data)[k] = whole.at("weight/" + piece.tensor)[i];
        });
      }
      store.publish(Stream());
      check(whole);
      store.initialize(kSeed, Stream());
      check(fresh);
      EXPECT_THROW(store.publish(Stream()), Error);
    }
  }
}

// The error that every rank sees.
std::string construction_error(const Layout& layout,
                               const std::function<std::vector<ParamSpec>(int)>& specs) {
  std::mutex mutex;
  std::map<std::string, int> errors;
  comm::run_thread_ranks(ranks_of(layout), {Seconds(60)}, [&](Communicator& world) {
    const GridGroups groups(layout, world);
    std::string error = "none";
    try {
      DistributedOptimizer(specs(world.rank()), small_buckets(), groups);
    } catch (const Error& e) {
      error = e.what();
    }
    const std::lock_guard lock(mutex);
    ++errors[error];
  });
  return errors.size() == 1 ? errors.begin()->first : "different errors";
}

TEST(Distributed, ConstructionFindsWrongOwners) {
  const auto all_experts = [](int) { return model_specs(0, 1); };
  EXPECT_EQ(construction_error(dense_copies(2, 1), all_experts), "none");
  // Both ranks hold all experts, but do not share them.
  EXPECT_EQ(construction_error(dense_copies(2, 2), all_experts),
            "optimizer: experts.fc1.weight has 744 elements, the ranks own 1488");
  // Nobody holds the second half.
  EXPECT_EQ(construction_error(dense_copies(2, 1), [](int) { return model_specs(0, 2); }),
            "optimizer: experts.fc1.weight has 744 elements, the ranks own 372");
  // One domain, but different experts.
  EXPECT_EQ(construction_error(dense_copies(2, 1), [](int rank) { return model_specs(rank, 2); }),
            "optimizer: ranks 0 and 1 of \"edp\" have different expert parameters");
  const auto other_decay = [](int rank) {
    auto specs = model_specs(0, 1);
    specs[4].decay = rank != 2;
    specs[0].decay = rank != 2;
    return specs;
  };
  EXPECT_EQ(construction_error(dense_copies(3, 1), other_decay),
            "optimizer: ranks 0 and 2 of \"dp\" have different dense parameters");
  const auto other_tensor = [](int rank) {
    auto specs = model_specs(0, 1);
    if (rank == 1) specs[0].tensors[0].name = "embedding.weight";
    return specs;
  };
  EXPECT_EQ(construction_error(dense_copies(3, 1), other_tensor),
            "optimizer: ranks 0 and 1 of \"world\" have different tensors");
  // A weight that tp and gtp cut is summed over an axis that cuts it, or not over one that does
  // not.
  const Layout layout{.tp = 2, .gtp = 2, .edp = 4};
  const auto other_domain = [&](size_t parameter, gtp::Axes domain) {
    return [=](int rank) {
      auto specs = model_specs(layout, rank);
      specs[parameter].domain = domain;
      return specs;
    };
  };
  using gtp::Axis;
  EXPECT_EQ(construction_error(layout, other_domain(0, {Axis::kDp, Axis::kTp})),
            "optimizer: ranks 0 and 1 of \"tp\" have different dense parameters");
  EXPECT_EQ(construction_error(layout, other_domain(2, {Axis::kDp})),
            "optimizer: attn.q.weight has 72 elements, the ranks own 144");
  EXPECT_EQ(construction_error(layout, other_domain(1, {Axis::kGtp, Axis::kDp})),
            "optimizer: norm.weight has 6 elements, the ranks own 12");
  // Ranks with parts of different sizes of one weight.
  const auto other_size = [&](int rank) {
    auto specs = model_specs(layout, rank);
    if (rank >= 2)
      specs[0] = cut(matrix_spec("embed.weight", 45, kModel),
                     {.tp_axis = 0, .align = 8, .vocabulary = true}, layout, rank);
    specs[0].kind = ParameterClass::kEmbedding;
    specs[0].tensors[0].shape[0] = 45;
    specs[0].row_map.clear();
    return specs;
  };
  EXPECT_EQ(construction_error(layout, other_size),
            "optimizer: ranks 0 and 2 of \"tp x gtp\" have different dense buckets");
}

TEST(GridGroups, SizesAreThoseOfAllGroups) {
  for (const Layout& layout : kLayouts) {
    comm::run_thread_ranks(ranks_of(layout), {}, [&](Communicator& world) {
      const GridGroups groups(layout, world);
      std::vector<int> sizes;
      for (const Communicator* group : groups.all()) sizes.push_back(group->size());
      std::vector<int> expected = GridGroups::sizes(layout);
      std::sort(sizes.begin(), sizes.end());
      std::sort(expected.begin(), expected.end());
      EXPECT_EQ(sizes, expected);
    });
  }
}

}  // namespace
}  // namespace moiety::optim
