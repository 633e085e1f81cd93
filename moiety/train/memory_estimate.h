// The memory of a rank, by what it is for, from the sizes that modules and arena use; and what to
// do when it is more than there is. Of a rank on a GPU it is the GPU's memory.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "apps/moiety/config/launch.h"
#include "apps/moiety/config/options.h"
#include "apps/moiety/config/options_check.h"
#include "moiety/base/device.h"
#include "moiety/model/config.h"

namespace moiety::app {

// Bytes. What temporaries take beyond the logits counts as workspace: they share memory.
struct MemoryEstimate {
  int64_t parameters = 0;
  int64_t main_grad = 0;  // the shard of its sum, and the copies that travel in another format
  int64_t master = 0;
  int64_t moments = 0;
  int64_t gathered = 0;  // slots of weights and gradients that gtp and egtp move
  int64_t activations = 0;
  int64_t expert_parallel = 0;
  int64_t logits = 0;
  int64_t workspace = 0;
  int64_t snapshot = 0;  // of an asynchronous checkpoint
  int64_t gpu = 0;     // what only a GPU has: the libraries' workspaces, batches beside the host's
  int64_t pinned = 0;  // of the host, which total() leaves out: the snapshot of a GPU's state

  int64_t arena() const { return activations + logits + workspace; }
  int64_t total() const {
    return parameters + main_grad + master + moments + gathered + arena() + expert_parallel +
           snapshot + gpu;
  }
};
MemoryEstimate estimate_memory(const Options& options, const model::Config& model, const Grid& grid,
                               Device device = {});

// "parameters   2.4 GiB": one line for every class that takes memory, and the total beside the
// limit.
std::vector<std::string> memory_lines(const MemoryEstimate& memory, int64_t limit);

// What a rank may take: its share of the machine's or the control group's memory, and of what the
// limits of its process leave beside what the process has mapped and its threads reserve. To be
// asked before the ranks take memory. On a GPU what is free of it, less a reserve for what the run
// time and the driver take for themselves.
int64_t memory_of_rank(const Launch& launch, Device device = {});

// The smallest change of the options that brings a rank below `limit`: "train.micro_batch = 2".
std::optional<std::string> nearest_fit(const Options& options, const model::Config& model,
                                       const Grid& grid, int64_t limit, Device device = {});

// One line for an error: bytes by class, the limit, and the nearest change that fits (or, where the
// limit alone does not explain it, that needs a tenth less).
std::string memory_report(const Options& options, const model::Config& model, const Grid& grid,
                          int64_t limit, Device device = {});

// Throws Error(OutOfMemory) if a rank cannot fit: the system would otherwise give out the memory
// and end the process when it is used.
void check_memory(const Options& options, const model::Config& model, const Grid& grid,
                  int64_t limit, Device device = {});

}  // namespace moiety::app
