#include "moiety/hf/export.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <deque>
#include <fcntl.h>
#include <filesystem>
#include <set>
#include <utility>

#include "moiety/base/error.h"
#include "moiety/base/parallel.h"
#include "moiety/checkpoint/checkpoint_error.h"
#include "moiety/checkpoint/digest.h"
#include "moiety/checkpoint/reading.h"
#include "moiety/checkpoint/whole_directory.h"
#include "moiety/formats/bf16.h"
#include "moiety/hf/shards.h"
#include "moiety/hf/side_tensors.h"
#include "moiety/hf/weight_source.h"

namespace moiety::hf {
namespace {

using namespace checkpoint;
namespace fs = std::filesystem;

constexpr int64_t kGrain = 64 << 10;  // elements

// The reason why the checkpoint's weights are not those of such a model; empty if they are.
std::string weights_fault(const PackedState& state, const std::vector<ModelTensor>& tensors) {
  std::set<std::string> expected;
  for (const ModelTensor& t : tensors) {
    expected.insert(t.name);
    const PackedSlot* slot = state.find(t.name, "weight");
    if (!slot) return text("weight/{} is missing", t.name);
    if (slot->shape != t.shape) {
      return text("weight/{} is {}, by the configuration {}", t.name, shape_text(slot->shape),
                  shape_text(t.shape));
    }
    if (slot->dtype != DType::kFloat32 && slot->dtype != DType::kBFloat16) {
      return text("weight/{} is {}", t.name, name(slot->dtype));
    }
  }
  for (const auto& [key, slot] : state.slots()) {
    if (key.second == "weight" && !expected.contains(key.first)) {
      return text("weight/{} has no place in a folder", key.first);
    }
  }
  return {};
}

// The files that a folder gets. A tokenizer that the checkpoint keeps for its run is the model's;
// what came with another one, such as the ids of its special tokens, then stays behind.
std::vector<SideFile> exported_files(const Manifest& manifest, const std::string& path,
                                     FileSystem& files) {
  std::vector<SideFile> travelled = load_side_files(manifest, path, files);
  std::vector<SideFile> kept = read_side_files(path, files);
  const bool is_same = std::ranges::all_of(
      kept, [&](const SideFile& file) { return std::ranges::count(travelled, file) > 0; });
  return is_same ? travelled : kept;
}

// A part of a tensor in memory: as the checkpoint has it, and as a folder does.
struct Chunk {
  StatePiece piece;
  Buffer stored;
  std::vector<float> values;   // as the folder's type keeps them
  std::vector<bf16> narrowed;  // of a folder of bf16
};

class Export {
 public:
  Export(const std::string& path, const model::Config& config, const ExportOptions& options,
         FileSystem& files)
      : path_(path),
        config_(config),
        options_(options),
        files_(files),
        family_(export_family(config)),
        manifest_(read_manifest(path, files)),
        state_(manifest_),
        tensors_(model_tensors(config, family_)),
        shards_(folder_tensors(config, family_, options.form), options.dtype, options.shard_bytes) {
    if (const std::string fault = weights_fault(state_, tensors_); !fault.empty()) {
      refuse("export {}: {}", path, fault);
    }
    for (size_t f = 0; f < manifest_.files.size(); ++f) {
      const std::string file = path + "/" + manifest_.files[f].name;
      check_header(manifest_, static_cast<int>(f), SafetensorsReader::open(file, files));
    }
    side_files_ = exported_files(manifest_, path, files);
    check_biases();
  }

  void write(const std::string& directory) {
    write_weights(directory);
    write_text(files_, directory + "/model.safetensors.index.json", shards_.index());
    std::string travelled;
    for (const SideFile& file : side_files_) {
      if (file.name == "config.json") {
        travelled = file.bytes;
      } else {
        write_text(files_, directory + "/" + file.name, file.bytes);
      }
    }
    write_text(files_, directory + "/config.json",
               config_text(config_, family_, options_.dtype, options_.positions, travelled,
                           options_.special));
    read_back(directory);
    check_stop();
  }

