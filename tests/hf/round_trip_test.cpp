// There and back: bits, forms, files, and what an export refuses or leaves when it is stopped.
#include <atomic>
#include <functional>

#include "moiety/checkpoint/whole_directory.h"
#include "moiety/hf/export.h"
#include "moiety/hf/shards.h"
#include "moiety/hf/side_tensors.h"
#include "tests/hf/folder_builder.h"

namespace moiety::hf {
namespace {

namespace fs = std::filesystem;

std::map<std::string, uint64_t> digests(const std::string& path) {
  std::map<std::string, uint64_t> out;
  for (const auto& [name, tensor] : checkpoint::read_manifest(path).tensors) {
    for (const auto& [slot, entry] : tensor.slots) out[slot + "/" + name] = entry.digest;
  }
  return out;
}

// Type, shape and bytes of every tensor of a folder.
std::map<std::string, std::string> contents(const std::string& path) {
  std::map<std::string, std::string> out;
  const Folder folder = Folder::open(path);
  for (const auto& [name, stored] : folder.tensors()) {
    std::string bytes(stored.entry->end - stored.entry->begin, '\0');
    stored.file->read(stored.entry->begin, std::as_writable_bytes(std::span(bytes)));
    out[name] = stored.entry->type->name + checkpoint::shape_text(stored.entry->shape) + bytes;
  }
  return out;
}

struct Imported {
  explicit Imported(const TemporaryDirectory& dir, const std::string& name,
                    const std::string& to = "ckpt")
      : path(dir / to), config(Folder::open(golden(name)).description().config) {
    import_folder(Folder::open(golden(name)), config, path, {.piece_bytes = 1000});
  }
  ExportResult write(const std::string& out, const ExportOptions& options = {}) const {
    return export_folder(path, config, out, options);
  }
  std::string path;
  model::Config config;
};

std::string refusal(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& e) {
    return e.what();
  }
  return "no error";
}

TEST(RoundTrip, ExportOfAnImportIsTheFolder) {
  for (const std::string& name : kExpertCases) {
    SCOPED_TRACE(name);
    const TemporaryDirectory dir;
    const Imported imported(dir, name);
    const ExportResult result = imported.write(dir / "hf");
    EXPECT_EQ(contents(dir / "hf"), contents(golden(name)));
    EXPECT_EQ(result.keys, std::ssize(contents(golden(name))));
    EXPECT_EQ(result.files, 1);
    EXPECT_EQ(read_all(dir / "hf/generation_config.json"),
              read_all(golden(name) + "/generation_config.json"));
  }
}

TEST(RoundTrip, ImportOfAnExportIsTheCheckpoint) {
  for (const std::string& name : kExpertCases) {
    for (const Form form : {Form::kOneByOne, Form::kStacked}) {
      for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
        SCOPED_TRACE(name);
        const TemporaryDirectory dir;
        const Imported imported(dir, name);
        imported.write(dir / "hf", {.form = form, .dtype = dtype, .shard_bytes = 9000});
        const Folder folder = Folder::open(dir / "hf");
        import_folder(folder, folder.description().config, dir / "again", {});
        auto before = digests(imported.path), after = digests(dir / "again");
        before.erase("file/files/config.json");
        after.erase("file/files/config.json");
        EXPECT_EQ(before, after);
      }
    }
  }
}

TEST(RoundTrip, BytesDoNotDependOnChunksPiecesOrForm) {
  const TemporaryDirectory dir;
  const Imported imported(dir, "qwen3_moe");
  imported.write(dir / "a");
  imported.write(dir / "b", {.chunk_bytes = 200});
  const std::string file = "/model-00001-of-00001.safetensors";
  EXPECT_EQ(read_all(dir / "a" + file), read_all(dir / "b" + file));
  imported.write(dir / "c", {.form = Form::kStacked});
  const Folder folder = Folder::open(dir / "c");
  import_folder(folder, imported.config, dir / "from_c", {});
  export_folder(dir / "from_c", imported.config, dir / "d", {});
  EXPECT_EQ(read_all(dir / "a" + file), read_all(dir / "d" + file));
}

