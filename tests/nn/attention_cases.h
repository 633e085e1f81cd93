// Cases of attention, and exact results with the bounds of the header.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "moiety/nn/attention.h"
#include "tests/support/tensors.h"

namespace moiety::nn {

struct Case {
  const char* name;
  int64_t sequences, queries, keys, heads, kv_heads, head_dim;
  int documents = 0;  // every sequence is cut into so many
};

inline const Case kCases[] = {
    {"one_token", 1, 1, 1, 2, 1, 8},         {"two_tokens", 2, 2, 2, 2, 2, 8},
    {"no_grouping", 1, 33, 33, 3, 3, 8},     {"one_group", 2, 40, 40, 4, 1, 16},
    {"odd_head_dim", 1, 70, 70, 4, 2, 10},   {"tiny_head", 1, 17, 17, 2, 1, 2},
    {"large_head", 1, 37, 37, 2, 1, 256},    {"several_blocks", 1, 200, 200, 2, 1, 32},
    {"documents", 2, 150, 150, 4, 2, 16, 5}, {"documents_of_one_token", 1, 20, 20, 2, 1, 8, 20},
    {"decode_one", 2, 1, 77, 4, 2, 16},      {"decode_some", 1, 5, 69, 4, 2, 16},
};

// Inputs and outputs of one case; float64 or a storage dtype.
struct Problem {
  Problem(const Case& c_in, DType dtype) : c(c_in) {
    const int64_t m = c.heads / c.kv_heads;
    const std::vector<int64_t> q{c.sequences, c.queries, c.kv_heads, m, c.head_dim};
    const std::vector<int64_t> k{c.sequences, c.keys, c.kv_heads, c.head_dim};
    const DType compute = compute_dtype(dtype);
    tensors.push_back(normal_tensor(dtype, q, 1, 1.5));
    tensors.push_back(normal_tensor(dtype, k, 2, 1.5));
    tensors.push_back(normal_tensor(dtype, k, 3));
    tensors.push_back(normal_tensor(dtype, q, 4));
    for (const auto& sizes : {q, q, k, k}) tensors.emplace_back(dtype, sizes);
    const std::vector<int64_t> lse_sizes{c.sequences, c.kv_heads, m, c.queries};
    tensors.emplace_back(compute, lse_sizes);
    std::vector<int32_t> start;
    for (int64_t i = 0; i < c.sequences * c.queries; ++i) {
      const int64_t position = c.keys - c.queries + i % c.queries;
      const int64_t length = c.documents ? (c.keys + c.documents - 1) / c.documents : c.keys;
      start.push_back(static_cast<int32_t>(position / length * length));
    }
    if (c.documents) {
      tensors.push_back(int32_tensor(start));
      documents = tensors.back().view().reshape({c.sequences, c.queries});
    }
    document_start = start;
  }
  const TensorView& q() const { return tensors[0]; }
  const TensorView& k() const { return tensors[1]; }
  const TensorView& v() const { return tensors[2]; }
  const TensorView& d_out() const { return tensors[3]; }
  const TensorView& o() const { return tensors[4]; }
  const TensorView& lse() const { return tensors[8]; }
  AttentionArgs forward() const { return {q(), k(), v(), documents, o(), lse()}; }
  AttentionBackwardArgs backward() const {
    return {forward(), d_out(), tensors[5], tensors[6], tensors[7]};
  }

