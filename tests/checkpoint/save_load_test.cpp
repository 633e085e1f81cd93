#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <set>

#include <gtest/gtest.h>

#include "moiety/base/crc32c.h"
#include "moiety/checkpoint/checkpoint_error.h"
#include "moiety/checkpoint/reshard.h"
#include "moiety/checkpoint/retention.h"
#include "tests/checkpoint/state_testing.h"

namespace moiety::checkpoint {
namespace {

struct Layout {
  Cut cut;
  int ranks;
};

const Layout kLayouts[] = {
    {Cut::kRows, 1},    {Cut::kRows, 2},   {Cut::kColumns, 2}, {Cut::kFlat, 3}, {Cut::kRows, 4},
    {Cut::kColumns, 3}, {Cut::kFlat, 4},   {Cut::kLast, 2},  // rank 0 owns nothing
    {Cut::kFlat, 1},    {Cut::kBlocks, 2}, {Cut::kBlocks, 4},  {Cut::kFlat, 2},
};

// Digests by slot and tensor.
std::map<std::string, uint64_t> digests(const Manifest& m) {
  std::map<std::string, uint64_t> out;
  for (const auto& [name, tensor] : m.tensors) {
    for (const auto& [slot, entry] : tensor.slots) out[slot + "/" + name] = entry.digest;
  }
  return out;
}

TEST(SaveLoad, EveryLayoutIntoEveryOther) {
  const TemporaryDirectory directory;
  std::map<std::string, uint64_t> first;
  for (const Layout& from : kLayouts) {
    const SaveResult saved =
        save_small(directory / "c", from.cut, from.ranks, 5, 1, small_pieces());
    const Manifest m = read_manifest(saved.path);
    if (first.empty()) first = digests(m);
    EXPECT_EQ(digests(m), first);
    EXPECT_EQ(encode_manifest(rebuild_manifest(saved.path)), encode_manifest(m));
    for (const Layout& to : kLayouts) {
      EXPECT_EQ(load_small(saved.path, to.cut, to.ranks, 1), 0)
          << int(from.cut) << " x " << from.ranks << " into " << int(to.cut) << " x " << to.ranks;
    }
  }
}

TEST(SaveLoad, FilesAreAsTheFormatSays) {
  const TemporaryDirectory directory;
  const SaveResult saved = save_small(directory / "c", Cut::kFlat, 3, 1000, 1, small_pieces());
  EXPECT_EQ(saved.path, directory / "c/step-00001000");
  EXPECT_EQ(read_file(directory / "c/latest"), "step-00001000\n");
  std::set<std::string> names;
  uint64_t bytes = 0;
  for (const std::string& name : list(posix(), saved.path)) names.insert(name);
  EXPECT_EQ(names, (std::set<std::string>{
                       "COMMIT", "manifest.json", "rank-00000-of-00003.safetensors",
                       "rank-00001-of-00003.safetensors", "rank-00002-of-00003.safetensors"}));
  const std::string json = read_file(saved.path + "/manifest.json");
  EXPECT_EQ(read_file(saved.path + "/COMMIT"),
            text("moiety-checkpoint 1 {} {} {:08x}\n", saved.id, json.size(), crc32c(json)));

  const Manifest m = read_manifest(saved.path);
  EXPECT_EQ(m.run, run_state(1000, 3));
  for (int rank = 0; rank < 3; ++rank) {
    const auto reader = SafetensorsReader::open(saved.path + "/" + rank_file_name(rank, 3));
    bytes += reader.bytes();
    EXPECT_EQ(crc32c(read_file(reader.path())), m.files[rank].crc32c);
    EXPECT_EQ(reader.metadata().at("rank"), text("{}", rank));
    int previous = 64;
    for (const Entry& e : reader.entries()) {
      EXPECT_LE(e.end - e.begin, 48u) << e.name;
      EXPECT_LE(e.type->bits, previous) << e.name;
      EXPECT_EQ(e.begin % uint64_t(e.type->bits / 8), 0u);
      previous = e.type->bits;
    }
  }
  EXPECT_EQ(saved.bytes, bytes);
}

TEST(SaveLoad, BigPiecesAreCutAlongTheFirstDimensionWithMoreThanOneIndex) {
  const TemporaryDirectory directory;
  SaveOptions options;
  options.piece_bytes =
      100;  // 25 floats: four rows of [1, 9, 6], and one of them is not in a piece
  const State state{{"t", "weight", DType::kFloat32, {2, 9, 6}}};
  on_ranks(1, [&](int, comm::Bootstrap& bootstrap) {
    RankState mine(state, Cut::kRows, 0, 1);
    Saver(directory / "c", bootstrap, options).save(mine.view(), run_state(1, 1), Stream());
  });
  const Manifest m = read_manifest(directory / "c/step-00000001");
  std::vector<std::string> boxes;
  for (const Piece& p : m.tensors.at("t").slots.at("weight").pieces)
    boxes.push_back(describe(p.box));
  EXPECT_EQ(boxes, (std::vector<std::string>{"[0:1,0:4,0:6]", "[0:1,4:8,0:6]", "[0:1,8:9,0:6]",
                                             "[1:2,0:4,0:6]", "[1:2,4:8,0:6]", "[1:2,8:9,0:6]"}));
}

TEST(SaveLoad, SameStepIsReplacedAndOldOnesArePruned) {
  const TemporaryDirectory directory;
  SaveOptions options;
  options.keep.last = 2;
  options.keep.every = 4;
  for (const int64_t step : {1, 2, 3, 4, 5, 6, 7, 7}) {
    save_small(directory / "c", Cut::kRows, 2, step, int(step), options);
  }
  save_small(directory / "c", Cut::kRows, 2, 7, 70, options);
  EXPECT_EQ(
      list(posix(), directory / "c"),
      (std::vector<std::string>{"latest", "step-00000004", "step-00000006", "step-00000007"}));
  EXPECT_EQ(load_small(directory / "c/step-00000007", Cut::kFlat, 1, 70), 0);
  // A save of an older step does not remove itself.
  save_small(directory / "c", Cut::kRows, 1, 1, 1, options);
  EXPECT_TRUE(std::filesystem::exists(directory / "c/step-00000001"));
}

// One rank whose view is not the whole state.
std::string load_error(const std::string& path, const State& state, LoadOptions options = {},
                       int ranks = 2) {
  std::vector<std::string> errors(static_cast<size_t>(ranks));
  on_ranks(ranks, [&](int rank, comm::Bootstrap& bootstrap) {
    RankState mine(state, Cut::kRows, rank, ranks);
    mine.poison();
    errors[size_t(rank)] = error_of([&] { load(path, mine.view(), options, bootstrap); });
    if (errors[size_t(rank)] != kNoError) {
      RankState poisoned(state, Cut::kRows, rank, ranks);
      poisoned.poison();
      for (size_t i = 0; i < mine.view().size(); ++i) {  // nothing was touched
        const StatePiece& p = mine.view()[i];
        const auto* bytes = static_cast<const std::byte*>(p.data);
        EXPECT_TRUE(std::equal(bytes, bytes + byte_size(p.dtype, volume(p.box)),
                               static_cast<const std::byte*>(poisoned.view()[i].data)));
      }
    }
  });
  for (const std::string& e : errors) EXPECT_EQ(e, errors[0]);
  return errors[0];
}

TEST(Load, ListsWhatDoesNotFit) {
  const TemporaryDirectory directory;
  const std::string path = save_small(directory / "c", Cut::kRows, 2, 5, 1).path;
  State state = small_state();
  EXPECT_EQ(load_error(path, state), kNoError);
  EXPECT_EQ(state[0].tensor, "embed.weight");
  state[0].tensor = "embedding.weight";
  state[1].shape = {3, 6, 5};
  state[2].dtype = DType::kInt32;
  const std::string error = load_error(path, state);
  EXPECT_NE(error.find("1 missing: weight/embedding.weight"), std::string::npos) << error;
  EXPECT_NE(error.find("unexpected: weight/embed.weight"), std::string::npos) << error;
  EXPECT_NE(error.find("1 of-another-shape: weight/layers.0.moe.experts.fc1.weight [3,5,6] (needed "
                       "[3,6,5])"),
            std::string::npos)
      << error;
  EXPECT_NE(
      error.find("1 of-another-type: weight/layers.0.attn_norm.weight float32 (needed int32)"),
      std::string::npos)
      << error;
}

TEST(Load, LongListsAreCountedAndCut) {
  const TemporaryDirectory directory;
  const std::string path = save_small(directory / "c", Cut::kRows, 1, 5, 1).path;
  State state = small_state();
  for (int i = 0; i < 1000; ++i) {
    state.push_back({text("extra.{:04}", i), "weight", DType::kFloat32, {2}});
  }
  const std::string error = load_error(path, state);
  EXPECT_NE(error.find("1000 missing: weight/extra.0000, "), std::string::npos) << error;
  EXPECT_NE(error.find("weight/extra.0019, ..."), std::string::npos) << error;
  EXPECT_EQ(error.find("weight/extra.0020"), std::string::npos) << error;
}

TEST(Load, WeightsOnly) {
  const TemporaryDirectory directory;
  const std::string path = save_small(directory / "c", Cut::kFlat, 3, 5, 1).path;
  State weights;
  for (const LogicalState& s : small_state()) {
    if (s.slot == "weight") weights.push_back(s);
  }
  EXPECT_NE(load_error(path, weights), kNoError);
  LoadOptions options;
  options.may_leave = is_no_weight;
  EXPECT_EQ(load_error(path, weights, options), kNoError);
  weights.pop_back();
  EXPECT_NE(load_error(path, weights, options).find("1 unexpected"), std::string::npos);
}

TEST(Load, RanksMayHoldCopiesIfAllAreCopied) {
  const TemporaryDirectory directory;
  const std::string path = save_small(directory / "c", Cut::kFlat, 2, 5, 1).path;
  // Every rank loads everything, as for evaluation.
  on_ranks(3, [&](int, comm::Bootstrap& bootstrap) {
    RankState all(small_state(), Cut::kRows, 0, 1);
    all.poison();
    const RunState run = load(path, all.view(), {}, bootstrap);
    EXPECT_EQ(all.differences(1), 0);
    EXPECT_EQ(run, run_state(5, 2));
  });
  // Rank 1 asks for its half, rank 0 for everything.
  on_ranks(2, [&](int rank, comm::Bootstrap& bootstrap) {
    RankState mine(small_state(), Cut::kRows, rank, rank + 1);
    EXPECT_NE(
        error_of([&] { load(path, mine.view(), {}, bootstrap); }).find("not-asked-for-evenly"),
        std::string::npos);
  });
}

// The error of a load of the small state.
std::string load_error_text(const std::string& path) {
  return error_of([&] { load_small(path, Cut::kRows, 2, 1); });
}

// Writes COMMIT anew for a changed manifest.
void rewrite_manifest(const std::string& path, const Manifest& m) {
  const std::string json = encode_manifest(m);
  write_file(path + "/manifest.json", json);
  write_file(path + "/COMMIT", encode_commit(m, json));
}

TEST(Load, DigestsProveThatNothingWasSwapped) {
  const TemporaryDirectory directory;
  const std::string path = save_small(directory / "c", Cut::kRows, 2, 5, 1).path;
  Manifest m = read_manifest(path);
  m.tensors["embed.weight"].slots["exp_avg"].digest ^= 1;
  rewrite_manifest(path, m);
  const std::string error = load_error_text(path);
  EXPECT_NE(error.find("exp_avg/embed.weight has digest"), std::string::npos) << error;
  LoadOptions options;
  options.digests = false;
  EXPECT_EQ(load_small(path, Cut::kRows, 2, 1, options), 0);
}

TEST(Load, HeadersMustSayWhatTheManifestSays) {
  const TemporaryDirectory directory;
  const std::string path = save_small(directory / "c", Cut::kRows, 2, 5, 1).path;
  const Manifest good = read_manifest(path);
  const auto expect = [&](Manifest m, const char* what) {
    rewrite_manifest(path, m);
    EXPECT_NE(load_error_text(path).find(what), std::string::npos) << load_error_text(path);
  };
  Manifest m = good;
  auto& slots = m.tensors["embed.weight"].slots;
  std::swap(slots["weight"].pieces[0].begin, slots["exp_avg"].pieces[0].begin);
  std::swap(slots["weight"].pieces[0].end, slots["exp_avg"].pieces[0].end);
  expect(m, "where the manifest has it");
  m = good;
  m.run.tokens += 1;
  expect(m, "the metadata is not that");
  m = good;
  std::swap(m.files[0], m.files[1]);
  expect(m, "rank-0000");
  m = good;
  m.tensors.erase("scalar");
  rewrite_manifest(path, m);
  State others = small_state();
  std::erase_if(others, [](const LogicalState& s) { return s.tensor == "scalar"; });
  const std::string error = load_error(path, others);
  EXPECT_NE(error.find("\"weight/scalar[]\" is not in the manifest"), std::string::npos) << error;
}

TEST(Manifest, HostileTexts) {
  const TemporaryDirectory directory;
  const std::string path = save_small(directory / "c", Cut::kRows, 2, 5, 1).path;
  const std::string good = read_file(path + "/manifest.json");
  ASSERT_EQ(parse_manifest(good), read_manifest(path));
  const struct {
    const char *from, *to, *expected;
  } kCases[] = {
      {"\"moiety-checkpoint\"", "\"other-checkpoint\"", "no checkpoint of moiety"},
      {"\"version\":1", "\"version\":2", "version 2"},
      {"\"rank-00001", "\"../rank-00001", "not a plain file name"},
      {"\"rank-00001", "\"/rank-00001", "not a plain file name"},
      {"\"rank-00001-of-00002.safetensors", "\"..", "not a plain file name"},
      {"\"rank-00001", "\"rank-00000", "listed twice"},
      {"\"dtype\":\"F32\"", "\"dtype\":\"F31\"", "not supported"},
      {"\"dtype\":\"F32\"", "\"dtype\":\"F4\"", "not supported"},
      {"[[0,[0,0],[3,8]", "[[2,[0,0],[3,8]", "file 2 of 2"},
      {"[[0,[0,0],[3,8]", "[[0,[0,0],[8,8]", "outside of"},
      {"[[0,[0,0],[3,8]", "[[0,[0,0,0],[3,8]", "dimensions"},
      {"[[0,[0,0],[3,8]", "[[0,[0,0],[2,8]", "do not hold"},
      {"\"shape\":[7,8]", "\"shape\":[7,-8]", "negative"},
      {"\"shape\":[7,8]", "\"shape\":[7,1,1,1,8]", "more than 4 dimensions"},
      {"\"shape\":[7,8]", "\"shape\":[7,1152921504606846976]", "2^59"},
      {"\"step\":5", "\"step\":5,\"step\":6", "duplicate key"},
      {"\"dp\":2", "\"dp\":0", "dp is 0"},
      {"\"exp_avg\":", "\"exp/avg\":", "no name of a slot"},
  };
  for (const auto& c : kCases) {
    std::string changed = good;
    const size_t at = changed.find(c.from);
    ASSERT_NE(at, changed.npos) << c.from;
    changed.replace(at, std::strlen(c.from), c.to);
    const std::string error = error_of([&] { parse_manifest(changed); });
    EXPECT_NE(error.find(c.expected), std::string::npos) << c.to << ": " << error;
  }
  std::string unknown = good;
  unknown.insert(1, "\"a new field\":[{}],");
  EXPECT_EQ(parse_manifest(unknown), parse_manifest(good));
}

TEST(Manifest, PiecesMustTile) {
  const TemporaryDirectory directory;
  const std::string path = save_small(directory / "c", Cut::kRows, 2, 5, 1).path;
  Manifest m = read_manifest(path);
  auto& pieces = m.tensors["embed.weight"].slots["weight"].pieces;
  pieces.push_back(pieces[0]);
  EXPECT_NE(error_of([&] { check_tiling(m); })
                .find("weight/embed.weight of shape [7,8]: [0:3,0:8] is "
                      "covered twice"),
            std::string::npos);
  pieces.erase(pieces.begin());
  pieces.erase(pieces.begin());
  EXPECT_NE(error_of([&] { check_tiling(m); }).find("[3:7,0:8] is not covered"), std::string::npos);
}

TEST(Reshard, NamesWhatIsNotCovered) {
  Manifest m;
  m.files = {{"f", 1000, 0}};
  m.tensors["t"].shape = {4, 4};
  auto& slot = m.tensors["t"].slots["weight"];
  Box half = whole(std::vector<int64_t>{4, 4});
  half.size[1] = 2;
  slot.pieces = {{0, half, 64, 96, 0}};
  StatePiece need{"t", "weight", DType::kFloat32, {4, 4}, half, nullptr};
  need.box.size[0] = 2;
  const auto plan = plan_reshard(m, {need});
  ASSERT_EQ(plan.size(), 1u);
  EXPECT_EQ(plan[0].region, need.box);
  EXPECT_EQ(plan[0].piece, slot.pieces[0]);
  need.box.size[1] = 3;
  EXPECT_EQ(error_of([&] { plan_reshard(m, {need}); }),
            "checkpoint: weight/t: [0:2,2:3] is not covered");
  slot.pieces.push_back(slot.pieces[0]);
  EXPECT_NE(error_of([&] { plan_reshard(m, {need}); }).find("is covered twice"), std::string::npos);
  need.box.size[1] = 9;
  EXPECT_NE(error_of([&] { plan_reshard(m, {need}); }).find("outside of shape [4,4]"),
            std::string::npos);
  need.slot = "exp_avg";
  EXPECT_NE(error_of([&] { plan_reshard(m, {need}); }).find("exp_avg/t is not in it"),
            std::string::npos);
}

// Reads every piece with the Python package and compares it with the bytes that the manifest points
// to.
constexpr const char* kPython = R"py(
import json
import pathlib
import struct
import sys

import numpy
from safetensors import safe_open

directory = pathlib.Path(sys.argv[1])
manifest = json.loads((directory / "manifest.json").read_text())
types = {"F32": numpy.float32, "I64": numpy.int64, "U8": numpy.uint8}
read = 0
for name, tensor in manifest["tensors"].items():
    for slot, entry in tensor["slots"].items():
        if entry["dtype"] not in types:
            continue  # numpy has no bfloat16
        for file, start, size, begin, end, _ in entry["pieces"]:
            path = directory / manifest["files"][file]["name"]
            box = ",".join(f"{a}:{a + n}/{e}" for a, n, e in zip(start, size, tensor["shape"]))
            raw = path.read_bytes()
            data = raw[8 + struct.unpack("<Q", raw[:8])[0]:][begin:end]
            with safe_open(path, framework="numpy") as f:
                got = f.get_tensor(f"{slot}/{name}[{box}]")
                assert f.metadata()["id"] == manifest["id"]
            assert list(got.shape) == size and got.dtype == types[entry["dtype"]]
            assert got.tobytes() == data
            read += 1
assert read > 10, read
)py";

// A Python that has the package: the system's, or a virtual environment that was made with
// python3 -m venv ~/.cache/moiety/safetensors-venv
// ~/.cache/moiety/safetensors-venv/bin/pip install safetensors numpy
std::string python_with_package() {
  const char* home = std::getenv("HOME");
  for (const std::string& python :
       {std::string("python3"),
        std::string(home ? home : "") + "/.cache/moiety/safetensors-venv/bin/python3"}) {
    if (std::system((python + " -c 'import safetensors, numpy' 2>/dev/null").c_str()) == 0) {
      return python;
    }
  }
  return "";
}

TEST(PythonPackage, ReadsTheFiles) {
  const std::string python = python_with_package();
  if (python.empty()) GTEST_SKIP() << "the Python packages safetensors and numpy are not here";
  const TemporaryDirectory directory;
  const std::string path = save_small(directory / "c", Cut::kFlat, 2, 5, 1, small_pieces()).path;
  write_file(directory / "read.py", kPython);
  EXPECT_EQ(std::system(text("{} {} {}", python, directory / "read.py", path).c_str()), 0);
}

}  // namespace
}  // namespace moiety::checkpoint
