#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>
#include <optional>

#include "apps/moiety/commands/info_sheet.h"
#include "apps/moiety/config/checkpoints.h"
#include "apps/moiety/exit_code.h"
#include "apps/moiety/report/branches.h"
#include "apps/moiety/report/people.h"
#include "apps/moiety/report/run_history.h"
#include "moiety/checkpoint/branches.h"
#include "moiety/checkpoint/manifest.h"
#include "moiety/checkpoint/retention.h"
#include "moiety/data/sha256.h"
#include "moiety/data/tokenizer.h"
#include "moiety/train/checkpoints.h"
#include "moiety/train/layout.h"

namespace moiety::app {
namespace {

namespace fs = std::filesystem;

std::string model_text(const model::Config& c) {
  const auto layers = [](int64_t n) { return counted(n, "layer"); };
  std::string out = text("{} of width {}, {} and {} of keys, vocabulary {}", layers(c.layers),
                         c.d_model, counted(c.heads, "head"), c.kv_heads, c.vocab);
  if (c.moe_layers() > 0) {
    out += text("; {} of {}, {} a token, in {}", counted(c.router.experts, "expert"), c.d_ffn,
                c.router.top_k, c.moe_layers() == c.layers ? "each layer" : layers(c.moe_layers()));
  }
  if (c.shared_d_ffn > 0) out += text("; a shared one of {}", c.shared_d_ffn);
  return out;
}

void add_model(const train::TrainConfig& c, InfoSheet& sheet) {
  const int64_t all = model::parameter_count(c.model);
  const int64_t active = model::active_parameter_count(c.model);
  sheet.line("model", model_text(c.model));
  sheet.line("parameters", text("{}, of which a token uses {}", amount_text(double(all)),
                                amount_text(double(active))));
  sheet.json.add("parameters", all)
      .add("active_parameters", active)
      .raw("model", JsonLine()
                        .add("layers", c.model.layers)
                        .add("moe_layers", c.model.moe_layers())
                        .add("d_model", c.model.d_model)
                        .add("heads", c.model.heads)
                        .add("kv_heads", c.model.kv_heads)
                        .add("vocab", c.model.vocab)
                        .add("experts", c.model.router.experts)
                        .add("top_k", c.model.router.top_k)
                        .add("d_ffn", c.model.d_ffn)
                        .add("shared_d_ffn", c.model.shared_d_ffn)
                        .text());
}

train::Grid grid_of(const checkpoint::RankLayout& l) {
  train::Grid grid;
  grid.tp = l.tp;
  grid.gtp = l.gtp;
  grid.dp = l.dp;
  grid.ep = l.ep;
  grid.egtp = l.egtp;
  grid.edp = l.ranks / std::max(l.ep * l.egtp, 1);
  return grid;
}

std::string paths_text(const Options& o) {
  if (o.data.synthetic != "none") return text("made up: {}", o.data.synthetic);
  std::string out;
  for (const data::WeightedPath& p : o.data.train) out += (out.empty() ? "" : ", ") + p.path;
  for (size_t i = 0; i < o.data.valid.size(); ++i) {
    out += (i == 0 ? "; validation " : ", ") + o.data.valid[i];
  }
  return out;
}

// The layout of a tensor of experts; empty for others.
std::string experts_layout_of(const std::string& tensor, const checkpoint::ExpertLayout& stored,
                              std::span<const checkpoint::ExpertModule> modules) {
  for (const checkpoint::ExpertModule& module : modules) {
    if (!tensor.starts_with(module.name + ".")) continue;
    return module.gated ? stored.describe() : name(stored.form);
  }
  return {};
}

void add_tensors(const checkpoint::Manifest& m, const train::TrainConfig& config,
                 InfoSheet& sheet) {
  const std::vector<checkpoint::ExpertModule> modules = train::expert_modules(config.model, m);
  std::vector<std::string> list;
  for (const auto& [tensor, entry] : m.tensors) {
    const std::string layout = experts_layout_of(tensor, m.run.experts, modules);
    std::string slots;
    JsonLine types;
    for (const auto& [slot, stored] : entry.slots) {
      slots += text("{}{} {}", slots.empty() ? "" : ", ", slot, name(stored.dtype));
      types.add(slot, name(stored.dtype));
    }
    const std::string shape = checkpoint::shape_text(entry.shape);
    sheet.line("tensor",
               text("{} {}: {}{}{}", tensor, shape, slots, layout.empty() ? "" : "; ", layout));
    JsonLine json;
    json.raw("name", text_json(tensor)).raw("shape", shape).raw("slots", types.text());
    if (!layout.empty()) json.add("layout", layout);
    list.push_back(json.text());
  }
  sheet.json.raw("tensors", list_json(list));
}

// The configuration as values. The vocabulary of an imported model may be smaller than that of
// data.tokenizer, which only a use of both refuses.
train::TrainConfig described_training(CheckpointInfo info) {
  const model::Config model = model_config(info);
  info.options.model.vocab = 0;
  train::TrainConfig c = train_config(info);
  c.model = model;
  return c;
}

void add_tokenizer(const std::string& name, InfoSheet& sheet) {
  try {
    const data::Tokenizer t = data::Tokenizer::load(name);
    const std::string identity = data::hex(t.identity());
    const std::string eos =
        t.eos() == data::Tokenizer::kNoToken ? "no eos" : text("eos {}", t.eos());
    sheet.line("tokenizer",
               text("{}: {} ids, {}, identity {}", name, t.vocab(), eos, identity.substr(0, 16)));
    sheet.json.raw("tokenizer", JsonLine()
                                    .add("name", name)
                                    .add("vocab", t.vocab())
                                    .add("eos", t.eos())
                                    .add("identity", identity)
                                    .text());
  } catch (const Error& e) {  // its file may be gone, or need a library that this build has not
    sheet.line("tokenizer", text("{}: not read: {}", name, e.what()));
  }
}

// What a checkpoint tells of model and training.
void add_state(const std::string& path, const checkpoint::Manifest& m, bool tensors,
               InfoSheet& sheet) {
  CheckpointInfo info{path, m.run.step, parse_config_json(m.run.config, path)};
  info.options.data.tokenizer = kept_tokenizer(info.options, path);
  const train::TrainConfig c = described_training(info);
  const std::string layout = train::describe_layout(grid_of(m.run.layout));
  add_model(c, sheet);
  sheet.line("training",
             text("{} steps of {} x {} tokens: {}; {}", m.run.step, c.train.global_batch,
                  c.data.seq_len, amount_text(double(m.run.tokens)), name(c.precision.recipe)));
  sheet.line("layout", layout);
  if (const std::string data = paths_text(info.options); !data.empty()) sheet.line("data", data);
  add_tokenizer(info.options.data.tokenizer, sheet);
  sheet.json.add("step", m.run.step)
      .add("tokens", m.run.tokens)
      .add("recipe", name(c.precision.recipe))
      .add("global_batch", c.train.global_batch)
      .add("seq_len", c.data.seq_len)
      .raw("layout", JsonLine()
                         .add("ranks", m.run.layout.ranks)
                         .add("tp", m.run.layout.tp)
                         .add("gtp", m.run.layout.gtp)
                         .add("dp", m.run.layout.dp)
                         .add("ep", m.run.layout.ep)
                         .add("egtp", m.run.layout.egtp)
                         .text());
  if (c.model.moe_layers() > 0) {
    if (!m.run.experts.is_plain()) sheet.line("experts", m.run.experts.describe());
    sheet.json.add("expert_weights", name(m.run.experts.form))
        .add("glu_interleave", m.run.experts.interleave);
  }
  if (tensors) add_tensors(m, c, sheet);
}

// The bytes of the files below a path.
int64_t disk_bytes(const fs::path& path) {
  std::error_code error;
  if (fs::is_regular_file(path, error)) return int64_t(fs::file_size(path, error));
  int64_t bytes = 0;
  auto entry = fs::recursive_directory_iterator(path, error);
  for (; !error && entry != fs::recursive_directory_iterator(); entry.increment(error)) {
    std::error_code gone;  // a run that is under way removes files
    if (entry->is_regular_file(gone)) bytes += int64_t(entry->file_size(gone));
  }
  return bytes;
}

void add_disk(const std::string& run, InfoSheet& sheet) {
  std::map<std::string, int64_t> parts;
  int64_t total = 0;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(run, error)) {
    const int64_t bytes = disk_bytes(entry.path());
    total += bytes;
    parts[entry.path().filename().string()] += bytes;
  }
  std::vector<std::pair<int64_t, std::string>> largest;
  JsonLine json;
  for (const auto& [part, bytes] : parts) {
    largest.emplace_back(-bytes, part);
    json.add(part, bytes);
  }
  std::sort(largest.begin(), largest.end());
  if (largest.size() > 3) largest.resize(3);
  std::string most;
  for (const auto& [bytes, part] : largest) {
    most += text("{}{} {}", most.empty() ? "" : ", ", part, bytes_text(-bytes));
  }
  sheet.line("disk", text("{}: {}", bytes_text(total), most));
  sheet.json.add("disk_bytes", total).raw("disk", json.text());
}

void add_losses(const std::string& run, InfoSheet& sheet) {
  if (!fs::exists(fs::path(run) / "metrics.jsonl")) return;
  const RunHistory history = read_history(run);
  std::string line;
  if (!history.steps().empty()) {
    const StepPoint& last = history.steps().back();
    line = text("{:.4f} at step {}", last.of(Metric::kLoss), last.step);
    sheet.json.add("last_step", last.step).add("loss", double(last.of(Metric::kLoss)));
  }
  const auto evaluations = history.evaluations();
  if (!evaluations.empty()) {
    const auto worse = [](const EvaluationPoint& a, const EvaluationPoint& b) {
      return !std::isfinite(b.loss) || a.loss < b.loss;
    };
    const auto best = std::min_element(evaluations.begin(), evaluations.end(), worse);
    const EvaluationPoint& last = evaluations.back();
    line += text("{}validation {:.4f} at step {}", line.empty() ? "" : "; ", last.loss, last.step);
    if (best->step != last.step) line += text(", best {:.4f} at step {}", best->loss, best->step);
    sheet.json.add("validation_step", last.step)
        .add("validation_loss", last.loss)
        .add("best_step", best->step)
        .add("best_loss", best->loss);
  }
  if (!line.empty()) sheet.line("loss", line);
}

std::string file_name(const std::string& path) { return fs::path(path).filename().string(); }

// The place where a branch began.
std::string beginning_text(const checkpoint::Branch& branch) {
  if (branch.id.empty()) return "begins before the first step";
  if (branch.parent == 0) return text("begins behind {}", branch.path);
  return text("begins behind step {} of branch {}", branch.step, branch.parent);
}

// One branch: where it began, if branches.json says so, and its checkpoints that lie aside.
void add_branch(const std::string& name, const checkpoint::Branch* began, bool is_current,
                const std::vector<std::string>& aside, InfoSheet& sheet,
                std::vector<std::string>& list) {
  std::string line = began ? beginning_text(*began) : "";
  if (is_current) line += "; the current one";
  std::string names;
  std::vector<std::string> paths;
  for (const std::string& path : aside) {
    names += (names.empty() ? "" : ", ") + file_name(path);
    paths.push_back(text_json(path));
  }
  if (!names.empty()) line += text("{}left aside: {}", line.empty() ? "" : "; ", names);
  sheet.line(name, line);
  JsonLine json;
  json.add("name", name);
  if (began) {
    json.add("branch", began->number)
        .add("parent", began->parent)
        .add("step", began->step)
        .add("current", is_current);
  }
  list.push_back(json.raw("checkpoints", list_json(paths)).text());
}

void add_branches(const std::string& directory, InfoSheet& sheet) {
  std::map<std::string, std::vector<std::string>> aside;
  for (const LeftBranch& branch : list_left_branches(directory)) {
    aside[branch.name] = branch.checkpoints;
  }
  const checkpoint::BranchList branches = checkpoint::read_branches(directory);
  std::vector<std::string> list;
  if (branches.branches.size() > 1 || !branches.at(1).id.empty()) {
    for (const checkpoint::Branch& branch : branches.branches) {
      const std::string name = checkpoint::branch_name(branch.number);
      add_branch(name, &branch, branch.number == branches.current, aside[name], sheet, list);
      aside.erase(name);
    }
  }
  for (const auto& [name, paths] : aside) add_branch(name, nullptr, false, paths, sheet, list);
  sheet.json.raw("branches", list_json(list));
}

// Lists the checkpoints, and returns the newest complete one.
std::optional<std::string> add_checkpoints(const std::string& directory, InfoSheet& sheet) {
  const checkpoint::CheckpointList found = checkpoint::list_checkpoints(directory);
  std::string names;
  std::vector<std::string> list;
  for (auto path = found.complete.rbegin(); path != found.complete.rend(); ++path) {
    names += (names.empty() ? "" : ", ") + file_name(*path);
    list.push_back(JsonLine().add("path", *path).add("bytes", disk_bytes(*path)).text());
  }
  sheet.line("checkpoints", names.empty() ? "none" : names);
  for (const std::string& sentence : found.damaged) sheet.line("damaged", sentence);
  std::vector<std::string> damaged;
  for (const std::string& sentence : found.damaged) damaged.push_back(text_json(sentence));
  sheet.json.raw("checkpoints", list_json(list)).raw("damaged", list_json(damaged));
  if (found.complete.empty()) return {};
  return found.complete.front();
}

}  // namespace

InfoSheet checkpoint_info(const std::string& path, bool tensors) {
  const checkpoint::Manifest m = checkpoint::read_manifest(path);
  const int64_t bytes = disk_bytes(path);
  InfoSheet sheet;
  sheet.line("checkpoint", text("{}, {} in {}, id {}", path, bytes_text(bytes),
                                counted(std::ssize(m.files), "rank file"), m.id));
  sheet.json.add("path", path).add("kind", "checkpoint").add("id", m.id).add("disk_bytes", bytes);
  add_state(path, m, tensors, sheet);
  return sheet;
}

InfoSheet run_info(const std::string& path, bool tensors) {
  InfoSheet sheet;
  sheet.line("run", path);
  sheet.json.add("path", path).add("kind", "run");
  InfoSheet rest;
  const std::string directory = checkpoints_of(path);
  if (const auto newest = add_checkpoints(directory, rest)) {
    add_state(*newest, checkpoint::read_manifest(*newest), tensors, sheet);
  }
  add_losses(path, sheet);
  sheet.lines.insert(sheet.lines.end(), rest.lines.begin(), rest.lines.end());
  sheet.json.append(rest.json);
  add_branches(directory, sheet);
  add_disk(path, sheet);
  return sheet;
}

}  // namespace moiety::app
