// `moiety quantize` and `moiety dequantize`: NumPy files to quantized tensors and back, so that our
// bytes can be held against another implementation.
#pragma once

#include <string>
#include <vector>

namespace moiety::app {

// With the arguments behind the command's name; they print what they wrote to stdout and return the
// exit code. They throw UsageError, DataError or IoError.
int quantize_command(const std::vector<std::string>& arguments);
int dequantize_command(const std::vector<std::string>& arguments);

}  // namespace moiety::app
