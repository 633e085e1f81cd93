#include "moiety/gemm/swiglu.h"

#include <cmath>

#include "moiety/base/check_devices.h"
#include "moiety/base/cuda_built.h"
#include "moiety/base/parallel.h"
#include "moiety/base/trace.h"
#include "moiety/gemm/activation_block.h"
#include "moiety/gemm/grouped_block.h"

namespace moiety::gemm {
namespace {

constexpr int64_t kRows = 32;  // rows of a task

void check_matrix(const char* argument, const TensorView& x, DType dtype, int64_t rows,
                  int64_t columns) {
  check_tensor("activation", argument, x, dtype, {rows, columns});
  MOIETY_CHECK(x.stride(1) == 1 || columns <= 1 || rows == 0,
               "activation: {} {} has columns that are not contiguous", argument, x.describe());
}

void check_prob(const char* argument, const TensorView& x, DType dtype, int64_t rows) {
  if (!x.defined()) return;
  check_tensor("activation", argument, x, dtype == DType::kFloat64 ? dtype : DType::kFloat32,
               {rows});
  MOIETY_CHECK(x.contiguous(), "activation: {} is {}", argument, x.describe());
}

// Whether all arguments are on a GPU, which has no kernel for float64.
bool on_gpu(const ActivationArgs& args, const TensorView& a, const Stream& stream,
            const TensorView& da = {}, const TensorView& dh = {}, const TensorView& dprob_R = {}) {
  if (!check_devices("activation",
                     {{"h", args.h},
                      {"prob_R", args.prob_R},
                      {"a", a},
                      {"da", da},
                      {"dh", dh},
                      {"dprob_R", dprob_R},
                      {"sink.amax", args.sink.amax},
                      {"groups.begin_E1", args.groups.begin_E1},
                      {"groups.count_E", args.groups.count_E},
                      {"groups.status", args.groups.status}},
                     stream)) {
    return false;
  }
  if (args.h.dtype() == DType::kFloat64) {
    fail(ErrorKind::kUnsupported, "activation: h is {}, expected float32 or bfloat16 on a GPU",
         args.h.describe());
  }
  return true;
}

// `plain` is A or dA, which gives F.
ActivationBlock check(const ActivationArgs& args, const TensorView& plain) {
  const TensorView& h = args.h;
  MOIETY_CHECK(h.dims() == 2 && plain.dims() == 2, "activation: h is {}, a is {}", h.describe(),
               plain.describe());
  MOIETY_CHECK(
      h.dtype() == DType::kFloat32 || h.dtype() == DType::kBFloat16 || h.dtype() == DType::kFloat64,
      "activation: h is {}, expected float32 or bfloat16", h.describe());
  const int64_t rows = h.size(0), ffn = plain.size(1);
  check_matrix("h", h, h.dtype(), rows, args.activation.hidden(ffn));
  check_prob("prob_R", args.prob_R, h.dtype(), rows);
  check_interleave("activation", args.interleave, ffn);
  if (args.groups.begin_E1.defined()) {
    check_groups("activation", args.groups);
    MOIETY_CHECK(args.groups.capacity == rows, "activation: h is {}, the groups' capacity is {}",
                 h.describe(), args.groups.capacity);
  }
  args.sink.check("activation", h.dtype(),
                  args.groups.begin_E1.defined() ? args.groups.experts : 1);
  ActivationBlock block;
  block.activation = args.activation;
  block.interleave = args.interleave;
  block.ffn = ffn;
  block.dtype = h.dtype();
  block.h = h.raw();
  block.h_stride = h.stride(0);
  block.prob = args.prob_R.raw();
  return block;
}

// Calls run(block) for the live rows, in tasks of kRows rows, and reports each task's part of
// `stored` to the sink.
template <class Run>
void for_live_rows(const ActivationArgs& args, const ActivationBlock& block,
                   const TensorView& stored, Run&& run) {
  const auto part = [&](const RowTile& tile) {
    ActivationBlock b = block;
    b.begin = tile.begin;
    b.rows = tile.rows;
    run(b);
    for (int64_t r = tile.begin; args.sink.defined() && r < tile.begin + tile.rows; ++r) {
      args.sink.add(tile.group, stored.dtype(), stored.select(r).raw(), stored.size(1));
    }
  };
  args.sink.clear();
  if (!args.groups.begin_E1.defined()) {
    parallel_for(args.h.size(0), kRows, [&](int64_t begin, int64_t end) {
      part({0, begin, end - begin});
    });
    return;
  }
  record_faults(args.groups, OperationId::kActivation, {}, 0);
  const std::span<const RowTile> tiles = row_tiles(args.groups, kRows);
  parallel_tasks(static_cast<int64_t>(tiles.size()), [&](int64_t i) { part(tiles[i]); });
}

}  // namespace

void check_interleave(const char* operation, int64_t interleave, int64_t ffn) {
  MOIETY_CHECK(interleave == 0 || (interleave > 0 && interleave % 8 == 0 && ffn % interleave == 0),
               "{}: interleave {} with F={}: expected 0 or a multiple of 8 that divides F",
               operation, interleave, ffn);
}

void activation_forward(const ActivationArgs& args, TensorView a, Stream stream) {
  ActivationBlock block = check(args, a);
  check_matrix("a", a, args.h.dtype(), args.h.size(0), a.size(1));
  block.a = a.raw();
  block.a_stride = a.stride(0);
  if (on_gpu(args, a, stream)) {
    if constexpr (kCudaBuilt) return activation_forward_cuda(args, block, a, stream);
    fail_without_cuda("activation");
  }
  stream.run([args, block, a] {
    const TraceSpan span(TraceLane::kCompute, "activation", {{"rows", args.h.size(0)}});
    for_live_rows(args, block, a, [](const ActivationBlock& b) {
      b.dtype == DType::kFloat64 ? activation_forward_reference(b) : activation_forward_cpu(b);
    });
  });
}

void activation_backward(const ActivationArgs& args, TensorView da, TensorView dh, TensorView a,
                         TensorView dprob_R, Stream stream) {
  ActivationBlock block = check(args, da);
  const int64_t rows = args.h.size(0);
  check_matrix("da", da, args.h.dtype(), rows, da.size(1));
  check_matrix("dh", dh, args.h.dtype(), rows, args.h.size(1));
  check_prob("dprob_R", dprob_R, args.h.dtype(), rows);
  if (a.defined()) {
    check_matrix("a", a, args.h.dtype(), rows, da.size(1));
    block.a = a.raw();
    block.a_stride = a.stride(0);
  }
  block.da = da.raw();
  block.da_stride = da.stride(0);
  block.dh = dh.raw();
  block.dh_stride = dh.stride(0);
  block.dprob = dprob_R.raw();
  if (on_gpu(args, a, stream, da, dh, dprob_R)) {
    if constexpr (kCudaBuilt) return activation_backward_cuda(args, block, da, dh, a, stream);
    fail_without_cuda("activation");
  }
  stream.run([args, block, dh] {
    const TraceSpan span(TraceLane::kCompute, "activation_backward", {{"rows", args.h.size(0)}});
    for_live_rows(args, block, dh, [](const ActivationBlock& b) {
      b.dtype == DType::kFloat64 ? activation_backward_reference(b) : activation_backward_cpu(b);
    });
  });
}

}  // namespace moiety::gemm
