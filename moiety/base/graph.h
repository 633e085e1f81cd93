// GPU work that is put together once and launched many times, without the host in between.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "moiety/base/stream.h"

namespace moiety {

class Graph {
 public:
  Graph() = default;
  // Captures the work that `enqueue` puts on `stream`, and on streams that wait for its events and
  // that it waits for in the end; nothing of it runs. Then makes the graph ready to launch.
  //
  // `stream` is not the legacy default stream. Work that the CUDA run time cannot capture
  // (allocations, waits of the host, pageable memory) is an Error(kCuda); then nothing is captured.
  // Other threads may do as they like meanwhile (thread-local mode).
  Graph(const Stream& stream, const std::function<void()>& enqueue);

  // Captures anew and keeps the addresses of the executable graph, which is cheaper than another
  // Graph where only arguments and sizes change. False if the executable had to be made anew.
  bool update(const std::function<void()>& enqueue);
  // Launches the graph behind the work on `stream`. The memory that the work was captured with must
  // still be there.
  void launch(const Stream& stream) const;
  // Number of nodes of the graph: kernels, copies and so on.
  int64_t nodes() const { return nodes_; }

 private:
  struct Destroy {
    void operator()(void* executable) const;
  };
  Stream stream_;
  std::unique_ptr<void, Destroy> executable_;
  int64_t nodes_ = 0;
};

}  // namespace moiety
