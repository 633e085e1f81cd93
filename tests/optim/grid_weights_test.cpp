// Weights in formats under every grid: a rank's shard is its part of quantize() of the uncut
// weight. And what (e)gtp peers find where.
#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <set>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "moiety/base/rng.h"
#include "moiety/comm/symmetric_buffer.h"
#include "moiety/comm/thread_group.h"
#include "moiety/formats/bf16.h"
#include "moiety/gtp/codec.h"
#include "moiety/optim/distributed_optimizer.h"
#include "moiety/quant/quantize.h"
#include "tests/optim/model_specs.h"

namespace moiety::optim {
namespace {

using comm::Communicator;
using gtp::Axis;
using gtp::Grid;

constexpr uint64_t kSeed = 99;
constexpr float kStd = 0.5f;
constexpr int64_t kColumns = 48, kHeight = 40;  // of an expert

QuantSpec fp32_scales() {
  QuantSpec spec = QuantSpec::of(Format::kFp8Block128x128);
  spec.pow2_scales = false;
  return spec;
}
std::vector<QuantSpec> formats() {
  return {QuantSpec::of(Format::kFp8Tensor),
          QuantSpec::of(Format::kFp8Block128x128),
          fp32_scales(),
          QuantSpec::of(Format::kMxfp8),
          QuantSpec::of(Format::kMxfp8Tile32),
          QuantSpec::of(Format::kNvfp4Tile16)};
}

// One weight of each kind of cut: by tp rows, by tp columns, by gtp alone, and grouped experts.
// Names end in `suffix`.
std::vector<ParamSpec> specs_of(const Grid& grid, int rank, const QuantSpec& format,
                                const std::string& suffix = "") {
  const int64_t block = gtp::Codec(format).block(), align = gtp::Codec(format).align();
  const int64_t unit = std::max<int64_t>(block, 16);
  const gtp::Layout rows{.tp_axis = 0, .align = align, .tp_unit = block},
      columns{.tp_axis = 1, .align = align, .tp_unit = block}, whole{.align = align};
  const int64_t local = kExperts / grid.ep + (kExperts % grid.ep != 0),
                first = std::min(grid.place(Axis::kEp, rank) * local, kExperts),
                last = std::min(first + local, kExperts);
  ParamSpec experts = matrix_spec("experts" + suffix, (last - first) * kHeight, kColumns);
  experts.tensors[0].shape = {kExperts, kHeight, kColumns};
  experts.row_map = {{0, 0, first * kHeight, (last - first) * kHeight}};
  experts.shape = {last - first, kHeight, kColumns};
  experts.expert = true;
  experts.domain = {Axis::kEdp};
  if (grid.egtp > 1) {
    experts = shard_rows(experts, {.rows = kHeight,
                                   .cols = kColumns,
                                   .gtp_rank = grid.place(Axis::kEgtp, rank),
                                   .gtp_size = grid.egtp,
                                   .align = align});
  }
  std::vector<ParamSpec> out{
      cut(matrix_spec("rows" + suffix, grid.tp * unit, kColumns), rows, grid, rank),
      cut(matrix_spec("columns" + suffix, 37, grid.tp * unit), columns, grid, rank),
      cut(matrix_spec("whole" + suffix, 70, kColumns), whole, grid, rank), experts};
  for (ParamSpec& spec : out) {
    spec.format = format;
    spec.format_class = 1;
    spec.init_std = kStd;
  }
  return out;
}

// The specs of those weights in every format, beside one that is in none.
std::vector<ParamSpec> specs_of(const Grid& grid, int rank) {
  std::vector<ParamSpec> out{vector_spec("norm.weight", kColumns)};
  int format_class = 0;
  for (const QuantSpec& format : formats()) {
    ++format_class;
    for (ParamSpec& spec : specs_of(grid, rank, format, text(".{}", format_class))) {
      spec.format_class = format_class;
      out.push_back(std::move(spec));
    }
  }
  return out;
}

// Matrix `member` of a logical tensor, as it is initialized, quantized whole.
QuantizedTensor quantized_whole(const LogicalTensor& tensor, int64_t member,
                                const QuantSpec& format) {
  const int64_t cols = tensor.shape.back(), rows = tensor.shape[tensor.shape.size() - 2];
  const Tensor x(DType::kBFloat16, {rows, cols});
  for (int64_t i = 0; i < rows * cols; ++i) {
    x.data<bf16>()[i] =
        bf16(kStd * init_normal(kSeed, tensor_id(tensor.name), member * rows * cols + i));
  }
  QuantizedTensor q(format, rows, cols, {true, format.format == Format::kMxfp8});
  quant::quantize(x, q, {}, {});
  return q;
}

// Element (r, c) of an array whose rows have one element for `width` columns.
uint64_t element(const TensorView& x, int64_t r, int64_t c, bool nibbles) {
  const int64_t row_bytes = x.bytes() / x.size(0), bits_each = nibbles ? 4 : bits(x.dtype());
  const auto* row = static_cast<const uint8_t*>(x.raw()) + r * row_bytes;
  if (bits_each == 4) return row[c / 2] >> (c % 2 * 4) & 15;
  uint64_t out = 0;
  std::memcpy(&out, row + c * bits_each / 8, static_cast<size_t>(bits_each / 8));
  return out;
}

// Rows [0, valid) of the shard are those of the whole from row `row0`, column `col0` on.
void expect_part(const QuantizedView& shard, const QuantizedView& whole, int64_t valid,
                 int64_t row0, int64_t col0, const std::string& what) {
  const BlockShape block = block_shape(shard.spec.format);
  const bool nibbles = is_fp4(shard.spec.format);
  int64_t wrong = 0;
  for (int64_t r = 0; r < valid; ++r) {
    for (int64_t c = 0; c < shard.cols; ++c) {
      wrong += element(shard.row_data, r, c, nibbles) !=
               element(whole.row_data, row0 + r, col0 + c, nibbles);
      if (shard.row_scales.defined()) {
        wrong += element(shard.row_scales, r / block.rows, c / block.cols, false) !=
                 element(whole.row_scales, (row0 + r) / block.rows, (col0 + c) / block.cols, false);
      }
      if (!shard.col_data.defined()) continue;
      wrong += element(shard.col_data, r, c, false) !=
               element(whole.col_data, row0 + r, col0 + c, false);
      wrong += element(shard.col_scales, r / block.cols, c, false) !=
               element(whole.col_scales, (row0 + r) / block.cols, col0 + c, false);
    }
  }
  EXPECT_EQ(wrong, 0) << what;
  for (int64_t r = valid; r < shard.rows; ++r) {
    for (int64_t c = 0; c < shard.cols; ++c) {
      wrong += element(shard.row_data, r, c, nibbles) != 0;
      if (shard.col_data.defined()) wrong += element(shard.col_data, r, c, false) != 0;
    }
  }
  EXPECT_EQ(wrong, 0) << what << ", padding";
  // Columns that consumers make of row codes take index 1.
  const auto* scale = shard.tensor_scale.data<float>();
  EXPECT_EQ(scale[0], whole.tensor_scale.data<float>()[0]) << what;
  EXPECT_EQ(scale[1], scale[0]) << what;
  if (!is_tensor_scaled(shard.spec.format)) return;
  const auto* amax = shard.amax.data<float>();
  EXPECT_EQ(amax[0], whole.amax.data<float>()[0]) << what;
  EXPECT_EQ(amax[1], amax[0]) << what;
}

// The whole matrices of all tensors, quantized; those of the grids before are kept.
class Wholes {
 public:
  void add(const ParamSpec& spec) {
    if (!spec.format) return;
    const LogicalTensor& tensor = spec.tensors[0];
    for (int64_t e = 0; e < (tensor.shape.size() == 3 ? kExperts : 1); ++e) {
      QuantizedTensor& whole = matrices_[key(tensor, e)];
      if (!whole.view().row_data.defined()) whole = quantized_whole(tensor, e, *spec.format);
    }
  }
  const QuantizedView& of(const LogicalTensor& tensor, int64_t member) const {
    return matrices_.at(key(tensor, member));
  }

