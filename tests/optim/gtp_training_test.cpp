// A model trained on weights that are kept in a format and cut over gtp, against the same model on
// bf16 weights that are quantized anew in every step by one process: losses and masters, bit for
// bit.
#include <algorithm>
#include <cmath>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "moiety/base/copy.h"
#include "moiety/base/rng.h"
#include "moiety/comm/thread_group.h"
#include "moiety/gtp/codec.h"
#include "moiety/optim/shard_rows.h"
#include "moiety/quant/dequantize.h"
#include "moiety/quant/quantize.h"
#include "tests/optim/gtp_harness.h"
#include "tests/optim/rank_harness.h"

namespace moiety::optim {
namespace {

#ifdef __SANITIZE_THREAD__
constexpr int kSteps = 12;
#else
constexpr int kSteps = 200;
#endif
constexpr int64_t kTokens = 3;  // of a rank and step
// fc1 [F, D], then one of kMembers experts [H, F], then fc2 [D, H].
constexpr int64_t kD = 48, kF = 80, kH = 64, kMembers = 2;
enum : int { kNorm, kFc1, kMoe, kFc2 };  // parameters

std::vector<ParamSpec> specs_of(const gtp::Grid& grid, int rank,
                                const std::optional<QuantSpec>& format) {
  const auto shard = [&](ParamSpec spec, bool expert) {
    const gtp::Layout layout{
        .rows = spec.shape[spec.shape.size() - 2],
        .cols = spec.row_elements,
        .gtp_rank = grid.place(expert ? gtp::Axis::kEgtp : gtp::Axis::kGtp, rank),
        .gtp_size = expert ? grid.egtp : grid.gtp,
        .align = format ? gtp::Codec(*format).align() : 16};
    spec.init_std = 0.3f;
    spec.expert = expert;
    if (expert) spec.domain = {gtp::Axis::kEdp};
    if (format) {
      spec = shard_rows(spec, layout);
      spec.layout = layout;
      spec.domain = spec.domain.without(gtp::Axis::kGtp);
    }
    spec.format = format;
    spec.format_class = format.has_value();
    return spec;
  };
  ParamSpec experts = matrix_spec("experts", kMembers * kH, kF);
  experts.tensors[0].shape = experts.shape = {kMembers, kH, kF};
  return {vector_spec("norm", kD), shard(matrix_spec("fc1", kF, kD), false), shard(experts, true),
          shard(matrix_spec("fc2", kD, kH), false)};
}

using Matrix = std::vector<float>;  // row-major

// A weight as its products read it: rows in forward, columns in backward.
struct Operand {
  Matrix row, col;  // both [N, K]
};
// The values of one direction by dequantization, [rows, cols].
Matrix values(const QuantizedView& q, Direction direction) {
  const bool transposed = direction == Direction::kCol && !is_mxfp8(q.spec.format);
  const int64_t rows = transposed ? q.cols : q.rows, cols = transposed ? q.rows : q.cols;
  const Tensor x(DType::kFloat32, {rows, cols});
  QuantizedView compact = q;
  Tensor codes;
  if (direction == Direction::kCol && !q.col_data.contiguous()) {
    codes = Tensor(q.col_data.dtype(), q.col_data.sizes());
    copy(codes, q.col_data, Stream());
    compact.col_data = codes;
  }
  quant::dequantize(compact, direction, x, {}, Stream());
  Matrix out(static_cast<size_t>(rows * cols));
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < cols; ++c) {
      out[static_cast<size_t>(transposed ? c * rows + r : r * cols + c)] =
          x.data<float>()[r * cols + c];
    }
  }
  return out;
}

// Gradients of `ranks` weights: by parameter, of experts one behind the other.
struct Gradients {
  Matrix norm = Matrix(kD), fc1 = Matrix(kF * kD), experts = Matrix(kMembers * kH * kF),
         fc2 = Matrix(kD * kH);
  Matrix& of(int p) {
    Matrix* all[] = {&norm, &fc1, &experts, &fc2};
    return *all[p];
  }
};

// y += W x, and x_grad += W^T y_grad, of W [n, k].
void multiply(const float* w, const Matrix& x, Matrix& y) {
  const size_t k = x.size();
  for (size_t r = 0; r < y.size(); ++r) {
    for (size_t c = 0; c < k; ++c) y[r] += w[r * k + c] * x[c];
  }
}
void multiply_transposed(const float* w, const Matrix& dy, Matrix& dx) {
  const size_t k = dx.size();
  for (size_t r = 0; r < dy.size(); ++r) {
    for (size_t c = 0; c < k; ++c) dx[c] += w[r * k + c] * dy[r];
  }
}
void add_product(float* dw, const Matrix& dy, const Matrix& x) {
  for (size_t r = 0; r < dy.size(); ++r) {
    for (size_t c = 0; c < x.size(); ++c) dw[r * x.size() + c] += dy[r] * x[c];
  }
}
Matrix relu(Matrix x) {
  for (float& v : x) v = std::max(v, 0.0f);
  return x;
}

