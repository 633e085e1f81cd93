#include "moiety/comm/thread/thread_endpoint.h"

#include <algorithm>

#include "moiety/comm/thread/shared_operation.h"

namespace moiety::comm::thread {
namespace {

class ThreadOperation final : public RankOperation {
 public:
  ThreadOperation(std::shared_ptr<SharedOperation> shared, int rank)
      : shared_(std::move(shared)), rank_(rank) {}
  void post(CollectiveCall call) override { shared_->post(rank_, std::move(call)); }
  Progress advance() override { return shared_->advance(rank_); }
  int waits_for() const override { return shared_->waits_for(rank_); }
  void give_up(const std::string& reason) override { shared_->give_up(reason); }

 private:
  std::shared_ptr<SharedOperation> shared_;
  int rank_;
};

}  // namespace

std::unique_ptr<RankOperation> ThreadEndpoint::operation(uint64_t number,
                                                         const std::string& label) {
  return std::make_unique<ThreadOperation>(group_->operation(number, label), bootstrap_.rank());
}

std::shared_ptr<Endpoint> ThreadEndpoint::split(uint64_t number, int color, const std::string& name,
                                                const std::vector<int>& ranks,
                                                uint64_t /*largest_proposal*/) {
  if (color < 0) return nullptr;
  const auto own = std::find(ranks.begin(), ranks.end(), bootstrap_.rank());
  return std::make_shared<ThreadEndpoint>(group_->child(number, color, name, ranks),
                                          static_cast<int>(own - ranks.begin()));
}

}  // namespace moiety::comm::thread
