#include "apps/moiety/config/checkpoints.h"
#include "apps/moiety/config/options.h"
#include "moiety/base/error.h"
#include "moiety/checkpoint/json.h"
#include "moiety/train/training_state.h"
#include "tests/fuzz/targets.h"

namespace moiety::fuzz {

using namespace app;

void toml_config(std::string_view toml) {
  try {
    const Config config = parse_config(toml, "fuzz.toml");
    const Config again = parse_config(print_config(config), "again.toml");
    for (const Key& key : option_keys()) {
      require(value_text(key, config.options) == value_text(key, again.options),
              "a configuration survives being printed");
    }
    (void)parse_config_json(config_to_json(config), "again");
  } catch (const UsageError&) {
  }
}

void checkpoint_state(std::string_view json) {
  try {
    const checkpoint::JsonDocument as_the_manifest_reads_it("state", json, 14);
  } catch (const CheckpointError&) {
    return;
  }
  try {
    const train::TrainingState state = train::parse_training_state(json);
    (void)train::parse_training_state(to_json(state));
  } catch (const CheckpointError&) {
  }
  try {
    (void)parse_config_json(json, "fuzz");
  } catch (const CheckpointError&) {
  }
}

}  // namespace moiety::fuzz
