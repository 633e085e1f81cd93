// The state that ranks which are threads of one process share: the abort of their world, the rounds
// of the bootstrap's all-gather, the operations under way, and the sub-groups being made.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "moiety/comm/bootstrap.h"
#include "moiety/comm/gpu_transport.h"

namespace moiety::comm::thread {

class SharedOperation;

// The state of a world, shared by all groups that are split from it.
struct World {
  bool map_memory = true;
  GpuTransport gpu_transport = GpuTransport::kAuto;
  std::mutex mutex;  // guards abort_text and the rounds of all groups
  std::condition_variable changed;
  std::atomic<bool> aborted{false};
  std::string abort_text;
};

struct Group {
  Group(std::shared_ptr<World> world, std::string name, std::vector<int> world_ranks,
        Seconds deadline);

  const std::shared_ptr<World> world;
  const std::string name;
  const std::vector<int> world_ranks;  // world rank of each rank of the group
  const Seconds deadline;
  int size() const { return static_cast<int>(world_ranks.size()); }

  // The group's operation `number`. The first rank to ask makes it, the last one takes it off the
  // list. `label` opens the texts of its errors.
  std::shared_ptr<SharedOperation> operation(uint64_t number, const std::string& label);
  // The sub-group of color `color` in the group's split `number`, made and listed in the same way.
  std::shared_ptr<Group> child(uint64_t number, int color, const std::string& name,
                               const std::vector<int>& members);

  // The rounds of the bootstrap, guarded by world->mutex. A rank may be one round ahead of its
  // peers, hence two sets of slots.
  std::vector<uint64_t> entered;  // rounds entered, by rank
  std::array<std::vector<std::string>, 2> slots;
  std::string failure;  // of a round that passed its deadline, from which nobody returns

 private:
  template <class T>
  struct Listed {
    std::shared_ptr<T> item;
    int asked = 0;
  };
  template <class T, class Key, class Make>
  std::shared_ptr<T> take(std::map<Key, Listed<T>>& list, const Key& key, int users, Make&& make);

  std::mutex mutex_;  // guards the lists
  std::map<uint64_t, Listed<SharedOperation>> operations_;
  std::map<std::pair<uint64_t, int>, Listed<Group>> children_;
};

class ThreadBootstrap final : public Bootstrap {
 public:
  ThreadBootstrap(std::shared_ptr<Group> group, int rank) : group_(std::move(group)), rank_(rank) {}

  int rank() const override { return rank_; }
  int size() const override { return group_->size(); }
  std::vector<std::string> all_gather(std::string_view bytes) override;
  void abort(std::string_view text) noexcept override;
  std::optional<std::string> aborted() const override;
  Seconds deadline() const override { return group_->deadline; }

 private:
  // The ranks that have not entered round `round`, as text.
  std::string missing(uint64_t round) const;

  std::shared_ptr<Group> group_;
  int rank_;
};

}  // namespace moiety::comm::thread
