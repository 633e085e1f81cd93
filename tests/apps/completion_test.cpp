// Completion and manual, which are made of the commands themselves.
#include "apps/moiety/commands/completion.h"

#include <cstdio>

#include "apps/moiety/commands/command_line.h"
#include "apps/moiety/config/options.h"
#include "tests/apps/train_helpers.h"

namespace moiety::app {
namespace {

// What bash offers behind these words.
std::string offered(const std::string& script, const std::string& words) {
  const std::string command =
      "bash -c 'source \"" + script +
      "\"; t() { COMP_WORDS=(\"$@\"); COMP_CWORD=$(($#-1)); _moiety; echo \"${COMPREPLY[*]}\"; }; "
      "t moiety " +
      words + "' 2>&1";
  std::FILE* pipe = ::popen(command.c_str(), "r");
  std::string out;
  char buffer[4096];
  while (std::fgets(buffer, sizeof buffer, pipe)) out += buffer;
  ::pclose(pipe);
  return out;
}

TEST(Completion, BashOffersCommandsOptionsKeysAndWords) {
  const TemporaryDirectory dir;
  const std::string script = dir.write("moiety", run({"completion", "bash"}).out);
  EXPECT_EQ(offered(script, "ver"), "verify\n");
  EXPECT_EQ(offered(script, "generate --sam"), "--samples\n");
  EXPECT_EQ(offered(script, "train --model.d_m"), "--model.d_model=\n");
  EXPECT_EQ(offered(script, "train --run.device = c"), "cpu cuda\n");
  EXPECT_EQ(offered(script, "train --run.device ="), "auto cpu cuda\n");
  EXPECT_EQ(offered(script, "eval --run.device c"), "cpu cuda\n");
  EXPECT_EQ(offered(script, "plan --hardware h"), "h100 h200\n");
  EXPECT_EQ(offered(script, "verify " + script.substr(0, script.size() - 1)), script + "\n");
}

TEST(Completion, NothingIsMissing) {
  const std::string manual = run({"man"}).out;
  for (const char* shell : {"bash", "zsh", "fish"}) {
    const std::string script = run({"completion", shell}).out;
    const std::string dash = shell == std::string("fish") ? "-l " : "--";
    for (const Command& command : commands()) {
      EXPECT_NE(script.find(command.name), std::string::npos) << command.name;
      for (const OptionShape& option : shape_of(command.run).options) {
        EXPECT_NE(script.find(dash + option.name.substr(2)), std::string::npos) << option.name;
      }
    }
    for (const Key& key : option_keys()) {
      EXPECT_NE(script.find(dash + key.full_name()), std::string::npos) << key.full_name();
    }
  }
  for (const Command& command : commands()) {
    EXPECT_NE(manual.find(text(".SS moiety {}", command.name)), std::string::npos) << command.name;
  }
  for (const Key& key : option_keys()) {
    EXPECT_NE(manual.find(text("\\fB{} = ", key.full_name())), std::string::npos)
        << key.full_name();
  }
}

// Options are the command's own: what --help names.
TEST(Completion, ShapesAreThoseOfTheHelp) {
  for (const Command& command : commands()) {
    const std::string help = run({command.name, "--help"}).out;
    const CommandShape shape = shape_of(command.run);
    EXPECT_FALSE(shape.options.empty()) << command.name;
    for (const OptionShape& option : shape.options) {
      EXPECT_NE(help.find(option.name), std::string::npos) << command.name << " " << option.name;
    }
  }
}

TEST(Completion, AnotherShellIsRefused) {
  const ProgramResult result = run({"completion", "tcsh"});
  EXPECT_EQ(result.code, kExitUsage);
  EXPECT_EQ(result.last_line(), "moiety: SHELL tcsh: must be one of bash, zsh, fish");
}

}  // namespace
}  // namespace moiety::app
