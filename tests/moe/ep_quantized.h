// Quantized rows against the oracle, over a pairwise cover of formats, layouts, shapes and
// routings; by bytes, with everything that is written poisoned first. Codes and scales are random
// bytes: what moves is not looked at. Typed by what runs it (ep_helpers.h).
#pragma once

#include "tests/moe/ep_conformance.h"

namespace moiety::moe::quantized {

inline constexpr uint8_t kPoison = 0xFF;

struct Case : conformance::Case {
  PayloadFormat format;
  bool gemm_layout;  // of the received scales; else compact
  bool one_scale;    // NVFP4: a tensor scale for each rank; else one for each row
  bool gradient;     // combine_backward; else dispatch

  bool swizzled() const { return gemm_layout && format >= PayloadFormat::kMXFP8; }
  std::string describe() const {
    return text("{} gemm layout {} one scale {} gradient {}: {}", name(format), gemm_layout,
                one_scale, gradient, conformance::Case::describe());
  }
};

inline std::vector<Case> all_cases() {
  const std::vector<int> topk{1, 2, 8}, experts{1, 6, 64}, chunk_rows{16, 1, 3};
  const std::vector<int64_t> tokens{0, 1, 17, 100}, alignment{1, 3, 16, 128}, peer_rows{0, 1, 9};
  const std::vector<int64_t> model{1, 7, 16, 17, 127, 128, 129, 300, 1024};
  const std::vector<int> direct{-1, 0xFF, 0xAA, 0x25};
  std::vector<Case> out;
  for (const auto& r :
       pairwise_cover({4, 2, 2, 2, 4, 3, 3, 2, 3, 2, 4, 3, 9, 4, 3, 7, 8, 3, 2, 2, 2, 2, 4})) {
    int i = 0;
    Case c{};
    c.format = static_cast<PayloadFormat>(static_cast<int>(PayloadFormat::kFP8E4M3) + r[i++]);
    c.gemm_layout = r[i++];
    c.one_scale = r[i++];
    c.gradient = r[i++];
    c.ranks = 1 + r[i++];
    c.topk = topk[r[i++]];
    c.experts = experts[r[i++]];
    c.depth = 1 + r[i++];
    c.chunk_rows = chunk_rows[r[i++]];
    c.threads = 1 + r[i++];
    c.tokens = tokens[r[i++]];
    c.tokens_pattern = r[i++];
    c.model = model[r[i++]];
    c.alignment = alignment[r[i++]];
    c.peer_rows = peer_rows[r[i++]];
    c.routing = static_cast<Routing>(r[i++]);
    c.capacity = static_cast<conformance::Capacity>(r[i++]);
    c.overflow = static_cast<OverflowPolicy>(r[i++]);
    c.weights = r[i++];
    c.odd = r[i++];
    c.permuted = r[i++];
    c.zero_tail = r[i++];
    c.direct = direct[r[i++]];
    if (c.swizzled()) c.alignment = 128;
    if (c.gradient) c.weights = c.zero_tail = false;
    out.push_back(c);
  }
  return out;
}

inline QuantSpec spec_of(PayloadFormat format) {
  if (format == PayloadFormat::kMXFP8) return QuantSpec::of(Format::kMxfp8);
  QuantSpec spec =
      QuantSpec::of(format == PayloadFormat::kNVFP4 ? Format::kNvfp4 : Format::kFp8Block1x128);
  if (format == PayloadFormat::kFP8E5M2) spec.element = DType::kE5M2;
  return spec;
}

// Section 4's table.
inline ref::QuantizedBytes row_bytes(PayloadFormat format, int64_t d) {
  if (format == PayloadFormat::kMXFP8) return {d, (d + 31) / 32, 0};
  if (format == PayloadFormat::kNVFP4) return {(d + 15) / 16 * 8, (d + 15) / 16, 4};
  return {d, (d + 127) / 128 * 4, 0};
}

// A matrix as bytes, `width` of them an element, poisoned. `odd`: base and rows are off by some
// elements, and what lies between the rows must stay poison.
class Bytes {
 public:
  Bytes(int64_t rows, int64_t cols, int64_t width, bool odd)
      : rows_(rows),
        cols_(cols),
        width_(width),
        stride_(cols + (odd ? 3 : 0)),
        first_(odd ? 1 : 0),
        data_((first_ + rows * stride_ + 1) * width, kPoison) {}
  Bytes(const std::vector<uint8_t>& values, int64_t cols, int64_t width, bool odd)
      : Bytes(static_cast<int64_t>(values.size()) / (cols * width), cols, width, odd) {
    for (int64_t r = 0; r < rows_; ++r) {
      std::copy_n(values.begin() + r * cols_ * width_, cols_ * width_, row(r));
    }
  }

