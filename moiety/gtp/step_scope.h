// The scope of a step, from begin_step to its flush.
#pragma once

#include <cstdint>
#include <utility>

namespace moiety::gtp {

class Executor;

// A step. If it is destroyed before the flush, by an exception, it abandons the step: operations in
// flight end before the next step begins, nothing more is reported, and the executor is as before;
// the sink hears of it when the next step begins. Peers may gather until the flush of a later step,
// or until all ranks have met. It must not outlive the executor.
class [[nodiscard]] StepScope {
 public:
  StepScope(StepScope&& other) noexcept
      : executor_(std::exchange(other.executor_, nullptr)), step_(other.step_) {}
  StepScope& operator=(StepScope&&) = delete;
  ~StepScope();

 private:
  friend class Executor;
  StepScope(Executor* executor, int64_t step) : executor_(executor), step_(step) {}

  Executor* executor_;
  int64_t step_;
};

}  // namespace moiety::gtp
