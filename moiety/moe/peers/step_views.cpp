#include "moiety/moe/peers/step_views.h"

#include "moiety/moe/copy_kernel.h"

namespace moiety::moe::peers {
namespace {

RowPart part_of(const Rows& from, const Rows& to, int64_t bytes) {
  const CopyKernel unit = choose_copy({from[0], to[0]}, {from.stride(), to.stride(), bytes});
  return {from[0], to[0], from.stride(), to.stride(), bytes, unit.unit};
}

// As octets_fit, for rows of which each has `bytes` bytes.
bool whole(const Rows& rows, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(rows[0]) % 16 == 0 && rows.stride() % 16 == 0 &&
         bytes % 16 == 0;
}

}  // namespace

PrepareView view_of(const EpPlan& plan, const PrepareArgs& args, Epoch epoch) {
  const TensorView& idx = args.idx_TK;
  return {.plan = view_of(plan),
          .idx = idx.raw(),
          .idx_stride = idx.stride(0),
          .idx_step = idx.stride(1),
          .limit = args.capacity_limit.data<int64_t>(),
          .epoch = epoch,
          .overflow = args.overflow,
          .wide = idx.dtype() == DType::kInt64};
}

CopyRows view_of(const SourceRows& x, const TensorView& w_TK, const ExpertRows& rows, int topk,
                 bool tail) {
  CopyRows out{};
  const RowParts rest{0, x.parts.scales, x.parts.row_scale};
  const auto take = [&](const Rows& from, const Rows& to, int64_t bytes, int64_t at,
                        int64_t rest_at) {
    if (bytes == 0) return;
    out.staged.at[out.parts] = at;
    out.direct.at[out.parts] = rest_at;
    out.part[out.parts++] = part_of(from, to, bytes);
  };
  take(x.data, rows.data, x.parts.data, 0, 0);
  take(x.scales, rows.scales.compact(), x.parts.scales, x.parts.scales_at(), rest.scales_at());
  take(x.row_scale, rows.row_scale, x.parts.row_scale, x.parts.row_scale_at(), rest.row_scale_at());
  out.staged.side_at = x.parts.side_at();
  out.staged.record = x.parts.record(topk);
  out.direct.side_at = rest.side_at();
  out.direct.record = rest.record(topk);
  if (w_TK.defined()) {
    const Rows w(w_TK);
    out.weights = w[0];
    out.weight_stride = w.stride();
    out.weighted = true;
  }
  if (rows.has_values) {
    out.values = rows.values[0];
    out.value_stride = rows.values.stride();
    out.has_values = true;
  }
  out.tail = tail;
  out.source = rows.source;
  if (const moe::ScaleRows& scales = rows.scales; scales.layout() != ScaleLayout::kCompact) {
    out.words = {.to = scales.compact()[0],
                 .rows = scales.rows(),
                 .cols = scales.cols(),
                 .width = x.parts.scales / scales.cols(),
                 .bytes = x.parts.scales,
                 .step = scales.step(),
                 .layout = scales.layout()};
  }
  return out;
}

SumRows view_of(const SumArgs& a, int topk) {
  const Rows y(a.y_CD), slot_w(a.slot_w), side(a.side), addend(a.addend), out(a.out_TD),
      side_out(a.side_TK);
  const DType type = a.y_CD.dtype();
  const int64_t model = a.y_CD.size(1);
  const bool fp32 = a.reduction == Reduction::kRankFp32;
  const int64_t wire = byte_size(fp32 ? DType::kFloat32 : type, model);
  const bool by_token = a.reduction == Reduction::kToken;
  const bool octets = model % kEight == 0;
  const bool wide = octets && whole(y, byte_size(type, model)) &&
                    whole(out, byte_size(a.out_TD.dtype(), model)) &&
                    (!a.addend.defined() || whole(addend, byte_size(a.addend.dtype(), model)));
  return {.y = y[0],
          .slot_w = slot_w[0],
          .side = side[0],
          .addend = addend[0],
          .out = out[0],
          .side_out = side_out[0],
          .y_stride = y.stride(),
          .w_stride = slot_w.stride(),
          .side_stride = side.stride(),
          .addend_stride = addend.stride(),
          .out_stride = out.stride(),
          .side_out_stride = side_out.stride(),
          .model = model,
          .side_at = RowParts{wire}.side_at(),
          .record = by_token ? pair_record_bytes(wire) : RowParts{wire}.record(topk),
          .wide = wide,
          .whole = octets,
          .weighted = a.slot_w.defined(),
          .has_side = a.side.defined(),
          .has_addend = a.addend.defined(),
          .wire_fp32 = fp32,
          .addend_fp32 = a.addend.defined() && a.addend.dtype() == DType::kFloat32,
          .out_fp32 = a.out_TD.dtype() == DType::kFloat32,
          .by_token = by_token};
}

bool wide_rows(const ScaledRows& a) {
  const int64_t bytes = byte_size(a.dtype, a.g.model);
  return a.g.model % kEight == 0 && whole(a.g.data, bytes) && whole(a.gy.data, bytes) &&
         (!a.y_CD.defined() || whole(Rows(a.y_CD), bytes));
}

bool overlap(const TensorView& a, const TensorView& b) {
  if (!a.defined() || !b.defined() || a.numel() == 0 || b.numel() == 0) return false;
  const auto end = [](const TensorView& x) {
    const int64_t elements = (x.size(0) - 1) * x.stride(0) + x.size(1);
    return static_cast<const std::byte*>(x.raw()) + byte_size(x.dtype(), elements);
  };
  return a.raw() < end(b) && b.raw() < end(a);
}

}  // namespace moiety::moe::peers
