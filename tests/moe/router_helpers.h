// Routing of given logits, and the router's operation on tensors of its own.
#pragma once

#include <array>
#include <random>
#include <string>
#include <vector>

#include "moiety/base/buffer.h"
#include "moiety/formats/bf16.h"
#include "moiety/moe/router.h"
#include "moiety/moe/router_block.h"
#include "tests/support/error_of.h"

namespace moiety::moe {

inline std::vector<double> random_values(int64_t n, uint32_t seed, double spread = 1) {
  std::mt19937 rng(seed);
  std::normal_distribution<double> normal(0, spread);
  std::vector<double> v(n);
  for (double& x : v) x = normal(rng);
  return v;
}

// The results of the blocks for given logits, in T.
template <class T>
struct Routed {
  std::vector<int32_t> idx;
  std::vector<T> weight;
  std::vector<int32_t> count;  // [S, E+1]
  std::vector<T> sum;
};

template <class T>
Routed<T> route(const RouterConfig& c, const std::vector<T>& logits, int64_t segments = 1,
                const std::vector<T>& bias = {}, const std::vector<uint8_t>& mask = {}) {
  const int64_t tokens = logits.size() / c.experts, n = tokens / segments;
  Routed<T> out{std::vector<int32_t>(tokens * c.top_k), std::vector<T>(tokens * c.top_k),
                std::vector<int32_t>(segments * (c.experts + 1)),
                std::vector<T>(segments * (c.experts + 1))};
  const detail::ForwardRows<T> rows{c,
                                    logits.data(),
                                    bias.empty() ? nullptr : bias.data(),
                                    mask.empty() ? nullptr : mask.data(),
                                    nullptr,
                                    out.idx.data(),
                                    out.weight.data()};
  for (int64_t s = 0; s < segments; ++s) {
    detail::forward_block(rows, s * n, (s + 1) * n, out.count.data() + s * (c.experts + 1),
                          out.sum.data() + s * (c.experts + 1));
  }
  return out;
}

// The whole operation on tensors of its own; `h` [T, D], `w` [E, D].
struct Router {
  RouterConfig config;
  int64_t tokens, model, segments;
  Tensor h, w, logits, idx, weight, count, sum, forward_workspace;
  Tensor dweight, scope, dw, dh, backward_workspace;
  TensorView bias, mask, addend;

  Router(const RouterConfig& c, const std::vector<double>& h_values,
         const std::vector<double>& w_values, DType dtype = DType::kFloat32, int64_t s = 1)
      : config(c),
        tokens(int64_t(h_values.size()) * c.experts / int64_t(w_values.size())),
        model(w_values.size() / c.experts),
        segments(s),
        h(dtype, {tokens, model}),
        w(dtype, {c.experts, model}),
        logits(DType::kFloat32, {tokens, c.experts}),
        idx(DType::kInt32, {tokens, c.top_k}),
        weight(DType::kFloat32, {tokens, c.top_k}),
        count(DType::kInt64, {s, c.experts + 1}),
        sum(DType::kFloat64, {s, c.experts + 1}),
        forward_workspace(DType::kUInt8, {router_forward_workspace(c, tokens, s)}),
        dweight(DType::kFloat32, {tokens, c.top_k}),
        scope(DType::kInt64, {2}),
        dw(DType::kFloat32, {c.experts, model}),
        dh(dtype, {tokens, model}),
        backward_workspace(DType::kUInt8, {router_backward_workspace(c, dtype, tokens, model)}) {
    fill(h, h_values);
    fill(w, w_values);
  }
  static void fill(const TensorView& x, const std::vector<double>& values) {
    for (int64_t i = 0; i < x.numel(); ++i) {
      const auto v = static_cast<float>(values[i]);
      if (x.dtype() == DType::kFloat32) {
        x.data<float>()[i] = v;
      } else {
        x.data<bf16>()[i] = bf16(v);
      }
    }
  }
  static std::vector<double> read(const TensorView& x) {
    std::vector<double> v(x.numel());
    for (int64_t i = 0; i < x.numel(); ++i) {
      v[i] = x.dtype() == DType::kFloat32 ? x.data<float>()[i] : float(x.data<bf16>()[i]);
    }
    return v;
  }
  void forward() {
    router_forward(config, {h, w, bias, mask, logits, idx, weight, {count, sum}, forward_workspace},
                   {});
    scope.data<int64_t>()[0] = scope.data<int64_t>()[1] = 0;
    for (int64_t s = 0; s < segments; ++s) {
      scope.data<int64_t>()[1] += count.data<int64_t>()[s * (config.experts + 1) + config.experts];
    }
    scope.data<int64_t>()[0] = scope.data<int64_t>()[1];
  }
  std::array<double, 2> losses() {
    Tensor out(DType::kFloat64, {2});
    router_losses(config, {{count, sum}, scope, out}, {});
    return {out.data<double>()[0], out.data<double>()[1]};
  }
  void backward(float dw_beta = 0) {
    router_backward(
        config,
        {h, w, logits, idx, dweight, count, scope, dw, dw_beta, addend, dh, backward_workspace},
        {});
  }
  std::vector<int64_t> counts() const {
    return {count.data<int64_t>(), count.data<int64_t>() + count.view().numel()};
  }
};

}  // namespace moiety::moe
