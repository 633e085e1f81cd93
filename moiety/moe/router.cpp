#include "moiety/moe/router.h"

#include <algorithm>
#include <array>

#include "moiety/base/check_devices.h"
#include "moiety/base/cuda_built.h"
#include "moiety/base/error.h"
#include "moiety/base/gpu.h"
#include "moiety/base/integer.h"
#include "moiety/base/parallel.h"
#include "moiety/base/trace.h"
#include "moiety/formats/bf16.h"
#include "moiety/gemm/gemm.h"
#include "moiety/gemm/grouped_gemm.h"
#include "moiety/gemm/router_products.h"
#include "moiety/moe/router_block.h"
#include "moiety/moe/router_cuda.h"

namespace moiety::moe {
namespace {

using detail::Blocks;

void check_workspace(const char* op, const TensorView& workspace, int64_t bytes) {
  MOIETY_CHECK(
      workspace.defined() && workspace.dtype() == DType::kUInt8 && workspace.numel() >= bytes,
      "{}: workspace is {}, expected uint8[{}]", op, workspace.describe(), bytes);
}

void check_operands(const char* op, const RouterConfig& config, const TensorView& h,
                    const TensorView& w) {
  check(config);
  MOIETY_CHECK(h.dtype() == DType::kFloat32 || h.dtype() == DType::kBFloat16,
               "{}: h_TD is {}, expected float32 or bfloat16", op, h.describe());
  check_tensor(op, "h_TD", h, h.dtype(), {-1, -1});
  check_tensor(op, "w_ED", w, h.dtype(), {config.experts, h.size(1)});
}

void check_contiguous(const char* op, const char* argument, const TensorView& x, DType dtype,
                      std::initializer_list<int64_t> sizes) {
  check_tensor(op, argument, x, dtype, sizes);
  MOIETY_CHECK(x.contiguous(), "{}: {} is {}, expected contiguous", op, argument, x.describe());
}

void check_count(const char* op, const RouterConfig& config, const TensorView& count) {
  check_contiguous(op, "count", count, DType::kInt64, {-1, config.experts + 1});
  const int64_t segments = count.size(0);
  MOIETY_CHECK(segments >= 1 && (config.aux == AuxLoss::kSequence || segments == 1),
               "{}: count has {} segments; only the loss of sequences has several", op, segments);
}

void check_segments(const char* op, int64_t tokens, int64_t segments) {
  MOIETY_CHECK(tokens % segments == 0, "{}: {} tokens are not {} sequences of equal length", op,
               tokens, segments);
}

// Adds the blocks' sums to stats, in ascending order.
template <class Block, class Out>
void add_blocks(const Blocks& blocks, const Block* block, int64_t columns, Out* stats) {
  const int64_t segments = blocks.per_segment > 0 ? blocks.count / blocks.per_segment : 0;
  for (int64_t s = 0; s < segments; ++s) {
    for (int64_t i = 0; i < blocks.per_segment; ++i) {
      const Block* row = block + (s * blocks.per_segment + i) * columns;
      for (int64_t e = 0; e < columns; ++e) stats[s * columns + e] += row[e];
    }
  }
}

// Widens an operand, since the gradient of the logits that it meets stays float32. `out` is
// contiguous.
void widen(const TensorView& x, const TensorView& out, Stream stream) {
  stream.run([=] {
    const int64_t columns = x.size(1);
    parallel_for(x.size(0), 16, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const bf16* row = x.data<bf16>() + i * x.stride(0);
        for (int64_t j = 0; j < columns; ++j) out.data<float>()[i * columns + j] = row[j];
      }
    });
  });
}

// Checks what both backward passes read, for so many tokens.
void check_choice_backward(const char* op, const RouterConfig& config,
                           const RouterChooseBackwardArgs& args, int64_t tokens) {
  check_contiguous(op, "logits_TE", args.logits_TE, DType::kFloat32, {tokens, config.experts});
  check_contiguous(op, "idx_TK", args.idx_TK, DType::kInt32, {tokens, config.top_k});
  check_count(op, config, args.count);
  check_segments(op, tokens, args.count.size(0));
  check_contiguous(op, "scope", args.scope, DType::kInt64, {2});
}

