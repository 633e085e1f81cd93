#include "moiety/optim/grid_groups.h"

#include <set>

#include "moiety/base/error.h"

namespace moiety::optim {

using gtp::Axes;
using gtp::Axis;

namespace {

// The sets of axes that have groups.
const Axes kSets[] = {Axes{},
                      Axes{Axis::kTp},
                      Axes{Axis::kGtp},
                      Axes{Axis::kDp},
                      Axes{Axis::kEp},
                      Axes{Axis::kEgtp},
                      Axes{Axis::kEdp},
                      Axes{Axis::kGtp, Axis::kDp},
                      Axes{Axis::kTp, Axis::kDp},
                      Axes{Axis::kTp, Axis::kGtp, Axis::kDp},
                      Axes{Axis::kEgtp, Axis::kEdp}};

// Whether gradients are summed over these axes, beside computing.
bool sums_gradients(const Axes& axes) { return axes.has(Axis::kDp) || axes.has(Axis::kEdp); }

}  // namespace

GridGroups::GridGroups(const gtp::Grid& grid, comm::Communicator& world)
    : grid_(grid), world_(world) {
  gtp::check_grid(grid, world.size());
  for (const Axes axes : kSets) {
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

std::vector<int> GridGroups::sizes(const gtp::Grid& grid) {
  std::vector<int> out;
  if (const int ranks = grid.tp * grid.gtp * grid.dp; ranks > 1) out.push_back(ranks);
  std::set<Axes> seen;
  for (const Axes axes : kSets) {
    const Axes several = grid.several(axes);
    if (seen.insert(several).second && several != Axes{}) out.push_back(grid.degree(several));
  }
  return out;
}

std::vector<comm::Communicator*> GridGroups::all() const {
  std::vector<comm::Communicator*> out;
  if (world_.size() > 1) out.push_back(&world_);
  for (const auto& [axes, group] : groups_) {
    if (group->size() > 1) out.push_back(group.get());
  }
  return out;
}

void GridGroups::prepare(Device gpu, const comm::GpuLinkOptions& options) const {
  if (world_.size() > 1) world_.prepare(gpu, options);
  for (const auto& [axes, group] : groups_) {
    comm::GpuLinkOptions its = options;
    its.beside_compute = sums_gradients(axes);
    if (group->size() > 1) group->prepare(gpu, its);
  }
}

}  // namespace moiety::optim
