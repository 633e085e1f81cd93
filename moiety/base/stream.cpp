#include "moiety/base/stream.h"

namespace moiety {

Stream Stream::deferred() {
  Stream out;
  out.queue_ = std::make_shared<Queue>();
  return out;
}

void Stream::Queue::run_until(int64_t count) {
  while (done < count && !pending.empty()) {
    // Counted and removed first: the operation may itself wait on this queue.
    std::function<void()> f = std::move(pending.front());
    pending.pop_front();
    ++done;
    f();
  }
}

void Stream::wait(const Event& event) const {
  run([event] { event.wait(); });
}

void Stream::synchronize() const {
  if (queue_) queue_->run_until(queue_->done + static_cast<int64_t>(queue_->pending.size()));
}

void Event::record(const Stream& stream) {
  queue_ = stream.queue_;
  count_ = queue_ ? queue_->done + static_cast<int64_t>(queue_->pending.size()) : 0;
}

bool Event::complete() const { return !queue_ || queue_->done >= count_; }

void Event::wait() const {
  if (queue_) queue_->run_until(count_);
}

}  // namespace moiety
