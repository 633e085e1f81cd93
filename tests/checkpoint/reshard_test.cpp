// A model's training state, as the distributed optimizer divides it, saved under each of 12
// grids and loaded under each other one.
#include "moiety/checkpoint/reshard.h"

#include <array>
#include <map>
#include <memory>

#include <gtest/gtest.h>

#include "moiety/checkpoint/retention.h"
#include "moiety/optim/distributed_optimizer.h"
#include "tests/checkpoint/state_testing.h"
#include "tests/optim/model_specs.h"

namespace moiety::checkpoint {
namespace {

using Layout = gtp::Grid;
// Layouts with hard cases: with ep 3 a rank holds no expert, with egtp 6 and in the small
// vocabularies nothing but padding; the vocabulary of 41 divides by none of the degrees.
constexpr std::array kLayouts{
    Layout{},
    Layout{.tp = 2, .egtp = 2},
    Layout{.gtp = 2, .ep = 2},
    Layout{.dp = 2, .edp = 2},
    Layout{.tp = 3, .ep = 3},
    Layout{.gtp = 3, .egtp = 3},
    Layout{.tp = 4, .ep = 4},
    Layout{.gtp = 4, .egtp = 2, .edp = 2},
    Layout{.tp = 2, .gtp = 2, .ep = 2, .edp = 2},
    Layout{.dp = 4, .ep = 2, .egtp = 2},
    Layout{.gtp = 3, .dp = 2, .egtp = 6},
    Layout{.tp = 2, .gtp = 2, .dp = 2, .ep = 2, .egtp = 2, .edp = 2},
};
int ranks_of(const Layout& layout) { return layout.tp * layout.gtp * layout.dp; }

// The state of one rank: the optimizer's segments, and the router's bias, of which all have copies.
class ModelState {
 public:
  ModelState(comm::Communicator& world, const Layout& layout, DType moments)
      : groups_(layout, world),
        optimizer_(optim::model_specs(layout, world.rank()), config(moments), groups_),
        bias_(DType::kFloat32, {optim::kExperts}),
        layout_(layout) {}

  StateView view(bool with_bias) {
    StateView view = optimizer_.state_view();
    if (with_bias) {
      view.push_back({"router.bias",
                      "weight",
                      DType::kFloat32,
                      {optim::kExperts},
                      whole(std::vector<int64_t>{optim::kExperts}),
                      bias_.view().raw()});
    }
    return view;
  }

  RunState run(int64_t step) const {
    RunState run = run_state(step, ranks_of(layout_));
    run.layout = {ranks_of(layout_), layout_.tp, layout_.gtp, layout_.dp, layout_.ep, layout_.egtp};
    return run;
  }

 private:
  static optim::OptimizerConfig config(DType moments) {
    optim::OptimizerConfig config;
    config.moments = moments;
    config.bucket_elements = 600;  // several buckets, one parameter alone in its own
    return config;
  }

