// grouped_offsets on a GPU, from a captured graph, has the values and the faults of the CPU; and
// what it and zero_dead_rows zero is what they zero there.
#include "moiety/base/graph.h"
#include "moiety/gemm/grouped_mlp.h"
#include "moiety/gemm/grouped_tensor.h"
#include "tests/gemm/groups.h"
#include "tests/support/gpu_test.h"
#include "tests/support/mirror.h"

namespace moiety::gemm {
namespace {

class OffsetsGpu : public GpuTest {
 protected:
  // 16 outputs: all kinds of div and mul, types and leading zeros; `factor` makes some saturate.
  void compare(const TensorView& count_E, int64_t capacity, int64_t factor) {
    const int64_t experts = count_E.size(0);
    const Tensor narrow(DType::kInt32, {8, experts + 1}), wide(DType::kInt64, {8, experts + 1}),
        status(DType::kUInt32, {4});
    std::memset(narrow.view().raw(), -1, narrow.view().bytes());
    std::memset(wide.view().raw(), -1, wide.view().bytes());
    const Mirror m({count_E, narrow, wide, status}, stream);
    std::vector<OffsetSpec> here, there;
    for (int64_t i = 0; i < 16; ++i) {
      const bool zero = i % 4 < 2;
      const TensorView out =
          (i % 2 ? wide : narrow).view().select(i / 2).slice(0, 0, experts + (zero ? 1 : 0));
      const int64_t mul = (i < 8 ? 1 : i) * (i >= 12 ? factor : 1);
      here.push_back({i < 4 ? 1 : (i + 1) * 8, mul, zero, out});
      there.push_back(here.back());
      there.back().out = m(out);
    }
    const Graph graph(stream,
                      [&] { grouped_offsets(m(count_E), there, capacity, m(status), stream); });
    graph.launch(stream);
    grouped_offsets(count_E, here, capacity, status, Stream());
    EXPECT_EQ(m.difference("int32", narrow), "");
    EXPECT_EQ(m.difference("int64", wide), "");
    EXPECT_EQ(m.difference("status", status), "");
  }
};

TEST_F(OffsetsGpu, HasTheValuesAndFaultsOfTheCpu) {
  for (const int64_t experts : {0, 1, 31, 32, 33, 256, 257, 1000}) {
    for (const DType dtype : {DType::kInt32, DType::kInt64}) {
      for (const int faults : {0, 1, 2}) {  // 1: negative counts; 2: more rows than there are
        SCOPED_TRACE(text("{} groups, counts {}, faults {}", experts, name(dtype), faults));
        const Tensor count_E(dtype, {experts});
        int64_t rows = 0;
        for (int64_t e = 0; e < experts; ++e) {
          int64_t n = (e * 37 + 5) % 11 * (e % 3);
          rows += n;
          if (faults == 1 && e % 29 == 28) n = -n - 1;
          if (dtype == DType::kInt64) {
            count_E.data<int64_t>()[e] = n;
          } else {
            count_E.data<int32_t>()[e] = static_cast<int32_t>(n);
          }
        }
        const int64_t capacity = faults == 2 ? rows / 2 : rows;
        compare(count_E, capacity, 1);
        compare(count_E, capacity, int64_t{1} << 30);  // past int32
        compare(count_E, capacity, int64_t{1} << 58);  // past int64
      }
    }
  }
}

TEST_F(OffsetsGpu, DeadRowsAreZeroedAsOnTheCpu) {
  for (const GroupCase& c : group_cases()) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
      for (const int64_t columns : {0, 1, 3, 8, 520}) {
        SCOPED_TRACE(text("{}: {} x {}", c.name, name(dtype), columns));
        const TestGroups groups(c);
        // Rows of a wider tensor, and numbers of rows.
        const Tensor wide = normal_tensor(dtype, {groups.capacity(), columns + 8}, 1);
        const Tensor numbers = normal_tensor(DType::kFloat32, {groups.capacity()}, 2);
        const TensorView rows = wide.view().slice(1, 0, columns);
        const Mirror m({groups().count_E, groups().begin_E1, wide, numbers}, stream);
        Groups there = groups();
        there.count_E = m(there.count_E);
        there.begin_E1 = m(there.begin_E1);
        there.status = {};
        const Graph graph(stream, [&] {
          zero_dead_rows(there, m(rows), stream);
          zero_dead_rows(there, m(numbers), stream);
        });
        graph.launch(stream);
        zero_dead_rows(groups(), rows, Stream());
        zero_dead_rows(groups(), numbers, Stream());
        ASSERT_EQ(m.difference("rows", wide), "");
        ASSERT_EQ(m.difference("numbers", numbers), "");
      }
    }
  }
}

// Alone and behind others, with faults; rows that no block, one and several have to zero.
TEST_F(OffsetsGpu, RowsPastTheLastGroupAreZeroedAsOnTheCpu) {
  struct Case {
    int64_t experts, rows, capacity;
    int faults;  // 1: a negative count; 2: more rows than there are
  };
  for (const Case& c : {Case{0, 0, 5, 0},
                        {1, 3, 3, 0},
                        {3, 2, 300, 0},
                        {4, 100, 2000, 0},
                        {40, 30, 1300, 1},
                        {70, 9, 200, 2},
                        {3, 0, 0, 0}}) {
    for (const int64_t columns : {0, 1, 3, 8, 520}) {
      SCOPED_TRACE(text("{} groups of {} in {}, faults {}, {} columns", c.experts, c.rows,
                        c.capacity, c.faults, columns));
      const Tensor count_E(DType::kInt64, {c.experts}), begin(DType::kInt64, {c.experts + 1});
      for (int64_t e = 0; e < c.experts; ++e) {
        count_E.data<int64_t>()[e] = c.faults == 1 && e == 17 ? -4 : c.rows;
      }
      const Tensor wide = normal_tensor(DType::kBFloat16, {c.capacity, columns + 8}, 1);
      const Tensor numbers = normal_tensor(DType::kFloat32, {c.capacity}, 2);
      const TensorView rows = wide.view().slice(1, 0, columns);
      const Mirror m({count_E, begin, wide, numbers}, stream);
      const OffsetSpec here{.out = begin}, there{.out = m(begin)};
      const Graph graph(stream, [&] {
        const TensorView buffers[] = {m(rows), {}, m(numbers)};
        grouped_offsets(m(count_E), {&there, 1}, c.capacity, {}, buffers, stream);
      });
      graph.launch(stream);
      const TensorView buffers[] = {rows, numbers};
      grouped_offsets(count_E, {&here, 1}, c.capacity, {}, buffers, Stream());
      ASSERT_EQ(m.difference("offsets", begin), "");
      ASSERT_EQ(m.difference("rows", wide), "");
      ASSERT_EQ(m.difference("numbers", numbers), "");
    }
  }
}

TEST_F(OffsetsGpu, TensorsElsewhereAreNamed) {
  const Tensor count_E(DType::kInt64, {3}), out(DType::kInt64, {4}, kGpu);
  const OffsetSpec spec{1, 1, true, out};
  try {
    grouped_offsets(count_E, {&spec, 1}, 10, {}, stream);
    FAIL() << "nothing thrown";
  } catch (const Error& e) {
    EXPECT_STREQ(e.what(),
                 "grouped_offsets: count_E is int64[3], but must be on cuda:0 as the stream");
  }
}

}  // namespace
}  // namespace moiety::gemm
