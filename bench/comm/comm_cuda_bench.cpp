// Collective operations among ranks on GPUs, which are threads of this process and take the GPUs of
// the machine in turn. Captured in graphs, eager with --eager. The value is the
// bytes that a rank receives over the operation's time, the slowest rank's; the ratio is to plain
// copies of as many bytes by all ranks at once, in the same run. With --nccl ranks share no memory,
// and there are no such copies.
#include <string>
#include <vector>

#include "bench/harness.h"
#include "bench/ranks.h"
#include "moiety/base/copy.h"
#include "moiety/base/gpu.h"
#include "moiety/comm/gpu_environment.h"
#include "moiety/comm/symmetric_buffer.h"
#include "moiety/comm/thread_group.h"

namespace moiety::comm {
namespace {

Device gpu_of(const Communicator& comm) {
  return {DeviceType::kCuda, comm.rank() % gpu_status().count};
}

constexpr int64_t kLarge = int64_t{8} << 20;  // from here on clocks matter

struct Settings {
  std::vector<int64_t> bytes{512, 16 << 10, 1 << 20, 8 << 20, 32 << 20, 64 << 20, 256 << 20};
  int64_t kib = 0;
  int ranks = 2;
  int repeat = 21;
  int blocks = 12;
  bool eager = false, staged = false, beside = false, nccl = false;
};

// One rank: `whole` has a part per rank, in symmetric memory or beside it.
class Rank {
 public:
  Rank(Communicator& comm, int64_t bytes, const Settings& settings)
      : comm_(&comm),
        gpu_(gpu_of(comm)),
        stream_(Stream::on(gpu_)),
        n_(bytes / 4),
        shared_(settings.nccl
                    ? SymmetricBuffer()
                    : SymmetricBuffer::create(comm, "operands", 8 * n_ * comm.size(), gpu_)),
        own_(8 * n_ * comm.size(), gpu_),
        part_(4 * n_, gpu_) {
    const bool apart = settings.staged || settings.nccl;
    if (!apart) comm.attach(shared_);
    std::byte* base = apart ? own_.data() : shared_.local();
    const int64_t all = n_ * comm.size();
    whole_ = TensorView(base, DType::kFloat32, {all}, gpu_);
    other_ = TensorView(base + 4 * all, DType::kFloat32, {all}, gpu_);
    const Tensor random = bench::random_tensor(DType::kFloat32, {all}, uint32_t(comm.rank()));
    copy(whole_, random, stream_);
    stream_.synchronize();
    comm.barrier();  // nobody allocates any more when the first kernel waits
  }

  TensorView part() const { return part_.view(DType::kFloat32, {n_}); }
  TensorView own() const { return other_.slice(0, comm_->rank() * n_, (comm_->rank() + 1) * n_); }

  // Copies what the others' parts take, from memory of the next rank.
  void plain_copies() {
    const int next = (comm_->rank() + 1) % comm_->size();
    for (int r = 1; r < comm_->size(); ++r) {
      copy(other_.slice(0, r * n_, (r + 1) * n_),
           TensorView(shared_.peer(next) + 4 * r * n_, DType::kFloat32, {n_}, gpu_), stream_);
    }
  }
  void all_gather() { comm_->all_gather(own(), other_, stream_).wait(); }
  void reduce_scatter() { comm_->reduce_scatter(whole_, part(), ReduceOp::kSum, stream_).wait(); }
  void all_reduce() { comm_->all_reduce(other_, ReduceOp::kMax, stream_).wait(); }
  void all_to_all() {
    const std::vector<int64_t> rows(comm_->size(), 1);
    const auto of = [&](const TensorView& x) { return x.reshape({comm_->size(), n_}); };
    comm_->all_to_all(of(whole_), rows, of(other_), rows, stream_).wait();
  }

  const Stream& stream() const { return stream_; }
  void close() { shared_.close(); }

