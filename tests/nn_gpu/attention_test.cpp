// Attention on a GPU within the bound of the header of exact results, whatever the shape, strides
// and documents; the same bits every time, also from a captured graph.
#include "moiety/base/copy.h"
#include "moiety/base/graph.h"
#include "moiety/nn/attention_cuda.h"
#include "tests/nn/attention_cases.h"
#include "tests/support/gpu_test.h"
#include "tests/support/mirror.h"

namespace moiety::nn {
namespace {

const Case kGpuCases[] = {
    {"one_query_of_128", 1, 1, 1, 2, 1, 128},
    {"below_a_tile", 2, 31, 31, 4, 2, 64},
    {"tile", 1, 128, 128, 2, 1, 128},
    {"above_a_tile", 1, 129, 129, 4, 2, 64},
    {"several_tiles", 2, 300, 300, 4, 1, 128},
    {"several_tiles_of_64", 1, 333, 333, 6, 2, 64},
    {"several_tiles_of_32", 2, 200, 200, 2, 2, 32},
    {"cudnn_of_64", 3, 256, 256, 6, 2, 64},
    {"cudnn_of_128", 2, 384, 384, 4, 2, 128},
    {"head_of_96", 2, 192, 192, 4, 2, 96},
    {"head_of_256", 1, 150, 150, 2, 1, 256},
    {"documents_of_64", 2, 290, 290, 4, 2, 64, 7},
    {"documents_of_128", 1, 260, 260, 2, 1, 128, 3},
    {"many_documents", 1, 140, 140, 2, 1, 64, 140},
    {"decode_one_of_128", 3, 1, 333, 8, 2, 128},
    {"decode_some_of_64", 1, 37, 301, 4, 2, 64},
};

constexpr Device kDevice{DeviceType::kCuda, 0};

// The tensors of a problem on the GPU, in the order of Problem::tensors.
struct Copies {
  Copies(const Problem& p, const Stream& stream) {
    for (const Tensor& x : p.tensors) tensors.push_back(to_gpu(x, stream));
    delta = Tensor(p.lse().dtype(), p.lse().sizes(), kDevice);
    if (p.documents.defined()) {
      documents = tensors.back().view().reshape({p.c.sequences, p.c.queries});
    }
  }
  AttentionArgs forward() const {
    return {tensors[0], tensors[1], tensors[2], documents, tensors[4], tensors[8], cudnn};
  }
  AttentionBackwardArgs backward() const {
    return {forward(), tensors[3], tensors[5], tensors[6], tensors[7], delta};
  }
  void download(const Problem& p, const Stream& stream) const {
    for (const size_t i : {4, 5, 6, 7, 8}) copy(p.tensors[i], tensors[i], stream);
    stream.synchronize();
  }

