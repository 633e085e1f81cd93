#include "moiety/checkpoint/box.h"

#include <cstring>
#include <map>
#include <random>

#include <gtest/gtest.h>

#include "moiety/base/crc32c.h"
#include "moiety/base/error.h"
#include "moiety/checkpoint/digest.h"
#include "tests/checkpoint/state_testing.h"

namespace moiety::checkpoint {
namespace {

Box make_box(std::vector<int64_t> start, std::vector<int64_t> size) {
  Box box;
  box.rank = static_cast<int>(start.size());
  std::copy(start.begin(), start.end(), box.start.begin());
  std::copy(size.begin(), size.end(), box.size.begin());
  return box;
}

// Cuts a box at random places into parts.
void shatter(const Box& box, int cuts, std::mt19937& random, std::vector<Box>& out) {
  const int d = static_cast<int>(random() % box.rank);
  if (cuts == 0 || box.size[d] < 2) {
    out.push_back(box);
    return;
  }
  Box a = box, b = box;
  a.size[d] = 1 + random() % (box.size[d] - 1);
  b.start[d] += a.size[d];
  b.size[d] -= a.size[d];
  shatter(a, cuts - 1, random, out);
  shatter(b, cuts - 1, random, out);
}

TEST(Box, IntersectionsAndContainment) {
  const Box a = make_box({0, 2}, {4, 4}), b = make_box({3, 0}, {2, 3});
  EXPECT_EQ(intersect(a, b), make_box({3, 2}, {1, 1}));
  EXPECT_EQ(intersect(a, make_box({4, 2}, {1, 1})), std::nullopt);
  EXPECT_EQ(intersect(Box{}, Box{}), Box{});
  EXPECT_TRUE(contains(a, make_box({3, 5}, {1, 1})));
  EXPECT_FALSE(contains(a, make_box({3, 5}, {1, 2})));
  EXPECT_FALSE(contains(a, make_box({0, 2}, {INT64_MAX, 1})));
  EXPECT_FALSE(contains(a, make_box({0, 2}, {-1, 1})));
  EXPECT_FALSE(contains(a, Box{}));
  EXPECT_EQ(describe(a), "[0:4,2:6]");
}

TEST(Box, ShapesThatCannotBeStored) {
  EXPECT_EQ(shape_fault(std::vector<int64_t>{2, 3, 4, 5}), nullptr);
  EXPECT_NE(shape_fault(std::vector<int64_t>{1, 1, 1, 1, 1}), nullptr);
  EXPECT_NE(shape_fault(std::vector<int64_t>{2, -1}), nullptr);
  EXPECT_NE(shape_fault(std::vector<int64_t>{int64_t{1} << 40, int64_t{1} << 40}), nullptr);
  EXPECT_NE(shape_fault(std::vector<int64_t>{(int64_t{1} << 59) + 1}), nullptr);
}

TEST(Cover, FindsWhatIsMissingOrTwice) {
  const Box all = make_box({0, 0}, {2, 4});
  const Box top = make_box({0, 0}, {1, 4}), left = make_box({1, 0}, {1, 3});
  EXPECT_EQ(cover_fault(all, std::vector{top, left}), "[1:2,3:4] is not covered");
  EXPECT_EQ(cover_fault(all, std::vector{top, left, make_box({0, 3}, {1, 1})}),
            "[0:1,3:4] is covered twice");
  EXPECT_EQ(cover_fault(all, std::vector{top, left, make_box({1, 3}, {1, 1})}), std::nullopt);
  EXPECT_EQ(cover_fault(all, std::vector<Box>{}), "[0:2,0:4] is not covered");
  EXPECT_EQ(cover_fault(Box{}, std::vector{Box{}}), std::nullopt);
  EXPECT_EQ(cover_fault(Box{}, std::vector{Box{}, Box{}}), "[] is covered twice");
  EXPECT_EQ(cover_fault(Box{}, std::vector<Box>{}), "[] is not covered");
  EXPECT_EQ(cover_fault(make_box({0}, {0}), std::vector<Box>{}), std::nullopt);
}

TEST(Cover, RandomTilingsAndTheirFaults) {
  std::mt19937 random(1);
  for (int trial = 0; trial < 300; ++trial) {
    const Box all = make_box({0, 0, 0}, {1 + int64_t(random() % 5), 1 + int64_t(random() % 9), 7});
    std::vector<Box> parts;
    shatter(all, 5, random, parts);
    std::shuffle(parts.begin(), parts.end(), random);
    EXPECT_EQ(cover_fault(all, parts), std::nullopt);
    const Box lost = parts.back();
    parts.pop_back();
    const auto hole = cover_fault(all, parts);
    ASSERT_TRUE(hole.has_value());
    EXPECT_NE(hole->find("is not covered"), std::string::npos);
    // Another part in its place; sometimes the volumes add up.
    const Box corner = make_box({0, 0, 0}, {1, 1, 1});
    parts.push_back(corner);
    EXPECT_EQ(cover_fault(all, parts).has_value(), lost != corner);
  }
}

TEST(Copy, EveryRegionBetweenTwoBoxes) {
  std::mt19937 random(2);
  for (int trial = 0; trial < 400; ++trial) {
    std::vector<Box> parts;
    shatter(make_box({0, 0, 0}, {4, 5, 6}), 3, random, parts);
    const Box& from = parts[random() % parts.size()];
    parts.clear();
    shatter(make_box({0, 0, 0}, {4, 5, 6}), 2, random, parts);
    const Box& to = parts[random() % parts.size()];
    const auto region = intersect(from, to);
    if (!region) continue;
    const auto index = [](const Box& box, int64_t i, int64_t j, int64_t k) {
      return ((i - box.start[0]) * box.size[1] + j - box.start[1]) * box.size[2] + k - box.start[2];
    };
    std::vector<uint16_t> source(volume(from)), got(volume(to), 0), expected = got;
    for (size_t i = 0; i < source.size(); ++i) source[i] = uint16_t(i + 1);
    for (int64_t i = 0; i < 4; ++i) {
      for (int64_t j = 0; j < 5; ++j) {
        for (int64_t k = 0; k < 6; ++k) {
          if (!contains(*region, make_box({i, j, k}, {1, 1, 1}))) continue;
          expected[index(to, i, j, k)] = source[index(from, i, j, k)];
        }
      }
    }
    copy_region(*region, 2, from, reinterpret_cast<std::byte*>(source.data()), to,
                reinterpret_cast<std::byte*>(got.data()));
    EXPECT_EQ(got, expected) << describe(from) << " to " << describe(to);
  }
}

TEST(Copy, RowsOfEqualPitchAreOne) {
  const Box all = make_box({0, 0, 0}, {4, 5, 6}), columns = make_box({0, 0, 2}, {4, 5, 3});
  const std::vector<RowCopy> rows = row_copies(columns, 4, columns, all);
  ASSERT_EQ(rows.size(), 1u);
  EXPECT_EQ(rows[0].from, 0);
  EXPECT_EQ(rows[0].to, 8);
  EXPECT_EQ(rows[0].bytes, 12);
  EXPECT_EQ(rows[0].rows, 20);
  EXPECT_EQ(rows[0].from_pitch, 12);
  EXPECT_EQ(rows[0].to_pitch, 24);
  EXPECT_EQ(row_copies(all, 4, all, all).size(), 1u);
  EXPECT_EQ(row_copies(all, 4, all, all)[0].bytes, 480);
}

TEST(Crc32c, GoldenCombinedAndLong) {
  EXPECT_EQ(crc32c("123456789"), 0xE3069283u);
  std::mt19937 random(3);
  std::string s(150'000, '\0');  // long enough for every way to compute it
  for (char& c : s) c = char(random());
  uint32_t bitwise = ~0u;
  for (const char c : s) {
    bitwise ^= uint8_t(c);
    for (int i = 0; i < 8; ++i) bitwise = (bitwise >> 1) ^ (bitwise & 1 ? 0x82F63B78u : 0);
  }
  EXPECT_EQ(crc32c(s), ~bitwise);
  for (const size_t at : {0, 1, 7, 64, 49151, 49153, 149'999, 150'000}) {
    const std::string a = s.substr(0, at), b = s.substr(at);
    EXPECT_EQ(crc32c_combine(crc32c(a), crc32c(b), b.size()), ~bitwise);
    EXPECT_EQ(crc32c(b.data(), b.size(), crc32c(a)), ~bitwise);
  }
}

// The definition, word by word.
uint64_t mix(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

const std::vector<float> kGolden{1, -2, 0.5, 3};
const std::vector<int64_t> kGoldenShape{2, 2};

uint64_t digest_all(const void* data, DType dtype, const std::vector<int64_t>& shape) {
  return digest(data, dtype, whole(shape), shape);
}

TEST(Digest, Golden) {
  EXPECT_EQ(digest_all(kGolden.data(), DType::kFloat32, kGoldenShape), 0xf4903b68c42bd4b4u);
  const std::vector<float> swapped{-2, 1, 0.5, 3};
  EXPECT_EQ(digest_all(swapped.data(), DType::kFloat32, kGoldenShape), 0x377a1ca03a7834e6u);
}

TEST(Digest, EveryElementSizeAgainstTheDefinition) {
  std::mt19937 random(4);
  std::vector<uint8_t> bytes(200'000 * 8);
  for (uint8_t& b : bytes) b = uint8_t(random());
  for (const DType dtype : {DType::kUInt8, DType::kBFloat16, DType::kFloat32, DType::kInt64}) {
    const size_t size = size_t(bits(dtype) / 8);
    for (const int64_t n : {0, 1, 3, 17, 1000, 200'000}) {
      uint64_t expected = 0;
      for (int64_t i = 0; i < n; ++i) {
        uint64_t element = 0;
        std::memcpy(&element, bytes.data() + size_t(i) * size, size);
        expected += mix(mix(uint64_t(i) + 0x9E3779B97F4A7C15u) + element);
      }
      EXPECT_EQ(digest_all(bytes.data(), dtype, {n}), expected) << name(dtype) << " " << n;
    }
  }
}

TEST(Digest, PartsAddUpHoweverTheTensorIsCut) {
  for (const Cut cut : {Cut::kRows, Cut::kColumns, Cut::kFlat, Cut::kBlocks, Cut::kLast}) {
    for (const int ranks : {1, 2, 3, 7}) {
      std::map<std::string, uint64_t> sums;
      for (int rank = 0; rank < ranks; ++rank) {
        RankState state(small_state(), cut, rank, ranks);
        state.fill(1);
        for (const StatePiece& p : state.view()) {
          sums[p.slot + "/" + p.tensor] += digest(p.data, p.dtype, p.box, p.shape);
        }
      }
      RankState one(small_state(), Cut::kLast, 0, 1);
      one.fill(1);
      for (const StatePiece& p : one.view()) {
        EXPECT_EQ(sums[p.slot + "/" + p.tensor], digest(p.data, p.dtype, p.box, p.shape));
      }
    }
  }
}

TEST(Digest, SeesSwapsFlipsAndShifts) {
  std::mt19937 random(5);
  std::vector<uint32_t> x(997);
  for (uint32_t& v : x) v = random();
  const auto of = [&] { return digest_all(x.data(), DType::kFloat32, {997}); };
  const uint64_t before = of();
  for (int trial = 0; trial < 300; ++trial) {
    const size_t i = random() % x.size(), j = random() % x.size(), bit = random() % 32;
    if (x[i] != x[j]) {
      std::swap(x[i], x[j]);
      EXPECT_NE(of(), before);
      std::swap(x[i], x[j]);
    }
    x[i] ^= 1u << bit;
    EXPECT_NE(of(), before);
    x[i] ^= 1u << bit;
    std::rotate(x.begin(), x.begin() + 1 + trial, x.end());
    EXPECT_NE(of(), before);
    std::rotate(x.begin(), x.end() - 1 - trial, x.end());
  }
  EXPECT_EQ(of(), before);
}

TEST(Digest, RefusesWhatItDoesNotDefine) {
  EXPECT_NE(error_of([] { digest_all(kGolden.data(), DType::kE2M1, {2}); }), kNoError);
  EXPECT_NE(error_of([] {
              digest(kGolden.data(), DType::kFloat32, make_box({1, 1}, {1, 2}), kGoldenShape);
            }),
            kNoError);
}

}  // namespace
}  // namespace moiety::checkpoint
