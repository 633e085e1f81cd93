// A quantized tensor as files that any other implementation can read: quantized.json describes it,
// and row_data, row_scales, col_data, col_scales, amax and tensor_scale .npy are its arrays
// (docs/formats.md). Codes are uint8, scales float32 or uint8.
#pragma once

#include <string>
#include <vector>

#include "apps/moiety/commands/quantized_description.h"
#include "moiety/base/buffer.h"

namespace moiety::app {

// Throws UsageError if one of the files exists, unless `overwrite`.
void check_free(const std::string& directory, bool overwrite);
// Writes the files. Each appears whole, the description last; arrays of an earlier tensor are
// removed. The scales of `view` are in the layout of the description. Returns a line for every
// array. Throws IoError.
std::vector<std::string> write_quantized(const std::string& directory,
                                         const QuantizedDescription& description,
                                         const QuantizedView& view);

struct StoredTensor {
  QuantizedDescription description;
  std::vector<Buffer> memory;
  QuantizedView view;  // with compact scales
};
// Throws DataError for files that are damaged or do not fit each other, and Error(kUnsupported) for
// scales of tiles in another layout than compact, which cannot be converted back.
StoredTensor read_quantized(const std::string& directory);

// Whether the directory holds a description.
bool is_quantized(const std::string& directory);
struct QuantizedCheck {
  QuantizedDescription description;  // without checksums, if the files are of an older version
  int64_t bytes = 0;                 // of the arrays
  int arrays = 0;
};
// Reads all files and compares them with the description, scales of any layout too. DataError.
QuantizedCheck check_quantized(const std::string& directory);

}  // namespace moiety::app
