#include <algorithm>
#include <cstddef>
#include <fstream>

#include "apps/moiety/doctor.h"
#include "moiety/base/format.h"
#include "moiety/base/gpu.h"
#include "moiety/base/shared_library.h"

namespace moiety::app {
namespace {

// 13000 is 13.0, as CUDA counts.
std::string cuda_version(int version) { return text("{}.{}", version / 1000, version % 1000 / 10); }

// The newest CUDA version that the installed driver supports, in any build; 0 without a driver.
int driver_cuda() {
  const SharedLibrary driver = SharedLibrary::open({"libcuda.so.1"});
  int version = 0;
  const auto get = driver.find<int(int*)>("cuDriverGetVersion");
  return get && get(&version) == 0 ? version : 0;
}

std::string driver_release() {
  std::ifstream in("/sys/module/nvidia/version");
  std::string line;
  std::getline(in, line);
  return line;
}

// A library that is opened at run time. Its versions count 10000 * major + 100 * minor + patch.
struct Library {
  const char* name;
  const char* file;
  const char* version_symbol;
  bool by_pointer;  // int f(int*), else size_t f()
  int least;
  const char* package;
};
constexpr Library kLibraries[] = {
    {"cuBLASLt", "libcublasLt.so.13", "cublasLtGetVersion", false, 130000, "nvidia-cublas"},
    {"cuDNN", "libcudnn.so.9", "cudnnGetVersion", false, 90000, "nvidia-cudnn-cu13"},
    {"NCCL", "libnccl.so.2", "ncclGetVersion", true, 22800, "nvidia-nccl-cu13"},
};

int version_of(const SharedLibrary& library, const Library& what) {
  int version = 0;
  if (what.by_pointer) {
    const auto get = library.find<int(int*)>(what.version_symbol);
    return get && get(&version) == 0 ? version : 0;
  }
  const auto get = library.find<size_t()>(what.version_symbol);
  return get ? static_cast<int>(get()) : 0;
}

std::string dotted(int version) {
  return text("{}.{}.{}", version / 10000, version / 100 % 100, version % 100);
}

}  // namespace

HealthCheck gpu_check() {
  const GpuStatus& status = gpu_status();
  const int driver = driver_cuda();
  const std::string release = driver_release();
  HealthCheck f{.health = Health::kInfo, .name = "gpu"};
  f.facts.add("cuda", status.built).add("gpus", status.count);
  if (driver > 0) f.facts.add("driver_cuda", cuda_version(driver));
  if (!release.empty()) f.facts.add("driver", release);
  if (status.built) f.facts.add("runtime", cuda_version(status.runtime));
  const std::string driver_text = text("driver {}{}for CUDA up to {}", release,
                                       release.empty() ? "" : " ", cuda_version(driver));
  if (status.count == 0) {
    f.text = status.text;
    if (driver > 0 && !status.built) f.text += text("; {} is installed", driver_text);
    if (driver > 0 && status.built) {
      f.health = Health::kWarn;
      f.fix = driver < status.runtime
                  ? text("CUDA {} needs a newer driver", cuda_version(status.runtime))
                  : "see whether nvidia-smi lists a GPU, and what CUDA_VISIBLE_DEVICES hides";
    }
    return f;
  }
  f.health = Health::kOk;
  bool old = false;
  for (int i = 0; i < status.count; ++i) {
    const GpuProperties& p = gpu_properties(i);
    old = old || p.major < 9;
    f.text += text("{}{}: {}, {}, compute capability {}.{}, {} multiprocessors", i ? "; " : "", i,
                   p.name, bytes_text(p.memory), p.major, p.minor, p.multiprocessors);
    f.facts.add(text("gpu{}", i), p.name)
        .add(text("gpu{}_memory", i), p.memory)
        .add(text("gpu{}_capability", i), text("{}.{}", p.major, p.minor))
        .add(text("gpu{}_multiprocessors", i), p.multiprocessors);
  }
  f.text += text("; {}, run time {}", driver_text, cuda_version(status.runtime));
  if (old) {
    f.health = Health::kWarn;
    f.fix = "GPUs below compute capability 9.0 (Hopper) run none of the kernels";
  }
  return f;
}

HealthCheck gpu_library_check() {
  HealthCheck f{.health = Health::kInfo, .name = "gpu libraries"};
  for (const Library& what : kLibraries) {
    const SharedLibrary library = SharedLibrary::open({what.file});
    const int version = version_of(library, what);
    std::string found = text("no {}", what.name);
    if (version >= what.least) {
      found = text("{} {} ({})", what.name, dotted(version), library.path());
      f.facts.add(what.name, dotted(version));
    } else {
      f.fix += text("{}{}", f.fix.empty() ? "pip install " : " ", what.package);
      if (library) {
        found = text("{} {} ({}), at least {} is needed", what.name, dotted(version),
                     library.path(), dotted(what.least));
      }
    }
    f.text += (f.text.empty() ? "" : "; ") + found;
  }
  // Nobody without a GPU is sent to install them.
  if (gpu_status().count == 0) f.fix.clear();
  return f;
}

}  // namespace moiety::app
