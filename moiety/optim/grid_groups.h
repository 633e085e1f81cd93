// The communicators of a rank in the grids of parallelism (gtp/layout.h), made once and used by
// all.
#pragma once

#include <map>
#include <memory>
#include <vector>

#include "moiety/comm/communicator.h"
#include "moiety/gtp/layout.h"

namespace moiety::optim {

class GridGroups {
 public:
  // Collective over all ranks of the grid; `world` outlives the object. Throws what gtp::check_grid
  // throws.
  GridGroups(const gtp::Grid& grid, comm::Communicator& world);

  // The sizes of all(), in a grid.
  static std::vector<int> sizes(const gtp::Grid& grid);

  const gtp::Grid& grid() const { return grid_; }
  comm::Communicator& world() const { return world_; }
  // The ranks that differ from this one in exactly these axes, by rank. The sets are: each axis
  // alone, gtp x dp, tp x dp, tp x gtp x dp and egtp x edp; axes of one rank make no difference. No
  // communicator among them is `world`, so the order of operations there does not matter here.
  comm::Communicator& of(gtp::Axes axes) const;
  // Those of several ranks, `world` among them, each once.
  std::vector<comm::Communicator*> all() const;
  // Makes each of them ready for operations on this rank's GPU. Collective.
  void prepare(Device gpu, const comm::GpuLinkOptions& options = {}) const;

 private:
  gtp::Grid grid_;
  comm::Communicator& world_;
  std::map<gtp::Axes, std::unique_ptr<comm::Communicator>> groups_;
};

}  // namespace moiety::optim
