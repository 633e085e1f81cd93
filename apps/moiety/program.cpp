#include "apps/moiety/program.h"

#include <cstdio>

#include "apps/moiety/commands/completion.h"
#include "apps/moiety/commands/convert.h"
#include "apps/moiety/commands/doctor.h"
#include "apps/moiety/commands/eval.h"
#include "apps/moiety/commands/generate.h"
#include "apps/moiety/commands/hugging_face.h"
#include "apps/moiety/commands/info.h"
#include "apps/moiety/commands/man.h"
#include "apps/moiety/commands/plan.h"
#include "apps/moiety/commands/plot.h"
#include "apps/moiety/commands/prepare.h"
#include "apps/moiety/commands/quantize.h"
#include "apps/moiety/commands/repair.h"
#include "apps/moiety/commands/train.h"
#include "apps/moiety/commands/verify.h"
#include "apps/moiety/exit_code.h"
#include "apps/moiety/report/result.h"
#include "moiety/base/printable.h"

namespace moiety::app {
namespace {

constexpr Command kCommands[] = {
    {"train", "train a model; continues by itself from the run directory's checkpoint",
     train_command},
    {"eval", "loss, perplexity, bits per byte and expert balance of a checkpoint", eval_command},
    {"generate", "continue a text", generate_command},
    {"prepare", "text or JSONL to token files", prepare_command},
    {"plan", "what a layout would do, without running it", plan_command},
    {"plot", "curves of one or several runs in one picture", plot_command},
    {"quantize", "a NumPy matrix to one of the low-precision formats", quantize_command},
    {"dequantize", "what quantize wrote, back to a NumPy matrix", dequantize_command},
    {"info", "what a run, a checkpoint or a token file is", info_command},
    {"verify", "compare token files, checkpoints and quantized tensors with their checksums",
     verify_command},
    {"repair", "make a checkpoint's lost manifest again", repair_command},
    {"convert", "a checkpoint with its experts in another form", convert_command},
    {"import", "a Hugging Face folder to a checkpoint", import_command},
    {"export", "a checkpoint to a Hugging Face folder", export_command},
    {"doctor", "what this machine offers to training, and what to do", doctor_command},
    {"completion", "completion of this command line for a shell", completion_command},
    {"man", "the manual page", man_command},
};

std::string usage() {
  std::string out = "moiety " MOIETY_VERSION
                    ": mixture-of-experts training\n\n"
                    "usage: moiety COMMAND ...      (moiety COMMAND --help)\n\n";
  for (const Command& command : kCommands) out += text("  {:<10} {}\n", command.name, command.help);
  return out;
}

int dispatch(const std::vector<std::string>& arguments) {
  const std::string name = arguments.empty() ? "--help" : arguments[0];
  if (name == "--help" || name == "-h" || name == "help") {
    if (arguments.empty()) {
      std::fputs(usage().c_str(), stderr);
      throw UsageError("no command is given");
    }
    print_result(usage());
    return kExitDone;
  }
  if (name == "--version") {
    print_result("moiety " MOIETY_VERSION "\n");
    return kExitDone;
  }
  for (const Command& command : kCommands) {
    if (name == command.name) return command.run({arguments.begin() + 1, arguments.end()});
  }
  std::string names;
  for (const Command& command : kCommands)
    names += text("{}{}", names.empty() ? "" : ", ", command.name);
  throw UsageError("unknown command '{}'; the commands are {}", printable(name), names);
}

}  // namespace

std::span<const Command> commands() { return kCommands; }

int run_program(const std::vector<std::string>& arguments) {
  try {
    return dispatch(arguments);
  } catch (...) {
    const Failure failure = current_failure();
    print_failure(failure);
    return failure.code();
  }
}

}  // namespace moiety::app
