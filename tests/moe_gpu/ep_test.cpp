// Expert parallelism of one rank on a GPU: the suites of tests/moe there, graphs, and what it
// refuses.
#include "moiety/base/graph.h"
#include "moiety/moe/moe_layer.h"
#include "tests/moe/ep_conformance.h"
#include "tests/moe/ep_quantized.h"
#include "tests/moe_gpu/on_gpu.h"
#include "tests/support/gpu_test.h"
#include "tests/support/mirror.h"

namespace moiety::moe {
namespace {

class EpGpu : public GpuTest {
 protected:
  using Body = std::function<void(comm::Communicator&)>;
  static void one_rank(const Body& body) { Threads::run(1, body); }
  static EpOptions options() { return {.name = "moe", .device = kGpu}; }
  EpGroup group(comm::Communicator& world, int experts, const EpLimits& limits) const {
    return EpGroup::create(world, ExpertMap(experts, 1), limits, options());
  }

  template <class T, class Out>
  void run_case(const conformance::Case& c, int seed) {
    const conformance::Problem<T> problem(c, seed);
    const conformance::Expected<T, Out> expected(problem);
    one_rank([&](comm::Communicator& world) {
      SCOPED_TRACE(text("case {}: {}", seed, c.describe()));
      conformance::RankRun<T, Out, OnGpu>(world, problem, expected, EpTransport::kAuto,
                                          OnGpu(stream))
          .run();
    });
  }
  template <class T>
  void run_case_of(const conformance::Case& c, int seed) {
    c.out_fp32 ? run_case<T, float>(c, seed) : run_case<T, T>(c, seed);
  }
};

// A part of the cases.
class EpGpuCases : public EpGpu, public testing::WithParamInterface<int> {
 public:
  static constexpr int kParts = 8;
};
INSTANTIATE_TEST_SUITE_P(Part, EpGpuCases, testing::Range(0, EpGpuCases::kParts));

// One rank takes the place of several, and tokens are around whole blocks of prepare.
TEST_P(EpGpuCases, HaveTheBitsOfTheOracle) {
  std::vector<conformance::Case> cases = conformance::all_cases();
  for (size_t i = GetParam(); i < cases.size() && !HasFailure(); i += kParts) {
    conformance::Case& c = cases[i];
    c.ranks = 1;
    c.tokens = c.tokens == 15 ? 256 : c.tokens == 16 ? 257 : c.tokens == 4096 ? 5000 : c.tokens;
    const int64_t tokens = c.tokens;
    conformance::shrink(c);
    // Many tokens are for prepare's sake: rows give way first.
    if (tokens > 255 && c.topk * tokens <= 1 << 16) {
      c.tokens = tokens;
      c.model = std::min<int64_t>(c.model, 7);
    }
    const int seed = static_cast<int>(i);
    if (c.dtype == DType::kBFloat16) run_case_of<bf16>(c, seed);
    if (c.dtype == DType::kFloat16) run_case_of<fp16>(c, seed);
    if (c.dtype == DType::kFloat32) run_case_of<float>(c, seed);
  }
}

TEST_F(EpGpu, MovesQuantizedRows) {
  std::vector<quantized::Case> cases = quantized::all_cases();
  for (size_t i = 0; i < cases.size() && !HasFailure(); ++i) {
    quantized::Case& c = cases[i];
    c.ranks = 1;
    c.gemm_layout = false;
    conformance::shrink(c);
    const quantized::Problem problem(c, static_cast<int>(i));
    one_rank([&](comm::Communicator& world) {
      SCOPED_TRACE(text("case {}: {}", i, c.describe()));
      quantized::run_rank(world, problem, EpTransport::kAuto, OnGpu(stream));
    });
  }
}

// Tensors of a step, and all operations on them.
struct Step {
  static constexpr int64_t kTokens = 700, kModel = 72, kExperts = 11, kAlignment = 16;
  static constexpr int kTopk = 3;
  static constexpr EpLimits kLimits{.tokens = kTokens, .model = kModel, .topk = kTopk};

  explicit Step(int64_t rows) : capacity(rows) {}

