#include "apps/moiety/commands/quantized_description.h"

#include <algorithm>
#include <charconv>
#include <limits>
#include <type_traits>

#include <nlohmann/json.hpp>

#include "apps/moiety/exit_code.h"
#include "moiety/base/crc32c.h"
#include "moiety/base/printable.h"

namespace moiety::app {
namespace {

using Json = nlohmann::ordered_json;

// More elements than a file system holds; sizes of smaller tensors do not overflow.
constexpr int64_t kMostElements = int64_t{1} << 48;
constexpr const char* kChecksums = "crc32c";
constexpr const char* kOwnChecksum = "quantized.json";  // its key beside those of the arrays

// The fields of an object, each of which can be taken once, so that unknown ones are noticed.
class Fields {
 public:
  Fields(const std::string& path, std::string_view json) : path_(path) {
    json_ = Json::parse(json, nullptr, false);
    if (!json_.is_object()) throw DataError("{}: is no JSON object", path);
  }

  template <class T>
  T take(const char* key) {
    const auto at = json_.find(key);
    if (at == json_.end()) throw DataError("{}: {} is missing", path_, key);
    const Json value = *at;
    json_.erase(at);
    if constexpr (std::is_same_v<T, bool>) {
      if (value.is_boolean()) return value.get<T>();
    } else if constexpr (std::is_same_v<T, std::string>) {
      if (value.is_string()) return value.get<T>();
    } else if constexpr (std::is_floating_point_v<T>) {
      if (value.is_number()) return value.get<T>();
    } else if constexpr (std::is_unsigned_v<T>) {
      if (value.is_number_unsigned() && value.get<uint64_t>() <= std::numeric_limits<T>::max()) {
        return value.get<T>();
      }
    } else if constexpr (std::is_same_v<T, std::map<std::string, uint32_t>>) {
      T out;
      for (const auto& [name, sum] : value.items()) {
        if (!sum.is_string()) break;
        const auto digits = sum.template get<std::string>();
        const char* end = digits.data() + digits.size();
        const auto [at, error] = std::from_chars(digits.data(), end, out[name], 16);
        if (digits.size() != 8 || at != end || error != std::errc()) break;
      }
      if (value.is_object() && out.size() == value.size()) return out;
    } else if (value.is_array()) {
      T out;
      for (const Json& n : value) {
        if (!n.is_number_unsigned() || n.get<uint64_t>() > uint64_t{kMostElements}) break;
        out.push_back(n.get<int64_t>());
      }
      if (out.size() == value.size()) return out;
    }
    throw DataError("{}: {} is {}", path_, key, printable(value.dump()));
  }
  bool has(const char* key) const { return json_.contains(key); }
  // Takes a word and returns its number among `words`.
  template <size_t kCount>
  size_t take_word(const char* key, const std::array<std::string_view, kCount>& words) {
    const auto typed = take<std::string>(key);
    const auto at = std::find(words.begin(), words.end(), typed);
    if (at == words.end()) throw DataError("{}: {} is '{}'", path_, key, printable(typed));
    return static_cast<size_t>(at - words.begin());
  }
  void end() const {
    if (!json_.empty())
      throw DataError("{}: unknown key {}", path_, printable(json_.begin().key()));
  }

