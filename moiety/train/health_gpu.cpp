#include <algorithm>
#include <cstddef>
#include <fstream>

#include "moiety/base/buffer.h"
#include "moiety/base/format.h"
#include "moiety/base/gpu.h"
#include "moiety/base/graph.h"
#include "moiety/base/shared_library.h"
#include "moiety/comm/gpu_environment.h"
#include "moiety/comm/gpu_transport.h"
#include "moiety/comm/symmetric_buffer.h"
#include "moiety/comm/thread_group.h"
#include "moiety/gemm/gemm_cuda.h"
#include "moiety/gemm/grouped_mlp.h"
#include "moiety/nn/attention_cuda.h"
#include "moiety/train/health.h"

namespace moiety::train {
namespace {

constexpr unsigned kMostLinks = 18;  // links of a GPU: NVML_NVLINK_MAX_LINKS

// A version as CUDA counts it, as text: 13000 is 13.0.
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
  const gemm::PathReport experts = gemm::choose_grouped_mlp(
      {.dtype = DType::kBFloat16, .model = 1024, .ffn = 1024}, gpu_properties(0));
  f.facts.add("gpu_experts", gemm::name(experts.path));
  f.text += text("; experts in bfloat16 by {}", experts.describe());
  f.text += text("; {}, run time {}", driver_text, cuda_version(status.runtime));
  if (old) {
    f.health = Health::kWarn;
    f.fix = "GPUs below compute capability 9.0 (Hopper) run none of the kernels";
  }
  return f;
}

HealthCheck gpu_library_check() {
  HealthCheck f{.health = Health::kInfo, .name = "gpu libraries"};
  if (!gpu_status().built) {
    f.text = text("not looked for: {}", gpu_status().text);
    return f;
  }
  std::string packages;
  const auto add = [&](const std::string& found) {
    f.text += (f.text.empty() ? "" : "; ") + found;
  };
  // `found`: the library, or why there is none.
  const auto tell = [&](const char* library, bool available, const std::string& found,
                        const char* without, const char* package) {
    if (available) {
      add(found);
      f.facts.add(library, found);
    } else {
      add(text("no {}: {} ({})", library, without, found));
      packages += text(" {}", package);
    }
  };
  const gemm::CublasLtStatus& products = gemm::cublaslt_status();
  tell("cuBLASLt", products.available, products.text,
       "bf16 products run on Moiety's own kernels, which are slower", "nvidia-cublas");
  const nn::CudnnStatus& attention = nn::cudnn_status();
  tell("cuDNN", attention.available, attention.text,
       "attention runs on Moiety's own kernels, at half the speed",
       "nvidia-cudnn-cu13 nvidia-cuda-nvrtc");
  const comm::NcclStatus nccl = comm::nccl_status();
  tell("NCCL", nccl.available, nccl.text,
       "needed between hosts, and by GPUs that cannot map each other's memory", "nvidia-nccl-cu13");
  // Only users with a GPU are told to install them.
  if (gpu_status().count > 0 && !packages.empty()) f.fix = "pip install" + packages;
  return f;
}

HealthCheck gpu_variable_check() {
  HealthCheck f{.health = Health::kInfo, .name = "gpu variables"};
  for (const comm::GpuVariable& v : comm::gpu_variables()) {
    const bool wrong = !v.value.empty() && !v.enough;
    f.facts.add(v.name, v.value);
    f.text += text("{}{}{}", f.text.empty() ? "" : ", ", v.name,
                   v.value.empty() ? text(" is set to {}", v.wanted) : text(" = {}", v.value));
    if (!wrong) continue;
    f.health = Health::kWarn;
    f.fix +=
        text("{}{}: unset {}, or set it to {}", f.fix.empty() ? "" : "; ", v.why, v.name, v.wanted);
  }
  f.text += ", for several ranks on GPUs";
  return f;
}

HealthCheck nvlink_health(const std::vector<int>& links) {
  HealthCheck f{.health = Health::kInfo, .name = "nvlink"};
  f.facts.add("gpus", static_cast<int64_t>(links.size()));
  for (size_t i = 0; i < links.size(); ++i) {
    f.text += text("{}GPU {}: {} link{}", i > 0 ? "; " : "", i, links[i], links[i] == 1 ? "" : "s");
    f.facts.add(text("gpu{}_links", i), links[i]);
  }
  if (links.empty()) {
    f.text = "no GPU is listed";
    return f;
  }
  const auto [least, most] = std::minmax_element(links.begin(), links.end());
  if (*most == 0) {
    f.text = text("{} GPU{}, no link between GPUs is active", links.size(),
                  links.size() == 1 ? "" : "s");
    if (links.size() > 1) f.text += ": they reach each other over PCIe";
  } else if (*least < *most) {
    f.health = Health::kWarn;
    f.fix =
        "GPUs of one machine have unequally many links: look at `nvidia-smi nvlink --status` and "
        "at the fabric manager";
  } else {
    f.health = Health::kOk;
  }
  return f;
}

HealthCheck nvlink_check() {
  const SharedLibrary nvml = SharedLibrary::open({"libnvidia-ml.so.1"});
  const auto begin = nvml.find<int()>("nvmlInit_v2");
  const auto end = nvml.find<int()>("nvmlShutdown");
  const auto count_of = nvml.find<int(unsigned*)>("nvmlDeviceGetCount_v2");
  const auto device_of = nvml.find<int(unsigned, void**)>("nvmlDeviceGetHandleByIndex_v2");
  const auto state_of = nvml.find<int(void*, unsigned, int*)>("nvmlDeviceGetNvLinkState");
  if (!begin || !end || !count_of || !device_of || !state_of || begin() != 0) {
    const char* why = nvml ? "NVML does not start" : "no NVML (libnvidia-ml.so.1 of the driver)";
    return {.health = Health::kInfo, .name = "nvlink", .text = text("not known: {}", why)};
  }
  std::vector<int> links;
  unsigned count = 0;
  count_of(&count);
  for (unsigned i = 0; i < count; ++i) {
    void* device = nullptr;
    int active = 0;
    for (unsigned link = 0; device_of(i, &device) == 0 && link < kMostLinks; ++link) {
      int state = 0;
      active += state_of(device, link, &state) == 0 && state == 1;
    }
    links.push_back(active);
  }
  end();
  return nvlink_health(links);
}

namespace {

constexpr int kMostGpus = 8;  // 28 pairs

// Microseconds of an exchange of a number between the two ranks.
double exchange_us(comm::Communicator& pair, Device gpu) {
  constexpr int kExchanges = 200;
  pair.prepare(gpu, {.staging_bytes = 1 << 20});
  const Stream stream = Stream::on(gpu);
  const Tensor x(DType::kFloat32, {1}, gpu);
  const auto exchange = [&] { pair.all_reduce(x, comm::ReduceOp::kMax, stream).wait(); };
  pair.barrier();
  exchange();
  pair.synchronize(stream);
  pair.barrier();
  const Graph graph(stream, [&] {
    for (int i = 0; i < kExchanges; ++i) exchange();
  });
  Event begin = Event::timed(), end = Event::timed();
  pair.barrier();
  begin.record(stream);
  graph.launch(stream);
  end.record(stream);
  pair.synchronize(stream);
  const double us = 1e3 * elapsed_ms(begin, end) / kExchanges;
  pair.barrier();  // nobody frees while the other one waits
  return us;
}

GpuPair try_pair(int a, int b) {
  GpuPair out{.a = a, .b = b};
  try {
    comm::run_thread_ranks(2, {.deadline = Seconds(10)}, [&](comm::Communicator& pair) {
      const Device gpu{DeviceType::kCuda, pair.rank() == 0 ? a : b};
      const bool mapped = comm::mappable(pair, gpu);
      const double us = mapped ? exchange_us(pair, gpu) : 0;
      if (pair.rank() == 0) out.us = us;
      if (pair.rank() == 0 && !mapped) out.why = "no peer access";
    });
  } catch (const std::exception& e) {
    out.why = e.what();
  }
  return out;
}

}  // namespace

HealthCheck gpu_pair_health(const std::vector<GpuPair>& pairs) {
  HealthCheck f{.health = pairs.empty() ? Health::kInfo : Health::kOk, .name = "gpu pairs"};
  f.text = pairs.empty() ? "fewer than two GPUs" : "an exchange of a number takes";
  bool first = true;
  for (const GpuPair& p : pairs) {
    f.facts.add(text("gpu{}_gpu{}_us", p.a, p.b), p.us);
    if (p.us > 0) {
      f.text += text("{} {:.1f} us between {} and {}", first ? "" : ",", p.us, p.a, p.b);
      first = false;
      continue;
    }
    f.health = Health::kWarn;
    f.fix += text("{}ranks on {} and {} cannot map each other's memory: {}",
                  f.fix.empty() ? "" : "; ", p.a, p.b, p.why);
  }
  if (first && !pairs.empty()) f.text = "no two GPUs can map each other's memory";
  return f;
}

HealthCheck gpu_pair_check() {
  const int gpus = std::min(gpu_status().count, kMostGpus);
  std::vector<GpuPair> pairs;
  for (int a = 0; a < gpus; ++a) {
    for (int b = a + 1; b < gpus; ++b) pairs.push_back(try_pair(a, b));
  }
  return gpu_pair_health(pairs);
}

}  // namespace moiety::train
