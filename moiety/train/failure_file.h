// Files failures/rank<r>-step<n>.json in a run directory: a rank's view when the run went wrong.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

#include "moiety/base/json_line.h"

namespace moiety::train {

// Writes one JSON object: v, t, kind, rank, step, process, host, and `fields`. A later failure of
// the same rank and step replaces the file. Returns its path; empty, with a warning, if it cannot
// be written.
std::string write_failure(const std::filesystem::path& run_directory, std::string_view kind,
                          int rank, int64_t step, const JsonLine& fields);

}  // namespace moiety::train
