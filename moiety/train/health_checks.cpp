#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <optional>
#include <sstream>
#include <sys/resource.h>
#include <unistd.h>

#include "moiety/base/deadline.h"
#include "moiety/base/error.h"
#include "moiety/base/format.h"
#include "moiety/base/parallel.h"
#include "moiety/comm/memory_exchange.h"
#include "moiety/comm/mpi_group.h"
#include "moiety/comm/thread_group.h"
#include "moiety/data/byte_source.h"
#include "moiety/data/tokenizer.h"
#include "moiety/gemm/gemm_block.h"
#include "moiety/gemm/grouped_mlp.h"
#include "moiety/train/cpu_peak.h"
#include "moiety/train/health.h"

namespace moiety::train {
namespace fs = std::filesystem;
namespace {

constexpr double kGiga = 1 << 30;

std::string first_line(const char* path) {
  std::ifstream in(path);
  std::string line;
  std::getline(in, line);
  return line;
}

// The value of the first "key : value" line of a file of /proc.
std::string proc_value(const char* path, std::string_view key) {
  std::ifstream in(path);
  for (std::string line; std::getline(in, line);) {
    if (!line.starts_with(key)) continue;
    const size_t begin = line.find_first_not_of(" \t", line.find(':') + 1);
    return begin == std::string::npos ? "" : line.substr(begin);
  }
  return {};
}

HealthCheck cpu() {
  HealthCheck f{.name = "cpu", .text = proc_value("/proc/cpuinfo", "model name")};
  if (f.text.empty()) f.text = "a CPU without a name";
  std::istringstream words(proc_value("/proc/cpuinfo", "flags"));
  const std::vector<std::string> flags{std::istream_iterator<std::string>(words), {}};
  f.facts.add("model", f.text);
  std::string has;
  for (const char* flag : {"avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16"}) {
    const bool found = std::find(flags.begin(), flags.end(), flag) != flags.end();
    f.facts.add(flag, found);
    if (found) has += text(" {}", flag);
  }
  f.text += has.empty() ? ": no AVX2" : ":" + has;
  return f;
}

constexpr int64_t kExpertSize = 64;  // any size: the path of a CPU does not depend on it

HealthCheck products(bool measure) {
  HealthCheck f{.name = "products"};
  for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
    const gemm::GemmEngine engine = gemm::automatic_engine(dtype);
    const char* type = dtype == DType::kBFloat16 ? "bf16" : "fp32";
    f.facts.add(type, gemm::name(engine));
    f.text += text("{}{} by {}", f.text.empty() ? "" : ", ", type, gemm::name(engine));
    if (measure) {
      const double tflops = measured_tflops(dtype);
      f.facts.add(text("{}_tflops", type), tflops);
      f.text += text(" ({:.3f} TFLOP/s)", tflops);
    }
    if (engine != gemm::GemmEngine::kReference) continue;
    f.health = Health::kWarn;
    f.fix =
        "matrix products run in scalar code, which is slow: use a CPU with AVX2 and FMA, or a "
        "build with oneDNN (libdnnl-dev)";
  }
  const std::string version = gemm::onednn_version();
  f.facts.add("onednn", version);
  f.text += version.empty() ? "; no oneDNN in this build" : "; oneDNN " + version;
  const gemm::PathReport experts = gemm::choose_grouped_mlp(
      {.dtype = DType::kBFloat16, .model = kExpertSize, .ffn = kExpertSize}, Device{});
  f.facts.add("experts", gemm::name(experts.path));
  f.text += "; experts by " + experts.describe();
  return f;
}

// The cores that the control group allows, if it sets a limit.
std::optional<double> quota() {
  std::istringstream v2(first_line("/sys/fs/cgroup/cpu.max"));
  std::string most;
  double period = 0;
  if (v2 >> most >> period && most != "max") return std::strtod(most.c_str(), nullptr) / period;
  const double v1 = std::atof(first_line("/sys/fs/cgroup/cpu/cpu.cfs_quota_us").c_str());
  period = std::atof(first_line("/sys/fs/cgroup/cpu/cpu.cfs_period_us").c_str());
  if (v1 > 0 && period > 0) return v1 / period;
  return std::nullopt;
}

HealthCheck cores() {
  const int usable = core_count();
  const int64_t present = ::sysconf(_SC_NPROCESSORS_ONLN);
  HealthCheck f{.name = "cores", .text = text("{} of {} usable", usable, present)};
  const int threads = environment_threads(usable);
  if (threads != usable) f.text += text("; OMP_NUM_THREADS gives loops {}", threads);
  f.facts.add("usable", usable).add("present", present).add("threads", threads);
  const std::optional<double> allowed = quota();
  if (allowed) f.facts.add("quota", *allowed);
  if (allowed && *allowed < usable - 0.01) {
    f.health = Health::kWarn;
    f.text += text("; the control group allows {:.1f}", *allowed);
    f.fix =
        "more threads than that wait for each other: raise the limit, or start with "
        "OMP_NUM_THREADS or `taskset -c` of as many cores";
  }
  return f;
}

HealthCheck memory() {
  const double total = machine_bytes();
  double available = 1024 * std::atof(proc_value("/proc/meminfo", "MemAvailable").c_str());
  HealthCheck f{.name = "memory"};
  for (const char* path :
       {"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"}) {
    const double limit = std::atof(first_line(path).c_str());  // "max" gives 0
    if (limit <= 0 || limit >= total) continue;
    f.facts.add("limit", limit);
    available = std::min(available, limit);
  }
  f.facts.add("total", total).add("available", available);
  f.text = text("{:.1f} GiB available of {:.1f}", available / kGiga, total / kGiga);
  if (available < kGiga) {
    f.health = Health::kWarn;
    f.fix =
        "even a small model with its optimizer state needs some hundred MiB: end other programs";
  }
  return f;
}

// Makes two ranks hand each other memory as processes do; the failure, if it does not work.
std::string hand_over_memory() {
  const std::vector<comm::Nonce> nonces{comm::random_nonce(), comm::random_nonce()};
  try {
    comm::run_thread_ranks(2, {.deadline = Seconds(5)}, [&](comm::Communicator& world) {
      const int me = world.rank(), peer = 1 - me;
      const auto memory = comm::exchange_memory(world.bootstrap(), "memfd", 4096, nonces);
      memory[peer].get()[me] = std::byte{42};
      world.barrier();
      if (memory[me].get()[peer] != std::byte{42}) {
        fail(ErrorKind::kUnsupported, "memfd: what one rank stores does not reach the other");
      }
    });
  } catch (const Error& e) {
    return e.what();
  }
  return "";
}

HealthCheck shared_memory() {
  const std::string failed = hand_over_memory();
  HealthCheck f{.name = "shared memory"};
  f.facts.add("works", failed.empty());
  if (failed.empty()) {
    f.text = "processes of this host can map each other's memory";
  } else {
    f.health = Health::kWarn;
    f.text = text("processes cannot map each other's memory: {}", failed);
    f.fix =
        "ranks that are processes use collectives instead, which is slower; look at what "
        "the sandbox forbids (seccomp), or use --ranks";
  }
  return f;
}

HealthCheck mpi() {
  const comm::mpi::Status status = comm::mpi::status();
  HealthCheck f{
      .health = status.available ? Health::kOk : Health::kInfo, .name = "mpi", .text = status.text};
  f.facts.add("available", status.available);
  if (!status.available) f.fix = "needed for mpirun only; ranks of one host (--ranks) need no MPI";
  return f;
}

HealthCheck files() {
  rlimit limit{};
  ::getrlimit(RLIMIT_NOFILE, &limit);
  HealthCheck f{.name = "open files", .text = text("{} allowed", limit.rlim_cur)};
  f.facts.add("limit", uint64_t(limit.rlim_cur));
  if (limit.rlim_cur < 256) {
    f.health = Health::kWarn;
    f.fix = "raise the limit: ulimit -n 4096";
  }
  return f;
}

// A library that may be missing: its version, or nothing.
struct OptionalLibrary {
  std::string version;
  const char *absent, *package;
};

// The libraries without which `why`.
HealthCheck libraries(const char* name, const char* why,
                      std::initializer_list<OptionalLibrary> all) {
  HealthCheck f{.name = name};
  for (const OptionalLibrary& library : all) {
    const bool is_there = !library.version.empty();
    f.text += text("{}{}", f.text.empty() ? "" : ", ", is_there ? library.version : library.absent);
    if (is_there) continue;
    f.health = Health::kInfo;
    f.fix += text("{}{}", f.fix.empty() ? text("{}: install ", why) : ", ", library.package);
  }
  if (!f.fix.empty()) f.fix += " and build anew";
  return f;
}

HealthCheck tokenizers() {
  const data::TokenizerLibraries has = data::tokenizer_libraries();
  HealthCheck f = libraries(
      "tokenizers", "most published tokenizers need them",
      {{has.patterns, "no PCRE2", "libpcre2-dev"}, {has.nfc, "no utf8proc", "libutf8proc-dev"}});
  f.facts.add("patterns", has.patterns).add("nfc", has.nfc);
  return f;
}

HealthCheck inputs() {
  const std::string gzip = data::gzip_library(), zstd = data::zstd_library();
  HealthCheck f = libraries("inputs", "`moiety prepare` reads packed text with them",
                            {{gzip, "no zlib", "zlib1g-dev"}, {zstd, "no zstd", "libzstd-dev"}});
  f.facts.add("gzip", gzip).add("zstd", zstd);
  return f;
}

HealthCheck build() {
#ifdef __clang__
  const std::string compiler = __VERSION__;
#else
  const std::string compiler = "GCC " __VERSION__;
#endif
  HealthCheck f{.name = "build", .text = text("moiety {}, {}", MOIETY_VERSION, compiler)};
  f.facts.add("compiler", compiler);
#ifdef NDEBUG
  f.facts.add("assertions", false);
#else
  f.facts.add("assertions", true);
#endif
#ifndef __OPTIMIZE__
  f.health = Health::kWarn;
  f.text += ", not optimized";
  f.fix = "configure with `cmake --preset cpu` or CMAKE_BUILD_TYPE=Release";
#endif
  return f;
}

}  // namespace

std::vector<HealthCheck> examine(const fs::path& directory, bool measure) {
  std::vector<HealthCheck> checks{build(),
                                  cpu(),
                                  products(measure),
                                  cores(),
                                  memory(),
                                  shared_memory(),
                                  mpi(),
                                  gpu_check(),
                                  gpu_variable_check(),
                                  files(),
                                  disk_check(directory, measure),
                                  tokenizers(),
                                  inputs()};
  if (measure) {
    checks.push_back(gpu_library_check());
    checks.push_back(nvlink_check());
  }
  return checks;
}

}  // namespace moiety::train
