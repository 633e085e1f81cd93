// Gathers and reduces of one bundle among threads. The value is the bytes that a rank receives from
// its peers over the time of the slowest; the ratio is to a copy, by every rank at once with as
// many threads, of as many bytes as the operation reads, the own part included.
#include <array>
#include <cstring>
#include <string>
#include <vector>

#include "bench/harness.h"
#include "bench/ranks.h"
#include "moiety/comm/thread_group.h"
#include "moiety/gtp/transport.h"

namespace moiety::gtp {
namespace {

constexpr int64_t kAlignment = 256;
constexpr int kCopies = 3;  // copies of all data, which an operation takes in turn

struct Settings {
  int64_t rows = 4096, cols = 4096;
  int ranks = 0, repeat = 15;
};

struct Case {
  std::string label;
  TransportKind kind;
  int members;
};

// A byte of a rank's shards that tells its origin.
uint8_t pattern(int rank, int64_t i) { return static_cast<uint8_t>(rank * 37 + i * 7 + i / 251); }

// Runs operation and copy in turn, and prints the row on rank 0.
template <class Operation, class Copy>
void measure(comm::Communicator& world, const Settings& settings, const char* name, const Case& c,
             int64_t received, const Operation& operation, const Copy& copy) {
  std::vector<double> times, copies;
  const auto time_of = [&](const auto& body, int i) {
    world.barrier();
    return bench::milliseconds([&] { body(i % kCopies); });
  };
  for (int i = 0; i < settings.repeat + kCopies; ++i) {
    const double a = time_of(operation, i), b = time_of(copy, i);
    if (i < kCopies) continue;  // pages are touched
    times.push_back(a);
    copies.push_back(b);
  }
  const bench::Timing time = bench::timing(bench::slowest(world, times));
  const bench::Timing yardstick = bench::timing(bench::slowest(world, copies));
  if (world.rank() != 0) return;
  bench::print({.name = name,
                .label = text("G={} threads {} {} x [{}, {}] {}", world.size(), gtp::name(c.kind),
                              c.members, settings.rows / c.members, settings.cols, c.label),
                .value = bench::giga(static_cast<double>(received), time.ms),
                .time = time,
                .against = "copy",
                .ratio = yardstick.ms / time.ms,
                .more = text(R"("threads": {})", world.size() * thread_budget())});
}

// One rank's end of the gathers of a case.
class Gathers {
 public:
  Gathers(comm::Communicator& world, const GatherLayout& layout, TransportKind kind)
      : transport_(make_transport(world, {}, kind)),
        layout_(layout),
        scratch_(layout.scratch_bytes + 1, "scratch", kAlignment) {
    int64_t bytes = 0;
    for (const Plane& plane : layout.planes) bytes += layout.shape.members * room(plane);
    shards_ = transport_->allocate("shards", kCopies * bytes);
    std::vector<SharedBundle> bundles;
    auto* at = shards_.memory.data<uint8_t>();
    for (int b = 0; b < kCopies; ++b) {
      bundles.push_back({.id = b, .name = "weight", .members = {}});
      auto& members = bundles.back().members;
      members.resize(static_cast<size_t>(layout.shape.members));
      for (const Plane& plane : layout.planes) {
        for (auto& arrays : members) {
          for (int64_t i = 0; i < plane.bytes; ++i) at[i] = pattern(world.rank(), i);
          arrays[static_cast<size_t>(plane.array)] = TensorView(at, DType::kUInt8, {plane.bytes});
          at += room(plane);
        }
      }
      slots_.emplace_back(layout.slot_bytes, "slot", kAlignment);
      std::memset(slots_.back().data(), 0xFF, static_cast<size_t>(layout.slot_bytes));
      landings_.emplace_back(layout, slots_.back().view(DType::kUInt8, {layout.slot_bytes}),
                             scratch_.view(DType::kUInt8, {layout.scratch_bytes}));
    }
    transport_->share(bundles);
    transport_->publish(0, Stream());
  }

  void run(int i) { transport_->gather({i, &landings_[i]}, Stream()); }
  void check() {
    run(0);
    for (const Plane& plane : layout_.planes) {
      for (int g = 0; g < layout_.shape.ranks; ++g) {
        const TensorView part = landings_[0].part(plane, g);
        for (int64_t i = 0; i < part.size(0) * plane.bytes; ++i) {
          const int64_t e = i / plane.bytes, at = i % plane.bytes;
          MOIETY_CHECK(part.data<uint8_t>()[e * part.stride(0) + at] == pattern(g, at),
                       "transport bench: byte {} of rank {} is wrong", i, g);
        }
      }
    }
  }

 private:
  static int64_t room(const Plane& plane) {
    return (plane.bytes + kAlignment - 1) / kAlignment * kAlignment;
  }

