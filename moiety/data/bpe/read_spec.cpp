// tokenizer.json as spec.h has it. A field that is not asked for here is refused: ids that differ
// silently are worse than none.
#include <algorithm>
#include <optional>
#include <set>
#include <unordered_map>

#include <nlohmann/json.hpp>

#include "moiety/base/error.h"
#include "moiety/base/printable.h"
#include "moiety/data/bpe/code_points.h"
#include "moiety/data/bpe/spec.h"
#include "moiety/data/documents.h"

namespace moiety::data::bpe {
namespace {

// A value and where it stands. All refusals name the file and the place.
struct Node {
  const nlohmann::json& value;
  std::string file, path;

  Node at(std::string_view key) const {
    return {value.at(std::string(key)), file,
            path.empty() ? std::string(key) : path + "." + std::string(key)};
  }
  Node at(size_t i) const { return {value.at(i), file, path + text("[{}]", i)}; }
  std::string place() const { return file + ": " + (path.empty() ? "the file" : path); }

  [[noreturn]] void damaged(std::string_view what) const {
    throw DataError("{}: {}", place(), what);
  }
  [[noreturn]] void unsupported(std::string_view what) const {
    fail(ErrorKind::kUnsupported, "{} {}", place(), what);
  }
  // The value as it stands, cut short, for errors.
  std::string shown() const {
    return printable(value.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace), 60);
  }

  bool boolean() const {
    if (!value.is_boolean()) damaged(text("{} is not true or false", shown()));
    return value.get<bool>();
  }
  std::string string() const {
    if (!value.is_string()) damaged(text("{} is not a string", shown()));
    return value.get<std::string>();
  }
  int64_t integer(int64_t most) const {
    const bool is_number = value.is_number_unsigned() && value.get<uint64_t>() <= uint64_t(most);
    if (!is_number) damaged(text("{} is not a number from 0 to {}", shown(), most));
    return value.get<int64_t>();
  }
  const Node& array() const {
    if (!value.is_array()) damaged(text("{} is not an array", shown()));
    return *this;
  }
  const Node& object() const {
    if (!value.is_object()) damaged(text("{} is not an object", shown()));
    return *this;
  }
};

class Fields {
 public:
  explicit Fields(const Node& node) : node_(node) { node_.object(); }

  // A field that must be there.
  Node operator[](const char* key) {
    seen_.insert(key);
    if (!node_.value.contains(key)) node_.damaged(text("the field \"{}\" is missing", key));
    return node_.at(key);
  }
  // A field, if it is there and not null.
  std::optional<Node> find(const char* key) {
    seen_.insert(key);
    const auto it = node_.value.find(key);
    if (it == node_.value.end() || it->is_null()) return std::nullopt;
    return node_.at(key);
  }
  bool boolean(const char* key, bool otherwise) {
    const auto field = find(key);
    return field ? field->boolean() : otherwise;
  }
  // A field whose value changes nothing here.
  void ignore(const char* key) { seen_.insert(key); }
  // A field that may only be absent or null.
  void without(const char* key) {
    if (const auto field = find(key)) {
      field->unsupported(text("= {} is not supported", field->shown()));
    }
  }
  // To be called when all fields were asked for.
  void end() const {
    for (const auto& [key, value] : node_.value.items()) {
      if (!seen_.contains(key)) node_.at(key).unsupported("is a field that Moiety does not know");
    }
  }
  const Node& node() const { return node_; }

