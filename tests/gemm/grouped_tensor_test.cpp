// Groups as data: offsets, faults, and views of weights.
#include "moiety/gemm/grouped_tensor.h"

#include <limits>

#include "moiety/gemm/grouped_mlp.h"
#include "tests/gemm/groups.h"
#include "tests/support/error_of.h"

namespace moiety::gemm {
namespace {

Tensor counts_of(const std::vector<int64_t>& values, DType dtype) {
  Tensor out(dtype, {std::ssize(values)});
  for (size_t i = 0; i < values.size(); ++i) {
    if (dtype == DType::kInt64) {
      out.data<int64_t>()[i] = values[i];
    } else {
      out.data<int32_t>()[i] = static_cast<int32_t>(values[i]);
    }
  }
  return out;
}

int64_t integer(const TensorView& x, int64_t i) {
  return x.dtype() == DType::kInt64 ? x.data<int64_t>()[i] : x.data<int32_t>()[i];
}

class Offsets : public testing::TestWithParam<std::tuple<int64_t, DType, DType>> {};

TEST_P(Offsets, SixteenOutputsFromOneScan) {
  const auto [experts, in, out] = GetParam();
  std::vector<int64_t> counts(experts);
  int64_t capacity = 0;
  for (int64_t e = 0; e < experts; ++e) capacity += counts[e] = (e * 37 + 5) % 11 * (e % 3);
  const Tensor count_E = counts_of(counts, in), status(DType::kUInt32, {4});
  std::vector<OffsetSpec> specs;
  std::vector<Tensor> tensors;
  for (int64_t i = 0; i < 16; ++i) {
    const bool leading_zero = i % 2 == 0;
    const int64_t div = i < 4 ? 1 : (i + 1) * 8, mul = i < 8 ? 1 : i;
    tensors.emplace_back(out, std::initializer_list<int64_t>{experts + (leading_zero ? 1 : 0)});
    specs.push_back({div, mul, leading_zero, tensors.back()});
  }
  grouped_offsets(count_E, specs, capacity, status, Stream());
  for (const OffsetSpec& spec : specs) {
    int64_t total = 0, i = 0;
    if (spec.leading_zero) {
      ASSERT_EQ(integer(spec.out, i++), 0);
    }
    for (int64_t n : counts) {
      total += (n + spec.div - 1) / spec.div * spec.mul;
      ASSERT_EQ(integer(spec.out, i++), total);
    }
    ASSERT_LE(total, offsets_bound(capacity, experts, spec.div, spec.mul));
  }
  EXPECT_EQ(status.data<uint32_t>()[0], 0u);
}

INSTANTIATE_TEST_SUITE_P(All, Offsets,
                         testing::Combine(testing::Values(0, 1, 255, 256, 257, 5000),
                                          testing::Values(DType::kInt32, DType::kInt64),
                                          testing::Values(DType::kInt32, DType::kInt64)));

TEST(OffsetsFaults, SaturateAndSayWhere) {
  const Tensor count_E = counts_of({1, 2, 3}, DType::kInt64), status(DType::kUInt32, {4});
  const Tensor narrow(DType::kInt32, {4}), wide(DType::kInt64, {4});
  const int64_t max64 = std::numeric_limits<int64_t>::max();
  const OffsetSpec specs[] = {{1, 1 << 30, true, narrow}, {1, max64 / 2, true, wide}};
  grouped_offsets(count_E, specs, 10, status, Stream());
  const int32_t max32 = std::numeric_limits<int32_t>::max();
  EXPECT_EQ(narrow.data<int32_t>()[1], 1 << 30);
  EXPECT_EQ(narrow.data<int32_t>()[2], max32);
  EXPECT_EQ(narrow.data<int32_t>()[3], max32);
  EXPECT_EQ(wide.data<int64_t>()[1], max64 / 2);
  EXPECT_EQ(wide.data<int64_t>()[2], max64);
  const uint32_t* s = status.data<uint32_t>();
  EXPECT_EQ(s[0], kFaultSaturated);
  EXPECT_EQ(s[1], static_cast<uint32_t>(OperationId::kGroupedOffsets));
  EXPECT_EQ(s[2], 1u);
  EXPECT_THROW(throw_on_fault(status), Error);
}

TEST(OffsetsFaults, NegativeAndTooLargeCountsAreEmpty) {
  const Tensor count_E = counts_of({4, -1, 9, 6}, DType::kInt32), status(DType::kUInt32, {4});
  const Tensor out(DType::kInt64, {5});
  const OffsetSpec specs[] = {{1, 1, true, out}};
  grouped_offsets(count_E, specs, 10, status, Stream());
  const std::vector<int64_t> expected = {0, 4, 4, 4, 10};
  for (int i = 0; i < 5; ++i) EXPECT_EQ(out.data<int64_t>()[i], expected[i]);
  EXPECT_EQ(status.data<uint32_t>()[2], 1u);
  EXPECT_EQ(status.data<uint32_t>()[3], static_cast<uint32_t>(-1));
}

// Views are enough: no memory of a GPU is touched.
TEST(OffsetsErrors, TensorsOfAGpuOnTheCpuStream) {
  const Device gpu{DeviceType::kCuda, 0};
  const Tensor count_E = counts_of({1, 2}, DType::kInt64), out(DType::kInt64, {3}),
               status(DType::kUInt32, {4});
  const auto there = [&](const TensorView& x) {
    return TensorView(x.raw(), x.dtype(), x.sizes(), gpu);
  };
  const auto error = [&](const TensorView& counts, const TensorView& to, const TensorView& faults) {
    const OffsetSpec spec{1, 1, true, to};
    return error_of([&] { grouped_offsets(counts, {&spec, 1}, 10, faults, Stream()); });
  };
  const std::string but = " on cuda:0, but must be on cpu as the stream";
  EXPECT_EQ(error(there(count_E), out, status), "grouped_offsets: count_E is int64[2]" + but);
  EXPECT_EQ(error(count_E, there(out), status), "grouped_offsets: out is int64[3]" + but);
  EXPECT_EQ(error(count_E, out, there(status)), "grouped_offsets: status is uint32[4]" + but);
}

TEST(Groups, CountsMayBeAbsent) {
  TestGroups owner({"", {3, 0, 5}});
  Groups groups = owner();
  groups.count_E = {};
  EXPECT_EQ(group_rows(groups, 0).rows, 3);
  EXPECT_EQ(group_rows(groups, 1).rows, 0);
  EXPECT_EQ(group_rows(groups, 2).begin, 3);
  EXPECT_EQ(group_rows(groups, 2).rows, 5);
}

TEST(Groups, FaultyGroupsAreEmptyAndTheFirstIsRecorded) {
  struct Fault {
    const char* name;
    int group;
    int64_t count, begin;  // what is written over group `group`
  };
  const int64_t min64 = std::numeric_limits<int64_t>::min();
  const int64_t max64 = std::numeric_limits<int64_t>::max();
  for (const Fault& f :
       {Fault{"negative count", 1, -3, 4}, Fault{"most negative count", 1, min64, 4},
        Fault{"overlaps the next", 1, 6, 4}, Fault{"huge count", 2, max64, 9},
        Fault{"past the capacity", 2, 4, 9}, Fault{"negative begin", 0, 4, -1},
        Fault{"decreasing begin", 1, 5, 10}}) {
    SCOPED_TRACE(f.name);
    TestGroups groups({"", {4, 5, 3}});
    groups.count()[f.group] = f.count;
    groups.begin()[f.group] = f.begin;
    if (f.group == 2) groups.begin()[3] = 100;
    EXPECT_EQ(group_rows(groups(), f.group).rows, 0);
    record_faults(groups(), OperationId::kGroupedGemm, {}, 0);
    EXPECT_EQ(groups.status()[0], kFaultGroup);
    EXPECT_EQ(groups.status()[1], static_cast<uint32_t>(OperationId::kGroupedGemm));
    EXPECT_EQ(groups.status()[2], static_cast<uint32_t>(f.group));
    try {
      throw_on_fault(groups().status);
      FAIL() << "nothing thrown";
    } catch (const Error& e) {
      EXPECT_NE(std::string(e.what()).find(text("grouped_gemm: group {}", f.group)),
                std::string::npos)
          << e.what();
    }
  }
}

TEST(Groups, WithoutFaultNothingIsThrown) {
  TestGroups groups({"", {4, 5, 3}, 2});
  record_faults(groups(), OperationId::kGroupedGemm, {}, 0);
  EXPECT_EQ(groups.status()[0], 0u);
  EXPECT_NO_THROW(throw_on_fault(groups().status));
}

TEST(ZeroDeadRows, LeavesLiveRowsAlone) {
  constexpr int64_t kColumns = 3;
  for (const GroupCase& c : group_cases()) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
      SCOPED_TRACE(c.name);
      const TestGroups groups(c);
      const Tensor x = normal_tensor(dtype, {groups.capacity(), kColumns}, 3);
      groups.fill_dead_rows(x, std::numeric_limits<double>::quiet_NaN());
      const Tensor before = copy_of(x);
      zero_dead_rows(groups(), x, Stream());
      const std::vector<int64_t> owner = groups.owners();
      for (int64_t i = 0; i < groups.capacity() * kColumns; ++i) {
        const double want = owner[i / kColumns] < 0 ? 0 : get(before, i);
        ASSERT_EQ(get(x, i), want) << i;
      }
    }
  }
}

