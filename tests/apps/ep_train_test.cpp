// Training among expert-parallel ranks with the keys of [ep]: how tokens travel changes no bit.
#include "tests/apps/train_rank.h"
#include "tests/support/pairwise.h"

namespace moiety::app {
namespace {

// Two micro-steps of two MoE layers with a shared expert on two ranks.
Arguments two_ranks(const std::string& directory) {
  return tiny(directory, 2, 2) +
         Arguments{
             "--train.micro_batch=2", "--moe.shared_d_ffn=16", "--router.aux_scope=micro_batch",
             "--train.steps=4",       "--eval.every=2",        "--eval.samples=4"};
}

}  // namespace
}  // namespace moiety::app
