// Causal attention on a GPU. Operations are counted over the keys that queries see; in backward
// they are those of its five products.
#include "bench/harness.h"
#include "moiety/base/copy.h"
#include "moiety/base/gpu.h"
#include "moiety/nn/attention_cuda.h"

namespace moiety::bench {
namespace {

constexpr Device kGpu{DeviceType::kCuda, 0};

struct Shape {
  int64_t sequences, length, heads, kv_heads, head_dim;
};
constexpr Shape kShapes[] = {{2, 4096, 32, 4, 128},  {1, 8192, 32, 4, 128}, {8, 1024, 32, 4, 128},
                             {2, 4096, 32, 32, 128}, {4, 4096, 16, 4, 64},  {2, 4096, 16, 16, 64},
                             {8, 1024, 16, 4, 64}};

std::string case_of(const Shape& s) {
  return text("B{} S{} H{} G{} C{}", s.sequences, s.length, s.heads, s.kv_heads, s.head_dim);
}

// Documents as in packed samples: long and short ones.
constexpr int64_t kDocuments[] = {512, 1536, 256, 1792};

struct Documents {
  Tensor start_BS;       // int32, as attention.h says
  double seen_keys = 0;  // by all queries of a sequence
};

Documents documents(int64_t sequences, int64_t length, const Stream& stream) {
  const Tensor host(DType::kInt32, {sequences, length});
  auto* start = host.data<int32_t>();
  double seen = 0;
  for (int64_t b = 0; b < sequences; ++b) {
    int64_t begin = 0, end = kDocuments[b % 4];
    for (int64_t i = 0, n = b; i < length; ++i) {
      if (i == end) begin = i, end += kDocuments[++n % 4];
      start[b * length + i] = static_cast<int32_t>(begin);
      seen += static_cast<double>(i - begin + 1);
    }
  }
  Documents out{Tensor(DType::kInt32, {sequences, length}, kGpu),
                seen / static_cast<double>(sequences)};
  copy(out.start_BS, host, stream);
  stream.synchronize();
  return out;
}

Tensor random_on_gpu(std::initializer_list<int64_t> sizes, uint32_t id, const Stream& stream) {
  const Tensor host = random_tensor(DType::kBFloat16, sizes, id);
  Tensor out(DType::kBFloat16, sizes, kGpu);
  copy(out, host, stream);
  stream.synchronize();
  return out;
}

enum class Way { kBest, kTiles, kDocuments };  // the path of a step, without or with documents

void measure_shape(const Shape& s, Way way, const Stream& stream) {
  const int64_t b = s.sequences, t = s.length, g = s.kv_heads, m = s.heads / g, c = s.head_dim;
  const int64_t width = (s.heads + 2 * g) * c;
  const Tensor qkv = random_on_gpu({b * t, width}, 1, stream),
               dqkv(DType::kBFloat16, {b * t, width}, kGpu),
               d_out = random_on_gpu({b, t, g, m, c}, 2, stream),
               o(DType::kBFloat16, {b, t, g, m, c}, kGpu), lse(DType::kFloat32, {b, g, m, t}, kGpu),
               delta(DType::kFloat32, {b, g, m, t}, kGpu);
  const nn::QkvHeads x = nn::split_heads(qkv, b, s.heads, g, c),
                     d = nn::split_heads(dqkv, b, s.heads, g, c);
  const Documents packed = way == Way::kDocuments ? documents(b, t, stream) : Documents{};
  const nn::AttentionArgs forward{x.q_BSGMC, x.k_BSGC, x.v_BSGC,          packed.start_BS,
                                  o,         lse,      way != Way::kTiles};
  const nn::AttentionBackwardArgs backward{forward, d_out, d.q_BSGMC, d.k_BSGC, d.v_BSGC, delta};
  const double seen = way == Way::kDocuments ? packed.seen_keys : 0.5 * double(t) * double(t);
  const double flop = 4.0 * double(b * s.heads * c) * seen;
  const auto report = [&](const char* name, nn::AttentionPath path, double flops,
                          const Timing& time) {
    // cuDNN's path has peers, so its rows have no path in their names.
    const bool ours = path != nn::AttentionPath::kCudnn;
    Row row{name,
            case_of(s) + (ours ? text(" {}", nn::name(path)) : "") +
                (way == Way::kDocuments ? " documents" : ""),
            tera(flops, time.ms), "TFLOP/s", time};
    row.device = kGpu;
    print(row);
  };
  report("attention.fwd", attention_path(forward), flop,
         measure([&](int64_t) { nn::attention(forward, stream); }, stream));
  report("attention.bwd", attention_backward_path(backward), 2.5 * flop,
         measure([&](int64_t) { nn::attention_backward(backward, stream); }, stream));
}

void run(Options& options) {
  std::string device = "cuda";
  bool list = false;
  options.choice("--device", device, {"cuda"}, "where");
  options.flag("--list", list, "the cases, without a measurement");
  if (!options.parse()) return;
  if (list) {
    for (const Shape& s : kShapes) std::printf("%s\n", case_of(s).c_str());
    return;
  }
  require_device("attention_cuda_bench", kGpu);
  const Stream stream = Stream::on(kGpu);
  std::fprintf(stderr, "%s\n", nn::cudnn_status().text.c_str());
  for (const Shape& s : kShapes) {
    measure_shape(s, Way::kTiles, stream);
    if (s.length == 4096) measure_shape(s, Way::kDocuments, stream);
    if (nn::cudnn_status().available) measure_shape(s, Way::kBest, stream);
  }
}

}  // namespace
}  // namespace moiety::bench

int main(int argc, char** argv) {
  return moiety::bench::run_main(argc, argv, "Attention on a GPU.", moiety::bench::run);
}