 private:
  const std::string& path_;
  Json json_;
};

constexpr std::array<std::string_view, 3> kElementWords{"e4m3", "e5m2", "e2m1"};
constexpr DType kElements[] = {DType::kE4M3, DType::kE5M2, DType::kE2M1};
constexpr std::array<std::string_view, 3> kDirectionWords{"row", "col", "both"};
constexpr std::array<std::string_view, 2> kRoundingWords{"nearest", "stochastic"};

// Compares the text with its own checksum, which is taken out of `sums`.
void check_own(const std::string& path, std::string_view json,
               std::map<std::string, uint32_t>& sums) {
  const uint32_t crc = crc32c(json.substr(0, json.rfind(text("\"{}\"", kChecksums))));
  if (!sums.contains(kOwnChecksum) || sums[kOwnChecksum] != crc) {
    throw DataError("{}: the text before \"{}\" has crc32c {:08x}, which is not the one behind it",
                    path, kChecksums, crc);
  }
  sums.erase(kOwnChecksum);
}

// Checks that the tensor is small enough for a view of its elements.
void check_shape(const std::string& path, const QuantizedDescription& d) {
  int64_t elements = 1;
  bool fits = !d.shape.empty();
  for (const int64_t n : d.shape) {
    fits = fits && !__builtin_mul_overflow(elements, std::max<int64_t>(n, 1), &elements) &&
           elements <= kMostElements;
  }
  if (!fits) throw DataError("{}: shape is of no tensor that can be read", path);
}

}  // namespace

int64_t QuantizedDescription::rows() const {
  int64_t out = 1;
  for (size_t i = 0; i + 1 < shape.size(); ++i) out *= shape[i];
  return out;
}

std::string to_json(const QuantizedDescription& d) {
  const bool stochastic = d.spec.rounding == Rounding::kStochastic;
  Json out;
  out["version"] = 1;
  out["format"] = name(d.spec.format);
  out["element"] = name(d.spec.element);
  out["shape"] = d.shape;
  out["directions"] = kDirectionWords[d.directions.row ? (d.directions.col ? 2 : 0) : 1];
  out["scale_layout"] = kLayoutWords[static_cast<size_t>(d.layout)];
  out["rounding"] = kRoundingWords[stochastic];
  if (stochastic) {
    out["seed"] = d.rng.seed;
    out["draw"] = d.rng.draw;
    out["tensor_id"] = d.tensor_id;
  }
  out["pow2_scales"] = d.spec.pow2_scales;
  out["row_scaled"] = d.spec.row_scaled;
  out["rht"] = d.spec.rht_col;
  if (d.spec.rht_col) out["rht_signs"] = d.spec.rht_signs;
  out["amax_floor"] = d.spec.amax_floor;
  out["non_finite"] = d.non_finite;
  std::string json = out.dump(2);
  json.resize(json.size() - 2);  // "\n}"
  json += ",\n  ";
  Json sums;
  sums[kOwnChecksum] = text("{:08x}", crc32c(json));
  for (const auto& [array, crc] : d.checksums) sums[array] = text("{:08x}", crc);
  return json + text("\"{}\": {}\n}}\n", kChecksums, sums.dump());
}

QuantizedDescription parse_quantized_description(const std::string& path, std::string_view json) {
  Fields fields(path, json);
  if (const auto version = fields.take<uint32_t>("version"); version != 1) {
    throw DataError("{}: is of version {}, this program reads 1", path, version);
  }
  QuantizedDescription d;
  const std::optional<Format> format = format_of(fields.take<std::string>("format"));
  if (!format) throw DataError("{}: format is unknown", path);
  d.spec.format = *format;
  d.spec.element = kElements[fields.take_word("element", kElementWords)];
  d.shape = fields.take<std::vector<int64_t>>("shape");
  const size_t directions = fields.take_word("directions", kDirectionWords);
  d.directions = {directions != 1, directions != 0};
  d.layout = static_cast<ScaleLayout>(fields.take_word("scale_layout", kLayoutWords));
  d.spec.rounding = static_cast<Rounding>(fields.take_word("rounding", kRoundingWords));
  if (d.spec.rounding == Rounding::kStochastic) {
    d.rng.seed = fields.take<uint64_t>("seed");
    d.rng.draw = fields.take<uint64_t>("draw");
    d.tensor_id = fields.take<uint32_t>("tensor_id");
  }
  d.spec.pow2_scales = fields.take<bool>("pow2_scales");
  d.spec.row_scaled = fields.take<bool>("row_scaled");
  d.spec.rht_col = fields.take<bool>("rht");
  if (d.spec.rht_col) d.spec.rht_signs = fields.take<uint16_t>("rht_signs");
  d.spec.amax_floor = fields.take<float>("amax_floor");
  d.non_finite = fields.take<bool>("non_finite");
  if (fields.has(kChecksums)) {
    d.checksums = fields.take<std::map<std::string, uint32_t>>(kChecksums);
    check_own(path, json, d.checksums);
  }
  fields.end();
  check_shape(path, d);
  try {
    quantized_sizes(d.spec, d.rows(), d.cols(), d.directions);
  } catch (const Error& e) {
    throw DataError("{}: {}", path, e.what());
  }
  return d;
}

}  // namespace moiety::app
