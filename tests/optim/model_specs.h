// A model in small: the parameter kinds that a transformer has, cut for any grid.
#pragma once

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "moiety/base/error.h"
#include "moiety/gtp/layout.h"
#include "moiety/optim/parameter.h"
#include "moiety/optim/shard_rows.h"

namespace moiety::optim {

inline constexpr int64_t kModel = 6;
inline constexpr int64_t kExperts = 4;
inline constexpr int64_t kExpertRows = 31;  // 186 elements an expert: segments end inside rows
inline constexpr int64_t kHeads = 12;       // that TP divides, up to 4 ranks

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

// The part of the dense weight `spec` that a rank of the grid has: TP cuts as the layout says, GTP
// always.
inline ParamSpec cut(ParamSpec spec, gtp::Layout layout, const gtp::Grid& grid, int rank) {
  using gtp::Axis;
  layout.rows = spec.rows;
  layout.cols = spec.row_elements;
  layout.tp_rank = grid.place(Axis::kTp, rank);
  layout.tp_size = grid.tp;
  layout.gtp_rank = grid.place(Axis::kGtp, rank);
  layout.gtp_size = grid.gtp;
  spec.domain = {Axis::kDp};
  if (layout.tp_axis < 0) spec.domain.add(Axis::kTp);
  if (grid.gtp == 1) spec.domain.add(Axis::kGtp);
  if (layout.tp_axis == 0 && grid.tp > 1) {
    const int64_t first = layout.tp_rank * layout.slice_rows(), rows = layout.slice_rows();
    std::vector<RowRun> runs;
    for (RowRun run : spec.row_map) {
      const int64_t begin = std::max(run.memory_row, first);
      const int64_t end = std::min(run.memory_row + run.rows, first + rows);
      if (begin >= end) continue;
      runs.push_back(
          {begin - first, run.tensor, run.logical_row + begin - run.memory_row, end - begin});
    }
    spec.row_map = runs;
    spec.rows = rows;
  }
  if (layout.tp_axis == 1) {
    spec.row_elements = layout.slice_cols();
    spec.first_column = layout.tp_rank * spec.row_elements;
  }
  spec.shape = {spec.rows, spec.row_elements};
  return grid.gtp > 1 ? shard_rows(spec, layout) : spec;
}

// Groups of 2 query rows, a key row and a value row.
inline ParamSpec heads_spec(int64_t heads) {
  ParamSpec spec = matrix_spec("attn.heads.weight", 4 * heads, kModel);
  spec.tensors = {{"attn.hq.weight", {2 * heads, kModel}},
                  {"attn.hk.weight", {heads, kModel}},
                  {"attn.hv.weight", {heads, kModel}}};
  spec.row_map.clear();
  for (int64_t j = 0; j < heads; ++j) {
    spec.row_map.push_back({4 * j, 0, 2 * j, 2});
    spec.row_map.push_back({4 * j + 2, 1, j, 1});
    spec.row_map.push_back({4 * j + 3, 2, j, 1});
  }
  return spec;
}

// A bias that TP cuts and GTP does not.
inline ParamSpec bias_spec(int64_t heads, const gtp::Grid& grid, int rank) {
  ParamSpec spec = vector_spec("attn.bias", heads);
  spec.row_elements = heads / grid.tp;
  spec.first_column = grid.place(gtp::Axis::kTp, rank) * spec.row_elements;
  spec.shape = {spec.row_elements};
  spec.domain = {gtp::Axis::kGtp, gtp::Axis::kDp};
  if (grid.tp == 1) spec.domain.add(gtp::Axis::kTp);
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
  spec.domain = {gtp::Axis::kEdp};
  spec.kind = ParameterClass::kExpert;
  return spec;
}

// The experts of expert rank `ep` of `ep_ranks`. With 3 or more expert ranks one holds no expert at
// all, others several.
inline ParamSpec experts_of(const std::string& name, int ep, int ep_ranks) {
  const int owners = ep_ranks < 3 ? ep_ranks : ep_ranks - 1;
  const int64_t first = ep < owners ? ep * kExperts / owners : kExperts;
  const int64_t last = ep < owners ? (ep + 1) * kExperts / owners : kExperts;
  return expert_spec(name, first, last);
}

// The model as a rank of the grid holds it; `heads` is a multiple of tp.
inline std::vector<ParamSpec> model_specs(const gtp::Grid& grid, int rank, int64_t heads = kHeads) {
  using gtp::Axis;
  const auto expert = [&](const char* name) {
    const ParamSpec local = experts_of(name, grid.place(Axis::kEp, rank), grid.ep);
    if (grid.egtp == 1) return local;
    return shard_rows(local, {.rows = kExpertRows,
                              .cols = kModel,
                              .gtp_rank = grid.place(Axis::kEgtp, rank),
                              .gtp_size = grid.egtp,
                              .align = 4});
  };
  const gtp::Layout rows{.tp_axis = 0, .align = 2, .tp_unit = 4}, columns{.tp_axis = 1, .align = 1},
      vocabulary{.tp_axis = 0, .align = 4, .vocabulary = true}, whole{.align = 3};
  std::vector<ParamSpec> out{cut(matrix_spec("embed.weight", 41, kModel), vocabulary, grid, rank),
                             vector_spec("norm.weight", kModel),
                             cut(qkv_spec(), whole, grid, rank),
                             matrix_spec("router.weight", kExperts, kModel),
                             expert("experts.fc1.weight"),
                             expert("experts.fc2.weight"),
                             vector_spec("scalar.weight", 1),
                             cut(heads_spec(heads), rows, grid, rank),
                             bias_spec(heads, grid, rank),
                             cut(matrix_spec("attn.o.weight", 5, heads), columns, grid, rank),
                             cut(matrix_spec("tiny.weight", 3, kModel), vocabulary, grid, rank),
                             cut(matrix_spec("head.weight", 41, kModel), vocabulary, grid, rank)};
  out.front().kind = ParameterClass::kEmbedding;
  out[3].kind = ParameterClass::kRouter;
  return out;
}

inline std::string grid_text(const gtp::Grid& g) {
  return text("tp {} gtp {} dp {}, ep {} egtp {} edp {}", g.tp, g.gtp, g.dp, g.ep, g.egtp, g.edp);
}

// The specs for a grid whose dense weights are not cut.
inline std::vector<ParamSpec> model_specs(int ep, int ep_ranks) {
  return model_specs(gtp::Grid{.dp = ep_ranks, .ep = ep_ranks}, ep);
}

// All grids of so many ranks.
inline std::vector<gtp::Grid> all_grids(int ranks) {
  std::vector<gtp::Grid> out;
  for (int tp = 1; tp <= ranks; ++tp) {
    for (int gtp = 1; ranks % tp == 0 && gtp <= ranks / tp; ++gtp) {
      if (ranks / tp % gtp != 0) continue;
      for (int ep = 1; ep <= ranks; ++ep) {
        for (int egtp = 1; ranks % ep == 0 && egtp <= ranks / ep; ++egtp) {
          if (ranks / ep % egtp != 0) continue;
          out.push_back({.tp = tp,
                         .gtp = gtp,
                         .dp = ranks / tp / gtp,
                         .ep = ep,
                         .egtp = egtp,
                         .edp = ranks / ep / egtp});
        }
      }
    }
  }
  return out;
}

// f(memory index, tensor, logical index) for every element of the parameter's matrix that is no
// padding.
inline void for_each_element(const ParamSpec& spec,
                             const std::function<void(int64_t, const LogicalTensor&, int64_t)>& f) {
  for (const RowRun& run : spec.row_map) {
    const LogicalTensor& tensor = spec.tensors[run.tensor];
    for (int64_t r = 0; r < run.rows; ++r) {
      for (int64_t c = 0; c < spec.row_elements; ++c) {
        f((run.memory_row + r) * spec.row_elements + c, tensor,
          (run.logical_row + r) * tensor.row_elements() + spec.first_column + c);
      }
    }
  }
}

}  // namespace moiety::optim
