#include "moiety/data/tokenizer.h"

#include "moiety/base/error.h"

namespace moiety::data {

Tokenizer Tokenizer::load(std::string_view name) {
  if (name != "bytes") {
    throw UsageError("tokenizer '{}' does not exist; there is: bytes", name);
  }
  Tokenizer t;
  t.name_ = name;
  t.identity_ = sha256("moiety tokenizer bytes 1: eos=256 bos=257 pad=258 vocab=264\n");
  return t;
}

void Tokenizer::encode(std::string_view text, std::vector<uint32_t>& ids) const {
  const size_t begin = ids.size();
  ids.resize(begin + text.size());
  for (size_t i = 0; i < text.size(); ++i) ids[begin + i] = static_cast<unsigned char>(text[i]);
}

std::string Tokenizer::decode(std::span<const int32_t> ids) const {
  std::string bytes;
  for (const int32_t id : ids) {
    if (id >= 0 && id < 256) bytes += static_cast<char>(id);
  }
  return bytes;
}

}  // namespace moiety::data
