// Spans as NVTX ranges, told to a listener in this program in place of a profiler. Needs no GPU.
#include "moiety/base/trace.h"

#include <cstdlib>
#include <nvtx3/nvToolsExt.h>
#include <string>
#include <vector>

#include <gtest/gtest.h>

namespace {

std::vector<std::string>& heard() {
  static std::vector<std::string> list;
  return list;
}

nvtxDomainHandle_t create_domain(const char* name) {
  heard().push_back(std::string("domain ") + name);
  static int handle = 0;
  return reinterpret_cast<nvtxDomainHandle_t>(&handle);
}
int push(nvtxDomainHandle_t, const nvtxEventAttributes_t* attributes) {
  heard().push_back(std::string("push ") + attributes->message.ascii);
  return 0;
}
int pop(nvtxDomainHandle_t) {
  heard().push_back("pop");
  return 0;
}

int listen(NvtxGetExportTableFunc_t find) {
  const auto* callbacks = static_cast<const NvtxExportTableCallbacks*>(find(NVTX_ETID_CALLBACKS));
  NvtxFunctionTable table = nullptr;
  unsigned size = 0;
  if (!callbacks || !callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE2, &table, &size)) {
    return 0;
  }
  *table[NVTX_CBID_CORE2_DomainCreateA] = reinterpret_cast<NvtxFunctionPointer>(create_domain);
  *table[NVTX_CBID_CORE2_DomainRangePushEx] = reinterpret_cast<NvtxFunctionPointer>(push);
  *table[NVTX_CBID_CORE2_DomainRangePop] = reinterpret_cast<NvtxFunctionPointer>(pop);
  return 1;
}

// The place where NVTX looks for a listener that is linked into the program.
[[maybe_unused]] const bool kListening = (InitializeInjectionNvtx2_fnptr = listen) != nullptr;

}  // namespace

namespace moiety {
namespace {

TEST(TraceRanges, SpansNestWithAndWithoutATrace) {
  if (std::getenv("NVTX_INJECTION64_PATH")) GTEST_SKIP() << "a profiler listens";
  const auto spans = [] {
    heard().clear();
    const TraceSpan outer(TraceLane::kCompute, "gemm", {{"m", 4}});
    { const WaitSpan inner(TraceLane::kEp, "wait"); }
  };
  { const TraceSpan first(TraceLane::kHost, "first"); }
  ASSERT_GE(heard().size(), 3u);
  EXPECT_EQ(heard().front(), "domain moiety");  // by the first span or launch of the program
  EXPECT_EQ(std::vector(heard().end() - 2, heard().end()),
            (std::vector<std::string>{"push first", "pop"}));
  const std::vector<std::string> nested{"push gemm", "push wait", "pop", "pop"};
  spans();
  EXPECT_EQ(heard(), nested);
  Trace trace;
  set_current_trace(&trace);
  spans();
  set_current_trace(nullptr);
  EXPECT_EQ(heard(), nested);
  ASSERT_EQ(trace.events.size(), 2u);
  EXPECT_STREQ(trace.events[0].name, "gemm");
  EXPECT_GE(trace.events[0].end, trace.events[1].end);
}

}  // namespace
}  // namespace moiety
