// The optimizer of ranks that are threads, on the GPUs of the machine in turn: the bits of CPU ranks, eager and captured.
#include <chrono>
#include <cstring>
#include <functional>
#include <limits>
#include <optional>
#include <thread>

#include "moiety/base/graph.h"
#include "moiety/comm/thread_group.h"
#include "moiety/optim/step_words.h"
#include "tests/optim_gpu/optimizer_cases.h"
#include "tests/support/error_of.h"
#include "tests/support/gpu_of_rank.h"
#include "tests/support/gpu_test.h"

namespace moiety::optim {
namespace {

struct RanksRun {
  const char* name;
  gtp::Grid grid;
  DType main_grad, wire;
  std::array<Formats, 2> formats;  // one after the other
};

class OptimizerRanksGpu : public GpuTest, public testing::WithParamInterface<RanksRun> {
 protected:
  // Calls body(groups, stream) on each rank, whose operations run alone.
  static void run(const std::function<void(const GridGroups&, const Stream&)>& body,
                  Seconds deadline = Seconds(20)) {
    const gtp::Grid& grid = GetParam().grid;
    const int ranks = grid.tp * grid.gtp * grid.dp;
    comm::run_thread_ranks(ranks, {.deadline = deadline}, [&](comm::Communicator& world) {
      world.run_alone(true);
      const GridGroups groups(grid, world);
      const Stream stream = Stream::on(gpu_of(world.rank()));
      groups.prepare(stream.device(), {.staging_bytes = 1 << 20});
      body(groups, stream);
      world.bootstrap().all_gather("");
    });
  }
  // Says in some steps, as backward goes on, that gradients are complete; in some of them not of all.
  static void report(DistributedOptimizer& optimizer, int step, const Stream& stream) {
    const int all = static_cast<int>(std::ssize(optimizer.parameters()));
    for (int first = all - 1; step % 3 > 0 && first >= step % 3 - 1; --first) {
      optimizer.on_grads_ready(first, stream);
    }
  }
  static OptimizerConfig config(Device device) {
    OptimizerConfig c = config_on(device);
    c.main_grad = GetParam().main_grad;
    c.grad_wire = GetParam().wire;
    c.compare_copies = 1;
    c.group_elements = 3000;  // several groups
    return c;
  }
};

constexpr DType kF32 = DType::kFloat32, kBf16 = DType::kBFloat16;
INSTANTIATE_TEST_SUITE_P(
    Runs, OptimizerRanksGpu,
    testing::Values(
        RanksRun{
            "two", {.dp = 2, .edp = 2}, kF32, kF32, {std::nullopt, of(Format::kFp8Block128x128)}},
        RanksRun{"three",
                 {.dp = 3, .edp = 3},
                 kF32,
                 kBf16,
                 {of(Format::kMxfp8), of(Format::kNvfp4Tile16)}},
        RanksRun{
            "four", {.dp = 4, .edp = 4}, kBf16, kBf16, {of(Format::kMxfp8Tile32), std::nullopt}}),
    [](const auto& info) { return info.param.name; });

TEST_P(OptimizerRanksGpu, StepsHaveTheBitsOfCpuRanks) {
  run([&](const GridGroups& groups, const Stream& stream) {
    const int rank = groups.world().rank();
    DistributedOptimizer cpu(specs_of(GetParam().formats[0]), config({}), groups);
    DistributedOptimizer gpu(specs_of(GetParam().formats[0]), config(stream.device()), groups);
    EXPECT_EQ(gpu.compare_interval(), 1);
    EXPECT_EQ(cpu.compare_interval(), 0);
    cpu.initialize(5, Stream());
    gpu.initialize(5, stream);
    ASSERT_EQ(difference(cpu, gpu, stream), "") << "initial weights";
    for (int step = 0; step < 8; ++step) {
      SCOPED_TRACE(step);
      if (step == 4) {
        set_format(cpu, GetParam().formats[1], Stream());
        set_format(gpu, GetParam().formats[1], stream);
        ASSERT_EQ(difference(cpu, gpu, stream), "") << "another format";
      }
      std::vector<Poison> poison;
      if (step == 2 && rank == 1) poison = {{5, 77, std::numeric_limits<float>::quiet_NaN()}};
      StepInput in = input_of(step);
      in.tokens += rank;
      contribute_to(cpu, step, step % 3 != 0, stream, rank, poison);
      contribute_to(gpu, step, step % 3 != 0, stream, rank, poison);
      report(gpu, step, stream);
      const StepReport expected = cpu.step(in, Stream()), got = gpu.step(in, stream);
      ASSERT_EQ(text_of(got), text_of(expected));
      ASSERT_EQ(difference(cpu, gpu, stream), "");
      EXPECT_EQ(got.skip, step == 2);
      gpu.compare_copies();
    }
  });
}

TEST_P(OptimizerRanksGpu, ACapturedStepHasTheBitsOfAnEagerOne) {
  run([&](const GridGroups& groups, const Stream& stream) {
    comm::Communicator& world = groups.world();
    const int rank = world.rank();
    DistributedOptimizer eager(specs_of(GetParam().formats[0]), config(stream.device()), groups);
    DistributedOptimizer captured(specs_of(GetParam().formats[0]), config(stream.device()), groups);
    for (DistributedOptimizer* optimizer : {&eager, &captured}) optimizer->initialize(5, stream);
    constexpr int64_t kLosses = 3;
    const Tensor in(DType::kFloat64, {input_word::kCount + kLosses}, stream.device());
    const Tensor out(DType::kFloat64, {report_word::kCount + kLosses}, stream.device());
    contribute_to(captured, 0, false, stream, rank);
    stream.synchronize();
    world.barrier();
    world.run_alone(false);
    std::optional<Graph> graph;
    graph.emplace(stream, [&] { captured.enqueue(in, out, stream); });
    world.run_alone(true);
    stream.synchronize();
    world.barrier();
    const auto report_of = [&](DistributedOptimizer& optimizer) {
      Event end;
      end.record(stream);
      world.wait(end);
      world.barrier();  // what follows may wait for all kernels
      const Tensor here = to_host(out, stream);
      return text_of(optimizer.read_report(here));
    };
    for (int step = 0; step < 6; ++step) {
      SCOPED_TRACE(step);
      std::vector<double> words = input_words(input_of(step));
      copy(in, {words.data(), DType::kFloat64, {std::ssize(words)}}, stream);
      contribute_to(eager, step, false, stream, rank);
      report(eager, step, stream);
      eager.enqueue(in, out, stream);
      const std::string expected = report_of(eager);
      contribute_to(captured, step, false, stream, rank);
      stream.synchronize();
      world.barrier();
      graph->launch(stream);
      ASSERT_EQ(report_of(captured), expected);
      ASSERT_EQ(difference(eager, captured, stream), "");
      captured.compare_copies();
    }
    world.barrier();
  });
}

// Weights that wait for the next forward pass: the bits of those that do not, when forward has waited
// for them, and between steps when they were asked for; eager and captured.
TEST_P(OptimizerRanksGpu, LateWeightsHaveTheSameBits) {
  run([&](const GridGroups& groups, const Stream& stream) {
    comm::Communicator& world = groups.world();
    OptimizerConfig late = config(stream.device());
    late.late_weights = true;
    DistributedOptimizer plain(specs_of(std::nullopt), config(stream.device()), groups);
    DistributedOptimizer other(specs_of(std::nullopt), late, groups);
    const int all = static_cast<int>(std::ssize(plain.parameters()));
    for (DistributedOptimizer* optimizer : {&plain, &other}) optimizer->initialize(5, stream);
    const Tensor in(DType::kFloat64, {input_word::kCount + 3}, stream.device());
    const Tensor out(DType::kFloat64, {report_word::kCount + 3}, stream.device());
    const auto forward = [&] {
      other.begin_forward(stream);
      for (int end = 1; end <= all; ++end) other.await_weights(end, stream);
    };
    const auto ended = [&] {
      Event end;
      end.record(stream);
      world.wait(end);
      world.barrier();  // what follows may wait for all kernels
    };
    std::optional<Graph> graph;
    for (int step = 0; step < 6; ++step) {
      SCOPED_TRACE(step);
      std::vector<double> words = input_words(input_of(step));
      copy(in, {words.data(), DType::kFloat64, {std::ssize(words)}}, stream);
      contribute_to(plain, step, false, stream, world.rank());
      plain.enqueue(in, out, stream);
      ended();
      contribute_to(other, step, false, stream, world.rank());
      stream.synchronize();
      world.barrier();
      if (step < 3) {
        forward();
        report(other, step, stream);
        other.enqueue(in, out, stream);
        EXPECT_NE(error_of([&] { other.enqueue(in, out, stream); }).find("without begin_forward"),
                  std::string::npos);
      } else {
        world.run_alone(false);
        if (!graph) {
          graph.emplace(stream, [&] { forward(), other.enqueue(in, out, stream); });
          stream.synchronize();
          world.barrier();
        }
        graph->launch(stream);
        world.run_alone(true);
      }
      ended();
      if (step % 2 == 0) other.complete_weights(stream);
      if (step % 2 == 1) forward();
      ASSERT_EQ(difference(plain, other, stream), "");
      other.compare_copies();
    }
  });
}

// A rank that never comes: the others' weights, masters and moments stay as they are.
TEST_P(OptimizerRanksGpu, NoWeightChangesBehindALatePeer) {
  run(
      [&](const GridGroups& groups, const Stream& stream) {
        comm::Communicator& world = groups.world();
        DistributedOptimizer optimizer(specs_of(std::nullopt), config(stream.device()), groups);
        optimizer.initialize(5, stream);
        contribute_to(optimizer, 0, false, stream, world.rank());
        const auto state = [&] {
          std::vector<Tensor> out;
          for (const Parameter& p : optimizer.parameters())
            out.push_back(to_host(p.weight, stream));
          for (const StatePiece& x : optimizer.state_view()) {
            int64_t n = 1;
            for (int d = 0; d < x.box.rank; ++d) n *= x.box.size[d];
            out.push_back(to_host(TensorView(x.data, x.dtype, {n}, x.device), stream));
          }
          return out;
        };
        const std::vector<Tensor> before = state();
        const Tensor in(DType::kFloat64, {input_word::kCount + 3}, stream.device());
        const Tensor out(DType::kFloat64, {report_word::kCount + 3}, stream.device());
        std::vector<double> words = input_words(input_of(0));
        copy(in, {words.data(), DType::kFloat64, {std::ssize(words)}}, stream);
        stream.synchronize();
        world.barrier();
        world.run_alone(false);
        if (world.rank() != 1) {
          optimizer.enqueue(in, out, stream);
          Event end;
          end.record(stream);
          EXPECT_NE(error_of([&] { world.wait(end); }).find("waited 2.0 s for rank "),
                    std::string::npos);
          const std::vector<Tensor> after = state();
          for (size_t i = 0; i < after.size(); ++i) {
            EXPECT_EQ(std::memcmp(before[i].view().raw(), after[i].view().raw(),
                                  before[i].view().bytes()),
                      0)
                << i;
          }
        }
        // It stays until the others have seen that it is late, so that its memory is there, and longer
        // than a wait for it takes.
        if (world.rank() == 1) std::this_thread::sleep_for(std::chrono::seconds(3));
        world.bootstrap().all_gather("");
      },
      Seconds(2));
}

// A weight that one rank has changed is found where ranks compare, and named on all.
TEST_P(OptimizerRanksGpu, CopiesThatDifferAreFound) {
  run([&](const GridGroups& groups, const Stream& stream) {
    DistributedOptimizer gpu(specs_of(std::nullopt), config(stream.device()), groups);
    gpu.initialize(5, stream);
    gpu.compare_copies();
    const TensorView weight = gpu.parameters()[1].weight;
    if (groups.world().rank() == 1) fill_bytes(weight.slice(0, 0, 1), 7, stream);
    stream.synchronize();
    const std::string error = error_of([&] { gpu.compare_copies(); });
    EXPECT_NE(error.find("optimizer: ranks 0 and 1 of \"dp\" have different weights at "),
              std::string::npos)
        << error;
  });
}

}  // namespace
}  // namespace moiety::optim
