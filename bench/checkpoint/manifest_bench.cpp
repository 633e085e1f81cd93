// The manifest of a large model: its size, how long it takes to write, to read and to plan a load
// under another layout. Nothing but the manifest is made.
#include <cstdint>
#include <string>
#include <vector>

#include "bench/harness.h"
#include "moiety/checkpoint/manifest.h"
#include "moiety/checkpoint/reshard.h"

namespace moiety::checkpoint {
namespace {

// The parts of rank r of R are equal shares of the first dimension; for experts they are whole
// experts.
Box share(const std::vector<int64_t>& shape, int64_t r, int64_t ranks) {
  Box box = whole(shape);
  box.start[0] = shape[0] * r / ranks;
  box.size[0] = shape[0] * (r + 1) / ranks - box.start[0];
  return box;
}

struct Tensors {
  std::vector<std::pair<std::string, std::vector<int64_t>>> list;
  int64_t parameters = 0;

  void add(const std::string& name, std::vector<int64_t> shape) {
    parameters += volume(whole(shape));
    list.emplace_back(name, std::move(shape));
  }
};

// A model with the shapes of Qwen3-30B-A3B.
Tensors model() {
  constexpr int64_t kHidden = 2048, kExpert = 768, kExperts = 128;
  Tensors out;
  out.add("embed.weight", {151936, kHidden});
  out.add("head.weight", {151936, kHidden});
  for (int layer = 0; layer < 48; ++layer) {
    const std::string at = text("layers.{}.", layer);
    out.add(at + "attn.q.weight", {4096, kHidden});
    out.add(at + "attn.k.weight", {512, kHidden});
    out.add(at + "attn.v.weight", {512, kHidden});
    out.add(at + "attn.o.weight", {kHidden, 4096});
    for (const char* norm : {"attn.norm.weight", "moe.norm.weight"}) out.add(at + norm, {kHidden});
    out.add(at + "moe.router.weight", {kExperts, kHidden});
    out.add(at + "moe.experts.fc1.weight", {kExperts, 2 * kExpert, kHidden});
    out.add(at + "moe.experts.fc2.weight", {kExperts, kHidden, kExpert});
  }
  return out;
}

constexpr const char* kSlots[] = {"weight", "exp_avg", "exp_avg_sq"};

Manifest saved_by(const Tensors& tensors, int ranks) {
  Manifest m;
  m.id = std::string(32, 'a');
  m.run.layout.ranks = m.run.layout.dp = ranks;
  for (int r = 0; r < ranks; ++r) m.files.push_back({rank_file_name(r, ranks), 0, 0});
  for (const auto& [name, shape] : tensors.list) {
    for (const char* slot_name : kSlots) {
      SlotEntry& slot = slot_of(m, name, slot_name, shape, DType::kFloat32);
      for (int r = 0; r < ranks; ++r) {
        const Box box = share(shape, r, ranks);
        FileEntry& file = m.files[size_t(r)];
        const auto bytes = uint64_t(byte_size(DType::kFloat32, volume(box)));
        slot.pieces.push_back({r, box, file.bytes, file.bytes + bytes, 0x12345678});
        file.bytes += bytes;
      }
    }
  }
  return m;
}

StateView needs_of(const Tensors& tensors, int rank, int ranks) {
  StateView needs;
  for (const auto& [name, shape] : tensors.list) {
    for (const char* slot : kSlots) {
      needs.push_back({name, slot, DType::kFloat32, shape, share(shape, rank, ranks), nullptr});
    }
  }
  return needs;
}

void print(const char* name, const std::string& label, double value, const char* unit, double limit,
           const bench::Timing& time) {
  bench::print({.name = name,
                .label = label,
                .value = value,
                .unit = unit,
                .time = time,
                .against = text("at most {} {}", limit, unit),
                .ratio = limit / value,
                .target = 1});
}

void run(bench::Options& options) {
  int saved = 64, loaded = 48;
  options.number("--ranks", saved, "that have saved, in equal shares")
      .number("--load-ranks", loaded, "that load");
  if (!options.parse()) return;
  const Tensors tensors = model();
  const Manifest m = saved_by(tensors, saved);
  const std::string label = text("{:.1f}B parameters with moments, {} ranks to {}",
                                 1e-9 * double(tensors.parameters), saved, loaded);
  const std::string json = encode_manifest(m);
  const auto seconds = [&](const char* name, const auto& body) {
    const bench::Timing t = bench::measure([&](int64_t) { body(); });
    print(name, label, 1e-3 * t.ms, "s", 2, t);
  };
  print("manifest.size", label, double(json.size()) / (1 << 20), "MiB", 64, {});
  seconds("manifest.encode", [&] { encode_manifest(m); });
  seconds("manifest.parse", [&] { parse_manifest(json); });
  const StateView needs = needs_of(tensors, loaded / 2, loaded);
  seconds("checkpoint.plan_reshard", [&] { plan_reshard(m, needs); });
}

}  // namespace
}  // namespace moiety::checkpoint

int main(int argc, char** argv) {
  return moiety::bench::run_main(
      argc, argv, "The manifest of a 30B model: size, and times to encode, to parse and to plan.",
      moiety::checkpoint::run);
}
