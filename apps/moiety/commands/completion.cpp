#include "apps/moiety/commands/completion.h"

#include <memory>

#include <CLI/CLI.hpp>

#include "apps/moiety/commands/command_line.h"
#include "apps/moiety/config/options.h"
#include "apps/moiety/exit_code.h"
#include "apps/moiety/program.h"
#include "apps/moiety/report/result.h"

namespace moiety::app {
namespace {

constexpr const char* kCompletionAbout =
    "Prints the completion of commands, options, keys and their words for a shell. Now:\n"
    "  source <(moiety completion bash)\n"
    "An installation holds them where the shells look.";

std::string joined(const std::vector<std::string>& words) {
  std::string out;
  for (const std::string& word : words) out += (out.empty() ? "" : " ") + word;
  return out;
}

// The options of a command, with the keys of the configuration where it takes them.
std::vector<OptionShape> all_options(const Command& command) {
  const CommandShape shape = shape_of(command.run);
  std::vector<OptionShape> options = shape.options;
  if (!shape.takes_keys) return options;
  for (const Key& key : option_keys()) {
    OptionShape one{"--" + key.full_name() + "=", "VALUE", std::string(key.help), {}};
    one.words.assign(key.rule.choices.begin(), key.rule.choices.end());
    if (std::holds_alternative<bool*>(key.field(*std::make_unique<Options>()))) {
      one.words = {"true", "false"};
    }
    options.push_back(std::move(one));
  }
  return options;
}

// The name without the = of a key.
std::string bare(const std::string& name) { return name.substr(0, name.find('=')); }

// For a shell's case: "train --run.device") SAY "auto cpu cuda" ;;
std::string word_cases(const char* say, const char* then) {
  std::string out;
  for (const Command& command : commands()) {
    for (const OptionShape& option : all_options(command)) {
      if (option.words.empty()) continue;
      out += text("    \"{} {}\") {}{}{} ;;\n", command.name, bare(option.name), say,
                  joined(option.words), then);
    }
  }
  return out;
}

std::string command_names() {
  std::vector<std::string> names;
  for (const Command& command : commands()) names.emplace_back(command.name);
  return joined(names);
}

std::string bash() {
  std::string options;
  for (const Command& command : commands()) {
    std::vector<std::string> names;
    for (const OptionShape& option : all_options(command)) names.push_back(option.name);
    options += text("    {}) options=\"{}\" ;;\n", command.name, joined(names));
  }
  return R"(# Completion of moiety for bash, made by: moiety completion bash
_moiety() {
  local word="${COMP_WORDS[COMP_CWORD]}" option="${COMP_WORDS[COMP_CWORD-1]}" words= options=
  if [ "$COMP_CWORD" -eq 1 ]; then
    COMPREPLY=($(compgen -W ")" +
         command_names() + R"(" -- "$word"))
    return
  fi
  # bash takes the = of --option=value for a word.
  if [ "$word" = "=" ]; then
    word=
  elif [ "$option" = "=" ]; then
    option="${COMP_WORDS[COMP_CWORD-2]}"
  fi
  case "${COMP_WORDS[1]} $option" in
)" + word_cases("words=\"", "\"") +
         R"(  esac
  case "${COMP_WORDS[1]}" in
)" + options +
         R"(  esac
  if [ -n "$words" ]; then
    COMPREPLY=($(compgen -W "$words" -- "$word"))
  elif [ "${word#-}" != "$word" ]; then
    COMPREPLY=($(compgen -W "$options" -- "$word"))
    [ "${COMPREPLY[0]%=}" = "${COMPREPLY[0]}" ] || compopt -o nospace 2>/dev/null
  else
    compopt -o filenames 2>/dev/null
    COMPREPLY=($(compgen -f -- "$word"))
  fi
}
complete -F _moiety moiety
)";
}

// Text in single quotes.
std::string shell_text(std::string_view s) {
  std::string out = "'";
  for (const char c : s) {
    if (c == '\n') {
      out += ' ';
    } else if (c == '\'') {
      out += "'\\''";
    } else {
      out += c;
    }
  }
  return out + "'";
}

std::string zsh() {
  std::string names, options;
  for (const Command& command : commands()) {
    names += " " + shell_text(text("{}:{}", command.name, command.help));
    std::string list, keys;
    for (const OptionShape& option : all_options(command)) {
      std::string& to = option.name.ends_with('=') ? keys : list;
      to += " " + shell_text(text("{}:{}", option.name, option.help));
    }
    options += text("    {}) list=({}) keys=({}) ;;\n", command.name, list, keys);
  }
  return R"(#compdef moiety
# Completion of moiety for zsh, made by: moiety completion zsh
_moiety() {
  local -a list keys
  if (( CURRENT == 2 )); then
    list=()" +
         names +
         R"()
    _describe command list
    return
  fi
  local option=${words[CURRENT-1]}
  if [[ $PREFIX == --*=* ]]; then
    option=${PREFIX%%=*}
    compset -P '*='
  fi
  case "${words[2]} $option" in
)" + word_cases("compadd ", "; return") +
         R"(  esac
  case "${words[2]}" in
)" + options +
         R"(  esac
  if [[ $PREFIX == -* ]]; then
    _describe option list -- keys -S ''
  else
    _files
  fi
}
_moiety "$@"
)";
}

std::string fish() {
  std::string out = "# Completion of moiety for fish, made by: moiety completion fish\n";
  for (const Command& command : commands()) {
    out += text("complete -c moiety -f -n __fish_use_subcommand -a {} -d {}\n", command.name,
                shell_text(command.help));
  }
  for (const Command& command : commands()) {
    for (const OptionShape& option : all_options(command)) {
      out += text("complete -c moiety -n '__fish_seen_subcommand_from {}' -l {}", command.name,
                  bare(option.name).substr(2));
      if (!option.value.empty()) out += " -r";
      if (!option.words.empty()) out += " -f -a " + shell_text(joined(option.words));
      out += " -d " + shell_text(option.help) + "\n";
    }
  }
  return out;
}

}  // namespace

int completion_command(const std::vector<std::string>& arguments) {
  std::string shell;
  CLI::App app(kCompletionAbout, "moiety completion");
  app.add_option("SHELL", shell, "bash, zsh or fish")->required();
  if (!parse_command_line(app, arguments)) return kExitDone;
  if (shell != "bash" && shell != "zsh" && shell != "fish") {
    throw UsageError("SHELL {}: must be one of bash, zsh, fish", shell);
  }
  print_result(shell == "bash" ? bash() : shell == "zsh" ? zsh() : fish());
  return kExitDone;
}

}  // namespace moiety::app
