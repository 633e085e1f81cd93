// A bundle: the weights that one operation moves, which are one dense weight, or the weights of one
// linear layer of all local experts (docs/spec/gtp.md#words).
#pragma once

#include <array>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "moiety/gtp/plan.h"
#include "moiety/gtp/sharded_weight.h"
#include "moiety/gtp/transport.h"

namespace moiety::gtp {

struct Bundle {
  std::string name;  // for errors
  // The weights, in the order in which consumers find them. Their layouts are equal except for the
  // expert, and so are their codecs. If the group is one rank, their bf16 shards and their
  // main_grads lie at equal distances.
  std::vector<WeightId> members;
  int group = 0;        // of peers; index into the transports of an executor
  bool expert = false;  // class of its lanes
  int32_t bucket = 0;   // the bucket in which its shards are published (transport.h)
  ScaleLayout scales = ScaleLayout::kCompact;  // as the GEMM reads them
  // Whether the row view's codes are those of both views: then dgrad reads the row view too, and
  // nothing is derived.
  bool rows_only = false;
  // The most tokens of a call that moves rows of a table instead of the whole (embedding.h); equal
  // on all ranks. 0: rows cannot be moved.
  int64_t row_tokens = 0;
};

// The result of a consume, and the target of a gradient. Rows are those that exist in the slice;
// padding that follows them is not to be touched.
struct View {
  // Weights (bf16, fp32) or a gradient: [rows, K], for experts and for several members [E, rows,
  // K]. Columns are contiguous, rows may have gaps. Undefined for weights kept in a format.
  TensorView data;
  // Weights kept in a format: one for each member, with the arrays that the phase reads.
  std::span<const QuantizedView> quantized;
  // For a gradient: the GEMM adds to the old values (at G == 1, from the second contribution on).
  bool accumulate = false;
};

// A bundle with everything that follows from its members.
class BundleLayout {
 public:
  // `transport` is that of its group; null if the group is one rank. `wire` is the dtype in which
  // gradients with float32 main_grads travel; those with bfloat16 main_grads travel as they are.
  // Throws Error(kInvalidArgument) naming bundle and member if they do not go together.
  BundleLayout(const Bundle& bundle, std::span<const ShardedWeight> weights,
               const Transport* transport, DType wire);

  int ranks() const { return spec_.group_size; }  // G
  bool trained() const { return trained_; }
  int64_t rows() const { return rows_; }  // rows that exist
  const Layout& layout() const { return members_[0]->layout; }
  DType storage() const { return members_[0]->codec.storage(); }  // dtype of weights in no format
  const BundleSpec& spec() const { return spec_; }
  SharedBundle shared(BundleId id) const;

  // The gather that makes these views.
  Payload payload(Views views) const;
  const GatherLayout& gather(Views views) const { return *gathers_[views - 1]; }
  // The view for consumers of a gather that has landed. `quantized` is memory for the view.
  View landed(const Landing& landing, std::vector<QuantizedView>& quantized) const;
  // The view of the shards themselves, at G == 1.
  View whole(std::vector<QuantizedView>& quantized) const;
  // Whether the columns of the whole have to be made by transposition, since no shard has them.
  bool derives_columns() const;

  const ReduceShape& reduce() const { return reduce_; }
  int64_t valid_rows() const { return valid_rows_; }  // of the own shard
  const std::vector<TensorView>& main_grads() const { return main_grads_; }
  // Gradients in a send slot: `send` has all rows, `send_rows` the part that is written.
  TensorView send(const TensorView& slot) const;
  TensorView send_rows(const TensorView& slot) const;
  // main_grad as far as rows exist, at G == 1.
  TensorView grad_rows() const;

 private:
  TensorView stacked(std::span<const TensorView> members) const;

  std::string name_;
  int32_t bucket_ = 0;
  bool trained_ = false, stack_ = false;
  std::vector<const ShardedWeight*> members_;
  int64_t rows_ = 0, cols_ = 0;
  int64_t valid_rows_ = 0;
  BundleSpec spec_;
  std::array<std::optional<GatherLayout>, 3> gathers_;
  ReduceShape reduce_;
  std::vector<TensorView> main_grads_;
};

}  // namespace moiety::gtp
