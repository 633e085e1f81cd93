// A grouped MLP with everything that it reads and writes, in host memory.
#pragma once

#include "moiety/gemm/grouped_mlp.h"
#include "tests/gemm/groups.h"

namespace moiety::gemm {

struct MlpOptions {
  DType dtype = DType::kFloat32;
  MlpPath path = MlpPath::kCpu;
  Activation activation = swiglu();
  int64_t interleave = 0;
  bool biases = false, maps = false;
  bool integers = false;  // of at most 1: with squared_relu every sum is exact
  int64_t model = 24, ffn = 40;
};

// Expert rows of tokens: with maps row r is token r * 7 % T, otherwise row r itself.
struct MlpProblem {
  TestGroups groups;
  MlpOptions o;
  int64_t hidden, tokens;
  Tensor w1, w2, b1, b2, x, prob, d_o, source, row;
  Tensor h, out, dh, a, dx, dprob, db1, db2, dw1, dw2, workspace;
  GroupedMlp mlp;
  MlpInput input;
  MlpGradients gradients;

  MlpProblem(const GroupCase& c, const MlpOptions& options) : groups(c), o(options) {
    const int64_t capacity = groups.capacity(), experts = groups.experts();
    hidden = o.activation.hidden(o.ffn);
    tokens = o.maps ? capacity / 2 + 1 : capacity;
    const DType scalar = o.dtype == DType::kFloat64 ? o.dtype : DType::kFloat32;
    w1 = data(o.dtype, {experts, hidden, o.model}, 1);
    w2 = data(o.dtype, {experts, o.model, o.ffn}, 2);
    x = data(o.dtype, {tokens, o.model}, 3);
    d_o = data(o.dtype, {tokens, o.model}, 4);
    prob = data(scalar, {capacity}, 5);
    h = Tensor(o.dtype, {capacity, hidden});
    dh = Tensor(o.dtype, {capacity, hidden});
    a = Tensor(o.dtype, {capacity, o.ffn});
    out = Tensor(o.dtype, {tokens, o.model});
    dx = Tensor(o.dtype, {tokens, o.model});
    dprob = Tensor(scalar, {capacity});
    dw1 = Tensor(scalar, {experts, hidden, o.model});
    dw2 = Tensor(scalar, {experts, o.model, o.ffn});
    mlp = {.path = o.path,
           .activation = o.activation,
           .interleave = o.interleave,
           .w1 = w1.view(),
           .w2 = w2.view(),
           .b1_EH = {},
           .b2_ED = {}};
    input = {.groups = groups(), .x = x, .prob_R = prob, .source_R = {}, .row_TK = {}};
    gradients = {.d_o = d_o,
                 .h = h,
                 .dh = dh,
                 .a = a,
                 .dx = dx,
                 .dprob_R = dprob,
                 .db1_EH = {},
                 .db2_ED = {}};
    if (o.biases) add_biases(scalar);
    if (o.maps) add_maps();
    if (!o.maps) {
      for (const Tensor* t : {&x, &d_o}) groups.fill_dead_rows(*t, NAN);
    }
    groups.fill_dead_rows(prob, NAN);
    poison();
    workspace = Tensor(DType::kUInt8, {grouped_mlp_workspace(mlp, input)});
  }

  Tensor data(DType dtype, std::initializer_list<int64_t> sizes, uint32_t id) const {
    Tensor out(dtype, sizes);
    o.integers ? fill_integers(out, id, 1) : fill_normal(out, id);
    return out;
  }

  void poison() const {
    for (const auto& [what, t] : results()) fill(*t, kSentinel);
  }

  void add_biases(DType scalar) {
    b1 = data(o.dtype, {groups.experts(), hidden}, 6);
    b2 = data(o.dtype, {groups.experts(), o.model}, 7);
    db1 = Tensor(scalar, {groups.experts(), hidden});
    db2 = Tensor(scalar, {groups.experts(), o.model});
    mlp.b1_EH = b1;
    mlp.b2_ED = b2;
    gradients.db1_EH = db1;
    gradients.db2_ED = db2;
  }

  // Every token has up to 3 pairs; the rows it does not use stay -1.
  void add_maps() {
    if (!source.view().defined()) source = Tensor(DType::kInt32, {groups.capacity()});
    if (!row.view().defined()) row = Tensor(DType::kInt32, {tokens, 3});
    std::fill_n(row.data<int32_t>(), tokens * 3, -1);
    const std::vector<int64_t> owner = groups.owners();
    for (int64_t r = 0; r < groups.capacity(); ++r) {
      source.data<int32_t>()[r] = -1;
      if (owner[r] < 0) continue;
      const int64_t t = r * 7 % tokens;
      for (int64_t k = 2; k >= 0; --k) {  // from the end: ascending k is not ascending row
        if (row.data<int32_t>()[t * 3 + k] >= 0) continue;
        row.data<int32_t>()[t * 3 + k] = static_cast<int32_t>(r);
        source.data<int32_t>()[r] = static_cast<int32_t>(t);
        break;
      }
    }
    input.source_R = source;
    input.row_TK = row;
  }

  void forward() const { grouped_mlp_forward(mlp, input, h, out, workspace, Stream()); }
  void backward_data() const {
    grouped_mlp_backward_data(mlp, input, gradients, workspace, Stream());
  }
  void backward_weights(float beta = 0) const {
    grouped_mlp_backward_weights(mlp, input, gradients, {dw2.view(), {beta, {}}},
                                 {dw1.view(), {beta, {}}}, Stream());
  }
  void run() const {
    forward();
    backward_data();
    backward_weights();
  }
  std::vector<std::pair<const char*, const Tensor*>> results() const {
    return {{"H", &h},         {"O", &out},   {"dH", &dh},   {"A'", &a},    {"dX", &dx},
            {"dprob", &dprob}, {"dW1", &dw1}, {"dW2", &dw2}, {"db1", &db1}, {"db2", &db2}};
  }
};

// The table of groups without the cases of very many, which grouped_gemm's test has.
inline std::vector<GroupCase> mlp_cases() {
  std::vector<GroupCase> cases = group_cases();
  std::erase_if(cases, [](const GroupCase& c) { return c.counts.size() > 100; });
  return cases;
}

}  // namespace moiety::gemm