 private:
  Node node_;
  std::set<std::string, std::less<>> seen_;
};

constexpr int64_t kMostIds = 1 << 24;  // as model.vocab
constexpr int kDeepest = 16;           // sequences in sequences

[[noreturn]] void refuse_type(const Node& type, std::string_view known) {
  type.unsupported(text("= {} is not supported; there are: {}", type.shown(), known));
}

Sought read_sought(const Node& node) {
  Fields fields(node);
  Sought sought;
  const std::optional<Node> literal = fields.find("String"), pattern = fields.find("Regex");
  if (literal.has_value() == pattern.has_value()) node.damaged("needs one of String and Regex");
  sought.is_pattern = pattern.has_value();
  const Node& given = literal ? *literal : *pattern;
  sought.text = given.string();
  sought.place = given.place();
  if (sought.text.empty()) given.unsupported("is empty");
  fields.end();
  return sought;
}

std::string read_character(const Node& node) {
  const std::string s = node.string();
  if (s.empty() || next_character(s, 0) != s.size()) {
    node.damaged(text("{} is not one character", node.shown()));
  }
  return s;
}

Behavior read_behavior(const Node& node) {
  constexpr std::pair<std::string_view, Behavior> kNames[] = {
      {"Removed", Behavior::kRemoved},
      {"Isolated", Behavior::kIsolated},
      {"MergedWithPrevious", Behavior::kMergedWithPrevious},
      {"MergedWithNext", Behavior::kMergedWithNext},
      {"Contiguous", Behavior::kContiguous}};
  const std::string given = node.string();
  for (const auto& [name, behavior] : kNames) {
    if (given == name) return behavior;
  }
  refuse_type(node, "Removed, Isolated, MergedWithPrevious, MergedWithNext, Contiguous");
}

// Calls `one` with the node and those of sequences in it, in order. `parts` is the key of a
// sequence's array.
template <class One>
void each_of_sequence(const Node& node, const char* parts, int depth, const One& one) {
  Fields fields(node);
  if (fields["type"].string() != "Sequence") return one(node);
  if (depth == kDeepest) node.unsupported(text("stands in more than {} sequences", kDeepest));
  const Node list = fields[parts].array();
  for (size_t i = 0; i < list.value.size(); ++i) {
    each_of_sequence(list.at(i), parts, depth + 1, one);
  }
  fields.end();
}

Replace read_replace(Fields& fields) {
  return {read_sought(fields["pattern"]), fields["content"].string()};
}

NormalStep read_normal(const Node& node) {
  Fields fields(node);
  const Node type = fields["type"];
  NormalStep step;
  if (type.string() == "NFC") {
    step = Nfc{};
  } else if (type.string() == "Prepend") {
    step = Prepend{fields["prepend"].string()};
  } else if (type.string() == "Replace") {
    step = read_replace(fields);
  } else {
    refuse_type(type, "Sequence, NFC, Prepend, Replace");
  }
  fields.end();
  return step;
}

Metaspace read_metaspace(Fields& fields) {
  Metaspace m;
  m.mark = read_character(fields["replacement"]);
  m.split = fields.boolean("split", true);
  fields.ignore("str_rep");
  const std::optional<Node> scheme = fields.find("prepend_scheme");
  const bool adds = fields.boolean("add_prefix_space", true);  // older files have only this
  if (!scheme) {
    m.prepends = adds ? Metaspace::Prepends::kAlways : Metaspace::Prepends::kNever;
    return m;
  }
  const std::string name = scheme->string();
  if (name == "always") {
    m.prepends = Metaspace::Prepends::kAlways;
  } else if (name == "first") {
    m.prepends = Metaspace::Prepends::kFirst;
  } else if (name == "never") {
    m.prepends = Metaspace::Prepends::kNever;
  } else {
    refuse_type(*scheme, "always, first, never");
  }
  return m;
}

SplitStep read_split(const Node& node) {
  Fields fields(node);
  const Node type = fields["type"];
  const std::string name = type.string();
  SplitStep step;
  if (name == "Split") {
    step = Split{read_sought(fields["pattern"]), read_behavior(fields["behavior"]),
                 fields.boolean("invert", false)};
  } else if (name == "ByteLevel") {
    step = ByteLevel{fields.boolean("add_prefix_space", true), fields.boolean("use_regex", true)};
    fields.ignore("trim_offsets");
  } else if (name == "Digits") {
    step = Digits{fields.boolean("individual_digits", false)};
  } else if (name == "Punctuation") {
    const std::optional<Node> behavior = fields.find("behavior");
    step = Punctuation{behavior ? read_behavior(*behavior) : Behavior::kIsolated};
  } else if (name == "Metaspace") {
    step = read_metaspace(fields);
  } else {
    refuse_type(type, "Sequence, Split, ByteLevel, Digits, Punctuation, Metaspace");
  }
  fields.end();
  return step;
}

DecodeStep read_decode(const Node& node) {
  Fields fields(node);
  const Node type = fields["type"];
  const std::string name = type.string();
  DecodeStep step;
  if (name == "ByteLevel") {
    step = DecodeBytes{};
    for (const char* field : {"add_prefix_space", "trim_offsets", "use_regex"})
      fields.ignore(field);
  } else if (name == "ByteFallback") {
    step = ByteFallback{};
  } else if (name == "Fuse") {
    step = Fuse{};
  } else if (name == "Strip") {
    step = StripText{read_character(fields["content"]), fields["start"].integer(INT32_MAX),
                     fields["stop"].integer(INT32_MAX)};
  } else if (name == "Replace") {
    step = read_replace(fields);
  } else if (name == "Metaspace") {
    const Metaspace m = read_metaspace(fields);
    step = DecodeMetaspace{m.mark, m.prepends != Metaspace::Prepends::kNever};
  } else {
    refuse_type(type, "Sequence, ByteLevel, ByteFallback, Fuse, Strip, Replace, Metaspace");
  }
  fields.end();
  return step;
}

// A replacement, or a strip at the end, of the fused text would have to wait for all of it.
void check_decode(const std::vector<DecodeStep>& steps, const Node& node) {
  bool fused = false;
  for (const DecodeStep& step : steps) {
    const auto* replace = std::get_if<Replace>(&step);
    const bool is_long =
        replace && (replace->sought.is_pattern ||
                    next_character(replace->sought.text, 0) != replace->sought.text.size());
    if (fused && is_long)
      node.unsupported("replaces more than a character behind Fuse or ByteLevel");
    if (std::holds_alternative<ByteFallback>(step) && fused) {
      node.unsupported("has ByteFallback behind Fuse or ByteLevel");
    }
    fused =
        fused || std::holds_alternative<Fuse>(step) || std::holds_alternative<DecodeBytes>(step);
  }
}

std::pair<std::string, std::string> read_merge(const Node& node) {
  if (node.value.is_array()) {
    if (node.value.size() != 2) node.damaged(text("{} is not a pair", node.shown()));
    return {node.at(size_t{0}).string(), node.at(size_t{1}).string()};
  }
  const std::string s = node.string();
  const size_t space = s.find(' ');
  if (space == s.npos || s.find(' ', space + 1) != s.npos) {
    node.damaged(text("{} is not two tokens with a space between", node.shown()));
  }
  return {s.substr(0, space), s.substr(space + 1)};
}

// A field that may only be absent, null or the empty string, which is how some files say none.
void without_text(Fields& fields, const char* key) {
  const std::optional<Node> field = fields.find(key);
  if (field && !(field->value.is_string() && field->string().empty())) {
    field->unsupported(text("= {} is not supported", field->shown()));
  }
}

void read_type(Fields& fields) {
  const std::optional<Node> type = fields.find("type");
  if (!type || type->string() == "BPE") return;
  type->unsupported(text(
      "= {} is not supported; there is: BPE (a Unigram file of SentencePiece's BPE is made anew by "
      "transformers: AutoTokenizer.from_pretrained(DIR).save_pretrained(OUT))",
      type->shown()));
}

void read_vocab(const Node& vocab, Spec& spec) {
  if (vocab.object().value.empty()) vocab.damaged("is empty");
  for (const auto& [token, id] : vocab.value.items()) {
    if (!id.is_number_unsigned() || id.get<uint64_t>() >= uint64_t{kMostIds}) {
      vocab.damaged(text("{}: {} is not an id below {}", printable(token), id.dump(), kMostIds));
    }
    spec.vocab.emplace_back(id.get<uint32_t>(), token);
  }
  std::sort(spec.vocab.begin(), spec.vocab.end());
  const auto twice =
      std::adjacent_find(spec.vocab.begin(), spec.vocab.end(),
                         [](const auto& a, const auto& b) { return a.first == b.first; });
  if (twice != spec.vocab.end()) {
    vocab.damaged(text("{} and {} both have the id {}", printable(twice->second),
                       printable(std::next(twice)->second), twice->first));
  }
}

void read_model(const Node& node, Spec& spec) {
  Fields fields(node);
  read_type(fields);
  if (const auto dropout = fields.find("dropout"); dropout && dropout->value != 0.0) {
    dropout->unsupported(text("= {} is not supported", dropout->shown()));
  }
  without_text(fields, "continuing_subword_prefix");
  without_text(fields, "end_of_word_suffix");
  if (const auto unk = fields.find("unk_token")) spec.unk_token = unk->string();
  spec.fuse_unk = fields.boolean("fuse_unk", false);
  spec.byte_fallback = fields.boolean("byte_fallback", false);
  spec.ignore_merges = fields.boolean("ignore_merges", false);
  read_vocab(fields["vocab"], spec);
  const Node merges = fields["merges"].array();
  spec.merges.reserve(merges.value.size());
  for (size_t i = 0; i < merges.value.size(); ++i) spec.merges.push_back(read_merge(merges.at(i)));
  fields.end();
}

// Tokens by content and by id.
class Known {
 public:
  explicit Known(const Spec& spec) {
    ids_.reserve(spec.vocab.size());
    texts_.reserve(spec.vocab.size());
    for (const auto& [id, token] : spec.vocab) {
      ids_.emplace(token, id);
      texts_.emplace(id, token);
    }
  }
  // An added token has the id and the text that the vocabulary has for it, or new ones.
  void check(const Node& node, uint32_t id, const std::string& token) const {
    const auto by_token = ids_.find(token);
    if (by_token != ids_.end() && by_token->second != id) {
      node.damaged(text("= {}, but {} has the id {} in model.vocab", id, printable(token),
                        by_token->second));
    }
    const auto by_id = texts_.find(id);
    if (by_id != texts_.end() && by_id->second != token) {
      node.damaged(
          text("= {} is {} already, not {}", id, printable(by_id->second), printable(token)));
    }
  }

