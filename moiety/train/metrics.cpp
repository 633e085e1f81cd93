#include "moiety/train/metrics.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "moiety/base/format.h"
#include "moiety/base/json_line.h"

namespace moiety::train {
namespace {

// Three significant digits, at least one behind the point.
std::string short_text(double v) {
  if (!std::isfinite(v)) return text("{}", v);
  const double a = std::fabs(v);
  if (a == 0 || a >= 10) return text("{:.1f}", v);
  if (a < 1e-3) return text("{:.1e}", v);
  return text("{:.{}f}", v, a >= 1 ? 2 : 2 - int64_t(std::floor(std::log10(a))));
}

}  // namespace

std::string step_line(const StepRecord& r, bool with_z, std::optional<double> eta_s) {
  constexpr double kGiga = 1 << 30;
  std::string line =
      text("step {}/{} loss {:.4f} aux {:.3f}", r.step, r.steps, r.loss, r.aux_of_layer);
  if (with_z) line += text(" z {:.3f}", r.z);
  const Balance balance = balance_of(r.balance);
  line += text(" gnorm {} lr {:.1e} tok/s {} TFLOP/s {} MFU {:.1f} mem {:.{}f}/{:.1f}G",
               short_text(r.grad_norm), r.lr, si_text(r.tokens_per_s), short_text(r.tflops), r.mfu,
               r.memory / kGiga, r.memory < kGiga ? 2 : 1, r.memory_total / kGiga);
  line += text(" bal {:.2f}/{:.2f} drop {} comm {:.1f}", balance.mean, balance.worst, r.dropped,
               r.comm);
  if (eta_s) line += text(" eta {}", duration_text(*eta_s));
  if (r.skipped) line += " SKIPPED";
  if (r.forced) line += " FORCED";
  return line;
}

std::string step_json(const StepRecord& r, double time) {
  JsonLine json;
  json.add("v", 1).add("t", time).add("step", r.step).add("tokens", r.tokens);
  json.add("loss", r.loss).add("aux", r.aux).add("z", r.z).add("gnorm", r.grad_norm);
  json.add("lr", r.lr).add("tok_s", r.tokens_per_s).add("tflops", r.tflops).add("mfu", r.mfu);
  json.add("mfu_recipe", r.mfu_recipe).add("mem", r.memory).add("drop", r.dropped);
  json.add("step_ms", r.step_s * 1e3).add("data_wait_ms", r.data_wait_ms);
  JsonLine exposed;
  for (size_t a = 0; a < kWaitAxes.size(); ++a) exposed.add(name(kWaitAxes[a]), r.waits.ms[a]);
  json.add("comm", r.comm).raw("exposed_ms", exposed.text());
  if (r.fill) json.add("fill", *r.fill);
  if (r.activity) {
    json.add("allocations", r.activity->allocations).add("host_waits", r.activity->waits);
  }
  json.add("bal", std::span<const double>(r.balance));
  json.add("rank_bal", std::span<const double>(r.rank_balance));
  json.add("entropy", r.entropy).add("skipped", r.skipped).add("recipe", r.recipe);
  return json.text();
}

double imbalance(const int64_t* pairs, int64_t experts, int64_t parts) {
  const int64_t width = experts / parts;
  int64_t total = 0, most = 0;
  for (int64_t p = 0; p < parts; ++p) {
    const int64_t sum = std::accumulate(pairs + p * width, pairs + (p + 1) * width, int64_t{0});
    total += sum;
    most = std::max(most, sum);
  }
  return total > 0 ? double(most) * double(parts) / double(total) : 1;
}

Balance balance_of(const std::vector<double>& layers) {
  if (layers.empty()) return {1, 1};
  return {std::accumulate(layers.begin(), layers.end(), 0.0) / double(layers.size()),
          *std::max_element(layers.begin(), layers.end())};
}

double balance_entropy(const int64_t* pairs, int64_t experts) {
  const double total = double(std::accumulate(pairs, pairs + experts, int64_t{0}));
  if (total == 0 || experts == 1) return 1;
  double entropy = 0;
  for (int64_t e = 0; e < experts; ++e) {
    const double share = double(pairs[e]) / total;
    if (share > 0) entropy -= share * std::log(share);
  }
  return entropy / std::log(double(experts));
}

std::string si_text(double value) {
  static constexpr const char* kUnits[] = {"", "k", "M", "G", "T"};
  size_t unit = 0;
  while (value >= 999.5 && unit + 1 < std::size(kUnits)) {
    value /= 1000;
    ++unit;
  }
  const int digits = value >= 99.95 ? 0 : value >= 9.995 ? 1 : 2;
  return text("{:.{}f}{}", value, digits, kUnits[unit]);
}

std::string duration_text(double seconds) {
  const int64_t s = std::llround(std::max(0.0, std::min(seconds, 1e9)));
  if (s < 60) return text("{}s", s);
  if (s < 3600) return text("{}m{:02}s", s / 60, s % 60);
  if (s < 86400) return text("{}h{:02}m", s / 3600, s / 60 % 60);
  return text("{}d{:02}h", s / 86400, s / 3600 % 24);
}

void Eta::add_step(double seconds) {
  // A plain mean at first: otherwise the first (slow) steps would stay in it for long.
  ++steps_;
  step_ += (seconds - step_) / double(std::min<int64_t>(steps_, 50));
}

double Eta::seconds(int64_t steps, int64_t evaluations, int64_t checkpoints) const {
  return double(steps) * step_ + double(evaluations) * evaluation_.value() +
         double(checkpoints) * checkpoint_.value();
}

}  // namespace moiety::train