  ExportResult result() const {
    return {family_, shards_.keys(), std::ssize(shards_.shards()), shards_.bytes()};
  }

 private:
  void check_stop() const {
    if (options_.stop && *options_.stop) fail(ErrorKind::kIo, "export {}: interrupted", path_);
  }
  void advance(uint64_t bytes) {
    check_stop();
    done_ += bytes;
    if (options_.progress) options_.progress(done_, 2 * shards_.bytes());
  }

  std::vector<Box> chunks_of(const ModelTensor& tensor) const {
    std::vector<Box> boxes;
    cut_box(whole(tensor.shape), sizeof(float), options_.chunk_bytes, boxes);
    return boxes;
  }

  Chunk read_chunk(const ModelTensor& tensor, const Box& box) const;
  void check_biases() const;
  void write_weights(const std::string& directory);
  void write_chunk(const std::deque<File>& out, const Chunk& chunk) const;
  void read_back(const std::string& directory);

  const std::string& path_;
  const model::Config& config_;
  const ExportOptions& options_;
  FileSystem& files_;
  Family family_;
  Manifest manifest_;
  PackedState state_;
  std::vector<ModelTensor> tensors_;
  Shards shards_;
  std::vector<SideFile> side_files_;
  std::map<std::string, uint64_t> digests_;  // of what was written, as float32
  uint64_t done_ = 0;
};

// Reads and rounds a part of a tensor.
Chunk Export::read_chunk(const ModelTensor& tensor, const Box& box) const {
  Chunk chunk;
  StatePiece& piece = chunk.piece;
  piece.tensor = tensor.name;
  piece.slot = "weight";
  piece.dtype = state_.find(tensor.name, "weight")->dtype;
  piece.shape = tensor.shape;
  piece.box = box;
  const int64_t n = volume(box);
  chunk.stored = Buffer(byte_size(piece.dtype, n), "part of a tensor");
  piece.data = chunk.stored.data();
  const StateView view{piece};
  read_plan(path_, manifest_, plan_reshard(state_, view), view, Device(), files_);
  chunk.values.resize(static_cast<size_t>(n));
  const bool narrow = shards_.dtype() == DType::kBFloat16;
  if (narrow) chunk.narrowed.resize(chunk.values.size());
  std::atomic<int64_t> bad = -1;
  parallel_for(n, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const auto at = static_cast<size_t>(i);
      float x = piece.dtype == DType::kFloat32
                    ? reinterpret_cast<const float*>(chunk.stored.data())[i]
                    : float(reinterpret_cast<const bf16*>(chunk.stored.data())[i]);
      if (narrow) x = float(chunk.narrowed[at] = bf16(x));
      chunk.values[at] = x;
      if (!std::isfinite(x)) bad = i;
    }
  });
  if (bad >= 0) {
    refuse("export {}: weight/{}: a value in {} is {} as {}, expected finite numbers", path_,
           tensor.name, describe(box), chunk.values[static_cast<size_t>(bad.load())],
           name(shards_.dtype()));
  }
  return chunk;
}

void Export::check_biases() const {
  for (const ModelTensor& tensor : tensors_) {
    if (!tensor.name.ends_with(".router.bias")) continue;
    const Chunk chunk = read_chunk(tensor, whole(tensor.shape));
    for (const float x : chunk.values) {
      if (x == 0) continue;
      refuse("export {}: weight/{} is not 0 ({}): a {} folder has no place for it", path_,
             tensor.name, x, name(family_));
    }
  }
}

