#include <algorithm>
#include <optional>

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
  if (file.has_mask()) {
    sheet.line("targets",
               text("{}, {:.1f} % of the tokens; the others have no loss", file.target_count(),
                    h.tokens == 0 ? 0 : 100 * double(file.target_count()) / double(h.tokens)));
  }
  sheet.line(
      "text",
      text("{}, {:.2f} bytes a {}", bytes_text(int64_t(h.source_bytes)),
           file.target_count() == 0 ? 0 : double(h.source_bytes) / double(file.target_count()),
           file.has_mask() ? "target" : "token"));
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
      .add("targets", file.target_count())
      .add("source_bytes", h.source_bytes)
      .add("crc32c", text("{:08x}", h.crc32c))
      .add("pieces", has_pieces ? file.pieces() : 0);
}

std::string ids_text(std::span<const int32_t> ids) {
  std::string out;
  for (const int32_t id : ids) out += text("{}{}", out.empty() ? "" : " ", id);
  return out;
}

// The ids as text for people, with the names of special tokens, since a conversation cannot be told
// from its text without them: what has no loss is dimmed, if there is colour, else stands in braces.
std::string shown_text(std::span<const int32_t> ids, std::span<const uint8_t> targets,
                       const data::Tokenizer* tokenizer, bool color) {
  std::string out;
  std::optional<data::TokenStream> stream;
  if (tokenizer) stream.emplace(*tokenizer);
  for (size_t begin = 0, end; begin < ids.size(); begin = end) {
    end = begin;
    std::string part;
    for (; end < ids.size() && targets[end] == targets[begin]; ++end) {
      part += stream ? tokenizer->special_name(ids[end]) + stream->add(ids[end])
                     : text("{}{}", part.empty() ? "" : " ", ids[end]);
    }
    part = printable(part, SIZE_MAX);
    const bool is_masked = targets[begin] == 0;
    if (!stream && !out.empty()) out += ' ';
    out += is_masked ? color ? "\x1b[2m" + part + "\x1b[0m" : "{" + part + "}" : part;
  }
  return out;
}

// Runs of targets as [begin, end) of the ids.
std::string target_runs(std::span<const uint8_t> targets) {
  std::string out;
  for (size_t i = 0; i < targets.size(); ++i) {
    if (!targets[i]) continue;
    const size_t begin = i;
    while (i < targets.size() && targets[i]) ++i;
    out += text("{}[{},{}]", out.empty() ? "" : ",", begin, i);
  }
  return "[" + out + "]";
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
  if (shown.from > 0 && uint64_t(shown.from) >= h.documents) {
    throw UsageError("--from {}: {} has {}", shown.from, path,
                     counted(int64_t(h.documents), "document"));
  }
  InfoSheet sheet;
  add_header(*file, is_known ? tokenizer.name() : data::hex(h.tokenizer), sheet);
  std::vector<std::string> list;
  const uint64_t end = std::min(uint64_t(shown.from + shown.count), h.documents);
  for (uint64_t d = uint64_t(shown.from); d < end; ++d) {
    const TokenFile::Document document = file->document(d);
    const uint64_t length = document.end - document.begin;
    std::vector<int32_t> ids(std::min(length, uint64_t(shown.tokens)));
    std::vector<uint8_t> targets(ids.size());
    file->read(document.begin, ids);
    file->targets(document.begin, targets);
    const std::string content = is_known ? tokenizer.decode(ids) : ids_text(ids);
    sheet.line(text("document {}", d),
               text("{}: {}{}", counted(int64_t(length), "token"),
                    shown_text(ids, targets, is_known ? &tokenizer : nullptr, shown.color),
                    ids.size() < length ? " ..." : ""));
    JsonLine line;
    line.add("document", d).add("tokens", length);
    line.raw(is_known ? "text" : "ids", is_known ? text_json(content) : "\"" + content + "\"");
    if (file->has_mask()) line.raw("targets", target_runs(targets));
    list.push_back(line.text());
  }
  sheet.json.raw("content", list_json(list));
  return sheet;
}

}  // namespace moiety::app
