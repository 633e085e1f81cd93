// The memory that a rank may take, and advice when it needs more.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "moiety/base/device.h"
#include "moiety/train/config.h"
#include "moiety/train/layout.h"

namespace moiety::train {

// The number of ranks that share a machine, those that share a process, and those that share a GPU,
// this one included.
struct RankShare {
  int64_t of_machine = 1;
  int64_t of_process = 1;
  int64_t of_gpu = 1;
};

// Bytes that a rank may take: its share of the memory of the machine or the control group, and of
// the part of its process's limits that the process has not mapped and its threads do not reserve.
// To be called before the ranks take memory. On a GPU it is its share of the free memory, less a
// reserve for the run time and the driver.
int64_t memory_of_rank(const RankShare& share, Device device = {});

// The smallest change of the configuration that brings a rank below `limit`, such as
// "train.micro_batch = 2".
std::optional<std::string> nearest_fit(const TrainConfig& config, const Grid& grid, int64_t limit,
                                       Device device = {});

// One line for an error: bytes by class, the limit, and the nearest change that fits (or, where the
// limit alone does not explain the error, the one that needs a tenth less).
std::string memory_report(const TrainConfig& config, const Grid& grid, int64_t limit,
                          Device device = {});

// Throws Error(kOutOfMemory) if a rank cannot fit. Otherwise the system would give out the memory
// and end the process when it is used.
void check_memory(const TrainConfig& config, const Grid& grid, int64_t limit, Device device = {});

}  // namespace moiety::train
