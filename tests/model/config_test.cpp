#include "moiety/model/config.h"

#include <cmath>
#include <functional>
#include <string>

#include <gtest/gtest.h>

#include "moiety/base/error.h"

namespace moiety::model {
namespace {

TEST(Config, CountsOfPublishedModels) {
  EXPECT_EQ(parameter_count(preset("qwen3-30b-a3b")), 30'532'122'624);
  EXPECT_EQ(flops_per_token(preset("qwen3-30b-a3b"), 4096), 23'081'779'200.0);
  EXPECT_EQ(parameter_count(preset("mixtral-8x7b")), 46'702'792'704);
  EXPECT_EQ(flops_per_token(preset("mixtral-8x7b"), 4096), 79'712'747'520.0);
  EXPECT_EQ(parameter_count(preset("qwen3-235b-a22b")), 235'093'634'560);
  EXPECT_THROW(preset("qwen3"), Error);
}

TEST(Config, FlopsOfTheFullSquareCountScoresTwice) {
  const Config c = preset("mixtral-8x7b");
  const double core = 3.0 * 32 * 2 * 32 * 128 * 4096;
  EXPECT_EQ(flops_per_token(c, 4096, false) - flops_per_token(c, 4096), core);
}

TEST(Config, FlopsOfAPair) {
  Config c = preset("mixtral-8x7b");
  const double before = flops_per_token(c, 4096);
  ++c.router.top_k;
  EXPECT_EQ(flops_per_token(c, 4096) - before, c.moe_layers() * flops_per_pair(c));
}

TEST(Config, CountsOfSquaredReluAndBiases) {
  Config c;
  c.vocab = 264;
  c.shared_d_ffn = 64;
  c.dense_layers = {0};
  c.d_ffn_dense = 96;
  const int64_t before = parameter_count(c), active = active_parameter_count(c);
  const double flops = flops_per_token(c, 64), pair = flops_per_pair(c);
  c.activation = gemm::squared_relu();  // fc1 has one row where a gate has two
  const int64_t d = c.d_model, used = 3 * (2 * c.d_ffn + c.shared_d_ffn) * d + c.d_ffn_dense * d;
  EXPECT_EQ(before - parameter_count(c), used + 3 * 6 * c.d_ffn * d);
  EXPECT_EQ(active - active_parameter_count(c), used);
  EXPECT_EQ(flops - flops_per_token(c, 64), 6.0 * double(used));
  EXPECT_EQ(pair - flops_per_pair(c), 6.0 * double(c.d_ffn * d));
  const int64_t without = parameter_count(c), active_without = active_parameter_count(c);
  c.expert_bias = true;
  EXPECT_EQ(parameter_count(c) - without, 3 * 8 * (c.d_ffn + d));
  EXPECT_EQ(active_parameter_count(c) - active_without, 3 * 2 * (c.d_ffn + d));
}

TEST(Config, LayersWithExperts) {
  Config c;
  c.layers = 6;
  c.moe_every = 2;
  c.dense_layers = {3};
  const bool expected[] = {false, true, false, false, false, true};
  for (int64_t l = 0; l < 6; ++l) EXPECT_EQ(c.is_moe(l), expected[l]) << l;
  EXPECT_EQ(c.moe_layers(), 2);
}

TEST(Config, ErrorsNameTheKey) {
  const std::pair<const char*, std::function<void(Config&)>> cases[] = {
      {"model.vocab=1", [](Config& c) { c.vocab = 1; }},
      {"model.d_model=12", [](Config& c) { c.d_model = 12; }},
      {"model.layers=0", [](Config& c) { c.layers = 0; }},
      {"model.kv_heads=3", [](Config& c) { c.kv_heads = 3; }},
      {"model.heads=12", [](Config& c) { c.heads = 12; }},
      {"model.head_dim=9", [](Config& c) { c.head_dim = 9; }},
      {"model.head_dim", [](Config& c) { c.head_dim = 258; }},
      {"model.rope_theta=1", [](Config& c) { c.rope_theta = 1; }},
      {"model.norm_eps", [](Config& c) { c.norm_eps = 0; }},
      {"model.moe_every=5", [](Config& c) { c.moe_every = 5; }},
      {"model.dense_layers=4", [](Config& c) { c.dense_layers = {4}; }},
      {"model.d_ffn_dense=0", [](Config& c) { c.moe_every = 2; }},
      {"moe.experts=0", [](Config& c) { c.router.experts = 0; }},
      {"moe.top_k=9", [](Config& c) { c.router.top_k = 9; }},
      {"moe.d_ffn=20", [](Config& c) { c.d_ffn = 20; }},
      {"moe.shared_gate", [](Config& c) { c.shared_gate = true; }},
      {"moe.act_alpha=0", [](Config& c) { c.activation = gemm::qgeglu(0, 7, 1); }},
      {"moe.act_limit=-1", [](Config& c) { c.activation = gemm::clamped_swiglu(-1); }},
      {"moe.act_offset=inf", [](Config& c) { c.activation = gemm::qgeglu(1, 7, INFINITY); }},
      {"moe.glu_interleave=12 must be 0, or a multiple of 8 that divides moe.d_ffn=512",
       [](Config& c) { c.glu_interleave = 12; }},
      {"moe.glu_interleave=24", [](Config& c) { c.glu_interleave = 24; }},
      {"moe.glu_interleave=32: moe.activation has no gate",
       [](Config& c) {
         c.glu_interleave = 32;
         c.activation = gemm::squared_relu();
       }},
      {"groups=3", [](Config& c) { c.router.groups = 3; }},
      {"init.std", [](Config& c) { c.init_std = -1; }},
      {"memory.loss_chunk", [](Config& c) { c.loss_chunk = -1; }},
  };
  for (const auto& [text, change] : cases) {
    Config c;
    c.vocab = 264;
    EXPECT_NO_THROW(check(c));
    change(c);
    try {
      check(c);
      ADD_FAILURE() << text << " was accepted";
    } catch (const Error& e) {
      EXPECT_NE(std::string(e.what()).find(text), std::string::npos) << e.what();
    }
  }
}

}  // namespace
}  // namespace moiety::model
