// A check of this machine, this build and a directory's disk: what they offer to training, and how
// to mend what they lack.
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

// Looks, without changing anything. With `measure` it also times products of matrices and the disk,
// and opens the libraries for GPUs, which takes about two seconds.
std::vector<HealthCheck> examine(const std::filesystem::path& directory, bool measure);

// The check of the disk of a directory, in which it makes a file and takes it away again.
HealthCheck disk_check(const std::filesystem::path& directory, bool measure);
// The check of GPUs, and of the libraries that work on GPUs needs at run time.
HealthCheck gpu_check();
HealthCheck gpu_library_check();
// The check of the environment that several ranks on GPUs need (comm/gpu_environment.h).
HealthCheck gpu_variable_check();
// The check of the pairs of this machine's GPUs that ranks would be on: whether two ranks can map each
// other's memory, and how long they take to exchange a number through it, which is tried. The
// environment is prepared (comm/gpu_environment.h).
HealthCheck gpu_pair_check();
struct GpuPair {
  int a = 0, b = 0;
  double us = 0;      // of an exchange; 0: there is none
  std::string why{};  // then
};
HealthCheck gpu_pair_health(const std::vector<GpuPair>& pairs);
// The check of the active NVLinks of each of the machine's GPUs, in the driver's order.
HealthCheck nvlink_check();
HealthCheck nvlink_health(const std::vector<int>& links);

// Whether none of them is kFail.
bool all_well(const std::vector<HealthCheck>& checks);
// The checks with all their facts on one line:
// {"v":1,"version":...,"t":...,"host":...,"ok":...,"checks":[{"name":...,"status":"OK","text":...,
// "fix":...}, ...]}.
std::string checks_json(const std::vector<HealthCheck>& checks);

}  // namespace moiety::train