void check_weights(const char* op, const RouterConfig& config, const TensorView& dweight,
                   int64_t tokens) {
  check_contiguous(op, "dweight_TK", dweight, DType::kFloat32, {tokens, config.top_k});
}

// All but the pieces and sums.
gemm::RouterProducts products_of(const RouterBackwardArgs& args) {
  return {.pieces_TX = {},
          .h_TD = args.h_TD,
          .w_ED = args.w_ED,
          .addend_TD = args.addend_TD,
          .dh_TD = args.dh_TD,
          .sums_SED = {},
          .rows_CD = args.slots.rows_CD,
          .slot_TK = args.slots.slot_TK};
}

// Who multiplies in the backward pass: kernels of float32; or tensor cores, on which the gradient of
// the logits is three bf16 pieces that add up to it, by products of their own, or both in one launch.
enum class BackwardProducts { kSingle, kPieces, kTogether };

BackwardProducts choose_products(const RouterBackwardArgs& args, bool gpu, const Stream& stream) {
  if (!gpu || args.h_TD.dtype() != DType::kBFloat16) return BackwardProducts::kSingle;
  const bool aligned = reinterpret_cast<uintptr_t>(args.workspace.raw()) % 16 == 0;
  if (aligned &&
      gemm::takes_router_products(products_of(args), gpu_properties(stream.device().index))) {
    return BackwardProducts::kTogether;
  }
  return BackwardProducts::kPieces;
}

void check_slots(const char* op, const RouterConfig& config, const RouterBackwardArgs& args,
                 const Stream& stream) {
  const RouterSlots& slots = args.slots;
  const bool gpu = stream.device().type == DeviceType::kCuda;
  MOIETY_CHECK(choose_products(args, gpu, stream) == BackwardProducts::kTogether,
               "{}: slots.rows_CD is {}, which it does not sum for these operands", op,
               slots.rows_CD.describe());
  const int64_t capacity = slots.rows_CD.size(0), tokens = args.h_TD.size(0);
  check_tensor(op, "slots.rows_CD", slots.rows_CD, DType::kBFloat16, {-1, args.h_TD.size(1)});
  check_contiguous(op, "slots.dweight_C", slots.dweight_C, DType::kFloat32, {capacity});
  check_contiguous(op, "slots.slot_TK", slots.slot_TK, DType::kInt32, {tokens, config.top_k});
}

RouterChooseBackwardArgs choice_of(const RouterBackwardArgs& args, const TensorView& dlogits) {
  return {args.logits_TE, args.idx_TK, args.dweight_TK, args.count, args.scope, dlogits};
}

// Checks the operands; whether they are on a GPU.
bool check_backward(const RouterConfig& config, const RouterBackwardArgs& args,
                    const Stream& stream) {
  const char* op = "router_backward";
  check_operands(op, config, args.h_TD, args.w_ED);
  const int64_t tokens = args.h_TD.size(0), model = args.h_TD.size(1), experts = config.experts;
  const DType dtype = args.h_TD.dtype();
  check_choice_backward(op, config, choice_of(args, {}), tokens);
  if (args.slots.rows_CD.defined()) {
    check_slots(op, config, args, stream);
  } else {
    check_weights(op, config, args.dweight_TK, tokens);
  }
  check_tensor(op, "dh_TD", args.dh_TD, dtype, {tokens, model});
  if (args.addend_TD.defined()) {
    const DType addend = args.addend_TD.dtype();
    check_tensor(op, "addend_TD", args.addend_TD, addend == dtype ? dtype : DType::kFloat32,
                 {tokens, model});
  }
  if (args.dw_ED.defined()) {
    const DType dw = args.dw_ED.dtype();
    check_tensor(op, "dw_ED", args.dw_ED, dw == DType::kBFloat16 ? dw : DType::kFloat32,
                 {experts, model});
  }
  check_workspace(op, args.workspace,
                  router_backward_workspace(config, dtype, tokens, model, stream.device().type));
  return check_devices(op,
                       {{"h_TD", args.h_TD},
                        {"w_ED", args.w_ED},
                        {"logits_TE", args.logits_TE},
                        {"idx_TK", args.idx_TK},
                        {"dweight_TK", args.dweight_TK},
                        {"count", args.count},
                        {"scope", args.scope},
                        {"dw_ED", args.dw_ED},
                        {"addend_TD", args.addend_TD},
                        {"dh_TD", args.dh_TD},
                        {"slots.rows_CD", args.slots.rows_CD},
                        {"slots.dweight_C", args.slots.dweight_C},
                        {"slots.slot_TK", args.slots.slot_TK},
                        {"workspace", args.workspace}},
                       stream);
}