 private:
  Communicator* comm_;
  Device gpu_;
  Stream stream_;
  int64_t n_;
  SymmetricBuffer shared_;
  Buffer own_, part_;
  TensorView whole_, other_;
};

struct Operation {
  const char* name;
  void (Rank::*run)();
};
// The copies, with which the others are compared, come first.
constexpr Operation kOperations[] = {{"copies", &Rank::plain_copies},
                                     {"comm.all_gather", &Rank::all_gather},
                                     {"comm.reduce_scatter", &Rank::reduce_scatter},
                                     {"comm.all_reduce", &Rank::all_reduce},
                                     {"comm.all_to_all", &Rank::all_to_all}};

// Milliseconds of one operation, of `batch` that are timed together.
std::vector<double> times_of(Communicator& comm, Rank& rank, const Operation& operation,
                             const Settings& settings) {
  constexpr int kBatch = 8;
  const auto batch = [&] {
    for (int i = 0; i < kBatch; ++i) (rank.*operation.run)();
  };
  batch();
  comm.synchronize(rank.stream());
  comm.barrier();
  Graph graph;
  if (!settings.eager) graph = Graph(rank.stream(), batch);
  Event begin = Event::timed(), end = Event::timed();
  comm.barrier();
  std::vector<double> out;
  for (int i = 0; i < settings.repeat; ++i) {
    begin.record(rank.stream());
    settings.eager ? batch() : graph.launch(rank.stream());
    end.record(rank.stream());
    comm.synchronize(rank.stream());
    out.push_back(elapsed_ms(begin, end) / kBatch);
    comm.barrier();
  }
  graph = {};
  comm.barrier();
  return out;
}

void measure(Communicator& comm, const Settings& settings) {
  comm.prepare(gpu_of(comm), {.sum_blocks = settings.blocks, .beside_compute = settings.beside});
  for (const int64_t bytes : settings.bytes) {
    Rank rank(comm, bytes, settings);
    double copies = 0;
    for (const Operation& operation : kOperations) {
      if (settings.nccl && &operation == kOperations) continue;
      const bench::Timing time =
          bench::timing(bench::slowest(comm, times_of(comm, rank, operation, settings)));
      if (&operation == kOperations) copies = time.ms;
      if (comm.rank() != 0) continue;
      const int gpus = std::min(comm.size(), gpu_status().count);
      bench::Row row{
          operation.name,
          text("R={} on {} GPU{}, {} B a part, {}{}{}", comm.size(), gpus, gpus > 1 ? "s" : "",
               bytes, settings.eager ? "eager" : "captured", settings.staged ? ", staged" : "",
               settings.nccl     ? ", NCCL"
               : settings.beside ? ", copies sum"
                                 : ""),
          bench::giga(double(bytes) * (comm.size() - 1), time.ms), "GB/s", time};
      row.device = gpu_of(comm);
      if (copies > 0 && &operation != kOperations) {
        row.against = "copies";
        row.ratio = copies / time.ms;
      }
      if (bytes >= kLarge) row.more = text(R"("gpus": "{}")", bench::clocks_and_power());
      bench::print(row);
    }
    rank.close();
  }
}

void run(bench::Options& options) {
  prepare_gpu_environment();
  Settings settings;
  std::string device;
  options.choice("--device", device, {"cuda"}, "there is no other")
      .number("--ranks", settings.ranks, "threads", 2)
      .number("--kib", settings.kib, "of a rank's part; without it a table of sizes")
      .number("--repeat", settings.repeat, "rounds")
      .number("--blocks", settings.blocks, "comm.sum_sms")
      .flag("--eager", settings.eager, "operations one by one, not in a graph")
      .flag("--staged", settings.staged, "operands outside of symmetric memory")
      .flag("--beside", settings.beside, "sums by copies and short blocks")
      .flag("--nccl", settings.nccl, "over NCCL");
  if (!options.parse()) return;
  if (settings.kib > 0) settings.bytes = {settings.kib << 10};
  settings.repeat = std::min(settings.repeat, 8192);  // times of a rank travel in 64 KiB
  const auto transport = settings.nccl ? GpuTransport::kNccl : GpuTransport::kMapped;
  run_thread_ranks(settings.ranks, {.deadline = Seconds(20), .gpu_transport = transport},
                   [&](Communicator& world) { measure(world, settings); });
}

}  // namespace
}  // namespace moiety::comm

int main(int argc, char** argv) {
  return moiety::bench::run_main(argc, argv, "Collective operations among ranks on GPUs.",
                                 moiety::comm::run);
}