  Case c;
  std::vector<Tensor> tensors;
  TensorView documents;
  std::vector<int32_t> document_start;
};

// Expected results and how far off they may be.
struct Oracle {
  std::vector<double> o, lse, dq, dk, dv, o_bound, lse_bound, dq_bound, dk_bound, dv_bound;
};

// One head by its definition: rows i, keys j.
struct OracleHead {
  const Problem& p;
  int64_t b, g, m;
  int64_t q_row(int64_t i) const {
    return (((b * p.c.queries + i) * p.c.kv_heads + g) * (p.c.heads / p.c.kv_heads) + m) *
           p.c.head_dim;
  }
  int64_t k_row(int64_t j) const { return ((b * p.c.keys + j) * p.c.kv_heads + g) * p.c.head_dim; }
  int64_t lse_index(int64_t i) const {
    return ((b * p.c.kv_heads + g) * (p.c.heads / p.c.kv_heads) + m) * p.c.queries + i;
  }
};

inline constexpr double kU = 0x1p-23;

struct Values {
  explicit Values(const Problem& p)
      : q(values(p.q())),
        k(values(p.k())),
        v(values(p.v())),
        d_out(values(p.d_out())),
        o(values(p.o())),
        lse(values(p.lse())) {}
  std::vector<double> q, k, v, d_out, o, lse;
};

inline void oracle_row(const OracleHead& h, const Values& x, int64_t i, bool backward,
                       double rounding, double of_heads, Oracle& out) {
  const Case& c = h.p.c;
  const int64_t n = c.head_dim, first = h.p.document_start[h.b * c.queries + i];
  const int64_t last = c.keys - c.queries + i, qi = h.q_row(i), li = h.lse_index(i);
  const double scale = 1 / std::sqrt(double(n)), nm = double(c.keys * (c.heads / c.kv_heads));
  std::vector<double> s(last + 1);
  double a = 0, max = -1e300, sum = 0, b = 0, delta = 0, delta_abs = 0;
  for (int64_t j = first; j <= last; ++j) {
    double abs = 0, dp_abs = 0;
    for (int64_t d = 0; d < n; ++d) {
      s[j] += scale * x.q[qi + d] * x.k[h.k_row(j) + d];
      abs += scale * std::abs(x.q[qi + d] * x.k[h.k_row(j) + d]);
      dp_abs += std::abs(x.d_out[qi + d] * x.v[h.k_row(j) + d]);
    }
    a = std::max(a, abs);
    b = std::max(b, dp_abs);
    max = std::max(max, s[j]);
  }
  for (int64_t j = first; j <= last; ++j) sum += std::exp(s[j] - max);
  const double lse = backward ? x.lse[li] : max + std::log(sum);
  const double e = kU * (2 * double(n + 4) * a + double(c.keys) + 16 + 2 * std::abs(lse));
  for (int64_t d = 0; d < n; ++d) {
    delta += x.d_out[qi + d] * x.o[qi + d];
    delta_abs += std::abs(x.d_out[qi + d] * x.o[qi + d]);
  }
  if (!backward) {
    out.lse[li] = lse;
    out.lse_bound[li] = e;
  }
  std::vector<double> v_max(n), v_sum(n);
  for (int64_t j = first; j <= last; ++j) {
    const double p = std::exp(s[j] - lse);
    double dp = 0;
    for (int64_t d = 0; d < n; ++d) dp += x.d_out[qi + d] * x.v[h.k_row(j) + d];
    const double ds = scale * p * (dp - delta);
    const double t =
        scale * p * (b + delta_abs) * (e + kU * (double(n) + nm + 16)) + rounding * std::abs(ds);
    for (int64_t d = 0; d < n; ++d) {
      const int64_t kj = h.k_row(j) + d;
      if (!backward) {
        out.o[qi + d] += p * x.v[kj];
        v_max[d] = std::max(v_max[d], std::abs(x.v[kj]));
        v_sum[d] += p * std::abs(x.v[kj]);
        continue;
      }
      out.dv[kj] += p * x.d_out[qi + d];
      out.dv_bound[kj] += (e + kU * nm + rounding + of_heads) * p * std::abs(x.d_out[qi + d]);
      out.dq[qi + d] += ds * x.k[kj];
      out.dq_bound[qi + d] += t * std::abs(x.k[kj]);
      out.dk[kj] += ds * x.q[qi + d];
      out.dk_bound[kj] += (t + of_heads * std::abs(ds)) * std::abs(x.q[qi + d]);
    }
  }
  for (int64_t d = 0; d < n && !backward; ++d)
    out.o_bound[qi + d] = e * v_max[d] + rounding * v_sum[d];
}

// Backward takes o and lse as they are stored in the problem. rounding: w of the header; of_heads:
// what dK and dV have besides.
inline Oracle oracle(const Problem& p, bool backward, double rounding = 0, double of_heads = 0) {
  Oracle out;
  const Values x(p);
  for (auto* v : {&out.o, &out.dq, &out.o_bound, &out.dq_bound}) v->resize(p.q().numel());
  for (auto* v : {&out.dk, &out.dv, &out.dk_bound, &out.dv_bound}) v->resize(p.k().numel());
  for (auto* v : {&out.lse, &out.lse_bound}) v->resize(p.lse().numel());
  for (int64_t b = 0; b < p.c.sequences; ++b) {
    for (int64_t g = 0; g < p.c.kv_heads; ++g) {
      for (int64_t m = 0; m < p.c.heads / p.c.kv_heads; ++m) {
        for (int64_t i = 0; i < p.c.queries; ++i) {
          oracle_row({p, b, g, m}, x, i, backward, rounding, of_heads, out);
        }
      }
    }
  }
  return out;
}

inline void expect_within(const TensorView& x, const std::vector<double>& expected,
                          const std::vector<double>& bound, const std::string& what) {
  for (int64_t i = 0; i < x.numel(); ++i) {
    const double limit = bound[i] + half_ulp(x.dtype(), expected[i]) * 1.01;
    ASSERT_NEAR(get(x, i), expected[i], limit) << what << " element " << i;
  }
}

inline void expect_forward(const Problem& p, const std::string& what, double rounding = 0) {
  const Oracle e = oracle(p, false, rounding);
  expect_within(p.o(), e.o, e.o_bound, what + " o");
  expect_within(p.lse(), e.lse, e.lse_bound, what + " lse");
}

inline void expect_backward(const Problem& p, const std::string& what, double rounding = 0,
                            double of_heads = 0) {
  const Oracle e = oracle(p, true, rounding, of_heads);
  expect_within(p.tensors[5], e.dq, e.dq_bound, what + " dq");
  expect_within(p.tensors[6], e.dk, e.dk_bound, what + " dk");
  expect_within(p.tensors[7], e.dv, e.dv_bound, what + " dv");
}

}  // namespace moiety::nn
