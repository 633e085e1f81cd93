#include "moiety/train/profile.h"

#include <cstring>
#include <fstream>

#include "moiety/base/json_line.h"
#include "moiety/base/log.h"
#include "moiety/base/replace_file.h"
#include "moiety/comm/process.h"
#include "moiety/train/cpu_peak.h"

namespace moiety::train {
namespace fs = std::filesystem;
namespace {

double microseconds(int64_t ns) { return double(ns) / 1e3; }

// The sizes as they are, and the rates that follow from flops, bytes and the time.
std::string event_args(const TraceEvent& event) {
  JsonLine args;
  const double ns = double(event.end - event.begin);
  for (const TraceArg& arg : event.args) {
    if (!arg.name) break;
    args.add(arg.name, arg.value);
    if (ns <= 0) continue;
    if (std::strcmp(arg.name, "flops") == 0) args.add("TFLOP/s", 1e-3 * arg.value / ns);
    if (std::strcmp(arg.name, "bytes") == 0) args.add("GB/s", arg.value / ns);
  }
  return args.text();
}

void append_line(std::string& out, const JsonLine& event) {
  if (!out.empty()) out += ",\n";
  out += event.text();
}

JsonLine metadata(const char* what, int rank, int lane, const JsonLine& args) {
  return JsonLine()
      .add("name", what)
      .add("ph", "M")
      .add("pid", rank)
      .add("tid", lane)
      .raw("args", args.text());
}

// The line before the events of a file, and the line behind them.
std::string head(int64_t first, int64_t last, int ranks) {
  return text("{{\"displayTimeUnit\":\"ms\",\"otherData\":{},\"traceEvents\":[\n",
              JsonLine()
                  .add("program", "moiety " MOIETY_VERSION)
                  .add("steps", text("{} to {}", first, last))
                  .add("ranks", ranks)
                  .add("execution", "eager")
                  .text());
}
constexpr std::string_view kFoot = "\n]}\n";

std::string rank_file(int rank) { return text("rank{}.json", rank); }

// The lines between head and foot of a rank's file; empty if there is no such file.
std::string read_events(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  std::string all{std::istreambuf_iterator<char>(in), {}};
  const size_t begin = all.find('\n') + 1;
  if (!in || all.size() < begin + kFoot.size()) return {};
  return all.substr(begin, all.size() - begin - kFoot.size());
}

// A rank's clock, as it travels.
struct ClockReading {
  comm::ProcessIdentity process;
  int64_t now;
};

}  // namespace

std::string trace_events(const Trace& trace, int rank, int64_t origin) {
  std::string out;
  append_line(out,
              metadata("process_name", rank, 0, JsonLine().add("name", text("rank {}", rank))));
  append_line(out, metadata("process_sort_index", rank, 0, JsonLine().add("sort_index", rank)));
  for (int lane = 0; lane < kTraceLanes; ++lane) {
    const char* lane_name = name(static_cast<TraceLane>(lane));
    append_line(out, metadata("thread_name", rank, lane, JsonLine().add("name", lane_name)));
    append_line(out, metadata("thread_sort_index", rank, lane, JsonLine().add("sort_index", lane)));
  }
  for (const TraceEvent& event : trace.events) {
    if (event.end == 0) continue;  // an error left it open
    append_line(out, JsonLine()
                         .add("name", event.name)
                         .add("ph", "X")
                         .add("ts", microseconds(event.begin - origin))
                         .add("dur", microseconds(event.end - event.begin))
                         .add("pid", rank)
                         .add("tid", static_cast<int>(event.lane))
                         .raw("args", event_args(event)));
  }
  for (const TraceSample& sample : trace.samples) {
    append_line(out, JsonLine()
                         .add("name", sample.name)
                         .add("ph", "C")
                         .add("ts", microseconds(sample.time - origin))
                         .add("pid", rank)
                         .raw("args", JsonLine().add("bytes", sample.value).text()));
  }
  return out;
}

void trace_memory() {
  if (Trace* trace = current_trace()) {
    trace->samples.push_back({"resident memory", trace_clock(), resident_bytes()});
  }
}

Profiler::Profiler(const ProfileSteps& steps, const fs::path& run_directory,
                   comm::Communicator& world)
    : steps_(steps), directory_(run_directory / "profile"), world_(world) {}

Profiler::~Profiler() {
  if (last_ > 0) write();
}

// Ranks of rank 0's host have its clock; others take the moment after the barrier to be the same.
void Profiler::align_clocks() {
  world_.barrier();
  const ClockReading mine{comm::this_process(), trace_clock()};
  ClockReading first;
  const std::string bytes =
      world_.bootstrap().all_gather({reinterpret_cast<const char*>(&mine), sizeof(mine)})[0];
  std::memcpy(&first, bytes.data(), sizeof(first));
  origin_ = comm::same_host(first.process, mine.process) ? first.now : mine.now;
}

void Profiler::write() noexcept {
  try {
    join(write_own());
  } catch (const std::exception& e) {
    log(LogLevel::kWarning, "no trace of the profiled steps: {}", e.what());
  }
  trace_ = {};
  last_ = 0;
}

std::string Profiler::write_own() const {
  const std::string stem = text("steps-{}-{}", first_, last_);
  fs::create_directories(directory_ / stem);
  replace_file(directory_ / stem / rank_file(world_.rank()),
               head(first_, last_, world_.size()) + trace_events(trace_, world_.rank(), origin_) +
                   std::string(kFoot));
  return stem;
}

void Profiler::join(const std::string& stem) const {
  std::string all;
  for (int rank = 0; rank < world_.size(); ++rank) {
    const std::string events = read_events(directory_ / stem / rank_file(rank));
    if (events.empty()) return;  // the other rank will join them
    all += (rank == 0 ? "" : ",\n") + events;
  }
  const fs::path path = directory_ / (stem + ".json");
  replace_file(path, head(first_, last_, world_.size()) + all + std::string(kFoot));
  log(LogLevel::kInfo, "traced to {}", path.string());
}

Profiler::Step::Step(Profiler& profiler, int64_t step, const Stream& stream)
    : profiler_(profiler), step_(step) {
  if (!profiler.covers(step)) return;
  if (profiler.last_ == 0) {
    profiler.align_clocks();
    profiler.first_ = step;
  }
  profiler.events_before_ = profiler.trace_.events.size();
  profiler.samples_before_ = profiler.trace_.samples.size();
  set_current_trace(&profiler.trace_);
  if (stream.device().type == DeviceType::kCuda) profiler.trace_.follow(stream);
  trace_memory();
  span_.emplace(TraceLane::kHost, "step", std::initializer_list<TraceArg>{{"step", step}});
}

Profiler::Step::~Step() {
  if (!span_) return;
  span_.reset();
  profiler_.trace_.settle();
  trace_memory();
  set_current_trace(nullptr);
  profiler_.last_ = step_;
}

void Profiler::keep(int64_t step) {
  if (last_ == step && step + 1 == steps_.end) write();
}

void Profiler::drop(int64_t step) {
  if (last_ != step) return;
  trace_.events.resize(events_before_);
  trace_.samples.resize(samples_before_);
  last_ = step == first_ ? 0 : step - 1;
}

}  // namespace moiety::train
