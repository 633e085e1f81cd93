// The optimizer of one rank: on a GPU the bits of the CPU, and a captured step those of an eager
// one.
#include "moiety/optim/distributed_optimizer.h"

#include <functional>
#include <limits>

#include "moiety/base/graph.h"
#include "moiety/comm/thread_group.h"
#include "moiety/optim/step_words.h"
#include "moiety/optim/weight_store.h"
#include "tests/optim_gpu/optimizer_cases.h"
#include "tests/support/gpu_test.h"

namespace moiety::optim {
namespace {

class OptimizerGpu : public GpuTest {
 protected:
  // Calls body(groups) on the one rank of a world.
  static void run(const std::function<void(const GridGroups&)>& body) {
    comm::run_thread_ranks(1, {}, [&](comm::Communicator& world) {
      const GridGroups groups({}, world);
      body(groups);
    });
  }

  void contribute(DistributedOptimizer& optimizer, int step, bool all,
                  const std::vector<Poison>& poison = {}) const {
    contribute_to(optimizer, step, all, stream, 0, poison);
  }
};

struct TrainingRun {
  const char* name;
  DType weights, moments, main_grad;
  std::array<Formats, 3> formats;  // one after the other
};

class OptimizerGpuRuns : public OptimizerGpu, public testing::WithParamInterface<TrainingRun> {};
INSTANTIATE_TEST_SUITE_P(
    Runs, OptimizerGpuRuns,
    testing::Values(TrainingRun{"blocks",
                                DType::kBFloat16,
                                DType::kFloat32,
                                DType::kFloat32,
                                {of(Format::kFp8Block128x128), of(Format::kMxfp8), std::nullopt}},
                    TrainingRun{"tiles",
                                DType::kBFloat16,
                                DType::kBFloat16,
                                DType::kBFloat16,
                                {of(Format::kNvfp4Tile16), of(Format::kMxfp8Tile32),
                                 of(Format::kFp8Block128x128)}},
                    TrainingRun{"plain",
                                DType::kFloat32,
                                DType::kFloat32,
                                DType::kBFloat16,
                                {std::nullopt, of(Format::kNvfp4Tile16), of(Format::kMxfp8)}}),
    [](const auto& info) { return info.param.name; });

TEST_P(OptimizerGpuRuns, TwentyStepsHaveTheBitsOfTheCpu) {
  const TrainingRun& which = GetParam();
  run([&](const GridGroups& groups) {
    OptimizerConfig on_cpu = config_on({}), on_gpu = config_on(kGpu);
    for (OptimizerConfig* c : {&on_cpu, &on_gpu}) {
      c->weights = which.weights;
      c->moments = which.moments;
      c->main_grad = which.main_grad;
    }
    DistributedOptimizer cpu(specs_of(which.formats[0]), on_cpu, groups);
    DistributedOptimizer gpu(specs_of(which.formats[0]), on_gpu, groups);
    for (const Parameter& p : gpu.parameters()) EXPECT_EQ(p.grad.device(), kGpu);
    for (const StatePiece& piece : gpu.state_view()) EXPECT_EQ(piece.device, kGpu);
    cpu.initialize(5, Stream());
    gpu.initialize(5, stream);
    ASSERT_EQ(difference(cpu, gpu, stream), "") << "initial weights";
    constexpr float kInf = std::numeric_limits<float>::infinity();
    int applied = 0;
    for (int step = 0; step < 20; ++step) {
      SCOPED_TRACE(step);
      if (step == 7 || step == 14) {
        set_format(cpu, which.formats[step / 7], Stream());
        set_format(gpu, which.formats[step / 7], stream);
        ASSERT_EQ(difference(cpu, gpu, stream), "") << "another format";
      }
      std::vector<Poison> poison;
      if (step == 4) poison = {{5, 77, std::nanf("")}};
      if (step == 6) poison = {{6, 1, -kInf}, {1, 47, kInf}};
      StepInput in = input_of(step);
      if (step == 9) in.overflow = true, in.required = 123, in.flags = 5;
      if (step == 12) in.tokens = 0;
      if (step == 16) in.bad = 2;
      contribute(cpu, step, step % 5 != 0, poison);
      contribute(gpu, step, step % 5 != 0, poison);
      const StepReport expected = cpu.step(in, Stream()), got = gpu.step(in, stream);
      ASSERT_EQ(text_of(got), text_of(expected));
      ASSERT_EQ(difference(cpu, gpu, stream), "");
      const bool skip =
          step == 4 || step == 6 || step == 9 || step == 10 || step == 12 || step == 16;
      EXPECT_EQ(got.skip, skip);
      const std::string skip_word = bytes_of(gpu.skip(), stream);
      EXPECT_EQ(skip_word[0] != 0, skip);
      EXPECT_EQ(got.halt, step == 9 || step == 10);
      EXPECT_EQ(got.bad_parameter, step == 4 ? "experts.weight" : step == 6 ? "norm.weight" : "");
      if (step == 10) {
        cpu.clear_halt();
        gpu.clear_halt();
      }
      applied += !skip;
      EXPECT_EQ(got.t, applied);
    }
    // The saved state continues.
    StepState state = gpu.step_state();
    state.t = 400;
    cpu.restore(state);
    gpu.restore(state);
    contribute(cpu, 20, true);
    contribute(gpu, 20, true);
    EXPECT_EQ(text_of(gpu.step(input_of(20), stream)), text_of(cpu.step(input_of(20), Stream())));
    EXPECT_EQ(difference(cpu, gpu, stream), "");
  });
}

// A capture holds no allocation and no wait of the host; what changes from step to step comes
// through memory.
TEST_P(OptimizerGpuRuns, ACapturedStepHasTheBitsOfAnEagerOne) {
  const TrainingRun& which = GetParam();
  run([&](const GridGroups& groups) {
    OptimizerConfig c = config_on(kGpu);
    c.weights = which.weights;
    c.moments = which.moments;
    c.main_grad = which.main_grad;
    DistributedOptimizer eager(specs_of(which.formats[0]), c, groups);
    DistributedOptimizer captured(specs_of(which.formats[0]), c, groups);
    for (DistributedOptimizer* optimizer : {&eager, &captured}) optimizer->initialize(5, stream);
    constexpr int64_t kLosses = 3;
    const Tensor in(DType::kFloat64, {input_word::kCount + kLosses}, kGpu);
    const Tensor out(DType::kFloat64, {report_word::kCount + kLosses}, kGpu);
    contribute(captured, 0, false);  // those that have gradients are known to the capture
    const Graph graph(stream, [&] { captured.enqueue(in, out, stream); });
    EXPECT_GT(graph.nodes(), 3);
    for (int step = 0; step < 10; ++step) {
      SCOPED_TRACE(step);
      std::vector<Poison> poison;
      if (step == 4) poison = {{5, 77, std::nanf("")}};
      std::vector<double> words = input_words(input_of(step));
      copy(in, {words.data(), DType::kFloat64, {static_cast<int64_t>(words.size())}}, stream);
      const auto report = [&](DistributedOptimizer& optimizer) {
        Tensor here(DType::kFloat64, {report_word::kCount + kLosses});
        copy(here, out, stream);
        stream.synchronize();
        return text_of(optimizer.read_report(here));
      };
      contribute(eager, step, false, poison);
      eager.enqueue(in, out, stream);
      const std::string expected = report(eager);
      contribute(captured, step, false, poison);
      graph.launch(stream);
      ASSERT_EQ(report(captured), expected);
      ASSERT_EQ(difference(eager, captured, stream), "");
      EXPECT_EQ(bytes_of(captured.skip(), stream)[0] != 0, step == 4);
    }
    EXPECT_EQ(eager.step_state().t, 9);
  });
}

// More elements than are drawn at a time, with runs that begin and end elsewhere.
TEST_F(OptimizerGpu, InitialWeightsAreDrawnInPieces) {
  const std::vector<ParamSpec> specs{vector_spec("norm.weight", 5),
                                     matrix_spec("wide.weight", 4100, 4100)};
  const std::vector<BucketLayout> layouts = layout_buffers(specs, gtp::Grid{}, 20 << 20);
  ASSERT_EQ(layouts.size(), 1u);
  const std::vector<ElementRun> runs = segment_runs(specs, layouts[0], 0);
  const Tensor here(DType::kFloat32, {layouts[0].length});
  const Tensor there(DType::kFloat32, {layouts[0].length}, kGpu);
  fill_bytes(there, 0xA5, stream);
  initialize(specs, runs, 3, here, Stream());
  initialize(specs, runs, 3, there, stream);
  EXPECT_TRUE(bytes_of(here, stream) == bytes_of(there, stream));
}

TEST_F(OptimizerGpu, AWeightStoreHasTheWeightsOfTheCpu) {
  for (const DType storage : {DType::kBFloat16, DType::kFloat32}) {
    WeightStore cpu(specs_of(std::nullopt), storage), gpu(specs_of(std::nullopt), storage, kGpu);
    const auto same = [&] {
      for (size_t p = 0; p < cpu.parameters().size(); ++p) {
        const TensorView& there = gpu.parameters()[p].weight;
        EXPECT_EQ(there.device(), kGpu);
        const TensorView& here = cpu.parameters()[p].weight;
        EXPECT_TRUE(bytes_of(here, stream) == bytes_of(there, stream)) << p;
      }
    };
    cpu.initialize(9, Stream());
    gpu.initialize(9, stream);
    same();
    for (WeightStore* store : {&cpu, &gpu}) {
      for (const StatePiece& piece : store->state_view()) {
        EXPECT_EQ(piece.device, Device{});
        int64_t n = 1;
        for (int d = 0; d < piece.box.rank; ++d) n *= piece.box.size[d];
        for (int64_t i = 0; i < n; ++i) static_cast<float*>(piece.data)[i] = 0.1f * float(i);
      }
    }
    cpu.publish(Stream());
    gpu.publish(stream);
    same();
  }
}

TEST_F(OptimizerGpu, GatheredWeightsAreUnsupported) {
  comm::run_thread_ranks(2, {}, [](comm::Communicator& world) {
    const GridGroups groups({.gtp = 2, .edp = 2}, world);
    try {
      const DistributedOptimizer optimizer(specs_of(std::nullopt), config_on(kGpu), groups);
      ADD_FAILURE() << "no error";
    } catch (const Error& e) {
      EXPECT_EQ(e.kind(), ErrorKind::kUnsupported);
      EXPECT_STREQ(e.what(), "optimizer: (e)gtp of 2 ranks with state on cuda:0");
    }
  });
}

}  // namespace
}  // namespace moiety::optim
