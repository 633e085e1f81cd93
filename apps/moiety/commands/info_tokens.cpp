#include <algorithm>

#include "apps/moiety/commands/info_sheet.h"
#include "apps/moiety/report/people.h"
#include "moiety/base/error.h"
#include "moiety/base/format.h"
#include "moiety/base/printable.h"
#include "moiety/data/token_file.h"
#include "moiety/data/tokenizer.h"

namespace moiety::app {
namespace {

using data::TokenFile, data::TokenFileHeader;

struct Lengths {
  uint64_t shortest = 0, longest = 0;  // tokens of a document
};

Lengths lengths_of(const TokenFile& file) {
  Lengths out{.shortest = file.header().tokens};
  for (uint64_t d = 0; d < file.header().documents; ++d) {
    const TokenFile::Document document = file.document(d);
    out.shortest = std::min(out.shortest, document.end - document.begin);
    out.longest = std::max(out.longest, document.end - document.begin);
  }
  return out;
}

void add_header(const TokenFile& file, const std::string& tokenizer, InfoSheet& sheet) {
  const TokenFileHeader& h = file.header();
  const Lengths lengths = lengths_of(file);
  const double mean = h.documents == 0 ? 0 : double(h.tokens) / double(h.documents);
  const bool ends = h.flags & data::kDocumentsEndInEos;
  const bool has_pieces = h.flags & data::kPiecesHaveChecksums;
  sheet.line("file", text("{}, {}", file.path(), bytes_text(int64_t(file.bytes()))));
  sheet.line("tokens", text("{} of {} bytes, vocabulary {}, tokenizer {}", h.tokens, h.token_bytes,
                            h.vocab, tokenizer));
  sheet.line("documents",
             text("{}: of {} to {} tokens, {:.1f} on average{}", h.documents, lengths.shortest,
                  lengths.longest, mean, ends ? "; each ends in eos" : ""));
  sheet.line("text", text("{}, {:.2f} bytes a token", bytes_text(int64_t(h.source_bytes)),
                          h.tokens == 0 ? 0 : double(h.source_bytes) / double(h.tokens)));
  sheet.line("checksum", text("{:08x}{}; moiety verify compares", h.crc32c,
                              has_pieces ? text(", and {} of pieces", file.pieces()) : ""));
  sheet.json.add("path", file.path())
      .add("kind", "token file")
      .add("bytes", file.bytes())
      .add("tokens", h.tokens)
      .add("token_bytes", h.token_bytes)
      .add("documents", h.documents)
      .add("shortest", lengths.shortest)
      .add("longest", lengths.longest)
      .add("vocab", h.vocab)
      .add("eos", h.eos)
      .add("bos", h.bos)
      .add("tokenizer", tokenizer)
      .add("source_bytes", h.source_bytes)
      .add("crc32c", text("{:08x}", h.crc32c))
      .add("pieces", has_pieces ? file.pieces() : 0);
}

std::string ids_text(std::span<const int32_t> ids) {
  std::string out;
  for (const int32_t id : ids) out += text("{}{}", out.empty() ? "" : " ", id);
  return out;
}

}  // namespace

InfoSheet token_file_info(const std::string& path, const ShownDocuments& shown) {
  const auto file = TokenFile::open(path);
  const data::Tokenizer tokenizer = data::Tokenizer::load(shown.tokenizer);
  const TokenFileHeader& h = file->header();
  const bool is_known = h.tokenizer == tokenizer.identity();
  if (!is_known && shown.tokenizer != "bytes") {
    throw DataError(
        "{}: made with another tokenizer: its SHA-256 is {}, that of --tokenizer {} is {}", path,
        data::hex(h.tokenizer), shown.tokenizer, data::hex(tokenizer.identity()));
  }
  InfoSheet sheet;
  add_header(*file, is_known ? tokenizer.name() : data::hex(h.tokenizer), sheet);
  std::vector<std::string> list;
  const uint64_t end = std::min(uint64_t(shown.from + shown.count), h.documents);
  for (uint64_t d = uint64_t(shown.from); d < end; ++d) {
    const TokenFile::Document document = file->document(d);
    const uint64_t length = document.end - document.begin;
    std::vector<int32_t> ids(std::min(length, uint64_t(shown.tokens)));
    file->read(document.begin, ids);
    const std::string content = is_known ? tokenizer.decode(ids) : ids_text(ids);
    sheet.line(text("document {}", d),
               text("{}: {}{}", counted(int64_t(length), "token"), printable(content, SIZE_MAX),
                    ids.size() < length ? " ..." : ""));
    list.push_back(
        JsonLine()
            .add("document", d)
            .add("tokens", length)
            .raw(is_known ? "text" : "ids", is_known ? text_json(content) : "\"" + content + "\"")
            .text());
  }
  sheet.json.raw("content", list_json(list));
  return sheet;
}

}  // namespace moiety::app
