// The command `moiety eval`, which tells how well a checkpoint predicts a token file.
#pragma once

#include <string>
#include <vector>

namespace moiety::app {

// Prints one JSON line: loss (nats per token), perplexity, bits per byte, tokens, and by MoE layer
// the pairs of the busiest expert / mean. Returns the exit code.
int eval_command(const std::vector<std::string>& arguments);

}  // namespace moiety::app
