// The configuration of a model that was not trained here: its sizes as keys, all else by default.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "apps/moiety/config/options.h"
#include "moiety/model/config.h"

namespace moiety::app {

struct ImportedModel {
  model::Config config;
  int64_t seed = 1234;
  int64_t seq_len = 1024;
  std::string_view recipe = "bf16";
  std::string tokenizer = "bytes";  // as in data.tokenizer
  std::string source;               // the file that describes the model, for comments and errors
};
Config imported_config(const ImportedModel& imported);

}  // namespace moiety::app
