// Training with sharded master weights that are cast into one low-precision weight, against
// training that quantizes the whole bf16 weight each step: the same losses, bit for bit.
#include <bit>

#include <gtest/gtest.h>

#include "moiety/quant/dequantize.h"
#include "moiety/quant/partial_cast.h"
#include "moiety/quant/quantize.h"
#include "tests/quant/partial_cast_harness.h"

namespace moiety::quant {
namespace {

constexpr int64_t kTokens = 12, kIn = 45, kHidden = 50, kOut = 21;
constexpr int kSteps = 200, kWeights = 2;
constexpr float kRate = 0.02f;
constexpr Shape kShapes[kWeights] = {{kHidden, kIn}, {kOut, kHidden}};

// The state of delayed scaling of one weight.
struct Delayed {
  float history[4] = {}, scale = 1, inverse = 1, step_amax = 0;
  int32_t position = 0;
  DelayedScaling view() {
    return {TensorView(history, DType::kFloat32, {4}), TensorView(&position, DType::kInt32, {1}),
            TensorView(&scale, DType::kFloat32, {1}), TensorView(&inverse, DType::kFloat32, {1}),
            TensorView(&step_amax, DType::kFloat32, {1})};
  }
};

// The source of the low-precision weights: the whole masters or, with `ranks`, their shards.
class Caster {
 public:
  Caster(const QuantSpec& spec, bool delayed, int ranks, const std::vector<Tensor>& masters)
      : masters_(masters), spec_(spec), ranks_(ranks) {
    for (const Shape s : kShapes)
      weights_.emplace_back(spec, s.rows, s.cols, Directions{true, false});
    if (delayed) {
      for (Delayed& d : states_) scalings_.push_back(d.view());
      std::vector<DelayedScalingItem> items;
      for (const DelayedScaling& d : scalings_) items.push_back({d, spec.element});
      updates_.emplace(items);
    }
    for (int r = 0; r < ranks; ++r) add_rank(r);
  }

  // The weights as the masters are now, in float32.
  std::vector<Tensor> cast() {
    if (ranks_ == 0)
      cast_whole();
    else
      cast_shards();
    if (updates_) update_delayed_scales(*updates_, Stream());
    std::vector<Tensor> out;
    for (int w = 0; w < kWeights; ++w) {
      out.emplace_back(DType::kFloat32,
                       std::initializer_list<int64_t>{kShapes[w].rows, kShapes[w].cols});
      dequantize(weights_[w], Direction::kRow, out.back(), {}, Stream());
    }
    return out;
  }

 private:
  void add_rank(int r) {
    std::vector<PartialCastItem> items;
    std::vector<PartialCastArrays> arrays;
    for (int w = 0; w < kWeights; ++w) {
      const Shape s = kShapes[w];
      const std::vector<int64_t> cuts = random_cuts(s.rows * s.cols, ranks_, 7 + w);
      items.push_back({spec_, s.rows, s.cols, cuts[r], cuts[r + 1], false, updates_.has_value()});
      PartialCastArrays& a = arrays.emplace_back();
      const TensorView flat = masters_[w].view().reshape({s.rows * s.cols});
      if (cuts[r] < cuts[r + 1]) a.master = flat.slice(0, cuts[r], cuts[r + 1]);
      a.out = weights_[w];  // of all ranks: writing it is the gather
      if (updates_) a.delayed = &scalings_[w];
    }
    plans_.push_back(std::make_unique<PartialCastPlan>(items, false));
    tables_.emplace_back(*plans_.back(), arrays);
    reductions_.emplace_back(DType::kUInt8,
                             std::initializer_list<int64_t>{plans_.back()->reduction_bytes()});
  }

  void cast_whole() {
    for (int w = 0; w < kWeights; ++w) {
      const Tensor rounded(DType::kBFloat16, {kShapes[w].rows, kShapes[w].cols});
      for (int64_t i = 0; i < rounded.view().numel(); ++i) {
        rounded.data<bf16>()[i] = bf16(masters_[w].data<float>()[i]);
      }
      QuantizeOptions options;
      if (updates_) options.delayed = &scalings_[w];
      quantize(rounded, weights_[w], options, Stream());
    }
  }

  void cast_shards() {
    std::vector<std::byte*> buffers;
    for (int r = 0; r < ranks_; ++r) {
      partial_amax(*plans_[r], tables_[r], reductions_[r], Stream());
      buffers.push_back(static_cast<std::byte*>(reductions_[r].view().raw()));
    }
    for (const auto over : {PartialReduction::Over::kTensor, PartialReduction::Over::kShard}) {
      reduce_max(plans_[0]->reductions(), over, buffers);
    }
    for (int r = 0; r < ranks_; ++r) partial_cast(*plans_[r], tables_[r], reductions_[r], Stream());
  }

