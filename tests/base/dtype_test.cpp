#include "moiety/base/dtype.h"

#include <set>
#include <string>

#include <gtest/gtest.h>

#include "moiety/formats/bf16.h"
#include "moiety/formats/fp16.h"

namespace moiety {
namespace {

TEST(DType, SizesAndNames) {
  std::set<std::string> names;
  for (int t = 0; t <= static_cast<int>(DType::kE2M1); ++t) names.insert(name(DType(t)));
  EXPECT_EQ(names.size(), 13u);
  EXPECT_STREQ(name(DType::kBFloat16), "bfloat16");
  EXPECT_EQ(byte_size(DType::kFloat64, 3), 24);
  EXPECT_EQ(byte_size(DType::kUE8M0, 3), 3);
  // Two to a byte; a last one alone takes a byte.
  EXPECT_EQ(byte_size(DType::kE2M1, 4), 2);
  EXPECT_EQ(byte_size(DType::kE2M1, 5), 3);
}

template <class T>
void expect_dtype(DType t) {
  EXPECT_EQ(dtype_of<T>, t);
  EXPECT_EQ(dtype_of<const T>, t);
  EXPECT_EQ(byte_size(t, 1), static_cast<int64_t>(sizeof(T))) << name(t);
}

TEST(DType, OfTypes) {
  expect_dtype<double>(DType::kFloat64);
  expect_dtype<float>(DType::kFloat32);
  expect_dtype<bf16>(DType::kBFloat16);
  expect_dtype<fp16>(DType::kFloat16);
  expect_dtype<int64_t>(DType::kInt64);
  expect_dtype<int32_t>(DType::kInt32);
  expect_dtype<uint64_t>(DType::kUInt64);
  expect_dtype<uint32_t>(DType::kUInt32);
  expect_dtype<uint8_t>(DType::kUInt8);
}

}  // namespace
}  // namespace moiety
