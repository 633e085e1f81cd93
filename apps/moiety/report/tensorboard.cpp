#include "apps/moiety/report/tensorboard.h"

#include <bit>
#include <chrono>
#include <cstring>
#include <unistd.h>
#include <vector>

#include "apps/moiety/exit_code.h"
#include "moiety/base/crc32c.h"

namespace moiety::app {
namespace fs = std::filesystem;
namespace {

static_assert(std::endian::native == std::endian::little);

template <class T>
void append(std::string& out, T value) {
  char bytes[sizeof(T)];
  std::memcpy(bytes, &value, sizeof(T));
  out.append(bytes, sizeof(T));
}

// The encoding of protobuf: fields with their tags.
enum WireType : uint32_t { kVarint = 0, kFixed64 = 1, kBytes = 2, kFixed32 = 5 };

void append_varint(std::string& out, uint64_t value) {
  for (; value >= 0x80; value >>= 7) out += char(value | 0x80);
  out += char(value);
}

void append_tag(std::string& out, uint32_t field, WireType type) {
  append_varint(out, field << 3 | type);
}

void append_bytes(std::string& out, uint32_t field, std::string_view bytes) {
  append_tag(out, field, kBytes);
  append_varint(out, bytes.size());
  out += bytes;
}

// The numbers of the fields of Event, Summary, Summary.Value and SessionLog that are used.
constexpr uint32_t kWallTime = 1, kStep = 2, kFileVersion = 3, kSummary = 5, kSessionLog = 7;
constexpr uint32_t kValue = 1, kValueTag = 1, kSimpleValue = 2;
constexpr uint32_t kStatus = 1;
constexpr uint64_t kStart = 1;

double unix_time() {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::duration<double>(now).count();
}

std::string new_event() {
  std::string event;
  append_tag(event, kWallTime, kFixed64);
  append(event, unix_time());
  return event;
}

std::string step_event(int64_t step) {
  std::string event = new_event();
  append_tag(event, kStep, kVarint);
  append_varint(event, uint64_t(step));
  return event;
}

std::string host_name() {
  char name[256] = "";
  if (::gethostname(name, sizeof(name) - 1) != 0 || !*name) return "localhost";
  return name;
}

std::unique_ptr<RecordFile> new_file(const fs::path& directory) {
  std::error_code error;
  fs::create_directories(directory, error);
  if (error) {
    throw IoError("{}: cannot create the directory: {}", directory.string(), error.message());
  }
  fs::path path;
  int number = 0;
  do {
    path = directory / text("events.out.tfevents.{:010}.{}.{}.{}", int64_t(unix_time()),
                            host_name(), ::getpid(), number++);
  } while (fs::exists(path));
  return std::make_unique<RecordFile>(path);
}

}  // namespace

uint32_t masked_crc32c(std::string_view bytes) { return std::rotr(crc32c(bytes), 15) + 0xa282ead8; }

EventWriter::EventWriter(const fs::path& directory, int64_t next_step)
    : file_(new_file(directory)) {
  std::string version = new_event();
  append_bytes(version, kFileVersion, "brain.Event:2");
  write(version);
  std::string status;
  append_tag(status, kStatus, kVarint);
  append_varint(status, kStart);
  std::string start = step_event(next_step);
  append_bytes(start, kSessionLog, status);
  write(start);
}

void EventWriter::add(int64_t step, std::span<const Scalar> scalars) {
  std::string summary;
  for (const Scalar& scalar : scalars) {
    std::string value;
    append_bytes(value, kValueTag, scalar.tag);
    append_tag(value, kSimpleValue, kFixed32);
    append(value, float(scalar.value));
    append_bytes(summary, kValue, value);
  }
  std::string event = step_event(step);
  append_bytes(event, kSummary, summary);
  write(event);
}

void EventWriter::write(const std::string& event) {
  std::string record;
  append(record, uint64_t(event.size()));
  append(record, masked_crc32c(record));
  record += event;
  append(record, masked_crc32c(event));
  file_->add(record);
}

void add_step(const train::StepRecord& r, EventWriter& writer) {
  std::vector<Scalar> scalars{{"loss/training", r.loss},
                              {"optimizer/gradient_norm", r.grad_norm},
                              {"optimizer/learning_rate", r.lr},
                              {"speed/tokens_per_second", r.tokens_per_s},
                              {"speed/TFLOPs_per_rank", r.tflops},
                              {"speed/MFU_percent", r.mfu},
                              {"speed/step_ms", r.step_s * 1e3},
                              {"speed/data_wait_ms", r.data_wait_ms},
                              {"speed/exposed_communication_percent", r.comm},
                              {"memory/GiB", r.memory / (1 << 30)}};
  if (!r.balance.empty()) {
    const train::Balance balance = train::balance_of(r.balance);
    scalars.insert(scalars.end(), {{"experts/auxiliary_loss", r.aux},
                                   {"experts/z_loss", r.z},
                                   {"experts/balance_mean", balance.mean},
                                   {"experts/balance_worst_layer", balance.worst},
                                   {"experts/entropy", r.entropy},
                                   {"experts/dropped_pairs", double(r.dropped)}});
  }
  writer.add(r.step, scalars);
}

}  // namespace moiety::app
