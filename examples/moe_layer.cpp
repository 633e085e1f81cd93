// One mixture-of-experts layer, trained on a toy problem by two ranks that share its experts. The
// target shifts a token's elements by another distance in each quarter of the input space, which no
// single linear map can do; router and experts learn who does what.
#include "moiety/moe/moe_layer.h"

#include <cmath>
#include <cstdio>

#include "moiety/base/rng.h"
#include "moiety/comm/thread_group.h"
#include "moiety/optim/adamw.h"

using namespace moiety;

constexpr int kRanks = 2, kSteps = 600;
constexpr int64_t kTokens = 256, kModel = 16, kFfn = 32, kExperts = 4;  // tokens of a rank
const Stream kStream;

// A weight, its master (with bf16 weights they would differ), gradient and AdamW's moments.
struct Parameter {
  Tensor weight, master, grad, exp_avg, exp_avg_sq;

  Parameter(std::initializer_list<int64_t> sizes, uint32_t id) {
    for (Tensor* t : {&weight, &master, &grad, &exp_avg, &exp_avg_sq})
      *t = {DType::kFloat32, sizes};
    for (int64_t i = 0; i < weight.view().numel(); ++i) {
      master.data<float>()[i] = weight.data<float>()[i] = 0.2f * init_normal(1, id, i);
    }
  }
  void update(int t, float scale) {
    const int64_t n = weight.view().numel();
    const auto flat = [n](const Tensor& x) { return x.view().reshape({n}); };
    const optim::ElementRun all[] = {{.begin = 0, .end = n}};
    const optim::AdamW adam;
    optim::AdamWStep step;
    step.s = scale;
    step.k1 = static_cast<float>(1 / (1 - std::pow(adam.beta1, t)));
    step.k2 = static_cast<float>(1 / (1 - std::pow(adam.beta2, t)));
    step.lr = static_cast<float>(1e-2 * (1 - 0.95 * t / kSteps));
    const optim::AdamWArgs segment{flat(grad),       flat(master), flat(exp_avg),
                                   flat(exp_avg_sq), flat(weight), all};
    optim::adamw(adam, 0, TensorView(&step, DType::kUInt8, {sizeof(step)}),
                 optim::AdamWTable({&segment, 1}, Device{}), kStream);
  }
};

// Half the squared distance to the target, and its gradient.
double distance(const float* x, const float* out, float* dout) {
  double sum = 0;
  for (int64_t i = 0; i < kTokens * kModel; ++i) {
    const int64_t token = i / kModel * kModel, quarter = (x[token] > 0) + 2 * (x[token + 1] > 0);
    dout[i] = out[i] - x[token + (i + 1 + 3 * quarter) % kModel];
    sum += 0.5 * dout[i] * dout[i];
  }
  return sum;
}

void rank_main(comm::Communicator& world) {
  const moe::MoeConfig config{
      .model = kModel, .ffn = kFfn, .router = {.experts = kExperts, .top_k = 2}};
  auto group = moe::EpGroup::create(world, moe::ExpertMap(kExperts, kRanks),
                                    moe::moe_limits(config, kTokens), {.name = "example"});
  const moe::MoeLayer layer(config, group);
  const auto rank = static_cast<uint32_t>(world.rank());
  // Every rank holds the router; each holds its own experts.
  const int64_t local = group.local_experts();
  Parameter router({kExperts, kModel}, 0), w1({local, 2 * kFfn, kModel}, 10 + rank),
      w2({local, kModel, kFfn}, 20 + rank);
  const moe::MoeWeights weights{router.weight, {}, w1.weight.view(), w2.weight.view(), {}, {}};
  const moe::MoeGrads grads{
      .router_ED = router.grad, .w1 = {w1.grad.view()}, .w2 = {w2.grad.view()}};
  Tensor x, out, dout, dx;
  for (Tensor* t : {&x, &out, &dout, &dx}) *t = {DType::kFloat32, {kTokens, kModel}};
  const Tensor count(DType::kInt64, {1, kExperts + 1}), sum(DType::kFloat64, {1, kExperts + 1});
  const Tensor scope(DType::kInt64, {2}), loss(DType::kFloat64, {1});
  Arena arena("activations");

  for (int step = 1; step <= kSteps; ++step) {
    for (int64_t i = 0; i < kTokens * kModel; ++i) {
      x.data<float>()[i] = init_normal(uint64_t(step) * kRanks + rank, 1, i);
    }
    const ArenaScope activations(arena);
    moe::MoeSaved saved;
    const int64_t capacity = layer.capacity_for(2.0, kRanks * kTokens);  // two ranks: always enough
    layer.forward({weights, x, {}, {}, capacity, out, {count, sum}, {}}, &saved, arena, kStream);
    *loss.data<double>() = distance(x.data<float>(), out.data<float>(), dout.data<float>());
    layer.backward({weights, grads, x, dout, {}, count, scope, dx}, saved, arena, kStream);
    // Experts have seen all ranks' tokens; the router's gradient is the sum over the ranks.
    world.all_reduce(router.grad, comm::ReduceOp::kSum, kStream).wait();
    world.all_reduce(loss, comm::ReduceOp::kSum, kStream).wait();
    for (Parameter* p : {&router, &w1, &w2}) p->update(step, 1.0f / (kRanks * kTokens));
    if (rank == 0 && (step == 1 || step % 100 == 0)) {
      std::printf("step %3d  loss %.4f\n", step,
                  *loss.data<double>() / (kRanks * kTokens * kModel));
    }
  }
  group.close();
}

int main() { comm::run_thread_ranks(kRanks, {}, rank_main); }
