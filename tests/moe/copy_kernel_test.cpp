// Which kernel a GPU takes to copy rows is decided without one, so it is tested without one.
#include "moiety/moe/copy_kernel.h"

#include <gtest/gtest.h>

namespace moiety::moe {
namespace {

const void* at(uintptr_t address) { return reinterpret_cast<const void*>(address); }

TEST(CopyKernel, TheWidestUnitThatAllRowsAreMadeOf) {
  EXPECT_EQ(choose_copy({at(4096), at(8192)}, {1024, 2048, 1024}).unit, 16);
  EXPECT_EQ(choose_copy({at(4096 + 8), at(8192)}, {1024, 2048, 1024}).unit, 4);
  EXPECT_EQ(choose_copy({at(4096), at(8192 + 4)}, {1024, 2048, 1024}).unit, 4);
  EXPECT_EQ(choose_copy({at(4096), at(8192)}, {1024, 2048 + 2, 1024}).unit, 2);
  EXPECT_EQ(choose_copy({at(4096), at(8192)}, {1024, 2048, 6}).unit, 2);
  EXPECT_EQ(choose_copy({at(4096 + 1), at(8192)}, {1024, 2048, 1024}).unit, 1);
}

TEST(CopyKernel, OneRowThatStandsForAllHasNoStride) {
  EXPECT_EQ(choose_copy({at(4096), at(8192)}, {0, 16, 4}).unit, 4);
}

TEST(CopyKernel, EveryKernelOfTheListIsChosen) {
  for (const CopyKernel& kernel : kCopyKernels) {
    EXPECT_EQ(choose_copy({at(static_cast<uintptr_t>(kernel.unit))}, {}), kernel);
  }
}

}  // namespace
}  // namespace moiety::moe
