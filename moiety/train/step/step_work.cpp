// One step of the pipeline: its input from the host, and the work on the device.
#include <array>
#include <optional>

#include "moiety/base/error.h"
#include "moiety/base/log.h"
#include "moiety/comm/gpu_waits.h"
#include "moiety/model/step_input.h"
#include "moiety/train/step/step_pipeline.h"

namespace moiety::train {

void StepPipeline::run_step() {
  found_.reset();
  if (captures_steps()) {
    for (int64_t m = 1; m < micro_steps_; ++m) feed_batch(m);
    feed_update();
    launch_graph();
    return;
  }
  FirstNonFinite probe(learner_.stream);
  if (checks_tensors()) learner_.transformer().set_probe(&probe);
  enqueue_passes(true);
  learner_.transformer().set_probe(nullptr);
  found_ = probe.finding();
  heartbeat_.phase("optimizer");
  feed_update();
  enqueue_update();
}

void StepPipeline::launch_graph() {
  if (!graph_) {
    graph_.emplace(learner_.stream, [&] {
      enqueue_passes(false);
      enqueue_update();
    });
    if (ranks_on_gpus()) {  // see Note [Ranks on one GPU]
      Event ready;
      ready.record(learner_.stream);
      world_.wait(ready);
      world_.barrier();
    }
    const int waiting = comm::waiting_streams(world_);
    MOIETY_CHECK(waiting <= comm::kMaxWaitingStreams,
                 "train: a rank waits for peers on {} streams, at most {} can be", waiting,
                 comm::kMaxWaitingStreams);
    log(LogLevel::kDebug, "the step is a CUDA graph of {} nodes; {} streams wait for peers",
        graph_->nodes(), waiting);
  }
  graph_->launch(learner_.stream);
}

// Batch 0 of a step comes before everything else, since it tells whether there is a step.
void StepPipeline::feed_batch(int64_t m) {
  heartbeat_.phase("data");
  const data::Batch* batch = loader_->next();
  data_ended_ = batch == nullptr;
  if (batch) batches_.put(*batch, uint64_t(made_step_ * micro_steps_ + m));
}

model::Batch StepPipeline::fetch_batch() {
  const int64_t tokens_of_rank = config_.pass_tokens();
  model::Batch batch = batches_.fetch(learner_.stream);
  batch.first_token = data_rank(plan_.grid, world_.rank()) * tokens_of_rank;
  batch.all_tokens = data_ranks(plan_.grid) * tokens_of_rank;
  return batch;
}

void StepPipeline::enqueue_passes(bool feeds) {
  const Stream& stream = learner_.stream;
  model::Transformer& model = learner_.transformer();
  learner_.optimizer.begin_forward(stream);
  sums_.clear(stream);
  const auto ready = gradients_ready();
  const auto step = learner_.gathering.begin_step("train", micro_steps_);
  if (model.takes_turns()) {
    enqueue_turns(feeds);
  } else {
    for (int64_t m = 0; m < micro_steps_; ++m) {
      if (feeds && m > 0) feed_batch(m);
      const ArenaScope activations(learner_.arena);
      const model::Batch batch = fetch_batch();
      heartbeat_.phase("forward");
      model.forward(batch, learner_.capacity.rows(), sums_, learner_.arena, stream,
                    m == 0 ? await_weights() : nullptr);
      heartbeat_.phase("backward");
      model.backward(batch, stream, m + 1 == micro_steps_ ? ready : nullptr);
    }
  }
  learner_.gathering.flush();
  model.check_tokens();
}

void StepPipeline::enqueue_turns(bool feeds) {
  const Stream& stream = learner_.stream;
  model::Transformer& model = learner_.transformer();
  const std::array<Arena*, 2> arenas{&learner_.arena, &*learner_.other_arena};
  std::array<std::optional<ArenaScope>, 2> activations;
  activations[0].emplace(*arenas[0]);
  model::Batch batch = fetch_batch();
  heartbeat_.phase("forward");
  model.forward(batch, learner_.capacity.rows(), sums_, *arenas[0], stream, await_weights());
  for (int64_t m = 1; m < micro_steps_; ++m) {
    if (feeds) feed_batch(m);
    const size_t mine = size_t(m) % 2;
    activations[mine].emplace(*arenas[mine]);
    const model::Batch next = fetch_batch();
    heartbeat_.phase("backward and forward");
    model.backward_and_forward(batch, next, learner_.capacity.rows(), sums_, *arenas[mine], stream);
    activations[1 - mine].reset();
    batch = next;
  }
  heartbeat_.phase("backward");
  model.backward(batch, stream, gradients_ready());
}

// Lets ranks on GPUs bring weights beside the first forward.
model::Transformer::AwaitWeights StepPipeline::await_weights() {
  if (!ranks_on_gpus()) return {};
  return [this](int end) { learner_.optimizer.await_weights(end, learner_.stream); };
}

// Lets ranks on GPUs sum gradients beside the last backward.
model::Transformer::GradientsReady StepPipeline::gradients_ready() {
  if (!ranks_on_gpus()) return {};
  return [this](int first) { learner_.optimizer.on_grads_ready(first, learner_.stream); };
}

void StepPipeline::feed_update() {
  namespace word = optim::input_word;
  auto* words = reinterpret_cast<double*>(update_input_.slot(enqueued_));
  words[word::kLr] = optim::learning_rate(schedule_, made_step_ - 1);
  words[word::kWeightDecay] = config_.optim.weight_decay;
  words[word::kClip] = config_.train.grad_clip;
  words[word::kBad] = found_ ? double(found_->statistics.nan + found_->statistics.infinite) : 0;
  words[word::kFlags] = requests_();
}

void StepPipeline::enqueue_update() {
  const Stream& stream = learner_.stream;
  optim::DistributedOptimizer& optimizer = learner_.optimizer;
  update_input_.fetch(stream);
  const TensorView input(update_input_.block().raw(), DType::kFloat64, {model::kStepInputWords},
                         plan_.device);
  const TensorView report(report_.view().raw(), DType::kFloat64, {model::kStepReportWords},
                          plan_.device);
  model::set_step_input(sums_, learner_.capacity.refuses_drops(), input, stream);
  optimizer.enqueue(input, report, stream);
  if (config_.model.moe_layers() > 0) {
    world_.all_reduce(sums_.pairs_LE(), comm::ReduceOp::kSum, stream).wait();
  }
  if (config_.moe.bias_rate > 0) {
    learner_.transformer().update_router_bias(sums_.pairs_LE(), float(config_.moe.bias_rate),
                                              stream, optimizer.skip());
  }
  learner_.transformer().update_scales(optimizer.skip(), stream);
  reports_.store(report_, stream);
  reported_sums_.store(sums_.memory(), stream);
  for (const GpuWait& wait : gpu_waits_) wait.sums->store(wait.word.ns, stream);
}

model::StepStats StepPipeline::repeat_passes(const data::SamplerState& from, TensorProbe& probe) {
  start_data(&from);
  made_step_ = step_;
  feed_batch(0);
  learner_.transformer().set_probe(&probe);
  enqueue_passes(true);
  learner_.transformer().set_probe(nullptr);
  return sums_.read(learner_.stream);
}

optim::StepReport StepPipeline::repeat_update() {
  feed_update();
  enqueue_update();
  learner_.stream.synchronize();
  return read_report(enqueued_);
}

}  // namespace moiety::train
