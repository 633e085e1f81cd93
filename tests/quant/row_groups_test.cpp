#include "moiety/quant/row_groups.h"

#include <vector>

#include <gtest/gtest.h>

#include "moiety/base/error.h"

namespace moiety::quant {
namespace {

struct Case {
  std::vector<int64_t> begin, count;
  std::vector<uint32_t> status = {0, 0, 0, 0};
  RowGroups groups(int64_t capacity) {
    const auto experts = static_cast<int64_t>(begin.size()) - 1;
    RowGroups g;
    g.begin_E1 = TensorView(begin.data(), DType::kInt64, {experts + 1});
    if (!count.empty()) g.count_E = TensorView(count.data(), DType::kInt64, {experts});
    g.status = TensorView(status.data(), DType::kUInt32, {4});
    g.experts = experts;
    g.capacity = capacity;
    return g;
  }
};

TEST(RowGroups, TightAndWithGaps) {
  Case tight{{0, 3, 3, 8}, {}};
  const RowGroups t = tight.groups(8);
  check_groups("test", t);
  EXPECT_EQ(group_rows(t, 0).rows, 3);
  EXPECT_EQ(group_rows(t, 1).rows, 0);
  EXPECT_EQ(group_rows(t, 2).begin, 3);
  EXPECT_EQ(group_rows(t, 2).rows, 5);

  Case gaps{{0, 4, 8}, {3, 1}};
  const RowGroups g = gaps.groups(8);
  EXPECT_EQ(group_rows(g, 0).rows, 3);
  EXPECT_EQ(group_rows(g, 1).begin, 4);
  EXPECT_EQ(group_rows(g, 1).rows, 1);
  record_faults(g, OperationId::kQuantizeGrouped);
  EXPECT_NO_THROW(throw_on_fault(g.status));
}

TEST(RowGroups, FaultyGroupsAreEmptyAndTheFirstIsKept) {
  Case c{{0, 4, 2, 30}, {4, 1, 28}};  // group 1 begins past its end, group 2 exceeds the capacity
  const RowGroups g = c.groups(8);
  EXPECT_EQ(group_rows(g, 0).rows, 4);
  EXPECT_EQ(group_rows(g, 1).rows, 0);
  EXPECT_EQ(group_rows(g, 2).rows, 0);
  record_faults(g, OperationId::kQuantizeGrouped);
  EXPECT_EQ(c.status, (std::vector<uint32_t>{kFaultGroup, 7, 1, 1}));
  try {
    throw_on_fault(g.status);
    FAIL();
  } catch (const Error& e) {
    EXPECT_STREQ(e.what(),
                 "quantize_grouped: group 1, value 1; a group is out of bounds and was treated as "
                 "empty");
  }
}

}  // namespace
}  // namespace moiety::quant
