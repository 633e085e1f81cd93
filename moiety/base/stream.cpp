#include "moiety/base/stream.h"

#include "moiety/base/gpu.h"
#include "moiety/base/gpu_runtime.h"
#include "moiety/base/tensor_view.h"
#include "moiety/base/trace.h"

namespace moiety {

Stream Stream::deferred() {
  Stream out;
  out.state_ = std::make_shared<State>();
  return out;
}

Stream Stream::on(Device device) {
  if (device.type == DeviceType::kCpu) return {};
  require_device("stream", device);
  Stream out = external(device, gpu::create_stream(device.index));
  out.state_->owned = true;
  return out;
}

Stream Stream::external(Device gpu, void* cuda_stream) {
  MOIETY_CHECK(gpu.type == DeviceType::kCuda, "stream: an external stream on {}", name(gpu));
  require_device("stream", gpu);
  Stream out;
  out.state_ = std::make_shared<State>();
  out.state_->device = gpu;
  out.state_->cuda_stream = cuda_stream;
  return out;
}

Stream::State::~State() {
  if (owned) gpu::destroy_stream(device.index, cuda_stream);
}

void Stream::State::run_until(int64_t count) {
  // The running operation stays in front as an empty one: it is not done, though it may itself wait
  // for operations before it in this queue.
  while (done < count && !pending.empty() && pending.front()) {
    const std::function<void()> f = std::exchange(pending.front(), nullptr);
    const auto end = [&] {
      pending.pop_front();
      ++done;
    };
    try {
      f();
    } catch (...) {
      end();
      throw;
    }
    end();
  }
}

void* Stream::cuda_stream() const {
  MOIETY_CHECK(state_ && state_->on_gpu(), "stream: a CPU stream has no cudaStream_t");
  return state_->cuda_stream;
}

void Stream::defer(std::function<void()> f) const {
  MOIETY_CHECK(!state_->on_gpu(), "stream: {} runs kernels, this operation has none",
               name(device()));
  state_->pending.push_back(std::move(f));
}

void Stream::wait(const Event& event) const {
  if (!state_ || !state_->on_gpu()) {
    run([event] { event.wait(); });
  } else if (event.gpu_) {
    gpu::stream_wait(device().index, state_->cuda_stream, event.gpu_->cuda_event);
  } else {
    event.wait();
  }
}

void Stream::synchronize() const {
  if (!state_) return;
  if (state_->on_gpu()) {
    gpu::synchronize_stream(device().index, state_->cuda_stream);
  } else {
    state_->run_until(state_->count());
  }
}

Event Event::timed() {
  Event out;
  out.timed_ = true;
  return out;
}

Event::GpuEvent::~GpuEvent() { gpu::destroy_event(device, cuda_event); }

void Event::record(const Stream& stream) {
  state_.reset();
  const Device device = stream.device();
  if (device.type == DeviceType::kCuda) {
    const bool reusable = gpu_ && gpu_.use_count() == 1 && gpu_->device == device.index;
    if (!reusable) {
      gpu_.reset(new GpuEvent{device.index, gpu::create_event(device.index, timed_)});
    }
    gpu::record_event(device.index, gpu_->cuda_event, stream.cuda_stream());
    return;
  }
  gpu_.reset();
  if (timed_) {
    time_ = std::make_shared<int64_t>();
    stream.run([time = time_] { *time = trace_clock(); });
  }
  if (stream.state_) {
    state_ = stream.state_;
    count_ = state_->count();
  }
}

bool Event::complete() const {
  if (gpu_) return gpu::event_complete(gpu_->device, gpu_->cuda_event);
  return !state_ || state_->done >= count_;
}

void Event::wait() const {
  if (gpu_) gpu::synchronize_event(gpu_->device, gpu_->cuda_event);
  if (state_) state_->run_until(count_);
}

double elapsed_ms(const Event& begin, const Event& end) {
  MOIETY_CHECK(begin.timed_ && end.timed_, "elapsed_ms: an event is not timed");
  if (begin.gpu_ && end.gpu_) return gpu::elapsed_ms(begin.gpu_->cuda_event, end.gpu_->cuda_event);
  MOIETY_CHECK(begin.time_ && end.time_ && begin.complete() && end.complete(),
               "elapsed_ms: the events are not both recorded on one device and complete");
  return static_cast<double>(*end.time_ - *begin.time_) * 1e-6;
}

void check_device(const char* operation, const char* argument, const TensorView& x,
                  const Stream& stream) {
  MOIETY_CHECK(!x.defined() || x.device() == stream.device(),
               "{}: {} is {}, but must be on {} as the stream", operation, argument, x.describe(),
               name(stream.device()));
}

}  // namespace moiety
