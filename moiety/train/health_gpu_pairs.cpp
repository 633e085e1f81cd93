// What ranks on pairs of this machine's GPUs can do: a real exchange.
#include <algorithm>

#include "moiety/base/buffer.h"
#include "moiety/base/gpu.h"
#include "moiety/base/graph.h"
#include "moiety/comm/symmetric_buffer.h"
#include "moiety/comm/thread_group.h"
#include "moiety/train/health.h"

namespace moiety::train {
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
