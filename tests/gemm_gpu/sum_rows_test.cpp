// sum_rows on a GPU, from a captured graph, has the bits and the faults of the reference.
#include "moiety/base/graph.h"
#include "moiety/gemm/grouped_mlp.h"
#include "tests/gemm/groups.h"
#include "tests/support/gpu_test.h"
#include "tests/support/mirror.h"

namespace moiety::gemm {
namespace {

class SumRowsGpu : public GpuTest {};

TEST_F(SumRowsGpu, HasTheBitsOfTheReference) {
  struct Shape {
    int64_t tokens, topk, rows, columns;
  };
  for (const Shape& s :
       {Shape{0, 2, 5, 8}, {1, 1, 1, 1}, {17, 3, 40, 257}, {33, 8, 90, 520}, {5, 4, 0, 16}}) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
      for (const bool faults : {false, true}) {
        SCOPED_TRACE(
            text("{} of {}x{} {} faults={}", s.tokens, s.topk, s.columns, name(dtype), faults));
        const Tensor rows = normal_tensor(dtype, {s.rows, s.columns}, 1),
                     out = normal_tensor(dtype, {s.tokens, s.columns}, 2);
        const Tensor index(DType::kInt32, {s.tokens, s.topk}), status(DType::kUInt32, {4});
        for (int64_t i = 0; i < s.tokens * s.topk; ++i) {
          int64_t row = i * 37 % (s.rows + 1) - 1;  // -1 among them
          if (i < s.topk) row = -1;                 // nothing is alive
          if (faults && i % 11 == 10) row = i % 2 ? -7 : s.rows;
          index.data<int32_t>()[i] = static_cast<int32_t>(row);
        }
        const Mirror m({rows, out, index, status}, stream);
        const Graph graph(stream, [&] { sum_rows(m(rows), m(index), m(out), m(status), stream); });
        graph.launch(stream);
        sum_rows(rows, index, out, status, Stream());
        EXPECT_EQ(m.difference("out", out), "");
        EXPECT_EQ(m.difference("status", status), "");
      }
    }
  }
}

}  // namespace
}  // namespace moiety::gemm
