#include "moiety/capi/moiety.h"

#include <cstdlib>
#include <cstring>
#include <new>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "moiety/base/error.h"
#include "moiety/base/gpu.h"
#include "moiety/base/json_line.h"
#include "moiety/base/parallel.h"
#include "moiety/capi/guarded.h"
#include "moiety/capi/interrupt.h"
#include "moiety/checkpoint/key_remap.h"
#include "moiety/gemm/gemm_block.h"
#include "moiety/train/health.h"

namespace moiety {
namespace {

using nlohmann::json;

constexpr const char* kNames[] = {
    "Ok",        "InvalidArgument", "Unsupported", "Cuda", "Comm",
    "Io",        "OutOfMemory",     "Usage",       "Data", "Checkpoint",
    "Numerical", "Internal",        "Interrupted"};

static_assert(static_cast<int>(ErrorKind::kInvalidArgument) + 1 == MOIETY_INVALID_ARGUMENT);
static_assert(static_cast<int>(ErrorKind::kNumerical) + 1 == MOIETY_NUMERICAL);

std::string build_info() {
  const GpuStatus& gpu = gpu_status();
  return JsonLine()
      .add("version", MOIETY_VERSION)
      .add("cuda", gpu.built)
      .add("cuda_runtime", gpu.runtime)
      .add("gpus", gpu.count)
      .add("gpu_text", gpu.text)
      .add("engine_float32", gemm::name(gemm::automatic_engine(DType::kFloat32)))
      .add("engine_bfloat16", gemm::name(gemm::automatic_engine(DType::kBFloat16)))
      .add("onednn", gemm::onednn_version())
      .add("threads", thread_budget())
      .text();
}

checkpoint::ExpertForm form_of(const std::string& name) {
  MOIETY_CHECK(name == "packed" || name == "indexed",
               "key_remap: form is '{}', expected packed or indexed", name);
  return name == "packed" ? checkpoint::ExpertForm::kPacked : checkpoint::ExpertForm::kIndexed;
}

json key_json(const checkpoint::KeyShape& key) {
  return {{"name", key.name}, {"shape", key.shape}};
}

std::string remap(const char* text) {
  MOIETY_CHECK(text != nullptr, "key_remap: the request is null");
  std::vector<checkpoint::KeyShape> keys;
  std::vector<checkpoint::ExpertModule> modules;
  checkpoint::KeyTarget target;
  try {
    const json request = json::parse(text);
    for (const json& key : request.at("keys")) {
      keys.push_back({key.at("name"), key.at("shape").get<std::vector<int64_t>>()});
    }
    for (const json& module : request.at("modules")) {
      modules.push_back({module.at("name"), module.at("experts"), module.value("gated", false)});
    }
    target.form = form_of(request.at("form"));
    target.from_interleave = request.value("from_interleave", int64_t{0});
    target.to_interleave = request.value("to_interleave", int64_t{0});
  } catch (const json::exception& e) {
    fail(ErrorKind::kInvalidArgument, "key_remap: the request is no request: {}", e.what());
  }
  target.modules = modules;
  json moves = json::array();
  for (const checkpoint::KeyMove& move : checkpoint::key_remap(keys, target)) {
    moves.push_back({{"source", key_json(move.source)},
                     {"target", key_json(move.target)},
                     {"of_experts", move.of_experts},
                     {"expert", move.expert},
                     {"packed_source", move.packed_source},
                     {"packed_target", move.packed_target},
                     {"from_interleave", move.from_interleave},
                     {"to_interleave", move.to_interleave}});
  }
  return json{{"moves", moves}}.dump();
}

}  // namespace

namespace capi {

std::string& last_error() {
  thread_local std::string text;
  return text;
}

void give(char** out, const std::string& text) {
  MOIETY_CHECK(out != nullptr, "capi: the address of the result is null");
  auto* copy = static_cast<char*>(std::malloc(text.size() + 1));
  if (!copy) throw std::bad_alloc();
  std::memcpy(copy, text.c_str(), text.size() + 1);
  *out = copy;
}

}  // namespace capi
}  // namespace moiety

using namespace moiety;        // NOLINT: the functions below are C's
using namespace moiety::capi;  // NOLINT

const char* moiety_code_name(int code) {
  return code >= 0 && code < static_cast<int>(std::size(kNames)) ? kNames[code] : "?";
}

const char* moiety_last_error(void) { return last_error().c_str(); }

const char* moiety_version(void) { return MOIETY_VERSION; }

void moiety_free(char* text) { std::free(text); }

int moiety_build_info(char** json) {
  return guarded([&] { give(json, build_info()); });
}

int moiety_doctor(const char* directory, int measure, char** json) {
  return interruptible([&] {
    return guarded([&] {
      MOIETY_CHECK(directory != nullptr, "doctor: the directory is null");
      give(json, train::checks_json(train::examine(directory, measure != 0)));
    });
  });
}

int moiety_counters(int64_t* allocations, int64_t* waits) {
  return guarded([&] {
    MOIETY_CHECK(allocations && waits, "counters: the address of a result is null");
    const gpu::Activity seen = gpu::activity();
    *allocations = seen.allocations;
    *waits = seen.waits;
  });
}

int moiety_key_remap(const char* request, char** moves) {
  return guarded([&] { give(moves, remap(request)); });
}
