// Collective operations among CPU ranks: threads of this process, or processes of mpirun. The value
// is the bytes of the operation's larger tensor on one rank over its time, the slowest rank's; the
// ratio is to a copy of as many bytes by every rank at once.
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "bench/harness.h"
#include "bench/ranks.h"
#include "moiety/comm/collective.h"
#include "moiety/comm/mpi_group.h"
#include "moiety/comm/thread_group.h"

namespace moiety::comm {
namespace {

struct Settings {
  std::vector<int64_t> kib{16, 256, 4096, 65536};
  int ranks = 0;
  int repeat = 21;
};

float value(int rank, int64_t i) {
  const PhiloxBlock block =
      philox(rng_key(1, RngDomain::kGeneration), {uint32_t(i / 4), uint32_t(rank), 0, 0});
  return static_cast<float>(block[i % 4] % 1024);
}

// One rank's tensors: `whole` has a part per rank, `part` is one; each several times.
class Rank {
 public:
  Rank(Communicator& comm, int64_t bytes)
      : comm_(&comm),
        part_elements_(bytes / 4 / comm.size()),
        copies_(bench::copies(2 * bytes, 64)),
        whole_(DType::kFloat32, {copies_, comm.size() * part_elements_}),
        other_(DType::kFloat32, {copies_, comm.size() * part_elements_}),
        part_(DType::kFloat32, {copies_, part_elements_}) {
    const int64_t row = comm.size() * part_elements_;
    for (int64_t i = 0; i < row; ++i) whole_.data<float>()[i] = value(comm.rank(), i);
    for (int64_t c = 1; c < copies_; ++c) {
      std::memcpy(whole_.data<float>() + c * row, whole_.data<float>(), 4 * row);
    }
    std::memset(other_.view().raw(), 0xFF, other_.view().bytes());
    std::memset(part_.view().raw(), 0xFF, part_.view().bytes());
  }

  void copy(int64_t i) {
    copy_bytes(static_cast<std::byte*>(at(other_, i).raw()),
               static_cast<std::byte*>(at(whole_, i).raw()), at(whole_, i).bytes());
  }
  void all_reduce(int64_t i) { comm_->all_reduce(at(whole_, i), ReduceOp::kSum, Stream()).wait(); }
  void reduce_scatter(int64_t i) {
    comm_->reduce_scatter(at(whole_, i), at(part_, i), ReduceOp::kSum, Stream()).wait();
  }
  void all_gather(int64_t i) { comm_->all_gather(at(part_, i), at(other_, i), Stream()).wait(); }
  void all_to_all(int64_t i) {
    const std::vector<int64_t> rows(comm_->size(), 1);
    const TensorView from = at(whole_, i).reshape({comm_->size(), part_elements_});
    const TensorView to = at(other_, i).reshape({comm_->size(), part_elements_});
    comm_->all_to_all(from, rows, to, rows, Stream()).wait();
  }

  // Sums of small integers are exact in any order.
  void check() {
    const auto expect = [&](const char* what, float got, float expected, int64_t i) {
      MOIETY_CHECK(got == expected, "comm bench: {}, element {} is {}, not {}", what, i, got,
                   expected);
    };
    const int me = comm_->rank(), ranks = comm_->size();
    const auto sum = [&](int64_t i) {
      float out = 0;
      for (int r = 0; r < ranks; ++r) out += value(r, i);
      return out;
    };
    const float *part = part_.data<float>(), *other = other_.data<float>();
    all_to_all(0);
    for (int64_t i = 0; i < ranks * part_elements_; ++i) {
      const int64_t column = i % part_elements_, from = i / part_elements_;
      expect("all_to_all", other[i], value(int(from), me * part_elements_ + column), i);
    }
    reduce_scatter(0);
    for (int64_t i = 0; i < part_elements_; ++i) {
      expect("reduce_scatter", part[i], sum(me * part_elements_ + i), i);
    }
    all_gather(0);
    all_reduce(0);
    for (int64_t i = 0; i < ranks * part_elements_; ++i) {
      expect("all_gather", other[i], sum(i), i);
      expect("all_reduce", whole_.data<float>()[i], sum(i), i);
    }
  }

  int64_t bytes() const { return whole_.view().bytes() / copies_; }

 private:
  TensorView at(const Tensor& tensor, int64_t i) const {
    return tensor.view().slice(0, i % copies_, i % copies_ + 1);
  }

  Communicator* comm_;
  int64_t part_elements_, copies_;
  Tensor whole_, other_, part_;
};

struct Operation {
  const char* name;
  void (Rank::*run)(int64_t);
};
// The copy, against which the others are measured, comes first.
constexpr Operation kOperations[] = {{"copy", &Rank::copy},
                                     {"comm.all_reduce", &Rank::all_reduce},
                                     {"comm.reduce_scatter", &Rank::reduce_scatter},
                                     {"comm.all_gather", &Rank::all_gather},
                                     {"comm.all_to_all", &Rank::all_to_all}};
constexpr size_t kCount = std::size(kOperations);

double time_ms(Communicator& comm, Rank& rank, const Operation& operation, int64_t i) {
  comm.barrier();
  return bench::milliseconds([&] { (rank.*operation.run)(i); });
}

void measure(Communicator& comm, const char* kind, const Settings& settings) {
  for (const int64_t kib : settings.kib) {
    Rank rank(comm, kib << 10);
    rank.check();
    std::vector<std::vector<double>> times(kCount);
    for (int i = 0; i < settings.repeat; ++i) {
      for (size_t op = 0; op < kCount; ++op) {
        times[op].push_back(time_ms(comm, rank, kOperations[op], i));
      }
    }
    double copy = 0;
    for (size_t op = 0; op < kCount; ++op) {
      const bench::Timing time = bench::timing(bench::slowest(comm, times[op]));
      if (op == 0) copy = time.ms;
      if (comm.rank() != 0) continue;
      bench::Row row{kOperations[op].name, text("R={} {} {} KiB float32", comm.size(), kind, kib),
                     bench::giga(double(rank.bytes()), time.ms), "GB/s", time};
      if (op > 0) {
        row.against = "copy";
        row.ratio = copy / time.ms;
      }
      bench::print(row);
    }
  }
}

void run(bench::Options& options) {
  Settings settings;
  int64_t kib = 0;
  options.number("--ranks", settings.ranks, "threads; without it and mpirun, 2 and 4")
      .number("--kib", kib, "of a tensor; without it a table of sizes")
      .number("--repeat", settings.repeat, "rounds");
  if (!options.parse()) return;
  if (kib > 0) settings.kib = {kib};
  settings.repeat = std::min(settings.repeat, 8192);  // times of a rank travel in 64 KiB
  if (std::getenv("OMPI_COMM_WORLD_SIZE") || std::getenv("PMI_SIZE")) {
    MOIETY_CHECK(settings.ranks == 0, "--ranks is for threads, the launcher says how many");
    run_mpi_rank({}, [&](Communicator& world) { measure(world, "processes", settings); });
    return;
  }
  for (const int ranks :
       settings.ranks > 0 ? std::vector<int>{settings.ranks} : std::vector<int>{2, 4}) {
    run_thread_ranks(ranks, {}, [&](Communicator& world) { measure(world, "threads", settings); });
  }
}

}  // namespace
}  // namespace moiety::comm

int main(int argc, char** argv) {
  return moiety::bench::run_main(argc, argv,
                                 "Collective operations among ranks on the CPU, threads or "
                                 "processes (mpirun -np N comm_bench).",
                                 moiety::comm::run, moiety::comm::mpi::end_process);
}
