// config.json: both generations, defaults of what is absent, and what is refused by field and
// value.
#include "moiety/hf/config.h"

#include "moiety/hf/export.h"
#include "tests/hf/folder_builder.h"

namespace moiety::hf {
namespace {

Description parse(const std::string& json) { return parse_config(json, "c.json"); }

std::string refusal(const std::string& json) {
  try {
    parse(json);
  } catch (const CheckpointError& e) {
    return e.what();
  }
  return "no error";
}

TEST(ReadConfig, GenerationsAgree) {
  for (const auto& cases : {kExpertCases, kDenseCases}) {
    for (const std::string& name : cases) {
      SCOPED_TRACE(name);
      const Description old = parse(read_all(golden(name) + "/config.4.json"));
      const Description now = parse(read_all(golden(name) + "/config.json"));
      EXPECT_EQ(old.family, now.family);
      EXPECT_EQ(old.dtype, now.dtype);
      EXPECT_EQ(old.max_positions, now.max_positions);
      const model::Config &a = old.config, &b = now.config;
      EXPECT_EQ(a.rope_theta, b.rope_theta);
      EXPECT_EQ(a.router.experts, b.router.experts);
      EXPECT_EQ(a.router.renormalize, b.router.renormalize);
      EXPECT_EQ(a.head_size(), 8);
      EXPECT_EQ(a.dense_layers, b.dense_layers);
      EXPECT_EQ(model::parameter_count(a), model::parameter_count(b));
    }
  }
}

TEST(ReadConfig, WhatIsAbsentHasTheDefaultOfItsClass) {
  const model::Config qwen = parse("{\"model_type\":\"qwen3_moe\"}").config;
  EXPECT_FALSE(qwen.router.renormalize);
  EXPECT_EQ(qwen.rope_theta, 1e4);
  EXPECT_EQ(qwen.router.experts, 128);
  EXPECT_EQ(qwen.router.top_k, 8);
  EXPECT_EQ(qwen.head_size(), 2048 / 32);
  EXPECT_EQ(qwen.moe_layers(), 24);
  const model::Config mixtral = parse("{\"model_type\":\"mixtral\"}").config;
  EXPECT_TRUE(mixtral.router.renormalize);
  EXPECT_EQ(mixtral.rope_theta, 1e6);
  EXPECT_EQ(mixtral.norm_eps, 1e-5f);
  EXPECT_EQ(model::parameter_count(mixtral), 46702792704);
  const Description mistral = parse("{\"model_type\":\"mistral\"}");
  EXPECT_EQ(mistral.window, 4096);
  EXPECT_EQ(parse("{\"model_type\":\"mistral\",\"sliding_window\":null}").window, 0);
  EXPECT_EQ(parse("{\"model_type\":\"qwen3\",\"head_dim\":null}").config.head_size(), 128);
  EXPECT_EQ(parse("{\"model_type\":\"qwen3\",\"hidden_size\":2048}").config.head_size(), 128);
  EXPECT_EQ(
      parse("{\"model_type\":\"qwen3\",\"hidden_size\":2048,\"head_dim\":null}").config.head_size(),
      64);
  EXPECT_EQ(parse("{\"model_type\":\"llama\",\"num_attention_heads\":16}").config.kv_heads, 16);
  EXPECT_EQ(parse("{\"model_type\":\"mixtral\",\"num_key_value_heads\":null}").config.kv_heads, 32);
}

TEST(ReadConfig, RefusesByFieldAndValue) {
  const std::vector<std::pair<std::string, std::string>> fields{
      {"\"attention_bias\": true", "attention_bias = true: attention has no biases"},
      {"\"mlp_bias\": true", "mlp_bias = true"},
      {"\"hidden_act\": \"gelu\"", "hidden_act = \"gelu\": the activation must be \"silu\""},
      {"\"router_jitter_noise\": 0.01", "router_jitter_noise = 0.01"},
      {"\"attention_dropout\": 0.1", "attention_dropout = 0.1"},
      {"\"rope_scaling\": {\"type\": \"linear\", \"factor\": 2}", "rope_scaling."},
      {"\"rope_scaling\": {\"rope_type\": \"yarn\"}", "rope_scaling.rope_type = \"yarn\""},
      {"\"rope_parameters\": {\"rope_theta\": 1e4, \"factor\": 8.0}", "rope_parameters.factor = 8"},
      {"\"rope_parameters\": {\"rope_type\": \"llama3\"}",
       "rope_parameters.rope_type = \"llama3\""},
      {"\"rope_theta\": 1e4, \"rope_parameters\": {\"rope_theta\": 1e6}",
       "rope_theta = 10000 and rope_parameters.rope_theta = 1e+06"},
      {"\"partial_rotary_factor\": 0.5", "partial_rotary_factor = 0.5"},
      {"\"kv_lora_rank\": 512", "kv_lora_rank = 512: latent attention"},
      {"\"n_shared_experts\": 1", "n_shared_experts = 1: shared experts"},
      {"\"shared_expert_intermediate_size\": 64", "shared_expert_intermediate_size = 64"},
      {"\"quantization_config\": {\"quant_method\": \"fp8\"}", "quantization_config = {"},
      {"\"num_experts\": 8, \"num_local_experts\": 16",
       "num_experts = 8 and num_local_experts = 16"},
      {"\"num_experts_per_tok\": 9, \"num_experts\": 8", "num_experts_per_tok = 9: there are 8"},
      {"\"hidden_size\": 0", "hidden_size = 0: must be in 1..65536"},
      {"\"hidden_size\": 4095", "model.d_model=4095 must be a multiple of 8"},
      {"\"hidden_size\": -1", "is negative"},
      {"\"mlp_only_layers\": [24]", "mlp_only_layers = [24]: there are layers 0..23"},
      {"\"torch_dtype\": \"float64\"", "torch_dtype = \"float64\""},
      {"\"num_hidden_layers\": 1000000000000", "num_hidden_layers = 1000000000000"},
      {"\"rms_norm_eps\": 0", "model.norm_eps=0"},
      {"\"initializer_range\": -1.0", "initializer_range = -1: must be in 0..1000"},
      {"\"rope_theta\": 1e300", "rope_theta = 1e+300: must be in 0..1e+12"},
      {"\"router_aux_loss_coef\": 2", "router_aux_loss_coef = 2"},
      {"\"moe_intermediate_size\": 20", "moe_intermediate_size = 20: must be a multiple of 8"}};
  for (const auto& [field, expected] : fields) {
    expect_text(refusal("{\"model_type\": \"qwen3_moe\", " + field + "}"), "c.json: ");
    expect_text(refusal("{\"model_type\": \"qwen3_moe\", " + field + "}"), expected);
  }
  expect_text(refusal("{\"model_type\": \"deepseek_v3\"}"),
              "model_type = \"deepseek_v3\": latent attention is not built; the model types that "
              "are read are qwen3_moe, mixtral, llama, mistral, qwen3");
  expect_text(refusal("{\"model_type\": \"glm4_moe\"}"), "model_type = \"glm4_moe\": the model");
  expect_text(refusal("{}"), "\"model_type\" is missing");
  expect_text(refusal("[]"), "expected an object");
  expect_text(refusal("{\"model_type\": \"llama\", \"model_type\": \"llama\"}"), "duplicate key");
}

TEST(ReadConfig, WindowsShorterThanASequence) {
  const auto refused = [](const Description& d, int64_t seq_len) {
    try {
      check_window(d, seq_len, "c.json");
    } catch (const CheckpointError& e) {
      return std::string(e.what());
    }
    return std::string();
  };
  const Description mistral = parse("{\"model_type\":\"mistral\"}");
  EXPECT_EQ(refused(mistral, 4096), "");
  expect_text(refused(mistral, 4097), "sliding_window = 4096");
  // Qwen's field counts only if another one says so.
  EXPECT_EQ(refused(parse("{\"model_type\":\"qwen3\",\"sliding_window\":16}"), 4096), "");
  expect_text(refused(parse("{\"model_type\":\"qwen3\",\"sliding_window\":16,"
                            "\"use_sliding_window\":true}"),
                      17),
              "sliding_window = 16");
}

TEST(WriteConfig, ReadsBackAsTheSameModel) {
  for (const std::string& name : kExpertCases) {
    const std::string stored = read_all(golden(name) + "/config.json");
    const Description d = parse(stored);
    const std::string written = config_text(d.config, d.family, DType::kBFloat16, 17, stored);
    const Description again = parse(written);
    EXPECT_EQ(again.max_positions, 64);
    EXPECT_EQ(again.config.rope_theta, d.config.rope_theta);
    EXPECT_EQ(again.config.norm_eps, d.config.norm_eps);
    EXPECT_EQ(again.config.init_std, d.config.init_std);
    EXPECT_EQ(again.config.router.aux_coef, d.config.router.aux_coef);
    EXPECT_EQ(written, config_text(again.config, again.family, DType::kBFloat16, 17, written));
    for (const char* both : {"\"num_experts\": 4", "\"num_local_experts\": 4", "\"torch_dtype\"",
                             "\"dtype\"", "\"rope_theta\"", "\"rope_parameters\""}) {
      expect_text(written, both);
    }
  }
  const Description mixtral = parse(read_all(golden("mixtral") + "/config.json"));
  const std::string kept = config_text(mixtral.config, mixtral.family, DType::kFloat32, 17,
                                       read_all(golden("mixtral") + "/config.json"));
  expect_text(kept, "\"eos_token_id\": 2");
  expect_text(kept, "\"dtype\": \"float32\"");
  const std::string new_one = config_text(mixtral.config, mixtral.family, DType::kFloat32, 17, "");
  expect_text(new_one, "\"eos_token_id\": null");
  expect_text(new_one, "\"max_position_embeddings\": 17");
}

}  // namespace
}  // namespace moiety::hf
