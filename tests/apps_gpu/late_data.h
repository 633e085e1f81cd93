// A training of two ranks on a GPU in which the data of one rank come late.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <thread>

#include "moiety/comm/thread_group.h"
#include "moiety/train/train.h"
#include "tests/support/error_of.h"
#include "tests/support/gpu_test.h"
#include "tests/train/tiny_config.h"

namespace moiety::app {

// A source one of whose samples comes late.
class LateSource final : public data::SampleSource {
 public:
  LateSource(int64_t seq_len, uint64_t late, Seconds by)
      : source_(data::synthetic_source("markov", seq_len, 264, 1)), late_(late), by_(by) {}

  int64_t seq_len() const override { return source_->seq_len(); }
  std::vector<data::SamplerSource> sources() const override { return source_->sources(); }
  void read(data::SampleRef sample, const data::SampleRow& row) const override {
    if (sample.index == late_) std::this_thread::sleep_for(by_);
    source_->read(sample, row);
  }
  double text_bytes(int source, uint64_t samples) const override {
    return source_->text_bytes(source, samples);
  }

 private:
  std::shared_ptr<const data::SampleSource> source_;
  uint64_t late_;
  Seconds by_;
};

// Trains with a deadline of 2 s and data that come after 8 s, in a run in `directory`; returns the
// error that ends it. Then trains another run, with data in time.
inline std::string error_of_late_data(const std::string& directory, int64_t ep) {
  train::TrainConfig c = train::tiny_config(directory + "/late", 2);
  c.parallel.ep = ep;
  c.data.shuffle = false;
  c.train.steps = 12;
  c.checkpoint.interval = 0;
  c.train.cuda_graph = false;
  train::TrainingPlan plan = train::make_plan(c, {DeviceType::kCuda, 0});
  const auto train_with = [&](std::shared_ptr<const data::SampleSource> source) {
    plan.train = std::move(source);
    comm::run_thread_ranks(2, {.deadline = Seconds(2)},
                           [&](comm::Communicator& world) { train::train(plan, world); });
  };
  const auto start = std::chrono::steady_clock::now();
  const std::string error = error_of(
      [&] { train_with(std::make_shared<LateSource>(c.data.seq_len, 8 * 7 + 2, Seconds(8))); });
  EXPECT_LT(Seconds(std::chrono::steady_clock::now() - start).count(), 30);
  plan.config.run.dir = directory + "/good";
  train_with(data::synthetic_source("markov", c.data.seq_len, 264, 1));
  return error;
}

}  // namespace moiety::app