 private:
  static std::string key(const LogicalTensor& tensor, int64_t member) {
    return text("{}/{} {} {}", tensor.name, member, tensor.shape[0], tensor.shape[1]);
  }
  std::map<std::string, QuantizedTensor> matrices_;
};

void check_parameter(const Parameter& p, const Wholes& wholes, const std::string& grid) {
  const LogicalTensor& tensor = p.spec.tensors[0];
  const std::string what =
      p.quantized.empty() ? "" : text("{}, {} {}", grid, tensor.name, name(p.spec.format->format));
  const int64_t height = tensor.shape.size() == 3 ? kHeight : tensor.shape[0];
  for (size_t m = 0; m < p.quantized.size(); ++m) {
    // The member's rows: one run, or all of it padding.
    const int64_t rows = p.quantized[m].rows, begin = static_cast<int64_t>(m) * rows;
    int64_t valid = 0, logical = 0;
    for (const RowRun& run : p.spec.row_map) {
      const int64_t from = std::max(run.memory_row, begin),
                    to = std::min(run.memory_row + run.rows, begin + rows);
      if (from >= to) continue;
      ASSERT_EQ(from, begin) << what;
      valid = to - from;
      logical = run.logical_row + from - run.memory_row;
    }
    // A member that is all padding does not know which expert it is of.
    if (valid == 0 && p.quantized.size() > 1) continue;
    expect_part(p.quantized[m], wholes.of(tensor, logical / height), valid, logical % height,
                p.spec.first_column, what);
  }
}

TEST(GridWeights, ShardsAreThoseOfTheWholeUnderEveryGrid) {
  size_t count = 0;
  Wholes wholes;
  for (int ranks = 1; ranks <= 8; ++ranks) {
    for (const Grid& grid : all_grids(ranks)) {
      for (const ParamSpec& spec : specs_of(grid, 0)) wholes.add(spec);
      comm::run_thread_ranks(ranks, {Seconds(60)}, [&](Communicator& world) {
        const GridGroups groups(grid, world);
        OptimizerConfig config;
        config.bucket_elements = 3000;
        DistributedOptimizer optimizer(specs_of(grid, world.rank()), config, groups);
        optimizer.initialize(kSeed, {});
        for (const Parameter& p : optimizer.parameters()) {
          check_parameter(p, wholes, grid_text(grid));
        }
      });
      ++count;
    }
  }
  EXPECT_EQ(count, 254u);
}

// Shards lie in memory that the peers map, at the same places, and they are told when.
TEST(GridWeights, PeersFindShardsInTheSharedMemory) {
  const Grid grid{.tp = 2, .gtp = 2, .dp = 2, .ep = 2, .egtp = 4};
  for (const bool quantized : {false, true}) {
    comm::run_thread_ranks(8, {Seconds(60)}, [&](Communicator& world) {
      const GridGroups groups(grid, world);
      struct Peers {
        comm::SymmetricBuffer memory;
        int drains = 0;
        std::map<int32_t, int> published{};
      };
      std::array<Peers, 2> peers;
      const auto functions = [&](Axis axis, Peers& to) {
        return ShardPeers{
            .allocate =
                [&groups, &to, axis](const std::string& what, int64_t bytes) {
                  to.memory = comm::SymmetricBuffer::create(groups.of({axis}), what, bytes);
                  return gtp::SlotArena::Block{
                      TensorView(to.memory.local(), DType::kUInt8, {bytes}), nullptr};
                },
            .await_drained = [&to](const Stream&) { ++to.drains; },
            .publish = [&to](int32_t bucket, const Stream&) { ++to.published[bucket]; }};
      };
      auto specs = specs_of(grid, world.rank(), QuantSpec::of(Format::kMxfp8));
      specs.insert(specs.begin(), vector_spec("norm.weight", kColumns));
      if (!quantized) {
        for (ParamSpec& spec : specs) spec.format = std::nullopt;
      }
      OptimizerConfig config;
      config.bucket_elements = 3000;
      DistributedOptimizer optimizer(specs, config, groups, functions(Axis::kGtp, peers[0]),
                                     functions(Axis::kEgtp, peers[1]));
      optimizer.initialize(kSeed, {});
      for (Parameter& p : optimizer.parameters()) p.overwrite = false;
      optimizer.step({.lr = 0.1, .clip = 0, .tokens = 1}, {});
      world.barrier();
      EXPECT_FALSE(optimizer.shared_shard(0));  // the norm
      std::set<int32_t> buckets[2];
      for (size_t i = 1; i < specs.size(); ++i) {
        const Parameter& p = optimizer.parameters()[i];
        const bool expert = p.spec.expert;
        const Peers& shared = peers[expert];
        const auto shard = optimizer.shared_shard(static_cast<int>(i));
        ASSERT_TRUE(shard);
        ASSERT_EQ(shard->memory, shared.memory.local());
        buckets[expert].insert(shard->bucket);
        const TensorView& array = quantized ? p.quantized[0].row_data : p.weight;
        ASSERT_TRUE(shared.memory.contains(array.raw(), array.bytes()));
        const int64_t offset = static_cast<const std::byte*>(array.raw()) - shard->memory;
        // A peer's own address of its array, told to all.
        Communicator& group = groups.of({expert ? Axis::kEgtp : Axis::kGtp});
        const auto told =
            group.bootstrap().all_gather({reinterpret_cast<const char*>(&offset), sizeof(offset)});
        for (const std::string& other : told) {
          EXPECT_EQ(std::memcmp(other.data(), &offset, sizeof(offset)), 0);
        }
        // The memory that the peer maps is its shard.
        std::vector<char> own(static_cast<const char*>(array.raw()),
                              static_cast<const char*>(array.raw()) + array.bytes());
        const auto shards = group.bootstrap().all_gather({own.data(), own.size()});
        for (int r = 0; r < group.size(); ++r) {
          EXPECT_EQ(std::memcmp(shared.memory.peer(r) + offset, shards[r].data(), own.size()), 0);
        }
      }
      for (const bool expert : {false, true}) {
        EXPECT_EQ(peers[expert].drains, 2);
        EXPECT_EQ(peers[expert].published.size(), buckets[expert].size());
        for (const int32_t b : buckets[expert]) EXPECT_EQ(peers[expert].published[b], 2);
      }
      world.barrier();
    });
  }
}

}  // namespace
}  // namespace moiety::optim
