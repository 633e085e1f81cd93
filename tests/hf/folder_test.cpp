// Folders that do not fit, are damaged or lie: one error each, and nothing is written.
#include "moiety/hf/folder.h"

#include <limits>

#include "moiety/hf/key_list.h"
#include "moiety/hf/weight_source.h"
#include "tests/hf/folder_builder.h"

namespace moiety::hf {
namespace {

namespace fs = std::filesystem;

TEST(HostileFolder, LayoutsOfFilesThatAreFine) {
  const TemporaryDirectory dir;
  const FolderBuilder builder("mixtral");
  EXPECT_EQ(import_error(dir, builder.write(dir, "one"), "a"), "");
  EXPECT_EQ(import_error(dir, builder.write(dir, "three", 3), "b"), "");
  const auto digest = [&](const std::string& out) {
    return checkpoint::read_manifest(dir / out)
        .tensors.at("layers.1.moe.experts.fc1.weight")
        .slots.at("weight")
        .digest;
  };
  EXPECT_EQ(digest("a"), digest("b"));
}

TEST(HostileFolder, KeysThatDoNotFitAreAllListed) {
  const TemporaryDirectory dir;
  FolderBuilder builder("qwen3_moe");
  auto item = builder.items.extract("model.layers.0.mlp.experts.3.up_proj.weight");
  builder.items["model.layers.0.mlp.experts.4.up_proj.weight"] = item.mapped();
  builder.items.at("model.layers.1.mlp.up_proj.weight").shape = {24, 40};
  FolderBuilder::Item& norm = builder.items.at("model.norm.weight");
  norm.type = "I16";
  const std::string error = import_error(dir, builder.write(dir, "hf"));
  expect_text(error, "1 missing: model.layers.0.mlp.experts.3.up_proj.weight");
  expect_text(error, "1 unexpected: model.layers.0.mlp.experts.4.up_proj.weight");
  expect_text(error,
              "1 of another shape: model.layers.1.mlp.up_proj.weight [24,40] (needed [40,24])");
  expect_text(error, "1 of another type: model.norm.weight I16");
}

TEST(HostileFolder, ExpertsOfALayerAreMissing) {
  const TemporaryDirectory dir;
  FolderBuilder builder("mixtral");
  std::erase_if(builder.items, [](const auto& item) {
    return item.first.starts_with("model.layers.1.block_sparse_moe.experts.");
  });
  const std::string error = import_error(dir, builder.write(dir, "hf", 2));
  expect_text(error, "12 missing: model.layers.1.block_sparse_moe.experts.{0-3}.w{1-3}.weight");
}

// All keys are listed, of however many layers and experts.
TEST(HostileFolder, ListsLeaveNoKeyOut) {
  EXPECT_EQ(key_list({"norm"}), "norm");
  EXPECT_EQ(key_list({"l.0.a", "l.1.a", "l.2.a", "l.7.a", "l.10.a", "l.1.b"}),
            "l.1.b, l.{0-2,7,10}.a");
  EXPECT_EQ(key_list({"l.0.e.0", "l.0.e.1", "l.1.e.0", "l.1.e.1", "l.2.e.1"}),
            "l.2.e.1, l.{0-1}.e.{0-1}");
  EXPECT_EQ(key_list({"a.01", "a.02", "a.1234567890123"}), "a.01, a.02, a.1234567890123");
  EXPECT_EQ(key_list({"a", "b", "c\n", "d"}, 3), "a, b, c\\n, and 1 more");
  std::set<std::string> all;
  for (const FolderTensor& t :
       folder_tensors(model::preset("qwen3-30b-a3b"), Family::kQwen3Moe, Form::kOneByOne)) {
    all.insert(t.name);
  }
  ASSERT_EQ(all.size(), 18867u);
  const std::string list = key_list(all);
  expect_text(list, "model.layers.{0-47}.mlp.experts.{0-127}.gate_proj.weight");
  EXPECT_LT(list.size(), 1000u);
}

TEST(HostileFolder, Indices) {
  const TemporaryDirectory dir;
  const FolderBuilder builder("mixtral");
  const auto with_index = [&](const std::string& to, const std::string& from,
                              const std::string& with) {
    const std::string folder = builder.write(dir, to, 2);
    const std::string path = folder + "/model.safetensors.index.json";
    std::string index = read_all(path);
    const size_t at = index.find(from);
    EXPECT_NE(at, index.npos);
    index.replace(at, from.size(), with);
    dir.write(to + "/model.safetensors.index.json", index);
    return import_error(dir, folder);
  };
  const std::string head = "\"lm_head.weight\":\"part-0.safetensors\"";
  expect_text(with_index("a", head, "\"lm_head.weight\":\"part-7.safetensors\""),
              "part-7.safetensors is missing");
  expect_text(with_index("b", head, "\"lm_head.weight\":\"../part-0.safetensors\""),
              "is not a plain file name");
  expect_text(with_index("c", head, "\"lm_head.weight\":\"part-1.safetensors\""),
              "the index has it in part-1.safetensors");
  expect_text(with_index("d", head + ",", ""), "and not in the index");
  expect_text(with_index("e", head, head + "," + head), "duplicate key");
  expect_text(with_index("f", head, "\"x\":\"part-0.safetensors\"," + head),
              "\"x\" is not in part-0.safetensors");
  expect_text(with_index("g", "{\"weight_map\"", "{\"weights\""), "\"weight_map\" is missing");
  // The same tensor in two shards.
  const std::string folder = builder.write(dir, "h", 2);
  dir.write("h/part-1.safetensors", read_all(folder + "/part-0.safetensors"));
  expect_text(import_error(dir, folder), " is in ");
  fs::remove(folder + "/model.safetensors.index.json");
  expect_text(import_error(dir, folder), "holds neither model.safetensors nor");
  fs::remove(folder + "/config.json");
  expect_text(import_error(dir, folder), "config.json is missing");
}

TEST(HostileFolder, OverlappingTensors) {
  const TemporaryDirectory dir;
  const FolderBuilder builder("mixtral");
  const std::string folder = builder.write(dir, "hf");
  std::string bytes = read_all(folder + "/model.safetensors");
  const std::string from = "\"data_offsets\":[2304,", with = "\"data_offsets\":[2302,";
  const size_t at = bytes.find(from);
  ASSERT_NE(at, bytes.npos);
  bytes.replace(at, from.size(), with);
  dir.write("hf/model.safetensors", bytes);
  expect_text(import_error(dir, folder), "model.safetensors: ");
}

TEST(HostileFolder, TiedHeads) {
  const TemporaryDirectory dir;
  FolderBuilder builder("qwen3_moe_tied");
  EXPECT_FALSE(builder.items.contains(kHeadName));
  builder.items[kHeadName] = builder.items.at("model.embed_tokens.weight");
  EXPECT_EQ(import_error(dir, builder.write(dir, "same"), "same_out"), "");
  builder.items[kHeadName].bytes[21] ^= 1;
  expect_text(import_error(dir, builder.write(dir, "other")),
              "lm_head.weight differs from the embedding at element 10: ");
  builder.items[kHeadName].shape = {24, 48};
  expect_text(import_error(dir, builder.write(dir, "shape")), "lm_head.weight is BF16 [24,48]");
}

TEST(HostileFolder, ValuesThatAreNotFinite) {
  const TemporaryDirectory dir;
  for (const uint16_t bits : {0x7FC0, 0x7F80, 0xFF80}) {
    FolderBuilder builder("mixtral");
    std::string& bytes =
        builder.items.at("model.layers.1.block_sparse_moe.experts.2.w3.weight").bytes;
    std::memcpy(bytes.data() + 2 * 37, &bits, 2);
    const std::string error = import_error(dir, builder.write(dir, "hf"));
    expect_text(error, "model.layers.1.block_sparse_moe.experts.2.w3.weight: element 37 is ");
  }
}

TEST(HostileFolder, TruncatedAtEvery4KiB) {
  const TemporaryDirectory dir;
  const FolderBuilder builder("mixtral");
  const std::string folder = builder.write(dir, "hf");
  const std::string whole = read_all(folder + "/model.safetensors");
  int cuts = 0;
  for (size_t at = 0; at < whole.size(); at += 4096, ++cuts) {
    dir.write("hf/model.safetensors", whole.substr(0, at));
    EXPECT_NE(import_error(dir, folder), "") << "cut at " << at;
  }
  EXPECT_GT(cuts, 8);
  dir.write("hf/model.safetensors", whole + "x");
  expect_text(import_error(dir, folder), "of the data");
}

TEST(HostileFolder, SizesThatNoFileHas) {
  const TemporaryDirectory dir;
  FolderBuilder builder("mixtral");
  builder.set("num_hidden_layers", "1024").set("num_local_experts", "4096");
  expect_text(import_error(dir, builder.write(dir, "hf")), "1024 layers of 4096 experts");
}

// The values of F16 and F32, exact in float32.
TEST(WeightTypes, AreWidenedExactly) {
  const TemporaryDirectory dir;
  FolderBuilder builder("mixtral");
  const auto put_values = [&](const char* type, size_t size, auto value) {
    FolderBuilder::Item& item = builder.items.at("model.norm.weight");
    item.type = type;
    item.bytes.clear();
    for (int i = 0; i < 24; ++i) {
      const auto v = value(i);
      item.bytes.append(reinterpret_cast<const char*>(&v), size);
    }
  };
  const auto norm_of = [&](const std::string& path) {
    const Folder folder = Folder::open(path);
    const WeightSource source(folder, folder.description().config);
    return values_of(source, {"final_norm.weight", {24}});
  };
  put_values("F16", 2, [](int i) { return uint16_t(0x0001 + 31 * i); });
  const std::vector<float> halves = norm_of(builder.write(dir, "f16"));
  EXPECT_EQ(halves[0], 0x1p-24f);
  EXPECT_EQ(halves[1], 0x1p-19f);
  put_values("F32", 4, [](int i) { return 1.0f / float(i + 3); });
  const std::vector<float> floats = norm_of(builder.write(dir, "f32"));
  for (int i = 0; i < 24; ++i) EXPECT_EQ(floats[size_t(i)], 1.0f / float(i + 3));
}

// Any box of a tensor is the part of the whole, under every cut.
TEST(WeightSource, BoxesArePartsOfTheWhole) {
  for (const char* name : {"qwen3_moe", "mixtral"}) {
    const Folder folder = Folder::open(golden(name));
    const WeightSource source(folder, folder.description().config);
    for (const ModelTensor& tensor : source.tensors()) {
      const std::vector<float> all = values_of(source, tensor);
      Box box = checkpoint::whole(tensor.shape);
      for (int d = 0; d < box.rank; ++d) {
        box.start[d] = box.size[d] / 3;
        box.size[d] -= box.size[d] / 3 + (box.size[d] > 4);
      }
      std::vector<float> part(size_t(checkpoint::volume(box)));
      source.read(tensor.name, box, part.data());
      const checkpoint::BoxRuns runs(checkpoint::whole(tensor.shape), box);
      for (int64_t k = 0; k < runs.count(); ++k) {
        for (int64_t i = 0; i < runs.length(); ++i) {
          ASSERT_EQ(part[size_t(k * runs.length() + i)], all[size_t(runs.outer_offset(k) + i)])
              << tensor.name;
        }
      }
    }
  }
}

// The keys of the published models, from their sizes alone.
TEST(FolderTensors, CountsOfRealModels) {
  const auto keys = [](const char* preset, Family family, Form form) {
    return std::ssize(folder_tensors(model::preset(preset), family, form));
  };
  EXPECT_EQ(keys("qwen3-30b-a3b", Family::kQwen3Moe, Form::kOneByOne), 18867);
  EXPECT_EQ(keys("mixtral-8x7b", Family::kMixtral, Form::kOneByOne), 995);
  EXPECT_EQ(keys("qwen3-235b-a22b", Family::kQwen3Moe, Form::kOneByOne), 94 * (9 + 3 * 128) + 3);
  EXPECT_EQ(keys("qwen3-30b-a3b", Family::kQwen3Moe, Form::kStacked), 48 * 11 + 3);
  EXPECT_EQ(keys("mixtral-8x7b", Family::kMixtral, Form::kStacked), 32 * 9 + 3);
}

// Folders of the real number of tensors and shapes, whose data are holes in a file.
TEST(FolderTensors, HeadersOfRealModelsFit) {
  struct Real {
    const char *preset, *config;
    Family family;
    int64_t keys;
  };
  for (const Real& real :
       {Real{"mixtral-8x7b", R"({"model_type":"mixtral"})", Family::kMixtral, 995},
        Real{"qwen3-30b-a3b",
             R"({"model_type":"qwen3_moe","num_hidden_layers":48,"head_dim":128,
                 "norm_topk_prob":true,"rope_theta":1e6})",
             Family::kQwen3Moe, 18867}}) {
    SCOPED_TRACE(real.preset);
    const TemporaryDirectory dir;
    const model::Config config = model::preset(real.preset);
    std::vector<checkpoint::Entry> entries;
    uint64_t at = 0;
    for (const FolderTensor& t : folder_tensors(config, real.family, Form::kOneByOne)) {
      const uint64_t bytes = 2 * uint64_t(checkpoint::volume(checkpoint::whole(t.shape)));
      entries.push_back({t.name, checkpoint::find_stored_type("BF16"), t.shape, at, at + bytes});
      at += bytes;
    }
    dir.write("hf/config.json", real.config);
    const std::string header = checkpoint::encode_header(entries, {});
    const std::string path = dir.write("hf/model.safetensors", header);
    fs::resize_file(path, header.size() + at);
    const Folder folder = Folder::open(dir / "hf");
    const model::Config read = folder.description().config;
    const WeightSource source(folder, read);
    EXPECT_EQ(source.keys(), real.keys);
    EXPECT_EQ(at, 2 * uint64_t(model::parameter_count(read)));
  }
}

}  // namespace
}  // namespace moiety::hf
