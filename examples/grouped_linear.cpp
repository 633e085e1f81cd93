// A linear layer of experts over several micro-batches whose weight gradients wait until the end:
// the bits are those of gradients that are computed at once.
#include "moiety/gemm/grouped_linear.h"

#include <cstdio>
#include <cstring>

#include "moiety/base/buffer.h"
#include "moiety/base/rng.h"

using namespace moiety;

constexpr int kBatches = 4;
constexpr int64_t kRows = 96, kExperts = 4, kIn = 32, kOut = 48;

Tensor random_tensor(std::initializer_list<int64_t> sizes, uint32_t id) {
  Tensor x(DType::kFloat32, sizes);
  for (int64_t i = 0; i < x.view().numel(); ++i) x.data<float>()[i] = init_normal(1, id, i);
  return x;
}

// Groups without a gap; how many rows an expert has is data, and differs between micro-batches.
Tensor begins(int64_t batch) {
  Tensor begin(DType::kInt64, {kExperts + 1});
  for (int64_t e = 0; e <= kExperts; ++e) {
    begin.data<int64_t>()[e] = e * (e + batch) * kRows / (kExperts * (kExperts + batch));
  }
  return begin;
}

// The sum over the micro-batches of the weight's gradient, which waits for `wait` of them.
Tensor gradient(int64_t wait) {
  const Tensor w = random_tensor({kExperts, kOut, kIn}, 100);
  Tensor dw(DType::kFloat32, {kExperts, kOut, kIn});
  gemm::GroupedLinear linear("experts.fc1", w.view(), {}, {.dx = false});
  const auto run_oldest = [&] {
    linear.weight_target().into = {
        dw.view(), {.value = linear.weight_target().contributions == 0 ? 0.0f : 1.0f}};
    linear.backward_weights({});
  };
  // Set before the first backward pass, as every target.
  linear.weight_target().into.grad = dw.view();
  for (int64_t m = 0; m < kBatches; ++m) {
    // What a job reads lives as long as the job.
    struct Rows {
      Tensor begin, x, dy;
    };
    const auto rows = std::make_shared<Rows>(begins(m), random_tensor({kRows, kIn}, uint32_t(m)),
                                             random_tensor({kRows, kOut}, uint32_t(50 + m)));
    linear.backward_data(
        {.groups = {.begin_E1 = rows->begin, .experts = kExperts, .capacity = kRows},
         .dy = {rows->dy},
         .x = {rows->x},
         .memory = rows},
        {});
    if (linear.pending() > wait) run_oldest();
  }
  while (linear.pending() > 0) run_oldest();
  linear.check_idle("optimizer step");
  linear.weight_target().ready.wait();
  return dw;
}

int main() {
  const Tensor at_once = gradient(0);
  int different = 0;
  for (const int64_t wait : {1, 2, kBatches}) {
    const Tensor late = gradient(wait);
    different +=
        std::memcmp(late.view().raw(), at_once.view().raw(), size_t(late.view().bytes())) != 0;
  }
  std::printf("gradients that waited for 1, 2 and %d micro-batches: %d differ\n", kBatches,
              different);
  return different;
}
