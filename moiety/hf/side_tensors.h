// Side files of a model inside of checkpoints: each is a tensor of bytes, "files/<name>" [n] uint8
// of slot "file", so that checksums, digests, conversion and repair are those of every tensor.
#pragma once

#include <string>
#include <vector>

#include "moiety/checkpoint/manifest.h"
#include "moiety/hf/folder.h"

namespace moiety::hf {

inline constexpr const char* kSideSlot = "file";

// The piece of a state view that holds the file, whose memory it refers to.
checkpoint::StatePiece side_piece(SideFile& file);

// Files of the right names and sizes that a checkpoint holds, with zeros in place of their bytes.
// Throws CheckpointError for a name that is none of side_file_names().
std::vector<SideFile> side_files_of(const checkpoint::Manifest& manifest, const std::string& path);

// The same with their bytes, whose checksums and digests are compared.
std::vector<SideFile> load_side_files(const checkpoint::Manifest& manifest, const std::string& path,
                                      checkpoint::FileSystem& files = checkpoint::posix());

// Those of a folder or of a checkpoint.
std::vector<SideFile> side_files_at(const std::string& path,
                                    checkpoint::FileSystem& files = checkpoint::posix());

}  // namespace moiety::hf
