// The calls of the CUDA run time that buffers, streams, events and graphs need, behind plain
// pointers: the seam between code that includes no CUDA header and gpu_runtime_cuda.cpp (or
// no_gpu_runtime_cuda.cpp).
//
// Errors are Error(kCuda), which name the call and the error; errors of `free` and `destroy` are
// logged. Handles come from the functions here or from the caller.
#pragma once

#include <cstddef>
#include <cstdint>

#include "moiety/base/gpu.h"

namespace moiety::gpu {

// The facts behind gpu_status and gpu_properties, which keep them.
GpuStatus find_gpus();
GpuProperties find_properties(int index);
int64_t free_memory(int device);
// A function of the driver as CUDA 12 has it, found through the run time, so that nothing links
// libcuda; null if the driver has none. Only where CUDA is built.
void* driver_function(const char* name);
// Makes it the GPU to which this thread comes back from calls for others (CudaDeviceGuard), unless
// the process has a context on the one that it is now (0 at first): to come back to a GPU makes one
// there, which takes some hundred MB of it. So a thread that works for one GPU says which.
void make_current(int device);

// Zeroed GPU memory, aligned to 256 bytes. Error(kOutOfMemory) names `what`, the bytes and how much
// is free.
void* allocate(int device, int64_t bytes, const char* what);
void free(int device, void* data) noexcept;
// Zeroed host memory that GPUs read and write directly.
void* allocate_pinned(int64_t bytes, const char* what);
void free_pinned(void* data) noexcept;

// A stream that neither waits for the legacy default stream nor holds it up, of a high priority. It
// has been used: a stream's first work does not begin while a kernel waits on the GPU, so if that is the
// kernel of a rank which waits for this work, both stand; and where streams are made anew again and
// again, a captured step may come to stand behind a kernel that waits for it. So the process keeps a
// stream that is given back, for the next who asks; it comes with the work that it still has
// (docs/adr/0031-processes-without-mpi.md#what-stood-still).
void* create_stream(int device);
// The same of the lowest priority.
void* create_lane(int device);
void destroy_stream(int device, void* stream) noexcept;
void synchronize_stream(int device, void* stream);
// Gives the stream a byte to clear: what follows is not its first work in a while, which may be held
// up as a new stream's is.
void touch_stream(int device, void* stream);
// Waits for all that this process has given the GPU to do.
void synchronize_device(int device);

void* create_event(int device, bool timed);
void destroy_event(int device, void* event) noexcept;
void record_event(int device, void* event, void* stream);
bool event_complete(int device, void* event);
void synchronize_event(int device, void* event);
void stream_wait(int device, void* stream, void* event);
double elapsed_ms(void* begin, void* end);

// A run of `count` rows of `bytes` bytes each, which begin `pitch` bytes apart; never empty.
struct Rows {
  std::byte* data;
  int64_t bytes, pitch, count;
  bool dense() const { return count == 1 || bytes == pitch; }
};
void copy_rows(int device, const Rows& to, const Rows& from, void* stream);
void fill_rows(int device, const Rows& to, uint8_t value, void* stream);

// Begin and end a capture, in thread-local mode. `end_capture` gives the graph; after an error it
// gives null if `failing`, else it throws.
void begin_capture(int device, void* stream);
void* end_capture(int device, void* stream, bool failing);
void destroy_graph(void* graph) noexcept;
int64_t graph_nodes(void* graph);
// An executable copy of the graph, uploaded.
void* instantiate(int device, void* graph, void* stream);
void destroy_executable(void* executable) noexcept;
// Gives an executable the arguments of another graph. False if the two have different shapes.
bool update_executable(void* executable, void* graph);
void launch_executable(int device, void* executable, void* stream);

}  // namespace moiety::gpu
