// The run time of GPUs in builds without CUDA. Functions that take a handle are never reached,
// since no handle can be made.
#include "moiety/base/gpu_runtime.h"

namespace moiety::gpu {

GpuStatus find_gpus() {
  return {.text = "this build has no CUDA (configure with `cmake --preset gpu`)"};
}
GpuProperties find_properties(int) { fail_without_cuda("gpu_properties"); }
int64_t free_memory(int) { fail_without_cuda("gpu_free_memory"); }

void make_current(int) { fail_without_cuda("make_current"); }

Activity activity() { return {}; }

void* allocate(int, int64_t, const char* what) { fail_without_cuda(what); }
void free(int, void*) noexcept {}
void* allocate_pinned(int64_t, const char* what) { fail_without_cuda(what); }
void free_pinned(void*) noexcept {}

void* create_stream(int) { fail_without_cuda("stream"); }
void* create_lane(int) { fail_without_cuda("lane"); }
void destroy_stream(int, void*) noexcept {}
void synchronize_stream(int, void*) { fail_without_cuda("stream"); }
void touch_stream(int, void*) { fail_without_cuda("stream"); }
void synchronize_device(int) { fail_without_cuda("gpu"); }

void* create_event(int, bool) { fail_without_cuda("event"); }
void destroy_event(int, void*) noexcept {}
void record_event(int, void*, void*) { fail_without_cuda("event"); }
bool event_complete(int, void*) { fail_without_cuda("event"); }
void synchronize_event(int, void*) { fail_without_cuda("event"); }
void stream_wait(int, void*, void*) { fail_without_cuda("event"); }
double elapsed_ms(void*, void*) { fail_without_cuda("event"); }

void copy_rows(int, const Rows&, const Rows&, void*) { fail_without_cuda("copy"); }
void fill_rows(int, const Rows&, uint8_t, void*) { fail_without_cuda("fill_bytes"); }

void begin_capture(int, void*) { fail_without_cuda("graph"); }
void* end_capture(int, void*, bool) { fail_without_cuda("graph"); }
void destroy_graph(void*) noexcept {}
int64_t graph_nodes(void*) { fail_without_cuda("graph"); }
void* instantiate(int, void*, void*) { fail_without_cuda("graph"); }
void destroy_executable(void*) noexcept {}
bool update_executable(void*, void*) { fail_without_cuda("graph"); }
void launch_executable(int, void*, void*) { fail_without_cuda("graph"); }

}  // namespace moiety::gpu
