#include "moiety/model/config.h"

#include <algorithm>
#include <cmath>

#include "moiety/base/error.h"
#include "moiety/model/needs.h"

namespace moiety::model {
namespace {

// Weight elements that one token uses in a layer's linears.
struct LayerSizes {
  int64_t attention, router, expert, shared, dense;
};

LayerSizes layer_sizes(const Config& c) {
  const int64_t d = c.d_model;
  const auto network = [&](int64_t ffn) { return (c.activation.hidden(ffn) + ffn) * d; };
  return {.attention = (c.qkv_size() + c.heads * c.head_size()) * d,
          .router = d * c.router.experts,
          .expert = network(c.d_ffn),
          .shared = network(c.shared_d_ffn),
          .dense = network(c.d_ffn_dense)};
}

// Elements of an expert's biases.
int64_t bias_size(const Config& c) {
  return c.expert_bias ? c.activation.hidden(c.d_ffn) + c.d_model : 0;
}

void check_range(const char* key, int64_t value, int64_t low, int64_t high) {
  MOIETY_CHECK(value >= low && value <= high, "{}={} must be in {}..{}", key, value, low, high);
}

void check_layers(const Config& c) {
  check_range("model.moe_every", c.moe_every, 1, c.layers);
  for (const int64_t layer : c.dense_layers) {
    check_range("model.dense_layers", layer, 0, c.layers - 1);
  }
  MOIETY_CHECK(c.moe_layers() == c.layers || c.d_ffn_dense >= 1,
               "model.d_ffn_dense={} is needed by {} dense layers", c.d_ffn_dense,
               c.layers - c.moe_layers());
}

void check_moe(const Config& c) {
  check_range("moe.experts", c.router.experts, 1, 4096);
  check_range("moe.top_k", c.router.top_k, 1, std::min<int64_t>(c.router.experts, 32));
  const moe::RouterConfig& r = c.router;
  MOIETY_CHECK(r.groups >= 1 && r.experts % r.groups == 0,
               "router.groups={} must divide moe.experts={}", r.groups, r.experts);
  check_range("router.group_top_k", r.group_top_k, 1, r.groups);
  MOIETY_CHECK(r.group_top_k * (r.experts / r.groups) >= r.top_k,
               "router.group_top_k={} of router.groups={} have fewer experts than moe.top_k={}",
               r.group_top_k, r.groups, r.top_k);
  moe::check(r);
  MOIETY_CHECK(c.d_ffn >= 8 && c.d_ffn % 8 == 0, "moe.d_ffn={} must be a multiple of 8", c.d_ffn);
  MOIETY_CHECK(c.shared_d_ffn >= 0, "moe.shared_d_ffn={} must not be negative", c.shared_d_ffn);
  MOIETY_CHECK(!c.shared_gate || c.shared_d_ffn > 0,
               "moe.shared_gate=true needs moe.shared_d_ffn > 0");
  const int64_t s = c.glu_interleave;
  MOIETY_CHECK(s == 0 || c.activation.gated(),
               "moe.glu_interleave={}: moe.activation has no gate to interleave, expected 0", s);
  MOIETY_CHECK(s >= 0 && s % 8 == 0 && (s == 0 || c.d_ffn % s == 0),
               "moe.glu_interleave={} must be 0, or a multiple of 8 that divides moe.d_ffn={}", s,
               c.d_ffn);
}

void check_activation(const gemm::Activation& a) {
  if (!a.gated()) return;
  MOIETY_CHECK(a.alpha > 0 && std::isfinite(a.alpha), "moe.act_alpha={} must be above 0", a.alpha);
  MOIETY_CHECK(a.limit > 0, "moe.act_limit={} must be above 0", a.limit);
  MOIETY_CHECK(std::isfinite(a.offset), "moe.act_offset={} must be finite", a.offset);
}

}  // namespace

bool Config::is_moe(int64_t layer) const {
  return (layer + 1) % moe_every == 0 &&
         std::find(dense_layers.begin(), dense_layers.end(), layer) == dense_layers.end();
}

int64_t Config::moe_layers() const {
  int64_t n = 0;
  for (int64_t l = 0; l < layers; ++l) n += is_moe(l);
  return n;
}

void check(const Config& c) {
  check_range("model.vocab", c.vocab, 2, int64_t{1} << 24);
  check_range("model.d_model", c.d_model, 8, 65536);
  MOIETY_CHECK(c.d_model % 8 == 0, "model.d_model={} must be a multiple of 8", c.d_model);
  check_range("model.layers", c.layers, 1, 1024);
  check_range("model.heads", c.heads, 1, 1024);
  check_range("model.kv_heads", c.kv_heads, 1, c.heads);
  MOIETY_CHECK(c.heads % c.kv_heads == 0, "model.kv_heads={} must divide model.heads={}",
               c.kv_heads, c.heads);
  MOIETY_CHECK(c.head_dim != 0 || c.d_model % c.heads == 0,
               "model.head_dim=0 needs model.heads={} to divide model.d_model={}", c.heads,
               c.d_model);
  MOIETY_CHECK(c.head_size() % 2 == 0, "model.head_dim={} must be even", c.head_size());
  check_range("model.head_dim", c.head_size(), 8, 256);
  MOIETY_CHECK(c.rope_theta > 1, "model.rope_theta={} must be above 1", c.rope_theta);
  MOIETY_CHECK(c.norm_eps >= 1e-12f && c.norm_eps <= 1e-2f,
               "model.norm_eps={} must be in 1e-12..1e-2", c.norm_eps);
  check_layers(c);
  check_activation(c.activation);
  if (c.moe_layers() > 0) check_moe(c);
  MOIETY_CHECK(c.init_std >= 0, "init.std={} must not be negative", c.init_std);
  MOIETY_CHECK(c.loss_z_coef >= 0, "train.loss_z_coef={} must not be negative", c.loss_z_coef);
  MOIETY_CHECK(c.loss_chunk >= 0, "memory.loss_chunk={} must not be negative", c.loss_chunk);
  Frozen{c};
}

Config preset(std::string_view name) {
  Config c;
  if (name == "tiny") return c;
  c.router.aux = moe::AuxLoss::kHf;
  c.head_dim = 128;
  if (name == "mixtral-8x7b") {
    c.vocab = 32000;
    c.d_model = 4096;
    c.layers = 32;
    c.heads = 32;
    c.kv_heads = 8;
    c.qk_norm = false;
    c.norm_eps = 1e-5f;
    c.d_ffn = 14336;
    c.router.aux_coef = 0.02f;
    return c;
  }
  const bool small = name == "qwen3-30b-a3b";
  MOIETY_CHECK(small || name == "qwen3-235b-a22b",
               "model.preset={}: there are tiny, qwen3-30b-a3b, qwen3-235b-a22b, mixtral-8x7b",
               name);
  c.vocab = 151936;
  c.d_model = small ? 2048 : 4096;
  c.layers = small ? 48 : 94;
  c.heads = small ? 32 : 64;
  c.kv_heads = 4;
  c.d_ffn = small ? 768 : 1536;
  c.router.experts = 128;
  c.router.top_k = 8;
  return c;
}

int64_t parameter_count(const Config& c) {
  const LayerSizes size = layer_sizes(c);
  const int64_t d = c.d_model, norms = 2 * d + (c.qk_norm ? 2 * c.head_size() : 0);
  const int64_t moe = size.router + c.router.experts * (size.expert + bias_size(c)) + size.shared +
                      (c.shared_gate ? d : 0);
  return (c.tie_embeddings ? 1 : 2) * c.vocab * d + c.layers * (size.attention + norms) +
         c.moe_layers() * moe + (c.layers - c.moe_layers()) * size.dense + d;
}

int64_t active_parameter_count(const Config& c) {
  const int64_t idle = c.router.experts - c.router.top_k;
  return parameter_count(c) - c.moe_layers() * idle * (layer_sizes(c).expert + bias_size(c));
}

namespace {

// Products with matrices of so many elements: the one of forward, and those of its gradients.
double products(int64_t elements, bool input, bool weight) {
  return 2.0 * static_cast<double>(elements) * (1 + input + weight);
}

double network_flops(const Config& c, int64_t ffn, const NetworkNeeds& n) {
  return products(c.activation.hidden(ffn) * c.d_model, n.input, n.fc1) +
         products(ffn * c.d_model, n.inner, n.fc2);
}

double expert_flops(const Config& c, const FfnNeeds& n) {
  return network_flops(c, c.d_ffn,
                       {.input = n.routed, .inner = n.experts, .fc1 = n.fc1, .fc2 = n.fc2});
}

}  // namespace

double flops_per_token(const Config& c, int64_t seq_len, bool causal) {
  const Frozen frozen(c);
  const int64_t d = c.d_model, core = (causal ? 1 : 2) * c.heads * c.head_size() * seq_len;
  const HeadNeeds head = head_needs(c, frozen);
  double flops = products(c.vocab * d, head.input, head.weight);
  for (int64_t l = 0; l < c.layers; ++l) {
    const AttentionNeeds a = attention_needs(c, frozen, l);
    const FfnNeeds f = ffn_needs(c, frozen, l);
    flops += products(c.qkv_size() * d, a.input, a.qkv) +
             products(c.heads * c.head_size() * d, a.core, a.o) + products(core, a.core, a.core);
    if (!c.is_moe(l)) {
      flops += network_flops(c, c.d_ffn_dense, f.network);
      continue;
    }
    flops += products(d * c.router.experts, f.routed, f.router) +
             static_cast<double>(c.router.top_k) * expert_flops(c, f) +
             network_flops(c, c.shared_d_ffn, f.network);
  }
  return flops;
}

double flops_per_pair(const Config& c) {
  const Frozen frozen(c);
  double sum = 0;
  for (int64_t l = 0; l < c.layers; ++l) {
    if (c.is_moe(l)) sum += expert_flops(c, ffn_needs(c, frozen, l));
  }
  return sum / static_cast<double>(std::max<int64_t>(c.moe_layers(), 1));
}

}  // namespace moiety::model
