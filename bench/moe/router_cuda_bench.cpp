// The router on a GPU, forward and backward. The value is the rate of what must be read and written
// of h, its gradient and the addend, the ratio is to a copy of as many bytes in the same run.
#include "bench/harness.h"
#include "moiety/base/copy.h"
#include "moiety/base/gpu.h"
#include "moiety/moe/router.h"

namespace moiety::bench {
namespace {

using namespace moe;

constexpr Device kGpu{DeviceType::kCuda, 0};

struct Shape {
  int64_t tokens, model, experts, top_k;
};
constexpr Shape kShapes[] = {{8192, 2048, 128, 8}, {16384, 1024, 32, 4}, {32768, 4096, 8, 2}};

Tensor on_gpu(const Tensor& host, const Stream& stream) {
  Tensor out(host.view().dtype(), host.view().sizes(), kGpu);
  copy(out, host, stream);
  stream.synchronize();
  return out;
}

double copy_rate(int64_t bytes, const Stream& stream) {
  const Tensor from(DType::kUInt8, {bytes / 2}, kGpu), to(DType::kUInt8, {bytes / 2}, kGpu);
  const Timing time = measure([&](int64_t) { copy(to, from, stream); }, stream);
  return giga(double(bytes), time.ms);
}

void report(const char* name, const Shape& s, int64_t bytes, const Timing& time, double ceiling) {
  Row row{name, text("T{} D{} E{} K{}", s.tokens, s.model, s.experts, s.top_k),
          giga(double(bytes), time.ms), "GB/s", time};
  row.device = kGpu;
  row.ratio = row.value / ceiling;
  row.against = "copy";
  print(row);
}

void run_shape(const Shape& s, const Stream& stream) {
  const DType half = DType::kBFloat16, single = DType::kFloat32;
  const RouterConfig config{.experts = s.experts,
                            .top_k = s.top_k,
                            .aux = AuxLoss::kSwitch,
                            .aux_coef = 0.01f,
                            .z_coef = 0.001f};
  const auto random = [&](DType dtype, int64_t rows, int64_t columns, uint32_t id) {
    return on_gpu(random_tensor(dtype, {rows, columns}, id), stream);
  };
  const Tensor h = random(half, s.tokens, s.model, 1), w = random(half, s.experts, s.model, 2),
               dweight = random(single, s.tokens, s.top_k, 3),
               addend = random(single, s.tokens, s.model, 4);
  const Tensor logits(single, {s.tokens, s.experts}, kGpu),
      idx(DType::kInt32, {s.tokens, s.top_k}, kGpu), weight(single, {s.tokens, s.top_k}, kGpu),
      count(DType::kInt64, {1, s.experts + 1}, kGpu),
      sum(DType::kFloat64, {1, s.experts + 1}, kGpu), dw(single, {s.experts, s.model}, kGpu),
      dh(half, {s.tokens, s.model}, kGpu);
  const Tensor scope_host(DType::kInt64, {2});
  scope_host.data<int64_t>()[0] = scope_host.data<int64_t>()[1] = s.tokens;
  const Tensor scope = on_gpu(scope_host, stream);
  fill_bytes(dw, 0, stream);
  const auto workspace = [&](int64_t bytes) { return Tensor(DType::kUInt8, {bytes}, kGpu); };
  const Tensor forward = workspace(router_forward_workspace(config, s.tokens, 1)),
               backward = workspace(router_backward_workspace(config, half, s.tokens, s.model));

  const int64_t rows = s.tokens * s.model;
  // h; h and the fp32 addend in, dh out.
  const int64_t forward_bytes = 2 * rows, backward_bytes = (2 + 4 + 2) * rows;
  const double ceiling = copy_rate(backward_bytes, stream);
  const Timing out = measure(
      [&](int64_t) {
        router_forward(config, {h, w, {}, {}, logits, idx, weight, {count, sum}, forward}, stream);
      },
      stream);
  report("router.forward", s, forward_bytes, out, ceiling);
  const Timing back = measure(
      [&](int64_t) {
        router_backward(config,
                        {h, w, logits, idx, dweight, count, scope, dw, 1, addend, dh, backward},
                        stream);
      },
      stream);
  report("router.backward", s, backward_bytes, back, ceiling);
}

void run(Options& options) {
  std::string device = "cuda";
  options.choice("--device", device, {"cuda"}, "where");
  if (!options.parse()) return;
  require_device("router_cuda_bench", kGpu);
  for (const Shape& s : kShapes) run_shape(s, Stream::on(kGpu));
}

}  // namespace
}  // namespace moiety::bench

int main(int argc, char** argv) {
  return moiety::bench::run_main(argc, argv, "The router on a GPU.", moiety::bench::run);
}
