#include "moiety/checkpoint/manifest.h"

#include <algorithm>
#include <set>
#include <tuple>

#include "moiety/base/crc32c.h"
#include "moiety/base/number_text.h"
#include "moiety/checkpoint/checkpoint_error.h"
#include "moiety/checkpoint/json.h"
#include "moiety/checkpoint/safetensors.h"

namespace moiety::checkpoint {
namespace {

constexpr int64_t kVersion = 1;
// A checkpoint whose experts are not plain has this one: a reader that does not know of them would
// take their rows in a wrong order.
constexpr int64_t kVersionWithExperts = 2;
constexpr int kDeepest = 16;
constexpr int64_t kMostExperts = int64_t{1} << 16;  // of a module

int64_t version_of(const RunState& run) {
  return run.experts.is_plain() ? kVersion : kVersionWithExperts;
}

constexpr std::pair<const char*, int RankLayout::*> kLayoutFields[] = {
    {"ranks", &RankLayout::ranks}, {"tp", &RankLayout::tp}, {"gtp", &RankLayout::gtp},
    {"dp", &RankLayout::dp},       {"ep", &RankLayout::ep}, {"egtp", &RankLayout::egtp},
};

std::string json_object(const char* what, const std::string& s) {
  const JsonDocument json(what, s, kDeepest - 2);
  json.object(json.root());
  return std::string(json.raw(json.root()));
}

std::string encode_experts(const ExpertLayout& experts) {
  std::string modules;
  for (const ExpertModule& module : experts.modules) {
    modules += text("{}{{\"name\":{},\"experts\":{},\"gated\":{}}}", modules.empty() ? "" : ",",
                    json_string(module.name), module.experts, module.gated ? "true" : "false");
  }
  return text(",\n\"experts\":{{\"expert_weights\":\"{}\",\"glu_interleave\":{},\"modules\":[{}]}}",
              name(experts.form), experts.interleave, modules);
}

ExpertLayout parse_experts(const JsonDocument& json, const JsonValue& v) {
  ExpertLayout experts;
  const JsonValue& form = json.member(v, "expert_weights");
  const std::string& word = json.string(form);
  if (word == name(ExpertForm::kIndexed)) {
    experts.form = ExpertForm::kIndexed;
  } else if (word != name(ExpertForm::kPacked)) {
    json.refuse(form, "expert_weights is " + json_string(word) + ", not packed or indexed");
  }
  experts.interleave = json.integer(json.member(v, "glu_interleave"));
  for (const JsonValue& item : json.array(json.member(v, "modules"))) {
    ExpertModule& module = experts.modules.emplace_back();
    module.name = json.string(json.member(item, "name"));
    if (const char* fault = name_fault(module.name)) json.refuse(item, fault);
    const JsonValue& count = json.member(item, "experts");
    module.experts = json.integer(count);
    if (module.experts < 1 || module.experts > kMostExperts) {
      json.refuse(count, text("a module of {} experts", module.experts));
    }
    module.gated = json.boolean(json.member(item, "gated"));
  }
  if (experts.is_plain())
    json.refuse(v, "experts are packed and not interleaved, which is not said");
  return experts;
}

// The members of an object, without its braces.
std::string encode_run(const RunState& run) {
  std::string layout;
  for (const auto& [field, member] : kLayoutFields) {
    layout += text("{}\"{}\":{}", layout.empty() ? "" : ",", field, run.layout.*member);
  }
  std::string loss;
  if (run.validation_loss) {
    loss = text("\"validation_loss\":{},", number_text(*run.validation_loss));
  }
  return text(
      "\"step\":{},\"tokens\":{},\"seed\":\"{:016x}\",\"adam_t\":{},{}\"layout\":{{{}}},\n"
      "\"config\":{},\n\"state\":{}{}",
      run.step, run.tokens, run.seed, run.adam_t, loss, layout, json_object("config", run.config),
      json_object("state", run.state), run.experts.is_plain() ? "" : encode_experts(run.experts));
}

// A number of steps or tokens: training goes on counting from it.
int64_t parse_count(const JsonDocument& json, const JsonValue& v, const char* field) {
  constexpr int64_t kMost = int64_t{1} << 53;
  const JsonValue& value = json.member(v, field);
  const int64_t n = json.integer(value);
  if (n > kMost) json.refuse(value, text("{} is {}, more than any training counts", field, n));
  return n;
}

RunState parse_run_members(const JsonDocument& json, const JsonValue& v) {
  RunState run;
  run.step = parse_count(json, v, "step");
  run.tokens = parse_count(json, v, "tokens");
  run.seed = json.hex(json.member(v, "seed"), 16);
  run.adam_t = parse_count(json, v, "adam_t");
  if (run.adam_t > run.step) {
    json.refuse(v, text("adam_t is {} after {} steps", run.adam_t, run.step));
  }
  if (const JsonValue* loss = json.find(v, "validation_loss")) {
    run.validation_loss = json.number(*loss);
  }
  const JsonValue& layout = json.member(v, "layout");
  for (const auto& [field, member] : kLayoutFields) {
    const JsonValue& degree = json.member(layout, field);
    const int64_t n = json.integer(degree);
    if (n < 1 || n > INT32_MAX) json.refuse(degree, text("{} is {}", field, n));
    run.layout.*member = static_cast<int>(n);
  }
  for (const auto& [field, raw] : {std::pair("config", &run.config), {"state", &run.state}}) {
    const JsonValue& object = json.member(v, field);
    json.object(object);
    *raw = json.raw(object);
  }
  if (const JsonValue* experts = json.find(v, "experts")) {
    run.experts = parse_experts(json, *experts);
  }
  return run;
}

std::vector<FileEntry> parse_files(const JsonDocument& json, const JsonValue& v) {
  std::vector<FileEntry> files;
  std::set<std::string> names;
  for (const JsonValue& item : json.array(v)) {
    FileEntry& file = files.emplace_back();
    file.name = json.string(json.member(item, "name"));
    if (name_fault(file.name) || file.name.find('/') != std::string::npos || file.name[0] == '.') {
      json.refuse(item, json_string(file.name) + " is not a plain file name");
    }
    if (!names.insert(file.name).second) {
      json.refuse(item, "file " + json_string(file.name) + " is listed twice");
    }
    file.bytes = static_cast<uint64_t>(json.integer(json.member(item, "bytes")));
    file.crc32c = static_cast<uint32_t>(json.hex(json.member(item, "crc32c"), 8));
  }
  return files;
}

// The sizes of a tensor, or one corner of a box in it.
std::vector<int64_t> parse_integers(const JsonDocument& json, const JsonValue& v) {
  std::vector<int64_t> out;
  for (const JsonValue& n : json.array(v)) out.push_back(json.integer(n));
  return out;
}

Piece parse_piece(const JsonDocument& json, const JsonValue& v, const Box& tensor, DType dtype,
                  std::span<const FileEntry> files) {
  const JsonArray& fields = json.array(v);
  if (fields.size() != 6) json.refuse(v, text("a piece of {} fields, not 6", fields.size()));
  Piece piece;
  const auto file = static_cast<uint64_t>(json.integer(fields[0]));
  if (file >= files.size()) json.refuse(v, text("file {} of {}", file, files.size()));
  piece.file = static_cast<int>(file);
  const auto start = parse_integers(json, fields[1]), size = parse_integers(json, fields[2]);
  const auto rank = static_cast<size_t>(tensor.rank);
  if (start.size() != rank || size.size() != rank) {
    json.refuse(v, text("a box of {} and {} dimensions in a tensor of {}", start.size(),
                        size.size(), rank));
  }
  piece.box.rank = tensor.rank;
  std::copy(start.begin(), start.end(), piece.box.start.begin());
  std::copy(size.begin(), size.end(), piece.box.size.begin());
  if (!contains(tensor, piece.box)) {
    json.refuse(v, text("box {} is outside of {}", describe(piece.box), describe(tensor)));
  }
  piece.begin = static_cast<uint64_t>(json.integer(fields[3]));
  piece.end = static_cast<uint64_t>(json.integer(fields[4]));
  const auto bytes = static_cast<uint64_t>(byte_size(dtype, volume(piece.box)));
  if (piece.end > files[file].bytes || piece.begin > piece.end ||
      piece.end - piece.begin != bytes) {
    json.refuse(v, text("bytes [{}, {}) of a file of {} do not hold box {} of {} bytes",
                        piece.begin, piece.end, files[file].bytes, describe(piece.box), bytes));
  }
  piece.crc32c = static_cast<uint32_t>(json.hex(fields[5], 8));
  return piece;
}

TensorEntry parse_tensor(const JsonDocument& json, const JsonValue& v,
                         std::span<const FileEntry> files) {
  TensorEntry tensor;
  const JsonValue& shape = json.member(v, "shape");
  tensor.shape = parse_integers(json, shape);
  if (const char* fault = shape_fault(tensor.shape)) json.refuse(shape, fault);
  const Box all = whole(tensor.shape);
  for (const auto& [slot, item] : json.object(json.member(v, "slots"))) {
    if (name_fault(slot) || slot.find('/') != std::string::npos) {
      json.refuse(item, json_string(slot) + " is no name of a slot");
    }
    SlotEntry& entry = tensor.slots[slot];
    const JsonValue& type = json.member(item, "dtype");
    const StoredType* stored = find_stored_type(json.string(type));
    if (!stored || !stored->dtype || stored->bits < 8) {
      json.refuse(type, "dtype " + json_string(json.string(type)) + " is not supported");
    }
    entry.dtype = *stored->dtype;
    entry.digest = json.hex(json.member(item, "digest"), 16);
    for (const JsonValue& piece : json.array(json.member(item, "pieces"))) {
      entry.pieces.push_back(parse_piece(json, piece, all, entry.dtype, files));
    }
  }
  return tensor;
}

std::string encode_slot(const SlotEntry& entry) {
  std::string pieces;
  for (const Piece& p : entry.pieces) {
    const auto rank = static_cast<size_t>(p.box.rank);
    pieces += text("{}[{},{},{},{},{},\"{:08x}\"]", pieces.empty() ? "" : ",", p.file,
                   shape_text({p.box.start.data(), rank}), shape_text({p.box.size.data(), rank}),
                   p.begin, p.end, p.crc32c);
  }
  return text("{{\"dtype\":\"{}\",\"digest\":\"{:016x}\",\"pieces\":[{}]}}",
              stored_type(entry.dtype).name, entry.digest, pieces);
}

}  // namespace

Manifest parse_manifest(std::string_view text, const std::string& file) {
  const JsonDocument json(file, text, kDeepest);
  const JsonValue& root = json.root();
  const JsonValue& format = json.member(root, "format");
  if (json.string(format) != "moiety-checkpoint") json.refuse(format, "no checkpoint of moiety");
  const JsonValue& version = json.member(root, "version");
  const int64_t n = json.integer(version);
  if (n != kVersion && n != kVersionWithExperts) {
    json.refuse(version, moiety::text("version {}; this program reads {} and {}", n, kVersion,
                                      kVersionWithExperts));
  }
  Manifest m;
  const JsonValue& id = json.member(root, "id");
  m.id = json.string(id);
  json.hex(id, 32);
  m.run = parse_run_members(json, root);
  if (n != version_of(m.run)) {
    json.refuse(version, moiety::text("version {}, by its experts {}", n, version_of(m.run)));
  }
  m.files = parse_files(json, json.member(root, "files"));
  for (const auto& [name, item] : json.object(json.member(root, "tensors"))) {
    if (const char* fault = name_fault(name)) json.refuse(item, fault);
    m.tensors[name] = parse_tensor(json, item, m.files);
  }
  return m;
}

RunState parse_run(std::string_view text, const std::string& file) {
  const JsonDocument json(file + ", metadata \"run\"", text, kDeepest);
  return parse_run_members(json, json.root());
}

std::string encode_manifest(const Manifest& m) {
  std::string out = text("{{\"format\":\"moiety-checkpoint\",\"version\":{},\"id\":\"{}\",\n{},\n",
                         version_of(m.run), m.id, encode_run(m.run));
  out += "\"files\":[";
  const char* separator = "\n";
  for (const FileEntry& file : m.files) {
    out += text("{}{{\"name\":{},\"bytes\":{},\"crc32c\":\"{:08x}\"}}", separator,
                json_string(file.name), file.bytes, file.crc32c);
    separator = ",\n";
  }
  out += "],\n\"tensors\":{";
  separator = "\n";
  for (const auto& [name, tensor] : m.tensors) {
    out += text("{}{}:{{\"shape\":{},\"slots\":{{", separator, json_string(name),
                shape_text(tensor.shape));
    separator = "\n  ";
    for (const auto& [slot, entry] : tensor.slots) {
      out += text("{}{}:{}", separator, json_string(slot), encode_slot(entry));
      separator = ",\n  ";
    }
    out += "}}";
    separator = ",\n";
  }
  return out + "}}\n";
}

SlotEntry& slot_of(Manifest& m, const std::string& name, const std::string& slot,
                   const std::vector<int64_t>& shape, DType dtype, const std::string& path) {
  TensorEntry& tensor = m.tensors.try_emplace(name, TensorEntry{shape, {}}).first->second;
  SlotEntry& entry = tensor.slots.try_emplace(slot, SlotEntry{dtype, 0, {}}).first->second;
  if (tensor.shape != shape || entry.dtype != dtype) {
    refuse("{}: {}/{} is {} {} here and {} {} there", path, slot, name, moiety::name(entry.dtype),
           shape_text(tensor.shape), moiety::name(dtype), shape_text(shape));
  }
  return entry;
}

void merge(Manifest& m, const Manifest& part, const std::string& path) {
  const int first_file = static_cast<int>(m.files.size());
  m.files.insert(m.files.end(), part.files.begin(), part.files.end());
  for (const auto& [name, tensor] : part.tensors) {
    for (const auto& [slot, entry] : tensor.slots) {
      SlotEntry& sum = slot_of(m, name, slot, tensor.shape, entry.dtype, path);
      sum.digest += entry.digest;
      for (Piece piece : entry.pieces) {
        piece.file += first_file;
        sum.pieces.push_back(piece);
      }
      std::sort(sum.pieces.begin(), sum.pieces.end(), [](const Piece& a, const Piece& b) {
        return std::tie(a.box.start, a.file, a.begin) < std::tie(b.box.start, b.file, b.begin);
      });
    }
  }
}

void check_tiling(const Manifest& m, const std::string& path) {
  for (const auto& [name, tensor] : m.tensors) {
    for (const auto& [slot, entry] : tensor.slots) {
      std::vector<Box> boxes;
      for (const Piece& piece : entry.pieces) boxes.push_back(piece.box);
      if (const auto fault = cover_fault(whole(tensor.shape), boxes)) {
        refuse("{}: {}/{} of shape {}: {}", path, slot, name, shape_text(tensor.shape), *fault);
      }
    }
  }
}

std::string encode_commit(const Manifest& m, std::string_view json) {
  return text("moiety-checkpoint {} {} {} {:08x}\n", version_of(m.run), m.id, json.size(),
              crc32c(json));
}

Manifest read_manifest(const std::string& path, FileSystem& files) {
  constexpr uint64_t kLongestCommit = 4096;
  const std::string commit = read_text(files, path + "/COMMIT", kLongestCommit);
  const std::string json = read_text(files, path + "/manifest.json", kLongestManifest);
  // The version and the manifest's checksum are checked before anything of it is believed.
  const std::string begin = text("moiety-checkpoint {} ", kVersion);
  if (!commit.starts_with(begin) &&
      !commit.starts_with(text("moiety-checkpoint {} ", kVersionWithExperts))) {
    refuse("{}/COMMIT begins with {}, expected {}", path,
           json_string(commit.substr(0, begin.size())), json_string(begin));
  }
  const std::string end = text(" {} {:08x}\n", json.size(), crc32c(json));
  if (!commit.ends_with(end)) {
    refuse("{}/COMMIT does not match manifest.json: {} should end in {}", path, json_string(commit),
           json_string(end));
  }
  Manifest m = parse_manifest(json, path + "/manifest.json");
  if (commit != encode_commit(m, json)) {
    refuse("{}/COMMIT does not match manifest.json, whose id is {}: {}", path, m.id,
           json_string(commit));
  }
  check_tiling(m, path);
  for (const FileEntry& file : m.files) {
    const auto bytes = size_of(files, path + "/" + file.name);
    if (!bytes) refuse("{}/{} is missing", path, file.name);
    if (*bytes != file.bytes) {
      refuse("{}/{} has {} bytes, expected {}", path, file.name, *bytes, file.bytes);
    }
  }
  return m;
}

Metadata file_metadata(const Manifest& m, int rank) {
  Metadata metadata{{"format", text("moiety-checkpoint {}", version_of(m.run))},
                    {"id", m.id},
                    {"step", text("{}", m.run.step)},
                    {"rank", text("{}", rank)},
                    {"ranks", text("{}", m.run.layout.ranks)}};
  if (rank == 0) metadata["run"] = "{" + encode_run(m.run) + "}";
  return metadata;
}

}  // namespace moiety::checkpoint
