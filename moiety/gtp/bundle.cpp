#include "moiety/gtp/bundle.h"

#include <algorithm>

#include "moiety/base/error.h"
#include "moiety/gtp/embedding.h"

namespace moiety::gtp {
namespace {

bool alike(const Layout& a, const Layout& b) {
  return a.rows == b.rows && a.cols == b.cols && a.tp_axis == b.tp_axis && a.tp_rank == b.tp_rank &&
         a.tp_size == b.tp_size && a.gtp_rank == b.gtp_rank && a.gtp_size == b.gtp_size &&
         a.shard_rows() == b.shard_rows();
}

bool alike(const Codec& a, const Codec& b) {
  return a.quantized() == b.quantized() && a.column_planes() == b.column_planes() &&
         (a.quantized() ? a.spec() == b.spec() : a.storage() == b.storage());
}

DType main_type(const ShardedWeight& w) {
  return w.main_grad.defined() ? w.main_grad.dtype() : DType::kFloat32;
}

}  // namespace

BundleLayout::BundleLayout(const Bundle& bundle, std::span<const ShardedWeight> weights,
                           const Transport* transport, DType wire)
    : name_(bundle.name), bucket_(bundle.bucket) {
  MOIETY_CHECK(!bundle.members.empty(), "gtp bundle {}: no members", name_);
  for (const WeightId w : bundle.members) {
    MOIETY_CHECK(w >= 0 && w < static_cast<WeightId>(weights.size()),
                 "gtp bundle {}: member {} of {} weights", name_, w, weights.size());
    members_.push_back(&weights[w]);
  }
  const ShardedWeight& one = *members_[0];
  const Layout& layout = one.layout;
  for (const ShardedWeight* w : members_) {
    MOIETY_CHECK(
        alike(w->layout, layout) && alike(w->codec, one.codec) &&
            w->main_grad.defined() == one.main_grad.defined() && main_type(*w) == main_type(one),
        "gtp bundle {}: {} and {} differ in layout, codec or main_grad", name_, one.name, w->name);
    main_grads_.push_back(w->main_grad);
  }
  const int ranks = layout.gtp_size;
  MOIETY_CHECK(
      ranks == 1 ||
          (transport && transport->ranks() == ranks && transport->rank() == layout.gtp_rank),
      "gtp bundle {}: {} is rank {} of {}, the transport of group {} has {}", name_, one.name,
      layout.gtp_rank, ranks, bundle.group,
      transport ? text("rank {} of {}", transport->rank(), transport->ranks()) : "no ranks");
  trained_ = one.main_grad.defined();
  stack_ = bundle.expert || members_.size() > 1;
  rows_ = layout.real_rows();
  cols_ = layout.slice_cols();
  valid_rows_ = layout.valid(layout.gtp_rank).size();
  const DType main = main_type(one);
  MOIETY_CHECK(wire == DType::kFloat32 || wire == DType::kBFloat16,
               "gtp bundle {}: wire is {}, expected float32 or bfloat16", name_,
               moiety::name(wire));
  reduce_ = {static_cast<int>(members_.size()), layout.shard_rows(), cols_,
             main == DType::kBFloat16 ? main : wire, main};

  spec_.name = name_;
  spec_.group = bundle.group;
  spec_.group_size = ranks;
  spec_.expert = bundle.expert;
  spec_.one_payload = one.codec.one_payload();
  spec_.rows_only = bundle.rows_only;
  MOIETY_CHECK(!bundle.rows_only || spec_.one_payload,
               "gtp bundle {}: {} has other codes in its column view", name_, one.codec.name());
  const GatherShape shape{one.codec, layout.shard_rows(), cols_,
                          ranks,     reduce_.members,     bundle.scales};
  for (Views v = 1; ranks > 1 && v <= (kRowView | kColView); ++v) {
    if (!spec_.one_payload && v == (kRowView | kColView)) continue;
    gathers_[v - 1] = gather_layout(shape, payload(v), v);
    spec_.gather[v - 1] = gathers_[v - 1]->transfer();
  }
  if (trained_ && ranks > 1) spec_.reduce = transport->reduce_transfer(reduce_);
  if (bundle.row_tokens == 0) return;
  MOIETY_CHECK(!stack_ && !one.codec.quantized() && layout.tp_axis != 1,
               "gtp bundle {}: rows of {} cannot be moved, expected one table in no format", name_,
               one.name);
  MOIETY_CHECK(transport && transport->kind() == TransportKind::kMapped,
               "gtp bundle {}: rows are moved by peers that map each other's memory", name_);
  spec_.rows = embedding_rows(layout, bundle.row_tokens, one.codec.storage());
}

SharedBundle BundleLayout::shared(BundleId id) const {
  SharedBundle out{id, name_, spec_.expert, bucket_, {}};
  for (const ShardedWeight* w : members_) {
    out.members.push_back({w->array(Array::kRowData), w->array(Array::kRowScales),
                           w->array(Array::kColData), w->array(Array::kColScales)});
  }
  return out;
}

Payload BundleLayout::payload(Views views) const {
  return views == kColView && !spec_.one_payload ? Payload::kCol : Payload::kRow;
}

TensorView BundleLayout::stacked(std::span<const TensorView> members) const {
  const TensorView first = members[0].slice(0, 0, rows_);
  if (!stack_) return first;
  const auto at = [&](size_t e) { return static_cast<std::byte*>(members[e].raw()); };
  const int64_t width = byte_size(first.dtype(), 1);
  const int64_t distance = members.size() > 1 ? at(1) - at(0) : rows_ * first.stride(0) * width;
  for (size_t e = 1; e < members.size(); ++e) {
    MOIETY_CHECK(at(e) - at(e - 1) == distance && distance % width == 0 &&
                     members[e].stride(0) == first.stride(0),
                 "gtp bundle {}: {} does not lie as far behind {} as the members before", name_,
                 members_[e]->name, members_[e - 1]->name);
  }
  const int64_t sizes[] = {static_cast<int64_t>(members.size()), rows_, cols_};
  const int64_t strides[] = {distance / width, first.stride(0), 1};
  return {first.raw(), first.dtype(), sizes, strides, first.device()};
}

View BundleLayout::landed(const Landing& landing, std::vector<QuantizedView>& quantized) const {
  View out;
  if (!members_[0]->codec.quantized()) {
    std::vector<TensorView> data;
    for (int e = 0; e < reduce_.members; ++e) data.push_back(landing.data(e));
    out.data = stacked(data);
    return out;
  }
  for (int e = 0; e < reduce_.members; ++e) {
    quantized.push_back(first_rows(landing.view(e), rows_));
    quantized.back().amax = members_[e]->quantized.amax;
    quantized.back().tensor_scale = members_[e]->quantized.tensor_scale;
  }
  out.quantized = quantized;
  return out;
}

View BundleLayout::whole(std::vector<QuantizedView>& quantized) const {
  View out;
  if (!members_[0]->codec.quantized()) {
    std::vector<TensorView> data;
    for (const ShardedWeight* w : members_) data.push_back(w->data);
    out.data = stacked(data);
    return out;
  }
  for (const ShardedWeight* w : members_) quantized.push_back(first_rows(w->quantized, rows_));
  out.quantized = quantized;
  return out;
}

bool BundleLayout::derives_columns() const {
  const Codec& codec = members_[0]->codec;
  return codec.quantized() && codec.one_payload() && !is_mxfp8(codec.spec().format) &&
         !members_[0]->quantized.col_data.defined();
}

TensorView BundleLayout::send(const TensorView& slot) const {
  return {slot.raw(),
          reduce_.wire,
          {reduce_.members, reduce_.shard_rows * ranks(), cols_},
          slot.device()};
}

TensorView BundleLayout::send_rows(const TensorView& slot) const {
  const TensorView rows = send(slot).slice(1, 0, rows_);
  return stack_ ? rows : rows.select(0);
}

TensorView BundleLayout::grad_rows() const { return stacked(main_grads_); }

}  // namespace moiety::gtp
