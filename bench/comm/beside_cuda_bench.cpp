// A large product on each GPU beside gathers without an end between them, by copy engines, against
// the product alone: what communication takes from computing. Ranks are threads with a GPU each.
// A kernel in which ranks meet waits for the end of a product that fills the GPU; with --leave the
// product, then a grouped one, leaves it multiprocessors. The product alone takes all.
#include <algorithm>
#include <string>
#include <vector>

#include "bench/gemm/bursts.h"
#include "bench/ranks.h"
#include "moiety/base/copy.h"
#include "moiety/base/gpu_runtime.h"
#include "moiety/comm/gpu_environment.h"
#include "moiety/comm/symmetric_buffer.h"
#include "moiety/comm/thread_group.h"
#include "moiety/gemm/grouped_gemm.h"

namespace moiety::comm {
namespace {

constexpr int64_t kRows = 8192, kColumns = 16384, kInner = 4096;
constexpr int kBatch = 8;  // calls of a graph

struct Settings {
  int ranks = 2, rounds = 3, mib = 64, ms = 700, leave = 0;
  bool plain = false;
};

// A round: the time of a product, and what the gathers that ended meanwhile brought.
struct Round {
  double product_ms = 0, gbs = 0;
  std::string gpus = {};  // clocks and power meanwhile
};

class Rank {
 public:
  Rank(Communicator& comm, const Settings& settings)
      : comm_(&comm),
        gpu_{DeviceType::kCuda, comm.rank()},
        compute_(Stream::on(gpu_)),
        lane_(Stream::external(gpu_, gpu::create_lane(gpu_.index))),
        part_(int64_t{settings.mib} << 20),
        shared_(SymmetricBuffer::create(comm, "operands", part_ * comm.size(), gpu_)),
        a_(bench::random_on_gpu(bench::kHalf, {kRows, kInner}, compute_)),
        b_(bench::random_on_gpu(bench::kHalf, {kColumns, kInner}, compute_)),
        c_(bench::kHalf, {kRows, kColumns}, gpu_),
        begin_(DType::kInt64, {2}, gpu_) {
    comm.attach(shared_);
    const int64_t begin[] = {0, kRows};
    copy(begin_, TensorView(const_cast<int64_t*>(begin), DType::kInt64, {2}), compute_);
    compute_.synchronize();
    const auto product = [&] {
      gemm::gemm({.op = gemm::GemmOp::kTN, .a = a_, .b = b_, .out = c_}, compute_);
    };
    const auto leaving = [&] {
      gemm::GroupedGemmArgs args;
      args.groups.begin_E1 = begin_;
      args.groups.experts = 1;
      args.groups.capacity = kRows;
      args.a.data = a_;
      args.w = b_.view().reshape({1, kColumns, kInner});
      args.out = c_;
      args.sm_limit = gpu_properties(gpu_.index).multiprocessors - settings.leave;
      gemm::grouped_gemm(args, compute_);
    };
    const TensorView all(shared_.local(), DType::kUInt8, {part_ * comm.size()}, gpu_);
    const int next = (comm.rank() + 1) % comm.size();
    const auto gather = [&] {
      if (settings.plain) {
        return copy(all.slice(0, next * part_, (next + 1) * part_),
                    TensorView(shared_.peer(next) + next * part_, DType::kUInt8, {part_}, gpu_),
                    lane_);
      }
      comm.all_gather(all.slice(0, comm.rank() * part_, (comm.rank() + 1) * part_), all, lane_)
          .wait();
    };
    product();
    gather();
    products_ = captured(compute_, product);
    if (settings.leave > 0) {
      leaving();
      leaving_ = captured(compute_, leaving);
    }
    gathers_ = captured(lane_, gather);
    one_ms_ = time_of(products_, compute_);
    other_ms_ = time_of(gathers_, lane_);
  }
  ~Rank() { gpu::destroy_stream(gpu_.index, lane_.cuda_stream()); }

  // Enough products for `ms`, with gathers before, beside and behind them, or without.
  Round round(double ms, bool gathers) {
    const int count = std::max(1, int(ms / one_ms_));
    const int moves = gathers ? int(1.6 * ms / other_ms_) : 0;
    std::vector<Event> ends;
    for (int i = 0; i < moves; ++i) ends.push_back(Event::timed());
    Event begin = Event::timed(), end = Event::timed();
    comm_->barrier();
    for (int i = 0; i < moves / 8; ++i) move(ends[i]);
    begin.record(compute_);
    const Graph& products = gathers && leaving_.nodes() > 0 ? leaving_ : products_;
    for (int i = 0; i < count; ++i) products.launch(compute_);
    end.record(compute_);
    for (int i = moves / 8; i < moves; ++i) move(ends[i]);
    const std::string gpus = comm_->rank() == 0 ? bench::clocks_and_power() : "";
    comm_->synchronize(compute_);
    comm_->synchronize(lane_);
    Round out{elapsed_ms(begin, end) / (count * kBatch), 0, gpus};
    double first = 0, last = 0;
    int ended = 0;
    for (const Event& event : ends) {
      const double at = elapsed_ms(begin, event);
      if (at < 0 || at > out.product_ms * count * kBatch) continue;
      if (ended++ == 0) first = at;
      last = at;
    }
    const double bytes = double(part_ * (comm_->size() - 1) * kBatch);
    if (ended > 1) out.gbs = bench::giga(bytes * (ended - 1), last - first);
    return out;
  }

