// `moiety import` and `moiety export`: folders of transformers through the program, from any
// layout, and as the beginning of a run.
#include <cstring>
#include <filesystem>
#include <fstream>

#include "moiety/data/sha256.h"
#include "moiety/data/tokenizer.h"
#include "moiety/hf/side_tensors.h"
#include "tests/apps/train_helpers.h"

namespace moiety::app {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

std::string golden(const std::string& name) {
  return std::string(MOIETY_SOURCE_DIR) + "/tests/hf/golden/" + name;
}

// All files of a folder, by name.
std::map<std::string, std::string> files_of(const std::string& path) {
  std::map<std::string, std::string> files;
  for (const auto& entry : fs::directory_iterator(path)) {
    files[entry.path().filename().string()] = read_all(entry.path().string());
  }
  return files;
}

class HuggingFace : public testing::Test {
 protected:
  Json done(const Arguments& arguments) {
    const ProgramResult result = run(arguments + Arguments{"--json"});
    EXPECT_EQ(result.code, kExitDone) << result.err;
    return result.code == kExitDone ? Json::parse(result.out) : Json();
  }
  std::string refused(const Arguments& arguments, ExitCode code) {
    const ProgramResult result = run(arguments);
    EXPECT_EQ(result.code, code) << result.err;
    return result.last_line();
  }
  // A run whose weights stay as they are drawn.
  void still(const std::string& name, int ranks, const Arguments& layout) {
    train(tiny(dir_ / name, ranks) + layout +
          Arguments{"--optim.lr=0", "--optim.min_lr=0", "--train.steps=1"});
  }
  double loss_of(const std::string& checkpoint) {
    return done({"eval", checkpoint, "--data", dir_ / "t.tok", "--samples=4"})["loss"];
  }
  // The bytes of the tensors of a folder of one file, by name.
  static std::map<std::string, std::string> tensors_of(const std::string& folder) {
    const std::string bytes = read_all(folder + "/model-00001-of-00001.safetensors");
    uint64_t n = 0;
    std::memcpy(&n, bytes.data(), sizeof(n));
    std::map<std::string, std::string> tensors;
    const Json header = Json::parse(bytes.substr(8, n));
    for (const auto& [name, tensor] : header.items()) {
      if (name == "__metadata__") continue;
      const uint64_t begin = tensor["data_offsets"][0], end = tensor["data_offsets"][1];
      tensors[name] = bytes.substr(8 + n + begin, end - begin);
    }
    return tensors;
  }
  void expect(const std::string& text, const std::string& part) {
    EXPECT_NE(text.find(part), std::string::npos) << text;
  }
  TemporaryDirectory dir_;
};

TEST_F(HuggingFace, ExportOfAnyLayoutIsTheSameBytes) {
  still("one", 1, {});
  still("many", 4, {"--parallel.tp=2", "--parallel.gtp=2", "--parallel.ep=2", "--parallel.egtp=2"});
  EXPECT_EQ(done({"export", dir_ / "one", "--hf", dir_ / "hf_one"})["model_type"], "qwen3_moe");
  done({"export", dir_ / "many", "--hf", dir_ / "hf_many"});
  const auto one = files_of(dir_ / "hf_one");
  EXPECT_EQ(one.size(), 3u);
  EXPECT_EQ(one, files_of(dir_ / "hf_many"));
  // And of another form of the same checkpoint.
  ASSERT_EQ(run({"convert", dir_ / "many", "--out=" + dir_ / "c", "--expert-weights=indexed"}).code,
            kExitDone);
  done({"export", dir_ / "c", "--hf", dir_ / "hf_c"});
  EXPECT_EQ(one, files_of(dir_ / "hf_c"));
}

TEST_F(HuggingFace, WhatWasExportedComesBack) {
  write_tokens(dir_ / "t.tok", {ramp(2000)});
  train(tiny(dir_ / "r"));
  const Json exported = done({"export", dir_ / "r", "--hf", dir_ / "hf", "--stacked"});
  EXPECT_EQ(exported["dtype"], "fp32");
  EXPECT_EQ(exported["keys"], 2 * 11 + 3);
  const Json imported = done({"import", "--hf", dir_ / "hf", "--out", dir_ / "c"});
  EXPECT_EQ(imported["keys"], exported["keys"]);
  auto before = digests(checkpoint_path(dir_ / "r", 6)), after = digests(dir_ / "c");
  std::erase_if(before, [](const auto& entry) { return !entry.first.starts_with("weight/"); });
  std::erase_if(after, [](const auto& entry) { return !entry.first.starts_with("weight/"); });
  EXPECT_EQ(before, after);
  EXPECT_EQ(loss_of(dir_ / "c"), loss_of(dir_ / "r"));
  EXPECT_EQ(run({"verify", dir_ / "c"}).code, kExitDone);
  EXPECT_EQ(done({"info", dir_ / "c"})["parameters"], imported["parameters"]);
  const auto words = [](const std::string& path) {
    return run({"generate", path, "--tokens=8", "--prompt=a"}).out;
  };
  EXPECT_EQ(words(dir_ / "c"), words(dir_ / "r"));
  // Who takes the folder itself for a checkpoint is told what it is.
  expect(refused({"generate", dir_ / "hf"}, kExitCheckpoint), "a Hugging Face folder");
  expect(refused({"info", dir_ / "hf"}, kExitData), "a Hugging Face folder");
}

TEST_F(HuggingFace, FoldersOfTransformers) {
  for (const char* name : {"qwen3_moe", "qwen3_moe_tied", "mixtral"}) {
    const Json imported = done({"import", "--hf", golden(name), "--out", dir_ / name});
    EXPECT_EQ(imported["model_type"],
              std::string(name).substr(0, 9) == "qwen3_moe" ? "qwen3_moe" : "mixtral");
    EXPECT_EQ(done({"info", dir_ / name})["parameters"], imported["parameters"]);
    done({"export", dir_ / name, "--hf", dir_ / text("{}.hf", name)});
  }
  expect(refused({"export", dir_ / "mixtral", "--hf", dir_ / "mixtral.hf"}, kExitUsage),
         "is there already");
  done({"export", dir_ / "mixtral", "--hf", dir_ / "mixtral.hf", "--force", "--dtype=fp32"});
  // A vocabulary smaller than that of "bytes" is no matter to files.
  EXPECT_EQ(run({"convert", dir_ / "mixtral", "--out", dir_ / "c", "--quiet"}).code, kExitDone);
  // For people.
  expect(run({"import", "--hf", golden("mixtral"), "--out", dir_ / "again"}).out,
         "parameters of a mixtral model from 41 keys");
}

TEST_F(HuggingFace, DenseFoldersAndUpcycling) {
  for (const char* name : {"llama", "mistral", "qwen3"}) {
    const Json dense = done({"import", "--hf", golden(name), "--out", dir_ / name});
    EXPECT_EQ(dense["parameters"], done({"info", dir_ / name})["parameters"]);
    expect(refused({"export", dir_ / name, "--hf", dir_ / "x"}, kExitCheckpoint),
           "model.dense_layers = [0, 1]: a model without experts is not exported");
    const std::string out = dir_ / text("{}.moe", name);
    const Arguments how{"--upcycle=experts=4,top_k=2,noise=0.01,layers=all", "--run.seed=3"};
    const Json moe = done(Arguments{"import", "--hf", golden(name), "--out", out} + how);
    EXPECT_GT(moe["parameters"], dense["parameters"]);
    const Json exported = done({"export", out, "--hf", out + ".hf"});
    EXPECT_EQ(exported["model_type"], std::string(name) == "qwen3" ? "qwen3_moe" : "mixtral");
  }
  const auto upcycle = [&](const std::string& words) {
    return refused({"import", "--hf", golden("llama"), "--out", dir_ / "x", "--upcycle", words},
                   kExitUsage);
  };
  expect(upcycle("experts=4"), "expected both experts=N and top_k=N");
  expect(upcycle("experts=4,top_k=0"), "top_k=0: must be in 1..32");
  expect(upcycle("experts=4,top_k=2,noise=x"), "--upcycle noise=x");
  expect(upcycle("experts=4,top_k=2,layers=0-7"), "layer 2 of a model of 2 layers");
  expect(upcycle("experts=4,top_k=2,depth=1"), "--upcycle depth=1");
  EXPECT_FALSE(fs::exists(dir_ / "x"));
}

TEST_F(HuggingFace, RefusalsHaveCodesAndLeaveNothing) {
  fs::create_directory(dir_ / "hf");
  expect(refused({"import", "--hf", dir_ / "hf", "--out", dir_ / "x"}, kExitCheckpoint),
         "config.json is missing");
  dir_.write("hf/config.json", "{\"model_type\": \"deepseek_v3\"}");
  expect(refused({"import", "--hf", dir_ / "hf", "--out", dir_ / "x"}, kExitCheckpoint),
         "the model types that are read are qwen3_moe, mixtral, llama, mistral, qwen3");
  dir_.write("hf/config.json", "{\"model_type\": \"mistral\"}");
  expect(refused({"import", "--hf", dir_ / "hf", "--out", dir_ / "x"}, kExitCheckpoint),
         "holds neither model.safetensors");
  const Arguments mixtral{"import", "--hf", golden("mixtral"), "--out"};
  expect(refused(mixtral + Arguments{golden("mixtral")}, kExitUsage), "is there already");
  refused(mixtral + Arguments{dir_ / "none/x"}, kExitDisk);
  refused({"import", "--out", dir_ / "x"}, kExitUsage);
  // A window: refused with the length that it is asked for.
  fs::copy(golden("mistral"), dir_ / "window", fs::copy_options::recursive);
  std::string config = read_all(golden("mistral") + "/config.json");
  const std::string none = "\"sliding_window\": null";
  config.replace(config.find(none), none.size(), "\"sliding_window\": 32");
  dir_.write("window/config.json", config);
  const Arguments window{"import", "--hf", dir_ / "window", "--out", dir_ / "x"};
  expect(refused(window, kExitCheckpoint), "sliding_window = 32");
  expect(refused(window, kExitCheckpoint), "data.seq_len is 64");
  EXPECT_FALSE(fs::exists(dir_ / "x"));
  done(window + Arguments{"--data.seq_len=32"});
}

// A run begins with a folder, in any layout, and its checkpoints keep what goes with the model.
TEST_F(HuggingFace, RunsBeginWithFolders) {
  still("r", 1, {});
  done({"export", dir_ / "r", "--hf", dir_ / "hf"});
  dir_.write("hf/tokenizer.json", "{\"of\": \"tests\"}");
  done({"import", "--hf", dir_ / "hf", "--out", dir_ / "c"});
  const auto from = [&](const std::string& name, const std::string& path, int ranks,
                        const Arguments& layout) {
    train(tiny(dir_ / name, ranks) + layout + Arguments{"--run.init_from=" + path});
    return digests(checkpoint_path(dir_ / name, 6));
  };
  const Arguments wide{"--parallel.tp=2", "--parallel.gtp=2", "--parallel.ep=2",
                       "--parallel.egtp=2"};
  const auto of_folder = from("a", dir_ / "hf", 4, wide);
  EXPECT_EQ(of_folder, from("b", dir_ / "c", 4, wide));
  EXPECT_TRUE(of_folder.contains("file/files/tokenizer.json"));
  // Its own configuration, which takes no sizes from the command line.
  const std::string config = run({"import", "--hf", dir_ / "hf", "--print-config"}).out;
  // Where each value is from: no lines of a text that nobody sees.
  EXPECT_NE(config.find("# " + dir_ / "hf/config.json\n"), config.npos) << config;
  EXPECT_NE(config.find("# moiety import\n"), config.npos) << config;
  EXPECT_EQ(config.find("config.json:"), config.npos) << config;
  dir_.write("m.toml", config);
  train({"train", "--config", dir_ / "m.toml", "--run=" + dir_ / "e", "--train.steps=1",
         "--data.synthetic=markov", "--data.seq_len=16", "--train.global_batch=2",
         "--log.peak_tflops=1", "--run.init_from=" + dir_ / "hf"});
  // A resume under another layout keeps them, and so does the export.
  train(tiny(dir_ / "a") + Arguments{"--train.steps=8"});
  done({"export", dir_ / "a", "--hf", dir_ / "out"});
  EXPECT_EQ(read_all(dir_ / "out/tokenizer.json"), "{\"of\": \"tests\"}");
  expect(refused(tiny(dir_ / "d") + Arguments{"--run.init_from=" + dir_ / "hf",
                                              "--model.d_model=64", "--moe.top_k=1"},
                 kExitCheckpoint),
         "another model: model.d_model is 32 there, 64 here; model.head_dim is 8 there, 16 here; "
         "moe.top_k is 2 there, 1 here");
}

// The files of a tokenizer that is read without PCRE2, with fewer than 640 tokens.
void write_tokenizer(const TemporaryDirectory& dir, const std::string& folder) {
  const std::string path = std::string(MOIETY_SOURCE_DIR) + "/tests/golden/tokenizers/mixtral.json";
  dir.write(folder + "/tokenizer.json", Json::parse(read_all(path))["tokenizer"].dump(1));
  dir.write(folder + "/tokenizer_config.json", R"({"eos_token": "</s>"})");
}

// A folder's tokenizer is the checkpoint's, the run's that begins with it, and the exported one.
TEST_F(HuggingFace, TokenizersOfFoldersAreUsed) {
  still("r", 1, {"--model.vocab=640"});
  done({"export", dir_ / "r", "--hf", dir_ / "hf"});
  write_tokenizer(dir_, "hf");
  dir_.write("hf/vocab.json", "{}");
  const auto given = files_of(dir_ / "hf");
  done({"import", "--hf", dir_ / "hf", "--out", dir_ / "c"});
  const std::string config = run({"import", "--hf", dir_ / "hf", "--print-config"}).out;
  expect(config, "tokenizer = \"" + dir_ / "hf/tokenizer.json");
  dir_.write("m.toml", config);
  dir_.write("text.txt", "the quick brown fox jumps over 12345 lazy dogs. and again.");
  const std::string tokens = dir_ / "text.tok";
  ASSERT_EQ(
      run({"prepare", dir_ / "text.txt", "--tokenizer", dir_ / "c", "--out", dir_ / "text"}).code,
      kExitDone);
  train({"train", "--config", dir_ / "m.toml", "--run=" + dir_ / "e", "--train.steps=1",
         "--data.train=" + tokens, "--data.seq_len=8", "--train.global_batch=2",
         "--log.peak_tflops=1", "--run.init_from=" + dir_ / "c"});
  fs::rename(dir_ / "hf", dir_ / "gone");
  ASSERT_EQ(run({"convert", dir_ / "c", "--out", dir_ / "d", "--quiet"}).code, kExitDone);
  const data::Sha256 identity = data::Tokenizer::load(dir_ / "gone").identity();
  for (const char* path : {"c", "d", "e"}) {
    const Json said = done({"generate", dir_ / path, "--prompt=the quick", "--tokens=4"});
    EXPECT_EQ(said["prompt"], "the quick");
    // Its data are of the tokenizer, whose identity evaluation compares.
    done({"eval", dir_ / path, "--data", tokens, "--samples=1"});
    const std::string out = dir_ / text("{}.hf", path);
    done({"export", dir_ / path, "--hf", out});
    const auto files = files_of(out);
    for (const char* file : {"tokenizer.json", "tokenizer_config.json", "vocab.json"}) {
      EXPECT_EQ(files.at(file), given.at(file)) << path;
    }
  }
  EXPECT_EQ(data::Tokenizer::load(dir_ / "c").identity(), identity);
  EXPECT_EQ(files_of(dir_ / "c.hf").at("model-00001-of-00001.safetensors"),
            given.at("model-00001-of-00001.safetensors"));
}

TEST_F(HuggingFace, TokenizersThatAreRefusedTravelAlone) {
  still("r", 1, {});
  done({"export", dir_ / "r", "--hf", dir_ / "hf"});
  const auto imported = [&](const std::string& out, const std::string& reason) {
    const ProgramResult result = run({"import", "--hf", dir_ / "hf", "--out", dir_ / out});
    ASSERT_EQ(result.code, kExitDone) << result.err;
    expect(result.err, "data.tokenizer is \"bytes\"");
    expect(result.err, reason);
    EXPECT_FALSE(fs::exists(dir_ / (out + "/tokenizer.json")));
    EXPECT_EQ(run({"generate", dir_ / out, "--prompt=a", "--tokens=2"}).code, kExitDone);
    done({"export", dir_ / out, "--hf", dir_ / text("{}.hf", out)});
  };
  dir_.write("hf/tokenizer.model", "not read");
  imported("pieces", "a SentencePiece model is not read");
  EXPECT_EQ(read_all(dir_ / "pieces.hf/tokenizer.model"), "not read");
  write_tokenizer(dir_, "hf");
  imported("large", "tokens, the model 264");
  EXPECT_EQ(read_all(dir_ / "large.hf/tokenizer.json"), read_all(dir_ / "hf/tokenizer.json"));
  dir_.write("hf/tokenizer.json", R"({"model": {"type": "Unigram"}})");
  imported("unigram", "model.type");
  EXPECT_EQ(read_all(dir_ / "unigram.hf/tokenizer.json"), R"({"model": {"type": "Unigram"}})");
}

// The tokenizer of a run is exported, and what belongs to another one is not.
TEST_F(HuggingFace, ExportHasTheTokenizerOfTheRun) {
  write_tokenizer(dir_, "given");
  const Arguments own{"--data.tokenizer=" + dir_ / "given", "--model.vocab=640"};
  still("r", 1, own);
  done({"export", dir_ / "r", "--hf", dir_ / "hf"});
  EXPECT_EQ(read_all(dir_ / "hf/tokenizer.json"), read_all(dir_ / "given/tokenizer.json"));
  // It names the special tokens of the run's tokenizer, which no folder did before.
  const auto config = Json::parse(read_all(dir_ / "hf/config.json"));
  EXPECT_EQ(config["eos_token_id"], data::Tokenizer::load(dir_ / "given").eos());
  EXPECT_EQ(config["bos_token_id"], data::Tokenizer::load(dir_ / "given").bos());
  dir_.write("hf/tokenizer.json", "{\"of\": \"another\"}");
  dir_.write("hf/merges.txt", "of another");
  still("s", 1, own + Arguments{"--run.init_from=" + dir_ / "hf"});
  done({"export", dir_ / "s", "--hf", dir_ / "out"});
  EXPECT_EQ(read_all(dir_ / "out/tokenizer.json"), read_all(dir_ / "given/tokenizer.json"));
  EXPECT_FALSE(fs::exists(dir_ / "out/merges.txt"));
  still("b", 1, {});
  done({"export", dir_ / "b", "--hf", dir_ / "bytes"});
  EXPECT_EQ(Json::parse(read_all(dir_ / "bytes/config.json"))["eos_token_id"], 256);
}

// What a checkpoint says of its tokenizer, and that verify reads its files too.
TEST_F(HuggingFace, TokenizersOfCheckpointsAreNamedAndVerified) {
  write_tokenizer(dir_, "given");
  still("r", 1, {"--data.tokenizer=" + dir_ / "given", "--model.vocab=640"});
  const std::string path = checkpoint_path(dir_ / "r", 1);
  const Json said = done({"info", path})["tokenizer"];
  const data::Tokenizer tokenizer = data::Tokenizer::load(dir_ / "given");
  EXPECT_EQ(said["identity"], data::hex(tokenizer.identity()));
  EXPECT_EQ(said["vocab"], tokenizer.vocab());
  EXPECT_EQ(said["name"], path);
  EXPECT_EQ(done({"verify", path})["tokenizer_files"], 2);
  ASSERT_EQ(run({"convert", path, "--out", dir_ / "c", "--quiet"}).code, kExitDone);
  EXPECT_EQ(done({"verify", dir_ / "c"})["tokenizer_files"], 2);
  // A byte that changes no id is a difference too.
  const std::string bytes = read_all(path + "/tokenizer.json");
  std::ofstream(path + "/tokenizer.json") << bytes << "\n";
  expect(refused({"verify", path}, kExitCheckpoint), "tokenizer.json: its SHA-256 is ");
  fs::remove(path + "/tokenizer.json");
  expect(refused({"verify", path}, kExitCheckpoint), "tokenizer.json");
  std::ofstream(path + "/tokenizer.json") << bytes;
  done({"verify", path});
}

// A tokenizer for models of 48 ids.
constexpr const char* kThreeTokens =
    R"({"model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "</s>": 2}, "merges": []}})";