  std::vector<Tensor> tensors;
  Tensor delta;
  TensorView documents;
  bool cudnn = true;
};

class AttentionGpu : public GpuTest, public testing::WithParamInterface<Case> {};
using AttentionGpuCalls = GpuTest;

// The path that is to take the case.
AttentionPath path_of(const Case& c, DType dtype, bool cudnn, bool backward) {
  if (dtype != DType::kBFloat16) return AttentionPath::kPlain;
  if (cudnn && cudnn_status().available && c.head_dim % 32 == 0 && c.documents == 0 &&
      c.queries == c.keys && c.queries >= 128 &&
      (!backward || cudnn_status().version >= 91600 || c.queries % 128 == 0)) {
    return AttentionPath::kCudnn;
  }
  const bool tiles = c.head_dim == 32 || c.head_dim == 64 || c.head_dim == 128;
  return tiles ? AttentionPath::kTiles : AttentionPath::kPlain;
}

// The choices that have a path of their own: dtype, and whether cuDNN may take it.
constexpr std::pair<DType, bool> kChoices[] = {
    {DType::kFloat32, true}, {DType::kBFloat16, true}, {DType::kBFloat16, false}};

std::vector<Case> all_cases() {
  std::vector<Case> out(std::begin(kCases), std::end(kCases));
  out.insert(out.end(), std::begin(kGpuCases), std::end(kGpuCases));
  return out;
}
INSTANTIATE_TEST_SUITE_P(Shapes, AttentionGpu, testing::ValuesIn(all_cases()),
                         [](const auto& info) { return std::string(info.param.name); });

TEST_P(AttentionGpu, KeepsTheBound) {
  for (const auto& [dtype, cudnn] : kChoices) {
    const AttentionPath path = path_of(GetParam(), dtype, cudnn, false),
                        back = path_of(GetParam(), dtype, cudnn, true);
    const std::string what = text("{} by {}, {}", name(dtype), name(path), name(back));
    const Problem p(GetParam(), dtype);
    Copies gpu(p, stream);
    gpu.cudnn = cudnn;
    EXPECT_EQ(attention_path(gpu.forward()), path) << what;
    EXPECT_EQ(attention_backward_path(gpu.backward()), back) << what;
    attention(gpu.forward(), stream);
    attention_backward(gpu.backward(), stream);
    gpu.download(p, stream);
    expect_forward(p, what, path == AttentionPath::kPlain ? 0 : 0x1p-8);
    const bool sums_rounded = back == AttentionPath::kCudnn && p.c.heads > p.c.kv_heads;
    expect_backward(p, what, back == AttentionPath::kPlain ? 0 : 0x1p-8, sums_rounded ? 0x1p-8 : 0);
  }
}

TEST_P(AttentionGpu, CapturedAndRepeated) {
  for (const bool cudnn : {true, false}) {
    const Problem p(GetParam(), DType::kBFloat16), again(GetParam(), DType::kBFloat16);
    Copies gpu(p, stream);
    gpu.cudnn = cudnn;
    attention(gpu.forward(), stream);
    attention_backward(gpu.backward(), stream);
    gpu.download(p, stream);
    const Graph graph(stream, [&] {
      attention(gpu.forward(), stream);
      attention_backward(gpu.backward(), stream);
    });
    for (const size_t i : {4, 5, 6, 7, 8}) fill_bytes(gpu.tensors[i], 0xFF, stream);
    graph.launch(stream);
    gpu.download(again, stream);
    for (const size_t i : {4, 5, 6, 7, 8}) {
      expect_same_bits(p.tensors[i], again.tensors[i], text("tensor {}, cudnn {}", i, cudnn));
    }
  }
}

// With a work area of the caller's a call has no memory of its own: two graphs that were captured on
// one stream run at once on two.
TEST_F(AttentionGpuCalls, GraphsWithWorkAreasOfTheirOwnRunSideBySide) {
  const Case c{"work_area", 2, 512, 512, 8, 2, 64};
  struct One {
    One(const Case& c, const Stream& stream) : p(c, DType::kBFloat16), gpu(p, stream) {
      forward = gpu.forward();
      backward = gpu.backward();
      area = Tensor(DType::kUInt8, {attention_workspace(forward, stream) + 1}, kGpu);
      back_area = Tensor(DType::kUInt8, {attention_backward_workspace(backward, stream) + 1}, kGpu);
      forward.workspace = area;
      backward.forward.workspace = area;
      backward.workspace = back_area;
    }
    void run(const Stream& stream) const {
      attention(forward, stream);
      attention_backward(backward, stream);
    }
    Problem p;
    Copies gpu;
    AttentionArgs forward;
    AttentionBackwardArgs backward;
    Tensor area, back_area;
  };
  const One first(c, stream), second(c, stream);
  first.run(stream);
  first.gpu.download(first.p, stream);
  const Graph a(stream, [&] { first.run(stream); }), b(stream, [&] { second.run(stream); });
  for (const size_t i : {4, 5, 6, 7, 8}) fill_bytes(first.gpu.tensors[i], 0xFF, stream);
  stream.synchronize();
  const Stream side = Stream::on(kGpu);
  const int64_t before = gpu::activity().allocations;
  for (int n = 0; n < 20; ++n) {
    a.launch(stream);
    b.launch(side);
  }
  EXPECT_EQ(gpu::activity().allocations, before);
  side.synchronize();
  const Problem again(c, DType::kBFloat16);
  for (const One* one : {&first, &second}) {
    one->gpu.download(again, stream);
    for (const size_t i : {4, 5, 6, 7, 8}) {
      expect_same_bits(again.tensors[i], first.p.tensors[i], text("tensor {}", i));
    }
  }
  if (cudnn_status().available) {
    AttentionBackwardArgs small = first.backward;
    small.workspace = small.workspace.slice(0, 0, 256);
    EXPECT_THROW(attention_backward(small, stream), Error);
  }
}

// Heads of a fused projection, as the model has them (for cuDNN q is packed, but not that of one
// sequence), and heads at odd addresses.
TEST_F(AttentionGpuCalls, FusedHeadsGiveTheSameBits) {
  struct Choice {
    int64_t sequences, dim;
    bool cudnn;
  };
  for (const auto& [sequences, dim, cudnn] :
       {Choice{3, 64, true}, Choice{1, 64, true}, Choice{3, 64, false}, Choice{3, 128, true},
        Choice{3, 128, false}, Choice{3, 16, true}}) {
    const int64_t length = 256, tokens = sequences * length, heads = 4, kv = 2;
    const Tensor host = normal_tensor(DType::kBFloat16, {tokens, (heads + 2 * kv) * dim}, 1);
    const Tensor qkv = to_gpu(host, stream), dqkv(DType::kBFloat16, host.view().sizes(), kGpu);
    const QkvHeads h = split_heads(host, sequences, heads, kv, dim),
                   x = split_heads(qkv, sequences, heads, kv, dim),
                   d = split_heads(dqkv, sequences, heads, kv, dim);
    const Tensor o(DType::kBFloat16, {sequences, length, kv, 2, dim}, kGpu),
        lse(DType::kFloat32, {sequences, kv, 2, length}, kGpu),
        delta(DType::kFloat32, {sequences, kv, 2, length}, kGpu);
    const AttentionArgs fused{x.q_BSGMC, x.k_BSGC, x.v_BSGC, {}, o, lse, cudnn};
    attention(fused, stream);
    Tensor o_fused(DType::kBFloat16, o.view().sizes());
    copy(o_fused, o, stream);
    attention_backward({fused, o, d.q_BSGMC, d.k_BSGC, d.v_BSGC, delta}, stream);
    Tensor dqkv_host(DType::kBFloat16, host.view().sizes());
    copy(dqkv_host, dqkv, stream);
    stream.synchronize();
    const QkvHeads d_fused = split_heads(dqkv_host, sequences, heads, kv, dim);

    const Tensor q = to_gpu(converted(h.q_BSGMC, DType::kBFloat16), stream),
                 k = to_gpu(converted(h.k_BSGC, DType::kBFloat16), stream),
                 v = to_gpu(converted(h.v_BSGC, DType::kBFloat16), stream),
                 dq(DType::kBFloat16, q.view().sizes(), kGpu),
                 dk(DType::kBFloat16, k.view().sizes(), kGpu),
                 dv(DType::kBFloat16, k.view().sizes(), kGpu);
    const AttentionArgs apart{q, k, v, {}, o, lse, cudnn};
    attention(apart, stream);
    attention_backward({apart, o, dq, dk, dv, delta}, stream);
    const auto expect = [&](const TensorView& gpu, const TensorView& expected, const char* what) {
      expect_same_bits(to_host(gpu, stream), converted(expected, DType::kBFloat16), what);
    };
    expect(o, o_fused, "o");
    expect(dq, d_fused.q_BSGMC, "dq");
    expect(dk, d_fused.k_BSGC, "dk");
    expect(dv, d_fused.v_BSGC, "dv");
  }
}

// Cases that cuDNN's backward takes in a launch for each group (whose scores are 2 GiB) and for
// each sequence, against the tiles: 1 % of the root mean square.
class AttentionGpuLaunches : public GpuTest, public testing::WithParamInterface<Case> {};
INSTANTIATE_TEST_SUITE_P(Shapes, AttentionGpuLaunches,
                         testing::Values(Case{"group", 1, 16384, 16384, 8, 2, 64},
                                         Case{"sequence", 2, 4096, 4096, 32, 4, 32}),
                         [](const auto& info) { return std::string(info.param.name); });

TEST_P(AttentionGpuLaunches, AreTheTiles) {
  if (!cudnn_status().available) GTEST_SKIP() << cudnn_status().text;
  const Case& c = GetParam();
  const int64_t n = c.sequences, length = c.queries, heads = c.heads, kv = c.kv_heads;
  const int64_t width = (heads + 2 * kv) * c.head_dim;
  const Tensor qkv = to_gpu(normal_tensor(DType::kBFloat16, {n * length, width}, 1), stream);
  const Tensor d_out =
      to_gpu(normal_tensor(DType::kBFloat16, {n, length, kv, heads / kv, c.head_dim}, 2), stream);
  const QkvHeads x = split_heads(qkv, n, heads, kv, c.head_dim);
  std::vector<Tensor> results;
  for (const bool cudnn : {true, false}) {
    const Tensor o(DType::kBFloat16, d_out.view().sizes(), kGpu),
        lse(DType::kFloat32, {n, kv, heads / kv, length}, kGpu),
        delta(DType::kFloat32, {n, kv, heads / kv, length}, kGpu),
        dqkv(DType::kBFloat16, {n * length, width}, kGpu);
    const QkvHeads d = split_heads(dqkv, n, heads, kv, c.head_dim);
    const AttentionArgs forward{x.q_BSGMC, x.k_BSGC, x.v_BSGC, {}, o, lse, cudnn};
    const AttentionBackwardArgs backward{forward, d_out, d.q_BSGMC, d.k_BSGC, d.v_BSGC, delta};
    const AttentionPath path = cudnn ? AttentionPath::kCudnn : AttentionPath::kTiles;
    EXPECT_EQ(attention_path(forward), path);
    EXPECT_EQ(attention_backward_path(backward), path);
    attention(forward, stream);
    attention_backward(backward, stream);
    for (const Tensor* t : {&o, &lse, &dqkv}) {
      copy(results.emplace_back(t->view().dtype(), t->view().sizes()), *t, stream);
    }
    stream.synchronize();
  }
  for (size_t i = 0; i < 3; ++i) {
    const std::vector<double> a = values(results[i]), b = values(results[i + 3]);
    double difference = 0, squares = 0;
    for (size_t at = 0; at < a.size(); ++at) {
      difference += (a[at] - b[at]) * (a[at] - b[at]);
      squares += b[at] * b[at];
    }
    EXPECT_LT(difference, 1e-4 * squares) << "tensor " << i;
  }
}

TEST_F(AttentionGpuCalls, RefusesWhatDoesNotFit) {
  const Problem p(kCases[1], DType::kFloat32);
  const Copies gpu(p, stream);
  EXPECT_THROW(attention(p.forward(), stream), Error);
  EXPECT_THROW(attention(gpu.forward(), Stream()), Error);
  AttentionBackwardArgs without = gpu.backward();
  without.delta_BGMS = {};
  EXPECT_THROW(attention_backward(without, stream), Error);
}

}  // namespace
}  // namespace moiety::nn
