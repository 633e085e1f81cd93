#include "moiety/optim/grid_groups.h"

#include "moiety/base/error.h"

namespace moiety::optim {

using gtp::Axes;
using gtp::Axis;

GridGroups::GridGroups(const gtp::Grid& grid, comm::Communicator& world)
    : grid_(grid), world_(world) {
  gtp::check_grid(grid, world.size());
  for (const Axes axes : {Axes{}, Axes{Axis::kTp}, Axes{Axis::kGtp}, Axes{Axis::kDp},
                          Axes{Axis::kEp}, Axes{Axis::kEgtp}, Axes{Axis::kEdp},
                          Axes{Axis::kGtp, Axis::kDp}, Axes{Axis::kTp, Axis::kDp},
                          Axes{Axis::kTp, Axis::kGtp, Axis::kDp}, Axes{Axis::kEgtp, Axis::kEdp}}) {
    const Axes several = grid.several(axes);
    const auto [it, fresh] = groups_.emplace(several, nullptr);
    if (!fresh) continue;
    const int lowest = grid.group(several, world.rank()).front();
    it->second = world.split(lowest, world.rank(), several == Axes{} ? "one" : name(several));
  }
}

comm::Communicator& GridGroups::of(Axes axes) const {
  const auto it = groups_.find(grid_.several(axes));
  MOIETY_CHECK(it != groups_.end(), "grid: there is no group over {}", name(axes));
  return *it->second;
}

}  // namespace moiety::optim