// Checks all of a choice but the configuration and its operands.
void check_choice(const char* op, const RouterConfig& config, const RouterChooseArgs& args,
                  int64_t tokens) {
  const int64_t experts = config.experts;
  check_count(op, config, args.stats.count);
  const int64_t segments = args.stats.count.size(0);
  check_segments(op, tokens, segments);
  check_contiguous(op, "stats.sum", args.stats.sum, DType::kFloat64, {segments, experts + 1});
  check_contiguous(op, "logits_TE", args.logits_TE, DType::kFloat32, {tokens, experts});
  check_contiguous(op, "idx_TK", args.idx_TK, DType::kInt32, {tokens, config.top_k});
  check_contiguous(op, "weight_TK", args.weight_TK, DType::kFloat32, {tokens, config.top_k});
  if (args.bias_E.defined()) {
    check_contiguous(op, "bias_E", args.bias_E, DType::kFloat32, {experts});
  }
  if (args.mask_T.defined()) {
    check_contiguous(op, "mask_T", args.mask_T, DType::kUInt8, {tokens});
  }
  if (args.given_idx_TK.defined()) {
    check_contiguous(op, "given_idx_TK", args.given_idx_TK, DType::kInt32, {tokens, config.top_k});
  }
  check_workspace(op, args.workspace, router_forward_workspace(config, tokens, segments));
}

bool on_gpu(const char* op, const RouterChooseArgs& args, const Stream& stream) {
  return check_devices(op,
                       {{"logits_TE", args.logits_TE},
                        {"bias_E", args.bias_E},
                        {"mask_T", args.mask_T},
                        {"given_idx_TK", args.given_idx_TK},
                        {"idx_TK", args.idx_TK},
                        {"weight_TK", args.weight_TK},
                        {"stats.count", args.stats.count},
                        {"stats.sum", args.stats.sum},
                        {"workspace", args.workspace}},
                       stream);
}

void choose(const char* op, const RouterConfig& config, const RouterChooseArgs& args,
            BlockSums* later, bool gpu, const Stream& stream) {
  if (later) *later = {};
  if (gpu) {
    if constexpr (kCudaBuilt) {
      const BlockSums sums = detail::forward_rows_cuda(config, args, stream);
      if (!later) return detail::add_blocks_cuda(sums, stream);
      *later = sums;
      return;
    }
    fail_without_cuda(op);
  }
  stream.run([=] { detail::forward_rows(config, args); });
}

// The views of a workspace, one behind the other.
class Parts {
 public:
  Parts(const TensorView& workspace, const Stream& stream)
      : next_(static_cast<std::byte*>(workspace.raw())), device_(stream.device()) {}
  TensorView take(DType dtype, int64_t rows, int64_t columns) {
    const TensorView out(next_, dtype, {rows, columns}, device_);
    next_ += out.bytes();
    return out;
  }

 private:
  std::byte* next_;
  Device device_;
};

// The gradient of w has few tiles, so tensor cores compute it in so many slices of the tokens: a pure
// function of the sizes, for about as many tiles as a large GPU has multiprocessors.
int64_t weight_slices(int64_t tokens, int64_t experts, int64_t model) {
  constexpr int64_t kTiles = 128, kFewestTokens = 256;
  const int64_t tiles = ceil_div(3 * experts, 128) * ceil_div(model, 256);
  return std::clamp<int64_t>(kTiles / tiles, 1, std::max<int64_t>(tokens / kFewestTokens, 1));
}
// Their ends, and as many more as keep 16 bytes together.
int64_t slice_words(int64_t slices) { return round_up(slices + 1, 2); }

