// How near two gradients of one weight are, and a model whose gradients two devices have to agree
// on under a recipe.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "moiety/optim/parameter.h"
#include "tests/model/model_cases.h"
#include "tests/support/tensors.h"

namespace moiety::model {

inline double length(const TensorView& x) {
  double sum = 0;
  for (int64_t i = 0; i < x.numel(); ++i) sum += get(x, i) * get(x, i);
  return std::sqrt(sum);
}

// ||got - want|| / ||want||: 0 where both are zero, infinite where only `want` is or where an
// element is not a number.
inline double length_error(const TensorView& got, const TensorView& want) {
  double off = 0;
  for (int64_t i = 0; i < want.numel(); ++i) off += std::pow(get(got, i) - get(want, i), 2);
  if (off == 0) return 0;
  const double error = std::sqrt(off) / length(want);
  return error < 1e15 ? error : std::numeric_limits<double>::infinity();
}

// Gradients of the parameters against `got`, in the same order: the names of those that are further
// than `bound` off, and the largest error. A gradient that is nothing but rounding, below a
// millionth of the longest one, has to be below a thousandth of that.
struct GradientErrors {
  std::vector<std::string> wrong;
  double largest = 0;
  std::string where;
};
inline GradientErrors gradient_errors(const std::vector<optim::Parameter>& want,
                                      const std::vector<Tensor>& got, double bound) {
  double longest = 0;
  for (const optim::Parameter& p : want) longest = std::max(longest, length(p.grad));
  GradientErrors out;
  for (size_t i = 0; i < want.size(); ++i) {
    const TensorView& g = want[i].grad;
    const bool nothing = length(g) < 1e-6 * longest;
    const double error = nothing ? 0 : length_error(got[i], g);
    const bool right = nothing ? length(got[i]) < 1e-3 * longest : error <= bound;
    if (!right) out.wrong.push_back(want[i].spec.name);
    if (error > out.largest) out.where = want[i].spec.name;
    out.largest = std::max(out.largest, error);
  }
  return out;
}

// The bound of a gradient under a recipe, on two devices whose quantizers give the same codes, for
// sequences of one token.
//
// Attention over one key hands v through, and norms, activations and quantizers have the same bits
// everywhere, so devices differ in the order of sums alone. Products of codes have at most 16 bits
// and sums of 32 of them mostly fit into float32's 24: these are exact in any order. Sums of bf16
// (router, head) differ by about 2^-24 of themselves, which parts the roundings to bf16, 2^-8
// apart, of one element in 2^15. Such an element is off by 2^-8, and changes its code (q apart,
// 2^-3 in E4M3, 2^-1 in E2M1) with probability 2^-8 / q, hardly ever. So nearly all tokens agree in
// every bit, and the rest have the errors of bf16: its bound holds. With attention over many keys
// every token is off by 2^-9; each cast makes of an error d one of sqrt(d q), and after a few
// layers gradients are off by 0.1 (FP8) to 0.5 (NVFP4) of their length though nothing is wrong.
inline constexpr double kRecipeGradientBound = 5e-2;

// All kinds of layers, on sequences of one token: enough of them that one whose codes part is a
// small part of a gradient.
inline ModelCase one_token_case(const char* name, bool delay_wgrad = false) {
  return model_case(name,
                    [&](Config& c) {
                      take_all_kinds_of_layers(c);
                      c.recompute = delay_wgrad ? Recompute::kNone : Recompute::kMoe;
                      c.delay_wgrad = delay_wgrad;
                    },
                    {.sequences = 256, .seq_len = 1});
}

}  // namespace moiety::model
