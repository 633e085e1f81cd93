#include "moiety/comm/thread/group.h"

#include <algorithm>

#include "moiety/base/error.h"
#include "moiety/comm/thread/shared_operation.h"

namespace moiety::comm::thread {

Group::Group(std::shared_ptr<World> world_in, std::string name_in, std::vector<int> ranks,
             Seconds deadline_in)
    : world(std::move(world_in)),
      name(std::move(name_in)),
      world_ranks(std::move(ranks)),
      deadline(deadline_in),
      entered(world_ranks.size()) {
  for (auto& set : slots) set.resize(world_ranks.size());
}

template <class T, class Key, class Make>
std::shared_ptr<T> Group::take(std::map<Key, Listed<T>>& list, const Key& key, int users,
                               Make&& make) {
  const std::lock_guard lock(mutex_);
  Listed<T>& listed = list[key];
  if (!listed.item) listed.item = make();
  std::shared_ptr<T> out = listed.item;
  if (++listed.asked == users) list.erase(key);
  return out;
}

std::shared_ptr<SharedOperation> Group::operation(uint64_t number, const std::string& label) {
  return take(operations_, number, size(),
              [&] { return std::make_shared<SharedOperation>(size(), label); });
}

std::shared_ptr<Group> Group::child(uint64_t number, int color, const std::string& child_name,
                                    const std::vector<int>& members) {
  return take(children_, {number, color}, static_cast<int>(members.size()), [&] {
    std::vector<int> ranks;
    for (int member : members) ranks.push_back(world_ranks[member]);
    return std::make_shared<Group>(world, child_name, std::move(ranks), deadline);
  });
}

std::vector<std::string> ThreadBootstrap::all_gather(std::string_view bytes) {
  check_all_gather(bytes);
  World& world = *group_->world;
  std::unique_lock lock(world.mutex);
  const uint64_t round = group_->entered[rank_] + 1;
  auto& slots = group_->slots[round % 2];
  slots[rank_] = bytes;
  group_->entered[rank_] = round;
  world.changed.notify_all();
  const auto complete = [&] {
    return *std::min_element(group_->entered.begin(), group_->entered.end()) >= round;
  };
  world.changed.wait_for(lock, group_->deadline,
                         [&] { return complete() || world.aborted || !group_->failure.empty(); });
  if (complete()) return slots;
  if (world.aborted) {
    fail(ErrorKind::kComm, "bootstrap of \"{}\": rank {} stopped: {}", group_->name, rank_,
         world.abort_text);
  }
  if (group_->failure.empty()) {
    group_->failure = text("bootstrap of \"{}\": rank {} waited {:.1f} s for {}", group_->name,
                           rank_, group_->deadline.count(), missing(round));
    world.changed.notify_all();
  }
  throw_error(ErrorKind::kComm, group_->failure);
}

std::string ThreadBootstrap::missing(uint64_t round) const {
  std::vector<int> out;
  for (int r = 0; r < size(); ++r) {
    if (group_->entered[r] < round) out.push_back(r);
  }
  return rank_list(out);
}

void ThreadBootstrap::abort(std::string_view reason) noexcept {
  World& world = *group_->world;
  const std::lock_guard lock(world.mutex);
  if (world.aborted) return;
  try {
    world.abort_text = text("rank {} failed: {}", group_->world_ranks[rank_], reason);
  } catch (...) {  // out of memory: the flag alone must do
  }
  world.aborted = true;
  world.changed.notify_all();
}

std::optional<std::string> ThreadBootstrap::aborted() const {
  World& world = *group_->world;
  if (!world.aborted.load(std::memory_order_acquire)) return std::nullopt;
  const std::lock_guard lock(world.mutex);
  return world.abort_text;
}

}  // namespace moiety::comm::thread