// An imported model that is frozen in part: the frozen tensors of what is exported have the bits of
// what came in, under every layout, and all others were trained.
TEST_F(HuggingFace, FrozenWeightsComeOutAsTheyCameIn) {
  const std::string upcycle = "--upcycle=experts=4,top_k=2";
  for (const char* name : {"qwen3", "mixtral"}) {
    const bool is_dense = std::string(name) == "qwen3";
    const std::string model = dir_ / name, folder = model + ".hf", toml = model + ".toml";
    fs::copy(golden(name), folder, fs::copy_options::recursive);
    std::ofstream(folder + "/tokenizer.json") << kThreeTokens;
    Arguments source{"import", "--hf", folder};
    if (is_dense) source.push_back(upcycle);
    done(source + Arguments{"--out", model, "--data.seq_len=16"});
    dir_.write(std::string(name) + ".toml",
               run(source + Arguments{"--print-config", "--data.seq_len=16"}).out);
    done({"export", model, "--hf", model + ".before"});
    const auto before = tensors_of(model + ".before");
    struct Layout {
      const char* name;
      int ranks, tp, ep;
    };
    for (const Layout& l : {Layout{"one", 1, 1, 1}, Layout{"dp2", 2, 1, 1}, Layout{"tp2", 2, 2, 1},
                            Layout{"ep2", 2, 1, 2}, Layout{"tp2ep2dp2", 4, 2, 2}}) {
      SCOPED_TRACE(text("{} {}", name, l.name));
      const std::string to = text("{}.{}", model, l.name);
      train({"train", "--config", toml, "--run=" + to, text("--ranks={}", l.ranks),
             text("--parallel.tp={}", l.tp), text("--parallel.ep={}", l.ep), "--train.steps=3",
             "--data.synthetic=markov", "--train.global_batch=4", "--log.peak_tflops=1",
             "--optim.lr=1e-2", "--optim.warmup_steps=0", "--run.init_from=" + model,
             "--train.freeze=[\"embed*\", \"layers.0.*\", \"*.router.*\"]"});
      done({"export", to, "--hf", to + ".hf"});
      int frozen = 0;
      const auto after = tensors_of(to + ".hf");
      ASSERT_EQ(after.size(), before.size());
      for (const auto& [tensor, bytes] : before) {
        const bool stays = tensor.starts_with("model.embed") ||
                           tensor.starts_with("model.layers.0.") ||
                           tensor.ends_with(".gate.weight");
        EXPECT_EQ(after.at(tensor) == bytes, stays) << tensor;
        frozen += stays;
      }
      EXPECT_GT(frozen, 20);
    }
    const ProgramResult refused =
        run({"train", "--config", toml, "--run=" + dir_ / "x", "--data.synthetic=markov",
             "--run.init_from=" + model, "--train.freeze=[\"model.embed_tokens*\"]"});
    EXPECT_EQ(refused.code, kExitUsage);
    expect(refused.last_line(), "train.freeze: \"model.embed_tokens*\" matches no tensor");
  }
}