TEST(RoundTrip, ShardsInNaturalOrder) {
  const TemporaryDirectory dir;
  const Imported imported(dir, "mixtral");
  const ExportResult result = imported.write(dir / "hf", {.shard_bytes = 6000});
  EXPECT_GT(result.files, 4);
  std::string last;
  uint64_t bytes = 0;
  for (int64_t i = 1; i <= result.files; ++i) {
    const auto reader = checkpoint::SafetensorsReader::open(
        dir / text("hf/model-{:05}-of-{:05}.safetensors", i, result.files));
    EXPECT_EQ(reader.metadata(), (checkpoint::Metadata{{"format", "pt"}}));
    uint64_t data = 0;
    for (const checkpoint::Entry& entry : reader.entries()) {
      EXPECT_TRUE(natural_less(last, entry.name)) << last << " before " << entry.name;
      last = entry.name;
      data += entry.end - entry.begin;
    }
    EXPECT_TRUE(data <= 6000 || reader.entries().size() == 1);
    bytes += data;
  }
  EXPECT_EQ(bytes, result.bytes);
  expect_text(read_all(dir / "hf/model.safetensors.index.json"), text("\"total_size\": {}", bytes));
  EXPECT_TRUE(natural_less("layers.2.x", "layers.10.x"));
  EXPECT_FALSE(natural_less("layers.10.x", "layers.2.x"));
  EXPECT_FALSE(natural_less("a1", "a1"));
}

TEST(RoundTrip, SideFilesTravel) {
  const TemporaryDirectory dir;
  const std::string folder = copy_golden(dir, "mixtral", "hf");
  const std::string binary("\0\1\xff{}", 5);
  dir.write("hf/tokenizer.json", "{\"a\": 1}");
  dir.write("hf/tokenizer.model", binary);
  dir.write("hf/chat_template.jinja", "{{ x }}");
  dir.write("hf/merges.txt", "");
  dir.write("hf/README.md", "stays");
  const Folder read = Folder::open(folder);
  const model::Config config = read.description().config;
  import_folder(read, config, dir / "ckpt", {});
  export_folder(dir / "ckpt", config, dir / "out", {});
  EXPECT_EQ(read_all(dir / "out/tokenizer.json"), "{\"a\": 1}");
  EXPECT_EQ(read_all(dir / "out/tokenizer.model"), binary);
  EXPECT_EQ(read_all(dir / "out/chat_template.jinja"), "{{ x }}");
  EXPECT_TRUE(fs::exists(dir / "out/merges.txt"));
  EXPECT_FALSE(fs::exists(dir / "out/README.md"));
  EXPECT_EQ(load_side_files(checkpoint::read_manifest(dir / "ckpt"), dir / "ckpt").size(), 6u);
}

TEST(RoundTrip, AFolderThatIsThere) {
  const TemporaryDirectory dir;
  const Imported imported(dir, "mixtral");
  fs::create_directory(dir / "hf");
  imported.write(dir / "hf");  // an empty one is no loss
  expect_text(refusal([&] { imported.write(dir / "hf"); }),
              "is there already, and not empty; --force replaces it");
  dir.write("hf/old.safetensors", "x");
  imported.write(dir / "hf/", {.replace = true});
  EXPECT_FALSE(fs::exists(dir / "hf/old.safetensors"));
  EXPECT_EQ(contents(dir / "hf"), contents(golden("mixtral")));
  dir.write("hf/notes/mine.txt", "x");
  expect_text(refusal([&] { imported.write(dir / "hf", {.replace = true}); }),
              "holds a directory, notes");
  EXPECT_TRUE(fs::exists(dir / "hf/notes/mine.txt"));
  EXPECT_EQ(std::distance(fs::directory_iterator(dir / ""), {}), 2);
}

TEST(RoundTrip, AnInterruptLeavesNothing) {
  const TemporaryDirectory dir;
  const Imported imported(dir, "qwen3_moe");
  std::atomic<bool> stop = false;
  uint64_t bytes = 0;
  const auto count = [&](uint64_t, uint64_t all) { bytes = all; };
  imported.write(dir / "whole", {.progress = count});
  EXPECT_GT(bytes, 0u);
  for (const uint64_t part : {0, 3, 6, 9}) {  // of ten: while it writes, and while it reads back
    stop = false;
    const auto progress = [&](uint64_t done, uint64_t all) { stop = 10 * done >= part * all; };
    expect_text(refusal([&] { imported.write(dir / "x", {.progress = progress, .stop = &stop}); }),
                "interrupted");
    stop = false;
    const Folder folder = Folder::open(golden("qwen3_moe"));
    ImportOptions options;
    options.piece_bytes = 1000;
    options.progress = progress;
    options.stop = &stop;
    expect_text(refusal([&] { import_folder(folder, imported.config, dir / "x", options); }),
                "interrupted");
  }
  EXPECT_EQ(std::distance(fs::directory_iterator(dir / ""), {}), 2);
}

