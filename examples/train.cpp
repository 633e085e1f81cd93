// Trains a small mixture of experts on text, with the library alone. Started again with the same
// directory it goes on where it has stopped.
//
//   train DIRECTORY TEXT
#include "moiety/train/train.h"

#include <cstdio>
#include <string>

#include "moiety/comm/thread_group.h"
#include "moiety/data/prepare.h"
#include "moiety/data/tokenizer.h"
#include "moiety/train/checkpoints.h"

using namespace moiety;

// Prints the loss of every tenth step, and lines for people.
class Printer final : public train::Observer {
 public:
  void step(const train::StepRecord& r, const train::StepWork&) override {
    if (r.step % 10 == 0) std::printf("step %d loss %.4f\n", int(r.step), r.loss);
  }
  void say(LogLevel, const std::string& line) override { std::puts(line.c_str()); }
};

int main(int argc, char** argv) {
  if (argc != 3) {
    std::puts("usage: train DIRECTORY TEXT");
    return 2;
  }
  const auto tokenizer = data::Tokenizer::load("bytes");
  train::TrainConfig config;
  config.run.dir = argv[1];
  config.model.vocab = tokenizer.vocab();
  config.model.d_model = 64;
  config.model.layers = 2;
  config.model.d_ffn = 64;
  config.data.seq_len = 64;
  config.train.steps = 60;
  config.train.micro_batch = 8;
  config.optim.lr = 0.003;
  config.optim.warmup_steps = 10;
  config.checkpoint.interval = 30;

  data::PrepareOptions prepare;
  prepare.inputs = {argv[2]};
  prepare.out = config.run.dir + "-data";
  const std::vector<data::WeightedPath> tokens = {{data::prepare(prepare).files[0].path}};

  Printer printer;
  train::TrainingPlan plan = train::make_plan(config);
  plan.train =
      data::open_token_files(tokens, config.data.seq_len, tokenizer.vocab(), tokenizer.identity());
  plan.resume_from = train::resume_candidates(config);
  plan.observer = &printer;
  comm::run_thread_ranks(1, {}, [&](comm::Communicator& world) { train::train(plan, world); });
}
