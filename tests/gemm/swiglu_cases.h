// Activations of random rows, on a CPU and on a GPU.
#pragma once

#include <bit>
#include <limits>
#include <utility>

#include "moiety/gemm/activation_block.h"
#include "tests/gemm/groups.h"

namespace moiety::gemm {

struct ActivationProblem {
  int64_t rows, ffn;
  Tensor h, prob, a, da, dh, dprob;
  ActivationArgs args;

  ActivationProblem(Activation activation, DType dtype, int64_t rows, int64_t ffn,
                    int64_t interleave)
      : rows(rows),
        ffn(ffn),
        h(dtype, {rows, activation.hidden(ffn)}),
        prob(dtype == DType::kFloat64 ? dtype : DType::kFloat32, {rows}),
        a(dtype, {rows, ffn}),
        da(dtype, {rows, ffn}),
        dh(dtype, {rows, activation.hidden(ffn)}),
        dprob(prob.view().dtype(), {rows}),
        args{activation, interleave, {}, h, prob} {
    fill_normal(h, 1);
    fill_normal(prob, 2);
    fill_normal(da, 3);
  }

  // Puts special values into the first row, beside a probability of 0 in the second.
  void put_specials() const {
    constexpr float kInf = std::numeric_limits<float>::infinity();
    const float special[] = {0,     -0.0f,  kInf, -kInf, NAN,   std::bit_cast<float>(0xFFFFFFFF),
                             1.25f, -1.25f, 1,    -1,    3e38f, -88};
    for (int64_t i = 0; i < h.view().size(1); ++i) put(h, i, special[i * 5 % 12]);
    put(prob, 1, 0);
  }

  void forward() const { activation_forward(args, a, Stream()); }
  void backward() const { activation_backward(args, da, dh, a, dprob, Stream()); }

  // The reference on the same inputs: {A, dH, dprob}.
  std::vector<Tensor> reference() const {
    std::vector<Tensor> out;
    for (const Tensor* t : {&a, &dh, &dprob}) {
      out.emplace_back(t->view().dtype(), t->view().sizes());
    }
    ActivationBlock block{.activation = args.activation,
                          .interleave = args.interleave,
                          .ffn = ffn,
                          .dtype = h.view().dtype(),
                          .rows = rows,
                          .h = h.view().raw(),
                          .h_stride = h.view().stride(0),
                          .prob = args.prob_R.raw(),
                          .a = out[0].view().raw(),
                          .a_stride = ffn,
                          .da = da.view().raw(),
                          .da_stride = ffn,
                          .dh = out[1].view().raw(),
                          .dh_stride = h.view().stride(0),
                          .dprob = out[2].view().raw()};
    activation_backward_reference(block);
    return out;
  }
};

struct ActivationCase {
  const char* name;
  Activation activation;
};
const ActivationCase kActivationKinds[] = {{"swiglu", swiglu()},
                                           {"clamped", clamped_swiglu(1.25f)},
                                           {"qgeglu", qgeglu(1.702f, 1, 1)},
                                           {"squared_relu", squared_relu()}};

// F and interleave.
inline constexpr std::pair<int64_t, int64_t> kActivationColumns[] = {
    {1, 0}, {64, 0}, {72, 8}, {200, 40}, {144, 48}, {256, 32}, {768, 0}, {515, 0}};

// Equal bits; a NaN equals any NaN.
inline void expect_same(const TensorView& x, const TensorView& y, const char* what) {
  ASSERT_EQ(x.numel(), y.numel());
  for (int64_t i = 0; i < x.numel(); ++i) {
    const double v = get(x, i), w = get(y, i);
    if (std::isnan(v) && std::isnan(w)) continue;
    ASSERT_EQ(v, w) << what << " " << i;
    ASSERT_EQ(std::signbit(v), std::signbit(w)) << what << " " << i;
  }
}

}  // namespace moiety::gemm
