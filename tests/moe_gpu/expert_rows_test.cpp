// The rows of a routing without a group: on a GPU, from a captured graph, they are those of the CPU.
#include <random>

#include "moiety/base/graph.h"
#include "moiety/moe/slot_maps.h"
#include "tests/support/error_of.h"
#include "tests/support/gpu_test.h"
#include "tests/support/mirror.h"

namespace moiety::moe {
namespace {

enum class Routing { kRandom, kMasked, kAllToOne, kNone };

template <class Index>
void fill_routing(const TensorView& idx, Routing routing, int64_t experts, uint32_t seed) {
  std::mt19937 rng(seed);
  for (int64_t i = 0; i < idx.numel(); ++i) {
    int64_t e = experts == 0 ? -1 : static_cast<int64_t>(rng() % uint64_t(experts));
    if (routing == Routing::kMasked && rng() % 4 == 0) e = rng() % 2 ? -1 - e : experts + e;
    if (routing == Routing::kAllToOne) e = experts / 2;
    if (routing == Routing::kNone) e = -1;
    idx.data<Index>()[i] = static_cast<Index>(e);
  }
}

class ExpertRowsGpu : public GpuTest {
 protected:
  void compare(int64_t tokens, int64_t topk, int64_t experts, DType dtype, bool weights) {
    const Tensor idx(dtype, {tokens, topk}), w(DType::kFloat32, {tokens, topk}),
        count(DType::kInt64, {experts}), source(DType::kInt32, {tokens * topk}),
        row(DType::kInt32, {tokens, topk}), slot_w(DType::kFloat32, {tokens * topk});
    for (int64_t i = 0; i < tokens * topk; ++i) w.data<float>()[i] = float(i) + 0.5f;
    const ExpertRowsArgs here = {.idx_TK = idx,
                                 .w_TK = weights ? w.view() : TensorView(),
                                 .count_E = count,
                                 .source_R = source,
                                 .row_TK = row,
                                 .slot_w_R = weights ? slot_w.view() : TensorView()};
    for (const Tensor* x : {&count, &source, &row, &slot_w}) {
      if (x->view().bytes() > 0) fill_bytes(*x, 0xA5, {});
    }
    const Mirror m({idx, w, count, source, row, slot_w}, stream);
    const ExpertRowsArgs there = {.idx_TK = m(idx),
                                  .w_TK = m(here.w_TK),
                                  .count_E = m(count),
                                  .source_R = m(source),
                                  .row_TK = m(row),
                                  .slot_w_R = m(here.slot_w_R)};
    const Graph graph(stream, [&] { expert_rows(there, stream); });
    uint32_t seed = 0;
    for (const Routing routing :
         {Routing::kRandom, Routing::kMasked, Routing::kAllToOne, Routing::kNone}) {
      SCOPED_TRACE(text("T={} K={} E={} {} routing {}", tokens, topk, experts, name(dtype),
                        static_cast<int>(routing)));
      if (dtype == DType::kInt64) {
        fill_routing<int64_t>(idx, routing, experts, ++seed);
      } else {
        fill_routing<int32_t>(idx, routing, experts, ++seed);
      }
      if (tokens > 0) copy(m(idx), idx, stream);
      graph.launch(stream);
      expert_rows(here, {});
      ASSERT_EQ(m.difference("count", count), "");
      ASSERT_EQ(m.difference("row", row), "");
      ASSERT_EQ(m.difference("source", source), "");
      ASSERT_EQ(m.difference("slot_w", slot_w), "");
    }
  }
};

TEST_F(ExpertRowsGpu, AreThoseOfTheCpu) {
  for (const int64_t tokens : {0, 1, 7, 300, 5000}) {
    for (const int64_t topk : {1, 3, 8}) {
      for (const int64_t experts : {0, 1, 6, 33, 128, 1000, 4096}) {
        const DType dtype = experts % 2 ? DType::kInt32 : DType::kInt64;
        compare(tokens, topk, experts, dtype, tokens % 2 == 1);
        if (HasFailure()) return;
      }
    }
  }
}

TEST_F(ExpertRowsGpu, TooManyExpertsAreAnError) {
  const Tensor idx(DType::kInt32, {2, 1}, kGpu), count(DType::kInt64, {4097}, kGpu),
      source(DType::kInt32, {2}, kGpu), row(DType::kInt32, {2, 1}, kGpu);
  EXPECT_EQ(error_of([&] {
              expert_rows({.idx_TK = idx, .count_E = count, .source_R = source, .row_TK = row},
                          stream);
            }),
            "expert_rows: 4097 experts, at most 4096 on a GPU");
}

}  // namespace
}  // namespace moiety::moe
