// The sampler's state as JSON, the form in which a checkpoint holds it.
#include <charconv>

#include <nlohmann/json.hpp>

#include "moiety/base/error.h"
#include "moiety/base/printable.h"
#include "moiety/data/sampler.h"

namespace moiety::data {
namespace {

uint32_t parse_crc(const std::string& digits) {
  uint32_t value = 0;
  const char* end = digits.data() + digits.size();
  const auto [stop, error] = std::from_chars(digits.data(), end, value, 16);
  if (digits.size() != 8 || error != std::errc() || stop != end) {
    throw CheckpointError("sampler state: crc32c '{}' is not 8 hex digits", digits);
  }
  return value;
}

uint64_t count(const nlohmann::json& object, const char* key) {
  const nlohmann::json& value = object.at(key);
  if (!value.is_number_unsigned()) {
    throw CheckpointError("sampler state: {} is {}, not a count", key, value.dump());
  }
  return value.get<uint64_t>();
}

}  // namespace

std::string to_json(const SamplerState& state) {
  nlohmann::ordered_json json;
  json["sample"] = state.sample;
  json["sources"] = nlohmann::ordered_json::array();
  for (const SamplerState::Source& s : state.sources) {
    json["sources"].push_back({{"crc32c", text("{:08x}", s.identity.crc32c)},
                               {"tokens", s.identity.tokens},
                               {"weight", s.identity.weight},
                               {"credit", s.credit},
                               {"epoch", s.epoch},
                               {"position", s.position}});
  }
  return json.dump();
}

SamplerState parse_sampler_state(std::string_view json) {
  try {
    const nlohmann::json root = nlohmann::json::parse(json);
    SamplerState state;
    state.sample = count(root, "sample");
    for (const nlohmann::json& s : root.at("sources")) {
      SamplerState::Source& source = state.sources.emplace_back();
      source.identity.crc32c = parse_crc(s.at("crc32c").get<std::string>());
      source.identity.tokens = count(s, "tokens");
      source.identity.weight = count(s, "weight");
      const nlohmann::json& credit = s.at("credit");
      if (!credit.is_number_integer()) {
        throw CheckpointError("sampler state: credit is {}, not an integer", credit.dump());
      }
      credit.get_to(source.credit);
      source.epoch = count(s, "epoch");
      source.position = count(s, "position");
    }
    return state;
  } catch (const nlohmann::json::exception& e) {
    throw CheckpointError("sampler state: {}", parser_text(e.what()));
  }
}

}  // namespace moiety::data
