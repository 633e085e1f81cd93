// Grids and layouts against loops over ranks and elements.
#include "moiety/gtp/layout.h"

#include <set>

#include <gtest/gtest.h>

#include "moiety/base/error.h"
#include "tests/support/error_of.h"

namespace moiety::gtp {
namespace {

template <class F>
std::string refusal_of(F&& f) {
  return error_of(f, ErrorKind::kInvalidArgument);
}

TEST(Grid, RanksLieFastestAxisFirst) {
  const Grid grid{.tp = 2, .gtp = 3, .dp = 4, .ep = 6, .egtp = 2, .edp = 2};
  check_grid(grid, 24);
  for (int dp = 0; dp < 4; ++dp) {
    for (int gtp = 0; gtp < 3; ++gtp) {
      for (int tp = 0; tp < 2; ++tp) {
        const int rank = tp + 2 * (gtp + 3 * dp);
        EXPECT_EQ(grid.place(Axis::kTp, rank), tp);
        EXPECT_EQ(grid.place(Axis::kGtp, rank), gtp);
        EXPECT_EQ(grid.place(Axis::kDp, rank), dp);
      }
    }
  }
  for (int edp = 0; edp < 2; ++edp) {
    for (int egtp = 0; egtp < 2; ++egtp) {
      for (int ep = 0; ep < 6; ++ep) {
        const int rank = ep + 6 * (egtp + 2 * edp);
        EXPECT_EQ(grid.place(Axis::kEp, rank), ep);
        EXPECT_EQ(grid.place(Axis::kEgtp, rank), egtp);
        EXPECT_EQ(grid.place(Axis::kEdp, rank), edp);
      }
    }
  }
}

TEST(Grid, GroupsDifferInTheirAxesAlone) {
  const Grid grid{.tp = 2, .gtp = 3, .dp = 2, .ep = 3, .egtp = 4, .edp = 1};
  EXPECT_EQ(grid.group({Axis::kTp}, 5), (std::vector<int>{4, 5}));
  EXPECT_EQ(grid.group({Axis::kGtp}, 3), (std::vector<int>{1, 3, 5}));
  EXPECT_EQ(grid.group({Axis::kDp, Axis::kTp}, 2), (std::vector<int>{2, 3, 8, 9}));
  EXPECT_EQ(grid.group({Axis::kEgtp}, 4), (std::vector<int>{1, 4, 7, 10}));
  EXPECT_EQ(grid.group({Axis::kEdp}, 4), (std::vector<int>{4}));
  EXPECT_EQ(grid.group({Axis::kGtp, Axis::kGtp}, 3), (std::vector<int>{1, 3, 5}));
  // The groups of an axis part the ranks.
  for (const Axis axis : {Axis::kTp, Axis::kGtp, Axis::kDp, Axis::kEp, Axis::kEgtp, Axis::kEdp}) {
    for (int rank = 0; rank < 12; ++rank) {
      const std::vector<int> group = grid.group({axis}, rank);
      EXPECT_EQ(static_cast<int>(group.size()), grid.degree(axis));
      for (const int peer : group) EXPECT_EQ(grid.group({axis}, peer), group);
    }
  }
  EXPECT_EQ(refusal_of([&] {
              grid.group({Axis::kDp, Axis::kEp}, 0);
            }),
            "grid: a group over dp and ep, which are axes of different grids");
}

TEST(Grid, ErrorsNameAllSixDegrees) {
  const Grid grid{.tp = 2, .gtp = 2, .dp = 1, .ep = 2, .egtp = 1, .edp = 1};
  const std::string expected =
      "grid: tp 2 * gtp 2 * dp 1 and ep 2 * egtp 1 * edp 1 must both be the number of ranks, ";
  EXPECT_EQ(refusal_of([&] { check_grid(grid, 4); }), expected + "4");
  EXPECT_EQ(refusal_of([&] { check_grid(grid, 2); }), expected + "2");
  Grid zero;
  zero.edp = 0;
  EXPECT_NE(refusal_of([&] { check_grid(zero, 1); }), "no error");
  const Grid wide{.tp = 65536, .gtp = 65536, .dp = 1, .ep = 65536, .egtp = 65536, .edp = 1};
  EXPECT_NE(refusal_of([&] { check_grid(wide, 0); }), "no error");
}

TEST(Layout, WorkedExamples) {
  const Layout tp{.rows = 192, .cols = 8, .tp_axis = 0, .tp_size = 2, .gtp_size = 2, .align = 32};
  EXPECT_EQ(tp.slice_rows(), 96);
  EXPECT_EQ(tp.shard_rows(), 64);
  EXPECT_EQ(tp.valid(0), (Range{0, 64}));
  EXPECT_EQ(tp.valid(1), (Range{64, 96}));

  const Layout odd{.rows = 1160, .cols = 8, .gtp_size = 2, .align = 32};
  EXPECT_EQ(odd.shard_rows(), 608);
  EXPECT_EQ(odd.valid(0).size(), 608);
  EXPECT_EQ(odd.valid(1).size(), 552);

  const Layout all_pad{.rows = 16, .cols = 8, .gtp_size = 4, .align = 16};
  EXPECT_EQ(all_pad.shard_rows(), 16);
  EXPECT_EQ(all_pad.padded_rows(), 64);
  EXPECT_EQ(all_pad.valid(0), (Range{0, 16}));
  for (int g = 1; g < 4; ++g) EXPECT_TRUE(all_pad.valid(g).empty());
}

// Every element of W lies in exactly one box, or in that of every TP rank if TP does not cut.
void expect_tiling(Layout l) {
  SCOPED_TRACE(testing::Message() << "N " << l.rows << " K " << l.cols << " axis " << l.tp_axis
                                  << " TP " << l.tp_size << " G " << l.gtp_size << " A " << l.align
                                  << (l.vocabulary ? " vocabulary" : ""));
  check_layout("w", l);
  std::vector<int> holders(l.rows * l.cols);
  for (l.tp_rank = 0; l.tp_rank < l.tp_size; ++l.tp_rank) {
    int64_t end = 0;
    for (int g = 0; g < l.gtp_size; ++g) {
      const Range valid = l.valid(g);
      const Box box = l.global_box(g);
      // Shards follow one another without gaps, and only a tail is padding.
      EXPECT_EQ(valid.begin, end);
      end = valid.end;
      EXPECT_LE(valid.size(), l.shard_rows());
      EXPECT_TRUE(valid.size() == l.shard_rows() || valid.end == l.real_rows());
      EXPECT_EQ(box.rows.size(), valid.size());
      EXPECT_EQ(box.cols.size(), l.slice_cols());
      for (int64_t r = box.rows.begin; r < box.rows.end; ++r) {
        for (int64_t c = box.cols.begin; c < box.cols.end; ++c) ++holders[r * l.cols + c];
      }
    }
    EXPECT_EQ(end, l.real_rows());
    EXPECT_EQ(l.shard_rows() % l.align, 0);
    EXPECT_EQ(l.padded_rows(), l.gtp_size * l.shard_rows());
    EXPECT_GE(l.padded_rows(), l.slice_rows());
    EXPECT_LT(l.padded_rows() - l.slice_rows(), l.align * l.gtp_size);
  }
  const int expected = l.tp_axis < 0 ? l.tp_size : 1;
  for (const int h : holders) ASSERT_EQ(h, expected);
}

TEST(Layout, BoxesTileTheTensor) {
  for (int tp = 1; tp <= 4; ++tp) {
    for (int gtp = 1; gtp <= 4; ++gtp) {
      for (const int64_t align : {16, 32, 128}) {
        for (const int64_t rows : {12, 48, 192, 1164}) {
          for (const int axis : {-1, 0, 1}) {
            expect_tiling({.rows = rows,
                           .cols = 12,
                           .tp_axis = axis,
                           .tp_size = tp,
                           .gtp_size = gtp,
                           .align = align});
          }
        }
        for (const int64_t rows : {1, 15, 16, 17, 100, 500}) {
          expect_tiling({.rows = rows,
                         .cols = 3,
                         .tp_axis = 0,
                         .tp_size = tp,
                         .gtp_size = gtp,
                         .align = align,
                         .vocabulary = true});
          expect_tiling({.rows = rows, .cols = 3, .gtp_size = gtp, .align = align});
        }
      }
    }
  }
}

TEST(Layout, OneRowOverAShard) {
  const Layout l{.rows = 129, .cols = 4, .gtp_size = 2, .align = 128};
  EXPECT_EQ(l.shard_rows(), 128);
  EXPECT_EQ(l.valid(1), (Range{128, 129}));
}

TEST(Layout, ShortAndEmptyVocabularySlices) {
  Layout l{.rows = 40, .cols = 4, .tp_axis = 0, .tp_size = 4, .gtp_size = 2, .vocabulary = true};
  EXPECT_EQ(l.slice_rows(), 16);
  const int64_t real[] = {16, 16, 8, 0};
  for (l.tp_rank = 0; l.tp_rank < 4; ++l.tp_rank) EXPECT_EQ(l.real_rows(), real[l.tp_rank]);
  l.tp_rank = 3;
  EXPECT_TRUE(l.global_box(0).rows.empty());
  EXPECT_TRUE(l.global_box(1).rows.empty());
}

// The pad after the TP cut: slices begin on the grid of blocks, with the whole's blocks.
TEST(Layout, SlicesBeginAtUnits) {
  for (int tp = 0; tp < 3; ++tp) {
    const Layout l{.rows = 288,
                   .cols = 8,
                   .tp_axis = 0,
                   .tp_rank = tp,
                   .tp_size = 3,
                   .gtp_size = 2,
                   .align = 32,
                   .tp_unit = 32};
    check_layout("fc1", l);
    EXPECT_EQ(l.global_box(0).rows.begin, 96 * tp);
  }
}

TEST(Layout, ErrorsNameTensorDimensionAndMultiple) {
  Layout l{.rows = 96, .cols = 60, .tp_axis = 0, .tp_size = 2, .tp_unit = 32};
  EXPECT_EQ(refusal_of([&] { check_layout("layers.0.fc1", l); }),
            "layout of layers.0.fc1: 96 rows cannot be cut by tp 2, expected a multiple of 64");
  l.tp_axis = 1;
  EXPECT_EQ(refusal_of([&] { check_layout("o", l); }),
            "layout of o: 60 columns cannot be cut by tp 2, expected a multiple of 64");
  l.tp_axis = 2;
  EXPECT_EQ(refusal_of([&] { check_layout("o", l); }),
            "layout of o: tp_axis is 2, expected -1, 0 or 1");
  EXPECT_EQ(
      refusal_of([&] { check_layout("o", {.rows = 1, .cols = 1, .gtp_rank = 2, .gtp_size = 2}); }),
      "layout of o: gtp rank 2 of 2");
  EXPECT_EQ(refusal_of([&] { check_layout("o", {.rows = 0, .cols = 1}); }),
            "layout of o: shape [0, 1]");
  l = {.rows = 100, .cols = 4, .tp_axis = 1, .tp_size = 2, .vocabulary = true};
  EXPECT_EQ(refusal_of([&] { check_layout("embed", l); }),
            "layout of embed: a vocabulary has tp_axis 0 and a tp_unit that divides align 16, not "
            "1 and 1");
}

}  // namespace
}  // namespace moiety::gtp
