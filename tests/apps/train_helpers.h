// Small training runs through the program itself, and the files that they leave behind.
#pragma once

#include <map>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "apps/moiety/exit_code.h"
#include "apps/moiety/program.h"
#include "moiety/checkpoint/manifest.h"
#include "tests/data/data_helpers.h"

namespace moiety::app {

using data::ramp;
using data::write_tokens;

struct ProgramResult {
  int code = 0;
  std::string out, err;

  std::string last_line() const {
    std::string text = err.substr(0, err.find_last_not_of('\n') + 1);
    return text.substr(text.rfind('\n') + 1);
  }
};

inline ProgramResult run(const std::vector<std::string>& arguments) {
  ProgramResult result;
  testing::internal::CaptureStdout();
  testing::internal::CaptureStderr();
  result.code = run_program(arguments);
  result.out = testing::internal::GetCapturedStdout();
  result.err = testing::internal::GetCapturedStderr();
  return result;
}

using Arguments = std::vector<std::string>;

inline Arguments operator+(Arguments a, const Arguments& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

// A model and a batch that a step takes milliseconds for; the whole batch in one micro-step.
inline Arguments tiny(const std::string& directory, int ranks = 1, int ep = 1) {
  return {"train",
          "--run=" + directory,
          "--ranks=" + std::to_string(ranks),
          "--parallel.ep=" + std::to_string(ep),
          "--train.micro_batch=" + std::to_string(8 / ranks),
          "--train.global_batch=8",
          "--train.steps=6",
          "--model.d_model=32",
          "--model.layers=2",
          "--model.heads=4",
          "--moe.experts=4",
          "--moe.d_ffn=32",
          "--router.aux_scope=global",
          "--data.synthetic=markov",
          "--data.seq_len=16",
          "--optim.lr=0.01",
          "--optim.warmup_steps=3",
          "--precision.recipe=fp32",
          "--log.peak_tflops=1"};
}

inline void train(const Arguments& arguments) {
  const ProgramResult result = run(arguments);
  ASSERT_EQ(result.code, kExitDone) << result.err;
}

// AdamW hides the scale of a gradient. With an eps far above every gradient it is gradient descent,
// of rate lr / eps = 1.
inline const Arguments kDescent{
    "--optim.eps=1e4",           "--optim.lr=1e4",      "--optim.min_lr=1e4",
    "--optim.schedule=constant", "--optim.beta1=0",     "--optim.beta2=0",
    "--optim.weight_decay=0",    "--train.grad_clip=0", "--optim.warmup_steps=0"};

inline std::vector<nlohmann::json> records(const std::string& directory) {
  std::vector<nlohmann::json> list;
  std::istringstream lines(read_all(directory + "/metrics.jsonl"));
  for (std::string line; std::getline(lines, line);) list.push_back(nlohmann::json::parse(line));
  return list;
}

// The last record of each step.
inline std::map<int64_t, nlohmann::json> steps(const std::string& directory) {
  std::map<int64_t, nlohmann::json> by_step;
  for (const nlohmann::json& r : records(directory)) {
    if (!r.contains("event")) by_step[r.at("step").get<int64_t>()] = r;
  }
  return by_step;
}

inline std::vector<nlohmann::json> events(const std::string& directory, const std::string& name) {
  std::vector<nlohmann::json> list;
  for (const nlohmann::json& r : records(directory)) {
    if (r.contains("event") && r["event"] == name) list.push_back(r);
  }
  return list;
}

inline std::string checkpoint_path(const std::string& directory, int64_t step) {
  return directory + text("/checkpoints/step-{:08}", step);
}

// The records of run `many` are those of `one` but for rounding, relative to their values.
inline void expect_near(const std::string& many, const std::string& one, double bound) {
  const auto expected = steps(one);
  const auto got = steps(many);
  ASSERT_FALSE(got.empty());
  for (const auto& [step, r] : got) {
    for (const char* field : {"loss", "aux", "z", "gnorm"}) {
      const double value = expected.at(step)[field].get<double>();
      EXPECT_NEAR(r[field].get<double>(), value, bound * value)
          << field << " of step " << step << " in " << many;
    }
    EXPECT_EQ(r["tokens"], expected.at(step)["tokens"]);
  }
}

inline void expect_losses_near(const std::string& many, const std::string& one, double bound) {
  const auto expected = steps(one), got = steps(many);
  ASSERT_FALSE(got.empty() || expected.empty());
  ASSERT_EQ(got.rbegin()->first, expected.rbegin()->first);
  for (const auto& [step, r] : got) {
    const double loss = expected.at(step)["loss"].get<double>();
    EXPECT_NEAR(r["loss"].get<double>(), loss, bound * loss) << "step " << step << " in " << many;
  }
}

// Digests of all tensors and slots: equal exactly if every element is the same bits.
inline std::map<std::string, uint64_t> digests(const std::string& path) {
  std::map<std::string, uint64_t> all;
  for (const auto& [name, tensor] : checkpoint::read_manifest(path).tensors) {
    for (const auto& [slot, entry] : tensor.slots) all[slot + "/" + name] = entry.digest;
  }
  return all;
}

}  // namespace moiety::app
