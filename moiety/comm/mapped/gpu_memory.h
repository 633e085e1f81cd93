// GPU memory that ranks share: the parts of all ranks lie in one range of addresses. Ranks of one
// process have one range, so a pointer means the same to every rank; each process has a range of its
// own, in which the ranks' parts lie in the same order.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "moiety/comm/bootstrap.h"
#include "moiety/comm/memory_exchange.h"

namespace moiety::comm::mapped {

// Returns zeroed memory of every rank, by rank; this one's is on GPU `device`. Collective. Without
// `nonces` ranks are threads of this process, else each is a process of its own
// (exchange_descriptors). If one fails, all throw the same text, which begins with `what`:
// Error(kOutOfMemory), or Error(kUnsupported) where GPUs cannot reach each other.
std::vector<Memory> share_gpu_memory(Bootstrap& bootstrap, const std::string& what, int64_t bytes,
                                     int device, const std::vector<Nonce>& nonces);

// Stores `value` into these words from a kernel on the GPU, and waits for it.
void store_words(int device, std::span<uint64_t* const> words, uint64_t value);
std::vector<uint64_t> load_words(int device, const uint64_t* words, int count);
// Waits for all work that this process has put on the GPU.
void wait_for_gpu(int device);

}  // namespace moiety::comm::mapped
