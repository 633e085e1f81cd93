#include <cstdlib>
#include <cstring>
#include <cuda_runtime.h>
#include <nccl.h>

#include "moiety/base/log.h"
#include "moiety/base/shared_library.h"
#include "moiety/comm/nccl/functions.h"

namespace moiety::comm::nccl {
namespace {

constexpr int kLeast = 22800;  // 10000 * major + 100 * minor + patch
static_assert(sizeof(Id) == sizeof(ncclUniqueId));

// NCCL's own functions.
struct Library {
  decltype(&ncclGetErrorString) error_string;
  decltype(&ncclGetUniqueId) unique_id;
  decltype(&ncclCommInitRankConfig) init;
  decltype(&ncclCommSplit) split;
  decltype(&ncclGroupStart) group_start;
  decltype(&ncclGroupEnd) group_end;
  decltype(&ncclSend) send;
  decltype(&ncclRecv) receive;
  decltype(&ncclAllGather) all_gather;
  decltype(&ncclBroadcast) broadcast;
  decltype(&ncclCommGetAsyncError) async_error;
  decltype(&ncclCommDestroy) destroy;
  decltype(&ncclCommAbort) abort;
};
Library library;

// NVLink multicast is never used, and an order of launches that NCCL takes from the host's ends in a
// segmentation fault where two groups are captured (NCCL 2.28.9).
void set_environment() {
  constexpr int kReplace = 1;
  ::setenv("NCCL_NVLS_ENABLE", "0", kReplace);
  const char* implicit = std::getenv("NCCL_LAUNCH_ORDER_IMPLICIT");
  if (implicit && std::strcmp(implicit, "0") != 0) {
    log(LogLevel::kWarning, "NCCL_LAUNCH_ORDER_IMPLICIT is {}: set to 0, as NCCL fails with it",
        implicit);
    ::setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "0", kReplace);
  }
}

ncclComm_t group_of(void* group) { return static_cast<ncclComm_t>(group); }
cudaStream_t stream_of(void* stream) { return static_cast<cudaStream_t>(stream); }

ncclConfig_t config() {
  ncclConfig_t out = NCCL_CONFIG_INITIALIZER;
  out.splitShare = 1;
  return out;
}

int join(const Id& id, int ranks, int rank, int device, void** group) {
  cudaSetDevice(device);
  ncclUniqueId unique;
  std::memcpy(&unique, id.data(), sizeof(unique));
  ncclConfig_t settings = config();
  ncclComm_t comm = nullptr;
  const ncclResult_t result = library.init(&comm, ranks, unique, rank, &settings);
  *group = comm;
  return result;
}

int split(void* parent, int color, int key, int device, void** group) {
  cudaSetDevice(device);
  ncclConfig_t settings = config();
  ncclComm_t comm = nullptr;
  const ncclResult_t result = library.split(
      group_of(parent), color < 0 ? NCCL_SPLIT_NOCOLOR : color, key, &comm, &settings);
  *group = comm;
  return result;
}

int async_error(void* group, int* code) {
  ncclResult_t found = ncclSuccess;
  const ncclResult_t result = library.async_error(group_of(group), &found);
  *code = found == ncclInProgress ? 0 : found;
  return result;
}

bool find_all(const SharedLibrary& nccl) {
  Library& f = library;
  return nccl.find("ncclGetErrorString", f.error_string) &&
         nccl.find("ncclGetUniqueId", f.unique_id) && nccl.find("ncclCommInitRankConfig", f.init) &&
         nccl.find("ncclCommSplit", f.split) && nccl.find("ncclGroupStart", f.group_start) &&
         nccl.find("ncclGroupEnd", f.group_end) && nccl.find("ncclSend", f.send) &&
         nccl.find("ncclRecv", f.receive) && nccl.find("ncclAllGather", f.all_gather) &&
         nccl.find("ncclBroadcast", f.broadcast) &&
         nccl.find("ncclCommGetAsyncError", f.async_error) &&
         nccl.find("ncclCommDestroy", f.destroy) && nccl.find("ncclCommAbort", f.abort);
}

Functions open() {
  Functions out;
  set_environment();
  const SharedLibrary nccl = SharedLibrary::open({"libnccl.so.2"});
  if (!nccl) {
    out.text = text("NCCL was not found (pip install nvidia-nccl-cu13): {}", nccl.error());
    return out;
  }
  int version = 0;
  const auto version_of = nccl.find<ncclResult_t(int*)>("ncclGetVersion");
  if (version_of) version_of(&version);
  out.text = text("NCCL {} ({})", dotted_version(size_t(version)), nccl.path());
  if (version < kLeast) {
    out.text += text(", at least {} is needed", dotted_version(kLeast));
    return out;
  }
  out.available = find_all(nccl);
  if (!out.available) {
    out.text += " lacks functions that are needed";
    return out;
  }
  out.error_text = [](int code) { return library.error_string(static_cast<ncclResult_t>(code)); };
  out.make_id = [](Id* id) -> int {
    ncclUniqueId unique;
    const ncclResult_t result = library.unique_id(&unique);
    std::memcpy(id->data(), &unique, sizeof(unique));
    return result;
  };
  out.join = join;
  out.split = split;
  out.begin = []() -> int { return library.group_start(); };
  out.end = []() -> int { return library.group_end(); };
  out.send = [](const void* data, size_t bytes, int peer, void* group, void* stream) -> int {
    return library.send(data, bytes, ncclUint8, peer, group_of(group), stream_of(stream));
  };
  out.receive = [](void* data, size_t bytes, int peer, void* group, void* stream) -> int {
    return library.receive(data, bytes, ncclUint8, peer, group_of(group), stream_of(stream));
  };
  out.all_gather = [](const void* send, void* recv, size_t bytes, void* group,
                      void* stream) -> int {
    return library.all_gather(send, recv, bytes, ncclUint8, group_of(group), stream_of(stream));
  };
  out.broadcast = [](void* data, size_t bytes, int root, void* group, void* stream) -> int {
    return library.broadcast(data, data, bytes, ncclUint8, root, group_of(group),
                             stream_of(stream));
  };
  out.async_error = async_error;
  out.destroy = [](void* group) -> int { return library.destroy(group_of(group)); };
  out.abort = [](void* group) -> int { return library.abort(group_of(group)); };
  return out;
}

}  // namespace

const Functions& functions() {
  static const Functions table = open();
  return table;
}

}  // namespace moiety::comm::nccl
