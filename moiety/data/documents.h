// The documents in the inputs of `prepare`: files are cut into blocks of whole documents, and
// blocks are turned into tokens. Blocks are independent of each other, so they are encoded in
// parallel.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "moiety/data/byte_source.h"
#include "moiety/data/chat.h"
#include "moiety/data/tokenizer.h"

namespace moiety::data {

enum class InputFormat { kAuto, kText, kJsonl };

struct DocumentRules {
  // kAuto: JSONL if the name ends in .jsonl[.gz|.dz|.zst], or for conversations
  InputFormat format = InputFormat::kAuto;
  std::vector<std::string> text_keys{"text"};  // of a JSONL object; texts are joined by newlines
  // Every line of JSON is a conversation, rendered so; such documents have no eos or bos but their
  // template's.
  std::optional<ChatTemplate> chat;
  std::string split;  // separator between documents of a text file; empty: none
  bool bos = false;
  bool parse_special = false;  // special tokens that a text spells are ids, not text
  bool skip_bad = false;
};

// The files of the inputs, in order: a file or "-" stands for itself, a directory for the files
// below it, sorted by path, without hidden and .tok files. A file that comes twice is taken once;
// `repeated` counts the repetitions. A missing path is a DataError.
std::vector<std::string> list_inputs(const std::vector<std::string>& inputs, int64_t& repeated);

// Consecutive whole documents of one file.
struct Block {
  std::string path;
  bool jsonl = false;
  std::string bytes;
  uint64_t offset = 0;  // place of bytes[0] in the (decompressed) file
  uint64_t line = 1;    // line of bytes[0]
};

// Reads one file as blocks of about `block_bytes` bytes (longer where a document is longer).
class BlockReader {
 public:
  BlockReader(const std::string& path, const DocumentRules& rules, size_t block_bytes = 1 << 20);
  // The next block, or nothing at the end of the file.
  std::optional<Block> next();

 private:
  void find_cut();

  std::string path_;
  bool jsonl_;
  std::string separator_;
  size_t block_bytes_;
  std::unique_ptr<ByteSource> source_;
  std::string rest_;
  size_t cut_ = 0;       // whole documents in rest_: the end of its last separator
  size_t searched_ = 0;  // no separator begins in [cut_, searched_)
  uint64_t offset_ = 0;
  uint64_t line_ = 1;
  bool end_ = false;
};

struct EncodedBlock {
  struct Document {
    uint64_t tokens = 0;
    uint64_t source_bytes = 0;  // of conversations, those of the targets
  };
  std::vector<uint32_t> ids;     // ids of all documents
  std::vector<uint8_t> targets;  // of conversations: which of the ids are targets
  std::vector<Document> documents;
  uint64_t bytes = 0;  // bytes of input
  int64_t bad = 0;     // documents skipped because of bad JSON or UTF-8, or without an answer
  int64_t empty = 0;   // documents without text, left out
};

// Encodes a block. Bad JSON or UTF-8 is a DataError with file, line and byte, or is counted in
// `bad`.
EncodedBlock encode(const Block& block, const DocumentRules& rules, const Tokenizer& tokenizer);

// The position of the first byte of `s` that is not part of well-formed UTF-8 (no overlong forms,
// no surrogates, nothing above U+10FFFF), or npos.
size_t find_bad_utf8(std::string_view s);

}  // namespace moiety::data