// Weights by matrix: fc1, each expert, fc2.
struct Model {
  std::vector<float> norm;
  Operand fc1, fc2;
  std::vector<Operand> experts;

  // One rank's tokens; returns the sum of their losses and adds gradients.
  double pass(int step, int rank, Gradients& g) const {
    double loss = 0;
    for (int64_t t = 0; t < kTokens; ++t) {
      const auto noise = [&](uint32_t what, int64_t i) {
        return normal_from_word(
            philox({3, what}, {static_cast<uint32_t>(i), static_cast<uint32_t>(step % 40),
                               static_cast<uint32_t>(rank), uint32_t(t)})[0]);
      };
      Matrix x(kD), h(kF), z(kH), y(kD);
      for (int64_t i = 0; i < kD; ++i) x[i] = noise(0, i) * norm[i];
      // Rank 0 has tokens of one expert alone.
      const size_t e = rank == 0 ? 0 : static_cast<size_t>(t % kMembers);
      multiply(fc1.row.data(), x, h);
      const Matrix a = relu(h);
      multiply(experts[e].row.data(), a, z);
      const Matrix b = relu(z);
      multiply(fc2.row.data(), b, y);
      Matrix dy(kD), db(kH), da(kF), dx(kD);
      for (int64_t i = 0; i < kD; ++i) {
        dy[i] = y[i] - std::sin(3.0f * x[i]);
        loss += 0.5 * double{dy[i]} * dy[i];
      }
      add_product(g.fc2.data(), dy, b);
      multiply_transposed(fc2.col.data(), dy, db);
      for (int64_t i = 0; i < kH; ++i) db[i] = z[i] > 0 ? db[i] : 0;
      add_product(g.experts.data() + e * kH * kF, db, a);
      multiply_transposed(experts[e].col.data(), db, da);
      for (int64_t i = 0; i < kF; ++i) da[i] = h[i] > 0 ? da[i] : 0;
      add_product(g.fc1.data(), da, x);
      multiply_transposed(fc1.col.data(), da, dx);
      for (int64_t i = 0; i < kD; ++i) g.norm[i] += dx[i] * noise(0, i);
    }
    return loss;
  }
};

StepInput step_input(double loss) {
  return {.lr = 2e-3, .weight_decay = 0.01, .clip = 0, .tokens = kTokens, .losses = {loss}};
}

struct Trained {
  std::vector<double> losses;
  Whole state;
};

OptimizerConfig config() { return {.bucket_elements = 4000}; }

Matrix norm_of(const Parameter& p) {
  Matrix out;
  for (int64_t i = 0; i < kD; ++i) out.push_back(float(p.weight.data<bf16>()[i]));
  return out;
}

// bf16 weights, quantized whole in every step; the passes of all ranks one after the other, their
// gradients added in rank order.
Trained quantized_each_step(const QuantSpec& format, int ranks) {
  Trained out;
  comm::run_thread_ranks(1, {}, [&](Communicator& world) {
    const GridGroups groups({}, world);
    DistributedOptimizer optimizer(specs_of({}, 0, std::nullopt), config(), groups);
    optimizer.initialize(kSeed, {});
    const auto parameters = optimizer.parameters();
    const auto operand = [&](const TensorView& w) {
      const QuantizedTensor q(format, w.size(0), w.size(1), {true, true});
      quant::quantize(w, q, {}, {});
      // The columns of tiles are the rows.
      const bool tile = is_tile(format.format);
      const Matrix row = values(q.view(), Direction::kRow);
      return Operand{row, tile ? row : values(q.view(), Direction::kCol)};
    };
    for (int step = 0; step < kSteps; ++step) {
      Model model{norm_of(parameters[kNorm]),
                  operand(parameters[kFc1].weight),
                  operand(parameters[kFc2].weight),
                  {}};
      for (int64_t e = 0; e < kMembers; ++e) {
        model.experts.push_back(operand(parameters[kMoe].weight.select(e)));
      }
      double loss = 0;
      for (int rank = 0; rank < ranks; ++rank) {
        Gradients g;
        loss += model.pass(step, rank, g);
        for (int p = kNorm; p <= kFc2; ++p) {
          float* to = parameters[p].grad.data<float>();
          for (const float x : g.of(p)) {
            *to = rank == 0 ? x : *to + x;
            ++to;
          }
          parameters[p].overwrite = false;
        }
      }
      StepInput in = step_input(loss);
      in.tokens *= ranks;
      out.losses.push_back(optimizer.step(in, {}).losses[0]);
    }
    put_together(optimizer.state_view(), out.state);
  });
  return out;
}

