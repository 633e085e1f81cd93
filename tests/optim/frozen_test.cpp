// Frozen parameters: no gradient, no master, no moment; a step leaves them alone, and the others
// move as if nothing were frozen.
#include "tests/optim/rank_harness.h"
#include "tests/support/error_of.h"

namespace moiety::optim {
namespace {

const std::set<std::string> kFrozen{"embed.weight", "norm.weight", "experts.fc1.weight",
                                    "attn.o.weight", "attn.heads.weight"};

bool is_frozen(const Whole& whole, const std::string& tensor) {
  return !whole.contains("exp_avg/" + tensor);
}

Whole without_moments_of_frozen(const Whole& whole, const Whole& frozen) {
  Whole out;
  for (const auto& [name, values] : whole) {
    if (!is_frozen(frozen, name.substr(name.find('/') + 1))) out[name] = values;
  }
  return out;
}

StepInput unclipped() {
  StepInput in = input();
  in.clip = 0;
  return in;
}

void three_steps(Rank& rank) {
  for (int step = 0; step < 3; ++step) {
    rank.backward(step, small_integer);
    rank.optimizer().step(unclipped(), Stream());
  }
}

TEST(Frozen, StayAsTheyAreUnderEveryLayout) {
  for (const DType weights : {DType::kBFloat16, DType::kFloat32}) {
    for_each_layout([&](Layout layout) {
      const OptimizerConfig config = small_buckets(weights);
      const Whole start = run_layout(layout, config, [](Rank&, Communicator&) {});
      const auto body = [](Rank& rank, Communicator&) { three_steps(rank); };
      const Whole all = run_layout(layout, config, body);
      const Whole some = run_layout(layout, config, body, kFrozen);
      int frozen = 0;
      for (const auto& [name, values] : start) {
        const size_t slash = name.find('/');
        if (name.substr(0, slash) != "weight" || !is_frozen(some, name.substr(slash + 1))) continue;
        ++frozen;
        const std::vector<float>& now = some.at(name);
        for (size_t i = 0; i < values.size(); ++i) {
          const float kept = weights == DType::kBFloat16 ? float(bf16(values[i])) : values[i];
          ASSERT_EQ(now[i], kept) << name << " " << i;
        }
      }
      EXPECT_EQ(frozen, 7);  // heads are three tensors
      Whole trained = some;
      std::erase_if(trained, [&](const auto& entry) {
        return is_frozen(some, entry.first.substr(entry.first.find('/') + 1));
      });
      EXPECT_TRUE(same_bits(trained, without_moments_of_frozen(all, some)));
    });
  }
}

TEST(Frozen, TheNormIsThatOfTheOthers) {
  const auto norm_with = [](const std::set<std::string>& frozen) {
    double norm = 0;
    run_layout(
        dense_copies(1, 1), small_buckets(),
        [&](Rank& rank, Communicator&) {
          rank.backward(0, small_integer);
          norm = rank.optimizer().step(unclipped(), Stream()).norm;
        },
        frozen);
    return norm;
  };
  std::set<std::string> rest;
  for (const ParamSpec& spec : model_specs(0, 1)) {
    if (!kFrozen.contains(spec.name)) rest.insert(spec.name);
  }
  const double all = norm_with({}), some = norm_with(kFrozen), others = norm_with(rest);
  EXPECT_GT(some, 0);
  EXPECT_GT(others, 0);
  EXPECT_NEAR(some * some + others * others, all * all, 1e-6 * all * all);
}

TEST(Frozen, HaveNoMemoryOfTheirOwn) {
  run_layout(
      dense_copies(1, 1), small_buckets(),
      [&](Rank& rank, Communicator&) {
        for (Parameter& p : rank.optimizer().parameters()) {
          EXPECT_EQ(p.grad.defined(), p.trained()) << p.spec.name;
          EXPECT_EQ(p.trained(), !kFrozen.contains(p.spec.name));
        }
        // What the view has of them is there until it ends.
        const StateView view = rank.optimizer().state_view(), again = rank.optimizer().state_view();
        for (size_t i = 0; i < view.size(); ++i) EXPECT_EQ(view[i].data, again[i].data);
        rank.optimizer().end_view();
        for (Parameter& p : rank.optimizer().parameters()) {
          const int index = int(&p - rank.optimizer().parameters().data());
          if (p.trained()) continue;
          EXPECT_NE(error_of([&] {
                      rank.optimizer().on_grad_ready(index, {});
                    }).find(p.spec.name + " is frozen"),
                    std::string::npos);
        }
      },
      kFrozen);
}

// What a checkpoint loads replaces them too, rounded.
TEST(Frozen, TakeWhatIsLoaded) {
  for_each_layout([](Layout layout) {
    const Whole whole = run_layout(
        layout, small_buckets(),
        [](Rank& rank, Communicator&) {
          for (const StatePiece& piece : rank.optimizer().state_view()) {
            if (piece.slot != "weight") continue;
            for_each_in_piece(piece, [&](int64_t k, int64_t i) {
              static_cast<float*>(piece.data)[k] = 0.1f * float(i % 17);
            });
          }
          rank.optimizer().publish(Stream());
          three_steps(rank);
        },
        kFrozen);
    const std::vector<float>& embed = whole.at("weight/embed.weight");
    for (size_t i = 0; i < embed.size(); ++i) {
      ASSERT_EQ(embed[i], float(bf16(0.1f * float(i % 17))));
    }
  });
}

TEST(Frozen, RanksMustAgree) {
  comm::run_thread_ranks(2, {Seconds(60)}, [&](Communicator& world) {
    const std::string error = error_of([&] {
      const Rank rank(world, dense_copies(2, 1), small_buckets(),
                      world.rank() == 0 ? kFrozen : std::set<std::string>{});
    });
    EXPECT_NE(error.find("have different tensors"), std::string::npos) << error;
  });
}

}  // namespace
}  // namespace moiety::optim
