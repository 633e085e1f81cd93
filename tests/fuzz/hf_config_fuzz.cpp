#include "moiety/base/error.h"
#include "moiety/hf/export.h"
#include "moiety/hf/tensors.h"
#include "tests/fuzz/targets.h"

namespace moiety::fuzz {

using namespace hf;

void hf_config(std::string_view json) {
  try {
    const Description read = parse_config(json, "config.json");
    const model::Config& c = read.config;
    require(c.layers <= 1024 && c.router.experts <= 4096, "sizes are bounded");
    check_window(read, read.window, "config.json");
    if (c.layers * c.router.experts <= 64) {
      require(!folder_tensors(c, read.family, Form::kOneByOne).empty(), "a model has tensors");
    }
    if (!has_experts(read.family)) return;
    // What is written for the model reads back as the model.
    const std::string written =
        config_text(c, read.family, DType::kBFloat16, 1024, std::string(json));
    const Description again = parse_config(written, "again.json");
    require(again.family == read.family && again.max_positions == read.max_positions &&
                again.config.rope_theta == c.rope_theta && again.config.norm_eps == c.norm_eps &&
                model::parameter_count(again.config) == model::parameter_count(c),
            "a description survives being written");
  } catch (const CheckpointError&) {
  }
}

}  // namespace moiety::fuzz
