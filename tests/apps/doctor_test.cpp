#include "apps/moiety/commands/doctor.h"

#include "moiety/base/gpu.h"
#include "moiety/gemm/gemm_cuda.h"
#include "moiety/train/health.h"
#include "tests/apps/train_helpers.h"

namespace moiety::app {
namespace {

using namespace train;

TEST(Doctor, SaysEveryCheckInLines) {
  const TemporaryDirectory dir;
  const ProgramResult result = run({"doctor", "--dir", dir / "."});
  EXPECT_EQ(result.code, kExitDone) << result.out;
  for (const char* name : {"build", "cpu", "products", "cores", "memory", "shared memory", "mpi",
                           "gpu", "gpu variables", "gpu libraries", "nvlink", "gpu pairs",
                           "open files", "disk", "tokenizers"}) {
    EXPECT_NE(result.out.find(text("  {} ", name)), std::string::npos) << name << "\n"
                                                                       << result.out;
  }
  EXPECT_EQ(result.out.find("FAIL"), std::string::npos);
  EXPECT_TRUE(std::filesystem::is_empty(dir / ".")) << "left something behind";
}

TEST(Doctor, JsonHasTheFacts) {
  const TemporaryDirectory dir;
  const ProgramResult result = run({"doctor", "--json", "--dir", dir / "."});
  EXPECT_EQ(std::count(result.out.begin(), result.out.end(), '\n'), 1);
  const nlohmann::json json = nlohmann::json::parse(result.out);
  EXPECT_EQ(json["v"], 1);
  EXPECT_EQ(json["ok"], true);
  std::map<std::string, nlohmann::json> checks;
  for (const nlohmann::json& check : json["checks"]) {
    checks[check["name"]] = check;
    const std::string status = check["status"];
    EXPECT_TRUE(status == "OK" || status == "INFO" || status == "WARN") << check;
    // A check that warns also tells what to do.
    EXPECT_TRUE(status != "WARN" || check.contains("fix")) << check;
  }
  EXPECT_GE(checks.at("cores")["usable"], 1);
  EXPECT_GT(checks.at("memory")["total"], checks.at("memory")["available"]);
  EXPECT_GT(checks.at("disk")["write_mb_s"], 0);
  EXPECT_EQ(checks.at("disk")["locks"], true);
  EXPECT_EQ(checks.at("shared memory")["works"], true);
  EXPECT_NE(
      checks.at("gpu variables")["text"].get<std::string>().find("CUDA_DEVICE_MAX_CONNECTIONS"),
      std::string::npos);
  // The libraries of tokenizers, which this build has.
  const std::string tokenizers = checks.at("tokenizers")["text"];
  EXPECT_EQ(tokenizers.find("PCRE2 10."), 0u) << tokenizers;
  EXPECT_NE(tokenizers.find(", utf8proc 2."), std::string::npos) << tokenizers;
  // And those of packed inputs.
  const std::string inputs = checks.at("inputs")["text"];
  EXPECT_EQ(inputs.find("zlib 1."), 0u) << inputs;
  EXPECT_NE(inputs.find(", zstd 1."), std::string::npos) << inputs;
  const GpuStatus& gpus = gpu_status();
  EXPECT_EQ(checks.at("gpu")["cuda"], gpus.built);
  EXPECT_EQ(checks.at("gpu")["gpus"], gpus.count);
  if (gpus.count == 0) {
    EXPECT_EQ(checks.at("gpu")["text"].get<std::string>().find(gpus.text), 0u);
  } else {
    EXPECT_EQ(checks.at("gpu")["gpu0_memory"], gpu_properties(0).memory);
  }
  // Each library of GPUs with its version, or that it is missing and what that means.
  const nlohmann::json& libraries = checks.at("gpu libraries");
  const std::string text = libraries["text"];
  if (gpus.built) {
    for (const char* library : {"cuBLASLt", "cuDNN", "NCCL"}) {
      EXPECT_NE(text.find(library), std::string::npos) << text;
      EXPECT_EQ(libraries.contains(library),
                text.find(std::string("no ") + library + ": ") == std::string::npos)
          << text;
    }
    EXPECT_EQ(libraries.contains("cuBLASLt"), gemm::cublaslt_status().available);
  } else {
    EXPECT_EQ(text, "not looked for: " + gpus.text);
  }
  EXPECT_EQ(checks.at("nvlink").contains("gpus"),
            checks.at("nvlink")["text"].get<std::string>().find("not known") == std::string::npos);
  EXPECT_TRUE(checks.at("mpi").contains("available"));
}

TEST(Doctor, LinksBetweenGpus) {
  const HealthCheck all = nvlink_health({18, 18});
  EXPECT_EQ(all.health, Health::kOk);
  EXPECT_EQ(all.text, "GPU 0: 18 links; GPU 1: 18 links");
  const HealthCheck lost = nvlink_health({18, 17, 18});
  EXPECT_EQ(lost.health, Health::kWarn);
  EXPECT_EQ(lost.text, "GPU 0: 18 links; GPU 1: 17 links; GPU 2: 18 links");
  EXPECT_NE(lost.fix, "");
  const HealthCheck none = nvlink_health({0, 0});
  EXPECT_EQ(none.health, Health::kInfo);
  EXPECT_EQ(none.text, "2 GPUs, no link between GPUs is active: they reach each other over PCIe");
  EXPECT_EQ(nvlink_health({0}).text, "1 GPU, no link between GPUs is active");
  EXPECT_EQ(nvlink_health({}).text, "no GPU is listed");
}

TEST(Doctor, PairsOfGpus) {
  EXPECT_EQ(gpu_pair_health({}).text, "fewer than two GPUs");
  EXPECT_EQ(gpu_pair_health({}).health, Health::kInfo);
  const HealthCheck all =
      gpu_pair_health({{.a = 0, .b = 1, .us = 5.04}, {.a = 0, .b = 2, .us = 6}});
  EXPECT_EQ(all.health, Health::kOk);
  EXPECT_EQ(all.text,
            "an exchange of a number takes 5.0 us between 0 and 1, 6.0 us between 0 and 2");
  const HealthCheck some =
      gpu_pair_health({{.a = 0, .b = 1, .why = "no peer access"}, {.a = 0, .b = 2, .us = 6}});
  EXPECT_EQ(some.health, Health::kWarn);
  EXPECT_EQ(some.text, "an exchange of a number takes 6.0 us between 0 and 2");
  EXPECT_EQ(some.fix, "ranks on 0 and 1 cannot map each other's memory: no peer access");
}

TEST(Doctor, ADirectoryThatCannotBeWrittenFails) {
  const ProgramResult result = run({"doctor", "--dir", "/proc"});
  EXPECT_EQ(result.code, kExitDevice);
  EXPECT_NE(result.out.find("FAIL  disk"), std::string::npos) << result.out;
  EXPECT_EQ(result.err, "moiety: doctor: disk: failed\n");
  EXPECT_EQ(run({"doctor", "--dir", "/nowhere"}).code, kExitUsage);
}

}  // namespace
}  // namespace moiety::app