// The weights are the shards' and nothing else; each rank makes its own pass.
Trained sharded(const QuantSpec& format, int ranks, gtp::TransportKind kind) {
  Trained out;
  std::mutex mutex;
  comm::run_thread_ranks(ranks, {Seconds(60)}, [&](Communicator& world) {
    const gtp::Grid grid{.gtp = ranks, .egtp = ranks};
    GtpRank rank(world, grid, specs_of(grid, world.rank(), format),
                 {.kind = kind, .optimizer = config()});
    rank.optimizer().initialize(kSeed, {});
    gtp::Executor& executor = rank.executor();
    const auto parameters = rank.optimizer().parameters();
    // The operands of a parameter's matrices in a phase.
    const auto read = [&](int p, gtp::Phase phase) {
      const gtp::View view = executor.materialize(parameters[p].bundle, phase, {}, Stream());
      const bool columns =
          phase == gtp::Phase::kBwd && !executor.bundle(parameters[p].bundle).rows_only;
      std::vector<Matrix> all;
      for (const QuantizedView& q : view.quantized) {
        all.push_back(values(q, columns ? Direction::kCol : Direction::kRow));
      }
      return all;
    };
    const auto give = [&](int p, const Matrix& gradient) {
      const gtp::View to = executor.grad_buffer(parameters[p].bundle, Stream());
      ASSERT_TRUE(to.data.select(0).contiguous());
      const int64_t members = to.data.dims() == 3 ? to.data.size(0) : 1;
      const int64_t each = static_cast<int64_t>(gradient.size()) / members;
      for (int64_t e = 0; e < members; ++e) {
        float* at = to.data.dims() == 3 ? to.data.select(e).data<float>() : to.data.data<float>();
        std::copy_n(gradient.begin() + e * each, each, at);
      }
      executor.reduce(parameters[p].bundle, Stream());
    };
    for (int step = 0; step < kSteps; ++step) {
      Gradients g;
      double loss = 0;
      {
        const gtp::StepScope scope = executor.begin_step({"train", 1}, Stream());
        Model model{norm_of(parameters[kNorm]), {}, {}, std::vector<Operand>(kMembers)};
        const auto fill = [&](gtp::Phase phase, Matrix Operand::*side) {
          model.fc1.*side = read(kFc1, phase)[0];
          const std::vector<Matrix> experts = read(kMoe, phase);
          for (size_t e = 0; e < experts.size(); ++e) model.experts[e].*side = experts[e];
          model.fc2.*side = read(kFc2, phase)[0];
        };
        fill(gtp::Phase::kFwd, &Operand::row);
        fill(gtp::Phase::kBwd, &Operand::col);
        loss = model.pass(step, world.rank(), g);
        for (const int p : {kFc2, kMoe, kFc1}) give(p, g.of(p));
        std::copy(g.norm.begin(), g.norm.end(), parameters[kNorm].grad.data<float>());
        parameters[kNorm].overwrite = false;
        executor.flush(Stream());
      }
      const StepReport report = rank.optimizer().step(step_input(loss), {});
      if (world.rank() == 0) out.losses.push_back(report.losses[0]);
    }
    EXPECT_EQ(executor.counts().planned, kSteps - 1);
    const std::lock_guard lock(mutex);
    put_together(rank.optimizer().state_view(), out.state);
  });
  return out;
}

class GtpTraining : public testing::TestWithParam<QuantSpec> {};
QuantSpec fp32_scales() {
  QuantSpec spec = QuantSpec::of(Format::kFp8Block128x128);
  spec.pow2_scales = false;
  return spec;
}
INSTANTIATE_TEST_SUITE_P(
    Formats, GtpTraining,
    testing::Values(QuantSpec::of(Format::kFp8Tensor), QuantSpec::of(Format::kFp8Block128x128),
                    fp32_scales(), QuantSpec::of(Format::kMxfp8),
                    QuantSpec::of(Format::kMxfp8Tile32), QuantSpec::of(Format::kNvfp4Tile16)),
    [](const auto& info) { return text("{}_{}", name(info.param.format), info.index); });

TEST_P(GtpTraining, ShardsInAFormatTrainLikeWholesQuantizedEachStep) {
  for (const int ranks : {2, 3}) {
    const Trained expected = quantized_each_step(GetParam(), ranks);
    ASSERT_EQ(expected.losses.size(), size_t{kSteps});
    // It learns, so that there are differences that could grow.
    if (kSteps == 200) {
      EXPECT_LT(expected.losses.back(), 0.7 * expected.losses.front());
    }
    const auto kind = ranks == 2 ? gtp::TransportKind::kMapped : gtp::TransportKind::kAllToAll;
    const Trained trained = sharded(GetParam(), ranks, kind);
    EXPECT_EQ(trained.losses, expected.losses) << ranks << " ranks";
    EXPECT_TRUE(same_bits(trained.state, expected.state)) << ranks << " ranks";
  }
}

}  // namespace
}  // namespace moiety::optim
