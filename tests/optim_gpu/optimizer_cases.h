// Parameters, gradients and comparisons of optimizers on CPUs and GPUs.
#pragma once

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "moiety/base/buffer.h"
#include "moiety/base/copy.h"
#include "moiety/base/rng.h"
#include "moiety/formats/bf16.h"
#include "moiety/optim/distributed_optimizer.h"
#include "moiety/optim/initialize.h"
#include "tests/optim/model_specs.h"

namespace moiety::optim {

using Formats = std::optional<QuantSpec>;

inline Formats of(Format format) { return QuantSpec::of(format); }

// Rows of 48 elements; matrices and experts may be kept in a format.
inline std::vector<ParamSpec> specs_of(const Formats& format) {
  const auto in_format = [&](ParamSpec spec) {
    spec.format = format;
    spec.format_class = 1;
    return spec;
  };
  ParamSpec experts = matrix_spec("experts.weight", kExperts * 40, 48);
  experts.tensors[0].shape = experts.shape = {kExperts, 40, 48};
  experts.expert = true;
  experts.domain = {gtp::Axis::kEdp};
  experts.kind = ParameterClass::kExpert;
  ParamSpec embedding = matrix_spec("embed.weight", 301, 48);
  embedding.kind = ParameterClass::kEmbedding;
  ParamSpec bias = vector_spec("bias", 5);
  bias.init = InitKind::kZeros;
  return {embedding,
          vector_spec("norm.weight", 48),
          qkv_spec(),  // several runs, with other tensors
          in_format(matrix_spec("attn.o.weight", 137, 48)),
          bias,
          in_format(experts),
          in_format(matrix_spec("small.weight", 3, 16)),
          matrix_spec("head.weight", 301, 48)};
}

inline constexpr int kMissing = 3;  // a parameter that has no gradient in some steps
struct Poison {
  int parameter;
  int64_t element;
  float value;
};

// ---- comparisons; of what is on a GPU after a copy

inline std::string bytes_of(const TensorView& x, const Stream& stream) {
  if (!x.defined()) return "absent";
  std::string out(static_cast<size_t>(x.bytes()), '\0');
  const TensorView here(out.data(), x.dtype(), x.sizes());
  copy(here, x, x.device() == stream.device() ? stream : Stream());
  stream.synchronize();
  return out;
}

inline std::string number(double x) { return std::isnan(x) ? "nan" : text("{:a}", x); }

inline std::string text_of(const StepReport& r) {
  std::string out =
      text("coef {} skip {} halt {} skips {} bad {} {} {} t {} lr {} tokens {} {} {} {}",
           number(r.coef), r.skip, r.halt, r.skips_in_row, r.bad, r.bad_parameter, r.bad_rank, r.t,
           number(r.lr), r.tokens, r.overflow, r.required, r.flags);
  out += " norm " + number(r.norm);
  for (const float x : r.class_norms) out += " " + number(x);
  for (const double x : r.losses) out += " " + number(x);
  return out;
}

// The first part of parameters and state that differs.
inline std::string difference(DistributedOptimizer& a, DistributedOptimizer& b,
                              const Stream& stream) {
  const auto same = [&](const TensorView& x, const TensorView& y) {
    return bytes_of(x, stream) == bytes_of(y, stream);
  };
  for (size_t p = 0; p < a.parameters().size(); ++p) {
    const Parameter &x = a.parameters()[p], &y = b.parameters()[p];
    if (!same(x.weight, y.weight)) return x.spec.name + ": weight";
    if (x.quantized.size() != y.quantized.size()) return x.spec.name + ": members";
    for (size_t e = 0; e < x.quantized.size(); ++e) {
      const QuantizedView &q = x.quantized[e], &r = y.quantized[e];
      const std::string where = text("{}/{}: ", x.spec.name, e);
      if (!same(q.row_data, r.row_data)) return where + "row_data";
      if (!same(q.col_data, r.col_data)) return where + "col_data";
      if (!same(q.row_scales, r.row_scales)) return where + "row_scales";
      if (!same(q.col_scales, r.col_scales)) return where + "col_scales";
      if (!same(q.amax, r.amax)) return where + "amax";
      if (!same(q.tensor_scale, r.tensor_scale)) return where + "tensor_scale";
      if (!same(q.flags, r.flags)) return where + "flags";
    }
  }
  const StateView pieces = a.state_view(), others = b.state_view();
  if (pieces.size() != others.size()) return "pieces";
  for (size_t i = 0; i < pieces.size(); ++i) {
    const StatePiece &x = pieces[i], &y = others[i];
    int64_t n = 1;
    for (int d = 0; d < x.box.rank; ++d) n *= x.box.size[d];
    const auto view = [&](const StatePiece& piece) {
      return TensorView(piece.data, piece.dtype, {n}, piece.device);
    };
    const bool alike =
        x.tensor == y.tensor && x.slot == y.slot && x.box == y.box && x.dtype == y.dtype;
    if (!alike || !same(view(x), view(y))) return x.slot + "/" + x.tensor;
  }
  const StepState s = a.step_state(), t = b.step_state();
  const bool alike = s.t == t.t && s.b1pow == t.b1pow && s.b2pow == t.b2pow &&
                     s.skips_in_row == t.skips_in_row && s.halt == t.halt &&
                     s.last_losses() == t.last_losses();
  return alike ? "" : "step state";
}

inline OptimizerConfig config_on(Device device) {
  OptimizerConfig c;
  c.seed = 77;
  c.bucket_elements = 9000;  // several buckets
  c.max_skips = 0;
  c.device = device;
  return c;
}

// Random gradients of a rank on either device, of all parameters but perhaps one, as backward leaves
// them. `stream` is of a GPU.
inline void contribute_to(DistributedOptimizer& optimizer, int step, bool all, const Stream& stream,
                          int rank = 0, const std::vector<Poison>& poison = {}) {
  for (size_t i = 0; i < optimizer.parameters().size(); ++i) {
    Parameter& p = optimizer.parameters()[i];
    if (!all && i == kMissing) continue;
    const Tensor here(p.grad.dtype(), p.grad.sizes());
    const auto set = [&](int64_t at, float x) {
      if (p.grad.dtype() == DType::kBFloat16) {
        here.data<bf16>()[at] = bf16(x);
      } else {
        here.data<float>()[at] = x;
      }
    };
    for (int64_t at = 0; at < p.grad.numel(); ++at) {
      const PhiloxBlock w = philox({6, 6}, {static_cast<uint32_t>(at), static_cast<uint32_t>(step),
                                            static_cast<uint32_t>(i), static_cast<uint32_t>(rank)});
      set(at, 3 * normal_from_word(w[0]));
    }
    for (const Poison& x : poison) {
      if (x.parameter == static_cast<int>(i)) set(x.element, x.value);
    }
    copy(p.grad, here, p.grad.device() == Device{} ? Stream() : stream);
    p.overwrite = false;
  }
}

inline StepInput input_of(int step) {
  return {.lr = 1e-2 / (1 + step),
          .weight_decay = step % 4 == 0 ? 0 : 0.1,
          .clip = step % 3 == 0 ? 0 : 1.0,
          .tokens = 100 + 7 * step,
          .losses = {50.0 / (1 + step), 2.0, 0.25 * step}};
}

inline void set_format(DistributedOptimizer& optimizer, const Formats& format,
                       const Stream& stream) {
  std::vector<Formats> all;
  for (const Parameter& p : optimizer.parameters()) {
    all.push_back(p.spec.format_class == 1 ? format : std::nullopt);
  }
  optimizer.set_formats(all, stream);
  optimizer.publish(stream);
}

}  // namespace moiety::optim