// What the products of the backward pass multiply, in the workspace. Pieces are [T, 3E], or wider
// for products in one launch; else they meet w three times. The products with h are the rows of
// `sums`, for each slice of tokens. Without pieces the gradient meets h and w that are widened
// unless they are float32.
struct BackwardParts {
  TensorView dlogits, h, w, sums = {}, slices = {};

  BackwardParts(const RouterBackwardArgs& args, BackwardProducts products, const Stream& stream)
      : h(args.h_TD), w(args.w_ED) {
    const int64_t tokens = h.size(0), model = h.size(1), experts = w.size(0);
    Parts parts(args.workspace, stream);
    if (products == BackwardProducts::kTogether) {
      dlogits = parts.take(DType::kBFloat16, tokens, 3 * gemm::router_width(experts));
      if (!args.dw_ED.defined()) return;
      sums = parts.take(DType::kFloat32, gemm::router_slices(tokens, model) * experts, model);
      return;
    }
    if (products == BackwardProducts::kPieces) {
      const int64_t count = weight_slices(tokens, experts, model);
      slices = parts.take(DType::kInt64, 1, slice_words(count)).slice(1, 0, count + 1);
      sums = parts.take(DType::kFloat32, count * 3 * experts, model);
      w = parts.take(DType::kBFloat16, 3 * experts, model);
      dlogits = parts.take(DType::kBFloat16, tokens, 3 * experts);
      return;
    }
    dlogits = parts.take(DType::kFloat32, tokens, experts);
    if (h.dtype() == DType::kFloat32) return;
    h = parts.take(DType::kFloat32, tokens, model);
    w = parts.take(DType::kFloat32, experts, model);
  }
};

// The router's weight gradient in pieces: slices of tokens are the groups of one product.
void multiply_slices(const RouterBackwardArgs& args, const BackwardParts& parts,
                     const Stream& stream) {
  const int64_t slices = parts.slices.numel() - 1, rows = parts.w.size(0), model = parts.h.size(1);
  gemm::GroupedGemmArgs product;
  product.op = gemm::GroupedOp::kWgrad;
  product.groups = {.begin_E1 = parts.slices.reshape({slices + 1}),
                    .experts = slices,
                    .capacity = args.h_TD.size(0)};
  product.a = {parts.dlogits, {}};
  product.b = {parts.h, {}};
  product.w = parts.sums.reshape({slices, rows, model});
  gemm::grouped_gemm(product, stream);
}

void multiply_together(const RouterBackwardArgs& args, const BackwardParts& parts,
                       const Stream& stream) {
  if constexpr (kCudaBuilt) {
    gemm::RouterProducts products = products_of(args);
    products.pieces_TX = parts.dlogits;
    products.sums_SED = parts.sums;
    gemm::multiply_router(products, stream);
    if (args.dw_ED.defined()) {
      detail::add_pieces_cuda(parts.sums, 1, args.dw_ED, args.dw_beta, stream);
    }
  }
}

void add_losses(const RouterConfig& config, const RouterLossArgs& args) {
  const int64_t segments = args.stats.count.size(0), experts = config.experts;
  const int64_t scope_tokens = args.scope.data<int64_t>()[1];
  double aux = 0, lse2 = 0;
  for (int64_t s = 0; s < segments; ++s) {
    const int64_t* count = args.stats.count.data<int64_t>() + s * (experts + 1);
    const double* sum = args.stats.sum.data<double>() + s * (experts + 1);
    const int64_t tokens = detail::aux_tokens(config, count[experts], scope_tokens);
    double segment = 0;
    for (int64_t e = 0; e < experts; ++e) {
      segment += detail::aux_slope(config, count[e], count[experts]) * sum[e];
    }
    if (tokens > 0) aux += segment / static_cast<double>(tokens);
    lse2 += sum[experts];
  }
  double* loss = args.loss_2.data<double>();
  if (config.aux != AuxLoss::kNone) loss[0] += aux;
  if (scope_tokens > 0) loss[1] += lse2 / static_cast<double>(scope_tokens);
}

}  // namespace

