#include "moiety/data/batch_loader.h"

#include <algorithm>
#include <chrono>

#include "moiety/base/error.h"
#include "moiety/base/integer.h"
#include "moiety/base/trace.h"

namespace moiety::data {
namespace {

void check(const LoaderConfig& c) {
  MOIETY_CHECK(
      c.micro_batch >= 1 && c.prefetch >= 1 && c.data_rank >= 0 && c.data_rank < c.data_ranks,
      "batch loader: micro_batch {}, prefetch {}, data rank {} of {}", c.micro_batch, c.prefetch,
      c.data_rank, c.data_ranks);
  const int64_t micro_step = c.micro_batch * c.data_ranks;
  MOIETY_CHECK(c.global_batch >= 1 && c.global_batch % micro_step == 0,
               "batch loader: global_batch={} must be a multiple of micro_batch x data ranks = "
               "{} x {}",
               c.global_batch, c.micro_batch, c.data_ranks);
}

// The samples of a data rank's micro-step m, from a list that all data ranks share.
std::span<const SampleRef> share(std::span<const SampleRef> samples, int64_t m,
                                 const LoaderConfig& c) {
  const int64_t size = static_cast<int64_t>(samples.size());
  const int64_t begin = std::min((m * c.data_ranks + c.data_rank) * c.micro_batch, size);
  return samples.subspan(begin, std::min(c.micro_batch, size - begin));
}

}  // namespace

BatchBuffer::BatchBuffer(int64_t micro_batch, int64_t seq_len, BatchParts parts)
    : token_(DType::kInt32, {micro_batch, seq_len}, "batch"),
      target_(DType::kInt32, {micro_batch, seq_len}, "batch") {
  batch_.token_BS = token_;
  batch_.target_BS = target_;
  if (parts.positions) {
    position_ = Tensor(DType::kInt32, {micro_batch, seq_len}, "batch");
    batch_.position_BS = position_;
  }
  if (parts.padding) {
    routed_ = Tensor(DType::kUInt8, {micro_batch, seq_len}, "batch");
    batch_.routed_BS = routed_;
  }
}

void BatchBuffer::fill(const SampleSource& source, std::span<const SampleRef> samples) {
  const auto S = static_cast<size_t>(batch_.token_BS.size(1));
  int32_t* token = token_.data<int32_t>();
  int32_t* target = target_.data<int32_t>();
  int32_t* position = batch_.position_BS.defined() ? position_.data<int32_t>() : nullptr;
  uint8_t* routed = batch_.routed_BS.defined() ? routed_.data<uint8_t>() : nullptr;
  for (const SampleRef sample : samples) {
    source.read(sample, {{token, S},
                         {target, S},
                         {position, position == nullptr ? 0 : S},
                         {routed, routed == nullptr ? 0 : S}});
    token += S;
    target += S;
    if (position != nullptr) position += S;
    if (routed != nullptr) routed += S;
  }
  const size_t empty = static_cast<size_t>(batch_.token_BS.size(0)) * S - samples.size() * S;
  std::fill_n(token, empty, 0);
  std::fill_n(target, empty, kNoTarget);
  if (position != nullptr) std::fill_n(position, empty, 0);
  if (routed != nullptr) std::fill_n(routed, empty, uint8_t{0});
}

BatchLoader::BatchLoader(std::shared_ptr<const SampleSource> source, Sampler sampler,
                         const LoaderConfig& config)
    : source_(std::move(source)),
      sampler_(std::move(sampler)),
      config_(config),
      state_(sampler_.state()) {
  check(config_);
  for (int i = 0; i <= config_.prefetch; ++i) {
    slots_.push_back({BatchBuffer(config_.micro_batch, source_->seq_len(), config_.parts())});
  }
  thread_ = std::thread([this] { produce(); });
}

BatchLoader::~BatchLoader() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void BatchLoader::produce() {
  std::exception_ptr error;
  try {
    const int64_t micro_steps = config_.global_batch / (config_.micro_batch * config_.data_ranks);
    std::vector<SampleRef> step;
    while (sampler_.take(config_.global_batch, step)) {
      for (int64_t m = 0; m < micro_steps; ++m) {
        Slot* slot = free_slot();
        if (slot == nullptr) return;
        slot->buffer.fill(*source_, share(step, m, config_));
        slot->ends_step = m + 1 == micro_steps;
        if (slot->ends_step) slot->after = sampler_.state();
        const std::lock_guard lock(mutex_);
        ++made_;
        changed_.notify_all();
      }
    }
  } catch (...) {
    error = std::current_exception();
  }
  const std::lock_guard lock(mutex_);
  error_ = error;
  ended_ = true;
  changed_.notify_all();
}

// The slot for the next batch, once the caller has let go of it; null when the loader is destroyed.
BatchLoader::Slot* BatchLoader::free_slot() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock,
                [&] { return stop_ || made_ - taken_ < static_cast<uint64_t>(config_.prefetch); });
  return stop_ ? nullptr : &slots_[made_ % slots_.size()];
}

const Batch* BatchLoader::next() {
  const TraceSpan span(TraceLane::kData, "wait for a batch");
  using Clock = std::chrono::steady_clock;
  const auto start = Clock::now();
  std::unique_lock lock(mutex_);
  const bool ready = changed_.wait_for(lock, std::chrono::duration<double>(config_.wait_limit_s),
                                       [&] { return made_ > taken_ || ended_; });
  waited_ms_ += std::chrono::duration<double, std::milli>(Clock::now() - start).count();
  if (!ready) {
    throw DataError("data: batch {} did not arrive within {} s: does the disk answer?", taken_,
                    config_.wait_limit_s);
  }
  if (made_ == taken_) {
    if (error_) std::rethrow_exception(error_);
    return nullptr;
  }
  Slot& slot = slots_[taken_ % slots_.size()];
  ++taken_;
  changed_.notify_all();
  if (slot.ends_step) state_ = slot.after;
  return &slot.buffer.batch();
}

ValidationSet::ValidationSet(std::shared_ptr<const SampleSource> source, int64_t samples,
                             const LoaderConfig& config)
    : source_(std::move(source)),
      config_(config),
      buffer_(config.micro_batch, source_->seq_len(), config.parts()) {
  MOIETY_CHECK(samples >= 1, "validation: {} samples", samples);
  const std::vector<SamplerSource> sources = source_->sources();
  const int64_t micro_step = config_.micro_batch * config_.data_ranks;
  int64_t end = 0;
  for (int s = 0; s < static_cast<int>(sources.size()); ++s) {
    Part part;
    const uint64_t n = std::min(sources[s].samples, static_cast<uint64_t>(samples));
    for (uint64_t i = 0; i < n; ++i) part.samples.push_back({s, i});
    part.bytes = source_->text_bytes(s, n);
    part.end = end += ceil_div(std::ssize(part.samples), micro_step);
    parts_.push_back(std::move(part));
  }
}

int64_t ValidationSet::batches() const { return parts_.empty() ? 0 : parts_.back().end; }

int ValidationSet::source_of(int64_t k) const {
  int source = 0;
  while (k >= parts_[source].end) ++source;
  return source;
}

double ValidationSet::source_bytes() const {
  double bytes = 0;
  for (const Part& part : parts_) bytes += part.bytes;
  return bytes;
}

const Batch& ValidationSet::batch(int64_t k) {
  const int source = source_of(k);
  buffer_.fill(*source_, share(parts_[source].samples, k - first_batch(source), config_));
  return buffer_.batch();
}

}  // namespace moiety::data