  TensorView view(DType dtype) {
    const int64_t sizes[] = {rows_, cols_}, strides[] = {stride_, 1};
    return {rows_ ? row(0) : nullptr, dtype, sizes, strides};
  }
  TensorView storage() {
    return {data_.data(), DType::kUInt8, {static_cast<int64_t>(data_.size())}};
  }
  // A vector of one column.
  TensorView vector(DType dtype) {
    const int64_t sizes[] = {rows_}, strides[] = {stride_};
    return {rows_ ? row(0) : nullptr, dtype, sizes, strides};
  }
  void expect(const std::vector<uint8_t>& expected, const std::string& what) {
    const int64_t bytes = cols_ * width_;
    ASSERT_EQ(static_cast<int64_t>(expected.size()), rows_ * bytes) << what;
    std::vector<uint8_t> all(data_.size(), kPoison);
    for (int64_t r = 0; r < rows_; ++r) {
      std::copy_n(expected.begin() + r * bytes, bytes,
                  all.begin() + (first_ + r * stride_) * width_);
    }
    const auto [at, wanted] = std::mismatch(data_.begin(), data_.end(), all.begin());
    if (at == data_.end()) return;
    const int64_t byte = at - data_.begin() - first_ * width_, row = byte / (stride_ * width_);
    FAIL() << what << ", row " << row << ", byte " << byte % (stride_ * width_) << " is "
           << int{*at} << ", expected " << int{*wanted};
  }

 private:
  uint8_t* row(int64_t r) { return data_.data() + (first_ + r * stride_) * width_; }
  int64_t rows_, cols_, width_, stride_, first_;
  std::vector<uint8_t> data_;
};

// One rank's quantized rows in memory.
struct RowMemory {
  // Sent: filled with `values` of this rank. `one_scale`: of NVFP4, a tensor scale for all rows.
  RowMemory(PayloadFormat format, int64_t model, const ref::QuantizedRows& values, int rank,
            bool one_scale, bool odd)
      : RowMemory(format, model, values.data[rank], values.scales[rank], values.row_scale[rank],
                  odd) {
    if (format != PayloadFormat::kNVFP4 || !one_scale) return;
    std::vector<uint8_t> pair(8, kPoison);
    if (!values.row_scale[rank].empty()) std::copy_n(values.row_scale[rank].begin(), 4, &pair[0]);
    row_scale = Bytes(pair, 1, 4, false);
    view.spec.row_scaled = false;
    view.tensor_scale = row_scale.vector(DType::kFloat32);
  }
  // Memory that receives rows.
  RowMemory(PayloadFormat format, int64_t model, int64_t rows, bool gemm_layout, bool odd)
      : RowMemory(format, model, poison(rows, row_bytes(format, model).data),
                  poison(rows, row_bytes(format, model).scales),
                  poison(rows, row_bytes(format, model).row_scale), odd) {
    if (!gemm_layout) return;
    const bool swizzled = format >= PayloadFormat::kMXFP8;
    const int64_t cols = row_bytes(format, model).scales / (swizzled ? 1 : 4);
    view.layout = swizzled ? ScaleLayout::kSm100Swizzled : ScaleLayout::kSm90MnMajor;
    if (swizzled) {
      scales = Bytes((rows + 127) / 128 * 512 * ((cols + 3) / 4), 1, 1, false);
      view.row_scales = scales.vector(DType::kUInt8);
    } else {
      scales = Bytes(cols, (rows + 3) / 4 * 4, 4, false);
      view.row_scales = scales.view(DType::kFloat32);
    }
  }

