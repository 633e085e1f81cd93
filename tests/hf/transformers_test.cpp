// Models of transformers, stored and made live: what Moiety computes with their weights is what
// transformers computes.
#include <cstdlib>

#include "moiety/hf/export.h"
#include "moiety/model/decoder.h"
#include "tests/hf/hf_testing.h"
#include "tests/support/python.h"

namespace moiety::hf {
namespace {

// The logits behind every token, [T, V].
std::vector<float> logits_of(model::ModelHarness& h, const ReferenceBatch& batch) {
  const int64_t sequences = batch.token.view().size(0), vocab = h.model->config().vocab;
  std::vector<float> out(batch.tokens.size() * static_cast<size_t>(vocab));
  model::Decoder decoder(*h.model, sequences, batch.seq_len);
  Arena arena("test");
  Tensor row(DType::kFloat32, {1, vocab});
  for (int64_t i = 0; i < std::ssize(batch.tokens); ++i) {
    const std::span token(&batch.tokens[static_cast<size_t>(i)], 1);
    const model::Decoder::Continuation part{i / batch.seq_len, token};
    decoder.append(std::span(&part, 1), row, arena, {});
    std::copy_n(row.data<float>(), vocab, out.data() + i * vocab);
  }
  return out;
}

void expect_near(const std::vector<float>& got, const std::vector<float>& expected, double bound,
                 const std::string& what) {
  ASSERT_EQ(got.size(), expected.size()) << what;
  for (size_t i = 0; i < got.size(); ++i) {
    ASSERT_NEAR(got[i], expected[i], bound) << what << " element " << i;
  }
}

// Compares the gradients of a step with those of transformers, which lie in a folder of their own.
void compare_gradients(const model::ModelHarness& h, const std::string& path) {
  const Folder folder = Folder::open(path);
  const model::Config config = folder.description().config;
  const WeightSource expected(folder, config);
  const model::Weights got = h.gradients();
  for (const ModelTensor& tensor : expected.tensors()) {
    if (tensor.name.ends_with("router.bias")) continue;
    const std::vector<float> e = values_of(expected, tensor);
    const std::vector<double>& g = got.at(tensor.name);
    double scale = 0;
    for (const float x : e) scale = std::max(scale, std::abs(double(x)));
    ASSERT_GT(scale, 1e-3) << tensor.name;
    ASSERT_EQ(g.size(), e.size());
    for (size_t i = 0; i < g.size(); ++i) {
      ASSERT_NEAR(g[i], e[i], 1e-4 * scale) << tensor.name << " element " << i;
    }
  }
}

// Imports `folder` and compares with what transformers computed in `results`.
void compare(const Folder& folder, const std::string& results, bool gradients) {
  const TemporaryDirectory dir;
  import_folder(folder, folder.description().config, dir / "ckpt", {});
  const std::string reference = results + "/reference.safetensors";
  const ReferenceBatch batch(reference);
  model::Config config = folder.description().config;
  config.router.aux = moe::AuxLoss::kNone;
  model::on_ranks(1, [&](comm::Communicator& world) {
    model::ModelHarness h(config, DType::kFloat32, world, std::ssize(batch.tokens));
    load_harness(dir / "ckpt", h, world);
    expect_near(logits_of(h, batch), stored_values<float>(reference, "logits"), 2e-5, "logits");
    const double loss = stored_values<float>(reference, "loss").at(0);
    EXPECT_NEAR(h.step(batch.batch).loss_sum, loss, 1e-6 * loss);
    if (gradients) compare_gradients(h, results + "/grads");
  });
}

void compare_stored(const std::string& name) {
  for (const int generation : {4, 5}) {
    SCOPED_TRACE(text("{} in the words of transformers {}", name, generation));
    const TemporaryDirectory dir;
    compare(Folder::open(copy_golden(dir, name, "hf", generation)), golden(name), generation == 5);
  }
}

TEST(AgainstTransformers, ModelsWithExperts) {
  for (const std::string& name : kExpertCases) compare_stored(name);
}

TEST(AgainstTransformers, DenseModels) {
  for (const std::string& name : kDenseCases) compare_stored(name);
}

// Makes the dense model of `name` MoE; its logits and its loss stay those of the dense model.
void compare_upcycled(const std::string& name, const Upcycling& upcycling, double logits_bound,
                      double loss_bound) {
  SCOPED_TRACE(name);
  const TemporaryDirectory dir;
  const Folder folder = Folder::open(golden(name));
  model::Config config = upcycled(folder.description(), upcycling);
  import_folder(folder, config, dir / "ckpt", {.noise = upcycling.noise});
  config.router.aux = moe::AuxLoss::kNone;
  const std::string reference = golden(name) + "/reference.safetensors";
  const ReferenceBatch batch(reference);
  model::on_ranks(1, [&](comm::Communicator& world) {
    model::ModelHarness h(config, DType::kFloat32, world, std::ssize(batch.tokens));
    load_harness(dir / "ckpt", h, world);
    expect_near(logits_of(h, batch), stored_values<float>(reference, "logits"), logits_bound,
                "logits");
    const double loss = stored_values<float>(reference, "loss").at(0);
    EXPECT_NEAR(h.step(batch.batch).loss_sum, loss, loss_bound * loss);
  });
}

TEST(AgainstTransformers, UpcycledModels) {
  for (const std::string& name : kDenseCases) {
    compare_upcycled(name, {.experts = 8, .top_k = 2}, 1e-4, 1e-5);
    compare_upcycled(name, {.experts = 3, .top_k = 3, .layers = {1}}, 1e-4, 1e-5);
    // Noise changes it a little.
    compare_upcycled(name, {.experts = 4, .top_k = 1, .noise = 0.1f}, 0.5, 0.05);
  }
}

constexpr const char* kNoTransformers =
    "there is no transformers with torch here; "
    "pip install torch transformers into ~/.cache/moiety/torch-venv";

// Models that the transformers of this machine makes now.
TEST(AgainstTransformersLive, ReadsWhatIsSaved) {
  const std::string python = find_python({"torch", "transformers"});
  if (python.empty()) GTEST_SKIP() << kNoTransformers;
  const TemporaryDirectory dir;
  const std::string command = "'" + python +
                              "' " MOIETY_SOURCE_DIR "/tests/hf/transformers_reference.py make '" +
                              (dir / "made") + "' >'" + (dir / "log") + "' 2>&1";
  ASSERT_EQ(std::system(command.c_str()), 0) << read_all(dir / "log");
  for (const auto& cases : {kExpertCases, kDenseCases}) {
    for (const std::string& name : cases) {
      SCOPED_TRACE(name);
      const std::string made = dir / ("made/" + name);
      compare(Folder::open(made), made, true);
    }
  }
}

// What is exported is loaded by transformers without a missing or unexpected key, and gives the
// logits of the model that was imported.
TEST(AgainstTransformersLive, LoadsWhatIsExported) {
  const std::string python = find_python({"torch", "transformers"});
  if (python.empty()) GTEST_SKIP() << kNoTransformers;
  const auto check = [&](const TemporaryDirectory& dir, const std::string& name, double bound) {
    const std::string reference = golden(name) + "/reference.safetensors";
    const std::string command =
        "'" + python + "' " MOIETY_SOURCE_DIR "/tests/hf/transformers_reference.py check '" +
        (dir / "hf") + "' '" + reference + "' >/dev/null 2>'" + (dir / "log") + "'";
    ASSERT_EQ(std::system(command.c_str()), 0) << read_all(dir / "log");
    expect_near(stored_values<float>(dir / "logits.safetensors", "logits"),
                stored_values<float>(reference, "logits"), bound, name);
  };
  for (const Form form : {Form::kOneByOne, Form::kStacked}) {
    for (const std::string& name : kExpertCases) {
      const TemporaryDirectory dir;
      const Folder folder = Folder::open(golden(name));
      const model::Config config = folder.description().config;
      import_folder(folder, config, dir / "ckpt", {});
      export_folder(dir / "ckpt", config, dir / "hf", {.form = form});
      check(dir, name, 2e-5);
    }
  }
  for (const std::string& name : kDenseCases) {
    const TemporaryDirectory dir;
    const Folder folder = Folder::open(golden(name));
    const model::Config config = upcycled(folder.description(), {.experts = 4, .top_k = 2});
    import_folder(folder, config, dir / "ckpt", {});
    EXPECT_EQ(export_folder(dir / "ckpt", config, dir / "hf", {}).family,
              name == "qwen3" ? Family::kQwen3Moe : Family::kMixtral);
    check(dir, name, 1e-4);
  }
}

}  // namespace
}  // namespace moiety::hf
