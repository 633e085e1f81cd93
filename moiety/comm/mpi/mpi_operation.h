// A rank's side of a collective operation among processes.
//
// First the ranks tell each other their calls, so that calls which do not fit are an error with the
// same text everywhere and never a message of the wrong length. Short tensors, and the rows of an
// all_to_all, travel with the calls. Other data follow in rounds: a round is posted when the one
// before is complete. A reduction moves a segment of every part per round: the segment that arrived
// in the last round is summed, in rank order, while the next one is under way.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "moiety/base/buffer.h"
#include "moiety/comm/lane.h"
#include "moiety/comm/mpi/mpi_bootstrap.h"
#include "moiety/comm/mpi/transfers.h"

namespace moiety::comm::mpi {

class MpiOperation final : public RankOperation {
 public:
  // `staging` is memory for data that peers send to be summed; it grows as needed.
  MpiOperation(std::shared_ptr<const Group> group, std::shared_ptr<Buffer> staging,
               std::string label);

  void post(CollectiveCall call) override;
  Progress advance() override;
  int waits_for() const override;
  void give_up(const std::string& reason) override;

 private:
  enum class Stage { kCalls, kRows, kData };
  // The call as it travels, in one message with the data that it carries.
  struct Wire {
    int32_t kind, dtype, op, root;
    int64_t elements;
  };
  static constexpr int64_t kCarriedBytes = 960;  // at most
  static constexpr int64_t kCallBytes = sizeof(Wire) + kCarriedBytes;

  template <class Exchange>
  void with_peers(Exchange&& exchange);  // calls exchange(rank in the group, rank of the world)
  int64_t fill_carried();
  Wire wire(int rank) const;
  std::byte* carried(int rank);  // data that came with the call of that rank
  // Bytes of the tensor that the calls carry: all of it or none.
  int64_t carried_bytes() const;
  bool carries_rows() const { return row_bytes() <= room(); }
  // Bytes that a call may carry; 0 where its data would not fit into one message with it.
  int64_t room() const;
  int64_t row_bytes() const { return int64_t{16} * group_->size(); }
  void check_calls();
  void take_carried();
  void exchange_rows();
  void check_rows();
  // Posts the messages of the next round; false if there is none.
  bool next_round();
  void move();
  bool reduce_round();
  void prepare_segments();
  bool has_segment(int64_t index) const;
  ElementRange segment(int rank, int64_t index) const;
  std::byte* staged(int rank, int64_t index) const;
  void scatter(int64_t index);
  void sum(int64_t index);
  void gather(int64_t index);

  std::shared_ptr<const Group> group_;
  std::shared_ptr<Buffer> staging_;
  const std::string label_;
  const int tag_;

  CollectiveCall call_;
  Stage stage_ = Stage::kCalls;
  std::vector<std::byte> calls_;  // by rank: a Wire and the data it carries
  // by rank: rows that it sends to each rank, then rows that it expects of each
  std::vector<int64_t> rows_;
  int64_t round_ = 0;
  int64_t segment_elements_ = 0;
  int64_t slot_bytes_ = 0;  // bytes of staging for one segment of one rank
  Transfers transfers_;     // declared last so that it ends first: it uses the memory above
};

}  // namespace moiety::comm::mpi
