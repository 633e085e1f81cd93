// rope on a GPU, from a captured graph, has the bits of the reference.
#include "moiety/base/graph.h"
#include "tests/nn/rope_cases.h"
#include "tests/support/gpu_test.h"
#include "tests/support/mirror.h"

namespace moiety::nn {
namespace {

class RopeGpu : public GpuTest {
 protected:
  void compare(const RopeHeads& x, const RopeArgs& host) const {
    const Mirror m({x.storage, host.table, host.position_T}, stream);
    RopeArgs a = host;
    a.x_TGNC = m(host.x_TGNC);
    a.table = m(host.table);
    a.position_T = m(host.position_T);
    const Graph graph(stream, [&] { rope(a, stream); });
    graph.launch(stream);
    rope_ref(host);
    EXPECT_EQ(m.difference("all heads, also those outside the view", x.storage), "");
  }
};

TEST_F(RopeGpu, HasTheBitsOfTheReference) {
  for (const int64_t head_dim : kHeadDims) {
    const Tensor table = rope_table(70, head_dim, 1e4);
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
      for (const bool inverse : {false, true}) {
        SCOPED_TRACE(text("{} C={} inverse={}", name(dtype), head_dim, inverse));
        const RopeHeads x(dtype, 140, head_dim, 1);
        compare(x, {x.view, table, {}, 70, inverse});
        std::vector<int32_t> position;
        for (int32_t t = 0; t < 140; ++t) position.push_back(t * 37 % 70);
        const Tensor positions = int32_tensor(position);
        compare(x, {x.view, table, positions, 0, inverse});
      }
    }
  }
}

TEST_F(RopeGpu, NoTokensAndOne) {
  const Tensor table = rope_table(1, 16, 1e4);
  for (const int64_t tokens : {0, 1}) {
    const RopeHeads x(DType::kBFloat16, tokens, 16, 1);
    compare(x, {x.view, table, {}, 1});
  }
}

// Heads that begin anywhere.
TEST_F(RopeGpu, AnyAlignment) {
  const Tensor table = rope_table(9, 32, 1e4);
  for (const int64_t offset : {1, 4, 8}) {
    const RopeHeads x(DType::kBFloat16, 9, 48, 1);
    compare(x, {x.view.slice(3, offset, offset + 32), table, {}, 9});
  }
}

TEST_F(RopeGpu, UnknownPositionsGiveNan) {
  const Tensor table = rope_table(4, 16, 1e4), position = int32_tensor({0, 4, -1, 3});
  const RopeHeads x(DType::kBFloat16, 4, 16, 1);
  const Mirror m({x.storage, table, position}, stream);
  rope({m(x.view), m(table), m(position)}, stream);
  const Tensor got = m.back(x.storage);
  for (int64_t i = 0; i < x.view.numel(); ++i) {
    const int64_t t = i / 96;
    EXPECT_EQ(std::isnan(get(got.view().slice(2, 0, 3), i)), t == 1 || t == 2) << i;
  }
}

}  // namespace
}  // namespace moiety::nn
