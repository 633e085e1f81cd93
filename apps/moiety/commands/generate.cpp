#include "apps/moiety/commands/generate.h"

#include <cstdio>
#include <iostream>
#include <unistd.h>

#include <CLI/CLI.hpp>

#include "apps/moiety/commands/command_line.h"
#include "apps/moiety/commands/conversation.h"
#include "apps/moiety/commands/info_sheet.h"
#include "apps/moiety/commands/text_generator.h"
#include "apps/moiety/config/checkpoints.h"
#include "apps/moiety/config/device_choice.h"
#include "apps/moiety/exit_code.h"
#include "apps/moiety/report/result.h"
#include "moiety/base/log.h"
#include "moiety/train/checkpoints.h"

namespace moiety::app {
namespace {

constexpr const char* kGenerateAbout =
    "Continues a text: prints the prompt and, as they come, the tokens behind it, until the end "
    "of\n"
    "a document, a --stop text or --tokens. Without a prompt a new document begins. Special "
    "tokens\n"
    "that a prompt spells are such; what the tokenizer's template puts before a text (often bos)\n"
    "stands before it.\n\n"
    "With --chat every line of standard input, or --prompt alone, is said to the model, which "
    "answers\n"
    "with all that was said before in mind, in the form of its chat template.";

struct GenerateArguments {
  std::string path, prompt, system, device = "auto";
  int64_t samples = 1;
  bool json = false, interactive = false, chat = false;
  std::optional<data::ChatTemplate> chat_template;
  std::optional<int64_t> threads;
  GenerationRules rules;
};

std::optional<data::ChatTemplate> chat_template_called(std::string_view word) {
  if (word == "chatml") return data::ChatTemplate::kChatml;
  if (word == "mistral") return data::ChatTemplate::kMistral;
  if (word == "llama3") return data::ChatTemplate::kLlama3;
  return std::nullopt;
}

bool parse(const std::vector<std::string>& arguments, GenerateArguments& a) {
  CLI::App app(kGenerateAbout, "moiety generate");
  app.add_option("CKPT", a.path, "checkpoint, or run directory: its newest one")->required();
  CLI::Option* prompt = app.add_option("--prompt", a.prompt, "text to continue");
  add_number(app, "--tokens", a.rules.tokens, between(1, 1 << 24), "the most that are made");
  add_number(app, "--samples", a.samples, between(1, 1 << 20), "continuations, each on its own");
  app.add_option("--stop", a.rules.stops, "text that ends a continuation, and is not shown")
      ->take_all()
      ->expected(1);
  ChoiceRules& choice = a.rules.choice;
  add_number(app, "--temperature", choice.temperature, between(0, 100),
             "0: always the likeliest token");
  add_number(app, "--top-k", choice.top_k, between(0, 1 << 24),
             "choose among the k likeliest; 0: all");
  add_number(app, "--top-p", choice.top_p, between(0, 1),
             "choose among the likeliest that have this share together");
  add_seed(app, "--seed", choice.seed, "of the choices");
  app.add_flag("--interactive", a.interactive,
               "continue every line of standard input, each as a prompt of its own")
      ->excludes(prompt);
  CLI::Option* chat = app.add_flag("--chat", a.chat, "keep a conversation")
                          ->excludes("--interactive")
                          ->excludes("--samples");
  app.add_option("--system", a.system, "what the model is told before a conversation")->needs(chat);
  add_words(app, "--chat-template", one_of("auto", "chatml", "mistral", "llama3"), "auto",
            "form of a conversation; auto: by the tokenizer's tokens",
            [&a](std::string_view word) { a.chat_template = chat_template_called(word); })
      ->needs(chat);
  app.add_flag("--json", a.json, "a line of JSON for each continuation");
  add_device_option(app, a.device);
  add_threads_option(app, a.threads);
  if (!parse_command_line(app, arguments)) return false;
  for (const std::string& stop : a.rules.stops) {
    if (stop.empty()) throw UsageError("--stop \"\": must be a text");
  }
  if (a.samples > 1 && choice.temperature == 0) {
    log(LogLevel::kWarning, "generate: with --temperature 0 all samples are the same");
  }
  return true;
}

std::string json_line(int64_t sample, const std::string& prompt, const Continuation& c) {
  return JsonLine()
      .add("sample", sample)
      .raw("prompt", text_json(prompt))
      .raw("text", text_json(c.text))
      .add("tokens", c.tokens)
      .add("end", c.end)
      .text();
}

// Continues a prompt as often as was asked for; `first` is the number of the first sample.
void continue_prompt(TextGenerator& generator, const GenerateArguments& a,
                     const std::string& prompt, int64_t first) {
  for (int64_t s = 0; s < a.samples; ++s) {
    if (!a.json && s > 0) print_result("---\n");
    if (!a.json) print_result(prompt);
    const Continuation c = generator.run(prompt, uint32_t(first + s), [&](std::string_view text) {
      if (!a.json) print_result(text);
    });
    print_result(a.json ? json_line(first + s, prompt, c) + "\n" : "\n");
  }
}

// Calls `take` with every line of standard input; a person who types them sees a sign to do so.
void each_line(bool json, const std::function<void(const std::string& line)>& take) {
  const bool is_typed = ::isatty(STDIN_FILENO) && !json;
  while (true) {
    if (is_typed) std::fputs("> ", stderr);
    std::string line;
    if (!std::getline(std::cin, line)) break;
    take(line);
  }
  if (is_typed) std::fputs("\n", stderr);
}

// The loop of --interactive.
void continue_lines(TextGenerator& generator, const GenerateArguments& a) {
  int64_t first = 0;
  each_line(a.json, [&](const std::string& line) {
    continue_prompt(generator, a, line, first);
    first += a.samples;
  });
}

void converse(TextGenerator& generator, const data::ChatRenderer& renderer,
              const GenerateArguments& a) {
  Conversation conversation(generator, renderer, a.system);
  int64_t turn = 0;
  const auto say = [&](const std::string& line) {
    const Continuation c = conversation.say(line, [&](std::string_view text) {
      if (!a.json) print_result(text);
    });
    print_result(a.json ? json_line(turn, line, c) + "\n" : "\n");
    ++turn;
  };
  a.prompt.empty() ? each_line(a.json, say) : say(a.prompt);
}

}  // namespace

int generate_command(const std::vector<std::string>& arguments) {
  GenerateArguments a;
  if (!parse(arguments, a)) return kExitDone;
  const Device device = rank_device(a.device);
  const CheckpointInfo checkpoint = read_checkpoint_info(train::find_checkpoint(a.path));
  const data::Tokenizer tokenizer = data::Tokenizer::load(checkpoint.options.data.tokenizer);
  const train::TrainConfig config = train_config(checkpoint, tokenizer);
  std::optional<data::ChatRenderer> renderer;
  if (a.chat) {
    renderer.emplace(tokenizer, chat_template_of(tokenizer, a.chat_template));
    end_answers(*renderer, tokenizer, a.rules);
  }
  const int64_t pass_tokens = a.interactive || a.chat
                                  ? config.data.seq_len
                                  : std::ssize(prompt_tokens(tokenizer, a.prompt));
  train::run_alone(inference_threads(checkpoint, a.threads), [&](comm::Communicator& world) {
    const Stream stream = Stream::on(device);
    train::InferenceModel model(checkpoint.path, config, pass_tokens, world, stream);
    TextGenerator generator(model, tokenizer, a.rules, pass_tokens, config.data.seq_len, stream);
    if (renderer) {
      converse(generator, *renderer, a);
    } else {
      a.interactive ? continue_lines(generator, a) : continue_prompt(generator, a, a.prompt, 0);
    }
    model.model().close();
  });
  return kExitDone;
}

}  // namespace moiety::app