  optim::GridGroups groups_;
  optim::DistributedOptimizer optimizer_;
  Tensor bias_;
  Layout layout_;
};

// body(state, world) on the ranks of a layout.
void on_layout(const Layout& layout, DType moments,
               const std::function<void(ModelState&, comm::Communicator&)>& body) {
  comm::run_thread_ranks(ranks_of(layout), {Seconds(30)}, [&](comm::Communicator& world) {
    ModelState state(world, layout, moments);
    body(state, world);
    world.barrier();
  });
}

void save_beside(ModelState& state, comm::Communicator& world, const std::string& directory,
                 int64_t step) {
  SaveOptions options;
  options.piece_bytes = 400;
  options.keep.last = 0;
  Saver saver(directory, world.bootstrap(), options);
  saver.start(state.view(world.rank() == 0), state.run(step), Stream());
  saver.wait();
}

struct Content {
  uint64_t digest = 0;
  std::string bytes;  // of the logical tensor, row-major
  friend bool operator==(const Content&, const Content&) = default;
};

// Everything in a checkpoint, by slot and tensor.
std::map<std::string, Content> content_of(const std::string& path) {
  const Manifest m = read_manifest(path);
  std::map<std::string, Content> out;
  for (const auto& [name, tensor] : m.tensors) {
    const Box all = whole(tensor.shape);
    for (const auto& [slot, entry] : tensor.slots) {
      Content& content = out[slot + "/" + name];
      content.digest = entry.digest;
      content.bytes.resize(static_cast<size_t>(byte_size(entry.dtype, volume(all))));
      for (const Piece& piece : entry.pieces) {
        std::vector<std::byte> data(piece.end - piece.begin);
        SafetensorsReader::open(path + "/" + m.files[piece.file].name).read(piece.begin, data);
        copy_region(piece.box, bits(entry.dtype) / 8, piece.box, data.data(), all,
                    reinterpret_cast<std::byte*>(content.bytes.data()));
      }
    }
  }
  return out;
}

int64_t step_of_layout(size_t layout) { return int64_t(layout) + 1; }

class Reshard : public ::testing::TestWithParam<DType> {};

TEST_P(Reshard, EveryLayoutIntoEveryOther) {
  // Only a third of the pairs runs with bf16 moments.
  const size_t stride = GetParam() == DType::kFloat32 ? 1 : 3;
  const TemporaryDirectory directory;
  const std::string saved = directory / "saved";
  for (size_t a = 0; a < kLayouts.size(); ++a) {
    on_layout(kLayouts[a], GetParam(), [&](ModelState& state, comm::Communicator& world) {
      fill(state.view(true), 1);
      save_beside(state, world, saved, step_of_layout(a));
    });
  }
  const auto path = [&](size_t a) { return saved + "/" + step_name(step_of_layout(a)); };
  const auto expected = content_of(path(0));
  // Three slots of the 16 logical tensors, and the bias.
  EXPECT_EQ(expected.size(), 49u);
  for (size_t b = 0; b < kLayouts.size(); ++b) {
    EXPECT_EQ(content_of(path(b)), expected) << "saved under layout " << b;
    const std::string again = directory / text("again-{}", b);
    on_layout(kLayouts[b], GetParam(), [&](ModelState& state, comm::Communicator& world) {
      const StateView view = state.view(true);
      for (size_t a = b % stride; a < kLayouts.size(); a += stride) {
        fill(view, 2);
        const RunState run = load(path(a), view, {}, world.bootstrap());
        EXPECT_EQ(differences(view, 1), 0) << "layout " << a << " into " << b;
        EXPECT_EQ(run.state, run_state(1, 1).state);
        EXPECT_EQ(run.step, step_of_layout(a));
        EXPECT_EQ(run.layout.ep, kLayouts[a].ep);
        EXPECT_EQ(run.layout.gtp, kLayouts[a].gtp);
        save_beside(state, world, again, step_of_layout(a));
      }
    });
    for (size_t a = b % stride; a < kLayouts.size(); a += stride) {
      EXPECT_EQ(content_of(again + "/" + step_name(step_of_layout(a))), expected)
          << a << " into " << b;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Moments, Reshard, ::testing::Values(DType::kFloat32, DType::kBFloat16),
                         [](const auto& info) { return std::string(name(info.param)); });

TEST(WeightsOnly, UnderAnotherLayout) {
  const TemporaryDirectory directory;
  on_layout(kLayouts[8], DType::kFloat32, [&](ModelState& state, comm::Communicator& world) {
    fill(state.view(true), 1);
    save_beside(state, world, directory / "c", 7);
  });
  on_layout(kLayouts[5], DType::kBFloat16, [&](ModelState& state, comm::Communicator& world) {
    StateView weights, moments;
    for (const StatePiece& piece : state.view(true)) {
      (piece.slot == "weight" ? weights : moments).push_back(piece);
    }
    fill(weights, 2);
    fill(moments, 2);
    LoadOptions options;
    options.may_leave = is_no_weight;
    load(directory / "c/step-00000007", weights, options, world.bootstrap());
    EXPECT_EQ(differences(weights, 1), 0);
    EXPECT_EQ(differences(moments, 2), 0);
  });
}

}  // namespace
}  // namespace moiety::checkpoint
