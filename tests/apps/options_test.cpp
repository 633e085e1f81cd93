#include "apps/moiety/config/options.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <set>
#include <sys/stat.h>

#include <gtest/gtest.h>

#include "apps/moiety/config/model_options.h"
#include "apps/moiety/config/train_options.h"
#include "apps/moiety/exit_code.h"
#include "moiety/train/plan.h"
#include "tests/data/data_helpers.h"
#include "tests/support/error_of.h"

namespace moiety::app {
namespace {

Config from_arguments(const std::vector<std::string>& arguments) {
  return load_config({}, arguments);
}

std::string argument_error(const std::string& argument) {
  return error_of([&] { from_arguments({argument}); }, ErrorKind::kUsage);
}
std::string file_error(const std::string& toml) {
  return error_of([&] { parse_config(toml, "c.toml"); }, ErrorKind::kUsage);
}

TEST(Options, DefaultsObeyTheirRules) {
  const Options defaults;
  for (const Key& key : option_keys()) {
    const std::string argument = "--" + key.full_name() + "=" + value_text(key, defaults);
    const Config config = from_arguments({argument});
    EXPECT_EQ(value_text(key, config.options), value_text(key, defaults)) << argument;
    EXPECT_EQ(config.source[&key - option_keys().data()], "command line");
  }
}

TEST(Options, NamesAreUniqueAndDescribed) {
  std::set<std::string> names;
  for (const Key& key : option_keys()) {
    EXPECT_TRUE(names.insert(key.full_name()).second) << key.full_name();
    EXPECT_FALSE(key.help.empty()) << key.full_name();
  }
  size_t in_sections = 0;
  for (const Section& section : option_sections()) in_sections += section.keys.size();
  EXPECT_EQ(in_sections, option_keys().size());
}

// Arguments that a key must refuse because of its type.
std::vector<std::string> wrong_types(const Key& key) {
  Options options;
  switch (key.field(options).index()) {
    case 0:
      return {"1", "yes", "\"true\""};
    case 1:
      return {"1.5", "1.0", "true", "\"1\"", "ten", "99999999999999999999"};
    case 2:
      return {"true", "nan", "inf", "-inf", "\"1\"", "fast"};
    case 3:
      return {"[1]", "\"a\\nb\""};
    case 4:
      return {"1", "[1.5]", "[\"a\"]", "[[1]]"};
    case 5:
      return {"[1]", "[true]", "{path = \"a\"}"};
    default:
      return {"[1]", "[{path = 1}]", "[{path = \"a\", weight = 0}]", "[{file = \"a\"}]",
              "[{path = \"a\", weight = nan}]"};
  }
}

// Values just outside of a key's range.
std::vector<std::string> out_of_range(const Key& key) {
  Options options;
  const Rule& rule = key.rule;
  const size_t type = key.field(options).index();
  std::vector<std::string> values;
  const auto add = [&](double v) {
    if (!(rule.zero && v == 0)) {
      values.push_back(type == 2 ? text("{}", v) : std::to_string(int64_t(v)));
    }
  };
  if (type == 1 || type == 2) {
    if (std::isfinite(rule.min)) add(rule.open_min ? rule.min : rule.min - 1);
    if (std::isfinite(rule.max))
      add(rule.open_max ? rule.max : std::max(rule.max + 1, 2 * rule.max));
    if (rule.multiple > 1) add(std::max(rule.min, double(rule.multiple)) + 1);
  }
  if (!rule.choices.empty()) values.insert(values.end(), {"\"nonsense\"", "nonsense"});
  return values;
}

TEST(Options, EveryKeyRefusesWrongTypesAndValues) {
  for (const Key& key : option_keys()) {
    std::vector<std::string> values = wrong_types(key);
    const std::vector<std::string> outside = out_of_range(key);
    values.insert(values.end(), outside.begin(), outside.end());
    for (const std::string& value : values) {
      const std::string argument = "--" + key.full_name() + "=" + value;
      const std::string error = argument_error(argument);
      EXPECT_EQ(error.rfind(argument, 0), 0u) << error;  // begins with the argument
      EXPECT_NE(error.find(key.full_name()), std::string::npos) << error;
    }
  }
}

struct BadInput {
  const char* toml;
  const char* error;
};

TEST(Options, ErrorsOfFilesNameTheLine) {
  const BadInput cases[] = {
      {"[model]\n\nd_modle = 8\n",
       "c.toml:3: unknown key 'model.d_modle'; did you mean 'model.d_model'?"},
      {"[model]\nlr = 1\n", "c.toml:2: unknown key 'model.lr'; did you mean 'optim.lr'?"},
      {"[moe]\nexperts = 0\n", "c.toml:2: moe.experts = 0: must be an integer, 1..4096"},
      {"[model]\nd_model = 12\n",
       "c.toml:2: model.d_model = 12: must be an integer, 8..65536, a multiple of 8"},
      {"[model]\nvocab = 1\n", "c.toml:2: model.vocab = 1: must be an integer, 0 or 2..16777216"},
      {"[optim]\nbeta1 = 1.0\n", "c.toml:2: optim.beta1 = 1.0: must be a number, 0..<1"},
      {"[optim]\nlr = nan\n", "c.toml:2: optim.lr = nan: must be a number, >= 0"},
      {"[data]\nseq_len = \"long\"\n",
       "c.toml:2: data.seq_len = 'long': must be an integer, 1..1048576"},
      {"[optim]\nschedule = \"cos\"\n",
       "c.toml:2: optim.schedule = 'cos': must be one of constant | linear | cosine | wsd"},
      {"[parallel]\nlayout = \"auto\"\n",
       "c.toml:2: parallel.layout is not available in this version of Moiety"},
      {"[ep]\ncomm_sms = -1\n", "c.toml:2: ep.comm_sms = -1: must be an integer, 0..1024"},
      {"[ep]\noverlap = \"batch\"\n",
       "c.toml:2: ep.overlap = 'batch': must be one of auto | none | wgrad | shared | micro_batch"},
      {"[ep]\ndepth = 9\n", "c.toml:2: ep.depth = 9: must be an integer, 1..8"},
      {"[parallel]\npp = 2\n", "c.toml:2: parallel.pp is not supported"},
      {"[precision]\ngrad_reduce = \"fp8\"\n",
       "c.toml:2: precision.grad_reduce = 'fp8': must be one of main_grad | bf16"},
      {"[precision]\nrecipe = \"fp8\"\n",
       "c.toml:2: precision.recipe = 'fp8': must be one of fp32 | bf16 | fp8_tensor | fp8_block | "
       "mxfp8 | nvfp4"},
      {"[moe]\nactivation = \"gelu\"\n",
       "c.toml:2: moe.activation = 'gelu': must be one of swiglu | clamped_swiglu | qgeglu | "
       "relu2"},
      {"[moe]\nact_limit = 0\n", "c.toml:2: moe.act_limit = 0: must be a number, \"\" or >0..1e30"},
      {"[moe]\nact_limit = \"seven\"\n",
       "c.toml:2: moe.act_limit = 'seven': must be a number, \"\" or >0..1e30"},
      {"[moe]\nglu_interleave = 16\n",
       "c.toml:2: moe.glu_interleave = 16: must be an integer, 0 or 32"},
      {"[precision]\nkeep_first = -2\n",
       "c.toml:2: precision.keep_first = -2: must be an integer, -1..1024"},
      {"[precision]\nweight_2d = true\n", "c.toml:2: precision.weight_2d = true: must be one of"},
      {"[model.layers]\nx = 1\n", "c.toml:1: model.layers = {...}: must be an integer"},
      {"seed = 1\n", "c.toml:1: 'seed' stands outside a section such as [model]"},
      {"[model]\nlayers = 1\nlayers = 2\n", "c.toml:3: "},
      {"[model\n", "c.toml:1: "},
  };
  for (const BadInput& c : cases) {
    const std::string error = file_error(c.toml);
    EXPECT_EQ(error.rfind(c.error, 0), 0u) << error << "\nexpected " << c.error;
  }
  EXPECT_EQ(error_of([] { load_config(std::vector<std::string>{"/nowhere.toml"}, {}); },
                     ErrorKind::kUsage),
            "/nowhere.toml: cannot open: No such file or directory");
}

TEST(Options, ErrorsOfArgumentsNameTheArgument) {
  EXPECT_EQ(argument_error("--moe.exprets=4"),
            "--moe.exprets=4: unknown key 'moe.exprets'; did you mean 'moe.experts'?");
  EXPECT_EQ(argument_error("--moe.experts"),
            "--moe.experts: moe.experts = true: must be an integer, 1..4096");
  EXPECT_EQ(argument_error("--train.steps=1\nseed = 2").rfind("--train.steps=1\\nseed = 2: ", 0),
            0u);
}

TEST(Options, ArgumentsAreTomlOrRawText) {
  const Options o =
      from_arguments({"--run.dir=runs/7", "--run.resume=\"must\"", "--model.rope_theta=10000",
                      "--model.tie_embeddings", "--model.qk_norm=false",
                      "--model.dense_layers=[0, 2]", "--data.train=a.tok", "--data.valid=[\"b\"]"})
          .options;
  EXPECT_EQ(o.run.dir, "runs/7");
  EXPECT_EQ(o.run.resume, "must");
  EXPECT_EQ(o.model.rope_theta, 10000.0);
  EXPECT_TRUE(o.model.tie_embeddings);
  EXPECT_FALSE(o.model.qk_norm);
  EXPECT_EQ(o.model.dense_layers, (std::vector<int64_t>{0, 2}));
  ASSERT_EQ(o.data.train.size(), 1u);
  EXPECT_EQ(o.data.train[0].path, "a.tok");
  EXPECT_EQ(o.data.valid, std::vector<std::string>{"b"});
  EXPECT_EQ(from_arguments({"--run.dir=12"}).options.run.dir, "12");
  const auto weighted =
      from_arguments({"--data.train=[\"a\", {path = \"b\", weight = 2}]"}).options.data.train;
  ASSERT_EQ(weighted.size(), 2u);
  EXPECT_EQ(weighted[0].weight, 1.0);
  EXPECT_EQ(weighted[1].path, "b");
  EXPECT_EQ(weighted[1].weight, 2.0);
}

TEST(Options, LaterSourcesWin) {
  const TemporaryDirectory dir;
  dir.write("a.toml", "[model]\npreset = \"mixtral-8x7b\"\nlayers = 3\nheads = 16\n");
  dir.write("b.toml", "[model]\nlayers = 5\n");
  const std::vector<std::string> files{dir / "a.toml", dir / "b.toml"};
  const Config c = load_config(files, std::vector<std::string>{"--model.d_model=512"});
  EXPECT_EQ(c.options.model.kv_heads, 8);  // preset
  EXPECT_EQ(c.options.model.heads, 16);
  EXPECT_EQ(c.options.model.layers, 5);
  EXPECT_EQ(c.options.model.d_model, 512);
  const auto source = [&](const std::string& name) {
    for (const Key& key : option_keys()) {
      if (key.full_name() == name) return c.source[&key - option_keys().data()];
    }
    return std::string("?");
  };
  EXPECT_EQ(source("model.kv_heads"), "preset mixtral-8x7b");
  EXPECT_EQ(source("model.heads"), files[0] + ":4");
  EXPECT_EQ(source("model.layers"), files[1] + ":2");
  EXPECT_EQ(source("model.d_model"), "command line");
  EXPECT_EQ(source("optim.lr"), "default");
}

std::string without_comments(const std::string& toml) {
  std::string out;
  std::istringstream in(toml);
  for (std::string line; std::getline(in, line);) {
    line.erase(std::min(line.find("  # "), line.size()));
    line.erase(line.find_last_not_of(' ') + 1);
    out += line + "\n";
  }
  return out;
}

TEST(Options, PrintedConfigReadsBackTheSame) {
  const std::vector<std::vector<std::string>> cases{
      {},
      {"--moe.activation=qgeglu", "--moe.act_alpha=1.702", "--moe.act_limit=7",
       "--moe.act_offset="},
      {"--model.preset=qwen3-235b-a22b", "--optim.lr=1e-7", "--optim.eps=1.2345678901234567e-8"},
      {"--run.dir=a \"quoted\" \\ path # not a comment", "--model.dense_layers=[1,2]",
       "--data.train=[{path = \"x y\", weight = 0.1}, \"z\"]", "--data.valid=[\"p\", \"q\"]",
       "--run.seed=9223372036854775807", "--moe.capacity_factor=-1", "--model.preset="}};
  for (const auto& arguments : cases) {
    const Config config = from_arguments(arguments);
    const std::string printed = print_config(config);
    const std::string again = print_config(parse_config(printed, "p.toml"));
    EXPECT_EQ(without_comments(again), without_comments(printed));
    // Read under the same name, it prints the same to the letter.
    EXPECT_EQ(print_config(parse_config(again, "p.toml")), again);
  }
}

TEST(Options, NumbersArePrintedShort) {
  const std::string printed = print_config(from_arguments({"--optim.lr=0.00030"}));
  for (const char* line : {"rope_theta = 1e6 ", "norm_eps = 1e-6 ", "lr = 3e-4 ", "std = 0.02 ",
                           "scale = 1.0 ", "grad_clip = 1.0 "}) {
    EXPECT_NE(printed.find(line), std::string::npos) << line << printed;
  }
}

TEST(Options, HelpAndMarkdownHoldEveryKey) {
  const std::string help = options_help(), markdown = options_markdown();
  for (const Key& key : option_keys()) {
    EXPECT_NE(help.find("--" + key.full_name() + "="), std::string::npos) << key.full_name();
    EXPECT_NE(markdown.find("| `" + std::string(key.name) + "` |"), std::string::npos);
  }
}

TEST(Options, DocumentationIsCurrent) {
  EXPECT_EQ(read_all(MOIETY_SOURCE_DIR "/docs/config.md"), options_markdown())
      << "run: build/cpu/bin/moiety train --help=markdown > docs/config.md";
}

struct CrossCheck {
  std::vector<std::string> arguments;
  const char* error;
};

TEST(Options, KeysAreCheckedTogether) {
  const std::vector<std::string> base{"--run.dir=r", "--data.train=a.tok"};
  const CrossCheck cases[] = {
      {{}, "no error"},
      {{"--model.heads=6"}, "model.head_dim=0 needs model.heads=6 to divide model.d_model=256"},
      {{"--model.kv_heads=3"}, "model.kv_heads=3 must divide model.heads=8"},
      {{"--model.dense_layers=[4]", "--model.d_ffn_dense=8"}, "model.dense_layers=4 must be"},
      {{"--model.dense_layers=[1]"}, "model.d_ffn_dense=0 is needed by 1 dense layers"},
      {{"--model.moe_every=2"}, "model.d_ffn_dense=0 is needed by 2 dense layers"},
      {{"--model.vocab=100"}, "model.vocab = 100: the tokenizer \"bytes\" has 264 ids"},
      {{"--moe.top_k=9"}, "moe.top_k=9 must be in 1..8"},
      {{"--moe.shared_gate"}, "moe.shared_gate=true needs moe.shared_d_ffn > 0"},
      {{"--moe.activation=qgeglu", "--moe.act_alpha=1.702", "--moe.act_limit=7"},
       "moe.act_offset = \"\": moe.activation = \"qgeglu\" needs a number there"},
      {{"--moe.activation=qgeglu", "--moe.act_alpha=1.702", "--moe.act_limit=7",
        "--moe.act_offset=1", "--moe.expert_bias", "--moe.glu_interleave=32"},
       "no error"},
      {{"--moe.activation=clamped_swiglu"},
       "moe.act_limit = \"\": moe.activation = \"clamped_swiglu\" needs a number there"},
      {{"--moe.act_limit=7"},
       "moe.act_limit = 7: moe.activation = \"swiglu\" has no such parameter, expected \"\""},
      {{"--moe.activation=relu2", "--moe.glu_interleave=32"},
       "moe.glu_interleave=32: moe.activation has no gate to interleave, expected 0"},
      {{"--moe.d_ffn=40", "--moe.glu_interleave=32"},
       "moe.glu_interleave=32 must be 0, or a multiple of 8 that divides moe.d_ffn=40"},
      {{"--moe.path=cuda_plain"},
       "moe.path = \"cuda_plain\": grouped_mlp: path cuda_plain is required, "},
      {{"--moe.path=reference"}, "no error"},
      {{"--moe.capacity_factor=-0.5"}, "moe.capacity_factor = -0.5: 0 (automatic)"},
      {{"--router.groups=3"}, "router.groups=3 must divide moe.experts=8"},
      {{"--router.groups=2", "--router.group_top_k=3"}, "router.group_top_k=3 must be in 1..2"},
      {{"--router.groups=8", "--router.group_top_k=1"},
       "router.group_top_k=1 of router.groups=8 have fewer experts than moe.top_k=2"},
      {{"--moe.d_ffn=1048576", "--model.d_model=65536", "--model.heads=1024", "--moe.experts=4096"},
       "model.layers x moe.experts x model.d_model x moe.d_ffn = 4 x 4096 x 65536 x 1048576: a "
       "model of 3.4e+15 parameters is too large"},
      {{"--train.micro_batch=65536", "--train.global_batch=65536", "--data.seq_len=32768"},
       "train.micro_batch x data.seq_len x moe.top_k = 65536 x 32768 x 2, with "
       "moe.capacity_factor = 0"},
      {{"--moe.capacity_factor=4096", "--train.micro_batch=512", "--train.global_batch=512"},
       "train.micro_batch x data.seq_len x moe.top_k = 512 x 1024 x 2, with moe.capacity_factor = "
       "4096: a rank's experts would get 4.29e+09 rows, and can have 2147483647"},
      {{"--train.steps=1000000000", "--train.global_batch=1048576", "--data.seq_len=1048576",
        "--train.micro_batch=2"},
       "train.steps x train.global_batch x data.seq_len = 1000000000 x 1048576 x 1048576: more "
       "than 4e+18 tokens"},
      {{"--optim.lr=1e-5"}, "optim.min_lr = 3e-05: is above optim.lr = 1e-05"},
      {{"--optim.lr=1e-5", "--optim.schedule=constant"}, "no error"},
      {{"--precision.keep_last=99"},
       "precision.keep_first = -1 and precision.keep_last = 99: model.layers is 4"},
      {{"--data.tokenizer=gpt2"}, "tokenizer 'gpt2' does not exist"},
      {{"--parallel.ep=2"},
       "layout: run.ranks = 1: must be a multiple of parallel.ep x egtp = 2 x 1"},
      {{"--run.ranks=4", "--parallel.dp=2"},
       "layout: run.ranks = 4, but parallel.dp x gtp x tp = 2 x 1 x 1 = 2"},
      {{"--run.ranks=6", "--parallel.tp=4"},
       "layout: run.ranks = 6: must be a multiple of parallel.gtp x tp = 1 x 4"},
      {{"--run.ranks=8", "--parallel.tp=2", "--parallel.gtp=2", "--parallel.egtp=3"},
       "layout: run.ranks = 8: must be a multiple of parallel.ep x egtp = 1 x 3"},
      {{"--run.ranks=4", "--parallel.tp=4"},
       "parallel.tp = 4: must divide model.heads = 8, model.kv_heads = 2 and data.seq_len = 1024"},
      {{"--run.ranks=2", "--parallel.tp=2", "--data.seq_len=33"}, "parallel.tp = 2: must divide"},
      {{"--run.ranks=2", "--parallel.gtp=2", "--precision.grad_reduce=bf16"}, "no error"},
      {{"--run.ranks=2", "--parallel.tp=2", "--precision.recipe=fp8_block"},
       "parallel.tp=2 and the blocks of precision.recipe: layout of attn.qkv.weight: 384 rows "
       "cannot be cut by tp 2, expected a multiple of 768"},
      {{"--run.ranks=2", "--parallel.tp=2", "--precision.recipe=fp8_block",
        "--precision.attention_linears=false", "--moe.shared_d_ffn=128"},
       "parallel.tp=2 and the blocks of precision.recipe: layout of moe.shared.fc1.weight: 256 "
       "rows cannot be cut by tp 2, expected a multiple of 512"},
      {{"--run.ranks=2", "--parallel.tp=2", "--precision.recipe=mxfp8"}, "no error"},
      {{"--run.ranks=3", "--parallel.ep=3", "--train.global_batch=3"},
       "parallel.ep = 3: must divide moe.experts = 8"},
      {{"--run.ranks=2", "--parallel.ep=2", "--moe.layout=rank"}, "no error"},
      {{"--run.ranks=2", "--parallel.ep=2", "--ep.overlap=micro_batch", "--train.global_batch=2"},
       "ep.overlap = \"micro_batch\": two micro-batches take turns, and a step has one: "
       "train.global_batch = 2 is train.micro_batch x data ranks = 1 x 2"},
      {{"--run.ranks=2", "--moe.layout=rank"}, "no error"},
      {{"--run.ranks=3"}, "train.global_batch = 8: must be a multiple of train.micro_batch x"},
      {{"--train.steps=1", "--train.tokens=1"}, "train.steps = 1 and train.tokens = 1"},
      {{"--data.train=[]"}, "data.train = []: token files to train on are missing"},
      {{"--data.synthetic=copy"}, "data.train and data.synthetic = \"copy\" exclude each other"},
      {{"--run.dir="}, "no run directory: --run DIR"},
      {{"--precision.recipe=fp32", "--precision.switch_step=5"},
       "precision.switch_step = 5: a run of recipe fp32 cannot switch"},
      {{"--precision.recipe=fp8_block", "--precision.weight_2d=false"},
       "precision.weight_2d = \"false\": weights of recipe fp8_block are scaled by 128 x 128"},
      {{"--precision.recipe=fp8_tensor", "--precision.weight_2d=true"},
       "precision.weight_2d = \"true\": weights of recipe fp8_tensor have one scale each"},
      {{"--run.ranks=2", "--parallel.tp=2", "--precision.recipe=fp8_tensor"}, "no error"},
      {{"--precision.switch_recipe=fp8_block", "--precision.switch_step=5",
        "--precision.weight_2d=false"},
       "precision.weight_2d = \"false\""},
      {{"--precision.recipe=fp32", "--precision.dispatch=mxfp8"},
       "precision.dispatch = \"mxfp8\": recipe fp32 stores activations in fp32"},
      {{"--precision.recipe=nvfp4", "--precision.dispatch=fp8_block"}, "no error"},
      {{"--precision.recipe=nvfp4", "--precision.keep_first=3", "--precision.keep_last=2"},
       "precision.keep_first = 3 and precision.keep_last = 2: model.layers is 4"},
      {{"--precision.recipe=nvfp4", "--run.ranks=2", "--data.seq_len=24"},
       "train.micro_batch x data.seq_len = 1 x 24: must be a multiple of 16 on several data ranks"},
      {{"--precision.recipe=nvfp4", "--run.ranks=2", "--data.seq_len=24",
        "--precision.stochastic=false"},
       "no error"},
  };
  for (const CrossCheck& c : cases) {
    std::vector<std::string> arguments = base;
    arguments.insert(arguments.end(), c.arguments.begin(), c.arguments.end());
    const auto check = [&] {
      const Options options = from_arguments(arguments).options;
      const train::TrainConfig config = train_config(options);
      check_inputs(options);
      train::make_plan(config);
    };
    const bool sound = c.error == kNoError;
    const std::string error =
        error_of(check, sound ? std::nullopt : std::optional(ErrorKind::kUsage));
    EXPECT_EQ(error.rfind(c.error, 0), 0u) << error << "\nexpected " << c.error;
  }
}

TEST(Options, PresetsAreTheModelsPresets) {
  for (const char* name : {"tiny", "qwen3-30b-a3b", "qwen3-235b-a22b", "mixtral-8x7b"}) {
    const Options o = from_arguments({std::string("--model.preset=") + name}).options;
    const model::Config got = model_config(o, 264);
    model::Config expected = model::preset(name);
    if (expected.vocab == 0) expected.vocab = 264;
    EXPECT_EQ(model::parameter_count(got), model::parameter_count(expected)) << name;
    EXPECT_EQ(got.qk_norm, expected.qk_norm);
    EXPECT_EQ(got.norm_eps, expected.norm_eps);
    EXPECT_EQ(got.router.top_k, expected.router.top_k);
    EXPECT_EQ(got.router.aux, expected.router.aux);
    EXPECT_EQ(got.router.aux_coef, expected.router.aux_coef);
  }
}

TEST(Options, ConfigsThatComeAlongAreSound) {
  int files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(MOIETY_SOURCE_DIR "/configs")) {
    const std::string path = entry.path();
    EXPECT_EQ(error_of([&] { train_config(load_config(std::vector{path}, {}).options); }), kNoError)
        << path;
    ++files;
  }
  EXPECT_GE(files, 3);
}

TEST(Options, DeepKeysAreRefusedBeforeTheyAreParsed) {
  const auto dotted = [](std::string_view part, int times) {
    std::string key(part);
    for (int i = 1; i < times; ++i) key += "." + std::string(part);
    return key;
  };
  EXPECT_EQ(file_error("[" + dotted("a", 50000) + "]\n"), "c.toml:1: a key of more than 8 parts");
  EXPECT_EQ(file_error("\n# a.b.c.d.e.f.g.h.i\n" + dotted("a", 50000) + " = 1\n"),
            "c.toml:3: a key of more than 8 parts");
  // A quoted part may hold what ends a bare one; a long path is no key.
  EXPECT_EQ(file_error(dotted("'a=\\'", 50000) + " = 1\n"), "c.toml:1: a key of more than 8 parts");
  EXPECT_EQ(file_error(dotted("\"a\\\",\"", 50000) + " = 1\n"),
            "c.toml:1: a key of more than 8 parts");
  // A string that ends with the text, and with a backslash: the parser's error, no read beyond it.
  EXPECT_EQ(file_error("[run]\ndir = \"a\\").substr(0, 10), "c.toml:2: ");
  const std::string path = dotted("..", 100);
  EXPECT_EQ(
      parse_config("[run]\ndir = '" + path + "' # a.b.c.d.e.f.g.h.i.j\n", "c.toml").options.run.dir,
      path);
  const std::string deep = "--data.train={" + dotted("a", 50000) + " = 1}";
  EXPECT_EQ(from_arguments({deep}).options.data.train[0].path, deep.substr(13));  // a text, then
}

TEST(Options, AConfigIsARegularFile) {
  const TemporaryDirectory dir;
  const std::string fifo = dir / "fifo";
  ASSERT_EQ(::mkfifo(fifo.c_str(), 0600), 0);
  const auto error_at = [](const std::string& path) {
    return error_of([&] { load_config(std::vector<std::string>{path}, {}); }, ErrorKind::kUsage);
  };
  EXPECT_EQ(error_at(dir / "."), (dir / ".") + ": is a directory, not a file");
  EXPECT_EQ(error_at(fifo), fifo + ": is not a regular file");
}

TEST(Options, WhatIsSaidOfValuesIsShortAndOneLine) {
  EXPECT_EQ(argument_error("--data.train=[{path='a',weight=nan}]"),
            "--data.train=[{path='a',weight=nan}]: data.train = [ { path = 'a', weight = nan } ]: "
            "must be a list of paths or {path, weight}, 1e-6..1000000");
  EXPECT_EQ(argument_error("--router.aux_coef=-0.1"),
            "--router.aux_coef=-0.1: router.aux_coef = -0.1: must be a number, 0..1");
  const std::string name(1000000, 'k');
  EXPECT_LT(file_error("[model]\n" + name + " = 1\n").size(), 400u);
  EXPECT_LT(argument_error("--train.steps=" + name).size(), 800u);
  EXPECT_EQ(argument_error("--foo.bar=1"),
            "--foo.bar=1: unknown key 'foo.bar'; --help lists the keys");
}

TEST(Options, IntegersAreBoundedOnBothSides) {
  for (const Key& key : option_keys()) {
    Options options;
    if (key.field(options).index() != 1 || key.full_name() == "run.seed") continue;
    EXPECT_TRUE(std::isfinite(key.rule.min) && std::isfinite(key.rule.max)) << key.full_name();
  }
}

}  // namespace
}  // namespace moiety::app
