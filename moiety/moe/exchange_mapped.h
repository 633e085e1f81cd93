// The exchange of ranks that map each other's memory (docs/spec/ep.md#mapped-memory): records are
// stored straight into regions of the receiver that only their sender writes, and words give the
// order.
//
// Half h = n mod depth of all regions belongs to epoch n: a rank stores into a peer's half only
// when the peer's credit says that it has read all of epoch n - depth.
#pragma once

#include <string>

#include "moiety/comm/symmetric_buffer.h"
#include "moiety/moe/peers/exchange_text.h"

namespace moiety::moe {

inline constexpr int kMostMappedRanks = 64;
// The number of words in which a rank says why it poisons: its entry, then that of the peer
// concerned.
inline constexpr int64_t kReasonWords = 6;

// The places in every rank's memory, in bytes from its base.
struct MappedLayout {
  EpBytes bytes;
  int64_t chunks = 0;  // flags of a sender in a half, without prepare's
  int64_t addr = 0, pitch = 0, width = 0, plan = 0, head = 0, ready = 0, credit = 0, poison = 0,
          reason = 0;
  int64_t meta = 0, message = 0;  // bytes of all messages, of one
  int64_t regions = 0, half = 0;
};
MappedLayout mapped_layout(const ExpertMap& map, const EpLimits& limits, const EpOptions& options);

class MappedExchange final : public Exchange {
 public:
  using Exchange::Exchange;

  EpTransport transport() const override { return EpTransport::kMapped; }
  void allocate(const EpLimits& limits) override;
  void release() override;
  std::string failure() const override;

  void announce(int to, int64_t chunk) override;
  void send_head(const std::byte* head) override;
  const std::byte* await_head(int from) override;
  void transfer(std::span<const int64_t> received_R) override;

  // For tests, which look into the words and forge them.
  const MappedLayout& layout() const { return layout_; }
  const comm::SymmetricBuffer& memory() const { return memory_; }
  // Element `index` of an array of words at rank `at`.
  uint64_t& word(int at, int64_t array, int64_t index) const {
    return reinterpret_cast<uint64_t*>(memory_.peer(at) + array)[index];
  }

 private:
  int half() const { return static_cast<int>(epoch_ % limits_.depth); }
  void enter() override;
  void leave() override;
  void find_direct() override;
  void place() override;
  void spread_poison(Failure failure, int about) override;
  uint64_t& ready_word(int at, int from, int64_t chunk) const;
  uint64_t& entry_word(int at, int64_t array, int from) const;
  bool await(int from, int64_t chunk, int64_t chunks_of_sender);
  std::byte* message(int at, int from) const;
  bool wait(uint64_t& word, int shift, Epoch wanted, const Awaited& awaited);
  void post(uint64_t& word, uint64_t value) const;
  std::string late_text(uint64_t word, int shift, Epoch wanted, const Awaited& awaited) const;
  uint64_t own_address() const;
  Entry entry_of(int peer, uint64_t head) const;
  bool differs(int peer, uint64_t head) const;
  bool meet(int peer);

  MappedLayout layout_;
  comm::SymmetricBuffer memory_;
};

}  // namespace moiety::moe
