// Collective operations among CPU ranks: threads of this process, or processes of mpirun. Prints
// rows (design.md, Measuring). The value is the bytes of the operation's larger tensor on one rank
// over its time, the slowest rank's; the ratio is to a copy of as many bytes by every rank at once.
//
//   comm_bench [--ranks N] [--kib N] [--repeat N]
//   mpirun -np N comm_bench [--kib N] [--repeat N]
//
// Without --kib, a table of sizes. Without --ranks or mpirun, 2 and 4 ranks.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "moiety/base/buffer.h"
#include "moiety/base/error.h"
#include "moiety/base/rng.h"
#include "moiety/comm/collective.h"
#include "moiety/comm/mpi/mpi_group.h"
#include "moiety/comm/thread/thread_group.h"

namespace moiety::comm {
namespace {

constexpr int64_t kRotatedBytes = int64_t{64} << 20;  // tensors of a case, past the caches
constexpr int64_t kMaxCopies = 64;

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
        copies_(std::clamp<int64_t>(kRotatedBytes / bytes, 2, kMaxCopies)),
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
// The yardstick comes first.
constexpr Operation kOperations[] = {{"copy", &Rank::copy},
                                     {"comm.all_reduce", &Rank::all_reduce},
                                     {"comm.reduce_scatter", &Rank::reduce_scatter},
                                     {"comm.all_gather", &Rank::all_gather},
                                     {"comm.all_to_all", &Rank::all_to_all}};
constexpr size_t kCount = std::size(kOperations);

// Milliseconds of each repetition, the slowest rank's, sorted.
std::vector<double> slowest(Communicator& comm, const std::vector<double>& mine) {
  std::vector<double> out(mine.size());
  for (const std::string& bytes :
       comm.bootstrap().all_gather({reinterpret_cast<const char*>(mine.data()), 8 * mine.size()})) {
    for (size_t i = 0; i < out.size(); ++i) {
      double ms = 0;
      std::memcpy(&ms, bytes.data() + 8 * i, 8);
      out[i] = std::max(out[i], ms);
    }
  }
  std::sort(out.begin(), out.end());
  return out;
}

double time_ms(Communicator& comm, Rank& rank, const Operation& operation, int64_t i) {
  comm.barrier();
  const auto start = std::chrono::steady_clock::now();
  (rank.*operation.run)(i);
  const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - start;
  return took.count();
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
      const std::vector<double> ms = slowest(comm, times[op]);
      const double median = ms[ms.size() / 2];
      const double spread = (ms[ms.size() * 3 / 4] - ms[ms.size() / 4]) / median;
      if (op == 0) copy = median;
      if (comm.rank() != 0) continue;
      std::string more;
      if (op > 0) more = text(", \"ratio\": {:.3f}, \"against\": \"copy\"", copy / median);
      if (spread > 0.05) more += text(", \"spread\": {:.2f}", spread);
      std::puts(text("{{\"name\": \"{}\", \"case\": \"R={} {} {} KiB float32\", \"device\": "
                     "\"cpu\", \"value\": {:.3f}, \"unit\": \"GB/s\", \"ms\": {:.4f}{}}}",
                     kOperations[op].name, comm.size(), kind, kib,
                     double(rank.bytes()) / median / 1e6, median, more)
                    .c_str());
    }
  }
}

Settings parse(int argc, char** argv) {
  Settings out;
  for (int i = 1; i < argc; i += 2) {
    const std::string key = argv[i];
    MOIETY_CHECK(i + 1 < argc, "{} needs a value", key);
    const int number = std::atoi(argv[i + 1]);
    MOIETY_CHECK(number > 0, "{} {} is not a positive number", key, argv[i + 1]);
    if (key == "--ranks") {
      out.ranks = number;
    } else if (key == "--kib") {
      out.kib = {number};
    } else if (key == "--repeat") {
      out.repeat = std::min(number, 8192);  // times of a rank travel in 64 KiB
    } else {
      MOIETY_CHECK(false, "unknown option {}", key);
    }
  }
  return out;
}

void run(const Settings& settings) {
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
  try {
    moiety::comm::run(moiety::comm::parse(argc, argv));
  } catch (const moiety::Error& e) {
    std::fprintf(stderr, "comm_bench: %s\n", e.what());
    moiety::comm::mpi::end_process(2);
  }
  return 0;
}
