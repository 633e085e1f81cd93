// The memory of a rank by purpose, computed from the sizes that modules and arena use. For a rank
// on a GPU it is the GPU's memory.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "moiety/base/device.h"
#include "moiety/train/config.h"
#include "moiety/train/layout.h"

namespace moiety::train {

// Bytes by purpose. Temporaries beyond the size of the logits count as workspace, since they share
// memory.
struct MemoryEstimate {
  int64_t parameters = 0;
  int64_t main_grad = 0;  // the shard of its sum, and the copies that travel in another format
  int64_t master = 0;     // with the values of frozen weights that are quantized
  int64_t moments = 0;
  int64_t gathered = 0;  // slots of weights and gradients that gtp and egtp move
  int64_t activations = 0;
  int64_t expert_parallel = 0;
  int64_t histories = 0;  // of delayed scaling
  int64_t logits = 0;
  int64_t workspace = 0;
  int64_t snapshot = 0;  // copy for an asynchronous checkpoint, frozen weights as it has them
  int64_t gpu = 0;       // only on a GPU: the libraries' workspaces, batches beside the host's
  int64_t links = 0;     // only on a GPU: what communicators of several ranks stage operands in
  int64_t pinned = 0;    // host memory that total() leaves out: the snapshot of a GPU's state

  int64_t arena() const { return activations + logits + workspace; }
  int64_t total() const {
    return parameters + main_grad + master + moments + gathered + arena() + expert_parallel +
           histories + snapshot + gpu + links;
  }
};
MemoryEstimate estimate_memory(const TrainConfig& config, const Grid& grid, Device device = {});

// The classes of the total by name.
std::vector<std::pair<const char*, int64_t>> memory_classes(const MemoryEstimate& memory);
// One line for every class that takes memory, "parameters 2.4 GiB", and the total beside the limit.
std::vector<std::string> memory_lines(const MemoryEstimate& memory, int64_t limit);

}  // namespace moiety::train