  const std::vector<Tensor>& masters_;
  QuantSpec spec_;
  int ranks_;
  std::vector<QuantizedTensor> weights_;
  Delayed states_[kWeights];
  std::vector<DelayedScaling> scalings_;
  std::optional<DelayedScalingTable> updates_;
  std::vector<std::unique_ptr<PartialCastPlan>> plans_;
  std::vector<PartialCastTable> tables_;
  std::vector<Tensor> reductions_;
};

float unit(uint64_t seed, int64_t i) {
  return static_cast<float>(mix(seed, static_cast<uint64_t>(i)) >> 40) * 0x1p-23f - 1.0f;
}

// out[n, m] = a[n, k] b[m, k]^T
void multiply(const float* a, const float* b, float* out, int64_t n, int64_t k, int64_t m) {
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j < m; ++j) {
      float sum = 0;
      for (int64_t l = 0; l < k; ++l) sum += a[i * k + l] * b[j * k + l];
      out[i * m + j] = sum;
    }
  }
}

// One step of gradient descent on half the mean squared error; returns it.
float step(const std::vector<Tensor>& weights, std::vector<Tensor>& masters, int number) {
  std::vector<float> x(kTokens * kIn), h(kTokens * kHidden), y(kTokens * kOut), g(kTokens * kOut);
  for (int64_t i = 0; i < std::ssize(x); ++i) x[i] = unit(100 + number % 5, i);
  multiply(x.data(), weights[0].data<float>(), h.data(), kTokens, kIn, kHidden);
  for (float& v : h) v = std::max(v, 0.0f);
  multiply(h.data(), weights[1].data<float>(), y.data(), kTokens, kHidden, kOut);
  float loss = 0;
  for (int64_t i = 0; i < std::ssize(y); ++i) {
    const float wanted = x[i / kOut * kIn + i % kOut] - x[i / kOut * kIn + i % kOut + 20];
    g[i] = y[i] - wanted;
    loss += 0.5f * g[i] * g[i];
  }
  for (int64_t t = 0; t < kTokens; ++t) {
    for (int64_t j = 0; j < kHidden; ++j) {
      float back = 0;
      for (int64_t o = 0; o < kOut; ++o) {
        back += g[t * kOut + o] * weights[1].data<float>()[o * kHidden + j];
        masters[1].data<float>()[o * kHidden + j] -= kRate * g[t * kOut + o] * h[t * kHidden + j];
      }
      if (h[t * kHidden + j] == 0) continue;
      for (int64_t i = 0; i < kIn; ++i) {
        masters[0].data<float>()[j * kIn + i] -= kRate * back * x[t * kIn + i];
      }
    }
  }
  return loss / kTokens;
}

std::vector<float> losses(const QuantSpec& spec, bool delayed, int ranks) {
  std::vector<Tensor> masters;
  for (int w = 0; w < kWeights; ++w) {
    masters.emplace_back(DType::kFloat32,
                         std::initializer_list<int64_t>{kShapes[w].rows, kShapes[w].cols});
    for (int64_t i = 0; i < masters[w].view().numel(); ++i) {
      masters[w].data<float>()[i] = 0.3f * unit(w, i);
    }
  }
  Caster caster(spec, delayed, ranks, masters);
  std::vector<float> out;
  for (int n = 0; n < kSteps; ++n) out.push_back(step(caster.cast(), masters, n));
  return out;
}

TEST(PartialCastTraining, LossesAreThoseOfWeightsQuantizedWhole) {
  for (const Format f :
       {Format::kFp8Tensor, Format::kFp8Block1x128, Format::kFp8Block128x128, Format::kMxfp8,
        Format::kMxfp8Tile32, Format::kNvfp4, Format::kNvfp4Tile16}) {
    for (const bool delayed : {false, true}) {
      if (delayed && f != Format::kFp8Tensor) continue;
      const std::string what = text("{}{}", name(f), delayed ? " delayed" : "");
      const std::vector<float> whole = losses(QuantSpec::of(f), delayed, 0);
      EXPECT_LT(whole.back(), 0.5f * whole.front()) << what;
      for (const int ranks : {1, 3}) {
        const std::vector<float> sharded = losses(QuantSpec::of(f), delayed, ranks);
        for (int n = 0; n < kSteps; ++n) {
          ASSERT_EQ(std::bit_cast<uint32_t>(sharded[n]), std::bit_cast<uint32_t>(whole[n]))
              << what << ", step " << n << ", " << ranks << " ranks";
        }
      }
    }
  }
}

}  // namespace
}  // namespace moiety::quant
