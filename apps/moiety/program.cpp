#include "apps/moiety/program.h"

#include <cstdio>
#include <new>

#include "apps/moiety/errors.h"
#include "apps/moiety/eval.h"
#include "apps/moiety/generate.h"
#include "apps/moiety/prepare.h"
#include "apps/moiety/train.h"
#include "moiety/base/error.h"
#include "moiety/checkpoint/checkpoint_error.h"

namespace moiety::app {
namespace {

struct Command {
  const char* name;
  const char* help;
  int (*run)(const std::vector<std::string>& arguments);
};
constexpr Command kCommands[] = {
    {"train", "train a model; continues by itself from the run directory's checkpoint",
     train_command},
    {"eval", "loss, perplexity, bits per byte and expert balance of a checkpoint", eval_command},
    {"generate", "continue a text", generate_command},
    {"prepare", "text or JSONL to token files", prepare_command},
};

std::string usage() {
  std::string out = "moiety " MOIETY_VERSION
                    ": mixture-of-experts training\n\n"
                    "usage: moiety COMMAND ...      (moiety COMMAND --help)\n\n";
  for (const Command& command : kCommands) out += text("  {:<10} {}\n", command.name, command.help);
  return out;
}

ExitCode exit_code(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::kUnsupported:
      return kExitUsage;
    case ErrorKind::kCuda:
      return kExitDevice;
    case ErrorKind::kComm:
      return kExitComm;
    case ErrorKind::kIo:
      return kExitDisk;
    case ErrorKind::kOutOfMemory:
      return kExitMemory;
    case ErrorKind::kInvalidArgument:
      return kExitInternal;  // what the user gives is checked before
  }
  return kExitInternal;
}

int dispatch(const std::vector<std::string>& arguments) {
  const std::string name = arguments.empty() ? "--help" : arguments[0];
  if (name == "--help" || name == "-h" || name == "help") {
    std::fputs(usage().c_str(), arguments.empty() ? stderr : stdout);
    return arguments.empty() ? kExitUsage : kExitDone;
  }
  if (name == "--version") {
    std::puts("moiety " MOIETY_VERSION);
    return kExitDone;
  }
  for (const Command& command : kCommands) {
    if (name == command.name) return command.run({arguments.begin() + 1, arguments.end()});
  }
  throw UsageError("unknown command '{}'; the commands are train, eval, generate, prepare", name);
}

int report(ExitCode code, const char* what) {
  std::fprintf(stderr, "moiety: %s\n", what);
  return code;
}

}  // namespace

int run_program(const std::vector<std::string>& arguments) {
  try {
    return dispatch(arguments);
  } catch (const ExitError& e) {
    return report(e.code, e.what());
  } catch (const checkpoint::CheckpointError& e) {
    return report(kExitCheckpoint, e.what());
  } catch (const Error& e) {
    return report(exit_code(e.kind()), e.what());
  } catch (const std::bad_alloc&) {
    return report(kExitMemory, "out of memory");
  } catch (const std::exception& e) {
    return report(kExitInternal, e.what());
  }
}

}  // namespace moiety::app
