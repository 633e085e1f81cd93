#include <algorithm>
#include <filesystem>
#include <optional>

#include <CLI/CLI.hpp>

#include "apps/moiety/commands/command_line.h"
#include "apps/moiety/commands/hugging_face.h"
#include "apps/moiety/config/checkpoints.h"
#include "apps/moiety/config/imported_options.h"
#include "apps/moiety/config/upcycle_text.h"
#include "apps/moiety/exit_code.h"
#include "apps/moiety/report/long_work.h"
#include "apps/moiety/report/people.h"
#include "apps/moiety/report/result.h"
#include "moiety/base/error.h"
#include "moiety/base/json_line.h"
#include "moiety/base/log.h"
#include "moiety/data/tokenizer.h"
#include "moiety/hf/import.h"

namespace moiety::app {
namespace {

constexpr const char* kImportAbout =
    "Reads a Hugging Face folder (Qwen3-MoE, Mixtral; Llama, Mistral and Qwen3 as dense models, "
    "or\n"
    "made MoE) into a checkpoint for eval, generate, run.init_from and export. Tokenizer, chat\n"
    "template and generation settings go with it. A folder that does not fit in every key is "
    "refused,\n"
    "and nothing is written.";

struct ImportArguments {
  std::string folder, out, upcycle;
  int64_t seq_len = 0, seed = 1234;
  bool print_config = false, json = false, quiet = false;
};

bool parse(const std::vector<std::string>& arguments, ImportArguments& a) {
  CLI::App app(kImportAbout, "moiety import");
  app.add_option("--hf", a.folder, "DIR with config.json and safetensors files")->required();
  app.add_option("--out", a.out, "DIR of the new checkpoint");
  app.add_option("--upcycle", a.upcycle,
                 "make a dense model MoE: experts=8,top_k=2[,noise=0.01][,layers=all|LIST]; noise "
                 "is in units of init.std");
  add_number(app, "--data.seq_len", a.seq_len,
             find_key("data.seq_len", "--data.seq_len").rule.or_zero(),
             "tokens that the model is used with; 0: 1024, or fewer if it has fewer positions");
  add_number(app, "--run.seed", a.seed, find_key("run.seed", "--run.seed").rule,
             "of an upcycled model's routers and noise");
  app.add_flag("--print-config", a.print_config,
               "print the configuration of a training that begins with the model, and stop");
  app.add_flag("--json", a.json, "one line of JSON");
  if (!parse_command_line(app, arguments, &a.quiet)) return false;
  if (a.out.empty() && !a.print_config) throw UsageError("--out is required");
  return true;
}

// The folder's tokenizer. None, with a warning that says why, if it is not read or does not fit.
std::optional<data::Tokenizer> tokenizer_of(const hf::Folder& folder, int64_t vocab) {
  for (const char* name : {"tokenizer.json", "tokenizer.model"}) {
    const std::string path = folder.path() + "/" + name;
    std::error_code error;
    if (!std::filesystem::exists(path, error)) continue;
    try {
      data::Tokenizer tokenizer = data::Tokenizer::load(path);
      if (int64_t(tokenizer.vocab()) <= vocab) return tokenizer;
      throw DataError("{}: has {} tokens, the model {}", path, tokenizer.vocab(), vocab);
    } catch (const Error& e) {
      if (e.kind() != ErrorKind::kData && e.kind() != ErrorKind::kUnsupported) throw;
      log(LogLevel::kWarning, "import: data.tokenizer is \"bytes\", its files go along: {}",
          e.what());
      return std::nullopt;
    }
  }
  return std::nullopt;
}

checkpoint::Manifest import_checked(const hf::Folder& folder, const model::Config& config,
                                    const ImportArguments& a, hf::ImportOptions options) {
  const EndBySignal end;
  options.stop = EndBySignal::flag();
  ByteProgress line("import", a.quiet);
  options.progress = [&line](uint64_t done, uint64_t all) { line.update(done, all); };
  return hf::import_folder(folder, config, a.out, options);
}

}  // namespace

int import_command(const std::vector<std::string>& arguments) {
  ImportArguments a;
  if (!parse(arguments, a)) return kExitDone;
  const hf::Folder folder = hf::Folder::open(a.folder);
  const hf::Description& description = folder.description();
  ImportedModel imported;
  imported.source = folder.path() + "/config.json";
  imported.config = description.config;
  imported.seed = a.seed;
  imported.seq_len =
      a.seq_len > 0 ? a.seq_len : std::min<int64_t>(imported.seq_len, description.max_positions);
  // What rounds nothing: masters are exact, and weights are rounded to bf16 where they were.
  if (description.dtype == DType::kFloat32) imported.recipe = "fp32";
  hf::check_window(description, imported.seq_len, imported.source);
  hf::ImportOptions options;
  options.seed = uint64_t(a.seed);
  if (!a.upcycle.empty()) {
    const hf::Upcycling upcycling = parse_upcycling(a.upcycle);
    imported.config = hf::upcycled(description, upcycling);
    options.noise = upcycling.noise;
  }
  if (const auto tokenizer = tokenizer_of(folder, imported.config.vocab)) {
    imported.tokenizer = tokenizer->name();
    options.tokenizer.assign(tokenizer->files().begin(), tokenizer->files().end());
  }
  const Config config = imported_config(imported);
  if (a.print_config) return print_result(print_config(config)), kExitDone;
  options.config = config_to_json(config, options.tokenizer);
  const checkpoint::Manifest made = import_checked(folder, imported.config, a, options);
  const int64_t parameters = model::parameter_count(imported.config);
  const int64_t bytes = int64_t(made.files.at(0).bytes), keys = std::ssize(folder.tensors());
  print_result((a.json ? JsonLine()
                             .add("path", a.out)
                             .add("model_type", name(description.family))
                             .add("keys", keys)
                             .add("parameters", parameters)
                             .add("tensors", std::ssize(made.tensors))
                             .add("bytes", bytes)
                             .text()
                       : text("{}: {} parameters of a {} model from {}; {}", a.out,
                              amount_text(double(parameters)), name(description.family),
                              counted(keys, "key"), bytes_text(bytes))) +
               "\n");
  return kExitDone;
}

}  // namespace moiety::app
