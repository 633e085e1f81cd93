#include "apps/moiety/training_state.h"

#include <nlohmann/json.hpp>

#include "apps/moiety/errors.h"
#include "apps/moiety/json_line.h"

namespace moiety::app {

std::string to_json(const TrainingState& state) {
  return JsonLine()
      .raw("sampler", to_json(state.sampler))
      .add("skips_in_row", state.guard.skips_in_row)
      .add("losses", std::span<const double>(state.guard.losses))
      .text();
}

TrainingState parse_training_state(std::string_view text) {
  TrainingState state;
  try {
    const nlohmann::json json = nlohmann::json::parse(text);
    state.sampler = parse_sampler_state(json.at("sampler").dump());
    json.at("skips_in_row").get_to(state.guard.skips_in_row);
    for (const nlohmann::json& loss : json.at("losses")) {
      // "nan" and "inf" are strings.
      state.guard.losses.push_back(loss.is_string() ? std::stod(loss.get<std::string>())
                                                    : loss.get<double>());
    }
  } catch (const nlohmann::json::exception& e) {
    throw CheckpointError("state of the checkpoint: {}", e.what());
  }
  return state;
}

std::string config_to_json(const Config& config) {
  return JsonLine().add("toml", print_config(config)).text();
}

Options parse_config_json(std::string_view json, const std::string& checkpoint) {
  try {
    const nlohmann::json object = nlohmann::json::parse(json);
    return parse_config(object.at("toml").get<std::string>(), checkpoint + " config").options;
  } catch (const nlohmann::json::exception& e) {
    throw CheckpointError("{}: config: {}", checkpoint, e.what());
  } catch (const UsageError& e) {
    throw CheckpointError("{}", e.what());  // made by another version
  }
}

}  // namespace moiety::app
