// Hopper's grouped products: every tile, forced in turn, gives the bits of the others, and on
// integers those of the reference.
#include "moiety/gemm/grouped_block.h"
#include "moiety/gemm/grouped_gemm_cuda.h"
#include "moiety/gemm/sm90/launch.cuh"
#include "tests/gemm/groups.h"
#include "tests/gemm_gpu/bounds.h"

namespace moiety::gemm {
namespace {

struct Case {
  GroupedOp op;
  sm90::Gathered gathered;
  DType out;
  float beta;
  bool scaled = false;  // with bias, scales of it, and alpha
};

std::vector<Case> cases() {
  std::vector<Case> out;
  for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
    for (const float beta : {0.f, 1.f, -0.5f}) {
      for (const GroupedOp op : {GroupedOp::kForward, GroupedOp::kDgrad, GroupedOp::kWgrad}) {
        for (const auto gathered :
             {sm90::Gathered::kNone, sm90::Gathered::kA, sm90::Gathered::kB}) {
          if (gathered == sm90::Gathered::kB && op != GroupedOp::kWgrad) continue;
          out.push_back({op, gathered, dtype, beta});
        }
      }
    }
  }
  out.push_back({GroupedOp::kForward, sm90::Gathered::kNone, DType::kBFloat16, 0, true});
  return out;
}

class GroupedSm90Gpu : public GpuTest {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (IsSkipped()) return;  // there is no GPU
    const GpuProperties& gpu = gpu_properties(0);
    if (gpu.major != 9) GTEST_SKIP() << gpu.name << " is no Hopper";
  }

  // Groups of many sizes with gaps, over [rows, C] and [rows, N], or gathered from fewer rows.
  struct Problem {
    Problem(const Case& c, int64_t C, int64_t N, bool integers, const Stream& stream,
            const std::vector<int64_t>& counts = {300, 0, 1, 64, 129, 65, 63, 200})
        : groups({"", counts, 5}) {
      const int64_t rows = groups.capacity(), experts = groups.experts();
      count = Twin(groups().count_E, stream);
      begin = Twin(groups().begin_E1, stream);
      source = Twin(DType::kInt32, {rows}, stream);
      for (int64_t r = 0; r < rows; ++r) {
        source.host.data<int32_t>()[r] = static_cast<int32_t>(r * 37 % (kSources + 1)) - 1;
      }
      const bool wgrad = c.op == GroupedOp::kWgrad;
      const int64_t inner = c.op == GroupedOp::kForward ? C : N;
      a = Twin(DType::kBFloat16, {c.gathered == sm90::Gathered::kA ? kSources : rows, inner},
               stream);
      b = Twin(DType::kBFloat16, {c.gathered == sm90::Gathered::kB ? kSources : rows, C}, stream);
      w = Twin(wgrad ? c.out : DType::kBFloat16, {experts, N, C}, stream);
      out = Twin(c.out, {rows, c.op == GroupedOp::kForward ? N : C}, stream);
      uint32_t id = 0;
      for (const Twin* x : {&a, &b, &w, &out}) {
        integers ? fill_integers(x->host, ++id, 4) : fill_normal(x->host, ++id);
      }
      bias = Twin(DType::kBFloat16, {experts, N}, stream);
      bias_scale = Twin(DType::kFloat32, {rows}, stream);
      for (const Twin* x : {&bias, &bias_scale}) {
        integers ? fill_integers(x->host, ++id, 4) : fill_normal(x->host, ++id);
      }
      for (const Twin* x : {&count, &begin, &source, &a, &b, &w, &out, &bias, &bias_scale}) {
        x->upload(stream);
      }
    }
    const Twin& result(const Case& c) const { return c.op == GroupedOp::kWgrad ? w : out; }
    GroupedGemmArgs args(const Case& c, Side side) const {
      GroupedGemmArgs args;
      args.op = c.op;
      args.groups = groups();
      args.groups.count_E = side(count);
      args.groups.begin_E1 = side(begin);
      args.groups.status = {};
      args.a.data = side(a);
      if (c.gathered == sm90::Gathered::kA) args.a.source_R = side(source);
      args.w = side(w);
      args.beta.value = c.beta;
      if (c.scaled) {
        args.alpha.value = 2;
        args.bias_EN = side(bias);
        args.bias_scale_R = side(bias_scale);
      }
      if (c.op == GroupedOp::kWgrad) {
        args.b.data = side(b);
        if (c.gathered == sm90::Gathered::kB) args.b.source_R = side(source);
      } else {
        args.out = side(out);
      }
      return args;
    }