namespace detail {

void forward_rows(const RouterConfig& config, const RouterChooseArgs& args) {
  const int64_t segments = args.stats.count.size(0), columns = config.experts + 1;
  const Blocks blocks(args.logits_TE.size(0), segments);
  auto* block_count = reinterpret_cast<int32_t*>(args.workspace.raw());
  auto* block_sum = reinterpret_cast<float*>(block_count + blocks.count * columns);
  const ForwardRows<float> rows{config,
                                args.logits_TE.data<float>(),
                                args.bias_E.data<float>(),
                                args.mask_T.data<uint8_t>(),
                                args.given_idx_TK.data<int32_t>(),
                                args.idx_TK.data<int32_t>(),
                                args.weight_TK.data<float>()};
  parallel_tasks(blocks.count, [&](int64_t i) {
    forward_block_cpu(rows, blocks.begin(i), blocks.end(i), block_count + i * columns,
                      block_sum + i * columns);
  });
  int64_t* count = args.stats.count.data<int64_t>();
  double* sum = args.stats.sum.data<double>();
  std::fill_n(count, segments * columns, 0);
  std::fill_n(sum, segments * columns, 0.0);
  add_blocks(blocks, block_count, columns, count);
  add_blocks(blocks, block_sum, columns, sum);
}

void backward_rows(const RouterConfig& config, const RouterChooseBackwardArgs& args) {
  const int64_t segments = args.count.size(0), experts = config.experts;
  const Blocks blocks(args.logits_TE.size(0), segments);
  const BackwardRows<float> rows{config, args.logits_TE.data<float>(), args.idx_TK.data<int32_t>(),
                                 args.dweight_TK.data<float>(), args.dlogits_TE.data<float>()};
  const int64_t* scope = args.scope.data<int64_t>();
  const bool aux = has_aux(config);
  parallel_tasks(blocks.count, [&](int64_t i) {
    std::array<float, kMaxExperts> dq;
    const int64_t* count = args.count.data<int64_t>() + blocks.segment(i) * (experts + 1);
    for (int64_t e = 0; aux && e < experts; ++e) {
      dq[e] = aux_gradient(config, count, scope, e);
    }
    backward_block_cpu(rows, blocks.begin(i), blocks.end(i), aux ? dq.data() : nullptr,
                       z_slope(config, scope));
  });
}

}  // namespace detail

void check(const RouterConfig& c) {
  MOIETY_CHECK(c.experts >= 1 && c.experts <= detail::kMaxExperts,
               "router: experts={} must be in [1, {}]", c.experts, detail::kMaxExperts);
  MOIETY_CHECK(c.top_k >= 1 && c.top_k <= std::min(c.experts, detail::kMaxTopK),
               "router: top_k={} must be in [1, {}]", c.top_k,
               std::min(c.experts, detail::kMaxTopK));
  MOIETY_CHECK(c.scale > 0, "router: scale={} must be positive", c.scale);
  MOIETY_CHECK(c.groups >= 1 && c.experts % c.groups == 0,
               "router: groups={} must divide experts={}", c.groups, c.experts);
  MOIETY_CHECK(c.group_top_k >= 1 && c.group_top_k <= c.groups,
               "router: group_top_k={} must be in [1, {}]", c.group_top_k, c.groups);
  MOIETY_CHECK(c.group_top_k * (c.experts / c.groups) >= c.top_k,
               "router: group_top_k={} groups of {} experts are fewer than top_k={}", c.group_top_k,
               c.experts / c.groups, c.top_k);
}

int64_t router_forward_workspace(const RouterConfig& config, int64_t tokens, int64_t segments) {
  return Blocks(tokens, segments).count * (config.experts + 1) * (sizeof(int32_t) + sizeof(float));
}