void Export::write_weights(const std::string& directory) {
  std::deque<File> out;
  for (const Shards::Shard& shard : shards_.shards()) {
    out.emplace_back(files_, directory + "/" + shard.name, O_WRONLY | O_CREAT | O_EXCL);
    out.back().allocate(shard.header.size() + shard.data_bytes);
    out.back().write(0, shard.header);
  }
  for (const ModelTensor& tensor : tensors_) {
    if (tensor.name.ends_with(".router.bias")) continue;
    const PackedSlot& slot = *state_.find(tensor.name, "weight");
    std::vector<uint64_t> sums(slot.parts.size(), 0);
    uint64_t& written = digests_[tensor.name];
    for (const Box& box : chunks_of(tensor)) {
      const Chunk chunk = read_chunk(tensor, box);
      Staging staging;
      for (size_t i = 0; i < sums.size(); ++i) {
        sums[i] += part_digest(slot.parts[i].move, chunk.piece, staging);
      }
      written += digest(chunk.values.data(), DType::kFloat32, box, tensor.shape);
      write_chunk(out, chunk);
      advance(static_cast<uint64_t>(byte_size(shards_.dtype(), volume(box))));
    }
    for (size_t i = 0; i < sums.size(); ++i) {
      const uint64_t expected = slot.parts[i].source->digest;
      if (sums[i] == expected) continue;
      refuse("{}: weight/{} has digest {:016x}, expected {:016x}", path_,
             slot.parts[i].move.source.name, sums[i], expected);
    }
  }
  for (File& file : out) {
    file.sync_data();
    file.close();
  }
}

// Writes the chunk's elements to where the folder's tensors have them. A chunk is cut along leading
// dimensions, and so are the parts of a tensor: what they share is one run of either.
void Export::write_chunk(const std::deque<File>& out, const Chunk& chunk) const {
  const bool narrow = shards_.dtype() == DType::kBFloat16;
  const char* data = narrow ? reinterpret_cast<const char*>(chunk.narrowed.data())
                            : reinterpret_cast<const char*>(chunk.values.data());
  const auto bytes = [&](int64_t n) {
    return static_cast<uint64_t>(byte_size(shards_.dtype(), n));
  };
  for (const Shards::Placed& placed : shards_.of(chunk.piece.tensor)) {
    const auto region = intersect(placed.tensor.box, chunk.piece.box);
    if (!region || volume(*region) == 0) continue;
    std::vector<Box> rows;
    cut_box(*region, 1, BoxRuns(chunk.piece.box, *region).length(), rows);
    for (const Box& row : rows) {
      const BoxRuns from(chunk.piece.box, row), to(placed.tensor.box, row);
      MOIETY_CHECK(from.count() == 1 && to.count() == 1, "export: {} is cut by columns",
                   chunk.piece.tensor);
      out[placed.shard].write(placed.begin + bytes(to.outer_offset(0)),
                              {data + bytes(from.outer_offset(0)), bytes(from.length())});
    }
  }
}

// Reads the folder as an import does and compares it with what was meant.
void Export::read_back(const std::string& directory) {
  const Folder folder = Folder::open(directory, files_);
  const model::Config& read = folder.description().config;
  const WeightSource source(folder, read);
  std::vector<float> values;
  for (const ModelTensor& tensor : source.tensors()) {
    if (tensor.name.ends_with(".router.bias")) continue;
    uint64_t sum = 0;
    for (const Box& box : chunks_of(tensor)) {
      values.resize(static_cast<size_t>(volume(box)));
      source.read(tensor.name, box, values.data());
      sum += digest(values.data(), DType::kFloat32, box, tensor.shape);
      advance(static_cast<uint64_t>(byte_size(shards_.dtype(), volume(box))));
    }
    const auto written = digests_.find(tensor.name);
    if (written == digests_.end() || written->second != sum) {
      fail(ErrorKind::kIo, "export: {} reads back with another digest than was written, {:016x}",
           tensor.name, sum);
    }
    digests_.erase(written);
  }
  if (!digests_.empty()) {
    fail(ErrorKind::kIo, "export: {} does not read back", digests_.begin()->first);
  }
}

}  // namespace

ExportResult export_folder(const std::string& path, const model::Config& config,
                           const std::string& out, const ExportOptions& options,
                           FileSystem& files) {
  std::error_code none;
  if (!options.replace && fs::is_directory(out, none) && !fs::is_empty(out, none)) {
    throw UsageError("export: {}: is there already, and not empty; --force replaces it", out);
  }
  Export work(path, config, options, files);
  make_whole_directory("export", out, options.replace, files,
                       [&](const std::string& directory) { work.write(directory); });
  return work.result();
}

}  // namespace moiety::hf
