// The exchange of ranks that cannot map each other's memory (docs/spec/ep.md#collectives): records
// are packed by receiver and go through the collectives of the group's own communicator.
//
// Every operation opens with an all-to-all of greetings, which tell the operation of each rank and
// the number of records that will follow. So a peer that runs something else is named before sizes
// have to agree.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "moiety/base/buffer.h"
#include "moiety/moe/exchange.h"

namespace moiety::moe {

inline constexpr int kMostCollectiveRanks = 1024;

// The places in a rank's memory, in bytes from its base.
struct CollectiveLayout {
  EpBytes bytes;
  int64_t greetings = 0;  // [2, R]: to the ranks, from them
  int64_t heads = 0;      // [R, head_bytes]
  int64_t places = 0;     // int32 [T_max, K] with token_order: place of a pair's record
  int64_t sent = 0, received = 0;
};
CollectiveLayout collective_layout(const ExpertMap& map, const EpLimits& limits,
                                   const EpOptions& options);

class CollectiveExchange final : public Exchange {
 public:
  // Splits off a communicator. Collective.
  CollectiveExchange(comm::Communicator& comm, const ExpertMap& map, const EpOptions& options);

  EpTransport transport() const override { return EpTransport::kCollectives; }
  void allocate(const EpLimits& limits) override;
  void release() override;

  void announce(int, int64_t) override {}
  void send_head(const std::byte* head) override;
  const std::byte* await_head(int from) override;
  void transfer(std::span<const int64_t> received_R) override;

  // For tests, which poison the memory.
  const Buffer& memory() const { return memory_; }

 private:
  struct Greeting {
    Entry entry;
    int64_t records = 0;
  };

  void enter() override {}
  void leave() override { previous_ = entry_.word; }
  void place() override;
  Greeting* greetings() const;
  // Runs collective(communicator) and waits for it; false if that failed.
  template <class Collective>
  bool run(Collective&& collective);
  bool greet();
  void index_pairs();

  std::unique_ptr<comm::Communicator> own_;
  CollectiveLayout layout_;
  Buffer memory_;
  std::vector<int64_t> received_R_;  // numbers of records; 0 from the own rank
  uint64_t previous_ = 0;            // word of the operation before
};

}  // namespace moiety::moe
