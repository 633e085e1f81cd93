// TensorBoard event files, without protobuf.
//
// A file is a sequence of records: u64 length (little endian), u32 masked crc32c of those 8 bytes,
// payload, u32 masked crc32c of the payload. A payload is a protobuf Event; the first one names the
// version, the others hold a step's numbers. TensorBoard joins the files of a directory.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "apps/moiety/report/run_directory.h"
#include "moiety/train/metrics.h"

namespace moiety::app {

// The masked checksum ((c >> 15) | (c << 17)) + 0xa282ead8 of the crc32c c.
uint32_t masked_crc32c(std::string_view bytes);

struct Scalar {
  std::string_view tag;
  double value;
};

class EventWriter {
 public:
  // Creates `directory` if it is missing, and in it a file
  // events.out.tfevents.<time>.<host>.<pid>.<n>. `next_step` is the first step that this writer
  // will report: TensorBoard drops what earlier files say of it and of later ones.
  EventWriter(const std::filesystem::path& directory, int64_t next_step);

  void add(int64_t step, std::span<const Scalar> scalars);

 private:
  void write(const std::string& event);

  std::unique_ptr<RecordFile> file_;
};

// Adds the numbers of a step that TensorBoard shows.
void add_step(const train::StepRecord& record, EventWriter& writer);

}  // namespace moiety::app
