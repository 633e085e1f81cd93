#include "moiety/model/tp_window.h"

#include "moiety/base/integer.h"
#include "moiety/comm/gpu_transport.h"
#include "moiety/comm/gpu_waits.h"

namespace moiety::model {

void TpWindow::begin(int64_t bytes, const Stream& stream) {
  tp_.prepare(gpu_);
  if (!comm::maps_gpu_memory(tp_)) return;
  if (bytes > half_) {
    half_ = round_up(bytes, 256);
    memory_.push_back(comm::SymmetricBuffer::create(tp_, "tensor parallelism", 2 * half_, gpu_));
  }
  next_ = 0;
  meet(stream);
}

std::byte* TpWindow::take() { return memory_.back().local() + (next_++ % 2) * half_; }

const std::byte* TpWindow::at_rank(int r, const void* p) const {
  const comm::SymmetricBuffer& memory = memory_.back();
  return memory.peer(r) + (static_cast<const std::byte*>(p) - memory.local());
}

void TpWindow::meet(const Stream& stream) const { comm::meet(tp_, stream); }

}  // namespace moiety::model
