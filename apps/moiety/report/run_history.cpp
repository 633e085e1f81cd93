#include "apps/moiety/report/run_history.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>

#include "apps/moiety/exit_code.h"
#include "apps/moiety/input_file.h"
#include "apps/moiety/report/json_fields.h"
#include "moiety/base/log.h"

namespace moiety::app {
namespace fs = std::filesystem;
namespace {

struct Field {
  std::string_view key;
  Metric metric;
};
// The fields, named as step_json names them.
constexpr Field kFields[] = {{"loss", Metric::kLoss},
                             {"aux", Metric::kAux},
                             {"z", Metric::kZ},
                             {"gnorm", Metric::kGradNorm},
                             {"lr", Metric::kLr},
                             {"tok_s", Metric::kTokensPerSecond},
                             {"tflops", Metric::kTflops},
                             {"mfu", Metric::kMfu},
                             {"step_ms", Metric::kStepMs},
                             {"data_wait_ms", Metric::kDataWaitMs},
                             {"comm", Metric::kComm},
                             {"mem", Metric::kMemory},
                             {"entropy", Metric::kEntropy},
                             {"drop", Metric::kDropped}};

// Reads the mean and the largest number of a list such as "[1,1.5]".
void read_balance(std::string_view list, StepPoint& point) {
  if (list.size() < 3 || list.front() != '[') return;
  list = list.substr(1, list.size() - 2);
  double sum = 0, worst = 0;
  int64_t count = 0;
  while (!list.empty()) {
    const size_t comma = std::min(list.find(','), list.size());
    const double x = json_number(list.substr(0, comma));
    sum += x;
    worst = std::max(worst, x);
    ++count;
    list.remove_prefix(std::min(comma + 1, list.size()));
  }
  point.of(Metric::kBalanceMean) = float(sum / double(count));
  point.of(Metric::kBalanceWorst) = float(worst);
}

// The losses in the field `files` of an evaluation, {"a.tok":{"loss":2.5,...},...}.
std::vector<std::pair<std::string, double>> read_files(std::string_view object) {
  std::vector<std::pair<std::string, double>> files;
  for (JsonFields of_object(object); of_object.next();) {
    for (JsonFields fields(of_object.value()); fields.next();) {
      if (fields.key() != "loss") continue;
      files.emplace_back(of_object.key(), json_number(fields.value()));
    }
  }
  return files;
}

}  // namespace

void RunHistory::follow(int64_t branch, int64_t parent) {
  others_[branch_] = {std::move(steps_), std::move(evaluations_)};
  const auto known = others_.find(branch);
  const auto from = known != others_.end() ? known : others_.find(parent);
  const Records records = from != others_.end() ? from->second : Records{};
  steps_ = records.steps;
  evaluations_ = records.evaluations;
  branch_ = branch;
}

void RunHistory::restart(int64_t step, double time, int64_t branch, int64_t parent) {
  if (branch > 0 && branch != branch_) follow(branch, parent);
  drop_after(step);
  const double trained = steps_.empty() ? 0 : steps_.back().time;
  pause_ = time - trained;
  running_ = true;
}

void RunHistory::drop_after(int64_t step) {
  while (!steps_.empty() && steps_.back().step > step) steps_.pop_back();
  while (!evaluations_.empty() && evaluations_.back().step > step) evaluations_.pop_back();
}

void RunHistory::add(StepPoint point) {
  drop_after(point.step - 1);
  if (!running_) restart(point.step, point.time);
  point.time -= pause_;
  steps_.push_back(point);
}

void RunHistory::add_evaluation(EvaluationPoint point) {
  while (!evaluations_.empty() && evaluations_.back().step >= point.step) evaluations_.pop_back();
  if (!running_) restart(point.step, point.time);
  if (!steps_.empty()) {
    // Not every step has a record.
    const StepPoint& last = steps_.back();
    point.tokens = last.tokens * double(point.step) / double(std::max<int64_t>(last.step, 1));
  }
  point.time -= pause_;
  evaluations_.push_back(std::move(point));
}

bool add_record(std::string_view line, RunHistory& history) {
  StepPoint point;
  point.value.fill(kAbsent);
  std::string_view event, files;
  double step = -1, loss = std::numeric_limits<double>::quiet_NaN(), branch = 0, parent = 0;
  JsonFields fields(line);
  while (fields.next()) {
    const std::string_view key = fields.key(), value = fields.value();
    if (key == "step") step = json_number(value);
    if (key == "t") point.time = json_number(value);
    if (key == "tokens") point.tokens = json_number(value);
    if (key == "event") event = value;
    if (key == "files") files = value;
    if (key == "branch") branch = json_number(value);
    if (key == "parent") parent = json_number(value);
    if (key == "bal") read_balance(value, point);
    for (const Field& f : kFields) {
      if (key != f.key) continue;
      const double x = json_number(value);
      if (f.metric == Metric::kLoss) loss = x;
      point.of(f.metric) = float(x);
      break;
    }
  }
  const bool possible = step >= 0 && step < 1e15 && std::isfinite(point.time + point.tokens);
  if (!fields.complete() || !possible) return false;
  point.step = int64_t(step);
  if (event.empty()) {
    history.add(point);
  } else if (event == "\"start\"" || event == "\"resume\"") {
    const auto number = [](double x) { return x >= 1 && x < 1e9 ? int64_t(x) : 0; };
    history.restart(point.step, point.time, number(branch), number(parent));
  } else if (event == "\"eval\"") {
    history.add_evaluation({point.step, 0, point.time, loss, read_files(files)});
  }
  return true;
}

RunHistory read_history(const fs::path& path) {
  std::error_code none;
  const fs::path file = fs::is_directory(path, none) ? path / "metrics.jsonl" : path;
  std::string records;
  try {
    records = read_file(file.string(), std::numeric_limits<int64_t>::max(), ErrorKind::kData);
  } catch (const DataError& e) {
    throw DataError("{} (is {} a run directory?)", e.what(), path.string());
  }
  RunHistory history;
  int64_t damaged = 0;
  for (size_t begin = 0; begin < records.size();) {
    const size_t end = std::min(records.find('\n', begin), records.size());
    const std::string_view line(records.data() + begin, end - begin);
    // A last line without its end is being written.
    damaged += !add_record(line, history) && end < records.size();
    begin = end + 1;
  }
  if (damaged > 0) {
    log(LogLevel::kWarning, "{}: {} of its lines are no records and were left out", file.string(),
        damaged);
  }
  return history;
}

}  // namespace moiety::app
