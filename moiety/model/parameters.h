// Making and binding of parameters, shared by the blocks of the model. Every block lists its
// parameters in an order and takes them back in the same order.
#pragma once

#include <span>
#include <string>
#include <utility>
#include <vector>

#include "moiety/base/error.h"
#include "moiety/model/config.h"
#include "moiety/optim/parameter.h"

namespace moiety::model {

// The prefix of a layer's names, such as "layers.3.".
inline std::string layer_prefix(int64_t layer) { return "layers." + std::to_string(layer) + "."; }

// The spec of a matrix [rows, columns] that is one logical tensor.
optim::ParamSpec matrix_spec(const std::string& name, int64_t rows, int64_t columns, float std);
// The spec of a tensor-parallel rank's slice of a big weight whose order in memory is that of its
// one logical tensor.
optim::ParamSpec weight_spec(const std::string& name, const gtp::Layout& layout, float std);
// The spec of a norm's weight [n]: ones at first, no decay.
optim::ParamSpec norm_spec(const std::string& name, int64_t n);

// The standard deviation of weights whose products are added to the residual stream: attn.o and
// every fc2.
float residual_std(const Config& config);

// Hands out the parameters that a model was built from and checks that they are the expected ones.
class ParameterCursor {
 public:
  explicit ParameterCursor(std::span<optim::Parameter> parameters) : parameters_(parameters) {}
  optim::Parameter* next(const std::string& name);
  bool at_end() const { return next_ == parameters_.size(); }
  // Number of the parameter that comes next.
  int at() const { return static_cast<int>(next_); }

 private:
  std::span<optim::Parameter> parameters_;
  size_t next_ = 0;
};

// Whether the next contribution adds to the gradient instead of overwriting it; later ones do.
inline bool take_accumulate(optim::Parameter& p) { return !std::exchange(p.overwrite, false); }

}  // namespace moiety::model