    static constexpr int64_t kSources = 90;
    TestGroups groups;
    Twin count, begin, source, a, b, w, out, bias, bias_scale;
  };

  // The widths of the tiles that there are for the case.
  static std::vector<int> columns_of(const Case& c) {
    if (c.gathered == sm90::Gathered::kB) return {128};
    return {sm90::kTileColumns.begin(), sm90::kTileColumns.end()};
  }
  static sm90::Kernel tile(const Case& c, int columns) {
    const GemmOp op = c.op == GroupedOp::kForward ? GemmOp::kTN
                      : c.op == GroupedOp::kDgrad ? GemmOp::kNN
                                                  : GemmOp::kNT;
    return {.op = op, .columns = columns, .gathered = c.gathered};
  }
  static sm90::Kernel in_turns(const Case& c) {
    sm90::Kernel kernel = tile(c, 192);
    kernel.turns = true;
    return kernel;
  }
  static sm90::Kernel in_pairs(const Case& c) {
    sm90::Kernel kernel = tile(c, 256);
    kernel.pairs = true;
    return kernel;
  }
  // Whether there is a kernel that exchanges the case's operands.
  static bool exchanges(const Case& c) {
    return sm90::has_exchanged(tile(c, 256).op, c.gathered) && c.out == DType::kBFloat16 &&
           c.beta == 0;
  }
  static sm90::Kernel exchanged(const Case& c) {
    return sm90::exchanged_kernel(tile(c, 256).op, c.gathered);
  }

  // By the kernel that is chosen, or another.
  Tensor run(const Problem& p, const Case& c, std::optional<sm90::Kernel> other = {},
             int sm_limit = 0, int64_t capacity = 0) {
    p.result(c).upload(stream);  // as it was before
    TileGemm g = tile_gemm_of(p.args(c, kOnGpu), 0);
    EXPECT_EQ(sm90::refusal(g, gpu_properties(0)).value_or(""), "");
    g.sm_limit = sm_limit;
    if (capacity > 0) g.groups.capacity = capacity;
    const sm90::Kernel chosen = sm90::choose_kernel(g, multiprocessors_of(g, gpu_properties(0)));
    const sm90::Start start = sm90::start(g, other.value_or(chosen), stream);
    if (sm_limit > 0) EXPECT_LE(start.shape.blocks, sm_limit);
    kept_step = start.maps.in_step;
    launch("grouped gemm sm90", start.kernel, start.shape, stream, start.maps, g);
    return p.result(c).download(stream);
  }

  bool kept_step = false;  // whether blocks of the last run waited for each other
};

