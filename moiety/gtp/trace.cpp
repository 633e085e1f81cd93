#include "moiety/gtp/trace.h"

#include <cmath>
#include <vector>

#include "moiety/base/error.h"

namespace moiety::gtp {

const char* name(Kind kind) {
  constexpr const char* kNames[] = {"begin", "forward", "backward",  "recompute", "grad buffer",
                                    "grad",  "rows",    "rows grad", "cut",       "flush"};
  return kNames[static_cast<int>(kind)];
}

void check_trace(std::span<const TraceEvent> trace, int32_t bundles) {
  if (trace.empty()) return;
  const size_t last = trace.size() - 1;
  MOIETY_CHECK(trace[0].kind == Kind::kBegin && trace[last].kind == Kind::kFlush && last > 0,
               "gtp trace: from {} to {} in {} events, expected begin to flush",
               name(trace[0].kind), name(trace[last].kind), trace.size());
  constexpr int32_t kClosed = -1;
  std::vector<int32_t> buffer_at(bundles, kClosed);  // position of an open grad buffer
  std::vector<int32_t> consumed_at(bundles, -1);
  int32_t position = -1;
  for (size_t i = 0; i < trace.size(); ++i) {
    const TraceEvent& e = trace[i];
    position += !e.same_call;
    MOIETY_CHECK((e.kind == Kind::kBegin) == (i == 0) && (e.kind == Kind::kFlush) == (i == last),
                 "gtp trace: {} at event {} of {}", name(e.kind), i, trace.size());
    MOIETY_CHECK(std::isfinite(e.work_ns) && e.work_ns >= 0,
                 "gtp trace: work of {} ns at position {}", e.work_ns, position);
    MOIETY_CHECK(!e.same_call || (is_consume(e.kind) && trace[i - 1].kind == e.kind),
                 "gtp trace: {} of bundle {} in the call at position {}, which is {}", name(e.kind),
                 e.bundle, position, name(trace[i > 0 ? i - 1 : 0].kind));
    if (!names_bundle(e.kind)) continue;
    MOIETY_CHECK(e.bundle >= 0 && e.bundle < bundles,
                 "gtp trace: {} of bundle {} at position {}, of {} bundles", name(e.kind), e.bundle,
                 position, bundles);
    int32_t& open = buffer_at[e.bundle];
    if (is_consume(e.kind)) {
      MOIETY_CHECK(consumed_at[e.bundle] < position,
                   "gtp trace: bundle {} named twice in the call at position {}", e.bundle,
                   position);
      consumed_at[e.bundle] = position;
    } else if (begins_gradient(e.kind)) {
      MOIETY_CHECK(open == kClosed,
                   "gtp trace: {} of bundle {} at position {}, that of position {} was not reduced",
                   name(e.kind), e.bundle, position, open);
      if (!ends_gradient(e.kind)) open = position;
    } else if (ends_gradient(e.kind)) {
      MOIETY_CHECK(open != kClosed, "gtp trace: grad of bundle {} at position {} without a buffer",
                   e.bundle, position);
      open = kClosed;
    }
  }
  for (int32_t b = 0; b < bundles; ++b) {
    MOIETY_CHECK(buffer_at[b] == kClosed,
                 "gtp trace: grad buffer of bundle {} at position {} is never reduced", b,
                 buffer_at[b]);
  }
}

}  // namespace moiety::gtp
