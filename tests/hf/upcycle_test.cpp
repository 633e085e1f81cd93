// Dense models made MoE: what is copied, what is drawn, and which layers.
#include "moiety/base/rng.h"
#include "tests/hf/folder_builder.h"

namespace moiety::hf {
namespace {

class Upcycled : public testing::Test {
 protected:
  explicit Upcycled() : folder_(Folder::open(golden("qwen3"))) {}
  std::vector<float> values(const WeightSource& source, const std::string& name) const {
    for (const ModelTensor& tensor : source.tensors()) {
      if (tensor.name == name) return values_of(source, tensor);
    }
    ADD_FAILURE() << "no " << name;
    return {};
  }
  Folder folder_;
};

TEST_F(Upcycled, ExpertsAreCopiesAndRoutersAreDrawn) {
  const model::Config dense = folder_.description().config;
  const model::Config config = upcycled(folder_.description(), {.experts = 3, .top_k = 2});
  EXPECT_EQ(config.moe_layers(), 2);
  EXPECT_EQ(config.d_ffn, 40);
  EXPECT_TRUE(config.router.renormalize);
  const WeightSource from(folder_, dense);
  const WeightSource to(folder_, config, {.seed = 7, .router_std = 0.02f});
  EXPECT_EQ(to.keys(), from.keys());
  for (const char* matrix : {"fc1", "fc2"}) {
    const auto one = values(from, text("layers.1.mlp.{}.weight", matrix));
    const auto all = values(to, text("layers.1.moe.experts.{}.weight", matrix));
    ASSERT_EQ(all.size(), 3 * one.size());
    for (size_t i = 0; i < all.size(); ++i) ASSERT_EQ(all[i], one[i % one.size()]);
  }
  const auto router = values(to, "layers.1.moe.router.weight");
  for (size_t i = 0; i < router.size(); ++i) {
    ASSERT_EQ(router[i], 0.02f * init_normal(7, tensor_id("layers.1.moe.router.weight"), i));
  }
  for (const float b : values(to, "layers.1.moe.router.bias")) EXPECT_EQ(b, 0);
}

TEST_F(Upcycled, NoiseIsThatOfTheElement) {
  const model::Config config = upcycled(folder_.description(), {.experts = 2, .top_k = 1});
  const WeightSource plain(folder_, config),
      noisy(folder_, config, {.seed = 9, .noise_std = 0.01f});
  const std::string name = "layers.0.moe.experts.fc2.weight";
  const auto a = values(plain, name), b = values(noisy, name);
  for (size_t i = 0; i < a.size(); ++i) {
    ASSERT_EQ(b[i], 0.01f * init_normal(9, tensor_id(name), i) + a[i]);
  }
  EXPECT_EQ(values(plain, "layers.0.attn.q.weight"), values(noisy, "layers.0.attn.q.weight"));
}

TEST_F(Upcycled, LayersThatAreNotNamedStayDense) {
  const model::Config config =
      upcycled(folder_.description(), {.experts = 4, .top_k = 2, .layers = {1}});
  EXPECT_EQ(config.dense_layers, std::vector<int64_t>{0});
  const WeightSource source(folder_, config), dense(folder_, folder_.description().config);
  EXPECT_EQ(values(source, "layers.0.mlp.fc1.weight"), values(dense, "layers.0.mlp.fc1.weight"));
  EXPECT_EQ(values(source, "layers.1.moe.experts.fc1.weight").size(), 4u * 80 * 24);
}

TEST_F(Upcycled, RefusesWhatCannotBe) {
  const auto refused = [](const Description& d, const Upcycling& u) {
    try {
      upcycled(d, u);
    } catch (const UsageError& e) {
      return std::string(e.what());
    }
    return std::string("no error");
  };
  const Description& dense = folder_.description();
  expect_text(refused(dense, {.experts = 2, .top_k = 3}), "moe.top_k=3 must be in 1..2");
  expect_text(refused(dense, {.layers = {2}}), "layer 2 of a model of 2 layers");
  expect_text(refused(Folder::open(golden("mixtral")).description(), {}),
              "a mixtral model has experts already");
}

}  // namespace
}  // namespace moiety::hf
