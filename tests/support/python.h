// A Python with what some tests compare with; they are skipped by name where there is none.
#pragma once

#include <cstdlib>
#include <initializer_list>
#include <string>

namespace moiety {

// A Python that finds all the modules; empty if there is none.
inline std::string find_python(std::initializer_list<const char*> modules) {
  std::string found;
  for (const char* module : modules) {
    found +=
        (found.empty() ? "u.find_spec(\"" : " and u.find_spec(\"") + std::string(module) + "\")";
  }
  const char* home = std::getenv("HOME");
  // Where bench/setup_peers.sh puts torch.
  const std::string venv = std::string(home ? home : "") + "/.cache/moiety/torch-venv/bin/python";
  for (const std::string& python : {venv, std::string("python3")}) {
    const std::string command = "'" + python +
                                "' -c 'import importlib.util as u, sys; sys.exit(not (" + found +
                                "))' >/dev/null 2>&1";
    if (std::system(command.c_str()) == 0) return python;
  }
  return {};
}

}  // namespace moiety
