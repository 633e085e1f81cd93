#include <fcntl.h>

#include "moiety/checkpoint/checkpoint_error.h"
#include "moiety/checkpoint/manifest.h"
#include "moiety/checkpoint/safetensors.h"
#include "tests/fuzz/memory_files.h"
#include "tests/fuzz/targets.h"

namespace moiety::fuzz {
namespace {

using namespace checkpoint;

void open_and_read(FileSystem& files, const std::string& path) {
  const SafetensorsReader reader = SafetensorsReader::open(path, files);
  uint64_t at = 0;
  for (const Entry& entry : reader.entries()) {
    require(entry.begin == at && entry.end >= entry.begin, "entries follow each other");
    at = entry.end;
    std::vector<std::byte> data(entry.end - entry.begin);
    reader.read(entry.begin, data);
  }
  require(at <= reader.bytes(), "entries lie in the file");
  // A header that was read can be written, and read again.
  const std::string header = encode_header(reader.entries(), reader.metadata());
  const SafetensorsHeader again =
      parse_header("again", std::string_view(header).substr(sizeof(uint64_t)), at);
  require(again.metadata == reader.metadata(), "metadata survives");
  require(again.entries.size() == reader.entries().size(), "entries survive");
}

}  // namespace

void safetensors(std::string_view file) {
  const std::string name = rank_file_name(0, 1);
  MemoryFiles files({{"c/" + name, file}});
  try {
    open_and_read(files, "c/" + name);
    const Manifest m = rebuild_manifest("c", files);
    require(parse_manifest(encode_manifest(m)) == m, "a rebuilt manifest can be written");
  } catch (const CheckpointError&) {
  }
}

}  // namespace moiety::fuzz
