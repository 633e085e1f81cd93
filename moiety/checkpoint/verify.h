// The check of a whole checkpoint, and the repair of one whose manifest is lost.
#pragma once

#include <string>

#include "moiety/checkpoint/manifest.h"

namespace moiety::checkpoint {

// Reads all of a checkpoint and compares it with its manifest, which is returned. Throws
// CheckpointError naming the first file and piece that are not what was saved.
Manifest verify(const std::string& path, FileSystem& files = posix());

enum class Repair {
  kNone,      // nothing was missing, and all is what was saved
  kProved,    // written anew, and compared with what was left of COMMIT or manifest.json
  kUnproved,  // written anew; nothing was left with which the data could be compared
};
// Makes a lost or damaged manifest.json and COMMIT again, from the rank files alone. Throws
// CheckpointError, and changes nothing, if a rank file is missing, or if data are not what was
// saved: those cannot be made again.
Repair repair(const std::string& path, FileSystem& files = posix());

}  // namespace moiety::checkpoint
