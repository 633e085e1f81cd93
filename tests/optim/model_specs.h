// A model in small: the parameter kinds that a transformer has, for any number of expert ranks.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "moiety/optim/parameter.h"

namespace moiety::optim {

inline constexpr int64_t kModel = 6;
inline constexpr int64_t kExperts = 4;
inline constexpr int64_t kExpertRows = 31;  // 186 elements an expert: segments end inside rows

inline int64_t numel(const LogicalTensor& tensor) {
  int64_t n = 1;
  for (const int64_t size : tensor.shape) n *= size;
  return n;
}

inline ParamSpec matrix_spec(const std::string& name, int64_t rows, int64_t cols) {
  return {.name = name,
          .tensors = {{name, {rows, cols}}},
          .row_map = {{0, 0, 0, rows}},
          .rows = rows,
          .row_elements = cols,
          .shape = {rows, cols},
          .init_std = 0.02f};
}

inline ParamSpec vector_spec(const std::string& name, int64_t n) {
  ParamSpec spec = matrix_spec(name, 1, n);
  spec.tensors[0].shape = spec.shape = {n};
  spec.init = InitKind::kOnes;
  spec.decay = false;
  return spec;
}

// q, k and v of 2 groups with 2 query heads of 3 rows each, in group order.
inline ParamSpec qkv_spec() {
  ParamSpec spec = matrix_spec("attn.qkv.weight", 24, kModel);
  spec.tensors = {{"attn.q.weight", {12, kModel}},
                  {"attn.k.weight", {6, kModel}},
                  {"attn.v.weight", {6, kModel}}};
  spec.row_map = {{0, 0, 0, 6},  {6, 1, 0, 3},  {9, 2, 0, 3},
                  {12, 0, 6, 6}, {18, 1, 3, 3}, {21, 2, 3, 3}};
  return spec;
}

// Experts [first, last) of kExperts.
inline ParamSpec expert_spec(const std::string& name, int64_t first, int64_t last) {
  const int64_t rows = (last - first) * kExpertRows;
  ParamSpec spec = matrix_spec(name, rows, kModel);
  spec.tensors[0].shape = {kExperts, kExpertRows, kModel};
  spec.row_map = {{0, 0, first * kExpertRows, rows}};
  spec.shape = {last - first, kExpertRows, kModel};
  spec.expert = true;
  spec.kind = ParameterClass::kExpert;
  return spec;
}

// The model as expert rank `ep` of `ep_ranks` holds it. With 3 or more expert ranks one holds no
// expert at all, others several.
inline std::vector<ParamSpec> model_specs(int ep, int ep_ranks) {
  const int owners = ep_ranks < 3 ? ep_ranks : ep_ranks - 1;
  const int64_t first = ep < owners ? ep * kExperts / owners : kExperts;
  const int64_t last = ep < owners ? (ep + 1) * kExperts / owners : kExperts;
  std::vector<ParamSpec> out{matrix_spec("embed.weight", 41, kModel),
                             vector_spec("norm.weight", kModel),
                             qkv_spec(),
                             matrix_spec("router.weight", kExperts, kModel),
                             expert_spec("experts.fc1.weight", first, last),
                             expert_spec("experts.fc2.weight", first, last),
                             vector_spec("scalar.weight", 1),
                             matrix_spec("head.weight", 41, kModel)};
  out.front().kind = ParameterClass::kEmbedding;
  out[3].kind = ParameterClass::kRouter;
  return out;
}

// f(memory index, tensor, logical index) for every element of the parameter's matrix.
inline void for_each_element(const ParamSpec& spec,
                             const std::function<void(int64_t, const LogicalTensor&, int64_t)>& f) {
  for (const RowRun& run : spec.row_map) {
    for (int64_t i = 0; i < run.rows * spec.row_elements; ++i) {
      f(run.memory_row * spec.row_elements + i, spec.tensors[run.tensor],
        run.logical_row * spec.row_elements + i);
    }
  }
}

}  // namespace moiety::optim
