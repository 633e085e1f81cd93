#include "moiety/train/step/learner.h"

#include "moiety/hf/side_tensors.h"
#include "moiety/train/amax_histories.h"
#include "moiety/train/precision.h"

namespace moiety::train {
namespace {

optim::OptimizerConfig optimizer_config(const TrainConfig& c, Device device) {
  optim::OptimizerConfig o;
  o.device = device;
  o.adam.beta1 = c.optim.beta1;
  o.adam.beta2 = c.optim.beta2;
  o.adam.eps = c.optim.eps;
  o.weights = storage_dtype(c);
  o.moments = c.optim.state_dtype;
  o.seed = c.run.seed;
  o.guard = c.guard.nan;
  o.main_grad = c.optim.grad_dtype;
  o.grad_wire = gradient_wire(c);
  o.late_weights = true;
  o.max_skips = int(c.guard.max_skips);
  o.spike_sigma = c.guard.spike_sigma;
  return o;
}

}  // namespace

Learner::Learner(const TrainingPlan& plan, comm::Communicator& world)
    : config(plan.config),
      stream(Stream::on(plan.device)),
      model(config, plan.grid, config.pass_tokens(), world, plan.device),
      gathering(config, model.groups(), plan.memory_of_rank),
      optimizer(training_specs(config, model.transformer(), plan.grid, world.rank()),
                optimizer_config(config, plan.device), model.groups(), gathering.peers(false),
                gathering.peers(true)),
      capacity(config, model.transformer(), config.pass_tokens() / plan.grid.tp),
      arena("activations", plan.device),
      recipe(config.precision.recipe) {
  transformer().bind(optimizer.parameters(), gathering.bind(optimizer));
  if (transformer().takes_turns()) {
    other_arena.emplace("activations of the other micro-batch", plan.device);
  }
  share_rows();
}

void Learner::share_rows() {
  model.share_rows(capacity.rows(), arena, other_arena ? &*other_arena : nullptr);
}

bool Learner::settle() {
  const bool other = other_arena && other_arena->settle();
  return arena.settle() || other;
}

void Learner::set_recipe(Recipe wanted) {
  transformer().set_precision(precision_of_recipe(config, wanted));
  std::vector<std::optional<QuantSpec>> formats;
  for (const optim::ParamSpec& spec : transformer().parameter_specs()) {
    formats.push_back(spec.format);
  }
  gathering.renew();
  optimizer.set_formats(formats, stream);
  transformer().bind(optimizer.parameters(), gathering.bind(optimizer));
  optimizer.publish(stream);
  recipe = wanted;
}

optim::StateView Learner::loaded_state() {
  optim::StateView view = optimizer.state_view();
  const optim::StateView biases = model.router_biases();
  view.insert(view.end(), biases.begin(), biases.end());
  for (hf::SideFile& file : side_files) view.push_back(hf::side_piece(file));
  return view;
}

optim::StateView Learner::saved_state() {
  if (model.world().rank() != 0) return optimizer.state_view();
  optim::StateView view = loaded_state();
  const optim::StateView histories = saved_histories(transformer(), stream);
  view.insert(view.end(), histories.begin(), histories.end());
  return view;
}

}  // namespace moiety::train