  template <class Place>
  QuantizedView at(Place& place) {
    QuantizedView out = view;
    out.row_data = place(data.storage(), view.row_data);
    out.row_scales = place(scales.storage(), view.row_scales);
    if (view.tensor_scale.defined()) {
      out.tensor_scale = place(row_scale.storage(), view.tensor_scale);
    }
    return out;
  }

  Bytes data, scales, row_scale;
  QuantizedView view;

 private:
  static std::vector<uint8_t> poison(int64_t rows, int64_t bytes) {
    return std::vector<uint8_t>(rows * bytes, kPoison);
  }
  RowMemory(PayloadFormat format, int64_t model, const std::vector<uint8_t>& data_bytes,
            const std::vector<uint8_t>& scale_bytes, const std::vector<uint8_t>& row_scale_bytes,
            bool odd)
      : data(data_bytes, row_bytes(format, model).data, 1, odd),
        scales(scale_bytes, row_bytes(format, model).scales / scale_width(format),
               scale_width(format), odd),
        row_scale(row_scale_bytes, 1, 4, odd) {
    const bool fp4 = format == PayloadFormat::kNVFP4;
    view.spec = spec_of(format);
    view.spec.row_scaled = fp4;
    view.row_data = data.view(fp4 ? DType::kUInt8 : view.spec.element);
    view.row_scales = scales.view(fp4                               ? DType::kE4M3
                                  : format == PayloadFormat::kMXFP8 ? DType::kUE8M0
                                                                    : DType::kFloat32);
    if (fp4) view.tensor_scale = row_scale.vector(DType::kFloat32);
    view.rows = view.row_data.size(0);
    view.cols = model;
  }
  static int64_t scale_width(PayloadFormat format) {
    return format >= PayloadFormat::kMXFP8 ? 1 : 4;
  }
};

// Inputs of all ranks, and what all should get.
struct Problem {
  Problem(const Case& the_case, int seed)
      : c(the_case),
        rng(seed),
        map(conformance::make_map(c, rng)),
        bytes(row_bytes(c.format, c.model)) {
    sizes = conformance::make_sizes(c, map, idx, rng);
    for (int64_t& n : sizes.rows) n = c.swizzled() ? (n + 127) / 128 * 128 : n;
    plan = ref::make_plan({map, c.topk, c.alignment, sizes.in_force, idx, c.peer_rows}, sizes.rows);
    x.data = random_bytes(bytes.data);
    x.scales = random_bytes(bytes.scales);
    x.row_scale = random_bytes(bytes.row_scale);
    for (std::vector<uint8_t>& rank : x.row_scale) {
      for (size_t i = 4; c.one_scale && i < rank.size(); ++i) rank[i] = rank[i % 4];
    }
    w = conformance::make_values<float>(conformance::Values::kRandom, sizes.tokens, c.topk, rng);

    for (const int64_t n : sizes.rows) {
      rows.data.emplace_back(n * bytes.data, kPoison);
      rows.scales.emplace_back(n * bytes.scales, kPoison);
      rows.row_scale.emplace_back(n * bytes.row_scale, kPoison);
      slot_w.emplace_back(n, poison<float>());
    }
    ref::dispatch(plan, bytes, x, c.weights ? &w : nullptr, c.zero_tail, rows, slot_w);
    for (int r = 0; c.gemm_layout && r < c.ranks; ++r) {
      rows.scales[r] = c.swizzled()
                           ? ref::swizzled_scales(plan.rank[r], sizes.rows[r], bytes.scales,
                                                  c.zero_tail, rows.scales[r], kPoison)
                           : ref::column_major_scales(plan.rank[r], sizes.rows[r], bytes.scales / 4,
                                                      c.zero_tail, rows.scales[r], kPoison);
    }
  }
  ref::PerRank<uint8_t> random_bytes(int64_t row) {
    ref::PerRank<uint8_t> out;
    for (const int64_t n : sizes.tokens) {
      auto& rank = out.emplace_back(n * row);
      for (uint8_t& byte : rank) byte = static_cast<uint8_t>(rng());
    }
    return out;
  }

