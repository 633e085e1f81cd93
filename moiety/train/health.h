// What this machine, this build and a directory's disk offer to training, and what to do about what
// they lack.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "moiety/base/json_line.h"

namespace moiety::train {

enum class Health { kOk, kInfo, kWarn, kFail };
const char* name(Health health);  // "OK", "INFO", "WARN", "FAIL"

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

// Those of them that tell of GPUs, and of the libraries that work on GPUs needs at run time.
HealthCheck gpu_check();
HealthCheck gpu_library_check();
// How many NVLinks of each of the machine's GPUs, in the driver's order, are active.
HealthCheck nvlink_check();
HealthCheck nvlink_health(const std::vector<int>& links);

// None of them is kFail.
bool all_well(const std::vector<HealthCheck>& checks);
// {"v":1,"version":...,"t":...,"host":...,"ok":...,"checks":[{"name":...,"status":"OK","text":...,
// "fix":...}, ...]}: one line, every check with its facts.
std::string checks_json(const std::vector<HealthCheck>& checks);

}  // namespace moiety::train
