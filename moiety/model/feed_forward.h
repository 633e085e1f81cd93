// SwiGLU feed-forward network, fc2(swiglu(fc1(h))): the body of a dense layer and of the shared
// expert.
#pragma once

#include <string>
#include <vector>

#include "moiety/model/config.h"
#include "moiety/model/linear_layer.h"
#include "moiety/model/parameters.h"
#include "moiety/model/pass.h"
#include "moiety/model/weight_layout.h"

namespace moiety::model {

class FeedForward {
 public:
  // Parameters are named prefix + "fc1.weight" and "fc2.weight". Of the network's `ffn` inner
  // columns this rank has those of `place`.
  FeedForward(const Config& config, std::string prefix, int64_t ffn, TpPlace place);

  std::vector<optim::ParamSpec> specs() const;
  void bind(ParameterCursor& parameters);
  void set_recipe(const std::optional<gemm::Recipe>& recipe);

  // Of own tokens.
  struct Forward {
    TensorView h_TD;
    TensorView
        prob_T;  // optional, fp32: scales the output of a token (it multiplies the activation)
    TensorView residual_TD;  // added to the output
    TensorView out_TD;       // storage or fp32
  };
  // Returns fc1's output of all tokens, from which backward goes on; on the arena.
  TensorView forward(const Pass& pass, const Forward& args) const;

  struct Backward {
    TensorView h_TD;
    TensorView prob_T;
    TensorView hidden;   // of all tokens, consumed; absent: made anew of h
    TensorView dout_TD;  // storage
    TensorView dh_TD;    // out, storage or fp32
    TensorView dprob_T;  // out, exactly if there is prob
  };
  void backward(const Pass& pass, const Backward& args) const;

 private:
  // fc1's output of all tokens, on the arena.
  TensorView hidden(const Pass& pass, TensorView h_TD) const;
  // `hidden` becomes its gradient; `activated`, what fc2 read, is made anew.
  void activation_backward(const Pass& pass, const Backward& args, TensorView hidden,
                           TensorView d_activated, TensorView activated) const;
  gtp::Work activation_work(const Pass& pass) const;

  std::string prefix_;
  int64_t ffn_;  // columns of this rank
  float std_, out_std_;
  LinearLayer fc1_, fc2_;
};

// The second half of a dense layer: out = x + ffn(norm(x)).
class DenseBlock {
 public:
  DenseBlock(const Config& config, int64_t layer, TpPlace place);

  std::vector<optim::ParamSpec> specs() const;
  void bind(ParameterCursor& parameters);
  void set_recipe(const std::optional<gemm::Recipe>& recipe) { ffn_.set_recipe(recipe); }

  // Returns what backward needs besides x, or makes anew where it is absent.
  TensorView forward(const Pass& pass, TensorView x_TD, TensorView out_TD) const;
  // d_TD: the gradient of out, replaced by that of x.
  void backward(const Pass& pass, TensorView x_TD, TensorView hidden, TensorView d_TD) const;

 private:
  std::string norm_name_;
  int64_t d_model_;
  float eps_;
  optim::Parameter* norm_ = nullptr;
  FeedForward ffn_;
};

}  // namespace moiety::model