  Case c;
  std::mt19937 rng;
  ExpertMap map;
  ref::QuantizedBytes bytes;
  ref::PerRank<int64_t> idx;
  conformance::Sizes sizes;
  ref::Plan plan;
  ref::QuantizedRows x, rows;
  ref::PerRank<float> w, slot_w;
};

template <class Place = OnHost>
void run_rank(comm::Communicator& world, const Problem& p, EpTransport transport,
              Place place = {}) {
  const Case& c = p.c;
  const int me = world.rank();
  // Every second case has memory for quantized rows alone.
  const EpLimits limits{.tokens = p.sizes.tokens_max,
                        .model = c.model,
                        .topk = c.topk,
                        .widest = c.odd ? c.format : PayloadFormat::kBF16,
                        .depth = c.depth,
                        .peer_rows = c.peer_rows};
  EpGroup group = EpGroup::create(world, p.map, limits,
                                  {.chunk_rows = c.chunk_rows,
                                   .transport = transport,
                                   .zero_copy = c.direct < 0 ? ZeroCopy::kOff : ZeroCopy::kAuto,
                                   .device = place.stream.device()});
  if (group.bytes().total > 0) poison_memory(group, place.stream);
  if constexpr (requires { place.enter(group, world); }) place.enter(group, world);
  world.barrier();

  Mat<int64_t> idx(p.idx[me], c.topk);
  Tensor limit(DType::kInt64, {1});
  *limit.data<int64_t>() = p.sizes.in_force[me];
  const PrepareArgs prepare_args{.idx_TK = place(idx.storage(), idx.view()),
                                 .alignment = c.alignment,
                                 .capacity = p.sizes.rows[me],
                                 .capacity_limit = place(limit, limit),
                                 .overflow = c.overflow};
  const PlanMemory memory(p.map, limits, prepare_args);
  const EpPlan plan =
      prepare(group, prepare_args, place(memory.view(), memory.view()), place.stream);
  place.back();
  expect_plan(place.plan(plan), p.plan, me);

  if constexpr (std::is_same_v<Place, OnHost>) {
    if (c.direct >= 0 && transport == EpTransport::kMapped) {
      const int64_t most = *std::max_element(p.sizes.rows.begin(), p.sizes.rows.end()) + 256;
      const int64_t row = 2 * (c.model + 64) + 4 * (c.topk + 3) + 64;
      place.attach(group, world, (most + p.sizes.tokens_max) * row, c.direct);
    }
  }
  RowMemory x(c.format, c.model, p.x, me, c.one_scale, c.odd);
  RowMemory rows(c.format, c.model, p.sizes.rows[me], c.gemm_layout, c.odd);
  Mat<float> w(p.w[me], c.topk, c.odd), slot_w(p.sizes.rows[me], 1, c.odd);
  if (c.gradient) {
    combine_backward(group, plan, {.g_TD = x.at(place), .gy_CD = rows.at(place)}, place.stream);
  } else {
    DispatchArgs args{.x_TD = x.at(place), .rows_CD = rows.at(place), .zero_tail = c.zero_tail};
    if (c.weights) {
      args.w_TK = place(w.storage(), w.view());
      args.slot_w = place(slot_w.storage(), slot_w.vector());
    }
    dispatch(group, plan, args, place.stream);
  }
  place.back();
  rows.data.expect(p.rows.data[me], "data");
  rows.scales.expect(p.rows.scales[me], "scales");
  rows.row_scale.expect(p.rows.row_scale[me], "row_scale");
  slot_w.expect(p.slot_w[me], false, "slot_w");
  group.close();
}

// The cases that Transport can run, up to the first failure.
template <class Transport>
void run_cases(int first_seed) {
  std::vector<Case> cases = all_cases();
  EXPECT_LE(cases.size(), 200u);
  for (size_t i = 0; i < cases.size() && !testing::Test::HasFailure(); ++i) {
    Case& c = cases[i];
    if (!Transport::has(c.ranks)) continue;
    conformance::shrink(c);
    const int seed = first_seed + static_cast<int>(i);
    const Problem problem(c, seed);
    Transport::run(c.ranks, [&](comm::Communicator& world) {
      SCOPED_TRACE(text("rank {} of case {}: {}", world.rank(), seed, c.describe()));
      set_thread_budget(c.threads);
      run_rank(world, problem, Transport::kTransport);
    });
  }
}

}  // namespace moiety::moe::quantized