  int64_t capacity;
  Tensor idx{DType::kInt32, {kTokens, kTopk}};
  Tensor x{DType::kBFloat16, {kTokens, kModel}}, g{DType::kBFloat16, {kTokens, kModel}};
  Tensor w{DType::kFloat32, {kTokens, kTopk}}, limit{DType::kInt64, {1}};
  Tensor rows{DType::kBFloat16, {capacity, kModel}}, gy{DType::kBFloat16, {capacity, kModel}};
  Tensor slot_w{DType::kFloat32, {capacity}}, g_slot_w{DType::kFloat32, {capacity}};
  Tensor out{DType::kBFloat16, {kTokens, kModel}}, gx{DType::kFloat32, {kTokens, kModel}};
  Tensor gw{DType::kFloat32, {kTokens, kTopk}}, info{DType::kInt64, {16}};
  Tensor memory{DType::kUInt8, {plan_bytes(ExpertMap(kExperts, 1), kLimits, prepare_args(idx))}};

  std::vector<const Tensor*> inputs() const { return {&idx, &x, &g, &w, &limit}; }
  PrepareArgs prepare_args(const TensorView& routing) const {
    return {.idx_TK = routing,
            .alignment = kAlignment,
            .capacity = capacity,
            .overflow = OverflowPolicy::kReport};
  }
  void fill(std::mt19937& rng) const {
    for (int64_t i = 0; i < kTokens * kTopk; ++i) {
      idx.data<int32_t>()[i] = static_cast<int32_t>(rng() % (kExperts + 1)) - 1;
      w.data<float>()[i] = std::normal_distribution<float>()(rng);
    }
    for (int64_t i = 0; i < kTokens * kModel; ++i) {
      x.data<bf16>()[i] = bf16(std::normal_distribution<float>()(rng));
      g.data<bf16>()[i] = bf16(std::normal_distribution<float>()(rng));
    }
    *limit.data<int64_t>() = capacity - static_cast<int64_t>(rng() % 300);
  }
  // `at` says where a tensor is.
  template <class At>
  void run(EpGroup& group, const At& at, const Stream& stream) const {
    PrepareArgs args = prepare_args(at(idx));
    args.capacity_limit = at(limit);
    const EpPlan plan = prepare(group, args, at(memory), stream);
    dispatch(group, plan, {.x_TD = at(x), .w_TK = at(w), .rows_CD = at(rows), .slot_w = at(slot_w)},
             stream);
    combine(group, plan, {.y_CD = at(rows), .slot_w = at(slot_w), .out_TD = at(out)}, stream);
    combine_backward(group, plan,
                     {.g_TD = at(g),
                      .slot_w = at(slot_w),
                      .y_CD = at(rows),
                      .gy_CD = at(gy),
                      .g_slot_w = at(g_slot_w)},
                     stream);
    dispatch_backward(group, plan,
                      {.g_rows_CD = at(gy),
                       .g_slot_w = at(g_slot_w),
                       .addend = at(out),
                       .gx_TD = at(gx),
                       .gw_TK = at(gw)},
                      stream);
    copy(at(info), plan.info, stream);
  }
};

TEST_F(EpGpu, OneCaptureServesOtherRouting) {
  one_rank([&](comm::Communicator& world) {
    const Step s(Step::kTokens * Step::kTopk);
    EpGroup here =
        EpGroup::create(world, ExpertMap(Step::kExperts, 1), Step::kLimits, {.name = "cpu"});
    EpGroup there = group(world, Step::kExperts, Step::kLimits);
    const Mirror m({s.idx, s.x, s.g, s.w, s.limit, s.rows, s.gy, s.slot_w, s.g_slot_w, s.out, s.gx,
                    s.gw, s.info, s.memory},
                   stream);
    const Graph graph(stream, [&] { s.run(there, m, stream); });
    EXPECT_EQ(there.epoch(), 5);
    std::mt19937 rng(3);
    for (int replay = 0; replay < 4; ++replay) {
      s.fill(rng);
      for (const Tensor* x : s.inputs()) copy(m(*x), *x, stream);
      graph.launch(stream);
      s.run(here, [](const TensorView& x) { return x; }, {});
      EXPECT_EQ(m.difference("info", s.info), "");
      EXPECT_EQ(m.difference("rows", s.rows), "");
      EXPECT_EQ(m.difference("slot_w", s.slot_w), "");
      EXPECT_EQ(m.difference("out", s.out), "");
      EXPECT_EQ(m.difference("gy", s.gy), "");
      EXPECT_EQ(m.difference("g_slot_w", s.g_slot_w), "");
      EXPECT_EQ(m.difference("gx", s.gx), "");
      EXPECT_EQ(m.difference("gw", s.gw), "");
      // The same once more is the same in every byte, those that nobody specifies too.
      const Tensor once = m.back(s.memory);
      graph.launch(stream);
      const Tensor again = m.back(s.memory);
      EXPECT_EQ(std::memcmp(once.view().raw(), again.view().raw(), once.view().bytes()), 0);
    }
    // Every routing ran twice there.
    const Tensor expected(DType::kInt64, {3}), report(DType::kInt64, {3});
    here.take_report(expected, {});
    const Mirror reports({report}, stream);
    there.take_report(reports(report), stream);
    const Tensor got = reports.back(report);
    const int64_t *a = expected.data<int64_t>(), *b = got.data<int64_t>();
    EXPECT_GT(a[0], 0);
    EXPECT_EQ(b[0], 2 * a[0]);
    EXPECT_EQ(b[1], a[1]);
    EXPECT_EQ(b[2], 2 * a[2]);
    there.take_report(reports(report), stream);
    EXPECT_EQ(reports.back(report).data<int64_t>()[0], 0);
  });
}

// The texts of a CPU group, bad indices before lost capacity, each epoch's when it is asked for.
TEST_F(EpGpu, FindingsSpeak) {
  one_rank([&](comm::Communicator& world) {
    const EpLimits limits{.tokens = 600, .model = 1, .topk = 2};
    for (const DType dtype : {DType::kInt32, DType::kInt64}) {
      EpGroup gpu = group(world, 4, limits);
      EpGroup cpu = EpGroup::create(world, ExpertMap(4, 1), limits, {.name = "moe"});
      const auto run = [&](std::initializer_list<std::pair<int, int64_t>> odd, int64_t capacity) {
        const Tensor idx(dtype, {600, 2});
        for (int i = 0; i < 1200; ++i) {
          int64_t e = i % 3 == 0 ? 2 : i % 4;
          for (const auto& [at, value] : odd) e = at == i ? value : e;
          dtype == DType::kInt32 ? void(idx.data<int32_t>()[i] = static_cast<int32_t>(e))
                                 : void(idx.data<int64_t>()[i] = e);
        }
        const PrepareArgs args{.idx_TK = idx, .alignment = 8, .capacity = capacity};
        const PlanMemory memory(gpu.map(), limits, args);
        const EpPlan plan = prepare(cpu, args, memory.view(), {});
        const Mirror m({idx, memory.view()}, stream);
        const PrepareArgs there{.idx_TK = m(idx), .alignment = 8, .capacity = capacity};
        EXPECT_EQ(prepare(gpu, there, m(memory.view()), stream).epoch, plan.epoch);
        const Tensor back = m.back(memory.view());
        EXPECT_EQ(std::memcmp(back.view().raw(), plan.info.raw(), plan.info.bytes()), 0);
        return plan.epoch;
      };
      const Epoch first = run({{1100, 4}, {1001, 77}, {1199, 5}, {3, -8}}, 2000);
      const Epoch second = run({}, 1000);
      const Epoch third = run({{700, INT32_MAX}, {10, -1}, {11, -1}}, 100);
      const auto error = [](EpGroup& g, Epoch epoch) { return error_of([&] { g.check(epoch); }); };
      EXPECT_EQ(error(gpu, 0), "no error");
      EXPECT_EQ(error(gpu, first),
                "ep prepare, group \"moe\": rank 0, token 500, choice 1: expert 77 is outside "
                "[0, 4)");
      EXPECT_EQ(error(gpu, first), "no error");
      EXPECT_NE(error(gpu, second), "no error");
      error(cpu, second);
      EXPECT_EQ(error(gpu, third), error(cpu, third));
      EXPECT_EQ(error(gpu, third), "no error");
    }
  });
}

TEST_F(EpGpu, HoldsNoMemoryForPeers) {
  one_rank([&](comm::Communicator& world) {
    const EpLimits limits{.tokens = 64, .model = 32, .topk = 2};
    EpGroup g = group(world, 4, limits);
    const EpBytes bytes = g.bytes();
    EXPECT_EQ(bytes.total, 0);
    EXPECT_EQ(bytes.regions + bytes.meta + bytes.words + bytes.loss, 0);
    EXPECT_EQ(bytes.record, EpGroup::bytes(g.map(), limits, {}).record);
    EXPECT_EQ(EpGroup::bytes(g.map(), limits, options()).total, 0);
    EXPECT_EQ(g.device(), kGpu);
    EXPECT_EQ(g.ranks(), 1);
    g.reserve({.tokens = 128, .model = 16, .topk = 1});
    EXPECT_EQ(g.limits().tokens, 128);
    EXPECT_EQ(g.limits().model, 32);
    g.release();
    EXPECT_EQ(g.bytes().record, 0);
    const Tensor idx(DType::kInt32, {4, 2}, kGpu), memory(DType::kUInt8, {1 << 16}, kGpu);
    EXPECT_EQ(error_of([&] { prepare(g, {.idx_TK = idx, .capacity = 8}, memory, stream); }),
              "ep prepare, group \"moe\": released, reserve it first");
    g.reserve(limits);
    prepare(g, {.idx_TK = idx, .capacity = 8}, memory, stream);
    g.check(g.epoch());
    g.close();
  });
}

TEST_F(EpGpu, RefusesWhatItDoesNotDo) {
  const EpLimits limits{.tokens = 8, .model = 256, .topk = 2};
  one_rank([&](comm::Communicator& world) {
    EpGroup g = group(world, 4, limits);
    const Tensor idx(DType::kInt32, {8, 2}, kGpu), here(DType::kInt32, {8, 2});
    const Tensor memory(DType::kUInt8, {1 << 16}, kGpu);
    EXPECT_EQ(error_of([&] { prepare(g, {.idx_TK = here, .capacity = 256}, memory, stream); }),
              "ep prepare: idx is int32[8, 2], but must be on cuda:0 as the stream");
    EXPECT_EQ(error_of([&] { prepare(g, {.idx_TK = idx, .capacity = 256}, memory, {}); }),
              "ep prepare, group \"moe\": the stream is on cpu, the group on cuda:0");
    const EpPlan plan =
        prepare(g, {.idx_TK = idx, .alignment = 128, .capacity = 256}, memory, stream);
    const Tensor x(DType::kBFloat16, {8, 256}, kGpu), rows(DType::kBFloat16, {256, 256}, kGpu);
    const Tensor amax(DType::kFloat32, {4}), here_rows(DType::kBFloat16, {256, 256});
    EXPECT_EQ(
        error_of([&] { dispatch(g, plan, {.x_TD = x, .rows_CD = rows, .sink = {amax}}, stream); }),
        "ep dispatch: sink is float32[4], but must be on cuda:0 as the stream");
    EXPECT_EQ(error_of([&] { dispatch(g, plan, {.x_TD = x, .rows_CD = here_rows}, stream); }),
              "ep dispatch: rows is bfloat16[256, 256], but must be on cuda:0 as the stream");
    const Tensor codes(DType::kE4M3, {8, 256}, kGpu), scales(DType::kUE8M0, {8, 8}, kGpu);
    const Tensor out(DType::kE4M3, {256, 256}, kGpu), tiles(DType::kUInt8, {2048}, kGpu);
    QuantizedView from, to;
    from.spec = to.spec = QuantSpec::of(Format::kMxfp8);
    from.rows = 8;
    to.rows = from.cols = to.cols = 256;
    from.row_data = codes;
    from.row_scales = scales;
    to.row_data = out;
    to.row_scales = tiles;
    to.layout = ScaleLayout::kSm100Swizzled;
    EXPECT_EQ(
        error_of([&] { dispatch(g, plan, {.x_TD = from, .rows_CD = to}, stream); }),
        "ep dispatch: rows wants sm100_swizzled scales; in a group of one rank on a GPU they are "
        "written compact");
  });
}

}  // namespace
}  // namespace moiety::moe