TEST_F(GroupedSm90Gpu, TilesGiveEqualBits) {
  for (const Case& c : cases()) {
    for (const auto& [C, N] :
         {std::pair{136, 520}, std::pair{448, 64}, std::pair{64, 392}, std::pair{1544, 1608}}) {
      SCOPED_TRACE(text("op {} gathered {} {} beta {}, C {} N {}", int(c.op), int(c.gathered),
                        name(c.out), c.beta, C, N));
      const Problem p(c, C, N, false, stream);
      const Tensor first = run(p, c);
      for (const int columns : columns_of(c)) {
        ASSERT_EQ(difference(run(p, c, tile(c, columns)), first), "") << columns;
      }
      if (c.op == GroupedOp::kWgrad && c.gathered == sm90::Gathered::kNone) {
        ASSERT_EQ(difference(run(p, c, in_turns(c)), first), "") << "in turns";
        ASSERT_EQ(difference(run(p, c, in_turns(c), 3), first), "")
            << "in turns, 3 multiprocessors";
      }
      if (sm90::has_pairs(tile(c, 256).op, c.gathered, 256)) {
        ASSERT_EQ(difference(run(p, c, in_pairs(c)), first), "") << "pairs";
        ASSERT_EQ(difference(run(p, c, in_pairs(c), 5), first), "") << "two pairs";
      }
      if (exchanges(c)) {
        ASSERT_EQ(difference(run(p, c, exchanged(c)), first), "") << "exchanged";
        ASSERT_EQ(difference(run(p, c, exchanged(c), 5), first), "") << "exchanged, two pairs";
      }
      ASSERT_EQ(difference(run(p, c, {}, 7), first), "") << "7 multiprocessors";
      ASSERT_EQ(difference(run(p, c), first), "") << "again";
    }
  }
}

// Exchanged operands have a product for each number of rows.
TEST_F(GroupedSm90Gpu, ExchangedRowsOfEveryNumberHaveEqualBits) {
  for (const Case& c : cases()) {
    if (!exchanges(c)) continue;
    for (const auto& [C, N] : {std::pair{72, 776}, std::pair{776, 72}}) {
      const Problem p(
          c, C, N, false, stream,
          {8, 32, 33, 63, 65, 96, 97, 104, 105, 111, 113, 120, 121, 128, 130, 136, 137, 700});
      const Tensor expected = run(p, c, tile(c, 128));
      for (const int multiprocessors : {0, 4}) {
        ASSERT_EQ(difference(run(p, c, exchanged(c), multiprocessors), expected), "")
            << "op " << int(c.op) << " gathered " << int(c.gathered) << " C " << C;
      }
    }
  }
}

// Blocks wait for each other between tiles, in one launch after another, but not in a last round that
// some have no tile in.
TEST_F(GroupedSm90Gpu, BlocksThatKeepStepHaveEqualBits) {
  for (const GroupedOp op : {GroupedOp::kForward, GroupedOp::kDgrad}) {
    const Case c{op, sm90::Gathered::kNone, DType::kBFloat16, 0};
    const bool forward = op == GroupedOp::kForward;
    const Problem p(c, forward ? 4096 : 512, forward ? 512 : 4096, false, stream,
                    {200, 150, 0, 140, 272, 137, 1, 250});
    const Tensor expected = run(p, c, tile(c, 128));
    for (const int multiprocessors : {0, 4, 4, 5, 4}) {
      ASSERT_EQ(difference(run(p, c, exchanged(c), multiprocessors), expected), "")
          << "op " << int(op) << ", " << multiprocessors << " multiprocessors";
      ASSERT_EQ(kept_step, multiprocessors > 0);
    }
  }
}

// Launches beside each other tell the same counter.
TEST_F(GroupedSm90Gpu, BlocksThatKeepStepBesideOthersHaveEqualBits) {
  const Case c{GroupedOp::kForward, sm90::Gathered::kNone, DType::kBFloat16, 0};
  const std::vector<int64_t> counts = {200, 150, 272, 137, 1, 250};
  const Stream streams[] = {stream, Stream::on(kGpu)};
  const Problem first(c, 4096, 512, false, streams[0], counts);
  const Problem second(c, 4096, 512, false, streams[1], counts);
  const Tensor expected = run(first, c, tile(c, 128));
  first.out.upload(streams[0]);  // as it was before
  for (int i = 0; i < 16; ++i) {
    TileGemm g = tile_gemm_of((i % 2 ? second : first).args(c, kOnGpu), 0);
    g.sm_limit = 4;
    const sm90::Start start = sm90::start(g, exchanged(c), streams[i % 2]);
    ASSERT_TRUE(start.maps.in_step);
    launch("grouped gemm sm90", start.kernel, start.shape, streams[i % 2], start.maps, g);
  }
  ASSERT_EQ(difference(first.out.download(streams[0]), expected), "");
  ASSERT_EQ(difference(second.out.download(streams[1]), expected), "");
}

