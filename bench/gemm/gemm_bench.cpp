// Dense products of the shapes of a small MoE model, one thread, against the rate at which the core
// multiplies and adds in registers.
#include "bench/harness.h"
#include "moiety/base/parallel.h"
#include "moiety/gemm/gemm_block.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace moiety::bench {
namespace {

using gemm::GemmEngine;
using gemm::GemmOp;
using gemm::Product;

// ---- fp32 multiply-adds in registers: twelve independent chains.
constexpr int64_t kRounds = 100000;
constexpr int kChains = 12;

#if defined(__x86_64__)
__attribute__((target("avx2,fma"))) void chains_avx2() {
  const __m256 x = _mm256_set1_ps(1);
  __m256 acc[kChains] = {};
  for (int64_t r = 0; r < kRounds; ++r) {
#pragma GCC unroll 12
    for (int i = 0; i < kChains; ++i)
      asm volatile("vfmadd231ps %1, %1, %0" : "+x"(acc[i]) : "x"(x));
  }
}
__attribute__((target("avx512f"))) void chains_avx512() {
  const __m512 x = _mm512_set1_ps(1);
  __m512 acc[kChains] = {};
  for (int64_t r = 0; r < kRounds; ++r) {
#pragma GCC unroll 12
    for (int i = 0; i < kChains; ++i)
      asm volatile("vfmadd231ps %1, %1, %0" : "+x"(acc[i]) : "x"(x));
  }
}
#endif

// TFLOP/s of one core; 0 where it is unknown how to measure this.
double fma_peak() {
#if defined(__x86_64__)
  const auto rate = [](int width, void (*chains)()) {
    return tera(2.0 * width * kChains * kRounds, measure([&](int64_t) { chains(); }).ms);
  };
  if (gemm::avx512_available()) return rate(16, chains_avx512);
  if (gemm::avx2_available()) return rate(8, chains_avx2);
#endif
  return 0;
}

struct Shape {
  int64_t m, n, k;
};
constexpr Shape kShapes[] = {{512, 512, 512},  {256, 256, 256},  {512, 256, 128},
                             {2048, 256, 256}, {2048, 768, 256}, {2048, 264, 256},
                             {1024, 128, 512}, {256, 256, 2048}};

struct Kind {
  const char* name;
  GemmOp op;
  DType dtype, out;
  double target;  // share of the peak
};
constexpr Kind kKinds[] = {
    {"gemm.tn.fp32", GemmOp::kTN, DType::kFloat32, DType::kFloat32, 0.85},
    {"gemm.nn.fp32", GemmOp::kNN, DType::kFloat32, DType::kFloat32, 0.85},
    {"gemm.nt.fp32", GemmOp::kNT, DType::kFloat32, DType::kFloat32, 0.85},
    {"gemm.tn.bf16", GemmOp::kTN, DType::kBFloat16, DType::kBFloat16, 0.75},
    {"gemm.nn.bf16", GemmOp::kNN, DType::kBFloat16, DType::kBFloat16, 0.75},
    {"gemm.nt.bf16", GemmOp::kNT, DType::kBFloat16, DType::kFloat32, 0.75},
};

void measure_shape(const Kind& kind, const Shape& s, GemmEngine engine, double peak) {
  const bool a_transposed = kind.op == GemmOp::kNT, b_transposed = kind.op == GemmOp::kTN;
  const int64_t bytes = byte_size(kind.dtype, s.k * (s.m + s.n)) + byte_size(kind.out, s.m * s.n);
  std::vector<Tensor> as, bs, outs;
  std::vector<Product> blocks;
  for (int64_t c = 0; c < copies(bytes); ++c) {
    const auto id = static_cast<uint32_t>(2 * c);
    as.push_back(
        random_tensor(kind.dtype, {a_transposed ? s.k : s.m, a_transposed ? s.m : s.k}, id));
    bs.push_back(
        random_tensor(kind.dtype, {b_transposed ? s.n : s.k, b_transposed ? s.k : s.n}, id + 1));
    outs.emplace_back(kind.out, std::initializer_list<int64_t>{s.m, s.n});
    Product g;
    g.op = kind.op;
    g.dtype = kind.dtype;
    g.m = s.m;
    g.n = s.n;
    g.k = s.k;
    g.a = {as.back().view().raw(), as.back().view().stride(0)};
    g.b = {bs.back().view().raw(), bs.back().view().stride(0)};
    g.epilogue.out = outs.back().view().raw();
    g.epilogue.out_dtype = kind.out;
    g.epilogue.out_stride = s.n;
    blocks.push_back(g);
  }
  const Timing time =
      measure([&](int64_t i) { gemm::block_gemm(blocks[i % std::ssize(blocks)], engine); });
  Row row{kind.name, text("{}x{}x{}", s.m, s.n, s.k),
          tera(2.0 * static_cast<double>(s.m * s.n * s.k), time.ms), "TFLOP/s", time};
  row.more =
      text("\"engine\": \"{}\"",
           gemm::name(engine == GemmEngine::kAuto ? gemm::automatic_engine(kind.dtype) : engine));
  if (peak > 0) {
    row.against = "fp32 fma peak";
    row.ratio = row.value / peak;
    row.target = kind.target;
  }
  print(row);
}

void run(Options& options) {
  std::string engine_name = "auto";
  options.choice("--engine", engine_name, {"auto", "vector", "bf16", "amx", "onednn"},
                 "what multiplies");
  if (!options.parse()) return;
  const GemmEngine engine = engine_name == "vector"   ? GemmEngine::kVector
                            : engine_name == "bf16"   ? GemmEngine::kBf16
                            : engine_name == "amx"    ? GemmEngine::kAmx
                            : engine_name == "onednn" ? GemmEngine::kOneDnn
                                                      : GemmEngine::kAuto;
  set_thread_budget(1);
  const double peak = fma_peak();
  print({"gemm.fma_peak", "registers", peak, "TFLOP/s", {1}});
  for (const Kind& kind : kKinds) {
    if (!engine_available(engine, kind.dtype)) continue;
    for (const Shape& s : kShapes) measure_shape(kind, s, engine, peak);
  }
}

}  // namespace
}  // namespace moiety::bench

int main(int argc, char** argv) {
  return moiety::bench::run_main(argc, argv,
                                 "Dense products on one core, against its rate of fp32 "
                                 "multiply-adds in registers.",
                                 moiety::bench::run);
}
