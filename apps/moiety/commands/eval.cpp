#include "apps/moiety/commands/eval.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include <CLI/CLI.hpp>

#include "apps/moiety/commands/command_line.h"
#include "apps/moiety/config/checkpoints.h"
#include "apps/moiety/config/device_choice.h"
#include "apps/moiety/config/train_options.h"
#include "apps/moiety/exit_code.h"
#include "moiety/base/json_line.h"
#include "moiety/data/tokenizer.h"
#include "moiety/train/checkpoints.h"
#include "moiety/train/evaluation.h"
#include "moiety/train/inference_model.h"
#include "moiety/train/precision.h"

namespace moiety::app {
namespace {

constexpr const char* kEvalAbout =
    "How well a checkpoint predicts token files. Prints one JSON line: loss in nats per token,\n"
    "perplexity, bits per byte of text, and by MoE layer how many tokens the busiest expert gets,\n"
    "against the mean (bal; 1 is balanced).";

std::string result_line(const CheckpointInfo& checkpoint, const train::EvaluationResult& result) {
  return JsonLine()
      .add("checkpoint", checkpoint.path)
      .add("step", checkpoint.step)
      .add("tokens", result.tokens)
      .add("loss", result.loss)
      .add("perplexity", std::exp(result.loss))
      .add("bits_per_byte", result.bits_per_byte)
      .add("bal", std::span<const double>(result.balance))
      .text();
}

}  // namespace

int eval_command(const std::vector<std::string>& arguments) {
  std::string path, wanted = "auto";
  std::vector<std::string> data;
  int64_t samples = 64;
  CLI::App app(kEvalAbout, "moiety eval");
  app.add_option("CKPT", path, "checkpoint, or run directory: its newest one")->required();
  app.add_option("--data", data, "token files")->required();
  app.add_option("--samples", samples, "of each file, from its start")
      ->check(CLI::PositiveNumber.description(""))
      ->capture_default_str();
  add_device_option(app, wanted);
  if (!parse_command_line(app, arguments)) return kExitDone;

  const Device device = rank_device(wanted, 1);
  const CheckpointInfo checkpoint = read_checkpoint_info(train::find_checkpoint(path));
  const train::TrainConfig config = train_config(checkpoint);
  const data::Tokenizer tokenizer = data::Tokenizer::load(checkpoint.options.data.tokenizer);
  std::vector<data::WeightedPath> files;
  for (const std::string& file : data) files.push_back({file});
  const auto source =
      data::open_token_files(files, config.data.seq_len, tokenizer.vocab(), tokenizer.identity());
  train::run_alone([&](comm::Communicator& world) {
    const Stream stream = Stream::on(device);
    const int64_t tokens = config.pass_tokens();
    train::InferenceModel model(checkpoint.path, config, tokens, world, stream);
    // Evaluation is as in the run: with the recipe of the checkpoint's step.
    model.transformer().set_precision(
        precision_of_recipe(config, recipe_of_step(config, std::max<int64_t>(checkpoint.step, 1))));
    data::LoaderConfig loader;
    loader.micro_batch = config.train.micro_batch;
    loader.document_mask = config.data.document_mask;
    data::ValidationSet set(source, samples, loader);
    train::ExpertCapacity capacity(config, model.transformer(), tokens);
    Arena arena("activations", device);
    const train::EvaluationResult result = evaluate(model.model(), set, capacity, arena, stream);
    std::puts(result_line(checkpoint, result).c_str());
    model.model().close();
  });
  return kExitDone;
}

}  // namespace moiety::app
