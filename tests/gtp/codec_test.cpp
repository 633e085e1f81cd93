// The payloads of a gather, and their assembly: gathered shards are the quantized whole, bit for
// bit.
#include "moiety/gtp/codec.h"

#include <cstring>

#include <gtest/gtest.h>

#include "moiety/base/error.h"
#include "moiety/base/parallel.h"
#include "moiety/gtp/interleave.h"
#include "tests/gtp/quantized_weights.h"

namespace moiety::gtp {
namespace {

// Moves the parts as a transport does, member by member.
void move(const Landing& landing, const Weights& weights) {
  for (const Plane& plane : landing.layout().planes) {
    for (size_t g = 0; g < weights.shards.size(); ++g) {
      const TensorView to = landing.part(plane, static_cast<int>(g));
      for (size_t e = 0; e < weights.shards[g].size(); ++e) {
        const TensorView& from = array_of(weights.shards[g][e].view(), plane.array);
        ASSERT_EQ(from.bytes(), plane.bytes);
        std::memcpy(to.data<uint8_t>() + e * to.stride(0), from.raw(),
                    static_cast<size_t>(plane.bytes));
      }
    }
  }
}

std::vector<ScaleLayout> layouts_of(const Codec& codec) {
  const Format f = codec.spec().format;
  if (f == Format::kFp8Tensor) return {ScaleLayout::kCompact};
  if (is_fp8_block(f)) return {ScaleLayout::kCompact, ScaleLayout::kSm90MnMajor};
  return {ScaleLayout::kCompact, ScaleLayout::kPadded, ScaleLayout::kSm100Swizzled};
}

void expect_gathered(GatherShape shape) {
  const Weights weights(shape);
  for (const ScaleLayout scales : layouts_of(shape.codec)) {
    shape.scales = scales;
    for (const auto& [payload, views] : gathers_of(shape.codec)) {
      const GatherLayout layout = gather_layout(shape, payload, views);
      const Poisoned slot(layout.slot_bytes), scratch(layout.scratch_bytes);
      const Landing landing(layout, slot.view(), scratch.view());
      move(landing, weights);
      landing.finish(Stream());
      for (int e = 0; e < shape.members; ++e) {
        ASSERT_EQ(fault_of(landing, weights.whole[e], e), "")
            << shape.codec.name() << " K " << shape.cols << " s " << shape.shard_rows << " G "
            << shape.ranks << " member " << e << " of " << shape.members << " views " << int{views}
            << " scales " << name(scales);
      }
      ASSERT_TRUE(slot.guard_intact() && scratch.guard_intact());
    }
  }
}

TEST(Codec, GatheredShardsAreTheQuantizedWhole) {
  const ThreadBudget budget(1);
  for (const CodecCase& c : codec_cases()) {
    for (const int64_t cols : {16, 40, 48, 64, 96, 128, 2880}) {
      for (const int64_t rows : {16, 32, 48, 128}) {
        if (rows % c.codec.align() != 0) continue;
        for (const int ranks : {1, 2, 3, 4, 8}) {
          for (const int members : {1, 3}) {
            const bool large = cols == 2880 && (members > 1 || (ranks > 2 && rows > 32));
            if (!large) expect_gathered({c.codec, rows, cols, ranks, members});
          }
        }
      }
    }
  }
}

TEST(Codec, OddColumns) {
  for (const CodecCase& c : codec_cases()) {
    for (const int64_t cols : {1, 17, 129}) expect_gathered({c.codec, 128, cols, 2, 3});
  }
}

// A finish reads what landed and nothing else: it can be run again, and in any memory.
TEST(Codec, FinishTwiceIsFinishOnce) {
  const GatherShape shape{Codec(QuantSpec::of(Format::kNvfp4)), 16, 48, 2, 2};
  const Weights weights(shape);
  const GatherLayout layout = gather_layout(shape, Payload::kCol, kColView);
  const Poisoned slot(layout.slot_bytes), scratch(layout.scratch_bytes);
  const Landing landing(layout, slot.view(), scratch.view());
  move(landing, weights);
  landing.finish(Stream());
  landing.finish(Stream());
  for (int e = 0; e < 2; ++e) EXPECT_EQ(fault_of(landing, weights.whole[e], e), "");
}

TEST(Codec, Bf16TravelsAsItIs) {
  const GatherShape shape{Codec(), 16, 40, 3, 2};
  const GatherLayout layout = gather_layout(shape, Payload::kRow, kBothViews);
  ASSERT_EQ(layout.planes.size(), 1u);
  EXPECT_EQ(layout.scratch_bytes, 0);
  const Poisoned slot(layout.slot_bytes);
  const Landing landing(layout, slot.view(), {});
  for (int g = 0; g < 3; ++g) {
    const TensorView to = landing.part(layout.planes[0], g);
    for (int e = 0; e < 2; ++e) {
      auto* x = reinterpret_cast<bf16*>(to.data<uint8_t>() + e * to.stride(0));
      for (int i = 0; i < 16 * 40; ++i) x[i] = bf16(static_cast<float>(g * 640 + i + e));
    }
  }
  landing.finish(Stream());
  for (int e = 0; e < 2; ++e) {
    for (int i = 0; i < 48 * 40; ++i) {
      ASSERT_EQ(landing.data(e).data<bf16>()[i].bits, bf16(static_cast<float>(i + e)).bits);
    }
  }
}

// Column codes that travel transposed are those that are derived from the row codes, in as many
// bytes.
TEST(Codec, DerivedColumnsAreTheTransposedOnes) {
  const QuantSpec spec = QuantSpec::of(Format::kNvfp4Tile16);
  const GatherShape derived{Codec(spec), 48, 96, 4, 3}, transposed{Codec(spec, true), 48, 96, 4, 3};
  const Weights weights(transposed);
  const GatherLayout layouts[] = {gather_layout(derived, Payload::kRow, kColView),
                                  gather_layout(transposed, Payload::kCol, kColView)};
  EXPECT_EQ(layouts[0].received(), layouts[1].received());
  std::vector<Tensor> columns;
  for (const GatherLayout& layout : layouts) {
    const Poisoned slot(layout.slot_bytes), scratch(layout.scratch_bytes);
    const Landing landing(layout, slot.view(), scratch.view());
    move(landing, weights);
    landing.finish(Stream());
    const TensorView& got = landing.view(1).col_data;
    columns.emplace_back(got.dtype(), got.sizes());
    std::memcpy(columns.back().view().raw(), got.raw(), static_cast<size_t>(got.bytes()));
  }
  EXPECT_EQ(difference("col_data", columns[0], columns[1]), "");
}

TEST(Codec, BytesPerElement) {
  const auto bytes = [](const Codec& codec, Payload payload, Views views) {
    const GatherLayout l = gather_layout({codec, 2048, 4096, 2, 1}, payload, views);
    return static_cast<double>(l.received()) / (2048 * 4096);
  };
  const auto row = [&](Format f) {
    return bytes(Codec(QuantSpec::of(f)), Payload::kRow, kRowView);
  };
  EXPECT_EQ(bytes(Codec(), Payload::kRow, kRowView), 2);
  EXPECT_EQ(row(Format::kFp8Tensor), 1);
  EXPECT_EQ(row(Format::kFp8Block128x128), 1 + 4.0 / (128 * 128));
  EXPECT_EQ(row(Format::kMxfp8), 1.03125);
  EXPECT_EQ(row(Format::kMxfp8Tile32), 1 + 1.0 / 1024);
  EXPECT_EQ(row(Format::kNvfp4), 0.5625);
  EXPECT_EQ(row(Format::kNvfp4Tile16), 0.50390625);
  for (const Format f : {Format::kMxfp8, Format::kNvfp4}) {
    EXPECT_EQ(bytes(Codec(QuantSpec::of(f)), Payload::kCol, kColView), row(f));
  }
}

// A forward and a backward that share a gather move no more than one of them.
TEST(Codec, OnePayloadMakesBothViews) {
  for (const CodecCase& c : codec_cases()) {
    if (!c.codec.one_payload()) continue;
    const GatherShape shape{c.codec, 128, 64, 4, 2};
    const GatherLayout row = gather_layout(shape, Payload::kRow, kRowView);
    const GatherLayout both = gather_layout(shape, Payload::kRow, kBothViews);
    EXPECT_EQ(row.received(), both.received());
    EXPECT_LE(row.slot_bytes, both.slot_bytes);
    EXPECT_EQ(both.transfer().slot, both.slot_bytes);
  }
}

TEST(Codec, GridsOfRows) {
  EXPECT_EQ(Codec().align(), 16);
  EXPECT_EQ(Codec().block(), 1);
  EXPECT_EQ(Codec(QuantSpec::of(Format::kFp8Tensor)).block(), 1);
  for (const auto& [format, align] : {std::pair{Format::kFp8Tensor, 16},
                                      {Format::kFp8Block128x128, 128},
                                      {Format::kMxfp8, 32},
                                      {Format::kMxfp8Tile32, 32},
                                      {Format::kNvfp4, 16},
                                      {Format::kNvfp4Tile16, 16}}) {
    const Codec codec(QuantSpec::of(format));
    EXPECT_EQ(codec.align(), align);
    if (format != Format::kFp8Tensor) {
      EXPECT_EQ(codec.block(), align);
    }
  }
}

TEST(Codec, Errors) {
  const QuantSpec tile = QuantSpec::of(Format::kNvfp4Tile16);
  EXPECT_NE(kind_and_error_of([] {
              Codec(QuantSpec::of(Format::kFp8Block1x128));
            }).find("fp8_block_1x128 is for activations and gradients, not weights"),
            std::string::npos);
  QuantSpec rht = QuantSpec::of(Format::kNvfp4);
  rht.rht_col = true;
  EXPECT_NE(kind_and_error_of([&] { Codec{rht}; }).find("nvfp4, rht, is for"), std::string::npos);
  EXPECT_NE(kind_and_error_of([] {
              Codec(QuantSpec::of(Format::kNvfp4), true);
            }).find("column_planes with nvfp4, expected nvfp4_tile16"),
            std::string::npos);
  const auto error = [](const GatherShape& shape, Payload payload, Views views) {
    return kind_and_error_of([&] { gather_layout(shape, payload, views); });
  };
  EXPECT_NE(error({Codec(QuantSpec::of(Format::kMxfp8)), 48, 64, 2}, Payload::kRow, kRowView)
                .find("1 members of 48 rows, 64 columns on 2 ranks; rows of mxfp8 are a multiple "
                      "of 32"),
            std::string::npos);
  EXPECT_NE(error({Codec(QuantSpec::of(Format::kMxfp8)), 32, 64, 2}, Payload::kRow, kBothViews)
                .find("the row payload of mxfp8 does not make views 3"),
            std::string::npos);
  EXPECT_NE(error({Codec(tile), 16, 64, 2}, Payload::kCol, kColView)
                .find("the column payload of nvfp4_tile16 does not make views 2"),
            std::string::npos);
  EXPECT_NE(error({Codec(), 16, 64, 2, 1, ScaleLayout::kPadded}, Payload::kRow, kRowView)
                .find("bf16 has no scales to lay out as padded"),
            std::string::npos);
  EXPECT_NE(error({Codec(tile), 16, 64, 2, 1, ScaleLayout::kSm90MnMajor}, Payload::kRow, kRowView)
                .find("sm90_mn_major is a layout of float32 scales"),
            std::string::npos);

  const GatherLayout layout = gather_layout({Codec(tile), 16, 64, 2}, Payload::kRow, kColView);
  const Poisoned memory(4 * layout.slot_bytes), small(16);
  const TensorView all = memory.view();
  EXPECT_NE(kind_and_error_of([&] {
              Landing(layout, all, small.view());
            }).find("gtp landing: scratch is"),
            std::string::npos);
  EXPECT_NE(kind_and_error_of([&] { Landing(layout, all, all); }).find("slot and scratch overlap"),
            std::string::npos);
}

TEST(Interleave, PutsColumnsSideBySide) {
  for (const int64_t P : {0, 1, 8, 24}) {
    const int64_t E = 2, G = 3, K = 5;
    Tensor parts(DType::kUInt8, {E, G, K, P}), out(DType::kUInt8, {E, K, G * P});
    for (int64_t i = 0; i < parts.view().numel(); ++i) {
      parts.data<uint8_t>()[i] = static_cast<uint8_t>(i * 7 + 3);
    }
    interleave(parts, out, Stream());
    for (int64_t e = 0; e < E; ++e) {
      for (int64_t k = 0; k < K; ++k) {
        for (int64_t g = 0; g < G; ++g) {
          for (int64_t j = 0; j < P; ++j) {
            ASSERT_EQ(out.data<uint8_t>()[(e * K + k) * G * P + g * P + j],
                      parts.data<uint8_t>()[((e * G + g) * K + k) * P + j]);
          }
        }
      }
    }
  }
  Tensor x(DType::kUInt8, {1, 2, 3, 4});
  EXPECT_NE(kind_and_error_of([&] {
              interleave(x, x.view().reshape({1, 3, 8}), Stream());
            }).find("overlap"),
            std::string::npos);
}

}  // namespace
}  // namespace moiety::gtp
