// A table of functions that stands for NCCL among ranks that are threads, on CPUs: what is sent lies
// in mailboxes until it is received, and a function has finished when it returns. It refuses what
// NCCL would wait for for ever, such as a send outside of a group of calls.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

#include "moiety/comm/nccl/functions.h"

namespace moiety::comm::nccl::stand_in {

enum Code { kFine, kNotGrouped, kOtherCall, kNobodySends, kBroken };

struct Message {
  char kind;  // 's'ent, 'g'athered, 'b'roadcast
  std::vector<char> data;
};

struct Shared {
  int ranks = 0;
  int joined = 0, ended = 0, aborted = 0;
  std::map<std::pair<int, int>, std::deque<Message>> mail;  // by sender and receiver
  std::map<int, std::pair<int, int>> choices;               // of a split: color and key by rank
  std::map<int, std::shared_ptr<Shared>> parts;             // of a split, by color
  int taken = 0;
};

// A rank's part of a group, with what it has called: S and R for a peer, ( and ), G, B.
struct Part {
  std::shared_ptr<Shared> shared;
  int rank = 0;
  std::string calls;
};

struct World {
  std::mutex mutex;
  std::condition_variable changed;
  std::map<Id, std::shared_ptr<Shared>> groups;
  std::deque<Part> parts;  // all that there ever were: a thread that was given up may still use one
  int ids = 0;
  std::atomic<int> async_error = 0;
  std::atomic<bool> broken = false;  // all sends fail
  bool cut = false;  // what is received ends without data, as where NCCL was aborted
};
inline World& world() {
  static auto& it = *new World;
  return it;
}

struct Call {
  bool sends;
  void* data;
  size_t bytes;
  int peer;
  Part* part;
};
inline thread_local int depth = 0;
inline thread_local std::vector<Call> calls;

inline Part& part_of(void* group) { return *static_cast<Part*>(group); }

// The lock is held.
inline void push(Part& part, int to, char kind, const void* data, size_t bytes) {
  const auto* begin = static_cast<const char*>(data);
  part.shared->mail[{part.rank, to}].push_back({kind, {begin, begin + bytes}});
  world().changed.notify_all();
}

inline int take(std::unique_lock<std::mutex>& lock, Part& part, int from, char kind, void* data,
                size_t bytes) {
  auto& box = part.shared->mail[{from, part.rank}];
  const auto there = [&] { return !box.empty() || world().cut; };
  if (!world().changed.wait_for(lock, std::chrono::seconds(10), there)) return kNobodySends;
  if (box.empty()) return kFine;
  const Message message = std::move(box.front());
  box.pop_front();
  if (message.kind != kind || message.data.size() != bytes) return kOtherCall;
  if (bytes > 0) std::memcpy(data, message.data.data(), bytes);
  return kFine;
}

inline int run_calls(std::vector<Call> list) {
  std::unique_lock lock(world().mutex);
  for (const Call& c : list) {
    if (c.sends) push(*c.part, c.peer, 's', c.data, c.bytes);
  }
  int code = kFine;
  for (const Call& c : list) {
    if (!c.sends && code == kFine) code = take(lock, *c.part, c.peer, 's', c.data, c.bytes);
  }
  return code;
}

inline int add_call(bool sends, void* data, size_t bytes, int peer, void* group) {
  if (depth == 0) return kNotGrouped;
  part_of(group).calls += sends ? 'S' : 'R';
  if (world().broken) return kBroken;
  calls.push_back({sends, data, bytes, peer, &part_of(group)});
  return kFine;
}

inline int all_gather(const void* send, void* recv, size_t bytes, void* group, void*) {
  Part& part = part_of(group);
  part.calls += 'G';
  std::unique_lock lock(world().mutex);
  for (int r = 0; r < part.shared->ranks; ++r) {
    if (r != part.rank) push(part, r, 'g', send, bytes);
  }
  auto* to = static_cast<char*>(recv);
  std::memmove(to + size_t(part.rank) * bytes, send, bytes);
  for (int r = 0; r < part.shared->ranks; ++r) {
    if (r == part.rank) continue;
    if (const int code = take(lock, part, r, 'g', to + size_t(r) * bytes, bytes)) return code;
  }
  return kFine;
}

inline int broadcast(void* data, size_t bytes, int root, void* group, void*) {
  Part& part = part_of(group);
  part.calls += 'B';
  std::unique_lock lock(world().mutex);
  if (part.rank != root) return take(lock, part, root, 'b', data, bytes);
  for (int r = 0; r < part.shared->ranks; ++r) {
    if (r != root) push(part, r, 'b', data, bytes);
  }
  return kFine;
}

inline int join(const Id& id, int ranks, int rank, int /*device*/, void** group) {
  std::unique_lock lock(world().mutex);
  auto& shared = world().groups[id];
  if (!shared) shared = std::make_shared<Shared>();
  shared->ranks = ranks;
  auto* part = &world().parts.emplace_back(Part{shared, rank, ""});
  ++part->shared->joined;
  world().changed.notify_all();
  world().changed.wait_for(lock, std::chrono::seconds(10),
                           [&] { return part->shared->joined == ranks; });
  *group = part;
  return part->shared->joined == ranks ? kFine : kNobodySends;
}

inline int split(void* parent, int color, int key, int /*device*/, void** group) {
  const Part& part = part_of(parent);
  Shared& shared = *part.shared;
  std::unique_lock lock(world().mutex);
  shared.choices[part.rank] = {color, key};
  world().changed.notify_all();
  world().changed.wait(lock, [&] { return int(shared.choices.size()) == shared.ranks; });
  if (color >= 0) {
    std::vector<std::tuple<int, int>> order;
    for (const auto& [rank, choice] : shared.choices) {
      if (choice.first == color) order.emplace_back(choice.second, rank);
    }
    std::sort(order.begin(), order.end());
    auto& made = shared.parts[color];
    if (!made) made = std::make_shared<Shared>();
    made->ranks = made->joined = int(order.size());
    const auto own = std::find(order.begin(), order.end(), std::tuple(key, part.rank));
    *group = &world().parts.emplace_back(Part{made, int(own - order.begin()), ""});
  }
  if (++shared.taken == shared.ranks) {  // ready for the next one
    shared.choices.clear();
    shared.parts.clear();
    shared.taken = 0;
    world().changed.notify_all();
  } else {
    world().changed.wait(lock, [&] { return shared.taken == 0; });
  }
  return kFine;
}

inline Functions functions() {
  Functions f;
  f.available = true;
  f.text = "a stand-in";
  f.error_text = [](int code) {
    constexpr const char* kTexts[] = {"fine", "not between begin and end", "another call",
                                      "nobody sends", "the link is broken"};
    return kTexts[code];
  };
  f.make_id = [](Id* id) -> int {
    const std::lock_guard lock(world().mutex);
    const int number = ++world().ids;
    std::memcpy(id->data(), &number, sizeof(number));
    return kFine;
  };
  f.join = join;
  f.split = split;
  f.begin = []() -> int { return ++depth == 1 ? kFine : kNotGrouped; };
  f.end = []() -> int {
    --depth;
    return run_calls(std::exchange(calls, {}));
  };
  f.send = [](const void* data, size_t bytes, int peer, void* group, void*) {
    return add_call(true, const_cast<void*>(data), bytes, peer, group);
  };
  f.receive = [](void* data, size_t bytes, int peer, void* group, void*) {
    return add_call(false, data, bytes, peer, group);
  };
  f.all_gather = all_gather;
  f.broadcast = broadcast;
  f.async_error = [](void*, int* code) -> int { return *code = world().async_error, kFine; };
  f.destroy = [](void* group) -> int {
    const std::lock_guard lock(world().mutex);
    ++part_of(group).shared->ended;
    return kFine;
  };
  f.abort = [](void* group) -> int {
    const std::lock_guard lock(world().mutex);
    ++part_of(group).shared->aborted;
    return kFine;
  };
  return f;
}

}  // namespace moiety::comm::nccl::stand_in
