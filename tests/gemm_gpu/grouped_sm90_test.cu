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
    Problem(const Case& c, int64_t C, int64_t N, bool integers, const Stream& stream)
        : groups({"", {300, 0, 1, 64, 129, 65, 63, 200}, 5}) {
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
      for (const Twin* x : {&count, &begin, &source, &a, &b, &w, &out}) x->upload(stream);
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
    Twin count, begin, source, a, b, w, out;
  };

  // The widths of the tiles that there are for the case.
  static std::vector<int> columns_of(const Case& c) {
    if (c.gathered == sm90::Gathered::kB) return {128};
    return {sm90::kTileColumns.begin(), sm90::kTileColumns.end()};
  }
  // 0 columns: the kernel that is chosen.
  Tensor run(const Problem& p, const Case& c, int columns, bool turns = false, int sm_limit = 0,
             int64_t capacity = 0, bool pairs = false) {
    p.result(c).upload(stream);  // as it was before
    TileGemm g = tile_gemm_of(p.args(c, kOnGpu), 0);
    EXPECT_EQ(sm90::refusal(g, gpu_properties(0)).value_or(""), "");
    g.sm_limit = sm_limit;
    if (capacity > 0) g.groups.capacity = capacity;
    sm90::Kernel kernel = sm90::choose_kernel(g, multiprocessors_of(g, gpu_properties(0)));
    if (columns > 0) kernel = {kernel.op, columns, kernel.gathered, turns, pairs};
    const sm90::Start start = sm90::start(g, kernel, stream);
    if (sm_limit > 0) EXPECT_LE(start.shape.blocks, sm_limit);
    launch("grouped gemm sm90", start.kernel, start.shape, stream, start.maps, g);
    return p.result(c).download(stream);
  }
};

TEST_F(GroupedSm90Gpu, TilesGiveEqualBits) {
  for (const Case& c : cases()) {
    for (const auto& [C, N] :
         {std::pair{136, 520}, std::pair{448, 64}, std::pair{64, 392}, std::pair{1544, 1608}}) {
      SCOPED_TRACE(text("op {} gathered {} {} beta {}, C {} N {}", int(c.op), int(c.gathered),
                        name(c.out), c.beta, C, N));
      const Problem p(c, C, N, false, stream);
      const Tensor first = run(p, c, 0);
      for (const int columns : columns_of(c)) {
        ASSERT_EQ(difference(run(p, c, columns), first), "") << columns;
      }
      if (c.op == GroupedOp::kWgrad && c.gathered == sm90::Gathered::kNone) {
        ASSERT_EQ(difference(run(p, c, 192, true), first), "") << "in turns";
        ASSERT_EQ(difference(run(p, c, 192, true, 3), first), "") << "in turns, 3 multiprocessors";
      }
      if (sm90::has_pairs(tile_gemm_of(p.args(c, kOnGpu), 0).op, c.gathered, 256)) {
        ASSERT_EQ(difference(run(p, c, 256, false, 0, 0, true), first), "") << "pairs";
        ASSERT_EQ(difference(run(p, c, 256, false, 5, 0, true), first), "") << "two pairs";
      }
      ASSERT_EQ(difference(run(p, c, 0, false, 7), first), "") << "7 multiprocessors";
      ASSERT_EQ(difference(run(p, c, 0), first), "") << "again";
    }
  }
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
    ASSERT_EQ(difference(run(p, c, 192, true), run(p, c, 192)), "");
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
        ASSERT_EQ(difference(run(p, c, columns), run(p, c, columns, false, 0, kManyRows)), "");
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
      const Tensor got = run(p, c, 0);
      grouped_gemm_reference(p.args(c, kHost));
      ASSERT_EQ(difference(got, p.result(c).host), "");
    }
  }
}

TEST_F(GroupedSm90Gpu, ReadsOnlyLiveRows) {
  for (const Case& c : cases()) {
    if (c.beta != 0 || c.gathered != sm90::Gathered::kNone) continue;
    const Problem p(c, 1608, 1544, true, stream);
    const Tensor clean = run(p, c, 0);
    for (const Twin* x : {&p.a, &p.b}) {
      p.groups.fill_dead_rows(x->host, NAN);
      x->upload(stream);
    }
    ASSERT_EQ(difference(run(p, c, 0), clean), "") << int(c.op);
  }
}

}  // namespace
}  // namespace moiety::gemm
