// Expert parallelism of quantized rows: the cover on threads, records, what dequantization sees,
// and arguments that do not fit.
#include "tests/moe/ep_quantized.h"

#include "moiety/quant/dequantize.h"
#include "moiety/quant/quantize.h"
#include "moiety/quant/scale_layout.h"

namespace moiety::moe::quantized {
namespace {

TEST(EpQuantized, ThreadsThatMapEachOther) { run_cases<Threads>(0); }
TEST(EpQuantized, ThreadsOverCollectives) { run_cases<ThreadCollectives>(1000); }

constexpr PayloadFormat kFormats[] = {PayloadFormat::kFP8E4M3, PayloadFormat::kFP8E5M2,
                                      PayloadFormat::kMXFP8, PayloadFormat::kNVFP4};

// The sizes that docs/spec/ep.md#payloads names: K = 8 weights, D = 7168.
TEST(EpQuantized, RecordsAreAsLongAsThePageSays) {
  const auto record = [](PayloadFormat widest, int64_t model, int topk) {
    const EpLimits limits{.tokens = 1, .model = model, .topk = topk, .widest = widest};
    return EpGroup::bytes(ExpertMap(64, 2), limits, {}).record;
  };
  EXPECT_EQ(record(PayloadFormat::kBF16, 7168, 8), 14464);
  EXPECT_EQ(record(PayloadFormat::kFP8E4M3, 7168, 8), 7424);
  EXPECT_EQ(record(PayloadFormat::kFP8E5M2, 7168, 8), 7424);
  EXPECT_EQ(record(PayloadFormat::kMXFP8, 7168, 8), 7424);
  EXPECT_EQ(record(PayloadFormat::kNVFP4, 7168, 8), 4096);
  // A short row is longest in NVFP4, and memory for bf16 holds that, too.
  EXPECT_EQ(record(PayloadFormat::kNVFP4, 1, 24), 256);
  EXPECT_EQ(record(PayloadFormat::kBF16, 1, 24), 256);

  EXPECT_EQ(row_parts(PayloadFormat::kFP8E4M3, 7168).bytes(), 7168 + 4 * 56);
  EXPECT_EQ(row_parts(PayloadFormat::kMXFP8, 7168).bytes(), 7168 + 224);
  EXPECT_EQ(row_parts(PayloadFormat::kNVFP4, 7168).bytes(), 3584 + 448 + 4);
}

// The bytes that lie in the receiver's region: data, scales, row scale, weights.
TEST(EpQuantized, PartsLieInTheRecordWhereThePageSays) {
  constexpr int64_t kModel = 20, kTopk = 2;
  struct Place {
    PayloadFormat format;
    int64_t data, scales, row_scale, weights;  // begins; -1: none
  };
  for (const Place& place :
       {Place{PayloadFormat::kFP8E5M2, 0, 32, -1, 48}, Place{PayloadFormat::kMXFP8, 0, 32, -1, 48},
        Place{PayloadFormat::kNVFP4, 0, 16, 32, 36}}) {
    const ref::QuantizedBytes bytes = row_bytes(place.format, kModel);
    ref::QuantizedRows x;
    const auto ramp = [](int64_t n, int first) {
      std::vector<uint8_t> out(n);
      for (int64_t i = 0; i < n; ++i) out[i] = static_cast<uint8_t>(first + i);
      return ref::PerRank<uint8_t>{out, out};
    };
    x.data = ramp(bytes.data, 1);
    x.scales = ramp(bytes.scales, 101);
    x.row_scale = ramp(bytes.row_scale, 201);
    Threads::run(2, [&](comm::Communicator& world) {
      const ExpertMap map(2, 2);
      const EpLimits limits{.tokens = 1, .model = kModel, .topk = kTopk, .depth = 1};
      EpGroup group = EpGroup::create(world, map, limits, {});
      poison_memory(group);
      world.barrier();
      Mat<int64_t> idx({0, 1}, kTopk);
      const PrepareArgs args{.idx_TK = idx.view(), .capacity = 2};
      const PlanMemory memory(map, limits, args);
      const EpPlan plan = prepare(group, args, memory.view(), {});
      RowMemory from(place.format, kModel, x, world.rank(), false, false);
      RowMemory rows(place.format, kModel, 2, false, false);
      Mat<float> w({1.5f, -2.0f}, kTopk), slot_w(2, 1);
      dispatch(
          group, plan,
          {.x_TD = from.view, .w_TK = w.view(), .rows_CD = rows.view, .slot_w = slot_w.vector()},
          {});
      std::vector<uint8_t> expected(128, kPoison);
      const auto put = [&](const void* part, int64_t n, int64_t at) {
        if (at >= 0) std::memcpy(&expected[at], part, n);
      };
      put(x.data[0].data(), bytes.data, place.data);
      put(x.scales[0].data(), bytes.scales, place.scales);
      put(x.row_scale[0].data(), bytes.row_scale, place.row_scale);
      put(&w.at(0, 0), 8, place.weights);
      const auto* region = reinterpret_cast<const uint8_t*>(mapped(group).memory().local() +
                                                            mapped(group).layout().regions);
      EXPECT_EQ(std::vector<uint8_t>(region, region + 128), expected) << name(place.format);
      group.close();
    });
  }
}

// Rows that were quantized with scales of their own rank mean the same where they arrive: moving
// and dequantizing commute. Received scales come in the layout of GEMMs and are turned back.
TEST(EpQuantized, DequantizingCommutesWithDispatch) {
  constexpr int kRanks = 3;
  constexpr int64_t kModel = 300, kCapacity = 384;
  const ExpertMap map(4, kRanks);
  for (const PayloadFormat format : kFormats) {
    for (const bool row_scaled : {false, true}) {
      if (row_scaled && format != PayloadFormat::kNVFP4) continue;
      Threads::run(kRanks, [&](comm::Communicator& world) {
        const int me = world.rank();
        const int64_t tokens = 20 - 7 * me;
        std::mt19937 rng(3 + me);
        const auto routing = make_routing(Routing::kSomeMasked, {tokens}, 2, map, rng);
        const EpLimits limits{
            .tokens = 20, .model = kModel, .topk = 2, .widest = PayloadFormat::kFP32};
        EpGroup group = EpGroup::create(world, map, limits, {});
        Mat<int64_t> idx(routing[0], 2);
        const PrepareArgs args{.idx_TK = idx.view(), .alignment = 128, .capacity = kCapacity};
        const PlanMemory memory(map, limits, args);
        const EpPlan plan = prepare(group, args, memory.view(), {});

        Mat<float> x(tokens, kModel), values(tokens, kModel);
        for (int64_t i = 0; i < tokens * kModel; ++i) {
          // Every rank and every row has a magnitude of its own.
          const float size = std::ldexp(1.0f, static_cast<int>(i / kModel % 5 - 3 * me));
          x.at(i / kModel, i % kModel) = size * std::normal_distribution<float>()(rng);
        }
        QuantSpec spec = spec_of(format);
        spec.row_scaled = row_scaled;
        const QuantizedTensor q(spec, tokens, kModel, Directions{});
        quant::quantize(x.view(), q, {}, {});
        quant::dequantize(q, Direction::kRow, values.view(), {}, {});

        spec.row_scaled = format == PayloadFormat::kNVFP4;
        const QuantizedTensor received(spec, kCapacity, kModel, Directions{});
        QuantizedView rows = received.view();
        rows.layout = format >= PayloadFormat::kMXFP8 ? ScaleLayout::kSm100Swizzled
                                                      : ScaleLayout::kSm90MnMajor;
        const ArraySpec size = quant::scale_layout_size(received, Direction::kRow, rows.layout);
        const Buffer scales(size.bytes());
        rows.row_scales = scales.view(size.dtype, std::span(size.sizes.data(), size.dims));
        Mat<float> expected(kCapacity, kModel), got(kCapacity, kModel);
        dispatch(group, plan, {.x_TD = q.view(), .rows_CD = rows, .zero_tail = true}, {});
        dispatch(group, plan,
                 {.x_TD = values.view(), .rows_CD = expected.view(), .zero_tail = true}, {});
        quant::compact_scales(rows.row_scales, rows.layout, received, Direction::kRow, {});
        quant::dequantize(received, Direction::kRow, got.view(), {}, {});
        for (int64_t i = 0; i < kCapacity * kModel; ++i) {
          const int64_t r = i / kModel, d = i % kModel;
          ASSERT_TRUE(same_bytes(got.at(r, d), expected.at(r, d)))
              << name(format) << " [" << r << ", " << d << "] is " << got.at(r, d) << ", expected "
              << expected.at(r, d);
        }
        group.close();
      });
    }
  }
}

// One rank with room for 8 tokens of 64, and rows that fit.
class Arguments : public testing::Test {
 protected:
  void run(const std::function<void(EpGroup&, const EpPlan&)>& body, int64_t alignment = 128) {
    Threads::run(1, [&](comm::Communicator& world) {
      const ExpertMap map(4, 1);
      const EpLimits limits{.tokens = 8, .model = 64, .topk = 2};
      EpGroup group = EpGroup::create(world, map, limits, {});
      const Tensor idx(DType::kInt32, {8, 2});
      const PrepareArgs args{.idx_TK = idx, .alignment = alignment, .capacity = 256};
      const PlanMemory memory(map, limits, args);
      const EpPlan plan = prepare(group, args, memory.view(), {});
      body(group, plan);
    });
  }
  static QuantizedTensor tensor(PayloadFormat format, int64_t rows, bool row_scaled = false,
                                int64_t model = 64) {
    QuantSpec spec = spec_of(format);
    spec.row_scaled = row_scaled;
    return {spec, rows, model, Directions{}};
  }
};

TEST_F(Arguments, OfOneKindAreChecked) {
  run([&](EpGroup& group, const EpPlan& plan) {
    const QuantizedTensor x = tensor(PayloadFormat::kMXFP8, 8),
                          y = tensor(PayloadFormat::kMXFP8, 256);
    const Tensor floats(DType::kBFloat16, {8, 64}), float_rows(DType::kBFloat16, {256, 64});
    const auto dispatched = [&](const Payload& from, const Payload& rows) {
      return error_of([&] { dispatch(group, plan, {.x_TD = from, .rows_CD = rows}, {}); });
    };
    EXPECT_EQ(dispatched(x.view(), y.view()), "no error");
    EXPECT_EQ(dispatched(x.view(), float_rows),
              "ep dispatch: rows is bfloat16[256, 64], what is sent is mxfp8[8, 64]");
    EXPECT_EQ(dispatched(floats, y.view()),
              "ep dispatch: rows is mxfp8[256, 64], what is sent is bfloat16[8, 64]");
    EXPECT_EQ(dispatched(y.view(), y.view()),
              "ep dispatch: x is mxfp8[256, 64], expected 8 rows of 1 element or more");
    EXPECT_EQ(dispatched(x.view(), x.view()),
              "ep dispatch: rows is mxfp8[8, 64], expected 256 rows of 1 element or more");
    EXPECT_EQ(
        dispatched(x.view(), tensor(PayloadFormat::kFP8E4M3, 256).view()),
        "ep dispatch: rows is fp8_block_1x128[256, 64] of e4m3, pow2_scales true; what is sent "
        "is mxfp8[8, 64] of e4m3, pow2_scales false");
    EXPECT_EQ(dispatched(x.view(), tensor(PayloadFormat::kMXFP8, 256, false, 65).view()),
              "ep dispatch: rows is mxfp8[256, 65] of e4m3, pow2_scales false; what is sent is "
              "mxfp8[8, 64] of e4m3, pow2_scales false");
    const QuantizedTensor long_x = tensor(PayloadFormat::kMXFP8, 8, false, 500);
    EXPECT_EQ(dispatched(long_x.view(), tensor(PayloadFormat::kMXFP8, 256, false, 500).view()),
              "ep dispatch, group \"ep\": mxfp8[8, 500] needs 640 bytes a row, reserved are 256 "
              "(EpLimits model, topk, widest, rank_fp32)");
    for (const Format format :
         {Format::kFp8Tensor, Format::kFp8Block128x128, Format::kNvfp4Tile16}) {
      const QuantizedTensor other(QuantSpec::of(format), 8, 64, Directions{});
      EXPECT_NE(dispatched(other.view(), y.view()).find("quantized rows travel as"),
                std::string::npos);
    }
    QuantSpec e5m2 = QuantSpec::of(Format::kMxfp8);
    e5m2.element = DType::kE5M2;
    const QuantizedTensor other(e5m2, 8, 64, Directions{});
    EXPECT_EQ(dispatched(other.view(), y.view()),
              "ep dispatch: x is mxfp8 of e5m2; quantized rows travel as fp8_block_1x128, as mxfp8 "
              "of e4m3, or as nvfp4");
  });
}

TEST_F(Arguments, ArraysAreChecked) {
  run([&](EpGroup& group, const EpPlan& plan) {
    const QuantizedTensor x = tensor(PayloadFormat::kNVFP4, 8),
                          y = tensor(PayloadFormat::kNVFP4, 256, true);
    // The error when one field of x or of the rows is another.
    const auto with_x = [&](auto change) {
      QuantizedView view = x;
      change(view);
      return error_of([&] { dispatch(group, plan, {.x_TD = view, .rows_CD = y.view()}, {}); });
    };
    const auto with_rows = [&](auto change) {
      QuantizedView view = y;
      change(view);
      return error_of([&] { dispatch(group, plan, {.x_TD = x.view(), .rows_CD = view}, {}); });
    };
    EXPECT_EQ(with_x([](QuantizedView&) {}), "no error");
    EXPECT_EQ(with_x([](QuantizedView& v) { v.row_data = {}; }),
              "ep dispatch: x.row_data is no tensor, expected uint8[8, 32]");
    EXPECT_EQ(with_x([](QuantizedView& v) { v.row_scales = v.row_scales.slice(1, 0, 3); }),
              "ep dispatch: x.row_scales is e4m3[8, 3] with strides [4, 1], expected e4m3[8, 4]");
    EXPECT_EQ(with_x([](QuantizedView& v) { v.tensor_scale = {}; }),
              "ep dispatch: x.tensor_scale is no tensor, expected float32[2]");
    EXPECT_EQ(with_x([](QuantizedView& v) { v.spec.row_scaled = true; }),
              "ep dispatch: x.tensor_scale is float32[2], expected float32[8]");
    EXPECT_EQ(with_x([](QuantizedView& v) { v.spec.element = DType::kE4M3; }),
              "ep dispatch: elements of nvfp4 are e4m3, expected e2m1");
    EXPECT_EQ(with_x([](QuantizedView& v) { v.layout = ScaleLayout::kSm100Swizzled; }),
              "ep dispatch: x has sm100_swizzled scales; compact ones travel");
    EXPECT_EQ(
        with_x([](QuantizedView& v) {
          const int64_t sizes[] = {8, 32}, strides[] = {1, 8};
          v.row_data = {v.row_data.raw(), DType::kUInt8, sizes, strides};
        }),
        "ep dispatch: x.row_data is uint8[8, 32] with strides [1, 8]; a row must be contiguous");
    EXPECT_EQ(
        with_x([](QuantizedView& v) {
          v.row_data = {v.row_data.raw(), DType::kUInt8, {8, 32}, {DeviceType::kCuda, 0}};
        }),
        "ep dispatch: x.row_data is uint8[8, 32] on cuda:0, but must be on cpu as the stream");
    EXPECT_EQ(with_rows([](QuantizedView& v) { v.spec.row_scaled = false; }),
              "ep dispatch: rows is not row_scaled, but each row brings its scale");
    EXPECT_EQ(with_rows([](QuantizedView& v) { v.tensor_scale = v.tensor_scale.slice(0, 0, 8); }),
              "ep dispatch: rows.tensor_scale is float32[8], expected float32[256]");
    EXPECT_EQ(with_rows([](QuantizedView& v) { v.col_data = v.row_data; }),
              "ep dispatch: rows has a col direction, but rows alone travel; make it of the rows "
              "that came");
    EXPECT_EQ(with_rows([](QuantizedView& v) { v.layout = ScaleLayout::kPadded; }),
              "ep dispatch: rows wants padded scales; those of nvfp4 are written compact or "
              "sm100_swizzled");
    EXPECT_EQ(with_rows([](QuantizedView& v) { v.layout = ScaleLayout::kSm90MnMajor; }),
              "ep dispatch: rows wants sm90_mn_major scales; those of nvfp4 are written compact or "
              "sm100_swizzled");
    EXPECT_EQ(with_rows([](QuantizedView& v) { v.layout = ScaleLayout::kSm100Swizzled; }),
              "ep dispatch: rows.row_scales is e4m3[256, 4], expected uint8[1024]");
  });
}

TEST_F(Arguments, SwizzledScalesNeedWholeTiles) {
  run(
      [&](EpGroup& group, const EpPlan& plan) {
        const QuantizedTensor x = tensor(PayloadFormat::kMXFP8, 8),
                              y = tensor(PayloadFormat::kMXFP8, 256);
        QuantizedView rows = y;
        rows.layout = ScaleLayout::kSm100Swizzled;
        EXPECT_EQ(
            error_of([&] { dispatch(group, plan, {.x_TD = x.view(), .rows_CD = rows}, {}); }),
            "ep dispatch: rows wants sm100_swizzled scales with alignment 16 and capacity 256; "
            "both must be multiples of 128");
      },
      16);
}

TEST_F(Arguments, SumsTakeNoQuantizedRows) {
  run([&](EpGroup& group, const EpPlan& plan) {
    const QuantizedTensor g = tensor(PayloadFormat::kFP8E5M2, 8),
                          gy = tensor(PayloadFormat::kFP8E5M2, 256);
    const Tensor slot_w(DType::kFloat32, {256}), out(DType::kBFloat16, {8, 64});
    EXPECT_EQ(
        error_of([&] {
          combine_backward(group, plan, {.g_TD = g.view(), .slot_w = slot_w, .gy_CD = gy.view()},
                           {});
        }),
        "ep combine_backward: g is fp8_block_1x128[8, 64], which slot_w cannot scale: rows are "
        "not requantized");
    const TensorView codes = gy.view().row_data;
    EXPECT_EQ(error_of([&] { combine(group, plan, {.y_CD = codes, .out_TD = out}, {}); }),
              "ep combine: y is e5m2[256, 64]; rows are bfloat16, float16 or float32");
    EXPECT_EQ(
        error_of([&] { dispatch_backward(group, plan, {.g_rows_CD = codes, .gx_TD = out}, {}); }),
        "ep dispatch_backward: g_rows is e5m2[256, 64]; rows are bfloat16, float16 or float32");
  });
}

// Memory for quantized rows alone is too short for the sums of a layer.
TEST(EpQuantized, MemoryForQuantizedRowsIsShort) {
  Threads::run(1, [](comm::Communicator& world) {
    const ExpertMap map(4, 1);
    const EpLimits limits{.tokens = 8, .model = 512, .topk = 2, .widest = PayloadFormat::kFP8E4M3};
    EpGroup group = EpGroup::create(world, map, limits, {});
    EXPECT_EQ(group.bytes().record, 640);
    const Tensor idx(DType::kInt32, {8, 2}), y(DType::kBFloat16, {16, 512}),
        out(DType::kBFloat16, {8, 512});
    const PrepareArgs args{.idx_TK = idx, .capacity = 16};
    const PlanMemory memory(map, limits, args);
    const EpPlan plan = prepare(group, args, memory.view(), {});
    EXPECT_EQ(
        error_of([&] { combine(group, plan, {.y_CD = y, .out_TD = out}, {}); }),
        "ep combine, group \"ep\": bfloat16[16, 512] needs 1152 bytes a row, reserved are 640 "
        "(EpLimits model, topk, widest, rank_fp32)");
    EpLimits more = limits;
    more.widest = PayloadFormat::kBF16;
    group.reserve(more);
    combine(group, plan, {.y_CD = y, .out_TD = out}, {});
    group.reserve(limits);  // fits
    EXPECT_EQ(group.limits().widest, PayloadFormat::kBF16);
  });
}

// A peer that sends another format is named at once.
TEST(EpQuantized, FormatsOfRanksMustAgree) {
  std::vector<std::string> texts(2);
  comm::run_thread_ranks(2, {.deadline = Seconds(5)}, [&](comm::Communicator& world) {
    const int me = world.rank();
    const ExpertMap map(4, 2);
    const EpLimits limits{.tokens = 4, .model = 64, .topk = 2};
    EpGroup group = EpGroup::create(world, map, limits, {.name = "moe"});
    Mat<int64_t> idx({0, 2, 1, 3, 0, 2, 1, 3}, 2);
    const PrepareArgs args{.idx_TK = idx.view(), .capacity = 8};
    const PlanMemory memory(map, limits, args);
    const EpPlan plan = prepare(group, args, memory.view(), {});
    const PayloadFormat format = me == 0 ? PayloadFormat::kFP8E4M3 : PayloadFormat::kFP8E5M2;
    const QuantizedTensor x(spec_of(format), 4, 64, Directions{}),
        rows(spec_of(format), 8, 64, Directions{});
    texts[me] =
        error_of([&] { dispatch(group, plan, {.x_TD = x.view(), .rows_CD = rows.view()}, {}); });
    world.barrier();
    group.close();
  });
  const std::string named =
      "ep, group \"moe\", epoch 2: rank {} runs dispatch({}, 68 B) of plan 1, rank {} runs "
      "dispatch({}, 68 B) of plan 1";
  const std::string by0 = text(named, 0, "fp8_e4m3", 1, "fp8_e5m2");
  const std::string by1 = text(named, 1, "fp8_e5m2", 0, "fp8_e4m3");
  for (const std::string& said : texts) EXPECT_TRUE(said == by0 || said == by1) << said;
}

}  // namespace
}  // namespace moiety::moe::quantized
