#include "apps/moiety/commands/doctor.h"

#include <cstdio>

#include <CLI/CLI.hpp>

#include "apps/moiety/commands/command_line.h"
#include "apps/moiety/exit_code.h"
#include "moiety/train/health.h"

namespace moiety::app {
namespace {

constexpr const char* kDoctorAbout =
    "What this machine and this build offer to training: OK, INFO, WARN or FAIL, and what to do.\n"
    "Exits with 0 unless something fails.";

}  // namespace

int doctor_command(const std::vector<std::string>& arguments) {
  bool json = false;
  std::string directory = ".";
  CLI::App app(kDoctorAbout, "moiety doctor");
  app.add_flag("--json", json, "one line of JSON");
  app.add_option("--dir", directory, "directory whose disk is examined")->capture_default_str();
  if (!parse_command_line(app, arguments)) return kExitDone;
  const std::vector<train::HealthCheck> checks = train::examine(directory, true);
  if (json) {
    std::puts(checks_json(checks).c_str());
  } else {
    for (const train::HealthCheck& c : checks) {
      std::printf("%-4s  %-14s %s\n", name(c.health), c.name.c_str(), c.text.c_str());
      if (!c.fix.empty()) std::printf("%21s-> %s\n", "", c.fix.c_str());
    }
  }
  return all_well(checks) ? kExitDone : kExitDevice;
}

}  // namespace moiety::app
