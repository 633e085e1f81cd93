// Writes every kernel and copy of a CUDA program, captured ones too, as lines for timeline.py:
// K or C, begin and end in ns, GPU, stream, blocks or bytes, name; and every call of CUDA by the host
// that does not only look: A, begin and end, 0, thread, 0, name. A library that CUDA loads into the
// program; timeline.py builds and uses it.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cupti.h>
#include <mutex>

namespace {

std::FILE* out = nullptr;
std::mutex writing;

void write_line(char kind, uint64_t begin, uint64_t end, uint32_t gpu, uint32_t stream,
                uint64_t size, const char* name) {
  std::fprintf(out, "%c\t%llu\t%llu\t%u\t%u\t%llu\t%s\n", kind,
               static_cast<unsigned long long>(begin), static_cast<unsigned long long>(end), gpu,
               stream, static_cast<unsigned long long>(size), name);
}

void write_call(const CUpti_ActivityAPI& call) {
  const char* name = nullptr;
  const auto domain = call.kind == CUPTI_ACTIVITY_KIND_DRIVER ? CUPTI_CB_DOMAIN_DRIVER_API
                                                              : CUPTI_CB_DOMAIN_RUNTIME_API;
  if (cuptiGetCallbackName(domain, call.cbid, &name) != CUPTI_SUCCESS) return;
  if (!std::strstr(name, "Query")) write_line('A', call.start, call.end, 0, call.threadId, 0, name);
}

void write_record(const CUpti_Activity* record) {
  switch (record->kind) {
    case CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL: {
      const auto* k = reinterpret_cast<const CUpti_ActivityKernel9*>(record);
      return write_line('K', k->start, k->end, k->deviceId, k->streamId, uint64_t(k->gridX),
                        k->name);
    }
    case CUPTI_ACTIVITY_KIND_DRIVER:
    case CUPTI_ACTIVITY_KIND_RUNTIME:
      return write_call(*reinterpret_cast<const CUpti_ActivityAPI*>(record));
    case CUPTI_ACTIVITY_KIND_MEMCPY: {
      const auto* c = reinterpret_cast<const CUpti_ActivityMemcpy5*>(record);
      return write_line('C', c->start, c->end, c->deviceId, c->streamId, c->bytes, "copy");
    }
    case CUPTI_ACTIVITY_KIND_MEMCPY2: {
      const auto* c = reinterpret_cast<const CUpti_ActivityMemcpyPtoP4*>(record);
      return write_line('C', c->start, c->end, c->deviceId, c->streamId, c->bytes, "peer copy");
    }
    default: {
      const auto* s = reinterpret_cast<const CUpti_ActivityMemset4*>(record);
      return write_line('C', s->start, s->end, s->deviceId, s->streamId, s->bytes, "fill");
    }
  }
}

void give_buffer(uint8_t** buffer, size_t* bytes, size_t* records) {
  *bytes = size_t{8} << 20;
  *buffer = static_cast<uint8_t*>(std::aligned_alloc(8, *bytes));
  *records = 0;
}

void take_buffer(CUcontext, uint32_t, uint8_t* buffer, size_t, size_t valid) {
  const std::lock_guard lock(writing);
  CUpti_Activity* record = nullptr;
  while (cuptiActivityGetNextRecord(buffer, valid, &record) == CUPTI_SUCCESS) write_record(record);
  std::free(buffer);
}

void finish() {
  cuptiActivityFlushAll(1);
  std::fflush(out);
}

}  // namespace

// CUDA calls it in the library that CUDA_INJECTION64_PATH names.
extern "C" int InitializeInjection() {
  const char* path = std::getenv("MOIETY_TIMELINE");
  out = path ? std::fopen(path, "w") : nullptr;
  if (!out) return 0;
  cuptiActivityRegisterCallbacks(give_buffer, take_buffer);
  for (const CUpti_ActivityKind kind :
       {CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL, CUPTI_ACTIVITY_KIND_MEMCPY,
        CUPTI_ACTIVITY_KIND_MEMCPY2, CUPTI_ACTIVITY_KIND_MEMSET, CUPTI_ACTIVITY_KIND_DRIVER,
        CUPTI_ACTIVITY_KIND_RUNTIME}) {
    cuptiActivityEnable(kind);
  }
  std::atexit(finish);
  return 1;
}
