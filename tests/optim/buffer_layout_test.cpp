// The places of parameters, their owners, and the boxes that follow.
#include "moiety/optim/buffer_layout.h"

#include <algorithm>
#include <map>

#include <gtest/gtest.h>

#include "moiety/base/buffer.h"
#include "moiety/base/rng.h"
#include "moiety/optim/state_pieces.h"
#include "tests/optim/model_specs.h"
#include "tests/support/error_of.h"

namespace moiety::optim {
namespace {

TEST(Layout, BoundariesAreEvenAndInBounds) {
  for (const int64_t n : {1, 127, 128, 129, 384, 40960}) {
    for (const int ranks : {1, 2, 3, 6, 7, 8}) {
      const std::vector<ParamSpec> specs{matrix_spec("a", n, 1), matrix_spec("b", 1, n)};
      const auto buckets = layout_buffers(specs, gtp::Grid{.dp = ranks});
      ASSERT_EQ(buckets.size(), 1u);
      const BucketLayout& bucket = buckets[0];
      EXPECT_EQ(bucket.length % (128 * ranks), 0);
      EXPECT_EQ(bucket.segment() * ranks, bucket.length);
      ASSERT_EQ(bucket.slots.size(), 2u);
      EXPECT_EQ(bucket.slots[0].parameter, 1);  // reverse order of construction
      EXPECT_EQ(bucket.slots[0].start, 0);
      EXPECT_EQ(bucket.slots[1].start, (n + 127) / 128 * 128);
      EXPECT_LE(bucket.slots[1].start + n, bucket.length);
      EXPECT_LT(bucket.length - bucket.slots[1].start - n, 128 * ranks);
    }
  }
}

TEST(Layout, BucketsCloseAndLargeParametersStandAlone) {
  std::vector<ParamSpec> specs;
  for (const int64_t n : {300, 100, 2000, 200, 500}) {
    specs.push_back(matrix_spec("p" + std::to_string(specs.size()), 1, n));
  }
  specs.push_back(expert_spec("e", 0, 2));
  specs.push_back(matrix_spec("last", 1, 384));
  const auto buckets = layout_buffers(specs, {.dp = 2, .edp = 3}, 1024);
  std::vector<std::vector<int>> members;
  for (const BucketLayout& b : buckets) {
    members.emplace_back();
    for (const auto& slot : b.slots) members.back().push_back(slot.parameter);
  }
  EXPECT_EQ(members, (std::vector<std::vector<int>>{{6, 4}, {3}, {2}, {1, 0}, {5}}));
  EXPECT_EQ(buckets[0].slots[1].start, 384);
  EXPECT_EQ(buckets[0].length, 1024);
  EXPECT_EQ(buckets[2].length, 2048);
  EXPECT_TRUE(buckets[4].expert);
  EXPECT_EQ(buckets[4].length, 384);
  EXPECT_FALSE(buckets[3].expert);
}

TEST(Layout, RunsMergeAndFollowTheRowMap) {
  const std::vector<ParamSpec> specs{qkv_spec()};
  const auto buckets = layout_buffers(specs, gtp::Grid{});
  const auto runs = segment_runs(specs, buckets[0], 0);
  ASSERT_EQ(runs.size(), 6u);
  EXPECT_EQ(runs[3].begin, 12 * kModel);
  EXPECT_EQ(runs[3].tensor, 0);
  EXPECT_EQ(runs[3].logical, 6 * kModel);
  // Rows that continue each other are one run.
  std::vector<ParamSpec> split{matrix_spec("a", 10, 4)};
  split[0].row_map = {{0, 0, 0, 3}, {3, 0, 3, 7}};
  EXPECT_EQ(segment_runs(split, layout_buffers(split, gtp::Grid{})[0], 0).size(), 1u);
}

// Two vectors of 16 elements, each in four parts of which the middle ones changed places.
TEST(Layout, RowsMayBePartsOfTheLastDimension) {
  ParamSpec spec = matrix_spec("bias", 8, 4);
  spec.tensors[0] = {.name = "bias", .shape = {2, 16}, .columns = 4};
  spec.shape = {2, 16};
  spec.row_map.clear();
  for (int64_t e = 0; e < 2; ++e) {
    for (const int64_t part : {0, 2, 1, 3}) {
      spec.row_map.push_back({static_cast<int64_t>(spec.row_map.size()), 0, 4 * e + part, 1});
    }
  }
  const std::vector<ParamSpec> specs{spec};
  check_specs(specs);
  const auto buckets = layout_buffers(specs, gtp::Grid{});
  Tensor memory(DType::kInt64, {buckets[0].length});
  for (int64_t row = 0; row < 8; ++row) {
    for (int64_t c = 0; c < 4; ++c) {
      memory.data<int64_t>()[4 * row + c] = 4 * spec.row_map[row].logical_row + c;
    }
  }
  StateView view;
  append_pieces(specs, segment_runs(specs, buckets[0], 0), "weight", memory, view);
  std::vector<int> seen(32);
  for (const StatePiece& piece : view) {
    EXPECT_EQ(piece.shape, (std::vector<int64_t>{2, 16}));
    int64_t k = 0;
    for (int64_t e = 0; e < piece.box.size[0]; ++e) {
      for (int64_t c = 0; c < piece.box.size[1]; ++c, ++k) {
        const int64_t i = (piece.box.start[0] + e) * 16 + piece.box.start[1] + c;
        EXPECT_EQ(static_cast<const int64_t*>(piece.data)[k], i);
        ++seen[i];
      }
    }
  }
  EXPECT_EQ(seen, std::vector<int>(32, 1));
}

// The rank's place in the domain of a bucket.
int place_in(const BucketLayout& bucket, const gtp::Grid& grid, int rank) {
  const std::vector<int> group = grid.group(bucket.domain, rank);
  return static_cast<int>(std::find(group.begin(), group.end(), rank) - group.begin());
}

// Every element of every logical tensor lies in exactly one box of one rank, at the address that
// the row map says.
void check_ownership(const gtp::Grid& grid) {
  SCOPED_TRACE(grid_text(grid));
  const int ranks = grid.tp * grid.gtp * grid.dp;
  std::map<std::string, std::vector<int>> owners;
  bool segment_without_parameter = false, border_inside_row = false, expert_over_two = false,
       columns = false, nothing_but_padding = false;
  for (int rank = 0; rank < ranks; ++rank) {
    const auto specs = model_specs(grid, rank);
    check_specs(specs);
    for (const ParamSpec& spec : specs) {
      columns |= spec.first_column > 0;
      nothing_but_padding |= spec.rows > 0 && spec.row_map.empty();
    }
    for (const BucketLayout& bucket : layout_buffers(specs, grid, 700)) {
      ASSERT_EQ(bucket.length % (kParameterAlignment * bucket.ranks), 0);
      const int place = place_in(bucket, grid, rank);
      // Elements of the bucket hold tensor and logical index, to be found through the boxes.
      Tensor memory(DType::kInt64, {bucket.length});
      std::fill_n(memory.data<int64_t>(), bucket.length, -1);
      for (const auto& slot : bucket.slots) {
        for_each_element(specs[slot.parameter], [&](int64_t at, const LogicalTensor& tensor,
                                                    int64_t logical) {
          memory.data<int64_t>()[slot.start + at] = int64_t{tensor_id(tensor.name)} << 16 | logical;
        });
      }
      const auto runs = segment_runs(specs, bucket, place);
      segment_without_parameter |= runs.empty() && bucket.length > 0;
      for (const ElementRun& run : runs) {
        border_inside_row |= run.logical % run.columns.count != 0;
        // Elements know their place in the tensor one by one and in stretches.
        for (int64_t i = 0, n; run.begin + i < run.end; i += n) {
          n = run.columns.stretch(run.logical + i, run.end - run.begin - i);
          for (int64_t k = 0; k < n; ++k) {
            ASSERT_EQ(memory.data<int64_t>()[place * bucket.segment() + run.begin + i + k] & 0xFFFF,
                      run.columns.in_tensor(run.logical + i) + k);
          }
        }
      }
      const TensorView segment =
          memory.view().slice(0, place * bucket.segment(), (place + 1) * bucket.segment());
      StateView view;
      append_pieces(specs, runs, "weight", segment, view);
      for (const StatePiece& piece : view) {
        expert_over_two |= piece.shape.size() == 3 && bucket.ranks > 1 && piece.box.size[1] != 31;
        const auto* data = static_cast<const int64_t*>(piece.data);
        std::array<int64_t, 3> extent{1, 1, 1}, size{1, 1, 1}, start{};
        for (int d = 0; d < piece.box.rank; ++d) {
          extent[d] = piece.shape[d];
          size[d] = piece.box.size[d];
          start[d] = piece.box.start[d];
        }
        auto& owned = owners[piece.tensor];
        owned.resize(extent[0] * extent[1] * extent[2]);
        int64_t k = 0;
        for (int64_t a = 0; a < size[0]; ++a) {
          for (int64_t b = 0; b < size[1]; ++b) {
            for (int64_t c = 0; c < size[2]; ++c, ++k) {
              const int64_t i =
                  ((start[0] + a) * extent[1] + start[1] + b) * extent[2] + start[2] + c;
              ++owned[i];
              ASSERT_EQ(data[k], int64_t{tensor_id(piece.tensor)} << 16 | i) << piece.tensor;
            }
          }
        }
      }
    }
  }
  int64_t total = 0;
  for (const auto& [name, counts] : owners) {
    for (const int count : counts) ASSERT_EQ(count, 1) << name;
    total += static_cast<int64_t>(counts.size());
  }
  int64_t expected = 0;
  for (const ParamSpec& spec : model_specs(0, 1)) {
    for (const LogicalTensor& tensor : spec.tensors) expected += numel(tensor);
  }
  EXPECT_EQ(total, expected);
  // The hard shapes did occur.
  EXPECT_TRUE(segment_without_parameter || ranks < 8);
  EXPECT_TRUE(border_inside_row || grid.dp < 3 || grid.tp * grid.gtp > 1);
  EXPECT_TRUE(expert_over_two || grid.edp == 1);
  EXPECT_EQ(columns, grid.tp > 1);
  EXPECT_TRUE(nothing_but_padding || grid.tp < 2);
}

TEST(Layout, SegmentsTileTheTensors) {
  for (const auto& [ranks, ep] :
       {std::pair{1, 1}, std::pair{2, 1}, std::pair{2, 2}, std::pair{3, 1}, std::pair{3, 3},
        std::pair{4, 1}, std::pair{4, 2}, std::pair{4, 4}, std::pair{6, 3}, std::pair{8, 1}}) {
    check_ownership({.dp = ranks, .ep = ep, .edp = ranks / ep});
  }
  for (const int tp : {1, 2, 3, 4}) {
    for (const int gtp : {1, 2, 3, 4}) {
      check_ownership({.tp = tp, .gtp = gtp, .edp = tp * gtp});
      check_ownership({.tp = tp, .gtp = gtp, .dp = 2, .ep = tp, .egtp = 2, .edp = gtp});
    }
  }
}

TEST(Layout, OwnedCountsAreTheParameterCounts) {
  size_t count = 0;
  for (int ranks = 1; ranks <= 16; ++ranks) {
    for (const gtp::Grid& grid : all_grids(ranks)) {
      ++count;
      std::map<std::string, int64_t> owned, expected;
      for (int rank = 0; rank < ranks; ++rank) {
        const auto specs = model_specs(grid, rank, 2 * grid.tp);
        for (const BucketLayout& bucket : layout_buffers(specs, grid, 700)) {
          for (const ElementRun& run : segment_runs(specs, bucket, place_in(bucket, grid, rank))) {
            owned[specs[run.parameter].tensors[run.tensor].name] += run.end - run.begin;
          }
        }
        for (const ParamSpec& spec : specs) {
          for (const LogicalTensor& tensor : spec.tensors) expected[tensor.name] = numel(tensor);
        }
      }
      ASSERT_EQ(owned, expected) << grid_text(grid);
    }
  }
  EXPECT_EQ(count, 1100u);
}

TEST(Layout, DomainsOfOneRankMakeNoBucketsOfTheirOwn) {
  const auto families = [](const gtp::Grid& grid) {
    std::vector<std::string> out;
    for (const BucketLayout& b : layout_buffers(model_specs(grid, 0), grid)) {
      out.push_back((b.expert ? "expert " : "") + gtp::name(b.domain));
    }
    return out;
  };
  using List = std::vector<std::string>;
  EXPECT_EQ(families({.dp = 2, .edp = 2}), (List{"dp", "expert edp"}));
  EXPECT_EQ(families({.gtp = 2, .egtp = 2}), (List{"", "gtp", "expert "}));
  EXPECT_EQ(families({.tp = 2, .gtp = 2, .dp = 2, .edp = 8}),
            (List{"dp", "tp x dp", "gtp x dp", "tp x gtp x dp", "expert edp"}));
}

TEST(ShardRows, ClipsRowMapsMemberByMember) {
  // Two experts of 5 rows, shards of 4 rows.
  ParamSpec slice = matrix_spec("w", 10, 3);
  slice.tensors[0].shape = {4, 5, 3};
  slice.row_map = {{0, 0, 10, 10}};
  slice.shape = {2, 5, 3};
  const auto rows = [](const ParamSpec& spec) {
    std::string out = text("{}x{}:", spec.shape.front(), spec.shape[spec.shape.size() - 2]);
    for (const RowRun& r : spec.row_map) {
      out += text(" {}<-{}/{}+{}", r.memory_row, r.tensor, r.logical_row, r.rows);
    }
    return out;
  };
  gtp::Layout layout{.rows = 5, .cols = 3, .gtp_size = 3, .align = 2};
  const auto shard = [&](int g) {
    layout.gtp_rank = g;
    return shard_rows(slice, layout);
  };
  EXPECT_EQ(rows(shard(0)), "2x2: 0<-0/10+2 2<-0/15+2");
  EXPECT_EQ(rows(shard(1)), "2x2: 0<-0/12+2 2<-0/17+2");
  EXPECT_EQ(rows(shard(2)), "2x2: 0<-0/14+1 2<-0/19+1");
  EXPECT_EQ(shard(1).rows, 4);
  // Cuts inside of the runs of a fused weight; the last rank has padding alone.
  slice = qkv_spec();
  layout = {.rows = 24, .cols = kModel, .gtp_size = 4, .align = 10};
  EXPECT_EQ(rows(shard(0)), "10x10: 0<-0/0+6 6<-1/0+3 9<-2/0+1");
  EXPECT_EQ(rows(shard(1)), "10x10: 0<-2/1+2 2<-0/6+6 8<-1/3+2");
  EXPECT_EQ(rows(shard(2)), "10x10: 0<-1/5+1 1<-2/3+3");
  EXPECT_EQ(rows(shard(3)), "10x10:");
  EXPECT_THROW(shard_rows(vector_spec("v", 6), layout), Error);
  layout.cols = 5;
  EXPECT_THROW(shard(0), Error);
}

std::string box_text(std::span<const int64_t> shape, int64_t begin, int64_t end) {
  std::string out;
  for (const Box& box : boxes_of_range(shape, begin, end)) {
    out += out.empty() ? "[" : " [";
    for (int d = 0; d < box.rank; ++d) {
      out += text("{}{}:{}", d ? "," : "", box.start[d], box.start[d] + box.size[d]);
    }
    out += "]";
  }
  return out;
}

TEST(Boxes, PartialRowsAreBoxesOfTheirOwn) {
  const std::array<int64_t, 1> line{10};
  const std::array<int64_t, 2> plane{4, 5};
  const std::array<int64_t, 3> solid{3, 4, 5};
  EXPECT_EQ(box_text(line, 2, 7), "[2:7]");
  EXPECT_EQ(box_text(line, 3, 3), "");
  EXPECT_EQ(box_text(plane, 0, 20), "[0:4,0:5]");
  EXPECT_EQ(box_text(plane, 6, 8), "[1:2,1:3]");
  EXPECT_EQ(box_text(plane, 6, 10), "[1:2,1:5]");
  EXPECT_EQ(box_text(plane, 3, 17), "[0:1,3:5] [1:3,0:5] [3:4,0:2]");
  EXPECT_EQ(box_text(plane, 3, 7), "[0:1,3:5] [1:2,0:2]");
  EXPECT_EQ(box_text(solid, 0, 40), "[0:2,0:4,0:5]");
  EXPECT_EQ(box_text(solid, 7, 47),
            "[0:1,1:2,2:5] [0:1,2:4,0:5] [1:2,0:4,0:5] [2:3,0:1,0:5] [2:3,1:2,0:2]");
  EXPECT_EQ(box_text(solid, 20, 25), "[1:2,0:1,0:5]");
}

std::string fault(std::vector<ParamSpec> specs) {
  return error_of([&] { check_specs(specs); });
}

TEST(Specs, FaultsAreNamed) {
  EXPECT_EQ(fault(model_specs(1, 3)), kNoError);
  ParamSpec spec = qkv_spec();
  spec.shape = {23, kModel};
  EXPECT_EQ(fault({spec}),
            "parameter attn.qkv.weight: its shape has 138 elements, its matrix is 24 x 6");
  spec = qkv_spec();
  spec.row_map.pop_back();  // padding
  EXPECT_EQ(fault({spec}), kNoError);
  spec = qkv_spec();
  spec.row_map[2].memory_row = 10;
  EXPECT_EQ(fault({spec}), "parameter attn.qkv.weight: a row run at 12 follows 13");
  spec = qkv_spec();
  spec.row_map[5].memory_row = 22;
  EXPECT_EQ(fault({spec}), "parameter attn.qkv.weight: its row runs end at 25, it has 24 rows");
  spec = qkv_spec();
  spec.first_column = 1;
  EXPECT_EQ(fault({spec}),
            "parameter attn.qkv.weight: columns [1, 7) are outside of attn.q.weight");
  spec = qkv_spec();
  spec.domain = {gtp::Axis::kDp, gtp::Axis::kEdp};
  EXPECT_EQ(fault({spec}), "parameter attn.qkv.weight: edp is not an axis of its grid");
  spec = qkv_spec();
  spec.row_map[5].logical_row = 4;
  EXPECT_EQ(fault({spec}), "parameter attn.qkv.weight: rows [4, 7) are outside of attn.v.weight");
  spec = qkv_spec();
  spec.tensors[2].name = "attn.k.weight";
  EXPECT_EQ(fault({spec}),
            "parameter attn.qkv.weight: tensors attn.k.weight and attn.k.weight have the same "
            "tensor id");
}

}  // namespace
}  // namespace moiety::optim
