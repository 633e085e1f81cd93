// Where tokenizers come from: files, and what they say of eos and bos.
#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>

#include <nlohmann/json.hpp>

#include "moiety/base/error.h"
#include "moiety/base/printable.h"
#include "moiety/data/tokenizer.h"
#include "moiety/data/tokenizer_bpe.h"

namespace moiety::data {
namespace {

namespace fs = std::filesystem;

constexpr uintmax_t kMostBytes = uintmax_t{512} << 20;

// How documents end for most models; the first of them that is a token.
constexpr std::array<std::string_view, 5> kUsualEos{
    "<|endoftext|>", "</s>", "<|end_of_text|>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "<eos>"};

std::string read_file(const fs::path& path) {
  std::error_code error;
  if (!fs::is_regular_file(path, error)) throw DataError("{}: is no regular file", path.string());
  if (fs::file_size(path, error) > kMostBytes) {
    throw DataError("{}: is longer than {} bytes", path.string(), kMostBytes);
  }
  std::ifstream file(path, std::ios::binary);
  std::string bytes((std::istreambuf_iterator<char>(file)), {});
  if (!file) throw DataError("{}: cannot be read", path.string());
  return bytes;
}

// Files of other tokenizers are refused with what makes a tokenizer.json of them.
void check_name(const fs::path& path) {
  const std::string name = path.filename().string();
  const bool is_model = name.find(".model") != name.npos;
  if (!is_model && path.extension() != ".tiktoken" && !name.starts_with("tekken")) return;
  fail(ErrorKind::kUnsupported,
       "{}: {} is not read; transformers makes a tokenizer.json of it: "
       "AutoTokenizer.from_pretrained(DIR).save_pretrained(OUT)",
       path.string(), is_model ? "a SentencePiece model" : "a file of ranks");
}

fs::path find_json(const std::string& name) {
  std::error_code error;
  const fs::path path(name);
  if (!fs::exists(path, error)) {
    throw UsageError(
        "tokenizer '{}' does not exist; there are: bytes, and the path of a tokenizer.json, of "
        "its folder, or of a token file",
        name);
  }
  if (!fs::is_directory(path, error)) {
    check_name(path);
    return path;
  }
  if (fs::exists(path / kTokenizerJson, error)) return path / kTokenizerJson;
  if (fs::exists(path / "tokenizer.model", error)) check_name(path / "tokenizer.model");
  throw UsageError("tokenizer '{}': the folder has no {}", name, kTokenizerJson);
}

nlohmann::json parse_object(const std::string& place, const std::string& bytes) {
  try {
    nlohmann::json object = nlohmann::json::parse(bytes);
    if (object.is_object()) return object;
  } catch (const nlohmann::json::exception& e) {
    throw DataError("{}: not JSON: {}", place, parser_text(e.what()));
  }
  throw DataError("{}: is no JSON object", place);
}

// A field of tokenizer_config.json that names a token: a text, or an object around it.
std::optional<std::string> token_text(const nlohmann::json& config, const char* key) {
  const auto field = config.find(key);
  if (field == config.end()) return std::nullopt;
  if (field->is_string()) return field->get<std::string>();
  if (!field->is_object()) return std::nullopt;
  const auto content = field->find("content");
  if (content == field->end() || !content->is_string()) return std::nullopt;
  return content->get<std::string>();
}

// The spec that stays: vocabulary and merges are in the pipeline.
bpe::Spec without_tables(bpe::Spec spec) {
  spec.vocab.clear();
  spec.merges.clear();
  return spec;
}

const TokenizerFile* file_called(std::string_view name, const std::vector<TokenizerFile>& files) {
  const auto it = std::find_if(files.begin(), files.end(),
                               [&](const TokenizerFile& f) { return f.name == name; });
  return it == files.end() ? nullptr : &*it;
}

bpe::Spec spec_of(const std::string& name, const std::vector<TokenizerFile>& files) {
  const TokenizerFile* json = file_called(kTokenizerJson, files);
  MOIETY_CHECK(json, "tokenizer {}: {} is missing", name, kTokenizerJson);
  return bpe::read_spec(name, json->bytes);
}

}  // namespace

Tokenizer::Bpe::Bpe(std::string name, std::vector<TokenizerFile> given)
    : Bpe(name, given, spec_of(name, given)) {}

Tokenizer::Bpe::Bpe(std::string name, std::vector<TokenizerFile> given, bpe::Spec whole)
    : files(std::move(given)),
      canonical(bpe::canonical(whole)),
      pipeline(whole, name),
      before(whole.before) {
  spec = without_tables(std::move(whole));
  find_special(name);
}

// What tokenizer_config.json says goes before special_tokens_map.json, the template, and habit.
void Tokenizer::Bpe::find_special(const std::string& name) {
  const auto take = [&](uint32_t& id, const nlohmann::json& config, const char* key,
                        const std::string& place) {
    const std::optional<std::string> token = token_text(config, key);
    if (id != kNoToken || !token) return;
    const std::optional<uint32_t> found = pipeline.find(*token);
    if (!found) throw DataError("{}: {} is {}, which is no token", place, key, printable(*token));
    id = *found;
  };
  for (const std::string_view file : {kTokenizerConfig, kSpecialTokensMap}) {
    const TokenizerFile* config = file_called(file, files);
    if (!config) continue;
    const std::string place = text("{} beside {}", file, name);
    const nlohmann::json object = parse_object(place, config->bytes);
    take(eos, object, "eos_token", place);
    take(bos, object, "bos_token", place);
    take(pad, object, "pad_token", place);
  }
  if (bos == kNoToken && !spec.before.empty()) bos = spec.before.front();
  if (eos == kNoToken && !spec.after.empty()) eos = spec.after.back();
  for (const std::string_view usual : kUsualEos) {
    const std::optional<uint32_t> id = pipeline.find(std::string(usual));
    if (eos == kNoToken && id) eos = *id;
  }
}

Tokenizer Tokenizer::load(std::string_view name) {
  if (name == "bytes") {
    Tokenizer t;
    t.name_ = name;
    t.vocab_ = 264;
    t.eos_ = 256;
    t.bos_ = 257;
    t.pad_ = 258;
    t.identity_ = sha256("moiety tokenizer bytes 1: eos=256 bos=257 pad=258 vocab=264\n");
    return t;
  }
  if (name.ends_with(".tok")) return of_token_file(name);
  const fs::path json = find_json(std::string(name));
  std::vector<TokenizerFile> files{{std::string(kTokenizerJson), read_file(json)}};
  for (const std::string_view more : {kTokenizerConfig, kSpecialTokensMap}) {
    const fs::path path = json.parent_path() / more;
    std::error_code error;
    if (fs::exists(path, error)) files.push_back({std::string(more), read_file(path)});
  }
  return of_files(json.string(), std::move(files));
}

}  // namespace moiety::data
