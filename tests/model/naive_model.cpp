#include "tests/model/naive_model.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>

namespace moiety::model {
namespace {

using Vector = std::vector<double>;

// Rows of `x` [T, k] times the transpose of `w` [n, k].
Vector times(const Vector& x, const Vector& w, int64_t k) {
  const int64_t rows = x.size() / k, n = w.size() / k;
  Vector y(rows * n);
  for (int64_t t = 0; t < rows; ++t) {
    for (int64_t j = 0; j < n; ++j) {
      y[t * n + j] = std::inner_product(&x[t * k], &x[t * k] + k, &w[j * k], 0.0);
    }
  }
  return y;
}

void normalize(double* x, const Vector& g, double eps) {
  double squares = 0;
  for (size_t d = 0; d < g.size(); ++d) squares += x[d] * x[d];
  const double r = 1 / std::sqrt(squares / double(g.size()) + eps);
  for (size_t d = 0; d < g.size(); ++d) x[d] *= r * g[d];
}

Vector normalized(Vector x, const Vector& g, double eps) {
  for (size_t t = 0; t < x.size(); t += g.size()) normalize(&x[t], g, eps);
  return x;
}

void rotate(double* x, int64_t head_dim, int64_t position, double theta) {
  const int64_t half = head_dim / 2;
  for (int64_t i = 0; i < half; ++i) {
    // The angle is defined in float.
    const float power = static_cast<float>(std::pow(theta, 2.0 * double(i) / double(head_dim)));
    const float angle = static_cast<float>(position) * (1.0f / power);
    const double c = std::cos(double(angle)), s = std::sin(double(angle));
    const double low = x[i], high = x[i + half];
    x[i] = low * c - high * s;
    x[i + half] = high * c + low * s;
  }
}

// The matrices and, if there are any, the biases of a network.
struct Mlp {
  const double *fc1, *fc2, *b1 = nullptr, *b2 = nullptr;
};

// fc2(activation(fc1(x))) of one row.
Vector mlp(const gemm::Activation& act, const Vector& x, const Mlp& w, int64_t ffn) {
  const int64_t d = x.size(), hidden = act.hidden(ffn);
  Vector h(hidden), y(d);
  for (int64_t f = 0; f < hidden; ++f) {
    h[f] = std::inner_product(x.begin(), x.end(), w.fc1 + f * d, w.b1 ? w.b1[f] : 0.0);
  }
  if (w.b2) std::copy_n(w.b2, d, y.begin());
  for (int64_t f = 0; f < ffn; ++f) {
    double a = h[f];
    if (act.kind == gemm::ActivationKind::kSquaredRelu) {
      a = a > 0 ? a * a : 0;
    } else {
      const double gate = std::min(a, double(act.limit));
      const double up = std::clamp(h[ffn + f], -double(act.limit), double(act.limit));
      a = gate / (1 + std::exp(-double(act.alpha) * gate)) * (up + double(act.offset));
    }
    for (int64_t i = 0; i < d; ++i) y[i] += a * w.fc2[i * ffn + f];
  }
  return y;
}

struct Naive {
  const Config& c;
  const Weights& w;
  const NaiveBatch& b;
  const Choice& choice;
  NaiveResult out;
  // Sums that the routing losses are made of, by MoE layer: [segment][E].
  std::vector<std::vector<Vector>> pairs, probability;
  double lse2 = 0;

  const Vector& weight(int64_t layer, const std::string& name) const {
    return w.at("layers." + std::to_string(layer) + "." + name);
  }

  Vector heads(int64_t layer, const Vector& h, const char* name) const {
    const int64_t n = c.head_size();
    Vector x = times(h, weight(layer, std::string("attn.") + name + ".weight"), c.d_model);
    if (*name == 'v') return x;
    const int64_t count = x.size() / b.tokens() / n;
    for (int64_t i = 0; i < b.tokens() * count; ++i) {
      const int64_t t = i / count;
      if (c.qk_norm) {
        normalize(&x[i * n], weight(layer, std::string("attn.") + name + "_norm.weight"),
                  double(c.norm_eps));
      }
      rotate(&x[i * n], n, b.position.empty() ? t % b.seq_len : b.position[t], c.rope_theta);
    }
    return x;
  }