// The last step of a reduction has fewer products where all groups take one tile after the other, and
// zeros where they take turns: a sum of zeros has the same sign in both.
TEST_F(GroupedSm90Gpu, SumsOfZerosHaveEqualBits) {
  for (const Case& c : cases()) {
    if (c.op != GroupedOp::kWgrad || c.gathered != sm90::Gathered::kNone) continue;
    const Problem p(c, 136, 520, false, stream);
    fill(p.a.host, 0);
    fill(p.b.host, -1);
    for (const Twin* x : {&p.a, &p.b}) x->upload(stream);
    const Tensor expected = run(p, c, tile(c, 192));
    for (const int multiprocessors : {0, 3}) {
      ASSERT_EQ(difference(run(p, c, in_turns(c), multiprocessors), expected), "");
    }
  }
}

// Sums that are read and written, as where groups have few rows, and those that the L2 cache adds.
TEST_F(GroupedSm90Gpu, SumsAreThoseOfTheCache) {
  constexpr int64_t kManyRows = 1 << 20;
  for (const Case& c : cases()) {
    if (c.op != GroupedOp::kWgrad || c.out != DType::kFloat32 || c.beta != 1) continue;
    for (const bool subnormal : {false, true}) {
      SCOPED_TRACE(text("gathered {}, subnormal {}", int(c.gathered), subnormal));
      const Problem p(c, 136, 520, false, stream);
      if (subnormal) {
        for (int64_t i = 0; i < p.w.host.view().numel(); ++i) p.w.host.data<float>()[i] *= 1e-39f;
        fill(p.a.host, 0);
        p.a.upload(stream);
      }
      for (const int columns : columns_of(c)) {
        ASSERT_EQ(
            difference(run(p, c, tile(c, columns)), run(p, c, tile(c, columns), 0, kManyRows)), "");
      }
    }
  }
}

TEST_F(GroupedSm90Gpu, EqualsTheReferenceOnIntegers) {
  for (const Case& c : cases()) {
    for (const auto& [C, N] : {std::pair{136, 520}, std::pair{1544, 24}, std::pair{24, 1544}}) {
      SCOPED_TRACE(text("op {} gathered {} {} beta {}, C {} N {}", int(c.op), int(c.gathered),
                        name(c.out), c.beta, C, N));
      const Problem p(c, C, N, true, stream);
      const Tensor got = run(p, c);
      grouped_gemm_reference(p.args(c, kHost));
      ASSERT_EQ(difference(got, p.result(c).host), "");
      if (exchanges(c)) {
        ASSERT_EQ(difference(run(p, c, exchanged(c)), got), "") << "exchanged";
      }
    }
  }
}

TEST_F(GroupedSm90Gpu, ReadsOnlyLiveRows) {
  for (const Case& c : cases()) {
    if (c.beta != 0 || c.gathered != sm90::Gathered::kNone) continue;
    const Problem p(c, 1608, 1544, true, stream);
    const Tensor clean = run(p, c);
    if (exchanges(c)) {
      ASSERT_EQ(difference(run(p, c, exchanged(c)), clean), "") << "exchanged";
    }
    for (const Twin* x : {&p.a, &p.b}) {
      p.groups.fill_dead_rows(x->host, NAN);
      x->upload(stream);
    }
    ASSERT_EQ(difference(run(p, c), clean), "") << int(c.op);
    if (exchanges(c)) {
      ASSERT_EQ(difference(run(p, c, exchanged(c)), clean), "") << "exchanged";
    }
  }
}

}  // namespace
}  // namespace moiety::gemm
