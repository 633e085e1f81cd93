// Checkpoints against the disk and against memory. Prints rows (bench/README.md):
//
//   checkpoint.save      a save that training waits for, against a plain sequential write of the
//                        same bytes, one file a rank, each written and synchronized by its rank
//   checkpoint.write     the same in the background, from the copy to COMMIT
//   checkpoint.copy      the copy of the state that a background save begins with, against memcpy
//   checkpoint.load      a load under another layout, digests included, against plain reads
//   crc32c, digest.*     of one core
//
// Files are dropped from the system's cache before they are read.
#include <chrono>
#include <cstring>
#include <ctime>
#include <fcntl.h>
#include <filesystem>
#include <functional>
#include <string>
#include <thread>
#include <unistd.h>
#include <vector>

#include "bench/harness.h"
#include "moiety/base/crc32c.h"
#include "moiety/base/parallel.h"
#include "moiety/checkpoint/digest.h"
#include "moiety/checkpoint/loader.h"
#include "moiety/checkpoint/retention.h"
#include "moiety/checkpoint/saver.h"
#include "moiety/comm/thread_group.h"

namespace moiety::checkpoint {
namespace {

using bench::milliseconds;

struct Settings {
  std::string directory = ".";
  int64_t mib = 512;
  int ranks = 2;
  int repeat = 5;
  int verify = 1;
};

// CPU time of the calling thread alone: a core's speed, whatever else runs.
double cpu_milliseconds(const std::function<void()>& body) {
  const auto now = [] {
    timespec t{};
    ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return 1e3 * double(t.tv_sec) + 1e-6 * double(t.tv_nsec);
  };
  const double start = now();
  body();
  return now() - start;
}

// Master and moments of a model of 24 matrices, divided evenly over ranks as flat ranges of rows.
constexpr int kTensors = 24;
const char* const kSlots[] = {"weight", "exp_avg", "exp_avg_sq"};

class RankMemory {
 public:
  RankMemory(int64_t mib, int rank, int ranks)
      : rows_(mib * (1 << 20) / (kTensors * 3 * 4 * kColumns)),
        first_(rows_ * rank / ranks),
        count_(rows_ * (rank + 1) / ranks - first_) {
    for (int t = 0; t < kTensors; ++t) {
      for (const char* slot : kSlots) {
        memory_.emplace_back(count_ * kColumns * 4, "state");
        StatePiece piece{text("layers.{}.weight", t), slot, DType::kFloat32,
                         {rows_, kColumns},           {},   memory_.back().data()};
        piece.box.rank = 2;
        piece.box.start = {first_, 0};
        piece.box.size = {count_, kColumns};
        view_.push_back(piece);
      }
    }
  }

  void fill() {
    for (const StatePiece& piece : view_) {
      auto* out = static_cast<uint32_t*>(piece.data);
      parallel_for(count_ * kColumns / 4, 1 << 14, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          const PhiloxBlock w = philox({tensor_id(piece.tensor), tensor_id(piece.slot)},
                                       {uint32_t(i), uint32_t(first_), 0, 0});
          std::memcpy(out + 4 * i, w.data(), 16);
        }
      });
    }
  }
  void poison() {
    for (const Buffer& b : memory_) std::memset(b.data(), 0xFF, size_t(b.bytes()));
  }

  const StateView& view() const { return view_; }
  int64_t bytes() const { return count_ * kColumns * 4 * kTensors * 3; }

 private:
  static constexpr int64_t kColumns = 1024;
  int64_t rows_, first_, count_;
  std::vector<Buffer> memory_;
  StateView view_;
};

void write_plainly(const std::string& path, const StateView& view) {
  File file(posix(), path, O_WRONLY | O_CREAT | O_TRUNC);
  uint64_t at = 0;
  for (const StatePiece& p : view) {
    const auto bytes = static_cast<size_t>(byte_size(p.dtype, volume(p.box)));
    file.write(at, {static_cast<const char*>(p.data), bytes});
    at += bytes;
  }
  file.sync_data();
  file.close();
}

void read_plainly(const std::string& path, std::span<std::byte> memory) {
  File file(posix(), path, O_RDONLY);
  uint64_t at = 0;
  while (const size_t n = file.read_some(at, memory)) at += n;
}

void drop_from_cache(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  ::posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
  ::close(fd);
}

void drop_directory(const std::string& path) {
  for (const std::string& name : list(posix(), path)) drop_from_cache(path + "/" + name);
}

void print(const char* name, const std::string& shape, double bytes, const std::vector<double>& ms,
           const std::vector<double>& against_ms = {}, const char* against = "",
           double target = 0) {
  const bench::Timing time = bench::timing(ms);
  bench::Row row{name, shape, bench::giga(bytes, time.ms), "GB/s", time};
  if (!against_ms.empty()) {
    row.against = against;
    row.ratio = bench::timing(against_ms).ms / time.ms;
    row.target = target;
  }
  bench::print(row);
}

RunState run_state(int ranks) {
  RunState run;
  run.step = 1;
  run.layout.ranks = run.layout.dp = ranks;
  return run;
}

// Times of rank 0, from one barrier to the next.
struct Times {
  std::vector<double> plain_write, save, memory, copy, write, plain_read, load;
  int64_t bytes = 0;
};