  void attention(int64_t layer, Vector& x) const {
    const int64_t n = c.head_size(), heads_per_group = c.heads / c.kv_heads;
    const Vector h = normalized(x, weight(layer, "attn_norm.weight"), double(c.norm_eps));
    const Vector q = heads(layer, h, "q"), k = heads(layer, h, "k"), v = heads(layer, h, "v");
    Vector o(q.size());
    for (int64_t t = 0; t < b.tokens(); ++t) {
      const int64_t s = t % b.seq_len, document = b.position.empty() ? s : b.position[t];
      for (int64_t j = 0; j < c.heads; ++j) {
        const double* qt = &q[(t * c.heads + j) * n];
        const int64_t g = j / heads_per_group;
        Vector p;
        for (int64_t u = t - document; u <= t; ++u) {
          p.push_back(std::inner_product(qt, qt + n, &k[(u * c.kv_heads + g) * n], 0.0) /
                      std::sqrt(double(n)));
        }
        const double max = *std::max_element(p.begin(), p.end());
        double sum = 0;
        for (double& e : p) sum += e = std::exp(e - max);
        for (size_t u = 0; u < p.size(); ++u) {
          const double* vu = &v[((t - document + u) * c.kv_heads + g) * n];
          for (int64_t i = 0; i < n; ++i) o[(t * c.heads + j) * n + i] += p[u] / sum * vu[i];
        }
      }
    }
    const Vector y = times(o, weight(layer, "attn.o.weight"), c.heads * n);
    for (size_t i = 0; i < x.size(); ++i) x[i] += y[i];
  }

  // The K best experts of one token.
  std::vector<int64_t> best(int64_t layer, const Vector& p) const {
    const moe::RouterConfig& r = c.router;
    const Vector& bias = weight(layer, "moe.router.bias");
    Vector score(p);
    for (int64_t e = 0; e < r.experts; ++e) score[e] += bias[e];
    const int64_t size = r.experts / r.groups;
    std::vector<std::pair<double, int64_t>> groups;
    for (int64_t g = 0; g < r.groups; ++g) {
      Vector s(score.begin() + g * size, score.begin() + (g + 1) * size);
      std::sort(s.begin(), s.end(), std::greater<>());
      groups.push_back({-(s[0] + (size > 1 ? s[1] : 0)), g});
    }
    std::sort(groups.begin(), groups.end());
    std::vector<std::pair<double, int64_t>> order;
    for (int64_t i = 0; i < (r.groups > 1 ? r.group_top_k : 1); ++i) {
      for (int64_t e = groups[i].second * size; e < (groups[i].second + 1) * size; ++e) {
        order.push_back({-score[e], e});
      }
    }
    std::sort(order.begin(), order.end());
    std::vector<int64_t> chosen;
    for (int64_t k = 0; k < r.top_k; ++k) chosen.push_back(order[k].second);
    return chosen;
  }

  // Weights of the chosen experts of token t; adds to the statistics.
  Vector route(int64_t layer, int64_t index, int64_t t, const Vector& h,
               std::vector<int64_t>& chosen) {
    const moe::RouterConfig& r = c.router;
    const Vector x = times(h, weight(layer, "moe.router.weight"), c.d_model);
    Vector p(x.size());
    double sum = 0;
    for (const double v : x) sum += std::exp(v);
    for (size_t e = 0; e < p.size(); ++e) {
      p[e] = r.score == moe::Score::kSoftmax ? std::exp(x[e]) / sum : 1 / (1 + std::exp(-x[e]));
    }
    if (choice.empty()) {
      chosen = best(layer, p);
    } else {
      const auto first = choice[index].begin() + t * r.top_k;
      chosen.assign(first, first + r.top_k);
    }
    double z = r.score == moe::Score::kSigmoid ? 1e-20 : 0;
    for (const int64_t e : chosen) z += p[e];
    Vector weights;
    for (const int64_t e : chosen)
      weights.push_back(double(r.scale) * p[e] / (r.renormalize ? z : 1));
    const int64_t segment = pairs[index].size() == 1 ? 0 : t / b.seq_len;
    const double all = std::accumulate(p.begin(), p.end(), 0.0);
    for (size_t e = 0; e < p.size(); ++e) {
      probability[index][segment][e] += r.score == moe::Score::kSoftmax ? p[e] : p[e] / all;
    }
    for (const int64_t e : chosen) pairs[index][segment][e] += 1;
    lse2 += std::log(sum) * std::log(sum);
    return weights;
  }

  void experts(int64_t layer, int64_t index, Vector& x) {
    const int64_t d = c.d_model, hidden = c.activation.hidden(c.d_ffn);
    const Vector h_all = normalized(x, weight(layer, "mlp_norm.weight"), double(c.norm_eps));
    for (int64_t t = 0; t < b.tokens(); ++t) {
      const Vector h(&h_all[t * d], &h_all[t * d] + d);
      std::vector<int64_t> chosen;
      const Vector weights = route(layer, index, t, h, chosen);
      out.choice[index].insert(out.choice[index].end(), chosen.begin(), chosen.end());
      for (size_t k = 0; k < chosen.size(); ++k) {
        Mlp w{&weight(layer, "moe.experts.fc1.weight")[chosen[k] * hidden * d],
              &weight(layer, "moe.experts.fc2.weight")[chosen[k] * c.d_ffn * d]};
        if (c.expert_bias) {
          w.b1 = &weight(layer, "moe.experts.fc1.bias")[chosen[k] * hidden];
          w.b2 = &weight(layer, "moe.experts.fc2.bias")[chosen[k] * d];
        }
        const Vector y = mlp(c.activation, h, w, c.d_ffn);
        for (int64_t i = 0; i < d; ++i) x[t * d + i] += weights[k] * y[i];
      }
      if (c.shared_d_ffn == 0) continue;
      double gate = 1;
      if (c.shared_gate) {
        gate = 1 / (1 + std::exp(-times(h, weight(layer, "moe.shared.gate.weight"), d)[0]));
      }
      const Vector y = mlp(c.activation, h,
                           {weight(layer, "moe.shared.fc1.weight").data(),
                            weight(layer, "moe.shared.fc2.weight").data()},
                           c.shared_d_ffn);
      for (int64_t i = 0; i < d; ++i) x[t * d + i] += gate * y[i];
    }
  }