 private:
  std::unordered_map<std::string_view, uint32_t> ids_;
  std::unordered_map<uint32_t, std::string_view> texts_;
};

void read_added(const Node& list, Spec& spec) {
  list.array();
  const Known known(spec);
  std::set<std::string> contents;
  std::set<uint32_t> ids;
  for (size_t i = 0; i < list.value.size(); ++i) {
    const Node node = list.at(i);
    Fields fields(node);
    AddedToken t;
    t.content = fields["content"].string();
    t.id = static_cast<uint32_t>(fields["id"].integer(kMostIds - 1));
    t.special = fields.boolean("special", false);
    t.single_word = fields.boolean("single_word", false);
    t.lstrip = fields.boolean("lstrip", false);
    t.rstrip = fields.boolean("rstrip", false);
    t.normalized = fields.boolean("normalized", !t.special);
    if (t.content.empty()) node.damaged("has no content");
    known.check(fields["id"], t.id, t.content);
    if (!contents.insert(t.content).second || !ids.insert(t.id).second) {
      node.damaged(text("{} or the id {} stands there twice", printable(t.content), t.id));
    }
    fields.end();
    spec.added.push_back(std::move(t));
  }
  std::sort(spec.added.begin(), spec.added.end(),
            [](const AddedToken& a, const AddedToken& b) { return a.id < b.id; });
}

// The ids of one special token of a template.
void read_special(const Node& node, const Node& special_tokens, std::vector<uint32_t>& ids) {
  Fields fields(node);
  const Node id = fields["id"];
  fields.ignore("type_id");
  fields.end();
  const std::string name = id.string();
  if (!special_tokens.object().value.contains(name)) id.damaged("is not in special_tokens");
  Fields token(special_tokens.at(name));
  const Node list = token["ids"].array();
  for (size_t i = 0; i < list.value.size(); ++i) {
    ids.push_back(static_cast<uint32_t>(list.at(i).integer(kMostIds - 1)));
  }
}

void read_template(Fields& fields, Spec& spec) {
  const Node pieces = fields["single"].array();
  const Node special_tokens = fields["special_tokens"];
  fields.ignore("pair");  // texts come one by one
  bool behind = false;
  for (size_t i = 0; i < pieces.value.size(); ++i) {
    const Node piece = pieces.at(i);
    Fields one(piece);
    if (one.find("Sequence")) {
      if (behind) piece.damaged("is the text a second time");
      behind = true;
    } else {
      read_special(one["SpecialToken"], special_tokens, behind ? spec.after : spec.before);
    }
    one.end();
  }
  if (!behind) pieces.damaged("has no place for the text");
}

void read_processor(const Node& node, Spec& spec) {
  each_of_sequence(node, "processors", 0, [&](const Node& one) {
    Fields fields(one);
    const Node type = fields["type"];
    if (type.string() == "ByteLevel") {  // it changes offsets alone
      for (const char* f : {"add_prefix_space", "trim_offsets", "use_regex"}) fields.ignore(f);
    } else if (type.string() == "TemplateProcessing") {
      read_template(fields, spec);
    } else {
      refuse_type(type, "Sequence, ByteLevel, TemplateProcessing");
    }
    fields.end();
  });
}

void read_steps(Fields& fields, Spec& spec) {
  if (const auto node = fields.find("normalizer")) {
    each_of_sequence(*node, "normalizers", 0,
                     [&](const Node& one) { spec.normal.push_back(read_normal(one)); });
  }
  if (const auto node = fields.find("pre_tokenizer")) {
    each_of_sequence(*node, "pretokenizers", 0, [&](const Node& one) {
      if (spec.is_of_bytes()) one.unsupported("stands behind a ByteLevel");
      spec.split.push_back(read_split(one));
    });
  }
  if (const auto node = fields.find("post_processor")) read_processor(*node, spec);
  if (const auto node = fields.find("decoder")) {
    spec.decode.emplace();
    each_of_sequence(*node, "decoders", 0,
                     [&](const Node& one) { spec.decode->push_back(read_decode(one)); });
    check_decode(*spec.decode, *node);
  }
}

// Whether brackets nest deeper than any tokenizer's; what shows a value calls itself for each.
bool is_too_deep(std::string_view json) {
  int depth = 0;
  bool in_string = false;
  for (size_t i = 0; i < json.size(); ++i) {
    const char c = json[i];
    if (in_string) {
      if (c == '\\') ++i;
      in_string = c != '"';
    } else if (c == '"') {
      in_string = true;
    } else if (c == '[' || c == '{') {
      if (++depth > 4 * kDeepest) return true;
    } else if (c == ']' || c == '}') {
      --depth;
    }
  }
  return false;
}

nlohmann::json parse(const std::string& file, const std::string& json) {
  if (const size_t bad = find_bad_utf8(json); bad != json.npos) {
    throw DataError("{}: byte {} is not UTF-8", file, bad);
  }
  if (is_too_deep(json)) throw DataError("{}: nests deeper than {}", file, 4 * kDeepest);
  try {
    return nlohmann::json::parse(json);
  } catch (const nlohmann::json::exception& e) {
    throw DataError("{}: not JSON: {}", file, parser_text(e.what()));
  }
}

}  // namespace

Spec read_spec(const std::string& file, const std::string& json) {
  const nlohmann::json root = parse(file, json);
  Spec spec;
  Fields fields(Node{root, file, ""});
  fields.ignore("version");
  fields.without("truncation");
  fields.without("padding");
  read_model(fields["model"], spec);
  if (const auto added = fields.find("added_tokens")) read_added(*added, spec);
  read_steps(fields, spec);
  fields.end();
  return spec;
}

}  // namespace moiety::data::bpe
