#include "moiety/train/training_state.h"

#include <limits>

#include <climits>
#include <nlohmann/json.hpp>

#include "moiety/base/error.h"
#include "moiety/base/json_line.h"
#include "moiety/base/printable.h"

namespace moiety::train {
namespace {

int parse_count(const nlohmann::json& value) {
  if (!value.is_number_unsigned() || value.get<uint64_t>() > INT_MAX) {
    throw CheckpointError("state of the checkpoint: {} is not a count", value.dump());
  }
  return value.get<int>();
}

double parse_loss(const nlohmann::json& loss) {
  if (loss.is_number()) return loss.get<double>();
  // JSON has no numbers for these.
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  if (loss == "nan") return std::numeric_limits<double>::quiet_NaN();
  if (loss == "inf") return kInfinity;
  if (loss == "-inf") return -kInfinity;
  throw CheckpointError("state of the checkpoint: {} is not a loss", loss.dump());
}

}  // namespace

std::string to_json(const TrainingState& state) {
  return JsonLine()
      .raw("sampler", to_json(state.sampler))
      .add("skips_in_row", state.guard.skips_in_row)
      .add("losses", std::span<const double>(state.guard.last_losses()))
      .text();
}

TrainingState parse_training_state(std::string_view text) {
  TrainingState state;
  try {
    const nlohmann::json json = nlohmann::json::parse(text);
    state.sampler = data::parse_sampler_state(json.at("sampler").dump());
    state.guard.skips_in_row = parse_count(json.at("skips_in_row"));
    std::vector<double> losses;
    for (const nlohmann::json& loss : json.at("losses")) losses.push_back(parse_loss(loss));
    state.guard.set_losses(losses);
  } catch (const nlohmann::json::exception& e) {
    throw CheckpointError("state of the checkpoint: {}", parser_text(e.what()));
  }
  return state;
}

}  // namespace moiety::train
