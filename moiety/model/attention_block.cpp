#include "moiety/model/attention_block.h"

#include <algorithm>
#include <cmath>

#include "moiety/base/copy.h"
#include "moiety/model/block_ops.h"
#include "moiety/model/tensor_parallel.h"
#include "moiety/nn/rope.h"

namespace moiety::model {
namespace {

// Copies rows of `from` [n, G, C] to rows [begin, begin + n) of `to` [P, G, C]; both are strided. A
// copy knows one stride, so it is made row by row or, if there are more rows than groups, group by
// group.
void copy_rows(TensorView from, TensorView to, int64_t begin, Stream stream) {
  const TensorView rows = to.slice(0, begin, begin + from.size(0));
  if (from.size(0) < from.size(1)) {
    for (int64_t i = 0; i < from.size(0); ++i) copy(rows.select(i), from.select(i), stream);
    return;
  }
  for (int64_t g = 0; g < from.size(1); ++g) {
    copy(rows.slice(1, g, g + 1), from.slice(1, g, g + 1), stream);
  }
}

}  // namespace

AttentionBlock::AttentionBlock(const Config& c, int64_t layer, TpPlace place, const Frozen& frozen)
    : layer_(layer),
      d_model_(c.d_model),
      heads_(c.heads / place.size),
      kv_heads_(c.kv_heads / place.size),
      head_dim_(c.head_size()),
      eps_(c.norm_eps),
      std_(c.init_std),
      out_std_(residual_std(c)),
      qk_norm_(c.qk_norm),
      needs_(attention_needs(c, frozen, layer)),
      qkv_(qkv_layout(c, place)),
      o_(o_layout(c, place)) {}

// The parameter that holds q, k and v: for each group its query heads, key head and value head.
optim::ParamSpec AttentionBlock::qkv_spec(const std::string& prefix) const {
  const gtp::Layout& layout = qkv_.layout();
  const int64_t query_rows = heads_ / kv_heads_ * head_dim_;
  const int64_t first_group = layout.tp_rank * kv_heads_, groups = layout.tp_size * kv_heads_;
  optim::ParamSpec spec = weight_spec(prefix + "qkv.weight", layout, std_);
  spec.tensors = {{prefix + "q.weight", {groups * query_rows, d_model_}},
                  {prefix + "k.weight", {groups * head_dim_, d_model_}},
                  {prefix + "v.weight", {groups * head_dim_, d_model_}}};
  spec.row_map.clear();
  for (int64_t g = 0; g < kv_heads_; ++g) {
    const int64_t row = g * (query_rows + 2 * head_dim_), group = first_group + g;
    spec.row_map.push_back({row, 0, group * query_rows, query_rows});
    spec.row_map.push_back({row + query_rows, 1, group * head_dim_, head_dim_});
    spec.row_map.push_back({row + query_rows + head_dim_, 2, group * head_dim_, head_dim_});
  }
  return spec;
}

std::vector<optim::ParamSpec> AttentionBlock::specs() const {
  const std::string layer = layer_prefix(layer_), attn = layer + "attn.";
  std::vector<optim::ParamSpec> specs{
      norm_spec(layer + "attn_norm.weight", d_model_), qkv_.with_format(qkv_spec(attn)),
      o_.with_format(weight_spec(attn + "o.weight", o_.layout(), out_std_))};
  if (qk_norm_) {
    specs.push_back(norm_spec(attn + "q_norm.weight", head_dim_));
    specs.push_back(norm_spec(attn + "k_norm.weight", head_dim_));
  }
  return specs;
}

void AttentionBlock::bind(ParameterCursor& parameters) {
  const std::string layer = layer_prefix(layer_), attn = layer + "attn.";
  norm_ = parameters.next(layer + "attn_norm.weight");
  qkv_.bind(parameters.next(attn + "qkv.weight"));
  o_.bind(parameters.next(attn + "o.weight"));
  if (qk_norm_) {
    q_norm_ = parameters.next(attn + "q_norm.weight");
    k_norm_ = parameters.next(attn + "k_norm.weight");
  }
}

void AttentionBlock::set_recipe(const LinearRecipe& recipe) {
  qkv_.set_recipe(recipe);
  o_.set_recipe(recipe);
}

nn::QkvHeads AttentionBlock::split(const Pass& pass, TensorView qkv) const {
  return nn::split_heads(qkv, pass.sequences, heads_, kv_heads_, head_dim_);
}

nn::HeadAngles AttentionBlock::angles(const Pass& pass) const {
  return {pass.rope_table, pass.position_T, pass.seq_len};
}

void AttentionBlock::rotate(const Pass& pass, TensorView qkv, bool inverse) const {
  const nn::HeadAngles at = angles(pass);
  const TensorView qk = split(pass, qkv).qk_TGNC;
  nn::rope({qk, at.table, at.position_T, at.seq_len, inverse}, pass.stream);
  pass.stored("rope", inverse ? "dq, dk" : "q, k", qk);
}

void AttentionBlock::project(const Pass& pass, TensorView x_TD, TensorView qkv) const {
  ArenaScope temporaries(pass.arena);
  apply_norm(pass, x_TD, *norm_, eps_, pass.h_TD);
  const TensorView h_TD = gather_tokens(pass, pass.h_TD);
  qkv_.forward(pass, h_TD, qkv, {});
  pass.stored("attn.qkv", "qkv", qkv, h_TD, qkv_.parameter().weight);
  if (!qk_norm_) rotate(pass, qkv, false);
}

nn::QkvHeads AttentionBlock::heads(const Pass& pass, TensorView qkv) const {
  const nn::QkvHeads raw = split(pass, qkv);
  if (!qk_norm_) return raw;
  const TensorView rotated = pass.tensor({qkv.size(0), qkv.size(1)});
  nn::QkvHeads out = split(pass, rotated);
  nn::norm_rope({.x_TGNC = raw.qk_TGNC,
                 .q_weight_C = q_norm_->weight,
                 .k_weight_C = k_norm_->weight,
                 .y_TGNC = out.qk_TGNC,
                 .angles = angles(pass),
                 .eps = eps_},
                pass.stream);
  pass.note(elementwise_work(2 * out.qk_TGNC.numel(), pass.storage));
  pass.stored("norm_rope", "q, k", out.qk_TGNC, raw.qk_TGNC, q_norm_->weight, k_norm_->weight);
  out.v_BSGC = raw.v_BSGC;
  return out;
}

AttentionBlock::Saved AttentionBlock::forward(const Pass& pass, TensorView x_TD,
                                              TensorView out_TD) const {
  const int64_t per_group = heads_ / kv_heads_;
  const Saved s{.qkv = pass.tensor({pass.tokens(), (heads_ + 2 * kv_heads_) * head_dim_}),
                .o = pass.tensor({pass.tokens(), heads_ * head_dim_}),
                .lse_BGMS = pass.arena.tensor(
                    DType::kFloat32, {pass.sequences, kv_heads_, per_group, pass.seq_len})};
  project(pass, x_TD, s.qkv);
  ArenaScope temporaries(pass.arena);
  nn::attention(attention_args(pass, heads(pass, s.qkv), s), pass.stream);
  pass.note(core_work(pass, 2));
  pass.stored("attention", "o", s.o, s.qkv);
  forward_to_own(pass, o_, s.o, out_TD, x_TD);
  pass.stored("attn.o", "x", out_TD, s.o, o_.parameter().weight, x_TD);
  return s;
}

gtp::Work AttentionBlock::core_work(const Pass& pass, int products) const {
  const int64_t o = heads_ * head_dim_, qkv = o + 2 * kv_heads_ * head_dim_;
  return attention_work(products, pass.tokens(), pass.seq_len, qkv, o, pass.storage);
}

nn::AttentionArgs AttentionBlock::attention_args(const Pass& pass, const nn::QkvHeads& h,
                                                 const Saved& s) const {
  return {.q_BSGMC = h.q_BSGMC,
          .k_BSGC = h.k_BSGC,
          .v_BSGC = h.v_BSGC,
          .document_start_BS = pass.document_start_BS,
          .o_BSGMC = head_rows(pass, s.o),
          .lse_BGMS = s.lse_BGMS};
}

TensorView AttentionBlock::head_rows(const Pass& pass, TensorView o) const {
  return o.reshape({pass.sequences, pass.seq_len, kv_heads_, heads_ / kv_heads_, head_dim_});
}

void AttentionBlock::output_backward(const Pass& pass, TensorView d_TD, TensorView o,
                                     TensorView d_o) const {
  ArenaScope temporaries(pass.arena);
  const TensorView dout_TD = gather_tokens(pass, d_TD);
  if (d_o.defined()) {
    o_.input_gradient(pass, dout_TD, d_o);
    pass.stored("attn.o", "do", d_o, dout_TD, o_.parameter().weight);
  }
  o_.weight_gradient(pass, dout_TD, o);
}

void AttentionBlock::heads_gradient(const Pass& pass, TensorView qkv, TensorView dqkv) const {
  ArenaScope workspace(pass.arena);
  const TensorView x = split(pass, qkv).qk_TGNC, d = split(pass, dqkv).qk_TGNC;
  const OpenGradient q_grad = open_small_gradient(pass, *q_norm_),
                     k_grad = open_small_gradient(pass, *k_norm_);
  const GradientSum q_sum = begin_sum(pass, q_grad), k_sum = begin_sum(pass, k_grad);
  const int64_t blocks = nn::norm_rope_blocks(x.size(0), x.size(1), x.size(2), head_dim_);
  nn::norm_rope_backward({.x_TGNC = x,
                          .q_weight_C = q_norm_->weight,
                          .k_weight_C = k_norm_->weight,
                          .d_TGNC = d,
                          .q_grad_C = q_sum.view,
                          .k_grad_C = k_sum.view,
                          .workspace = pass.arena.tensor(DType::kFloat32, {blocks, head_dim_}),
                          .angles = angles(pass),
                          .eps = eps_,
                          .q_accumulate = q_sum.accumulate,
                          .k_accumulate = k_sum.accumulate},
                         pass.stream);
  end_sum(pass, q_sum, q_grad);
  end_sum(pass, k_sum, k_grad);
  pass.note(elementwise_work(2 * d.numel(), pass.storage));
  pass.stored("norm_rope", "dq, dk", d, q_norm_->weight, k_norm_->weight);
  for (const optim::Parameter* p : {q_norm_, k_norm_}) {
    if (p->trained()) pass.stored(p->spec.name, "gradient", p->grad, d);
  }
}

void AttentionBlock::backward(const Pass& pass, TensorView x_TD, const Saved& s,
                              TensorView d_TD) const {
  ArenaScope temporaries(pass.arena);
  if (!needs_.core) return output_backward(pass, d_TD, s.o, {});
  const TensorView dqkv = pass.tensor({s.qkv.size(0), s.qkv.size(1)});
  {
    ArenaScope inner(pass.arena);
    const TensorView d_o = pass.tensor({s.o.size(0), s.o.size(1)});
    output_backward(pass, d_TD, s.o, d_o);
    const nn::QkvHeads d = split(pass, dqkv);
    TensorView delta;
    if (const TensorView& lse = s.lse_BGMS; pass.stream.device().type == DeviceType::kCuda) {
      delta =
          pass.arena.tensor(DType::kFloat32, {lse.size(0), lse.size(1), lse.size(2), lse.size(3)});
    }
    nn::attention_backward({.forward = attention_args(pass, heads(pass, s.qkv), s),
                            .do_BSGMC = head_rows(pass, d_o),
                            .dq_BSGMC = d.q_BSGMC,
                            .dk_BSGC = d.k_BSGC,
                            .dv_BSGC = d.v_BSGC,
                            .delta_BGMS = delta},
                           pass.stream);
    pass.note(core_work(pass, 5));
    pass.stored("attention", "dq, dk, dv", dqkv, d_o, s.qkv);
    qk_norm_ ? heads_gradient(pass, s.qkv, dqkv) : rotate(pass, dqkv, true);
  }
  if (needs_.qkv) {
    apply_norm(pass, x_TD, *norm_, eps_, pass.h_TD);
    ArenaScope inner(pass.arena);
    qkv_.weight_gradient(pass, dqkv, gather_tokens(pass, pass.h_TD));
  }
  if (!needs_.input) return;
  const TensorView dh_TD = pass.h_TD;  // h is not needed any more
  input_gradient_to_own(pass, qkv_, dqkv, dh_TD);
  pass.stored("attn.qkv", "dh", dh_TD, dqkv, qkv_.parameter().weight);
  norm_gradient(pass, {x_TD, dh_TD, d_TD, d_TD}, eps_, *norm_);
}

void AttentionBlock::forward_cached(const Pass& pass, std::span<const CacheRun> runs,
                                    const KvCache& cache, TensorView x_TD,
                                    TensorView out_TD) const {
  ArenaScope temporaries(pass.arena);
  const int64_t per_group = heads_ / kv_heads_;
  const TensorView qkv = pass.tensor({pass.tokens(), (heads_ + 2 * kv_heads_) * head_dim_});
  const TensorView o = pass.tensor({pass.tokens(), heads_ * head_dim_});
  project(pass, x_TD, qkv);
  const nn::QkvHeads h = heads(pass, qkv);
  const TensorView o_heads = head_rows(pass, o);
  int64_t row = 0;
  for (const CacheRun& run : runs) {
    const int64_t b = run.sequence, end = row + run.rows, keys = run.length + run.rows;
    copy_rows(h.k_BSGC.select(0).slice(0, row, end), cache.k_BPGC.view().select(b), run.length,
              pass.stream);
    copy_rows(h.v_BSGC.select(0).slice(0, row, end), cache.v_BPGC.view().select(b), run.length,
              pass.stream);
    const TensorView lse = pass.arena.tensor(DType::kFloat32, {1, kv_heads_, per_group, run.rows});
    nn::attention({.q_BSGMC = h.q_BSGMC.slice(1, row, end),
                   .k_BSGC = cache.k_BPGC.view().slice(0, b, b + 1).slice(1, 0, keys),
                   .v_BSGC = cache.v_BPGC.view().slice(0, b, b + 1).slice(1, 0, keys),
                   .document_start_BS = {},
                   .o_BSGMC = o_heads.slice(1, row, end),
                   .lse_BGMS = lse},
                  pass.stream);
    row = end;
  }
  o_.forward(pass, o, out_TD, x_TD);
}

}  // namespace moiety::model
