// A step against a model in PyTorch (torch_model.py), in float32: experts as GPT-OSS has them, and
// the other activations.
#include <cstdlib>
#include <fstream>

#include "moiety/base/json_line.h"
#include "tests/model/harness.h"
#include "tests/model/model_cases.h"
#include "tests/support/files.h"
#include "tests/support/python.h"

namespace moiety::model {
namespace {

template <class T>
std::string bytes_of_values(const std::vector<T>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}

std::string describe(const Config& c, const NaiveBatch& batch) {
  const gemm::Activation& a = c.activation;
  return JsonLine()
      .add("sequences", batch.sequences)
      .add("seq_len", batch.seq_len)
      .add("layers", c.layers)
      .add("head_dim", c.head_size())
      .add("qk_norm", c.qk_norm)
      .add("rope_theta", c.rope_theta)
      .add("norm_eps", double(c.norm_eps))
      .add("experts", c.router.experts)
      .add("top_k", c.router.top_k)
      .add("shared", c.shared_d_ffn > 0)
      .add("activation", a.gated() ? "glu" : "relu2")
      .add("alpha", double(a.alpha))
      .add("limit", a.gated() ? double(a.limit) : 0)
      .add("offset", double(a.offset))
      .text();
}

struct TorchResult {
  double loss = 0;
  Weights gradients;
};

TorchResult run_torch(const std::string& python, const ModelHarness& h, const NaiveBatch& batch) {
  const TemporaryDirectory dir;
  const Weights weights = h.weights();
  std::vector<std::string> names;
  std::string tensors;
  std::vector<float> values;
  for (const optim::Parameter& p : h.parameters) {
    for (const optim::LogicalTensor& t : p.spec.tensors) {
      names.push_back(t.name);
      tensors += t.name;
      for (const int64_t n : t.shape) tensors += " " + std::to_string(n);
      tensors += "\n";
      const std::vector<double>& w = weights.at(t.name);
      values.insert(values.end(), w.begin(), w.end());
    }
  }
  std::vector<int32_t> ids = batch.token;
  for (int64_t t = 0; t < batch.tokens(); ++t) {
    ids.push_back(batch.is_target(t) ? batch.target[t] : -100);
  }
  dir.write("model.json", describe(h.model->config(), batch));
  dir.write("tensors.txt", tensors);
  dir.write("weights.bin", bytes_of_values(values));
  dir.write("batch.bin", bytes_of_values(ids));
  const std::string command =
      "'" + python + "' " MOIETY_SOURCE_DIR "/tests/model/torch_model.py '" + (dir / "") + "'";
  TorchResult result;
  EXPECT_EQ(std::system(command.c_str()), 0) << command;
  const std::string bytes = read_all(dir / "result.bin");
  EXPECT_EQ(bytes.size(), (1 + values.size()) * sizeof(float));
  if (testing::Test::HasFailure()) return result;
  const auto* x = reinterpret_cast<const float*>(bytes.data());
  result.loss = double(*x++);
  for (const std::string& name : names) {
    const size_t n = weights.at(name).size();
    result.gradients[name].assign(x, x + n);
    x += n;
  }
  return result;
}

TEST(AgainstTorch, LossAndGradients) {
  const std::string python = find_python({"torch"});
  if (python.empty()) {
    GTEST_SKIP() << "there is no PyTorch here; bash bench/setup_peers.sh installs it";
  }
  for (ModelCase c : model_cases()) {
    if (!c.config.expert_bias) continue;
    SCOPED_TRACE(c.name);
    c.config.router.aux = moe::AuxLoss::kNone;
    c.config.shared_gate = false;
    on_ranks(1, [&](comm::Communicator& world) {
      const TestBatch batch(c.config, c.sequences, c.seq_len, false, 5);
      ModelHarness h(c.config, DType::kFloat32, world, batch.naive.tokens());
      const TorchResult torch = run_torch(python, h, batch.naive);
      if (testing::Test::HasFailure()) return;
      EXPECT_NEAR(h.step(batch.batch).loss_sum, torch.loss, 1e-6 * torch.loss);
      for (const auto& [name, g] : h.gradients()) {
        const std::vector<double>& expected = torch.gradients.at(name);
        double scale = 0;
        for (const double v : expected) scale = std::max(scale, std::abs(v));
        for (size_t i = 0; i < g.size(); ++i) {
          ASSERT_NEAR(g[i], expected[i], 1e-5 * scale) << name << " element " << i;
        }
      }
    });
  }
}

}  // namespace
}  // namespace moiety::model
