#include "moiety/hf/load.h"

#include <set>

#include "moiety/base/error.h"
#include "moiety/base/number_text.h"
#include "moiety/base/parallel.h"
#include "moiety/checkpoint/checkpoint_error.h"
#include "moiety/checkpoint/interrupt.h"
#include "moiety/checkpoint/staging.h"

namespace moiety::hf {
namespace {

using namespace checkpoint;

std::string value_text(int64_t n) { return std::to_string(n); }
std::string value_text(bool b) { return b ? "true" : "false"; }
std::string value_text(double x) { return number_text(x); }
std::string value_text(float x) { return number_text(x); }

class Differences {
 public:
  template <class T>
  void compare(const char* key, T there, T here) {
    if (there == here) return;
    lines_ += text("{}{} is {} there, {} here", lines_.empty() ? "" : "; ", key, value_text(there),
                   value_text(here));
  }
  const std::string& lines() const { return lines_; }

 private:
  std::string lines_;
};

// The keys of experts, which a folder gives or has at one value.
void compare_experts(const model::Config& there, const model::Config& here, Differences& d) {
  const moe::RouterConfig &a = there.router, &b = here.router;
  d.compare("moe.experts", a.experts, b.experts);
  d.compare("moe.top_k", a.top_k, b.top_k);
  d.compare("moe.d_ffn", there.d_ffn, here.d_ffn);
  d.compare("moe.shared_d_ffn", there.shared_d_ffn, here.shared_d_ffn);
  d.compare("moe.expert_bias", there.expert_bias, here.expert_bias);
  d.compare("router.score = \"sigmoid\"", false, b.score == moe::Score::kSigmoid);
  d.compare("router.renormalize", a.renormalize, b.renormalize);
  d.compare("router.scale", a.scale, b.scale);
  d.compare("router.groups", a.groups, b.groups);
}

bool same_activation(const gemm::Activation& a, const gemm::Activation& b) {
  return a.kind == b.kind && a.alpha == b.alpha && a.limit == b.limit && a.offset == b.offset;
}

}  // namespace

void check_model(const Folder& folder, const model::Config& here, int64_t seq_len) {
  const model::Config& there = folder.description().config;
  Differences d;
  d.compare("model.vocab", there.vocab, here.vocab);
  d.compare("model.d_model", there.d_model, here.d_model);
  d.compare("model.layers", there.layers, here.layers);
  d.compare("model.heads", there.heads, here.heads);
  d.compare("model.kv_heads", there.kv_heads, here.kv_heads);
  d.compare("model.head_dim", there.head_size(), here.head_size());
  d.compare("model.qk_norm", there.qk_norm, here.qk_norm);
  d.compare("model.rope_theta", there.rope_theta, here.rope_theta);
  d.compare("model.norm_eps", there.norm_eps, here.norm_eps);
  d.compare("model.tie_embeddings", there.tie_embeddings, here.tie_embeddings);
  if (there.layers == here.layers) {
    for (int64_t l = 0; l < there.layers; ++l) {
      d.compare(text("layer {} with experts (model.dense_layers, model.moe_every)", l).c_str(),
                there.is_moe(l), here.is_moe(l));
    }
  }
  if (there.moe_layers() < there.layers) {
    d.compare("model.d_ffn_dense", there.d_ffn_dense, here.d_ffn_dense);
  }
  if (there.moe_layers() > 0) compare_experts(there, here, d);
  d.compare("moe.activation = \"swiglu\"", true, same_activation(here.activation, gemm::swiglu()));
  if (!d.lines().empty()) refuse("{}: another model: {}", folder.path(), d.lines());
  check_window(folder.description(), seq_len, folder.path() + "/config.json");
}

void load_weights(const Folder& folder, const model::Config& config, const optim::StateView& view) {
  const WeightSource source(folder, config);
  std::map<std::string, std::vector<int64_t>> shapes;
  for (const ModelTensor& tensor : source.tensors()) shapes[tensor.name] = tensor.shape;
  for (const StatePiece& piece : view) {
    const auto at = shapes.find(piece.tensor);
    MOIETY_CHECK(piece.slot == "weight" && piece.dtype == DType::kFloat32 && at != shapes.end() &&
                     at->second == piece.shape,
                 "load_weights: {}/{} {} {} is no weight of this model", piece.slot, piece.tensor,
                 name(piece.dtype), shape_text(piece.shape));
  }
  source.check_tied_head();
  parallel_tasks(std::ssize(view), [&](int64_t i) {
    const StatePiece& piece = view[static_cast<size_t>(i)];
    std::vector<Box> parts;
    if (volume(piece.box) > 0) cut_box(piece.box, sizeof(float), kStagingBytes, parts);
    Staging staging;
    for (const Box& part : parts) {
      check_interrupt();
      std::byte* data = staging.reserve(byte_size(DType::kFloat32, volume(part)), piece.device);
      source.read(piece.tensor, part, reinterpret_cast<float*>(data));
      staging.put(part, part, piece);
      staging.finish();
    }
  });
}

}  // namespace moiety::hf
