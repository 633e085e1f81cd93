// What this machine, this build and a directory's disk offer to training, and what to do about what
// they lack: `moiety doctor`, and env.json of a run.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "moiety/base/json_line.h"

namespace moiety::app {

enum class Health { kOk, kInfo, kWarn, kFail };

struct HealthCheck {
  Health health = Health::kOk;
  std::string name;  // "cpu", "memory", ...
  std::string text{};
  std::string fix{};  // empty: nothing to do
  JsonLine facts{};   // the same for programs
};

// Looks, without changing anything; `measure` also times products of matrices and the disk and
// opens the libraries for GPUs, which takes about two seconds.
std::vector<HealthCheck> examine(const std::filesystem::path& directory, bool measure);

// Of those, what is known of GPUs, and of the libraries that work on GPUs needs at run time.
HealthCheck gpu_check();
HealthCheck gpu_library_check();
// Of the machine's GPUs, in the driver's order, how many NVLinks of each are active.
HealthCheck nvlink_check();
HealthCheck nvlink_health(const std::vector<int>& links);

// {"v":1,"version":...,"t":...,"host":...,"ok":...,"checks":[{"name":...,"status":"OK","text":...,
// "fix":...}, ...]}: one line, every check with its facts.
std::string checks_json(const std::vector<HealthCheck>& checks);

int doctor_command(const std::vector<std::string>& arguments);

}  // namespace moiety::app
