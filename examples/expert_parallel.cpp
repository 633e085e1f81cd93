// Expert parallelism between threads: four ranks own two experts each. Every token goes to the
// ranks of its experts (dispatch), is worked on there, and the results come home and are summed
// (combine). Expert e multiplies by e + 1, so the sums are known.
#include <cstdio>
#include <exception>

#include "moiety/base/buffer.h"
#include "moiety/comm/thread_group.h"
#include "moiety/moe/combine.h"
#include "moiety/moe/dispatch.h"
#include "moiety/moe/prepare.h"

using namespace moiety;

constexpr int kRanks = 4, kExperts = 8, kTopK = 2;
constexpr int64_t kModel = 64;

void rank_main(comm::Communicator& world) {
  const int rank = world.rank();
  const int64_t tokens = 5 + 3 * rank;  // ranks may have different numbers of tokens
  auto group = moe::EpGroup::create(world, moe::ExpertMap(kExperts, kRanks),
                                    {.tokens = 5 + 3 * (kRanks - 1),
                                     .model = kModel,
                                     .topk = kTopK,
                                     .widest = moe::PayloadFormat::kFP32},
                                    {.name = "example"});

  // Token t of rank r holds the value r + t / 100 and chooses the experts t and t + 3.
  const Tensor x_TD(DType::kFloat32, {tokens, kModel}), out_TD(DType::kFloat32, {tokens, kModel});
  const Tensor idx_TK(DType::kInt32, {tokens, kTopK});
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t d = 0; d < kModel; ++d) x_TD.data<float>()[t * kModel + d] = rank + t / 100.0f;
    idx_TK.data<int32_t>()[t * kTopK] = static_cast<int32_t>(t % kExperts);
    idx_TK.data<int32_t>()[t * kTopK + 1] = static_cast<int32_t>((t + 3) % kExperts);
  }

  // Room for the worst case; a program that trains asks for less and grows (see the guide).
  const int64_t capacity =
      moe::worst_capacity(kRanks, group.limits().tokens, kTopK, group.local_experts(), 1);
  const moe::PrepareArgs routing{.idx_TK = idx_TK, .capacity = capacity};
  const Tensor memory(DType::kUInt8,
                      {moe::plan_bytes(group.map(), group.limits(), routing)});  // of the plan
  const Tensor rows_CD(DType::kFloat32, {capacity, kModel});
  const Stream stream;

  const moe::EpPlan plan = moe::prepare(group, routing, memory, stream);
  moe::dispatch(group, plan, {.x_TD = x_TD, .rows_CD = rows_CD}, stream);
  // The rows of local expert l are [offset[l], offset[l] + rows_real[l]), in a fixed order.
  for (int l = 0; l < group.local_experts(); ++l) {
    const float factor = static_cast<float>(group.map().experts_of(rank)[l] + 1);
    const int64_t first = plan.offset.data<int64_t>()[l], n = plan.rows_real.data<int64_t>()[l];
    float* rows = rows_CD.data<float>() + first * kModel;
    for (int64_t i = 0; i < n * kModel; ++i) rows[i] *= factor;
  }
  moe::combine(group, plan, {.y_CD = rows_CD, .out_TD = out_TD}, stream);
  group.check(plan.epoch);  // throws, on every rank, if a token did not find room

  int64_t wrong = 0;
  for (int64_t t = 0; t < tokens; ++t) {
    const float x = rank + t / 100.0f;
    const float want = x * (t % kExperts + 1) + x * ((t + 3) % kExperts + 1);
    for (int64_t d = 0; d < kModel; ++d) {
      const float error = out_TD.data<float>()[t * kModel + d] - want;
      wrong += error > 1e-5f * want || error < -1e-5f * want;
    }
  }
  std::printf("rank %d: %lld tokens went out, %lld rows came in, %lld wrong sums\n", rank,
              static_cast<long long>(tokens),
              static_cast<long long>(plan.info.data<int64_t>()[moe::kInfoKept]),
              static_cast<long long>(wrong));
  group.close();
  if (wrong > 0) throw std::runtime_error("expert_parallel: wrong sums");
}

int main() {
  try {
    comm::run_thread_ranks(kRanks, {}, rank_main);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "error: %s\n", e.what());
    return 1;
  }
}
