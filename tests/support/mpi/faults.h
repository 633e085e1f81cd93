// Programs of processes in which a rank fails (tests/mpi/FOLDER_fault_program.cpp), started by
// themselves or under mpirun, and the words of their ranks.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <string>
#include <sys/wait.h>

#include <gtest/gtest.h>

#include "moiety/base/format.h"
#include "moiety/comm/mpi_group.h"

namespace moiety::testing {

// The words of a rank that ended with an error.
struct Said {
  double seconds = 0;  // since the fault
  std::string text;    // without the process id, which changes from run to run
};

inline std::filesystem::path fault_program(const std::string& name) {
  return std::filesystem::read_symlink("/proc/self/exe").parent_path() / name;
}

enum class Launcher { kOwn, kMpirun };

inline bool can_run(Launcher launcher) {
  return launcher == Launcher::kOwn ||
         (comm::mpi::status().available && std::system("command -v mpirun > /dev/null 2>&1") == 0);
}

// The ranks that ended with an error, of three. `output` is all that was printed.
inline std::map<int, Said> run_fault(Launcher launcher, const std::string& name,
                                     const std::string& arguments, std::string* output) {
  const bool own = launcher == Launcher::kOwn;
  const std::string command =
      text("ASAN_OPTIONS=detect_leaks=0 timeout 60 {} {} {} {} 2>&1",
           own ? ""
               : "mpirun -np 3 --allow-run-as-root --oversubscribe --bind-to none "
                 "--enable-recovery",
           fault_program(name).string(), arguments, own ? "--ranks=3" : "");
  std::map<int, Said> out;
  std::FILE* pipe = popen(command.c_str(), "r");
  if (!pipe) return out;
  char line[4096];
  while (std::fgets(line, sizeof(line), pipe)) {
    *output += line;
    int rank = 0, at = 0;
    double seconds = 0;
    if (std::sscanf(line, "rank %d: %lf s: %n", &rank, &seconds, &at) != 2 || at == 0) continue;
    std::string said = line + at;
    said.pop_back();
    const size_t begin = said.find(" (process ");
    if (begin != std::string::npos) said.erase(begin, said.find(')', begin) + 1 - begin);
    out[rank] = {seconds, said};
  }
  // 124 is timeout's. Under --enable-recovery mpirun's own code is 0 whatever its processes do.
  EXPECT_EQ(WEXITSTATUS(pclose(pipe)), 0) << *output;
  return out;
}

}  // namespace moiety::testing
