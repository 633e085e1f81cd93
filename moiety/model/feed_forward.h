// The feed-forward network, fc2(activation(fc1(h))): the body of a dense layer and of the shared
// expert. The activation is that of the experts.
#pragma once

#include <string>
#include <vector>

#include "moiety/gemm/swiglu.h"
#include "moiety/model/config.h"
#include "moiety/model/linear_layer.h"
#include "moiety/model/needs.h"
#include "moiety/model/parameters.h"
#include "moiety/model/pass.h"
#include "moiety/model/weight_layout.h"

namespace moiety::model {

class FeedForward {
 public:
  // Parameters are named prefix + "fc1.weight" and "fc2.weight". `place` gives this rank its part
  // of the network's `ffn` inner columns.
  FeedForward(const Config& config, std::string prefix, int64_t ffn, TpPlace place);

  std::vector<optim::ParamSpec> specs() const;
  void bind(ParameterCursor& parameters);
  void set_recipe(const LinearRecipe& recipe);

  // Arguments of forward, all of own tokens.
  struct Forward {
    TensorView h_TD;
    TensorView prob_T;  // optional, fp32: scales a token's output (by multiplying its activation)
    TensorView residual_TD;  // added to the output
    TensorView out_TD;       // storage or fp32
    TensorView hidden = {};  // place of what is returned; absent: on the arena
  };
  // Returns fc1's output for all tokens, for backward.
  TensorView forward(const Pass& pass, const Forward& args) const;
  TensorView make_hidden(const Pass& pass) const;

  struct Backward {
    TensorView h_TD;
    TensorView prob_T;
    // fc1's output for all tokens, consumed; if absent it is computed again from h
    TensorView hidden;
    TensorView dout_TD;  // storage
    TensorView dh_TD;    // result, storage or fp32; if `needs` have it
    TensorView dprob_T;  // result, only where there is prob; needs inner gradients
    NetworkNeeds needs = {};
  };
  void backward(const Pass& pass, const Backward& args) const;

 private:
  // Computes fc1's output for all tokens into `to`, or on the arena.
  TensorView hidden(const Pass& pass, TensorView h_TD, TensorView to = {}) const;
  // Turns `hidden` into its gradient and computes `activated`, fc2's input, again.
  void activation_backward(const Pass& pass, const Backward& args, TensorView hidden,
                           TensorView d_activated, TensorView activated) const;
  gtp::Work activation_work(const Pass& pass) const;
  gemm::ActivationArgs activation(TensorView hidden, TensorView prob_T) const;
  // `activated` of forward, once more.
  void activate(const Pass& pass, TensorView hidden, TensorView prob_T, TensorView activated) const;

  std::string prefix_;
  gemm::Activation activation_;
  int64_t ffn_;     // inner columns of this rank
  int64_t hidden_;  // columns of fc1's output on this rank
  float std_, out_std_;
  LinearLayer fc1_, fc2_;
};

// The second half of a dense layer: out = x + ffn(norm(x)).
class DenseBlock {
 public:
  DenseBlock(const Config& config, int64_t layer, TpPlace place, const Frozen& frozen = {});

  std::vector<optim::ParamSpec> specs() const;
  void bind(ParameterCursor& parameters);
  void set_recipe(const LinearRecipe& recipe) { ffn_.set_recipe(recipe); }

  // Returns the tensor that backward needs besides x; if that is absent, backward computes it
  // again.
  TensorView forward(const Pass& pass, TensorView x_TD, TensorView out_TD) const;
  // d_TD is the gradient of out on entry and that of x on return, if the blocks before need it.
  void backward(const Pass& pass, TensorView x_TD, TensorView hidden, TensorView d_TD) const;

 private:
  std::string norm_name_;
  int64_t d_model_;
  float eps_;
  FfnNeeds needs_;
  optim::Parameter* norm_ = nullptr;
  FeedForward ffn_;
};

}  // namespace moiety::model
