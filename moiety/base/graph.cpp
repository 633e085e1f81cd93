#include "moiety/base/graph.h"

#include "moiety/base/error.h"
#include "moiety/base/gpu_runtime.h"

namespace moiety {
namespace {

struct DestroyGraph {
  void operator()(void* graph) const { gpu::destroy_graph(graph); }
};
using Captured = std::unique_ptr<void, DestroyGraph>;

Captured capture(const Stream& stream, const std::function<void()>& enqueue) {
  const int device = stream.device().index;
  gpu::begin_capture(device, stream.cuda_stream());
  try {
    enqueue();
  } catch (...) {
    // The stream must leave its capture; the error to report is the one that `enqueue` threw.
    Captured ignored(gpu::end_capture(device, stream.cuda_stream(), true));
    throw;
  }
  return Captured(gpu::end_capture(device, stream.cuda_stream(), false));
}

}  // namespace

void Graph::Destroy::operator()(void* executable) const { gpu::destroy_executable(executable); }

Graph::Graph(const Stream& stream, const std::function<void()>& enqueue) : stream_(stream) {
  MOIETY_CHECK(stream.device().type == DeviceType::kCuda, "graph: the stream is the CPU's");
  update(enqueue);
}

bool Graph::update(const std::function<void()>& enqueue) {
  const Captured graph = capture(stream_, enqueue);
  nodes_ = gpu::graph_nodes(graph.get());
  if (executable_ && gpu::update_executable(executable_.get(), graph.get())) return true;
  executable_.reset(gpu::instantiate(stream_.device().index, graph.get(), stream_.cuda_stream()));
  return false;
}

void Graph::launch(const Stream& stream) const {
  MOIETY_CHECK(executable_ != nullptr, "graph: launched before anything was captured");
  MOIETY_CHECK(stream.device() == stream_.device(), "graph: captured on {}, launched on {}",
               name(stream_.device()), name(stream.device()));
  gpu::launch_executable(stream.device().index, executable_.get(), stream.cuda_stream());
}

}  // namespace moiety
