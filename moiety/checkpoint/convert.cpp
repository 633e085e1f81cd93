#include "moiety/checkpoint/convert.h"

#include <map>
#include <optional>
#include <utility>

#include "moiety/base/buffer.h"
#include "moiety/base/error.h"
#include "moiety/base/parallel.h"
#include "moiety/checkpoint/checkpoint_error.h"
#include "moiety/checkpoint/rank_file.h"
#include "moiety/checkpoint/reading.h"
#include "moiety/checkpoint/reshard.h"
#include "moiety/checkpoint/whole_directory.h"

namespace moiety::checkpoint {
namespace {

// What is written of one logical slot: tensors of the view, and where they begin in its memory.
struct Output {
  size_t of = 0;       // index into the view
  int64_t offset = 0;  // bytes
};

class Conversion {
 public:
  Conversion(const std::string& path, const ConvertOptions& options, FileSystem& files)
      : path_(path), options_(options), files_(files), source_(read_manifest(path, files)) {
    std::vector<ExpertModule>& modules = source_.run.experts.modules;
    if (modules.empty()) modules = options.modules;
    check_target();
    head_.id = source_.id;
    head_.run = source_.run;
    head_.run.layout = {};
    head_.run.experts = {options.form, options.interleave, modules};
    if (modules.empty() || head_.run.experts.is_plain()) head_.run.experts = {};
    state_.emplace(source_, head_.run.experts.interleave);
    list_outputs();
    plan_ = plan_file(view_, file_metadata(head_, 0), options.piece_bytes);
    pieces_.resize(view_.size());
    for (size_t i = 0; i < plan_.pieces.size(); ++i) {
      pieces_[static_cast<size_t>(plan_.pieces[i].of)].push_back(i);
    }
    check_headers();
  }

  Manifest write(const std::string& directory);

 private:
  void check_target() const;
  void list_outputs();
  void check_headers() const;
  // Reads a slot, with its experts packed in the target's order of rows.
  Buffer read(const PackedState::Key& key, const PackedSlot& slot) const;
  void write_slot(const File& file, const PackedState::Key& key, const PackedSlot& slot,
                  std::span<PieceSums> sums);
  void check_stop() const {
    if (options_.stop && *options_.stop) fail(ErrorKind::kIo, "convert {}: interrupted", path_);
  }

  const std::string& path_;
  const ConvertOptions& options_;
  FileSystem& files_;
  Manifest source_;  // with the modules' names, also where it is plain
  Manifest head_;
  std::optional<PackedState> state_;
  StateView view_;  // of what is written, without memory
  std::map<PackedState::Key, std::vector<Output>> outputs_;
  FilePlan plan_;
  std::vector<std::vector<size_t>> pieces_;  // by tensor of the view, its pieces in the plan
  uint64_t done_ = 0;
};

// An interleave that does not fit is the user's mistake, not a fault of the checkpoint.
void Conversion::check_target() const {
  for (const ExpertModule& module : source_.run.experts.modules) {
    if (!module.gated || options_.interleave == 0) continue;
    for (const bool packed : {true, false}) {
      const auto at = source_.tensors.find(module.name + (packed ? ".weight" : ".weight0"));
      if (at == source_.tensors.end() || at->second.shape.size() != (packed ? 3u : 2u)) continue;
      try {
        check_interleave(options_.interleave, at->second.shape[packed ? 1 : 0] / 2, at->first);
      } catch (const CheckpointError& e) {
        throw UsageError("convert: {}", e.what());
      }
    }
  }
}

void Conversion::list_outputs() {
  std::map<std::string, std::vector<KeyShape>> keys;  // by slot
  for (const auto& [key, slot] : state_->slots()) {
    keys[key.second].push_back({key.first, slot.shape});
  }
  const ExpertLayout& to = head_.run.experts;
  for (const auto& [slot, of_slot] : keys) {
    const KeyTarget target{source_.run.experts.modules, to.form, to.interleave, to.interleave};
    for (const KeyMove& move : key_remap(of_slot, target, path_)) {
      StatePiece piece;
      piece.tensor = move.target.name;
      piece.slot = slot;
      piece.dtype = state_->find(move.source.name, slot)->dtype;
      piece.shape = move.target.shape;
      piece.box = whole(piece.shape);
      const int64_t expert = move.expert < 0 ? 0 : move.expert;
      outputs_[{move.source.name, slot}].push_back(
          {view_.size(), expert * byte_size(piece.dtype, volume(piece.box))});
      view_.push_back(std::move(piece));
    }
  }
}

void Conversion::check_headers() const {
  for (size_t f = 0; f < source_.files.size(); ++f) {
    const std::string file = path_ + "/" + source_.files[f].name;
    check_header(source_, static_cast<int>(f), SafetensorsReader::open(file, files_));
  }
}

Buffer Conversion::read(const PackedState::Key& key, const PackedSlot& slot) const {
  StatePiece piece;
  piece.tensor = key.first;
  piece.slot = key.second;
  piece.dtype = slot.dtype;
  piece.shape = slot.shape;
  piece.box = whole(slot.shape);
  Buffer memory(byte_size(slot.dtype, volume(piece.box)), "tensor of a checkpoint");
  piece.data = memory.data();
  const StateView view{piece};
  // `source_` lists modules that the files of a plain checkpoint do not: for reading alone.
  read_plan(path_, source_, plan_reshard(*state_, view), view, Device(), files_);
  Staging staging;
  for (const PackedSlot::Part& part : slot.parts) {
    const uint64_t digest = part_digest(part.move, piece, staging);
    if (digest == part.source->digest) continue;
    refuse("{}: {}/{} has digest {:016x}, expected {:016x}", path_, key.second,
           part.move.source.name, digest, part.source->digest);
  }
  return memory;
}

void Conversion::write_slot(const File& file, const PackedState::Key& key, const PackedSlot& slot,
                            std::span<PieceSums> sums) {
  const Buffer memory = read(key, slot);
  for (const Output& output : outputs_.at(key)) {
    const std::vector<size_t>& pieces = pieces_[output.of];
    const StatePiece& of = view_[output.of];
    parallel_tasks(std::ssize(pieces), [&](int64_t i) {
      check_stop();
      const size_t number = pieces[static_cast<size_t>(i)];
      const FilePlan::Piece& piece = plan_.pieces[number];
      const int64_t first = piece.bytes() > 0 ? BoxRuns(of.box, piece.box).outer_offset(0) : 0;
      sums[number] = write_piece(file, plan_, piece, of,
                                 memory.data() + output.offset + byte_size(of.dtype, first));
    });
    done_ += static_cast<uint64_t>(byte_size(of.dtype, volume(of.box)));
    if (options_.progress) options_.progress(done_, plan_.data_bytes);
  }
}

Manifest Conversion::write(const std::string& directory) {
  Manifest manifest = write_single_file(directory, head_, plan_, view_, options_.tokenizer, files_,
                                        [&](const File& file, std::span<PieceSums> sums) {
                                          for (const auto& [key, slot] : state_->slots()) {
                                            check_stop();
                                            write_slot(file, key, slot, sums);
                                          }
                                        });
  check_stop();
  return manifest;
}

}  // namespace

Manifest convert(const std::string& path, const std::string& out, const ConvertOptions& options,
                 FileSystem& files) {
  if (size_of(files, out)) throw UsageError("convert: {}: is there already", out);
  Conversion conversion(path, options, files);
  Manifest manifest;
  make_whole_directory("convert", out, false, files, [&](const std::string& directory) {
    manifest = conversion.write(directory);
  });
  return manifest;
}

}  // namespace moiety::checkpoint
