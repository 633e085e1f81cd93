#include "moiety/hf/side_tensors.h"

#include <algorithm>

#include "moiety/checkpoint/checkpoint_error.h"
#include "moiety/checkpoint/reading.h"

namespace moiety::hf {
namespace {

constexpr std::string_view kPrefix = "files/";

}  // namespace

checkpoint::StatePiece side_piece(SideFile& file) {
  checkpoint::StatePiece piece;
  piece.tensor = std::string(kPrefix) + file.name;
  piece.slot = kSideSlot;
  piece.dtype = DType::kUInt8;
  piece.shape = {static_cast<int64_t>(file.bytes.size())};
  piece.box = checkpoint::whole(piece.shape);
  piece.data = file.bytes.data();
  return piece;
}

std::vector<SideFile> side_files_of(const checkpoint::Manifest& manifest, const std::string& path) {
  std::vector<SideFile> list;
  for (const auto& [tensor, entry] : manifest.tensors) {
    const auto slot = entry.slots.find(kSideSlot);
    if (slot == entry.slots.end()) continue;
    const std::string name = tensor.substr(std::min(kPrefix.size(), tensor.size()));
    if (!tensor.starts_with(kPrefix) || !std::ranges::count(side_file_names(), name) ||
        slot->second.dtype != DType::kUInt8 || entry.shape.size() != 1) {
      checkpoint::refuse("{}: {}/{} is no file that goes with a model", path, kSideSlot, tensor);
    }
    list.push_back({name, std::string(static_cast<size_t>(entry.shape[0]), '\0')});
  }
  return list;
}

std::vector<SideFile> load_side_files(const checkpoint::Manifest& manifest, const std::string& path,
                                      checkpoint::FileSystem& files) {
  std::vector<SideFile> list = side_files_of(manifest, path);
  checkpoint::StateView view;
  for (SideFile& file : list) view.push_back(side_piece(file));
  const checkpoint::PackedState state(manifest);
  checkpoint::read_plan(path, manifest, plan_reshard(state, view), view, Device(), files);
  checkpoint::Staging staging;
  for (const checkpoint::StatePiece& piece : view) {
    const auto& part = state.find(piece.tensor, piece.slot)->parts.at(0);
    const uint64_t digest = checkpoint::part_digest(part.move, piece, staging);
    if (digest == part.source->digest) continue;
    checkpoint::refuse("{}: {}/{} has digest {:016x}, expected {:016x}", path, piece.slot,
                       piece.tensor, digest, part.source->digest);
  }
  return list;
}

std::vector<SideFile> side_files_at(const std::string& path, checkpoint::FileSystem& files) {
  if (is_folder(path)) return read_side_files(path, files);
  return load_side_files(checkpoint::read_manifest(path, files), path, files);
}

}  // namespace moiety::hf
