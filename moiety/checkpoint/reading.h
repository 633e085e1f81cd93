// The reading of a planned part of a checkpoint's files, with their checks.
#pragma once

#include <span>
#include <string>

#include "moiety/checkpoint/reshard.h"
#include "moiety/checkpoint/safetensors.h"
#include "moiety/checkpoint/staging.h"

namespace moiety::checkpoint {

// Throws CheckpointError unless the header of file number `file` agrees with the manifest.
void check_header(const Manifest& manifest, int file, const SafetensorsReader& reader);

// Makes the copies of `plan`, a result of plan_reshard for `view`, from the files in `path`. Every
// piece that is needed is read whole and its crc32c compared. Pieces of the view that are on a GPU
// are on `device`.
void read_plan(const std::string& path, const Manifest& manifest, std::span<const BoxCopy> plan,
               const StateView& view, Device device, FileSystem& files);

// The part of the digest of a move's source that the elements of `piece`, a box of its target, give.
uint64_t part_digest(const KeyMove& move, const StatePiece& piece, Staging& staging);

}  // namespace moiety::checkpoint