void measure_rank(const Settings& s, comm::Communicator& world, Times& times) {
  const int rank = world.rank(), ranks = world.size();
  RankMemory state(s.mib, rank, ranks), other(s.mib, ranks - 1 - rank, ranks);
  state.fill();
  SaveOptions options;
  options.verify = s.verify != 0;
  Saver saver(s.directory + "/checkpoints", world.bootstrap(), options);
  saver.reserve(state.view());
  const std::string plain = text("{}/plain-{}", s.directory, rank);
  Buffer to(state.bytes(), "copy"), chunk(16 << 20, "reads");
  // A disk that has just taken a burst is slower for a while.
  const auto settle = [&] {
    std::this_thread::sleep_for(std::chrono::seconds(1));
    world.barrier();
  };
  const auto timed = [&](std::vector<double>& into, const std::function<void()>& body) {
    settle();
    const double ms = milliseconds([&] {
      body();
      world.barrier();
    });
    if (rank == 0) into.push_back(ms);
  };
  int64_t bytes = state.bytes();
  world.all_reduce(TensorView(&bytes, DType::kInt64, {1}), comm::ReduceOp::kSum, Stream()).wait();
  if (rank == 0) times.bytes = bytes;
  for (int i = 0; i < s.repeat; ++i) {
    timed(times.plain_write, [&] { write_plainly(plain, state.view()); });
    std::string path;
    timed(times.save, [&] { path = saver.save(state.view(), run_state(ranks), Stream()).path; });
    timed(times.memory, [&] {
      int64_t at = 0;
      for (const StatePiece& p : state.view()) {
        const int64_t n = byte_size(p.dtype, volume(p.box));
        std::memcpy(to.data() + at, p.data, size_t(n));
        at += n;
      }
    });
    settle();
    saver.start(state.view(), run_state(ranks), Stream());
    const SaveResult result = *saver.wait();
    if (rank == 0) {
      times.copy.push_back(1e3 * result.blocked_seconds);
      times.write.push_back(1e3 * result.seconds);
    }
    drop_from_cache(plain);
    timed(times.plain_read, [&] { read_plainly(plain, {chunk.data(), size_t(chunk.bytes())}); });
    if (rank == 0) drop_directory(path);
    other.poison();
    timed(times.load, [&] { load(path, other.view(), {}, world.bootstrap()); });
  }
  if (rank == 0) std::filesystem::remove_all(s.directory + "/checkpoints");
  std::filesystem::remove(plain);
}

void measure_disk(const Settings& s) {
  Times t;
  comm::run_thread_ranks(s.ranks, {Seconds(600)},
                         [&](comm::Communicator& world) { measure_rank(s, world, t); });
  const std::string shape = text("{} MiB, R={}, verify {}", s.mib, s.ranks, s.verify);
  const auto bytes = static_cast<double>(t.bytes);
  print("disk.write", shape, bytes, t.plain_write);
  print("checkpoint.save", shape, bytes, t.save, t.plain_write, "plain write", 0.85);
  print("checkpoint.write", shape, bytes, t.write, t.plain_write, "plain write", 0.85);
  print("checkpoint.copy", shape, bytes, t.copy, t.memory, "memcpy", 0.8);
  print("disk.read", shape, bytes, t.plain_read);
  print("checkpoint.load", shape, bytes, t.load, t.plain_read, "plain read", 0.7);
}

// One core, on memory beyond its caches and on a piece that lies in them.
void measure_checksums(int repeat) {
  set_thread_budget(1);
  for (const int64_t bytes : {int64_t{64} << 10, int64_t{64} << 20}) {
    Buffer data(bytes, "checksummed");
    for (int64_t i = 0; i < bytes; ++i) data.data()[i] = std::byte(i * 131 >> 3);
    const int64_t rounds = std::max<int64_t>(1, (int64_t{64} << 20) / bytes);
    const std::string shape = text("{} KiB", bytes >> 10);
    volatile uint64_t sink = 0;
    const auto rate = [&](const char* name, double target, const std::function<uint64_t()>& body) {
      std::vector<double> ms;
      for (int i = 0; i < repeat; ++i) {
        ms.push_back(cpu_milliseconds([&] {
          for (int64_t r = 0; r < rounds; ++r) sink = sink + body();
        }));
      }
      print(name, shape, double(bytes * rounds), ms,
            target > 0 ? std::vector<double>{double(bytes * rounds) / target / 1e6}
                       : std::vector<double>{},
            "10 GB/s", 1);
    };
    rate("crc32c", 10, [&] { return crc32c(data.data(), size_t(bytes)); });
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
      const std::vector<int64_t> shape_of{bytes / (bits(dtype) / 8)};
      rate(dtype == DType::kFloat32 ? "digest.fp32" : "digest.bf16", 0,
           [&] { return digest(data.data(), dtype, whole(shape_of), shape_of); });
    }
  }
}

void run(bench::Options& options) {
  Settings s;
  options.word("--directory", s.directory, "on the disk that is meant")
      .number("--mib", s.mib, "of state; 0 leaves the disk out", int64_t{0})
      .number("--ranks", s.ranks, "that save and load, threads")
      .number("--repeat", s.repeat, "rounds")
      .number("--verify", s.verify, "0: saves do not read what they wrote", 0);
  if (!options.parse()) return;
  s.directory =
      (std::filesystem::path(s.directory) / text("checkpoint-bench-{}", ::getpid())).string();
  std::filesystem::create_directories(s.directory);
  measure_checksums(s.repeat);
  if (s.mib > 0) measure_disk(s);
  std::filesystem::remove_all(s.directory);
}

}  // namespace
}  // namespace moiety::checkpoint

int main(int argc, char** argv) {
  return moiety::bench::run_main(argc, argv,
                                 "Saves and loads of checkpoints against plain files, their "
                                 "copies against memcpy, checksums of one core.",
                                 moiety::checkpoint::run);
}
