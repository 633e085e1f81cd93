// GPU memory that the ranks of one process share: the parts of all ranks lie in one range of
// addresses, so a pointer means the same to every rank.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "moiety/comm/bootstrap.h"
#include "moiety/comm/memory_exchange.h"

namespace moiety::comm::mapped {

// Returns zeroed memory of every rank, by rank; this one's is on GPU `device`. Collective. Ranks are
// threads of this process. If one fails, all throw the same text, which begins with `what`:
// Error(kOutOfMemory), or Error(kUnsupported) where GPUs cannot reach each other.
std::vector<Memory> share_gpu_memory(Bootstrap& bootstrap, const std::string& what, int64_t bytes,
                                     int device);

// Stores `value` into these words from a kernel on the GPU, and waits for it.
void store_words(int device, std::span<uint64_t* const> words, uint64_t value);
std::vector<uint64_t> load_words(int device, const uint64_t* words, int count);
// Waits for all work that this process has put on the GPU.
void wait_for_gpu(int device);

}  // namespace moiety::comm::mapped
