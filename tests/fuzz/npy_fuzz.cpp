#include <string>

#include "apps/moiety/commands/npy.h"
#include "apps/moiety/commands/quantized_description.h"
#include "apps/moiety/exit_code.h"
#include "tests/fuzz/targets.h"

namespace moiety::fuzz {

using namespace app;

void npy(std::string_view file) {
  const MemoryFile memory(file);
  try {
    const NpyArray array = read_npy(memory.path());
    const NpyHeader& header = array.header;
    require(header.offset + header.bytes == static_cast<int64_t>(file.size()),
            "elements end with the file");
    require(array.data.bytes() >= header.bytes, "all elements are there");
    const NpyHeader again = parse_npy_header("again", npy_header(header.descr, header.shape));
    require(again.shape == header.shape && again.bytes == header.bytes, "our header says the same");
  } catch (const DataError&) {
  }
}

void quantized_json(std::string_view json) {
  try {
    const QuantizedDescription d = parse_quantized_description("fuzz", json);
    const QuantizedSizes sizes = quantized_sizes(d.spec, d.rows(), d.cols(), d.directions);
    require(sizes.row_data.bytes() >= 0 && sizes.col_data.bytes() >= 0, "sizes do not overflow");
    require(to_json(parse_quantized_description("again", to_json(d))) == to_json(d),
            "what is read is what is written");
  } catch (const DataError&) {
  }
}

}  // namespace moiety::fuzz
