#include "apps/moiety/report/reporter.h"

#include <algorithm>

#include "apps/moiety/report/run_plots.h"
#include "moiety/base/replace_file.h"
#include "moiety/train/health.h"
#include "moiety/train/memory_use.h"

namespace moiety::app {
namespace {

double unix_time() {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::duration<double>(now).count();
}

// The number of steps after `step` up to `last` that are multiples of `every`, with the last one.
int64_t occasions(int64_t step, int64_t last, int64_t every) {
  if (step >= last) return 0;
  if (every == 0) return 1;
  return last / every - step / every + (last % every != 0);
}

}  // namespace

Reporter::Reporter(const Config& config, int64_t steps, RunDirectory& directory, Console& console)
    : config_(config),
      options_(config.options),
      steps_(steps),
      directory_(directory),
      console_(console) {}

double Reporter::eta_seconds(int64_t step) const {
  const int64_t evaluations =
      options_.data.valid.empty() ? 0 : occasions(step, steps_, options_.eval.every);
  return eta_.seconds(steps_ - step, evaluations,
                      occasions(step, steps_, options_.checkpoint.interval));
}

void Reporter::Since::add(const train::StepWork& step) {
  work.seconds += step.seconds;
  work.tokens += step.tokens;
  work.flops += step.flops;
  work.data_wait_ms += step.data_wait_ms;
  work.waits += step.waits;
  ++steps;
}

train::StepRecord Reporter::filled_in(const train::StepRecord& of_step, const Since& since) const {
  train::StepRecord record = of_step;
  const double seconds = since.work.seconds, steps = double(since.steps);
  record.steps = steps_;
  record.step_s = seconds / steps;
  record.data_wait_ms = since.work.data_wait_ms / steps;
  record.waits = since.work.waits / steps;
  record.comm = 0.1 * since.work.waits.sum_ms() / seconds;
  record.tokens_per_s = since.work.tokens / seconds;
  record.tflops = since.work.flops / seconds * 1e-12;
  record.mfu = 100 * record.tflops / peak_;
  record.mfu_recipe = 100 * record.tflops / recipe_peak_;
  const train::MemoryUse memory = train::memory_use(device_);
  record.memory = memory.used;
  record.memory_total = memory.total;
  record.forced = options_.router.force_balance;
  return record;
}

bool Reporter::is_due(int64_t step) const {
  const int64_t every = std::max<int64_t>(options_.log.every, 1);
  return step % every == 0 || step == steps_;
}

bool Reporter::line_is_due(int64_t step) const {
  if (options_.log.every > 0) return is_due(step);
  return step == steps_ || std::chrono::steady_clock::now() - last_line_ >= std::chrono::seconds(1);
}

void Reporter::write_line(const train::StepRecord& record, double eta) {
  const std::string line = step_line(record, options_.router.z_coef > 0, eta);
  if (console_.progress() == ProgressMode::kLines) console_.line(LogLevel::kInfo, line);
  directory_.log().add(line);
  since_line_ = {};
  last_line_ = std::chrono::steady_clock::now();
}

void Reporter::write_record(const train::StepRecord& record) {
  const std::string json = step_json(record, unix_time());
  directory_.metrics().add(json);
  add_record(json, history_);
  if (tensorboard_) add_step(record, *tensorboard_);
  plots_are_old_ = true;
  since_record_ = {};
}

void Reporter::step(const train::StepRecord& of_step, const train::StepWork& work) {
  eta_.add_step(work.seconds);
  since_line_.add(work);
  since_record_.add(work);
  const int64_t step = of_step.step;
  const double eta = eta_seconds(step);
  const bool line = line_is_due(step);
  if (line || console_.has_bar()) {
    const train::StepRecord shown = filled_in(of_step, since_line_);
    // The end of a status line may be cut.
    console_.status(double(step) / double(steps_),
                    text("eta {} {}", train::duration_text(eta),
                         step_line(shown, options_.router.z_coef > 0, std::nullopt)));
    if (line) write_line(shown, eta);
  }
  if (is_due(step)) write_record(filled_in(of_step, since_record_));
  const int64_t plot_every = options_.log.plot_every;
  if (plot_every > 0 && step % plot_every == 0) draw_plots();
}

void Reporter::say(LogLevel level, const std::string& line) {
  const int rank = log_rank();
  set_log_rank(-1);
  log_line(level, line);
  set_log_rank(rank);
}

void Reporter::event(std::string_view name, int64_t step, const JsonLine& fields) {
  JsonLine json;
  json.add("v", 1).add("t", unix_time()).add("event", name).add("step", step).append(fields);
  directory_.metrics().add(json.text());
  if (name == "start" || name == "resume") {
    open(step);
    return directory_.write_config(config_);
  }
  add_record(json.text(), history_);
  if (name == "eval") plots_are_old_ = true;
  if (name == "stop") draw_plots();
}

void Reporter::evaluated(int64_t step, const train::EvaluationResult& result, double seconds) {
  eta_.add_evaluation(seconds);
  if (!tensorboard_) return;
  std::vector<std::string> tags{"loss/validation"};
  std::vector<double> losses{result.loss};
  for (const train::EvaluationLoss& file : result.files) {
    if (result.files.size() == 1) break;
    tags.push_back("loss/validation/" + file.name);
    losses.push_back(file.loss);
  }
  std::vector<Scalar> scalars;
  for (size_t i = 0; i < tags.size(); ++i) scalars.push_back({tags[i], losses[i]});
  tensorboard_->add(step, scalars);
}

void Reporter::open(int64_t step) {
  const std::filesystem::path& run = directory_.path();
  try {
    history_ = read_history(run);
    replace_file(run / "env.json", checks_json(train::examine(run, false)) + "\n");
    if (options_.log.tensorboard) tensorboard_.emplace(run / "tb", step + 1);
  } catch (const std::exception& e) {
    say(LogLevel::kWarning, text("training goes on without some of its records: {}", e.what()));
  }
}

void Reporter::draw_plots() {
  if (!plots_are_old_) return;
  plots_are_old_ = false;
  const std::filesystem::path folder = directory_.path() / "plots";
  const PlotRun run{run_name(directory_.path()), &history_};
  try {
    std::filesystem::create_directories(folder);
    for (const char* which : {"loss", "throughput", "balance"}) {
      replace_file(folder / text("{}.svg", which), draw(run_chart(which, {&run, 1}, {})));
    }
  } catch (const std::exception& e) {
    if (!plots_failed_) say(LogLevel::kWarning, text("no plots: {}", e.what()));
    plots_failed_ = true;
  }
}

Reporter::~Reporter() { draw_plots(); }

}  // namespace moiety::app