  void dense(int64_t layer, Vector& x) const {
    const int64_t d = c.d_model;
    const Vector h_all = normalized(x, weight(layer, "mlp_norm.weight"), double(c.norm_eps));
    for (int64_t t = 0; t < b.tokens(); ++t) {
      const Vector y =
          mlp(c.activation, Vector(&h_all[t * d], &h_all[t * d] + d),
              {weight(layer, "mlp.fc1.weight").data(), weight(layer, "mlp.fc2.weight").data()},
              c.d_ffn_dense);
      for (int64_t i = 0; i < d; ++i) x[t * d + i] += y[i];
    }
  }

  double aux() const {
    const double tokens = double(b.tokens()), experts = double(c.router.experts);
    const double k = double(c.router.top_k), layers = double(pairs.size());
    double sum = 0;
    Vector pooled_f(c.router.experts), pooled_p(c.router.experts);
    for (size_t l = 0; l < pairs.size(); ++l) {
      for (size_t s = 0; s < pairs[l].size(); ++s) {
        for (int64_t e = 0; e < c.router.experts; ++e) {
          const double f = pairs[l][s][e], p = probability[l][s][e];
          if (c.router.aux == moe::AuxLoss::kSwitch) {
            sum += experts * f / (k * tokens) * p / tokens;
          } else if (c.router.aux == moe::AuxLoss::kSequence) {
            const double length = double(b.seq_len);
            sum += f * experts / (k * length) * p / length / double(b.sequences);
          }
          pooled_f[e] += f / (layers * tokens);
          pooled_p[e] += p / (layers * tokens);
        }
      }
    }
    if (c.router.aux != moe::AuxLoss::kHf) return sum;
    return experts * std::inner_product(pooled_f.begin(), pooled_f.end(), pooled_p.begin(), 0.0);
  }

  void loss(const Vector& x) {
    const Vector& head = w.at(c.tie_embeddings ? "embed.weight" : "head.weight");
    out.logits =
        times(normalized(x, w.at("final_norm.weight"), double(c.norm_eps)), head, c.d_model);
    double targets = 0;
    for (int64_t t = 0; t < b.tokens(); ++t) {
      out.loss.push_back(0);
      if (!b.is_target(t)) continue;
      const double* z = &out.logits[t * c.vocab];
      const double max = *std::max_element(z, z + c.vocab);
      double sum = 0;
      for (int64_t v = 0; v < c.vocab; ++v) sum += std::exp(z[v] - max);
      const double lse = max + std::log(sum);
      out.loss[t] = lse - z[b.target[t]];
      out.loss_sum += out.loss[t];
      out.objective += out.loss[t] + double(c.loss_z_coef) * lse * lse;
      ++targets;
    }
    if (pairs.empty()) return;
    out.aux = aux();
    out.z = lse2 / double(b.tokens());
    out.objective +=
        targets * (double(c.router.aux_coef) * out.aux + double(c.router.z_coef) * out.z);
  }
};

}  // namespace

NaiveResult naive_forward(const Config& c, const Weights& w, const NaiveBatch& b,
                          const Choice& choice) {
  Naive m{c, w, b, choice, {}, {}, {}};
  const int64_t segments = c.router.aux == moe::AuxLoss::kSequence ? b.sequences : 1;
  const std::vector<Vector> zeros(segments, Vector(c.router.experts));
  m.pairs.assign(c.moe_layers(), zeros);
  m.probability.assign(c.moe_layers(), zeros);
  m.out.choice.resize(c.moe_layers());
  Vector x;
  for (const int32_t token : b.token) {
    const double* row = &w.at("embed.weight")[token * c.d_model];
    x.insert(x.end(), row, row + c.d_model);
  }
  int64_t index = 0;
  for (int64_t l = 0; l < c.layers; ++l) {
    m.attention(l, x);
    if (c.is_moe(l)) {
      m.experts(l, index++, x);
    } else {
      m.dense(l, x);
    }
  }
  m.loss(x);
  return m.out;
}

}  // namespace moiety::model
