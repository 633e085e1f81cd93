// Weights that the optimizer keeps in low-precision formats: under every layout the bytes of
// quantize() of the whole master rounded to bf16.
#include <cstring>
#include <map>
#include <mutex>

#include <gtest/gtest.h>

#include "moiety/base/rng.h"
#include "moiety/comm/thread_group.h"
#include "moiety/formats/bf16.h"
#include "moiety/optim/distributed_optimizer.h"
#include "moiety/quant/quantize.h"
#include "tests/optim/model_specs.h"
#include "tests/support/bits.h"

namespace moiety::optim {
namespace {

using comm::Communicator;

constexpr int64_t kColumns = 48, kExpertHeight = 40;

ParamSpec in_format(ParamSpec spec, const std::optional<QuantSpec>& format) {
  spec.format = format;
  spec.format_class = 1;
  return spec;
}

// Norm, router and head in the storage dtype; matrices and experts in the format.
std::vector<ParamSpec> specs_of(int ep, int ep_ranks, const std::optional<QuantSpec>& format) {
  std::vector<ParamSpec> out{vector_spec("norm.weight", kColumns),
                             in_format(matrix_spec("attn.qkv.weight", 37, kColumns), format),
                             in_format(matrix_spec("attn.o.weight", 5, 16), format),
                             matrix_spec("head.weight", 11, kColumns)};
  const int64_t local = kExperts / ep_ranks;
  ParamSpec fc = matrix_spec("experts.weight", local * kExpertHeight, kColumns);
  fc.tensors[0].shape = {kExperts, kExpertHeight, kColumns};
  fc.row_map = {{0, 0, ep * local * kExpertHeight, local * kExpertHeight}};
  fc.shape = {local, kExpertHeight, kColumns};
  fc.expert = true;
  fc.domain = {gtp::Axis::kEdp};
  fc.kind = ParameterClass::kExpert;
  out.push_back(in_format(fc, format));
  return out;
}

// Different in all elements, alike on all ranks but for which of them has it.
void contribute(Parameter& p, int step, bool mine) {
  for_each_element(p.spec, [&](int64_t at, const LogicalTensor& tensor, int64_t i) {
    const PhiloxBlock w = philox(
        {5, 5}, {static_cast<uint32_t>(i), static_cast<uint32_t>(step), 0, tensor_id(tensor.name)});
    p.grad.data<float>()[at] = mine ? normal_from_word(w[0]) : 0.0f;
  });
  p.overwrite = false;
}

// Everything that a product reads of a weight in a format.
std::string bytes_of(const QuantizedView& q) {
  std::string all;
  for (const TensorView* x : {&q.row_data, &q.row_scales, &q.col_data, &q.col_scales}) {
    all += bytes_of(*x) + "|";
  }
  if (is_tensor_scaled(q.spec.format)) {
    all += bytes_of(q.amax.slice(0, 0, 1)) + bytes_of(q.tensor_scale.slice(0, 0, 1));
  }
  return all;
}

using Bytes = std::map<std::string, std::string>;  // by tensor, of experts by "name/expert"

struct Outcome {
  Bytes weights;                                      // as the parameters hold them
  std::map<std::string, std::vector<float>> masters;  // whole
  std::vector<float> norms;
};

Outcome train(int ranks, int ep_ranks, const std::optional<QuantSpec>& format,
              const std::function<void(DistributedOptimizer&)>& after = {}) {
  Outcome out;
  std::mutex mutex;
  comm::run_thread_ranks(ranks, {}, [&](Communicator& world) {
    const int ep = world.rank() % ep_ranks;
    const GridGroups groups({.dp = ranks, .ep = ep_ranks, .edp = ranks / ep_ranks}, world);
    OptimizerConfig config;
    config.bucket_elements = 3000;  // several buckets
    DistributedOptimizer optimizer(specs_of(ep, ep_ranks, format), config, groups);
    optimizer.initialize(7, {});
    for (int step = 0; step < 3; ++step) {
      for (Parameter& p : optimizer.parameters()) {
        contribute(p, step, groups.of(p.spec.domain).rank() == 0);
      }
      const StepReport report =
          optimizer.step({.lr = 0.1, .clip = 0, .tokens = world.rank() == 0}, {});
      if (world.rank() == 0) out.norms.push_back(report.norm);
    }
    if (after) after(optimizer);
    const std::lock_guard lock(mutex);
    for (const Parameter& p : optimizer.parameters()) {
      if (p.quantized.empty()) {
        const std::string name = p.spec.expert ? p.spec.name + text("/ep{}", ep) : p.spec.name;
        const auto [it, fresh] = out.weights.emplace(name, bytes_of(p.weight));
        EXPECT_EQ(it->second == bytes_of(p.weight), true) << name;
        continue;
      }
      EXPECT_FALSE(p.weight.defined());
      for (size_t e = 0; e < p.quantized.size(); ++e) {
        const std::string name =
            p.spec.expert ? p.spec.name + text("/{}", ep * kExperts / ep_ranks + e) : p.spec.name;
        const auto [it, fresh] = out.weights.emplace(name, bytes_of(p.quantized[e]));
        EXPECT_EQ(it->second == bytes_of(p.quantized[e]), true) << name << " differs over ranks";
      }
    }
    for (const StatePiece& piece : optimizer.state_view()) {
      if (piece.slot != "weight") continue;
      std::vector<float>& whole = out.masters[piece.tensor];
      int64_t n = 1, first = 0, count = 1;
      for (const int64_t s : piece.shape) n *= s;
      for (size_t d = 0; d < piece.shape.size(); ++d) {
        first = first * piece.shape[d] + piece.box.start[d];
        count *= piece.box.size[d];
      }
      // Boxes of these tensors are consecutive: whole trailing dimensions, or a part of one row.
      whole.resize(n);
      std::copy_n(static_cast<const float*>(piece.data), count, whole.begin() + first);
    }
  });
  return out;
}

std::string quantized_whole(const QuantSpec& spec, const float* master, int64_t rows,
                            int64_t cols) {
  const Tensor x(DType::kBFloat16, {rows, cols});
  for (int64_t i = 0; i < rows * cols; ++i) x.data<bf16>()[i] = bf16(master[i]);
  const QuantizedTensor q(spec, rows, cols, {true, spec.format == Format::kMxfp8});
  quant::quantize(x, q, {}, {});
  return bytes_of(q.view());
}

QuantSpec fp32_scales() {
  QuantSpec spec = QuantSpec::of(Format::kFp8Block128x128);
  spec.pow2_scales = false;
  return spec;
}

class QuantizedWeights : public testing::TestWithParam<QuantSpec> {};
INSTANTIATE_TEST_SUITE_P(
    Formats, QuantizedWeights,
    testing::Values(QuantSpec::of(Format::kFp8Tensor), QuantSpec::of(Format::kFp8Block128x128),
                    fp32_scales(), QuantSpec::of(Format::kMxfp8),
                    QuantSpec::of(Format::kMxfp8Tile32), QuantSpec::of(Format::kNvfp4Tile16)),
    [](const auto& info) { return text("{}_{}", name(info.param.format), info.index); });

TEST_P(QuantizedWeights, AreThoseOfTheWholeMastersUnderEveryLayout) {
  const Outcome plain = train(1, 1, std::nullopt);
  for (const auto& [ranks, ep] :
       std::vector<std::pair<int, int>>{{1, 1}, {2, 1}, {2, 2}, {3, 1}, {4, 2}, {4, 4}, {8, 2}}) {
    const std::string what = text("{} ranks, ep {}", ranks, ep);
    const Outcome run = train(ranks, ep, GetParam());
    EXPECT_TRUE(run.masters == plain.masters) << what;
    EXPECT_NEAR(run.norms.back(), plain.norms.back(), 1e-6 * plain.norms.back()) << what;
    ASSERT_EQ(run.weights.size(), 8u) << what;
    const auto expect = [&](const std::string& tensor, const std::string& master, int64_t first,
                            int64_t rows, int64_t cols) {
      const float* values = run.masters.at(master).data() + first;
      EXPECT_TRUE(run.weights.at(tensor) == quantized_whole(GetParam(), values, rows, cols))
          << tensor << ", " << what;
    };
    expect("attn.qkv.weight", "attn.qkv.weight", 0, 37, kColumns);
    expect("attn.o.weight", "attn.o.weight", 0, 5, 16);
    for (int64_t e = 0; e < kExperts; ++e) {
      expect(text("experts.weight/{}", e), "experts.weight", e * kExpertHeight * kColumns,
             kExpertHeight, kColumns);
    }
    for (const char* tensor : {"norm.weight", "head.weight"}) {
      EXPECT_TRUE(run.weights.at(tensor) == plain.weights.at(tensor)) << tensor;
    }
  }
}

// Another format, or none: as if it had been the format from the start.
TEST_P(QuantizedWeights, ChangeTheirFormatInARun) {
  const auto formats = [](DistributedOptimizer& optimizer, const std::optional<QuantSpec>& format) {
    std::vector<std::optional<QuantSpec>> all;
    for (const Parameter& p : optimizer.parameters()) {
      all.push_back(p.spec.format_class == 1 ? format : std::nullopt);
    }
    optimizer.set_formats(all, {});
    optimizer.publish({});
  };
  for (const int ranks : {1, 2}) {
    const Outcome bf16_run = train(ranks, ranks, std::nullopt);
    const Outcome returned =
        train(ranks, ranks, GetParam(), [&](auto& optimizer) { formats(optimizer, std::nullopt); });
    EXPECT_TRUE(returned.weights == bf16_run.weights);
    const Outcome quantized = train(ranks, ranks, GetParam());
    const Outcome late =
        train(ranks, ranks, std::nullopt, [&](auto& optimizer) { formats(optimizer, GetParam()); });
    EXPECT_TRUE(late.weights == quantized.weights);
  }
}

TEST(QuantizedWeights, ABucketHasOneFormat) {
  comm::run_thread_ranks(1, {}, [](Communicator& world) {
    std::vector<ParamSpec> specs = specs_of(0, 1, QuantSpec::of(Format::kMxfp8));
    specs[1].format = std::nullopt;
    try {
      const GridGroups groups({}, world);
      const DistributedOptimizer optimizer(specs, {}, groups);
      FAIL();
    } catch (const Error& e) {
      EXPECT_NE(std::string(e.what()).find("share a bucket, not a format"), std::string::npos)
          << e.what();
    }
  });
}

}  // namespace
}  // namespace moiety::optim
