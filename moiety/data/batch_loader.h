// Batches for one data rank: {token, target} [B, S] of int32, made ahead of time by a thread of its
// own, which never communicates.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "moiety/base/buffer.h"
#include "moiety/data/sample_source.h"
#include "moiety/data/sampler.h"

namespace moiety::data {

struct Batch {
  TensorView token_BS, target_BS;
  // Positions that restart with each document, if there is a document mask, else undefined. The
  // query at s sees the keys s - position[s] ... s, and the target across a border is kNoTarget.
  TensorView position_BS;
  // uint8, 0: padding, which no expert gets; undefined if there is no padding.
  TensorView routed_BS;
};

// What a batch has beside tokens and targets.
struct BatchParts {
  bool positions = false, padding = false;
};

// A Batch and its memory.
class BatchBuffer {
 public:
  BatchBuffer(int64_t micro_batch, int64_t seq_len, BatchParts parts);
  // Makes row b sample b. Rows beyond the samples hold zeros without targets.
  void fill(const SampleSource& source, std::span<const SampleRef> samples);
  const Batch& batch() const { return batch_; }

 private:
  Tensor token_, target_, position_, routed_;
  Batch batch_;
};

struct LoaderConfig {
  int64_t micro_batch = 1;   // sequences
  int64_t global_batch = 8;  // sequences in a step; a multiple of micro_batch * data_ranks
  int data_rank = 0;
  int data_ranks = 1;
  bool document_mask = false;
  Pack pack = Pack::kStream;  // as the source was opened; kDocuments implies document_mask
  int prefetch = 4;           // batches made ahead, at least 1
  double wait_limit_s = 100;  // limit for one batch

  BatchParts parts() const {
    const bool packs = pack == Pack::kDocuments;
    return {.positions = document_mask || packs, .padding = packs};
  }
};

// The batches of one data rank. A step takes the next `global_batch` samples of the sampler;
// micro-step m, data rank d, slot b takes number (m * data_ranks + d) * micro_batch + b of them.
class BatchLoader {
 public:
  BatchLoader(std::shared_ptr<const SampleSource> source, Sampler sampler,
              const LoaderConfig& config);
  ~BatchLoader();
  BatchLoader(const BatchLoader&) = delete;
  BatchLoader& operator=(const BatchLoader&) = delete;

  // The next micro-batch, valid until the next call; null at the end of the data, which comes
  // between steps. Rethrows the error that stopped the thread, after the batches made before it.
  const Batch* next();
  // The sampler's state before the first step of which a micro-batch has not been handed out: a
  // checkpoint saves it at the end of a step, and a repetition of a step starts from it.
  const SamplerState& state() const { return state_; }
  // Milliseconds that next() has waited, over all calls.
  double waited_ms() const { return waited_ms_; }

 private:
  struct Slot {
    BatchBuffer buffer;
    bool ends_step = false;
    SamplerState after{};  // the sampler's state, if the slot ends a step
  };
  void produce();
  Slot* free_slot();

  std::shared_ptr<const SampleSource> source_;
  Sampler sampler_;
  LoaderConfig config_;
  SamplerState state_;
  double waited_ms_ = 0;

  std::vector<Slot> slots_;  // a ring: prefetch slots and the one that the caller holds
  std::mutex mutex_;
  std::condition_variable changed_;
  uint64_t made_ = 0, taken_ = 0;  // numbers of batches
  bool stop_ = false, ended_ = false;
  std::exception_ptr error_;
  std::thread thread_;
};

// The first samples of every source, unshuffled, cut into batches for one data rank, each of one
// source. All ranks have the same number of batches; where a source's samples run out, rows have no
// targets.
class ValidationSet {
 public:
  // `samples` is the number per source (fewer if a source is shorter).
  ValidationSet(std::shared_ptr<const SampleSource> source, int64_t samples,
                const LoaderConfig& config);
  int64_t batches() const;
  // Sequences of a batch.
  int64_t sequences() const { return config_.micro_batch; }
  int64_t seq_len() const { return buffer_.batch().token_BS.size(1); }
  BatchParts parts() const { return config_.parts(); }
  // Batch k, valid until the next call.
  const Batch& batch(int64_t k);
  // As SampleSource::await_checks().
  void await_checks() const { source_->await_checks(); }

  int sources() const { return static_cast<int>(parts_.size()); }
  // The source of batch k.
  int source_of(int64_t k) const;
  std::string name(int source) const { return source_->name(source); }
  // Bytes of text of a source's samples: bits per byte = sum of losses / (ln 2 * bytes).
  double source_bytes(int source) const { return parts_[source].bytes; }
  // The same of all samples together.
  double source_bytes() const;

 private:
  struct Part {
    std::vector<SampleRef> samples;
    double bytes = 0;
    int64_t end = 0;  // the batch behind its last one
  };
  int64_t first_batch(int source) const { return source == 0 ? 0 : parts_[source - 1].end; }

  std::shared_ptr<const SampleSource> source_;
  LoaderConfig config_;
  std::vector<Part> parts_;
  BatchBuffer buffer_;
};

}  // namespace moiety::data
