#include "moiety/comm/gpu_link.h"

#include <algorithm>
#include <optional>

namespace moiety::comm {

void wait(const Event& event, std::span<GpuLink* const> links, Bootstrap& bootstrap) {
  Backoff backoff;
  std::optional<Deadline> leave;  // waits end soon after an abort or a fault, work may take longer
  GpuLink* first = nullptr;       // the link that failed by itself
  while (!event.complete()) {
    backoff.pause();
    if (!backoff.time_to_look()) continue;
    const auto failed =
        std::find_if(links.begin(), links.end(), [](GpuLink* link) { return link->failed(); });
    if (!leave && (failed != links.end() || bootstrap.aborted())) {
      if (failed != links.end()) first = *failed;
      for (GpuLink* link : links) link->end_waits();
      leave.emplace(Seconds(10));
    }
    if (leave && leave->expired()) break;
  }
  if (first) first->check();
  for (GpuLink* link : links) link->check();
  if (leave) links.front()->fail_of_abort();
}

}  // namespace moiety::comm
