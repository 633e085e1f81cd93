// The model's row operations in bf16 against a copy of the same bytes, which shows how near they
// are to the rate of the memory. The value counts every input byte once and every output byte once,
// however often an operation reads them; the ratio is to a copy of as many bytes, timed beside it.
#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "bench/harness.h"
#include "moiety/base/copy.h"
#include "moiety/base/gpu.h"
#include "moiety/gemm/swiglu.h"
#include "moiety/nn/embedding.h"
#include "moiety/nn/loss.h"
#include "moiety/nn/norm.h"
#include "moiety/nn/norm_rope.h"
#include "moiety/nn/rope.h"

namespace moiety::bench {
namespace {

using namespace nn;

constexpr DType kBf16 = DType::kBFloat16, kF32 = DType::kFloat32;
// Heads of a token: groups of eight query heads, a key head and a value head.
constexpr int64_t kGroups = 4, kGroupHeads = 10;

struct Settings {
  std::string device = "cpu", only;
  int64_t tokens = 0;
};

class Bench {
 public:
  explicit Bench(const Settings& s)
      : tokens(s.tokens),
        only_(s.only),
        device_(s.device == "cuda" ? Device{DeviceType::kCuda, 0} : Device{}) {
    require_device("rows_bench", device_);
    stream = Stream::on(device_);
  }

  bool wanted(const std::string& name) const { return bench::wanted(name, only_); }
  Tensor empty(DType dtype, std::initializer_list<int64_t> sizes) const {
    return Tensor(dtype, sizes, device_, "operand");
  }
  Tensor here(const TensorView& x) const {
    Tensor out(x.dtype(), x.sizes(), device_, "operand");
    copy(out, x, stream);
    stream.synchronize();
    return out;
  }
  Tensor random(DType dtype, std::initializer_list<int64_t> sizes, uint32_t id = 1) const {
    return here(random_tensor(dtype, sizes, id));
  }
  // Several random tensors, to take in turn.
  std::vector<Tensor> randoms(DType dtype, std::initializer_list<int64_t> sizes) const {
    std::vector<Tensor> out;
    out.push_back(random(dtype, sizes));
    const int64_t n = copies(out[0].view().bytes(), 4);
    while (std::ssize(out) < n) {
      out.emplace_back(dtype, sizes, device_, "operand");
      copy(out.back(), out[0], stream);
    }
    stream.synchronize();
    return out;
  }

  // run(i) reads `in` bytes and writes `out` bytes.
  void report(const std::string& name, const std::string& label, int64_t in, int64_t out,
              const std::function<void(int64_t)>& run) const {
    const double seconds = device_.type == DeviceType::kCuda ? 0.05 : 0.3;
    const Timing time = measure(run, stream, seconds);
    const int64_t half = (in + out) / 2, turns = copies(half, 4);
    std::vector<Tensor> from, to;
    for (int64_t i = 0; i < turns; ++i) {
      from.push_back(empty(DType::kUInt8, {half}));
      to.push_back(empty(DType::kUInt8, {half}));
      fill_bytes(from.back(), 1, stream);
    }
    const Timing yardstick =
        measure([&](int64_t i) { copy(to[i % turns], from[i % turns], stream); }, stream, seconds);
    Row row{name, label, giga(static_cast<double>(in + out), time.ms), "GB/s", time, "copy"};
    row.ratio = yardstick.ms / time.ms;
    row.device = device_;
    print(row);
  }

  Stream stream;
  int64_t tokens;

