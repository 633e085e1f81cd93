// Which kernels a GPU takes for attention is decided without one, so it is tested without one.
#include "moiety/nn/attention_kernel.h"

#include <algorithm>

#include "tests/nn/attention_cases.h"
#include "tests/support/error_of.h"

namespace moiety::nn {
namespace {

using enum AttentionPass;

// A problem whose views could be a GPU's: heads at multiples of 16 bytes where their size allows.
Problem problem(DType dtype, int64_t head_dim) {
  return {{"kernels", 1, 4, 4, 2, 1, head_dim}, dtype};
}

std::vector<AttentionKernel> forward(DType dtype, int64_t head_dim) {
  return choose_kernels(job_of(problem(dtype, head_dim).forward()));
}
std::vector<AttentionKernel> backward(DType dtype, int64_t head_dim) {
  return choose_kernels(job_of(problem(dtype, head_dim).backward()));
}

TEST(AttentionKernel, EveryJobHasKernelsAndEveryKernelAJob) {
  std::vector<AttentionKernel> all(kTileAttention.begin(), kTileAttention.end());
  all.insert(all.end(), kPlainAttention.begin(), kPlainAttention.end());
  std::vector<int64_t> chosen(all.size());
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (int64_t head_dim = 2; head_dim <= 256; head_dim += 2) {
      for (const auto& kernels : {forward(dtype, head_dim), backward(dtype, head_dim)}) {
        for (const AttentionKernel& kernel : kernels) {
          const auto at = std::find(all.begin(), all.end(), kernel);
          ASSERT_NE(at, all.end()) << "head_dim=" << head_dim;
          EXPECT_EQ(kernel.dtype, dtype);
          ++chosen[static_cast<size_t>(at - all.begin())];
        }
      }
    }
  }
  for (size_t i = 0; i < all.size(); ++i) {
    EXPECT_GE(chosen[i], 1) << "nobody calls kernel " << i;
  }
}

TEST(AttentionKernel, TensorCoresTakeHeadsOfThreeSizes) {
  for (const int64_t head_dim : {32, 64, 128}) {
    const auto tiles = [&](AttentionPass pass) {
      return AttentionKernel{AttentionPath::kTiles, pass, DType::kBFloat16, head_dim};
    };
    EXPECT_EQ(forward(DType::kBFloat16, head_dim), std::vector{tiles(kForward)});
    EXPECT_EQ(backward(DType::kBFloat16, head_dim),
              (std::vector{tiles(kDots), tiles(kQueryGradient), tiles(kKeyGradient)}));
  }
  const auto plain = [](DType dtype, AttentionPass pass) {
    return AttentionKernel{AttentionPath::kPlain, pass, dtype};
  };
  EXPECT_EQ(forward(DType::kBFloat16, 96), std::vector{plain(DType::kBFloat16, kForward)});
  EXPECT_EQ(backward(DType::kFloat32, 64), (std::vector{plain(DType::kFloat32, kQueryGradient),
                                                        plain(DType::kFloat32, kKeyGradient)}));
}

TEST(AttentionKernel, AddressesAndStridesThatTensorCoresCannotRead) {
  const Problem p = problem(DType::kBFloat16, 64);
  const AttentionJob job = job_of(p.backward());
  EXPECT_TRUE(suits_tensor_cores(job));
  const auto expect_plain = [&](auto&& change) {
    AttentionJob odd = job;
    change(odd);
    EXPECT_FALSE(suits_tensor_cores(odd));
    EXPECT_EQ(choose_kernels(odd).front().path, AttentionPath::kPlain);
  };
  expect_plain([](AttentionJob& odd) { odd.q.data = static_cast<std::byte*>(odd.q.data) + 2; });
  expect_plain([](AttentionJob& odd) { odd.k.row += 4; });
  expect_plain([](AttentionJob& odd) { odd.dv.group += 1; });
}

TEST(AttentionKernel, Float64IsForCpus) {
  const Problem p = problem(DType::kFloat64, 64);
  EXPECT_EQ(error_of([&] { job_of(p.forward()); }), "attention: float64 heads are for CPUs alone");
}

}  // namespace
}  // namespace moiety::nn