  void close() {
    products_ = {};
    leaving_ = {};
    gathers_ = {};
    comm_->barrier();
    shared_.close();
  }

 private:
  template <class F>
  Graph captured(const Stream& stream, F&& call) {
    comm_->synchronize(stream);
    comm_->barrier();
    Graph out(stream, [&] {
      for (int i = 0; i < kBatch; ++i) call();
    });
    comm_->barrier();
    return out;
  }
  double time_of(Graph& graph, const Stream& stream) {
    Event begin = Event::timed(), end = Event::timed();
    graph.launch(stream);
    begin.record(stream);
    graph.launch(stream);
    end.record(stream);
    comm_->synchronize(stream);
    comm_->barrier();
    return bench::slowest(*comm_, {elapsed_ms(begin, end)})[0];  // all ranks count alike
  }
  void move(Event& end) {
    gathers_.launch(lane_);
    end.record(lane_);
  }

  Communicator* comm_;
  Device gpu_;
  Stream compute_, lane_;
  int64_t part_;
  SymmetricBuffer shared_;
  Tensor a_, b_, c_, begin_;
  Graph products_, leaving_, gathers_;
  double one_ms_ = 0, other_ms_ = 0;
};

void measure(Communicator& comm, const Settings& settings) {
  comm.prepare({DeviceType::kCuda, comm.rank()}, {.beside_compute = true});
  Rank rank(comm, settings);
  std::vector<double> alone, beside, rates;
  std::string gpus;
  for (int i = 0; i < settings.rounds; ++i) {
    alone.push_back(rank.round(settings.ms, false).product_ms);
    const Round round = rank.round(settings.ms, true);
    beside.push_back(round.product_ms);
    gpus = round.gpus;
    rates.push_back(1 / std::max(round.gbs, 1e-9));  // the slowest rank's
  }
  const bench::Timing lone = bench::timing(bench::slowest(comm, alone)),
                      both = bench::timing(bench::slowest(comm, beside)),
                      rate = bench::timing(bench::slowest(comm, rates));
  if (comm.rank() == 0) {
    bench::Row row{
        "comm.beside_product",
        text("{}x{}x{} bf16{} beside {} of {} MiB, R={}", kRows, kColumns, kInner,
             settings.leave > 0 ? text(" that leaves {} multiprocessors", settings.leave) : "",
             settings.plain ? "copies" : "all_gather", settings.mib, comm.size()),
        bench::tera(2.0 * double(kRows * kColumns) * double(kInner), both.ms),
        "TFLOP/s",
        both,
        "the product alone, the slower GPU",
        lone.ms / both.ms};
    row.more = text(R"("ranks": {}, "alone_ms": {:.4f}, "gather_gbs": {:.1f}, "gpus": "{}")",
                    comm.size(), lone.ms, 1 / rate.ms, gpus);
    row.device = {DeviceType::kCuda, 0};
    bench::print(row);
  }
  rank.close();
}

void run(bench::Options& options) {
  prepare_gpu_environment();
  Settings settings;
  options.number("--ranks", settings.ranks, "threads, with a GPU each", 2)
      .number("--rounds", settings.rounds, "alternating, the median")
      .number("--mib", settings.mib, "of a rank's part")
      .number("--ms", settings.ms, "of products, a round")
      .number("--leave", settings.leave, "multiprocessors that the product leaves to meetings")
      .flag("--plain", settings.plain, "copies without meetings");
  if (!options.parse()) return;
  MOIETY_CHECK(settings.ranks <= gpu_status().count, "--ranks {}: there are {} GPUs",
               settings.ranks, gpu_status().count);
  run_thread_ranks(settings.ranks, {.deadline = Seconds(20)},
                   [&](Communicator& world) { measure(world, settings); });
}

}  // namespace
}  // namespace moiety::comm

int main(int argc, char** argv) {
  return moiety::bench::run_main(argc, argv, "A product beside gathers between GPUs.",
                                 moiety::comm::run);
}