// A run that goes on removes an old checkpoint while it is exported: an error, and nothing half.
TEST(RoundTrip, ACheckpointThatGoesMeanwhile) {
  const TemporaryDirectory dir;
  const Imported imported(dir, "qwen3_moe");
  const auto progress = [&](uint64_t, uint64_t) { fs::remove_all(imported.path); };
  expect_text(refusal([&] { imported.write(dir / "x", {.progress = progress}); }), imported.path);
  EXPECT_EQ(std::distance(fs::directory_iterator(dir / ""), {}), 0);
}

TEST(ExportRefuses, WhatTheFormatCannotHold) {
  const model::Config good = Folder::open(golden("mixtral")).description().config;
  const auto refused = [&](const std::function<void(model::Config&)>& change) {
    model::Config c = good;
    change(c);
    return refusal([&] { export_family(c); });
  };
  EXPECT_EQ(export_family(good), Family::kMixtral);
  expect_text(refused([](auto& c) { c.router.score = moe::Score::kSigmoid; }), "router.score");
  expect_text(refused([](auto& c) { c.router.scale = 2; }), "router.scale = 2");
  expect_text(refused([](auto& c) { c.shared_d_ffn = 64; }), "moe.shared_d_ffn = 64");
  expect_text(refused([](auto& c) { c.expert_bias = true; }), "moe.expert_bias");
  expect_text(refused([](auto& c) { c.activation = gemm::squared_relu(); }), "moe.activation");
  expect_text(refused([](auto& c) { c.router.groups = 2; }), "router.groups = 2");
  expect_text(refused([](auto& c) { c.router.renormalize = false; }), "router.renormalize = false");
  expect_text(refused([](auto& c) { c.dense_layers = {1}; }), "model.dense_layers");
  expect_text(refused([](auto& c) { c.dense_layers = {0, 1}; }), "model.dense_layers = [0, 1]");
}

TEST(ExportRefuses, BiasesAndDamage) {
  const TemporaryDirectory dir;
  const Imported imported(dir, "mixtral");
  // A checkpoint of the same tensors, but for one value.
  const auto changed = [&](const std::string& out, const std::string& tensor, float value) {
    checkpoint::Manifest head;
    head.id = std::string(32, 'a');
    checkpoint::StateView view;
    std::map<std::string, std::vector<float>> memory;
    for (const ModelTensor& t : model_tensors(imported.config, Family::kMixtral)) {
      checkpoint::StatePiece piece;
      piece.tensor = t.name;
      piece.slot = "weight";
      piece.shape = t.shape;
      piece.box = checkpoint::whole(t.shape);
      memory[t.name].assign(size_t(checkpoint::volume(piece.box)), t.name == tensor ? value : 0);
      piece.data = memory[t.name].data();
      view.push_back(piece);
    }
    const auto plan = checkpoint::plan_file(view, checkpoint::file_metadata(head, 0), 1 << 20);
    checkpoint::make_whole_directory("test", dir / out, false, checkpoint::posix(), [&](auto& d) {
      checkpoint::write_single_file(
          d, head, plan, view, {}, checkpoint::posix(), [&](const auto& file, auto sums) {
            for (size_t i = 0; i < plan.pieces.size(); ++i) {
              const checkpoint::StatePiece& of = view[size_t(plan.pieces[i].of)];
              sums[i] = write_piece(file, plan, plan.pieces[i], of,
                                    static_cast<const std::byte*>(of.data));
            }
          });
    });
    return refusal([&] { export_folder(dir / out, imported.config, dir / "x", {}); });
  };
  expect_text(changed("bias", "layers.1.moe.router.bias", 0.5f),
              "weight/layers.1.moe.router.bias is not 0 (0.5)");
  expect_text(changed("nan", "layers.0.attn.k.weight", NAN), "weight/layers.0.attn.k.weight: ");
  expect_text(changed("huge", "layers.0.attn.k.weight", 3.4e38f), "is inf as bfloat16");
  model::Config other = imported.config;
  other.d_ffn = 24;
  expect_text(
      refusal([&] { export_folder(imported.path, other, dir / "x", {}); }),
      "weight/layers.0.moe.experts.fc1.weight is [4,32,24], by the configuration [4,48,24]");
  std::string bytes = read_all(imported.path + "/rank-00000-of-00001.safetensors");
  bytes[bytes.size() - 3000] ^= 1;
  dir.write("ckpt/rank-00000-of-00001.safetensors", bytes);
  expect_text(refusal([&] { imported.write(dir / "x"); }), "crc32c");
  EXPECT_FALSE(fs::exists(dir / "x"));
}

}  // namespace
}  // namespace moiety::hf