TEST(ZeroDeadRows, TakesNumbersOfRowsAndRowsWithGaps) {
  const TestGroups groups({"", {2, 0, 1}, 1, 2});
  const Tensor wide = normal_tensor(DType::kFloat32, {groups.capacity(), 5}, 4);
  const Tensor before = copy_of(wide);
  zero_dead_rows(groups(), wide.view().slice(1, 1, 3), Stream());
  const Tensor numbers = normal_tensor(DType::kFloat32, {groups.capacity()}, 5);
  zero_dead_rows(groups(), numbers, Stream());
  const std::vector<int64_t> owner = groups.owners();
  for (int64_t r = 0; r < groups.capacity(); ++r) {
    EXPECT_EQ(get(numbers, r) == 0, owner[r] < 0);
    for (int64_t c = 0; c < 5; ++c) {
      const bool zeroed = owner[r] < 0 && c >= 1 && c < 3;
      EXPECT_EQ(get(wide, r, c), zeroed ? 0 : get(before, r, c));
    }
  }
  EXPECT_NE(error_of([&] {
              zero_dead_rows(groups(), wide.view().slice(0, 0, 1), Stream());
            }).find("zero_dead_rows: rows is float32[1, 5]"),
            std::string::npos);
}

TEST(GroupedOffsets, ZeroesTheRowsPastTheLastGroupOfSeveralBuffers) {
  constexpr int64_t kCapacity = 6;
  const Tensor count_E = counts_of({2, -1, 1}, DType::kInt32);
  const Tensor x = normal_tensor(DType::kBFloat16, {kCapacity, 3}, 4);
  const Tensor numbers = normal_tensor(DType::kFloat32, {kCapacity}, 5);
  const Tensor before = copy_of(x), out(DType::kInt64, {4});
  const OffsetSpec spec{.out = out};
  const TensorView buffers[] = {numbers, {}, x.view().slice(1, 1, 3)};
  grouped_offsets(count_E, {&spec, 1}, kCapacity, {}, buffers, Stream());
  EXPECT_EQ(out.data<int64_t>()[3], 3);  // the group with a fault has no rows
  for (int64_t r = 0; r < kCapacity; ++r) {
    EXPECT_EQ(get(numbers, r) == 0, r >= 3);
    for (int64_t c = 0; c < 3; ++c) {
      EXPECT_EQ(get(x, r, c), r >= 3 && c >= 1 ? 0 : get(before, r, c));
    }
  }
  const std::vector<TensorView> five(5, x.view());
  EXPECT_NE(error_of([&] {
              grouped_offsets(count_E, {&spec, 1}, kCapacity, {}, five, Stream());
            }).find("grouped_offsets: 5 buffers, at most 4"),
            std::string::npos);
  EXPECT_NE(error_of([&] {
              grouped_offsets(count_E, {&spec, 1}, 7, {}, buffers, Stream());
            }).find("grouped_offsets: rows is float32[6], expected [7, *] or [7]"),
            std::string::npos);
}

TEST(GroupedWeight, PackedAndIndexedAreTheSameMatrices) {
  const Tensor packed = normal_tensor(DType::kFloat32, {3, 4, 5}, 1);
  std::vector<TensorView> views;
  for (int64_t e = 0; e < 3; ++e) views.push_back(packed.view().select(e));
  const GroupedWeight a(packed.view()), b{std::span<const TensorView>(views)};
  for (int64_t e = 0; e < 3; ++e) EXPECT_EQ(a[e].raw(), b[e].raw());
  EXPECT_NO_THROW(b.check("op", "w", DType::kFloat32, 3, 4, 5));
  EXPECT_THROW(b.check("op", "w", DType::kFloat32, 2, 4, 5), Error);
  EXPECT_THROW(a.check("op", "w", DType::kFloat32, 3, 5, 4), Error);
  EXPECT_THROW(a.check("op", "w", DType::kBFloat16, 3, 4, 5), Error);
  EXPECT_THROW(GroupedWeight(packed.view().select(0)), Error);
}

}  // namespace
}  // namespace moiety::gemm