  std::unique_ptr<Transport> transport_;
  const GatherLayout& layout_;
  SlotArena::Block shards_;
  Buffer scratch_;
  std::vector<Buffer> slots_;
  std::vector<Landing> landings_;
};

void bench_gather(comm::Communicator& world, const Settings& settings, const Case& c,
                  const Codec& codec, bench::Copies& copies) {
  const int G = world.size();
  const GatherLayout layout = gather_layout(
      {codec, settings.rows / c.members / G, settings.cols, G, c.members}, Payload::kRow, kRowView);
  Gathers gathers(world, layout, c.kind);
  gathers.check();
  measure(
      world, settings, "gtp.gather", c, layout.received(), [&](int i) { gathers.run(i); },
      [&](int) { copies.run(layout.received() / (G - 1) * G); });
  world.barrier();
}

void bench_reduce(comm::Communicator& world, const Settings& settings, const Case& c, DType wire,
                  bench::Copies& copies) {
  const int G = world.size();
  const int64_t s = settings.rows / c.members / G;
  const ReduceShape shape{c.members, s, settings.cols, wire, DType::kFloat32};
  const auto transport = make_transport(world, {}, c.kind);
  SharedBundle bundle{.id = 0, .name = "weight", .members = {}};
  bundle.members.resize(static_cast<size_t>(c.members));
  transport->share({bundle});
  const BundleSpec::Transfer transfer = transport->reduce_transfer(shape);
  const SlotArena::Block send = transport->allocate("send", kCopies * transfer.slot);
  Buffer scratch(transfer.scratch + 1);
  std::vector<Tensor> mains;
  for (int e = 0; e < c.members; ++e) {
    mains.emplace_back(DType::kFloat32, std::initializer_list<int64_t>{s, settings.cols});
  }
  std::vector<TensorView> sends;
  for (int b = 0; b < kCopies; ++b) {
    const TensorView x(send.memory.data<uint8_t>() + b * transfer.slot, wire,
                       {c.members, G * s, settings.cols});
    for (int64_t i = 0; i < x.numel(); ++i) {
      const auto v = static_cast<float>(1 + world.rank() + i % 5);
      wire == DType::kBFloat16 ? void(x.data<bf16>()[i] = bf16(v)) : void(x.data<float>()[i] = v);
    }
    sends.push_back(x);
  }
  const auto reduce = [&](int i) {
    transport->reduce({.bundle = 0,
                       .send = sends[i],
                       .scratch = scratch.view(DType::kUInt8, {transfer.scratch}),
                       .main_grads = {mains.begin(), mains.end()},
                       .valid_rows = s,
                       .first = true},
                      Stream());
  };
  reduce(0);
  for (int e = 0; e < c.members; ++e) {
    for (int64_t i = 0; i < s * settings.cols; ++i) {
      const int64_t at = (e * G + world.rank()) * s * settings.cols + i;
      const auto sum = static_cast<float>(G * (G + 1) / 2 + G * (at % 5));
      MOIETY_CHECK(mains[e].data<float>()[i] == sum, "transport bench: sum {} is {}, not {}", i,
                   mains[e].data<float>()[i], sum);
    }
  }
  measure(world, settings, "gtp.reduce", c, transfer.received, reduce,
          [&](int) { copies.run(transfer.slot); });
  world.barrier();
}

void run_cases(comm::Communicator& world, const Settings& settings) {
  const std::pair<const char*, Codec> codecs[] = {
      {"bf16", Codec()},
      {"mxfp8", Codec(QuantSpec::of(Format::kMxfp8))},
      {"nvfp4_tile16", Codec(QuantSpec::of(Format::kNvfp4Tile16))}};
  bench::Copies copies;
  for (const TransportKind kind :
       {TransportKind::kMapped, TransportKind::kAllToAll, TransportKind::kRing}) {
    for (const int members : {1, 8}) {
      for (const auto& [label, codec] : codecs) {
        bench_gather(world, settings, {label, kind, members}, codec, copies);
      }
      bench_reduce(world, settings, {"float32", kind, members}, DType::kFloat32, copies);
      if (kind == TransportKind::kRing) continue;  // does not sum bfloat16 into float32
      bench_reduce(world, settings, {"bfloat16", kind, members}, DType::kBFloat16, copies);
    }
  }
}

void run(bench::Options& options) {
  Settings settings;
  options.number("--ranks", settings.ranks, "threads; without it 2 and 4", 2)
      .number("--rows", settings.rows, "of all members together, a multiple of 256 a rank")
      .number("--cols", settings.cols, "columns")
      .number("--repeat", settings.repeat, "rounds");
  if (!options.parse()) return;
  settings.repeat = std::min(settings.repeat, 8192);  // times of a rank travel in 64 KiB
  for (const int ranks :
       settings.ranks > 0 ? std::vector<int>{settings.ranks} : std::vector<int>{2, 4}) {
    comm::run_thread_ranks(ranks, {},
                           [&](comm::Communicator& world) { run_cases(world, settings); });
  }
}

}  // namespace
}  // namespace moiety::gtp

int main(int argc, char** argv) {
  return moiety::bench::run_main(argc, argv,
                                 "Transports of generalized tensor parallelism among threads: "
                                 "gathers and reduces against copies.",
                                 moiety::gtp::run);
}
