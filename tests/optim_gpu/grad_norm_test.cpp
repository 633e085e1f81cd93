// Statistics of gradients on a GPU have the bits of the CPU.
#include "moiety/optim/grad_norm.h"

#include <deque>
#include <limits>

#include "moiety/base/graph.h"
#include "tests/optim_gpu/cases.h"
#include "tests/support/gpu_test.h"

namespace moiety::optim {
namespace {

constexpr DType kF32 = DType::kFloat32, kBf16 = DType::kBFloat16;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Gradient {
  Gradient(DType dtype, int64_t n, int64_t offset, uint64_t what)
      : offset(offset), memory(hard_tensor(dtype, n + offset, what)) {}
  int64_t offset;
  Tensor memory;
  std::vector<ElementRun> runs;
  int64_t size() const { return memory.view().numel() - offset; }
};

class GradNormGpu : public GpuTest {
 protected:
  static void expect_same(const GradStatistics& got, const GradStatistics& want) {
    EXPECT_TRUE(same_number(got.sumsq, want.sumsq)) << got.sumsq << " " << want.sumsq;
    for (int c = 0; c < kParameterClasses; ++c) {
      EXPECT_TRUE(same_number(got.class_sumsq[c], want.class_sumsq[c]))
          << "class " << c << ": " << got.class_sumsq[c] << " " << want.class_sumsq[c];
    }
    EXPECT_EQ(got.bad, want.bad);
    EXPECT_EQ(got.bad_parameter, want.bad_parameter);
  }

  using Gradients = std::vector<const Gradient*>;

  static GradStatistics on_host(const Gradients& gradients) {
    std::vector<GradSegment> segments;
    for (const Gradient* g : gradients) {
      segments.push_back({g->memory.view().slice(0, g->offset, g->offset + g->size()), g->runs});
    }
    GradStatistics out;
    grad_statistics({segments, Device{}}, byte_view(out), Stream());
    return out;
  }

  // The operation, then the same from a graph.
  void check(const Gradients& gradients) {
    const GradStatistics want = on_host(gradients);
    std::deque<Mirror> mirrors;
    std::vector<GradSegment> segments;
    for (const Gradient* g : gradients) {
      mirrors.emplace_back(std::initializer_list<TensorView>{g->memory}, stream);
      segments.push_back(
          {mirrors.back()(g->memory).slice(0, g->offset, g->offset + g->size()), g->runs});
    }
    const GradStatisticsTable table(segments, stream.device());
    GradStatistics out{.sumsq = -1, .bad = 5, .bad_parameter = 6};
    const TensorView host = byte_view(out);
    const Mirror m({host}, stream);
    const auto result = [&] {
      GradStatistics got;
      copy(byte_view(got), m(host), stream);
      stream.synchronize();
      return got;
    };
    grad_statistics(table, m(host), stream);
    expect_same(result(), want);
    for (size_t s = segments.size(); s > 0; --s) begin_grad_statistics(table, s - 1, s, stream);
    end_grad_statistics(table, m(host), stream);
    expect_same(result(), want);
    const Graph graph(stream, [&] { grad_statistics(table, m(host), stream); });
    for (int i = 0; i < 2; ++i) {
      copy(m(host), host, stream);
      graph.launch(stream);
      expect_same(result(), want);
    }
  }
};

TEST_F(GradNormGpu, HasTheBitsOfTheCpu) {
  for (const DType dtype : {kF32, kBf16}) {
    for (const int64_t n : {0, 1, 127, 255, 256, 257, 4095, 4096, 4097, 8192, 100003}) {
      for (const int64_t offset : {0, 1, 2}) {
        SCOPED_TRACE(text("{} of {} at {}", n, name(dtype), offset));
        Gradient g(dtype, n, offset, 4);
        check({&g});  // no runs
        g.runs = {{.begin = 0, .end = n, .kind = ParameterClass::kExpert}};
        check({&g});
        g.runs = mixed_runs(n);
        check({&g});
      }
    }
  }
}

TEST_F(GradNormGpu, CountsWhatIsNotFinite) {
  for (const DType dtype : {kF32, kBf16}) {
    Gradient g(dtype, 50000, 0, 3);
    g.runs = mixed_runs(50000);
    const auto bad = [&](int64_t i, float x) { store(g.memory, i, x); };
    for (const int64_t i : {60, 61, 4095, 4096, 20000, 30001, 49999}) bad(i, kInfinity);
    bad(40000, std::nanf(""));
    check({&g});
    bad(40000, -kInfinity);
    check({&g});
    g.runs = {{.begin = 0, .end = 50000, .parameter = 3}};
    check({&g});
    g.runs = {{.begin = 62, .end = 4095, .parameter = 3}};
    check({&g});
  }
}

TEST_F(GradNormGpu, GroupsOfBlocksAreFoldedToo) {
  for (const int64_t n : {(int64_t{16} << 20), (int64_t{16} << 20) + 3}) {
    Gradient g(kF32, n, 0, 1);
    g.runs = {{.begin = 0, .end = n - 1, .kind = ParameterClass::kRouter}};
    check({&g});
    g.runs = mixed_runs(n);
    check({&g});
  }
}

TEST_F(GradNormGpu, SegmentsAreAddedAscending) {
  std::deque<Gradient> all;
  Gradients pointers;
  for (uint64_t i = 0; i < 600; ++i) {
    const int64_t n = i % 7 ? random_word(i, 5) % 3000 : 0;
    all.emplace_back(i % 3 ? kF32 : kBf16, n, 0, i % 60);
    all.back().runs = mixed_runs(n, i);
    pointers.push_back(&all.back());
  }
  check(pointers);
  store(all[300].memory, 1, kInfinity);
  store(all[500].memory, 0, kInfinity);
  check(pointers);
  check(Gradients());
}

}  // namespace
}  // namespace moiety::optim
