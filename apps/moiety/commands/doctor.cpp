#include "apps/moiety/commands/doctor.h"

#include <algorithm>
#include <filesystem>

#include <CLI/CLI.hpp>

#include "apps/moiety/commands/command_line.h"
#include "apps/moiety/exit_code.h"
#include "apps/moiety/report/result.h"
#include "moiety/comm/gpu_environment.h"
#include "moiety/train/health.h"

namespace moiety::app {
namespace {

constexpr const char* kDoctorAbout =
    "What this machine and this build offer to training: OK, INFO, WARN or FAIL, and what to do.\n"
    "Exits with 0 unless something fails.";

// With the pairs of GPUs, for which the environment is prepared; but told as it was.
std::vector<train::HealthCheck> examine_all(const std::string& directory) {
  const train::HealthCheck variables = train::gpu_variable_check();
  comm::prepare_gpu_environment();
  std::vector<train::HealthCheck> checks = train::examine(directory, true);
  std::ranges::find(checks, variables.name, &train::HealthCheck::name)[0] = variables;
  checks.push_back(train::gpu_pair_check());
  return checks;
}

}  // namespace

int doctor_command(const std::vector<std::string>& arguments) {
  bool json = false;
  std::string directory = ".";
  CLI::App app(kDoctorAbout, "moiety doctor");
  app.add_flag("--json", json, "one line of JSON");
  app.add_option("--dir", directory, "directory whose disk is examined")->capture_default_str();
  if (!parse_command_line(app, arguments)) return kExitDone;
  std::error_code none;
  if (!std::filesystem::is_directory(directory, none)) {
    throw UsageError("--dir {}: is not a directory", directory);
  }
  const std::vector<train::HealthCheck> checks = examine_all(directory);
  std::string lines = json ? checks_json(checks) + "\n" : "";
  for (const train::HealthCheck& c : checks) {
    if (json) break;
    lines += text("{:<4}  {:<14} {}\n", name(c.health), c.name, c.text);
    if (!c.fix.empty()) lines += text("{:>21}-> {}\n", "", c.fix);
  }
  print_result(lines);
  std::string failed;
  for (const train::HealthCheck& c : checks) {
    if (c.health == train::Health::kFail) failed += (failed.empty() ? "" : ", ") + c.name;
  }
  if (!failed.empty()) throw DeviceError("doctor: {}: failed", failed);
  return kExitDone;
}

}  // namespace moiety::app
