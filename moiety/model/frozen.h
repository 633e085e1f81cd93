// The parameters that training leaves as they are (train.freeze), and how far back a backward pass
// has to go for the others. Pure functions of the configuration.
//
// The model is a row of blocks: the embedding, for every layer attention and then its feed-forward
// part, and last the final norm with the head. Before the first block with a trained parameter
// nothing is kept for backward, and backward does not go there.
#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <string_view>

namespace moiety::model {

struct Config;

// Numbers of blocks.
inline constexpr int64_t kEmbeddingBlock = 0;
constexpr int64_t attention_block(int64_t layer) { return 1 + 2 * layer; }
constexpr int64_t ffn_block(int64_t layer) { return 2 + 2 * layer; }
constexpr int64_t head_block(int64_t layers) { return 1 + 2 * layers; }

class Frozen {
 public:
  Frozen() = default;  // nothing is
  // Throws Error(kInvalidArgument) naming the glob that matches no name of a checkpoint's tensor, or
  // that freezes a part of a matrix that is one in memory (q, k and v); and if nothing is left to
  // train.
  explicit Frozen(const Config& config);

  // Whether a parameter, by its name in memory such as "layers.0.attn.qkv.weight", is frozen; or a
  // router's bias, which is no parameter.
  bool operator()(std::string_view name) const {
    return !names_.empty() && names_.contains(std::string(name));
  }
  bool any() const { return !names_.empty(); }
  // Whether backward comes to this block.
  bool reaches(int64_t block) const { return block >= first_; }
  // Whether it goes on to blocks before it, which need the gradient of this block's input.
  bool passes(int64_t block) const { return block > first_; }

 private:
  std::set<std::string> names_;
  int64_t first_ = kEmbeddingBlock;  // the first block with a trained parameter
};

// Whether the whole name matches: `*` stands for any characters, `?` for one, all others for
// themselves.
bool glob_matches(std::string_view glob, std::string_view name);

}  // namespace moiety::model
