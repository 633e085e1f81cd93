#include <limits>
#include <vector>

#include "moiety/base/math.h"
#include "moiety/nn/attention.h"
#include "moiety/nn/element.h"

namespace moiety::nn {
namespace {

// One query head with its keys and values.
template <class T>
struct Head {
  using A = Compute<T>;

  Head(const AttentionArgs& a, int64_t b, int64_t g, int64_t m)
      : q(at(a.q_BSGMC, b, g, m)),
        k(at(a.k_BSGC, b, g, 0)),
        v(at(a.v_BSGC, b, g, 0)),
        o(at(a.o_BSGMC, b, g, m)),
        queries(a.q_BSGMC.size(1)),
        head_dim(a.q_BSGMC.size(4)),
        offset(a.k_BSGC.size(1) - queries),
        scale(1 / std::sqrt(static_cast<A>(head_dim))) {
    lse = a.lse_BGMS.data<A>() + ((b * a.q_BSGMC.size(2) + g) * a.q_BSGMC.size(3) + m) * queries;
    if (a.document_start_BS.defined()) start = a.document_start_BS.data<int32_t>() + b * queries;
  }

  // The rows of one head: position i is at data + i * stride.
  struct Rows {
    T* data;
    int64_t stride;
    T* operator[](int64_t i) const { return data + i * stride; }
  };
  static Rows at(const TensorView& x, int64_t b, int64_t g, int64_t m) {
    const int64_t head = x.dims() == 5 ? m * x.stride(3) : 0;
    return {x.data<T>() + b * x.stride(0) + g * x.stride(2) + head, x.stride(1)};
  }

  int64_t first_key(int64_t i) const { return start ? start[i] : 0; }
  int64_t last_key(int64_t i) const { return offset + i; }
  A dot(const T* x, const T* y) const {
    A sum = 0;
    for (int64_t c = 0; c < head_dim; ++c) {
      sum = std::fma(static_cast<A>(x[c]), static_cast<A>(y[c]), sum);
    }
    return sum;
  }
  A score(int64_t i, int64_t j) const { return scale * dot(q[i], k[j]); }

  Rows q, k, v, o;
  A* lse = nullptr;
  const int32_t* start = nullptr;
  int64_t queries, head_dim, offset;
  A scale;
};

template <class T, class A = Compute<T>>
void forward(const Head<T>& h) {
  std::vector<A> o(h.head_dim);
  for (int64_t i = 0; i < h.queries; ++i) {
    A max = -std::numeric_limits<A>::infinity();
    for (int64_t j = h.first_key(i); j <= h.last_key(i); ++j) {
      const A s = h.score(i, j);
      max = s > max ? s : max;
    }
    A sum = 0;
    std::fill(o.begin(), o.end(), A(0));
    for (int64_t j = h.first_key(i); j <= h.last_key(i); ++j) {
      const A p = exp_nonpositive(h.score(i, j) - max);
      sum += p;
      for (int64_t c = 0; c < h.head_dim; ++c) o[c] = std::fma(p, static_cast<A>(h.v[j][c]), o[c]);
    }
    for (int64_t c = 0; c < h.head_dim; ++c) h.o[i][c] = static_cast<T>(o[c] / sum);
    h.lse[i] = max + log(sum);
  }
}

// Adds the head's part to dk and dv [Sk, C] of its group and writes its dq.
template <class T, class A = Compute<T>>
void backward(const Head<T>& h, typename Head<T>::Rows d_out, typename Head<T>::Rows dq, A* dk,
              A* dv) {
  const int64_t n = h.head_dim;
  std::vector<A> dq_i(n);
  for (int64_t i = 0; i < h.queries; ++i) {
    const A delta = h.dot(d_out[i], h.o[i]);
    std::fill(dq_i.begin(), dq_i.end(), A(0));
    for (int64_t j = h.first_key(i); j <= h.last_key(i); ++j) {
      const A p = exp_nonpositive(h.score(i, j) - h.lse[i]);
      const A ds = h.scale * p * (h.dot(d_out[i], h.v[j]) - delta);
      for (int64_t c = 0; c < n; ++c) {
        dv[j * n + c] = std::fma(p, static_cast<A>(d_out[i][c]), dv[j * n + c]);
        dk[j * n + c] = std::fma(ds, static_cast<A>(h.q[i][c]), dk[j * n + c]);
        dq_i[c] = std::fma(ds, static_cast<A>(h.k[j][c]), dq_i[c]);
      }
    }
    for (int64_t c = 0; c < n; ++c) dq[i][c] = static_cast<T>(dq_i[c]);
  }
}

template <class T>
void backward_all(const AttentionBackwardArgs& a) {
  using A = Compute<T>;
  const TensorView& q = a.forward.q_BSGMC;
  const int64_t keys = a.forward.k_BSGC.size(1), n = q.size(4);
  for (int64_t b = 0; b < q.size(0); ++b) {
    for (int64_t g = 0; g < q.size(2); ++g) {
      std::vector<A> dk(keys * n), dv(keys * n);
      for (int64_t m = 0; m < q.size(3); ++m) {
        backward(Head<T>(a.forward, b, g, m), Head<T>::at(a.do_BSGMC, b, g, m),
                 Head<T>::at(a.dq_BSGMC, b, g, m), dk.data(), dv.data());
      }
      for (int64_t j = 0; j < keys; ++j) {
        for (int64_t c = 0; c < n; ++c) {
          Head<T>::at(a.dk_BSGC, b, g, 0)[j][c] = static_cast<T>(dk[j * n + c]);
          Head<T>::at(a.dv_BSGC, b, g, 0)[j][c] = static_cast<T>(dv[j * n + c]);
        }
      }
    }
  }
}

}  // namespace

void attention_ref(const AttentionArgs& a) {
  with_element(a.q_BSGMC.dtype(), [&](auto element) {
    const TensorView& q = a.q_BSGMC;
    for (int64_t b = 0; b < q.size(0); ++b) {
      for (int64_t g = 0; g < q.size(2); ++g) {
        for (int64_t m = 0; m < q.size(3); ++m) forward(Head<decltype(element)>(a, b, g, m));
      }
    }
  });
}

void attention_backward_ref(const AttentionBackwardArgs& a) {
  with_element(a.forward.q_BSGMC.dtype(),
               [&](auto element) { backward_all<decltype(element)>(a); });
}

}  // namespace moiety::nn
