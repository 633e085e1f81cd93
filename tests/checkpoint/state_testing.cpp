#include "tests/checkpoint/state_testing.h"

#include <atomic>
#include <cstring>
#include <fstream>
#include <iterator>
#include <unistd.h>

#include "moiety/base/rng.h"
#include "moiety/checkpoint/box.h"
#include "moiety/optim/state_pieces.h"

namespace moiety::checkpoint {
namespace {

// The pattern that an element holds, cut to its size.
uint64_t pattern_of(const StatePiece& p, int64_t i, int version) {
  const PhiloxBlock block = philox({tensor_id(p.slot + "/" + p.tensor), uint32_t(version)},
                                   {uint32_t(i), uint32_t(i >> 32), 0, 0});
  return uint64_t{block[1]} << 32 | block[0];
}

// element(bytes of it, its index in the logical tensor) for all of a piece.
template <class F>
void for_each_element(const StatePiece& p, F&& element) {
  const BoxRuns runs(whole(p.shape), p.box);
  const int64_t bytes = bits(p.dtype) / 8;
  auto* at = static_cast<std::byte*>(p.data);
  for (int64_t k = 0; k < runs.count(); ++k) {
    for (int64_t i = 0; i < runs.length(); ++i, at += bytes) element(at, runs.outer_offset(k) + i);
  }
}

// The part of [0, n) that belongs to a rank.
std::pair<int64_t, int64_t> share(int64_t n, int rank, int ranks) {
  return {n * rank / ranks, n * (rank + 1) / ranks};
}

std::vector<Box> cut_boxes(const std::vector<int64_t>& shape, Cut cut, int rank, int ranks) {
  const Box all = whole(shape);
  if (cut == Cut::kLast || all.rank == 0 || volume(all) == 0) {
    return rank == ranks - 1 ? std::vector{all} : std::vector<Box>{};
  }
  if (cut == Cut::kFlat) {
    const auto [begin, end] = share(volume(all), rank, ranks);
    return optim::boxes_of_range(shape, begin, end);
  }
  if (cut == Cut::kBlocks && all.rank > 1) {
    std::vector<Box> out;
    for (int i = 0; i < ranks; ++i) {
      Box box = all;
      for (const auto& [d, part] : {std::pair(0, i), {1, (i + rank) % ranks}}) {
        const auto [begin, end] = share(shape[d], part, ranks);
        box.start[d] = begin;
        box.size[d] = end - begin;
      }
      out.push_back(box);
    }
    return out;
  }
  const int d = cut == Cut::kColumns ? all.rank - 1 : 0;
  const auto [begin, end] = share(shape[d], rank, ranks);
  Box box = all;
  box.start[d] = begin;
  box.size[d] = end - begin;
  return {box};
}

}  // namespace

TemporaryDirectory::TemporaryDirectory() {
  // The directory is in memory where possible, since thousands of files are synchronized.
  const std::filesystem::path memory = "/dev/shm";
  const bool in_memory = ::access(memory.c_str(), W_OK) == 0;
  std::string name =
      ((in_memory ? memory : std::filesystem::temp_directory_path()) / "moiety-test-XXXXXX")
          .string();
  path_ = ::mkdtemp(name.data());
}
TemporaryDirectory::~TemporaryDirectory() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

const State& small_state() {
  static const State state = [] {
    State s;
    for (const char* slot : {"weight", "exp_avg", "exp_avg_sq"}) {
      s.push_back({"embed.weight", slot, DType::kFloat32, {7, 8}});
      s.push_back({"layers.0.moe.experts.fc1.weight", slot, DType::kFloat32, {3, 5, 6}});
      s.push_back({"layers.0.attn_norm.weight", slot, DType::kFloat32, {5}});
      s.push_back({"one_element", slot, DType::kFloat32, {1}});
    }
    s.push_back({"scalar", "weight", DType::kFloat32, {}});
    s.push_back({"no_rows", "weight", DType::kFloat32, {0, 4}});
    s.push_back({"one_expert", "weight", DType::kFloat32, {1, 1, 9}});
    s.push_back({"half", "exp_avg", DType::kBFloat16, {6, 3}});
    s.push_back({"counters", "state", DType::kInt64, {3}});
    s.push_back({"bytes", "state", DType::kUInt8, {2, 2, 2, 3}});
    return s;
  }();
  return state;
}

const State& tiny_state() {
  static const State state{{"matrix", "weight", DType::kFloat32, {3, 4}},
                           {"no_rows", "weight", DType::kFloat32, {0, 4}},
                           {"half", "exp_avg", DType::kBFloat16, {5}}};
  return state;
}

void fill(const StateView& view, int version) {
  for (const StatePiece& p : view) {
    for_each_element(p, [&](std::byte* at, int64_t i) {
      const uint64_t word = pattern_of(p, i, version);
      std::memcpy(at, &word, size_t(bits(p.dtype) / 8));
    });
  }
}

int64_t differences(const StateView& view, int version) {
  int64_t count = 0;
  for (const StatePiece& p : view) {
    for_each_element(p, [&](std::byte* at, int64_t i) {
      const uint64_t word = pattern_of(p, i, version);
      count += std::memcmp(at, &word, size_t(bits(p.dtype) / 8)) != 0;
    });
  }
  return count;
}

RankState::RankState(const State& state, Cut cut, int rank, int ranks) {
  for (const LogicalState& s : state) {
    for (const Box& box : cut_boxes(s.shape, cut, rank, ranks)) {
      memory_.emplace_back(byte_size(s.dtype, volume(box)));
      view_.push_back({s.tensor, s.slot, s.dtype, s.shape, box, memory_.back().data()});
    }
  }
}

void RankState::poison() {
  for (const Buffer& b : memory_) std::fill_n(b.data(), b.bytes(), std::byte{0xA5});
}

RunState run_state(int64_t step, int ranks) {
  RunState run;
  run.step = step;
  run.tokens = step * 4096;
  run.seed = 0xFEDCBA9876543210u;
  run.adam_t = step - 1;
  run.layout.ranks = run.layout.dp = run.layout.ep = ranks;
  run.config = R"({"optim.lr":3e-4,"data.train":["a.tok"]})";
  run.state = R"({"sampler":{"next":9007199254740993},"losses":[5.5,0.1]})";
  return run;
}

void on_ranks(int ranks, const std::function<void(int, comm::Bootstrap&)>& body) {
  comm::run_thread_ranks(ranks, {Seconds(30)},
                         [&](comm::Communicator& world) { body(world.rank(), world.bootstrap()); });
}

SaveResult save_state(const State& state, const std::string& directory, Cut cut, int ranks,
                      int64_t step, int version, SaveOptions options, FileSystem& files) {
  SaveResult result;
  on_ranks(ranks, [&](int rank, comm::Bootstrap& bootstrap) {
    RankState own(state, cut, rank, ranks);
    own.fill(version);
    Saver saver(directory, bootstrap, options, files);
    const SaveResult mine = saver.save(own.view(), run_state(step, ranks), Stream());
    if (rank == 0) result = mine;
  });
  return result;
}

int64_t load_state(const State& state, const std::string& path, Cut cut, int ranks, int version,
                   LoadOptions options) {
  std::atomic<int64_t> differences = 0;
  on_ranks(ranks, [&](int rank, comm::Bootstrap& bootstrap) {
    RankState own(state, cut, rank, ranks);
    own.poison();
    load(rank == 0 ? path : "", own.view(), options, bootstrap);
    differences += own.differences(version);
  });
  return differences;
}

SaveResult save_small(const std::string& directory, Cut cut, int ranks, int64_t step, int version,
                      SaveOptions options) {
  return save_state(small_state(), directory, cut, ranks, step, version, options);
}
int64_t load_small(const std::string& path, Cut cut, int ranks, int version, LoadOptions options) {
  return load_state(small_state(), path, cut, ranks, version, options);
}

int version_of(const std::string& path, comm::Bootstrap& bootstrap) {
  RankState state(tiny_state(), Cut::kRows, 0, 1);
  state.poison();
  load(path, state.view(), {}, bootstrap);
  for (int v = 0; v < 4; ++v) {
    if (state.differences(v) == 0) return v;
  }
  throw std::runtime_error("a mixture");
}

SaveOptions small_pieces() {
  SaveOptions options;
  options.piece_bytes = 48;
  return options;
}

std::string read_file(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

void write_file(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary).write(bytes.data(), std::streamsize(bytes.size()));
}

}  // namespace moiety::checkpoint