 private:
  std::string only_;
  Device device_;
};

TensorView queries(const TensorView& qkv) { return qkv.slice(2, 0, kGroupHeads - 2); }

void norms(const Bench& b) {
  for (const int64_t d : {1024, 2048, 7168}) {
    if (!b.wanted("norm")) return;
    const auto x = b.randoms(kBf16, {b.tokens, d}), dy = b.randoms(kBf16, {b.tokens, d}),
               y = b.randoms(kBf16, {b.tokens, d});
    const Tensor weight = b.random(kBf16, {d}), grad = b.empty(kF32, {d}),
                 workspace = b.empty(kF32, {norm_blocks(b.tokens, d), d}),
                 amax = b.empty(kF32, {1});
    const auto turn = [](const auto& v, int64_t i) { return v[i % std::ssize(v)].view(); };
    const int64_t bytes = x[0].view().bytes();
    const std::string label = text("{}x{}", b.tokens, d);
    b.report("norm", label, bytes, bytes, [&](int64_t i) {
      norm({turn(x, i), weight, turn(y, i)}, b.stream);
    });
    b.report("norm.amax", label, bytes, bytes, [&](int64_t i) {
      norm({turn(x, i), weight, turn(y, i), 1e-6f, {amax}}, b.stream);
    });
    b.report("norm_backward", label, 3 * bytes, bytes, [&](int64_t i) {
      norm_backward({turn(x, i), weight, turn(dy, i), turn(y, i), turn(y, i), grad, workspace},
                    b.stream);
    });
  }
}

void heads(const Bench& b, int64_t head_dim) {
  const auto qkv = b.randoms(kBf16, {b.tokens, kGroups, kGroupHeads, head_dim}),
             out = b.randoms(kBf16, {b.tokens, kGroups, kGroupHeads, head_dim});
  const auto turn = [](const auto& v, int64_t i) { return v[i % std::ssize(v)].view(); };
  const int64_t rows = b.tokens * kGroups * (kGroupHeads - 2), bytes = 2 * rows * head_dim;
  const std::string label = text("{}x{}x{} of {}", b.tokens, kGroups, kGroupHeads - 2, head_dim);
  const Tensor weight = b.random(kBf16, {head_dim}), grad = b.empty(kF32, {head_dim}),
               workspace = b.empty(kF32, {norm_blocks(rows, head_dim), head_dim});
  if (b.wanted("q_norm")) {
    b.report("q_norm", label, bytes, bytes, [&](int64_t i) {
      norm({queries(turn(qkv, i)), weight, queries(turn(out, i))}, b.stream);
    });
    b.report("q_norm_backward", label, 2 * bytes, bytes, [&](int64_t i) {
      const TensorView dy = queries(turn(out, i));
      norm_backward({queries(turn(qkv, i)), weight, dy, {}, dy, grad, workspace}, b.stream);
    });
  }
  if (!b.wanted("rope")) return;
  const Tensor table = b.here(rope_table(4096, head_dim, 1e6));
  const int64_t moved = bytes / (kGroupHeads - 2) * (kGroupHeads - 1);
  b.report("rope", text("{}x{}x{} of {}", b.tokens, kGroups, kGroupHeads - 1, head_dim), moved,
           moved, [&](int64_t i) {
             rope({turn(qkv, i).slice(2, 0, kGroupHeads - 1), table, {}, 4096}, b.stream);
           });
}

// The heads of q and k, normalized and rotated: one pass, and the operations one after the other.
void rotated_heads(const Bench& b, int64_t head_dim) {
  if (!b.wanted("norm_rope")) return;
  const auto qkv = b.randoms(kBf16, {b.tokens, kGroups, kGroupHeads, head_dim}),
             out = b.randoms(kBf16, {b.tokens, kGroups, kGroupHeads, head_dim});
  const auto turn = [](const auto& v, int64_t i) {
    return v[i % std::ssize(v)].view().slice(2, 0, kGroupHeads - 1);
  };
  const Tensor weight = b.random(kBf16, {head_dim}), q_grad = b.empty(kF32, {head_dim}),
               k_grad = b.empty(kF32, {head_dim}), table = b.here(rope_table(4096, head_dim, 1e6)),
               workspace = b.empty(
                   kF32,
                   {norm_rope_blocks(b.tokens, kGroups, kGroupHeads - 1, head_dim), head_dim});
  const HeadAngles angles{table, {}, 4096};
  const int64_t bytes = 2 * b.tokens * kGroups * (kGroupHeads - 1) * head_dim;
  const std::string label = text("{}x{}x{} of {}", b.tokens, kGroups, kGroupHeads - 1, head_dim);
  const auto forward = [&](int64_t i) {
    return NormRopeArgs{turn(qkv, i), weight, weight, turn(out, i), angles};
  };
  const auto backward = [&](int64_t i) {
    return NormRopeBackwardArgs{turn(qkv, i), weight, weight,    turn(out, i),
                                q_grad,       k_grad, workspace, angles};
  };
  b.report("norm_rope", label, bytes, bytes, [&](int64_t i) { norm_rope(forward(i), b.stream); });
  b.report("norm_rope.apart", label, bytes, bytes,
           [&](int64_t i) { norm_then_rope(forward(i), b.stream); });
  b.report("norm_rope_backward", label, 2 * bytes, bytes,
           [&](int64_t i) { norm_rope_backward(backward(i), b.stream); });
  b.report("norm_rope_backward.apart", label, 2 * bytes, bytes,
           [&](int64_t i) { rope_then_norm_backward(backward(i), b.stream); });
}

// Activations of rows of `experts`, whose numbers differ much.
void activations(const Bench& b, int64_t rows, int64_t ffn, int64_t experts) {
  if (!b.wanted("swiglu")) return;
  const auto h = b.randoms(kBf16, {rows, 2 * ffn}), a = b.randoms(kBf16, {rows, ffn}),
             da = b.randoms(kBf16, {rows, ffn});
  const Tensor prob = b.random(kF32, {rows}), dprob = b.empty(kF32, {rows});
  const Tensor host_begin(DType::kInt64, {experts + 1});
  for (int64_t e = 0; e <= experts; ++e) {
    const double part = static_cast<double>(e) / static_cast<double>(std::max<int64_t>(experts, 1));
    host_begin.data<int64_t>()[e] = static_cast<int64_t>(static_cast<double>(rows) * part * part);
  }
  const Tensor begin = b.here(host_begin);
  gemm::ActivationArgs args{gemm::swiglu(), 0, {}, {}, experts > 0 ? prob.view() : TensorView()};
  if (experts > 0) {
    args.groups.begin_E1 = begin;
    args.groups.experts = experts;
    args.groups.capacity = rows;
  }
  const auto turn = [](const auto& v, int64_t i) { return v[i % std::ssize(v)].view(); };
  const int64_t bytes = a[0].view().bytes();
  const std::string label = text("{}x{} E={}", rows, ffn, experts);
  b.report("swiglu", label, 2 * bytes, bytes, [&](int64_t i) {
    args.h = turn(h, i);
    gemm::activation_forward(args, turn(a, i), b.stream);
  });
  const TensorView dprob_R = experts > 0 ? dprob.view() : TensorView();
  b.report("swiglu_backward", label, 3 * bytes, 3 * bytes, [&](int64_t i) {
    args.h = turn(h, i);
    gemm::activation_backward(args, turn(da, i), args.h, turn(a, i), dprob_R, b.stream);
  });
}

// Embeddings with tokens as text has them: the most frequent one is a twentieth, and many come
// once.
void embeddings(const Bench& b) {
  if (!b.wanted("embedding")) return;
  const int64_t vocabulary = 151936, d = 2048;
  const Tensor host_token(DType::kInt32, {b.tokens});
  std::vector<bool> seen(static_cast<size_t>(vocabulary));
  int64_t distinct = 0;
  for (int64_t t = 0; t < b.tokens; ++t) {
    const uint32_t word =
        philox(rng_key(6, RngDomain::kInit), {static_cast<uint32_t>(t), 0, 0, 0})[0];
    const auto token =
        static_cast<int32_t>(static_cast<double>(vocabulary) * std::pow(word * 0x1p-32, 4));
    host_token.data<int32_t>()[t] = token;
    if (!seen[static_cast<size_t>(token)]) ++distinct;
    seen[static_cast<size_t>(token)] = true;
  }
  const Tensor token = b.here(host_token), table = b.empty(kBf16, {vocabulary, d}),
               grad = b.empty(kF32, {vocabulary, d}),
               workspace = b.empty(DType::kInt64, {b.tokens});
  fill_bytes(table, 1, b.stream);
  fill_bytes(grad, 0, b.stream);
  const auto out = b.randoms(kBf16, {b.tokens, d});
  const auto turn = [](const auto& v, int64_t i) { return v[i % std::ssize(v)].view(); };
  const int64_t bytes = out[0].view().bytes();
  const std::string label = text("{}x{} V={}, {} distinct", b.tokens, d, vocabulary, distinct);
  b.report("embedding", label, bytes, bytes, [&](int64_t i) {
    embedding({table, token, turn(out, i)}, b.stream);
  });
  b.report("embedding_backward", label, bytes + distinct * d * 4, distinct * d * 4, [&](int64_t i) {
    embedding_backward({turn(out, i), token, grad, workspace, true}, b.stream);
  });
}

void losses(const Bench& b, int64_t vocabulary) {
  if (!b.wanted("cross_entropy")) return;
  const int64_t rows = loss_chunk(0, b.tokens, vocabulary, b.stream.device());
  const Tensor z = b.random(kF32, {rows, vocabulary}), dz = b.empty(kBf16, {rows, vocabulary}),
               loss = b.empty(kF32, {rows}), target = b.empty(DType::kInt32, {rows});
  fill_bytes(target, 0, b.stream);
  const int64_t bytes = z.view().bytes();
  const std::string label = text("{}x{}", rows, vocabulary);
  b.report("cross_entropy", label, bytes, bytes / 2, [&](int64_t) {
    cross_entropy({z, target, {}, loss, dz}, b.stream);
  });
  b.report("cross_entropy.loss", label, bytes, 0, [&](int64_t) {
    cross_entropy({z, target, {}, loss, {}}, b.stream);
  });
}

void run(Options& options) {
  Settings settings;
  options.choice("--device", settings.device, {"cpu", "cuda"}, "where")
      .number("--tokens", settings.tokens, "of a micro-batch (8192 on a GPU, else 512)")
      .word("--only", settings.only, kOnlyHelp);
  if (!options.parse()) return;
  if (settings.tokens == 0) settings.tokens = settings.device == "cuda" ? 8192 : 512;
  const Bench b(settings);
  norms(b);
  for (const int64_t head_dim : {64, 128}) heads(b, head_dim);
  for (const int64_t head_dim : {64, 128}) rotated_heads(b, head_dim);
  activations(b, 8 * b.tokens, 768, 128);
  activations(b, b.tokens, 6144, 0);
  embeddings(b);
  for (const int64_t vocabulary : {32000, 50304, 128256, 151936}) losses(b, vocabulary);
}

}  // namespace
}  // namespace moiety::bench

int main(int argc, char** argv) {
  return moiety::bench::run_main(argc, argv, "The model's row operations against a copy.",
                                 moiety::bench::run);
}
