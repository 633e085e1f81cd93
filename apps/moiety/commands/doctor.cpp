#include "apps/moiety/commands/doctor.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <unistd.h>

#include <CLI/CLI.hpp>

#include "apps/moiety/commands/command_line.h"
#include "apps/moiety/exit_code.h"

namespace moiety::app {
namespace {

constexpr const char* kDoctorAbout =
    "What this machine and this build offer to training: OK, INFO, WARN or FAIL, and what to do.\n"
    "Exits with 0 unless something fails.";

const char* status(Health health) {
  static constexpr const char* kNames[] = {"OK", "INFO", "WARN", "FAIL"};
  return kNames[static_cast<int>(health)];
}

bool all_well(const std::vector<HealthCheck>& checks) {
  return std::none_of(checks.begin(), checks.end(),
                      [](const HealthCheck& c) { return c.health == Health::kFail; });
}

}  // namespace

std::string checks_json(const std::vector<HealthCheck>& checks) {
  std::string list;
  for (const HealthCheck& c : checks) {
    JsonLine json;
    json.add("name", c.name).add("status", status(c.health)).add("text", c.text);
    if (!c.fix.empty()) json.add("fix", c.fix);
    list += (list.empty() ? "" : ",") + json.append(c.facts).text();
  }
  char host[256] = "";
  ::gethostname(host, sizeof(host) - 1);
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return JsonLine()
      .add("v", 1)
      .add("version", MOIETY_VERSION)
      .add("t", std::chrono::duration<double>(now).count())
      .add("host", host)
      .add("ok", all_well(checks))
      .raw("checks", "[" + list + "]")
      .text();
}

int doctor_command(const std::vector<std::string>& arguments) {
  bool json = false;
  std::string directory = ".";
  CLI::App app(kDoctorAbout, "moiety doctor");
  app.add_flag("--json", json, "one line of JSON");
  app.add_option("--dir", directory, "directory whose disk is examined")->capture_default_str();
  if (!parse_command_line(app, arguments)) return kExitDone;
  const std::vector<HealthCheck> checks = examine(directory, true);
  if (json) {
    std::puts(checks_json(checks).c_str());
  } else {
    for (const HealthCheck& c : checks) {
      std::printf("%-4s  %-14s %s\n", status(c.health), c.name.c_str(), c.text.c_str());
      if (!c.fix.empty()) std::printf("%21s-> %s\n", "", c.fix.c_str());
    }
  }
  return all_well(checks) ? kExitDone : kExitDevice;
}

}  // namespace moiety::app