int64_t router_backward_workspace(const RouterConfig& config, DType dtype, int64_t tokens,
                                  int64_t model, std::optional<DeviceType> device) {
  const int64_t experts = config.experts;
  if (dtype == DType::kFloat32) return byte_size(dtype, tokens * experts);
  const int64_t widened = byte_size(DType::kFloat32, tokens * experts + (tokens + experts) * model);
  const int64_t slices = weight_slices(tokens, experts, model);
  const int64_t pieces = byte_size(DType::kFloat32, slices * 3 * experts * model) +
                         byte_size(DType::kInt64, slice_words(slices)) +
                         byte_size(dtype, 3 * experts * (model + tokens));
  const int64_t together =
      byte_size(dtype, 3 * gemm::router_width(experts) * tokens) +
      byte_size(DType::kFloat32, gemm::router_slices(tokens, model) * experts * model);
  return std::max(device == DeviceType::kCuda ? 0 : widened,
                  device == DeviceType::kCpu ? 0 : std::max(pieces, together));
}

void router_forward(const RouterConfig& config, const RouterForwardArgs& args, Stream stream) {
  const char* op = "router_forward";
  check_operands(op, config, args.h_TD, args.w_ED);
  const int64_t tokens = args.h_TD.size(0), experts = config.experts;
  const RouterChooseArgs choice = {.logits_TE = args.logits_TE,
                                   .bias_E = args.bias_E,
                                   .mask_T = args.mask_T,
                                   .idx_TK = args.idx_TK,
                                   .weight_TK = args.weight_TK,
                                   .stats = args.stats,
                                   .workspace = args.workspace};
  check_choice(op, config, choice, tokens);
  check_devices(op, {{"h_TD", args.h_TD}, {"w_ED", args.w_ED}}, stream);
  const bool gpu = on_gpu(op, choice, stream);
  const TraceSpan span(TraceLane::kCompute, op, {{"tokens", tokens}, {"experts", experts}});
  gemm::gemm(
      {.op = gemm::GemmOp::kTN, .a = args.h_TD, .b = args.w_ED, .out = args.logits_TE, .c = {}},
      stream);
  choose(op, config, choice, args.later, gpu, stream);
}

void router_choose(const RouterConfig& config, const RouterChooseArgs& args, Stream stream) {
  const char* op = "router_choose";
  check(config);
  check_contiguous(op, "logits_TE", args.logits_TE, DType::kFloat32, {-1, config.experts});
  const int64_t tokens = args.logits_TE.size(0);
  check_choice(op, config, args, tokens);
  const bool gpu = on_gpu(op, args, stream);
  const TraceSpan span(TraceLane::kCompute, op, {{"tokens", tokens}, {"experts", config.experts}});
  choose(op, config, args, nullptr, gpu, stream);
}

void router_losses(const RouterConfig& config, const RouterLossArgs& args, Stream stream) {
  const char* op = "router_losses";
  check(config);
  check_count(op, config, args.stats.count);
  const int64_t segments = args.stats.count.size(0), experts = config.experts;
  check_contiguous(op, "stats.sum", args.stats.sum, DType::kFloat64, {segments, experts + 1});
  check_contiguous(op, "scope", args.scope, DType::kInt64, {2});
  check_contiguous(op, "loss_2", args.loss_2, DType::kFloat64, {2});
  if (check_devices(op,
                    {{"stats.count", args.stats.count},
                     {"stats.sum", args.stats.sum},
                     {"scope", args.scope},
                     {"loss_2", args.loss_2}},
                    stream)) {
    if constexpr (kCudaBuilt) return detail::add_losses_cuda(config, args, stream);
    fail_without_cuda(op);
  }
  stream.run([=] { add_losses(config, args); });
}

void router_choose_backward(const RouterConfig& config, const RouterChooseBackwardArgs& args,
                            Stream stream) {
  const char* op = "router_choose_backward";
  check(config);
  check_contiguous(op, "dlogits_TE", args.dlogits_TE, DType::kFloat32, {-1, config.experts});
  check_choice_backward(op, config, args, args.dlogits_TE.size(0));
  check_weights(op, config, args.dweight_TK, args.dlogits_TE.size(0));
  if (check_devices(op,
                    {{"logits_TE", args.logits_TE},
                     {"idx_TK", args.idx_TK},
                     {"dweight_TK", args.dweight_TK},
                     {"count", args.count},
                     {"scope", args.scope},
                     {"dlogits_TE", args.dlogits_TE}},
                    stream)) {
    if constexpr (kCudaBuilt) return detail::backward_rows_cuda(config, args, {}, stream);
    fail_without_cuda(op);
  }
  stream.run([=] { detail::backward_rows(config, args); });
}

