#include "apps/moiety/commands/eval.h"

#include <algorithm>
#include <cmath>
#include <unistd.h>

#include <CLI/CLI.hpp>

#include "apps/moiety/commands/command_line.h"
#include "apps/moiety/config/checkpoints.h"
#include "apps/moiety/config/device_choice.h"
#include "apps/moiety/exit_code.h"
#include "apps/moiety/report/people.h"
#include "apps/moiety/report/result.h"
#include "moiety/base/json_line.h"
#include "moiety/data/tokenizer.h"
#include "moiety/train/amax_histories.h"
#include "moiety/train/checkpoints.h"
#include "moiety/train/evaluation.h"
#include "moiety/train/inference_model.h"
#include "moiety/train/precision.h"

namespace moiety::app {
namespace {

constexpr const char* kEvalAbout =
    "How well a checkpoint predicts token files: loss in nats per token, perplexity, bits per "
    "byte\n"
    "of text, and by MoE layer how many tokens the busiest expert gets, against the mean (bal; 1 "
    "is\n"
    "balanced). A sentence on a terminal, one JSON line in a file or pipe.";

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

// The same for people.
std::string result_sentence(const CheckpointInfo& checkpoint,
                            const train::EvaluationResult& result) {
  std::string out = text("{}: loss {:.4f} nats a token, perplexity {:.4g}", checkpoint.path,
                         result.loss, std::exp(result.loss));
  if (std::isfinite(result.bits_per_byte))
    out += text(", {:.4f} bits a byte", result.bits_per_byte);
  out += text(", over {}", counted(result.tokens, "token"));
  if (result.balance.empty()) return out;
  const auto [least, most] = std::minmax_element(result.balance.begin(), result.balance.end());
  return out +
         text("; the busiest expert of a layer has {:.2f} to {:.2f} times the mean", *least, *most);
}

}  // namespace

int eval_command(const std::vector<std::string>& arguments) {
  std::string path, wanted = "auto";
  std::vector<std::string> data;
  int64_t samples = 64;
  std::optional<int64_t> threads;
  bool json = false;
  CLI::App app(kEvalAbout, "moiety eval");
  app.add_option("CKPT", path, "checkpoint, or run directory: its newest one")->required();
  app.add_option("--data", data, "token files")->required();
  add_number(app, "--samples", samples, find_key("eval.samples", "--samples").rule,
             "of each file, from its start");
  app.add_flag("--json", json, "one line of JSON on a terminal too");
  add_device_option(app, wanted);
  add_threads_option(app, threads);
  if (!parse_command_line(app, arguments)) return kExitDone;

  const Device device = rank_device(wanted);
  const CheckpointInfo checkpoint = read_checkpoint_info(train::find_checkpoint(path));
  const data::Tokenizer tokenizer = data::Tokenizer::load(checkpoint.options.data.tokenizer);
  const train::TrainConfig config = train_config(checkpoint, tokenizer);
  std::vector<data::WeightedPath> files;
  for (const std::string& file : data) files.push_back({file});
  const auto source = data::open_token_files(files, config.data.seq_len, tokenizer.vocab(),
                                             tokenizer.identity(), config.data.pack);
  train::run_alone(inference_threads(checkpoint, threads), [&](comm::Communicator& world) {
    const Stream stream = Stream::on(device);
    const int64_t tokens = config.pass_tokens();
    train::InferenceModel model(checkpoint.path, config, tokens, world, stream);
    // Evaluation is as in the run: with the recipe of the checkpoint's step.
    model.transformer().set_precision(
        precision_of_recipe(config, recipe_of_step(config, std::max<int64_t>(checkpoint.step, 1))));
    train::load_histories(checkpoint.path, model.transformer(), world, stream);
    data::LoaderConfig loader;
    loader.micro_batch = config.train.micro_batch;
    loader.document_mask = config.data.document_mask;
    loader.pack = config.data.pack;
    data::ValidationSet set(source, samples, loader);
    train::ExpertCapacity capacity(config, model.transformer(), tokens);
    Arena arena("activations", device);
    const train::EvaluationResult result = evaluate(model.model(), set, capacity, arena, stream);
    const bool is_read = ::isatty(STDOUT_FILENO) && !json;
    print_result((is_read ? result_sentence : result_line)(checkpoint, result) + "\n");
    model.model().close();
  });
  return kExitDone;
}

}  // namespace moiety::app
