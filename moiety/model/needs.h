// The gradients that the blocks of a layer have to compute, which is everything unless parameters
// are frozen (frozen.h). What forward keeps, what backward computes, the plan of a step, estimates
// of memory and counts of FLOPs follow from these.
#pragma once

#include "moiety/model/config.h"
#include "moiety/model/frozen.h"

namespace moiety::model {

struct AttentionNeeds {
  bool below = true;          // the gradient of the block's input
  bool input = true;          // the gradient of qkv's input, the norm's output
  bool core = true;           // the gradients of attention's output and of q, k and v
  bool qkv = true, o = true;  // weight gradients
};

// Two linears with an activation between them.
struct NetworkNeeds {
  bool input = true;  // the gradient of fc1's input
  bool inner = true;  // the gradients of fc2's input and of the hidden activation
  bool fc1 = true, fc2 = true;
  bool any() const { return inner || fc2; }
  // Whether fc1's input is read, where forward kept fc1's output or did not.
  bool reads_input(bool kept_hidden) const { return fc1 || (any() && !kept_hidden); }
};

struct FfnNeeds {
  bool below = true;      // the gradient of the block's input
  bool input = true;      // the gradient of the norm's output
  NetworkNeeds network;   // of a dense layer, or of the shared expert
  bool gate_prob = true;  // the gradient of the shared gate's value
  bool gate = true;
  bool router = true;
  bool routed = true;           // the gradients of rows and probabilities, back through the router
  bool experts = true;          // anything of the experts, biases and all that is routed included
  bool fc1 = true, fc2 = true;  // weight gradients of experts
  bool expert_weights() const { return fc1 || fc2; }
};

AttentionNeeds attention_needs(const Config& config, const Frozen& frozen, int64_t layer);
FfnNeeds ffn_needs(const Config& config, const Frozen& frozen, int64_t layer);
// The gradients of the final norm's output, and of the head's weight.
struct HeadNeeds {
  bool input = true, weight = true;
};
HeadNeeds head_needs(const Config& config, const Frozen& frozen);

}  // namespace moiety::model
