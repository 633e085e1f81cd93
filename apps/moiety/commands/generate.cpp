#include "apps/moiety/commands/generate.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include <CLI/CLI.hpp>

#include "apps/moiety/commands/command_line.h"
#include "apps/moiety/commands/token_choice.h"
#include "apps/moiety/config/checkpoints.h"
#include "apps/moiety/config/device_choice.h"
#include "apps/moiety/config/train_options.h"
#include "apps/moiety/exit_code.h"
#include "moiety/base/copy.h"
#include "moiety/data/tokenizer.h"
#include "moiety/model/decoder.h"
#include "moiety/train/checkpoints.h"
#include "moiety/train/inference_model.h"

namespace moiety::app {
namespace {

constexpr const char* kGenerateAbout =
    "Continues a text: prints the prompt and, as they come, the tokens behind it, until the end "
    "of\n"
    "a document or --tokens. Without a prompt a new document begins.";

void print(const std::string& bytes) {
  std::fwrite(bytes.data(), 1, bytes.size(), stdout);
  std::fflush(stdout);
}

void check_finite(std::span<const float> logits) {
  if (std::all_of(logits.begin(), logits.end(), [](float x) { return std::isfinite(x); })) return;
  throw NumericalError("generate: the model gives logits that are not finite");
}

// `context` has at least one token.
void generate(train::InferenceModel& model, const data::Tokenizer& tokenizer,
              std::vector<int32_t> context, int64_t tokens, TokenChoice choice,
              const Stream& stream) {
  const int64_t positions = int64_t(context.size()) + tokens;
  model::Decoder decoder(model.transformer(), 1, positions);
  Arena arena("activations", stream.device());
  const int64_t vocab = model.transformer().config().vocab;
  const Tensor logits_PV(DType::kFloat32, {1, vocab}, stream.device(), "logits");
  const Tensor on_host(DType::kFloat32, {1, vocab}, "logits");
  // A model's vocabulary may be larger than the tokenizer's, to have a suitable size.
  const std::span<const float> logits(on_host.data<float>(), tokenizer.vocab());
  for (int64_t n = 0; n < tokens; ++n) {
    decoder.append(std::vector<model::Decoder::Continuation>{{0, context}}, logits_PV, arena,
                   stream);
    copy(on_host, logits_PV, stream);
    stream.synchronize();
    check_finite(logits);
    const int32_t next = choice.choose(logits, uint32_t(n));
    if (next == int32_t(tokenizer.eos())) break;
    print(tokenizer.decode(std::vector<int32_t>{next}));
    context = {next};
  }
  print("\n");
}

}  // namespace

int generate_command(const std::vector<std::string>& arguments) {
  std::string path, prompt, wanted = "auto";
  int64_t tokens = 128;
  ChoiceRules rules;
  CLI::App app(kGenerateAbout, "moiety generate");
  app.add_option("CKPT", path, "checkpoint, or run directory: its newest one")->required();
  app.add_option("--prompt", prompt, "text to continue");
  app.add_option("--tokens", tokens, "the most that are made")
      ->check(CLI::PositiveNumber.description(""))
      ->capture_default_str();
  app.add_option("--temperature", rules.temperature, "0: always the likeliest token")
      ->check(CLI::Range(0.0, 100.0).description(""))
      ->capture_default_str();
  app.add_option("--top-k", rules.top_k, "choose among the k likeliest; 0: all")
      ->check(CLI::NonNegativeNumber.description(""))
      ->capture_default_str();
  app.add_option("--top-p", rules.top_p, "choose among the likeliest that have this share together")
      ->check(CLI::Range(0.0, 1.0).description(""))
      ->capture_default_str();
  app.add_option("--seed", rules.seed, "of the choices")->capture_default_str();
  add_device_option(app, wanted);
  if (!parse_command_line(app, arguments)) return kExitDone;

  const Device device = rank_device(wanted, 1);
  const CheckpointInfo checkpoint = read_checkpoint_info(train::find_checkpoint(path));
  const data::Tokenizer tokenizer = data::Tokenizer::load(checkpoint.options.data.tokenizer);
  std::vector<uint32_t> ids;
  tokenizer.encode(prompt, ids);
  if (ids.empty()) ids.push_back(tokenizer.eos());  // as before a document
  train::run_alone([&](comm::Communicator& world) {
    const Stream stream = Stream::on(device);
    train::InferenceModel model(checkpoint.path, train_config(checkpoint), int64_t(ids.size()),
                                world, stream);
    print(prompt);
    generate(model, tokenizer, {ids.begin(), ids.end()}, tokens, TokenChoice(rules), stream);
    model.model().close();
  });
  return kExitDone;
}

}  // namespace moiety::app
