#include "apps/moiety/commands/convert.h"

#include <optional>

#include <CLI/CLI.hpp>

#include "apps/moiety/commands/command_line.h"
#include "apps/moiety/config/checkpoints.h"
#include "apps/moiety/exit_code.h"
#include "apps/moiety/report/long_work.h"
#include "apps/moiety/report/people.h"
#include "apps/moiety/report/result.h"
#include "moiety/base/json_line.h"
#include "moiety/checkpoint/convert.h"
#include "moiety/train/checkpoints.h"

namespace moiety::app {
namespace {

constexpr const char* kConvertAbout =
    "Writes a checkpoint once more, with its experts as one tensor or as a tensor of each, and "
    "with\n"
    "their gate and up rows apart or interleaved. No value changes, and everything that reads\n"
    "checkpoints reads it. What is not given stays as it is in CKPT.";

checkpoint::Manifest convert_checked(const std::string& path, const std::string& out,
                                     checkpoint::ConvertOptions options, bool quiet) {
  const EndBySignal end;
  options.stop = EndBySignal::flag();
  ByteProgress line("convert", quiet);
  options.progress = [&line](uint64_t done, uint64_t all) { line.update(done, all); };
  return checkpoint::convert(path, out, options);
}

}  // namespace

int convert_command(const std::vector<std::string>& arguments) {
  std::string given, out;
  std::optional<std::string> form;
  std::optional<int64_t> interleave;
  bool json = false, quiet = false;
  CLI::App app(kConvertAbout, "moiety convert");
  app.add_option("CKPT", given, "checkpoint, or run directory: its newest one")->required();
  app.add_option("--out", out, "DIR of the new checkpoint")->required();
  add_words(app, "--expert-weights", one_of("packed", "indexed"), "",
            "packed: one tensor of all experts; indexed: one of each",
            [&form](std::string_view word) { form = word; });
  add_number(app, "--glu-interleave", interleave, between(8, 1 << 20).multiple_of(8).or_zero(),
             "rows of gate and up that alternate in fc1; 0: all of gate, then all of up");
  app.add_flag("--json", json, "one line of JSON");
  if (!parse_command_line(app, arguments, &quiet)) return kExitDone;

  const std::string path = train::find_checkpoint(given);
  const checkpoint::Manifest source = checkpoint::read_manifest(path);
  const checkpoint::ExpertLayout& now = source.run.experts;
  checkpoint::ConvertOptions options;
  options.form = now.form;
  if (form)
    options.form =
        *form == "packed" ? checkpoint::ExpertForm::kPacked : checkpoint::ExpertForm::kIndexed;
  options.interleave = interleave.value_or(now.interleave);
  const CheckpointInfo info = read_checkpoint_info(path);
  const data::Tokenizer tokenizer = data::Tokenizer::load(info.options.data.tokenizer);
  options.tokenizer.assign(tokenizer.files().begin(), tokenizer.files().end());
  options.modules = train::expert_modules(model_config(info), source);
  const checkpoint::Manifest made = convert_checked(path, out, options, quiet);
  const int64_t bytes = int64_t(made.files.at(0).bytes);
  print_result((json ? JsonLine()
                           .add("path", out)
                           .add("step", made.run.step)
                           .add("expert_weights", name(made.run.experts.form))
                           .add("glu_interleave", made.run.experts.interleave)
                           .add("tensors", std::ssize(made.tensors))
                           .add("bytes", bytes)
                           .text()
                     : text("{}: step {}, experts {}; {}, {}", out, made.run.step,
                            made.run.experts.describe(),
                            counted(std::ssize(made.tensors), "tensor"), bytes_text(bytes))) +
               "\n");
  return kExitDone;
}

}  // namespace moiety::app
