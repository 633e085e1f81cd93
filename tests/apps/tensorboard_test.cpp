// Event files, read back by a reader of their format that shares nothing with the writer but
// crc32c.
#include "apps/moiety/report/tensorboard.h"

#include <cstring>
#include <optional>

#include "moiety/base/crc32c.h"
#include "tests/apps/train_helpers.h"

namespace moiety::app {
namespace {

namespace fs = std::filesystem;

template <class T>
T number_at(const std::string& s, size_t at) {
  T out;
  if (at + sizeof(T) > s.size()) throw std::runtime_error("the file ends early");
  std::memcpy(&out, s.data() + at, sizeof(T));
  return out;
}

uint32_t unmasked(uint32_t masked) {
  const uint32_t rotated = masked - 0xa282ead8;
  return (rotated >> 17) | (rotated << 15);
}

// The payloads of the records.
std::vector<std::string> read_records(const std::string& file) {
  std::vector<std::string> records;
  for (size_t at = 0; at < file.size();) {
    const auto length = number_at<uint64_t>(file, at);
    EXPECT_EQ(unmasked(number_at<uint32_t>(file, at + 8)), crc32c(file.data() + at, 8));
    const std::string payload = file.substr(at + 12, length);
    EXPECT_EQ(unmasked(number_at<uint32_t>(file, at + 12 + length)), crc32c(payload));
    records.push_back(payload);
    at += 16 + length;
  }
  return records;
}

// A protobuf field: its number, and its value as 64 bits or as bytes.
struct ProtoField {
  uint64_t number = 0, value = 0;
  std::string bytes;
};

std::vector<ProtoField> fields_of(const std::string& message) {
  size_t at = 0;
  const auto varint = [&] {
    uint64_t value = 0;
    for (int shift = 0;; shift += 7) {
      const auto byte = number_at<uint8_t>(message, at++);
      value |= uint64_t(byte & 0x7f) << shift;
      if (byte < 0x80) return value;
    }
  };
  std::vector<ProtoField> fields;
  while (at < message.size()) {
    const uint64_t tag = varint();
    ProtoField f{.number = tag >> 3, .value = 0, .bytes = {}};
    switch (tag & 7) {
      case 0:
        f.value = varint();
        break;
      case 1:
        f.value = number_at<uint64_t>(message, at);
        at += 8;
        break;
      case 2: {
        const uint64_t length = varint();
        f.bytes = message.substr(at, length);
        at += length;
        break;
      }
      case 5:
        f.value = number_at<uint32_t>(message, at);
        at += 4;
        break;
      default:
        ADD_FAILURE() << "wire type " << (tag & 7);
        return fields;
    }
    fields.push_back(f);
  }
  return fields;
}

struct Event {
  double time = 0;
  uint64_t step = 0;
  std::string version;
  bool start = false;
  std::map<std::string, float> scalars;
};

Event parse_event(const std::string& payload) {
  Event event;
  for (const ProtoField& f : fields_of(payload)) {
    if (f.number == 1) std::memcpy(&event.time, &f.value, 8);
    if (f.number == 2) event.step = f.value;
    if (f.number == 3) event.version = f.bytes;
    if (f.number == 7) event.start = fields_of(f.bytes).at(0).value == 1;
    if (f.number != 5) continue;
    for (const ProtoField& value : fields_of(f.bytes)) {
      const std::vector<ProtoField> parts = fields_of(value.bytes);
      float x = 0;
      const auto bits = uint32_t(parts.at(1).value);
      std::memcpy(&x, &bits, 4);
      event.scalars[parts.at(0).bytes] = x;
    }
  }
  return event;
}

// The events of all files of a directory, in the order of their names, as TensorBoard reads them.
std::vector<Event> read_events(const fs::path& directory) {
  std::vector<std::string> files;
  for (const auto& entry : fs::directory_iterator(directory)) files.push_back(entry.path());
  std::sort(files.begin(), files.end());
  std::vector<Event> events;
  for (const std::string& file : files) {
    EXPECT_TRUE(fs::path(file).filename().string().starts_with("events.out.tfevents."));
    for (const std::string& record : read_records(read_all(file))) {
      events.push_back(parse_event(record));
    }
  }
  return events;
}

TEST(TensorBoard, MaskedChecksumIsThePublishedOne) {
  EXPECT_EQ(masked_crc32c("123456789"), 0xc78ab0e5u);
}

TEST(TensorBoard, TheBytesOfAFile) {
  const TemporaryDirectory dir;
  {
    EventWriter writer(dir / "tb", 7);
    const Scalar scalars[] = {{"loss", 2.5}, {"a/b", -1}};
    writer.add(300, scalars);
  }
  const fs::path path = fs::directory_iterator(dir / "tb")->path();
  const std::string name = path.filename().string();
  EXPECT_EQ(name.find('.', 20), 30u) << name;  // ten digits
  EXPECT_TRUE(name.ends_with(text(".{}.0", getpid()))) << name;
  const std::vector<std::string> records = read_records(read_all(path));
  ASSERT_EQ(records.size(), 3u);
  EXPECT_EQ(records[0].substr(9),
            "\x1a\x0d"
            "brain.Event:2");
  EXPECT_EQ(records[1].substr(9), "\x10\x07\x3a\x02\x08\x01");
  const std::string zero(1, '\0');
  EXPECT_EQ(records[2].substr(9),
            "\x10\xac\x02\x2a\x19"
            "\x0a\x0b\x0a\x04loss\x15" +
                zero + zero +
                "\x20\x40"
                "\x0a\x0a\x0a\x03"
                "a/b\x15" +
                zero + zero + "\x80\xbf");
}

TEST(TensorBoard, ARunTellsEverything) {
  const TemporaryDirectory dir;
  const std::string data = write_tokens(dir / "a.tok", {ramp(400), ramp(300, 7)});
  const Arguments arguments =
      tiny(dir / "r", 2, 2) + Arguments{"--data.synthetic=none",   "--data.train=" + data,
                                        "--data.valid=" + data,    "--eval.every=3",
                                        "--checkpoint.interval=3", "--train.steps=4"};
  ASSERT_EQ(run(arguments).code, kExitDone);
  const std::vector<Event> events = read_events(dir / "r/tb");
  EXPECT_EQ(events.at(0).version, "brain.Event:2");
  EXPECT_TRUE(events.at(1).start);
  EXPECT_EQ(events[1].step, 1u);
  const auto recorded = steps(dir / "r");
  std::map<uint64_t, std::map<std::string, float>> by_step;
  for (const Event& e : events) {
    EXPECT_GT(e.time, 1.5e9);
    by_step[e.step].insert(e.scalars.begin(), e.scalars.end());
  }
  ASSERT_EQ(by_step.rbegin()->first, 4u);
  for (const auto& [step, r] : recorded) {
    const auto& tb = by_step.at(uint64_t(step));
    EXPECT_EQ(tb.at("loss/training"), r["loss"].get<float>());
    EXPECT_EQ(tb.at("optimizer/gradient_norm"), r["gnorm"].get<float>());
    EXPECT_EQ(tb.at("optimizer/learning_rate"), r["lr"].get<float>());
    EXPECT_EQ(tb.at("speed/tokens_per_second"), r["tok_s"].get<float>());
    EXPECT_EQ(tb.at("speed/MFU_percent"), r["mfu"].get<float>());
    EXPECT_EQ(tb.at("experts/auxiliary_loss"), r["aux"].get<float>());
    EXPECT_EQ(tb.at("experts/dropped_pairs"), 0);
    EXPECT_GE(tb.at("experts/balance_worst_layer"), tb.at("experts/balance_mean"));
  }
  EXPECT_EQ(by_step.at(3).at("loss/validation"),
            moiety::app::events(dir / "r", "eval").at(1)["loss"].get<float>());

  // A second part of the run is a file of its own, which takes the place of what came later.
  fs::remove_all(checkpoint_path(dir / "r", 4));
  ASSERT_EQ(run(arguments).code, kExitDone);
  const std::vector<Event> both = read_events(dir / "r/tb");
  EXPECT_EQ(std::count_if(both.begin(), both.end(), [](const Event& e) { return e.start; }), 2);
  EXPECT_EQ(both.at(events.size() + 1).step, 4u);
}

TEST(TensorBoard, CanBeOff) {
  const TemporaryDirectory dir;
  ASSERT_EQ(run(tiny(dir / "r") + Arguments{"--log.tensorboard=false"}).code, kExitDone);
  EXPECT_FALSE(fs::exists(dir / "r/tb"));
}

}  // namespace
}  // namespace moiety::app
