// What a path on the command line stands for, for commands that take several kinds of things.
#pragma once

#include <string>

namespace moiety::app {

enum class PathKind {
  kTokenFile,
  kQuantized,   // a directory that quantize wrote
  kCheckpoint,  // also one that has lost its manifest
  kRun,         // a run directory, or its checkpoints/
};
// Looks at names alone, so a damaged thing keeps its kind. Throws DataError if there is nothing at
// `path`, or something else.
PathKind kind_of_path(const std::string& path);

}  // namespace moiety::app
