// What memory a rank may take, and what to do when it needs more.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "moiety/base/device.h"
#include "moiety/train/config.h"
#include "moiety/train/layout.h"

namespace moiety::train {

// With how many ranks a rank shares its machine and its process, itself included.
struct RankShare {
  int64_t of_machine = 1;
  int64_t of_process = 1;
};

// What a rank may take: its share of the machine's or the control group's memory, and of what the
// limits of its process leave beside what the process has mapped and its threads reserve. To be
// asked before the ranks take memory. On a GPU what is free of it, less a reserve for what the run
// time and the driver take for themselves.
int64_t memory_of_rank(const RankShare& share, Device device = {});

// The smallest change of the configuration that brings a rank below `limit`: "train.micro_batch =
// 2".
std::optional<std::string> nearest_fit(const TrainConfig& config, const Grid& grid, int64_t limit,
                                       Device device = {});

// One line for an error: bytes by class, the limit, and the nearest change that fits (or, where the
// limit alone does not explain it, that needs a tenth less).
std::string memory_report(const TrainConfig& config, const Grid& grid, int64_t limit,
                          Device device = {});

// Throws Error(OutOfMemory) if a rank cannot fit: the system would otherwise give out the memory
// and end the process when it is used.
void check_memory(const TrainConfig& config, const Grid& grid, int64_t limit, Device device = {});

}  // namespace moiety::train
