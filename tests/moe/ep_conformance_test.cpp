// The conformance suite on threads.
#include "tests/moe/ep_conformance.h"

namespace moiety::moe {
namespace {

TEST(EpConformance, ThreadsThatMapEachOther) { conformance::run_cases<Threads>(0); }
TEST(EpConformance, ThreadsOverCollectives) { conformance::run_cases<ThreadCollectives>(1000); }

}  // namespace
}  // namespace moiety::moe