bool router_sums_slots(const RouterBackwardArgs& args, const Stream& stream) {
  return stream.device().type == DeviceType::kCuda && args.h_TD.dtype() == DType::kBFloat16 &&
         !args.addend_TD.defined() &&
         gemm::takes_router_products(products_of(args), gpu_properties(stream.device().index));
}

void router_backward(const RouterConfig& config, const RouterBackwardArgs& args, Stream stream) {
  const bool gpu = check_backward(config, args, stream);
  if (gpu && !kCudaBuilt) fail_without_cuda("router_backward");
  const TraceSpan span(TraceLane::kCompute, "router_backward",
                       {{"tokens", args.h_TD.size(0)}, {"experts", config.experts}});
  const BackwardProducts products = choose_products(args, gpu, stream);
  const bool pieces = products != BackwardProducts::kSingle;
  const BackwardParts parts(args, products, stream);
  if (!gpu) {
    stream.run([=] { detail::backward_rows(config, choice_of(args, parts.dlogits)); });
  } else if constexpr (kCudaBuilt) {
    detail::backward_rows_cuda(config, choice_of(args, parts.dlogits), args.slots, stream);
    if (products == BackwardProducts::kTogether) return multiply_together(args, parts, stream);
    if (pieces) {
      detail::stack_rows_cuda(args.w_ED, parts.w, args.h_TD.size(0), parts.slices, stream);
    }
  }
  if (!pieces && args.h_TD.dtype() != DType::kFloat32) {
    widen(args.h_TD, parts.h, stream);
    widen(args.w_ED, parts.w, stream);
  }
  gemm::gemm({.op = gemm::GemmOp::kNN,
              .a = parts.dlogits,
              .b = parts.w,
              .out = args.dh_TD,
              .beta = args.addend_TD.defined() ? 1.0f : 0.0f,
              .c = args.addend_TD},
             stream);
  if (!args.dw_ED.defined()) return;
  if constexpr (kCudaBuilt) {
    if (pieces) {
      multiply_slices(args, parts, stream);
      return detail::add_pieces_cuda(parts.sums, 3, args.dw_ED, args.dw_beta, stream);
    }
  }
  gemm::gemm({.op = gemm::GemmOp::kNT,
              .a = parts.dlogits,
              .b = parts.h,
              .out = args.dw_ED,
              .beta = args.dw_beta,
              .c = {}},
             stream);
}

void router_update_bias(TensorView bias_E, TensorView count_E, float rate, Stream stream,
                        TensorView skip) {
  const char* op = "router_update_bias";
  check_contiguous(op, "bias_E", bias_E, DType::kFloat32, {-1});
  const int64_t experts = bias_E.size(0);
  check_contiguous(op, "count_E", count_E, DType::kInt64, {experts});
  if (skip.defined()) check_tensor(op, "skip", skip, DType::kInt32, {1});
  if (check_devices(op, {{"bias_E", bias_E}, {"count_E", count_E}, {"skip", skip}}, stream)) {
    if constexpr (kCudaBuilt) return detail::update_bias_cuda(bias_E, count_E, rate, skip, stream);
    fail_without_cuda(op);
  }
  stream.run([=] {
    if (skip.defined() && *skip.data<int32_t>() != 0) return;
    const int64_t* count = count_E.data<int64_t>();
    int64_t total = 0;
    for (int64_t e = 0; e < experts; ++e) total += count[e];
    float* bias = bias_E.data<float>();
    for (int64_t e = 0; e < experts; ++e) {
      bias[e] = detail::moved_bias(bias[e], rate, total, experts, count[e]);
    }
  });
}

}  // namespace moiety::moe
