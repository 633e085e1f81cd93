// A planned step of gtp, in words and as a picture: the work and its times, the transfers on the
// lanes, and the places where computing waits for them.
#pragma once

#include <limits>
#include <span>
#include <string>

#include "moiety/gtp/plan.h"

namespace moiety::app {

struct PlannedStep {
  std::span<const gtp::TraceEvent> trace;
  std::span<const gtp::BundleSpec> bundles;
  gtp::Plan plan;
  gtp::Schedule schedule;
};

// The plan in words: calls, transfers, slots by class, merges, exposed time, crossings, hash.
std::string plan_report(const PlannedStep& step);

struct TimelineOptions {
  std::string title, note;
  double begin_ns = 0;  // beginning of the part that is shown
  double end_ns = std::numeric_limits<double>::infinity();
};
// The plan as an SVG document. There is a row for computing and one for each lane; waits have the
// color of a warning; a line leads from the end of a gather to its first use. Spans have their
// names as tooltips, and as labels where there is room.
std::string draw_timeline(const PlannedStep& step, const TimelineOptions& options);

}  // namespace moiety::app
