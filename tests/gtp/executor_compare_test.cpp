// The comparison between peers: a shard that was quantized with its own amax is found.
#include "moiety/base/error.h"
#include "moiety/quant/dequantize.h"
#include "moiety/quant/quantize.h"
#include "tests/gtp/executor_harness.h"

namespace moiety::gtp {
namespace {

constexpr int kRanks = 3, kDamaged = 1, kSteps = 5, kEvery = 2;

// The shard as a rank makes it that forgets to ask its peers, of which others have the maximum.
void quantize_alone(const ShardedWeight& w) {
  QuantizedView own = w.quantized;
  const Tensor x(DType::kBFloat16, {own.rows, own.cols});
  quant::dequantize(own, Direction::kRow, x, {}, Stream());
  const float most = own.amax.data<float>()[0] / 2;
  bf16* values = x.data<bf16>();
  for (int64_t i = 0; i < own.rows * own.cols; ++i) {
    values[i] = bf16(std::clamp(static_cast<float>(values[i]), -most, most));
  }
  own.col_data = {};
  quant::quantize(x, own, {}, Stream());
  own.amax.data<float>()[1] = own.amax.data<float>()[0];
  own.tensor_scale.data<float>()[1] = own.tensor_scale.data<float>()[0];
}

struct Found {
  int step = -1;
  std::string error;
  bool wrong_weights = false;
};

Found found_by(comm::Communicator& world, const TrainingSetup& setup) {
  TraceMaker maker(20000);
  maker.fwd(0).fwd(1).wgrad(1).wgrad(0);
  Rank rank(world, setup);
  Found out;
  for (int step = 0; step < kSteps && out.step < 0; ++step) {
    try {
      rank.step({"train", 1}, program_of(maker));
    } catch (const Error& e) {
      out.step = step;
      out.error = e.what();
    }
    rank.synchronize();
    out.wrong_weights |= !rank.faults.empty();
  }
  return out;
}

TEST(ExecutorCompare, FindsAShardQuantizedWithItsOwnAmax) {
  for (const Format format : {Format::kFp8Tensor, Format::kNvfp4, Format::kNvfp4Tile16}) {
    SCOPED_TRACE(name(format));
    const Codec codec(QuantSpec::of(format));
    TrainingSetup setup;
    setup.ranks = setup.egtp = kRanks;
    setup.compare_scales = kEvery;
    setup.bundles = {{.name = "dense", .rows = 40, .cols = 48, .codec = codec},
                     {.name = "experts", .rows = 60, .cols = 32, .experts = 2, .codec = codec}};
    for (const int damage : {0, 1, 2, kSteps}) {
      // From this step on the last expert of one rank is damaged.
      setup.on_write = [damage](Rank& rank, int64_t step) {
        if (step >= damage && rank.number() == kDamaged) quantize_alone(rank.weight(1, 1));
      };
      std::vector<Found> found(kRanks);
      comm::run_thread_ranks(kRanks, {.deadline = Seconds(60)}, [&](comm::Communicator& world) {
        found[static_cast<size_t>(world.rank())] = found_by(world, setup);
      });
      for (const Found& f : found) {
        const bool damaged = damage < kSteps;
        EXPECT_EQ(f.wrong_weights, damaged) << damage;
        EXPECT_EQ(f.step, damaged ? (damage + kEvery - 1) / kEvery * kEvery : -1);
        if (!damaged) continue;
        EXPECT_EQ(f.error.find("gtp \"egtp\": experts.1 has amax "), 0u) << f.error;
        EXPECT_NE(f.error.find(" on rank 0, "), std::string::npos) << f.error;
        EXPECT_NE(f.error.find(" on rank 1; expected those of the uncut weight"), std::string::npos)
            << f.error;
      }
    }
  }
}

// Formats without a tensor scale have nothing to compare.
TEST(ExecutorCompare, FormatsWithoutTensorScalesAreLeftAlone) {
  TrainingSetup setup;
  setup.compare_scales = 1;
  setup.bundles = {
      {.name = "dense", .rows = 40, .cols = 48, .codec = Codec(QuantSpec::of(Format::kMxfp8))}};
  TraceMaker maker(20000);
  maker.fwd(0).wgrad(0);
  run_ranks(setup, [&](Rank& rank) {
    for (int i = 0; i < 3; ++i) rank.step({"train", 1}, program_of(maker));
  });
}

}  // namespace
}  // namespace moiety::gtp
