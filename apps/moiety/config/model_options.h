// The translation of configuration keys into the model's configuration.
#pragma once

#include <string>
#include <string_view>

#include "apps/moiety/config/options.h"
#include "moiety/model/config.h"

namespace moiety::app {

// The model of these options; `tokenizer_vocab` is used where model.vocab is 0. Throws UsageError
// naming the first key that does not fit the others.
model::Config model_config(const Options& options, int64_t tokenizer_vocab);

// The sizes of a published model (model::preset) as TOML; empty for "tiny", the defaults, and "".
std::string preset_toml(std::string_view name);

}  // namespace moiety::app
