// The commands `moiety quantize` and `moiety dequantize`: NumPy files to quantized tensors and
// back, so that Moiety's bytes can be compared with another implementation's.
#pragma once

#include <string>
#include <vector>

namespace moiety::app {

// Run the commands with the arguments behind their names. They print the files that they wrote to
// stdout and return the exit code. They throw UsageError, DataError or IoError.
int quantize_command(const std::vector<std::string>& arguments);
int dequantize_command(const std::vector<std::string>& arguments);

}  // namespace moiety::app