// Rows of the embedding beyond the tokenizer's ids may hold anything: none of them is ever chosen.
TEST_F(HuggingFace, PaddingRowsAreNeverGenerated) {
  write_tokenizer(dir_, "given");
  still("r", 1, {"--data.tokenizer=" + dir_ / "given", "--model.vocab=640"});
  done({"export", dir_ / "r", "--hf", dir_ / "hf", "--dtype=fp32"});
  const int64_t vocab = data::Tokenizer::load(dir_ / "given").vocab();
  ASSERT_LT(vocab, 630);
  // A pair of rows of the head, one the other's opposite, of which one wins wherever it may.
  const std::string weights = dir_ / "hf/model-00001-of-00001.safetensors";
  std::string bytes = read_all(weights);
  const auto header_bytes = [&] {
    uint64_t n = 0;
    std::memcpy(&n, bytes.data(), sizeof(n));
    return n;
  }();
  const Json header = Json::parse(bytes.substr(8, header_bytes));
  const Json& head = header["lm_head.weight"];
  const int64_t width = head["shape"][1];
  auto* rows = reinterpret_cast<float*>(bytes.data() + 8 + header_bytes +
                                        head["data_offsets"][0].get<size_t>());
  for (int64_t i = vocab * width; i < 640 * width; ++i) {
    const float x = i % 3 == 0 ? 100.0f : 37.0f * float(i % 5);
    rows[i] = i / width % 2 == 0 ? x : -rows[i - width];
  }
  std::ofstream(weights, std::ios::binary) << bytes;
  done({"import", "--hf", dir_ / "hf", "--out", dir_ / "c"});
  std::string text;
  for (int i = 0; i < 40; ++i) text += "the quick brown fox jumps over 12345 lazy dogs. ";
  dir_.write("text.txt", text);
  ASSERT_EQ(
      run({"prepare", dir_ / "text.txt", "--tokenizer", dir_ / "c", "--out", dir_ / "t"}).code,
      kExitDone);
  EXPECT_GT(loss_of(dir_ / "c"), 20) << "the rows do not win";
  for (const char* rule : {"--temperature=0", "--temperature=1.5", "--top-k=3"}) {
    const auto words = [&](const std::string& path) {
      return done({"generate", path, "--prompt=the quick", "--tokens=40", "--seed=5", rule});
    };
    EXPECT_EQ(words(dir_ / "c"), words(dir_ / "r")) << rule;
  }
}

}  // namespace
}  // namespace moiety::app
