// Models of transformers, stored and made live: what Moiety computes with their weights is what
// transformers computes.
#include "moiety/model/decoder.h"
#include "tests/hf/hf_testing.h"

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

void compare(const std::string& name, int generation) {
  SCOPED_TRACE(text("{} in the words of transformers {}", name, generation));
  const TemporaryDirectory dir;
  const Folder folder = Folder::open(copy_golden(dir, name, "hf", generation));
  import_folder(folder, folder.description().config, dir / "ckpt", {});
  const ReferenceBatch batch(golden(name) + "/reference.safetensors");
  model::Config config = folder.description().config;
  config.router.aux = moe::AuxLoss::kNone;
  model::on_ranks(1, [&](comm::Communicator& world) {
    model::ModelHarness h(config, DType::kFloat32, world, std::ssize(batch.tokens));
    load_harness(dir / "ckpt", h, world);
    const std::string reference = golden(name) + "/reference.safetensors";
    expect_near(logits_of(h, batch), stored_values<float>(reference, "logits"), 2e-5, "logits");
    const double loss = stored_values<float>(reference, "loss").at(0);
    EXPECT_NEAR(h.step(batch.batch).loss_sum, loss, 1e-6 * loss);
    if (generation == 5) compare_gradients(h, golden(name) + "/grads");
  });
}

TEST(AgainstTransformers, ModelsWithExperts) {
  for (const std::string& name : kExpertCases) {
    for (const int generation : {4, 5}) compare(name, generation);
  }
}

TEST(AgainstTransformers, DenseModels) {
  for (const std::string& name : kDenseCases) {
    for (const int generation : {4, 5}) compare(name, generation);
  }
}

}  // namespace
}  // namespace moiety::hf
