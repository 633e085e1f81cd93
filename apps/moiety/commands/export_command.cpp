#include <CLI/CLI.hpp>

#include "apps/moiety/commands/command_line.h"
#include "apps/moiety/commands/hugging_face.h"
#include "apps/moiety/config/checkpoints.h"
#include "apps/moiety/exit_code.h"
#include "apps/moiety/report/long_work.h"
#include "apps/moiety/report/people.h"
#include "apps/moiety/report/result.h"
#include "moiety/base/error.h"
#include "moiety/base/json_line.h"
#include "moiety/base/log.h"
#include "moiety/data/tokenizer.h"
#include "moiety/hf/export.h"
#include "moiety/train/checkpoints.h"

namespace moiety::app {
namespace {

constexpr const char* kExportAbout =
    "Writes the weights of a checkpoint as a Hugging Face folder that transformers 4 and 5 load: "
    "as\n"
    "Qwen3-MoE if heads are normalized (model.qk_norm), else as Mixtral. Tokenizer, chat template "
    "and\n"
    "generation settings come out again. What is written is read back and compared.";

// The ids of special tokens of the run's tokenizer, for a folder that has none from elsewhere.
hf::SpecialIds special_ids(const std::string& tokenizer) {
  const auto known = [](uint32_t id) {
    return id == data::Tokenizer::kNoToken ? std::nullopt : std::optional(id);
  };
  try {
    const data::Tokenizer t = data::Tokenizer::load(tokenizer);
    return {known(t.bos()), known(t.eos()), known(t.pad())};
  } catch (const Error& e) {
    log(LogLevel::kWarning, "export: config.json names no special tokens: {}", e.what());
    return {};
  }
}

hf::ExportResult export_checked(const std::string& path, const model::Config& config,
                                const std::string& out, hf::ExportOptions options, bool quiet) {
  const EndBySignal end;
  options.stop = EndBySignal::flag();
  ByteProgress line("export", quiet);
  options.progress = [&line](uint64_t done, uint64_t all) { line.update(done, all); };
  return hf::export_folder(path, config, out, options);
}

}  // namespace

int export_command(const std::vector<std::string>& arguments) {
  std::string given, out, dtype;
  bool stacked = false, json = false, quiet = false;
  hf::ExportOptions options;
  CLI::App app(kExportAbout, "moiety export");
  app.add_option("CKPT", given, "checkpoint, or run directory: its newest one")->required();
  app.add_option("--hf", out, "DIR of the new folder")->required();
  app.add_flag("--stacked", stacked,
               "one tensor of all experts instead of one of each; transformers 5 reads both");
  app.add_flag("--force", options.replace, "replace DIR, and the files in it");
  add_words(app, "--dtype", one_of("bf16", "fp32"), "",
            "bf16 (rounded to even) or fp32; without it fp32 if precision.recipe is, else bf16",
            [&dtype](std::string_view word) { dtype = word; });
  app.add_flag("--json", json, "one line of JSON");
  if (!parse_command_line(app, arguments, &quiet)) return kExitDone;

  const std::string path = train::find_checkpoint(given);
  const CheckpointInfo checkpoint = read_checkpoint_info(path);
  const Options& o = checkpoint.options;
  if (dtype.empty()) dtype = o.precision.recipe == "fp32" ? "fp32" : "bf16";
  options.dtype = dtype == "fp32" ? DType::kFloat32 : DType::kBFloat16;
  options.form = stacked ? hf::Form::kStacked : hf::Form::kOneByOne;
  options.positions = o.data.seq_len;
  options.special = special_ids(o.data.tokenizer);
  const hf::ExportResult made = export_checked(path, model_config(checkpoint), out, options, quiet);
  print_result((json ? JsonLine()
                           .add("path", out)
                           .add("model_type", name(made.family))
                           .add("step", checkpoint.step)
                           .add("dtype", dtype)
                           .add("stacked", stacked)
                           .add("keys", made.keys)
                           .add("files", made.files)
                           .add("bytes", made.bytes)
                           .text()
                     : text("{}: step {} as {}, {} of {} in {}, {}", out, checkpoint.step,
                            name(made.family), counted(made.keys, "key"), dtype,
                            counted(made.files, "file"), bytes_text(int64_t(made.bytes)))) +
               "\n");
  return kExitDone;
}

}  // namespace moiety::app
