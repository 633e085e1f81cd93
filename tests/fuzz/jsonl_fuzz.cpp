#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "apps/moiety/exit_code.h"
#include "moiety/data/documents.h"
#include "tests/fuzz/targets.h"

namespace moiety::fuzz {
namespace {

using namespace data;

struct Encoded {
  std::vector<uint32_t> ids;
  uint64_t documents = 0, bytes = 0;
  int64_t bad = 0;
  friend bool operator==(const Encoded&, const Encoded&) = default;
};

Encoded encode_all(const char* path, const DocumentRules& rules, size_t block_bytes) {
  static const Tokenizer tokenizer = Tokenizer::load("bytes");
  Encoded out;
  BlockReader reader(path, rules, block_bytes);
  while (const std::optional<Block> block = reader.next()) {
    const EncodedBlock encoded = encode(*block, rules, tokenizer);
    uint64_t tokens = 0;
    for (const EncodedBlock::Document& d : encoded.documents) tokens += d.tokens;
    require(encoded.targets.size() == (rules.chat ? tokens : 0), "conversations have targets");
    require(tokens == encoded.ids.size(), "documents have all tokens");
    out.ids.insert(out.ids.end(), encoded.ids.begin(), encoded.ids.end());
    out.documents += encoded.documents.size();
    out.bytes += encoded.bytes;
    out.bad += encoded.bad;
  }
  return out;
}

}  // namespace

void jsonl(std::string_view file) {
  const MemoryFile memory(file);
  DocumentRules rules;
  rules.chat = ChatTemplate::kLlama3;
  rules.skip_bad = true;
  try {
    encode_all(memory.path(), rules, 1 << 20);
  } catch (const DataError&) {
  }
  rules.chat.reset();
  for (const InputFormat format : {InputFormat::kJsonl, InputFormat::kText}) {
    rules.format = format;
    rules.split = format == InputFormat::kText ? "\n\n" : "";
    try {
      rules.skip_bad = true;
      const Encoded whole = encode_all(memory.path(), rules, 1 << 20);
      require(whole == encode_all(memory.path(), rules, 16), "blocks do not change documents");
      require(find_bad_utf8(Tokenizer::load("bytes").decode(
                  std::vector<int32_t>(whole.ids.begin(), whole.ids.end()))) == std::string::npos,
              "documents are UTF-8");
      rules.skip_bad = false;
      require(whole == encode_all(memory.path(), rules, 64) && whole.bad == 0,
              "bad documents are errors");
    } catch (const DataError&) {
    }
  }
}

}  // namespace moiety::fuzz
