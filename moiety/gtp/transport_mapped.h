// The transport of ranks that map each other's memory (docs/spec/gtp.md#mapped-words): shards and
// send slots are read where they lie, and words that only grow give the order.
//
//    published[b][r]   how often rank r has published bucket b
//    drained[r]        of how many steps rank r has ended the gathers
//    produced[l][r]    rank r's send slot of exchange k of lane l is written; place[l][r] says
//                      where, subject[l][r] of which bundle and how it is sent
//    consumed[l][r]    rank r has read all send slots of exchange k of lane l
//
// Every rank has all words and polls its own copy; the rank that a word tells of stores it to all.
#pragma once

#include <functional>
#include <span>
#include <vector>

#include "moiety/comm/symmetric_buffer.h"
#include "moiety/comm/wait.h"
#include "moiety/gtp/transport.h"

namespace moiety::gtp {

class MappedTransport final : public Transport {
 public:
  MappedTransport(comm::Communicator& comm, TransportOptions options)
      : Transport(comm, std::move(options)) {}

  TransportKind kind() const override { return TransportKind::kMapped; }
  bool gathers_alone() const override { return true; }
  SlotArena::Block allocate(const std::string& what, int64_t bytes) override;
  void gather(const GatherJob& job, const Stream& lane) override;
  BundleSpec::Transfer reduce_transfer(const ReduceShape& shape) const override;
  void reduce(const ReduceJob& job, const Stream& lane) override;
  void await_readers(bool expert, const Stream& stream) override;
  void publish(int32_t bucket, const Stream& stream) override;
  void drain(const Stream& lane) override;
  void await_drained(const Stream& stream) override;

  // -- Building blocks of operations other than gather and reduce: of the rows path of embeddings.
  // They are for the body of a stream's operation.

  // Every rank's shard of an array of a member, by rank, once all ranks have published it.
  std::vector<const std::byte*> await_shards(BundleId bundle, Array array, int member);
  void check_send(BundleId bundle, const TensorView& send) const;
  // One of the reduces of the bundle's lane, of `send`, which lies in memory from `allocate`: when
  // all peers have come to it with the same subject, read(sends) gets their memory, by rank.
  void exchange(const Subject& subject, const TensorView& send,
                const std::function<void(std::span<std::byte* const> sends)>& read);
  void count_received(const TransportBytes& bytes) {
    received_.gathered += bytes.gathered;
    received_.reduced += bytes.reduced;
  }

 private:
  struct Block {
    comm::SymmetricBuffer memory;
    int64_t begin = 0;  // first byte, counted over the bytes of all blocks
  };
  // The wait of a rank, for its error.
  struct Waiting {
    const char *edge, *operation;
    bool expert = false;
    uint64_t number = 0;
    BundleId bundle = kNoBundle;
  };
  enum Words : int {
    kDrained,
    kProduced,
    kConsumed = kProduced + 2,
    kPlace = kConsumed + 2,
    kSubject = kPlace + 2,  // two words a lane
    kPublished = kSubject + 4
  };

  void on_shared() override;
  uint64_t place_of(const SharedBundle& bundle) const override;
  int64_t place(const void* at, int64_t bytes) const;
  std::byte* locate(int rank, int64_t place) const;

  // Element `of` of array `array` of words at rank `at`.
  uint64_t& word(int at, int array, int of) const;
  uint64_t& poison_word(int at) const;
  uint64_t own(int array) const { return comm::load_relaxed(word(rank(), array, rank())); }
  // Stores a word to all ranks.
  void tell(int array, uint64_t value) const;
  // Stores this rank's words about its exchange on a lane to rank `at`.
  void tell_exchange(int at, bool expert, uint64_t place, const Subject& subject) const;
  Subject subject_of(int of, bool expert) const;
  void await(int array, uint64_t value, const Waiting& waiting);
  void await_peer(int peer, int array, uint64_t value, const Waiting& waiting);
  std::string describe(const Waiting& waiting) const;
  void await_published(const SharedBundle& bundle, const Waiting& waiting);
  void run_gather(const GatherJob& job);

  std::vector<Block> blocks_;
  int64_t allocated_ = 0;
  comm::SymmetricBuffer words_;
  std::vector<uint64_t> seen_;  // by bucket: the version that all peers have published
  uint64_t gathers_[2] = {};    // dense, expert
};

}  // namespace moiety::gtp
