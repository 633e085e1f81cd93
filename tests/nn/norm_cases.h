// Cases of norm and its backward pass, on a CPU and on a GPU.
#pragma once

#include "moiety/nn/norm.h"
#include "moiety/nn/rows.h"
#include "tests/support/tensors.h"

namespace moiety::nn {

struct NormCase {
  const char* name;
  int64_t rows, n;
  bool heads = false;  // rows are heads 0..2 of groups of four
  bool addend = false;
};

const NormCase kNormCases[] = {
    {"no_rows", 0, 8},
    {"one_row", 1, 64},
    {"one_column", 5, 1},
    {"odd_columns", 3, 257},
    {"one_block", 64, 32},
    {"several_blocks", 200, 48, false, true},
    {"long_row", 2, 1100},
    {"heads", 66, 16, true},
    {"heads_with_addend", 70, 10, true, true},
    {"heads_of_128", 130, 128, true},
    {"model_rows", 67, 2048, false, true},
    {"wide_rows", 3, 4104},
    {"longer_than_registers", 3, 8200},
    {"heads_of_64", 230, 64, true},
    {"rows_of_256", 100, 256},
    {"rows_of_octets_with_addend", 131, 24, false, true},
    {"many_rows_of_1024", 200, 1024, false, true},
    {"rows_of_two_turns", 129, 2056, false, true},
    {"rows_of_four_turns", 70, 7168, true},
    {"longest", 65, 16392, false, true},
};

// More rows than norm_order has classes.
const NormCase kNormManyRows[] = {
    {"many_rows", 300, 264},
    {"many_rows_with_addend", 1000, 520, false, true},
    {"many_heads_of_64", 6002, 64, true},
    {"many_heads_of_128", 2800, 128, true},
    {"many_heads_of_256", 2740, 256, true},
    {"many_short_rows_with_addend", 16500, 24, false, true},
};

// rows x n, or [rows / 2, 2, 3, n] cut out of [rows / 2, 2, 4, n].
struct NormRows {
  NormRows(const NormCase& c, DType dtype, unsigned seed)
      : storage(dtype, c.heads ? std::vector<int64_t>{c.rows / 2, 2, 4, c.n}
                               : std::vector<int64_t>{c.rows, c.n}) {
    view = c.heads ? storage.view().slice(2, 0, 3) : storage.view();
    fill_normal(view, seed);
  }
  Tensor storage;
  TensorView view;
};

struct NormProblem {
  NormProblem(const NormCase& c, DType dtype)
      : x(c, dtype, 1),
        y(c, dtype, 2),
        dy(c, dtype, 3),
        dx(c, dtype, 4),
        addend(c, dtype, 5),
        weight(normal_tensor(dtype, {c.n}, 6)),
        grad(normal_tensor(compute_dtype(dtype), {c.n}, 7)),
        workspace(compute_dtype(dtype), {norm_blocks(row_count(x.view), c.n), c.n}),
        with_addend(c.addend) {}
  NormArgs forward() const { return {x.view, weight, y.view, 1e-3f}; }
  NormBackwardArgs backward(bool accumulate) const {
    return {x.view,    weight, dy.view,   with_addend ? addend.view : TensorView(), dx.view, grad,
            workspace, 1e-3f,  accumulate};
  }
  NormRows x, y, dy, dx, addend;
  Tensor weight, grad, workspace;
  bool with_addend;
};

}  // namespace moiety::nn
