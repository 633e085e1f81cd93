#include "moiety/hf/tensors.h"

#include "moiety/model/parameters.h"

namespace moiety::hf {
namespace {

using checkpoint::whole;

// The box of expert `e`'s rows [row, row + rows) in a tensor of experts of this shape.
Box expert_box(const std::vector<int64_t>& shape, int64_t e, int64_t row, int64_t rows) {
  Box box = whole(shape);
  box.start = {e, row};
  box.size[0] = 1;
  box.size[1] = rows;
  return box;
}

class Table {
 public:
  Table(const model::Config& config, Family family, Form form)
      : c_(config), family_(family), form_(form) {}

  std::vector<FolderTensor> list() {
    same("model.embed_tokens.weight", "embed.weight", {c_.vocab, c_.d_model});
    for (int64_t l = 0; l < c_.layers; ++l) {
      theirs_ = "model.layers." + std::to_string(l) + ".";
      ours_ = model::layer_prefix(l);
      attention();
      if (!c_.is_moe(l)) {
        dense();
      } else if (has_experts(family_)) {
        experts();
      } else {
        copies();
      }
    }
    theirs_ = ours_ = "";
    same("model.norm.weight", "final_norm.weight", {c_.d_model});
    if (!c_.tie_embeddings) same(kHeadName, "head.weight", {c_.vocab, c_.d_model});
    return std::move(list_);
  }

 private:
  void same(const std::string& theirs, const std::string& ours, std::vector<int64_t> shape) {
    Box box = whole(shape);
    list_.push_back({theirs_ + theirs, std::move(shape), ours_ + ours, box});
  }
  void part(const std::string& theirs, std::vector<int64_t> shape, const std::string& ours,
            const Box& box) {
    list_.push_back({theirs_ + theirs, std::move(shape), ours_ + ours, box});
  }

  void attention() {
    const int64_t d = c_.d_model, n = c_.head_size(), q = c_.heads * n, kv = c_.kv_heads * n;
    same("input_layernorm.weight", "attn_norm.weight", {d});
    same("self_attn.q_proj.weight", "attn.q.weight", {q, d});
    same("self_attn.k_proj.weight", "attn.k.weight", {kv, d});
    same("self_attn.v_proj.weight", "attn.v.weight", {kv, d});
    same("self_attn.o_proj.weight", "attn.o.weight", {d, q});
    if (c_.qk_norm) {
      same("self_attn.q_norm.weight", "attn.q_norm.weight", {n});
      same("self_attn.k_norm.weight", "attn.k_norm.weight", {n});
    }
    same("post_attention_layernorm.weight", "mlp_norm.weight", {d});
  }

  void dense() {
    const int64_t d = c_.d_model, f = c_.d_ffn_dense;
    Box gate = whole(std::vector{2 * f, d});
    gate.size[0] = f;
    Box up = gate;
    up.start[0] = f;
    part("mlp.gate_proj.weight", {f, d}, "mlp.fc1.weight", gate);
    part("mlp.up_proj.weight", {f, d}, "mlp.fc1.weight", up);
    same("mlp.down_proj.weight", "mlp.fc2.weight", {d, f});
  }

  // Expert e from tensors with these names.
  void expert(int64_t e, const std::string& gate, const std::string& up, const std::string& down) {
    const int64_t d = c_.d_model, f = c_.d_ffn, n = c_.router.experts;
    part(gate, {f, d}, "moe.experts.fc1.weight", expert_box({n, 2 * f, d}, e, 0, f));
    part(up, {f, d}, "moe.experts.fc1.weight", expert_box({n, 2 * f, d}, e, f, f));
    part(down, {d, f}, "moe.experts.fc2.weight", expert_box({n, d, f}, e, 0, d));
  }

  void experts() {
    const int64_t d = c_.d_model, f = c_.d_ffn, n = c_.router.experts;
    const bool stacked = form_ == Form::kStacked, qwen = family_ == Family::kQwen3Moe;
    // transformers 5 calls Mixtral's block in memory as it calls the others'.
    const std::string block = qwen || stacked ? "mlp." : "block_sparse_moe.";
    same(block + "gate.weight", "moe.router.weight", {n, d});
    if (stacked) {
      same(block + "experts.gate_up_proj", "moe.experts.fc1.weight", {n, 2 * f, d});
      same(block + "experts.down_proj", "moe.experts.fc2.weight", {n, d, f});
      return;
    }
    for (int64_t e = 0; e < n; ++e) {
      const std::string prefix = block + "experts." + std::to_string(e) + ".";
      const auto name = [&](const char* q, const char* m) { return prefix + (qwen ? q : m); };
      expert(e, name("gate_proj.weight", "w1.weight"), name("up_proj.weight", "w3.weight"),
             name("down_proj.weight", "w2.weight"));
    }
  }

  void copies() {
    for (int64_t e = 0; e < c_.router.experts; ++e) {
      expert(e, "mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight");
    }
  }

  const model::Config& c_;
  Family family_;
  Form form_;
  std::string theirs_, ours_;
  std::vector<FolderTensor> list_;
};

}  // namespace

std::vector<ModelTensor> model_tensors(const model::Config& c, Family family) {
  const int64_t d = c.d_model, n = c.head_size(), experts = c.router.experts;
  const bool upcycled = !has_experts(family);
  std::vector<ModelTensor> list{{"embed.weight", {c.vocab, d}}, {"final_norm.weight", {d}}};
  if (!c.tie_embeddings) list.push_back({"head.weight", {c.vocab, d}});
  for (int64_t l = 0; l < c.layers; ++l) {
    const std::string p = model::layer_prefix(l);
    list.push_back({p + "attn_norm.weight", {d}});
    list.push_back({p + "mlp_norm.weight", {d}});
    list.push_back({p + "attn.q.weight", {c.heads * n, d}});
    list.push_back({p + "attn.k.weight", {c.kv_heads * n, d}});
    list.push_back({p + "attn.v.weight", {c.kv_heads * n, d}});
    list.push_back({p + "attn.o.weight", {d, c.heads * n}});
    if (c.qk_norm) {
      list.push_back({p + "attn.q_norm.weight", {n}});
      list.push_back({p + "attn.k_norm.weight", {n}});
    }
    if (!c.is_moe(l)) {
      list.push_back({p + "mlp.fc1.weight", {2 * c.d_ffn_dense, d}});
      list.push_back({p + "mlp.fc2.weight", {d, c.d_ffn_dense}});
      continue;
    }
    list.push_back({p + "moe.router.weight", {experts, d}, upcycled});
    list.push_back({p + "moe.router.bias", {experts}});
    list.push_back({p + "moe.experts.fc1.weight", {experts, 2 * c.d_ffn, d}, false, upcycled});
    list.push_back({p + "moe.experts.fc2.weight", {experts, d, c.d_ffn}, false, upcycled});
  }
  return list;
}

std::vector<FolderTensor> folder_tensors(const model::Config& config, Family family, Form form) {
  return Table(config, family, form).list();
}

}  // namespace moiety::hf
