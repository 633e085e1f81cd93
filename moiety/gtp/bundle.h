// What is moved as one operation: one dense weight, or the weights of one linear layer of all local
// experts (docs/spec/gtp.md#words).
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
  // Of equal layout but for the expert, and equal codec; consumers find them in this order. Where
  // the group is one rank, their bf16 shards and their main_grads lie at equal distances.
  std::vector<WeightId> members;
  int group = 0;                               // of peers; index into the transports of an executor
  bool expert = false;                         // class of its lanes
  int32_t bucket = 0;                          // in which its shards are published (transport.h)
  ScaleLayout scales = ScaleLayout::kCompact;  // as the GEMM reads them
  // Where the row view's codes are those of both views: dgrad reads it too, and nothing is derived.
  bool rows_only = false;
  // A table of which rows can be moved in place of the whole, in calls of at most so many tokens
  // (embedding.h); equal on all ranks. 0: it cannot.
  int64_t row_tokens = 0;
};

// What a consume gives and what a gradient is written to. Rows are those that exist in the slice;
// what padding follows is nobody's business.
struct View {
  // Weights (bf16, fp32) or a gradient: [rows, K]; of experts and of several members [E, rows, K].
  // Columns are contiguous, rows may have gaps. Undefined for weights kept in a format.
  TensorView data;
  // Those: one for each member. The arrays that the phase reads are there.
  std::span<const QuantizedView> quantized;
  // Of a gradient: the GEMM adds to what is there (at G == 1, from the second contribution on).
  bool accumulate = false;
};

// A bundle with all that follows from its members.
class BundleLayout {
 public:
  // `transport` of its group; null where the group is one rank. `wire`: of gradients with float32
  // main_grads; bfloat16 main_grads travel as they are. Throws Error(InvalidArgument) naming
  // bundle and member if they do not go together.
  BundleLayout(const Bundle& bundle, std::span<const ShardedWeight> weights,
               const Transport* transport, DType wire);

  int ranks() const { return spec_.group_size; }  // G
  bool trained() const { return trained_; }
  int64_t rows() const { return rows_; }  // that exist
  const Layout& layout() const { return members_[0]->layout; }
  DType storage() const { return members_[0]->codec.storage(); }  // of weights in no format
  const BundleSpec& spec() const { return spec_; }
  SharedBundle shared(BundleId id) const;

  // The gather for these views.
  Payload payload(Views views) const;
  const GatherLayout& gather(Views views) const { return *gathers_[views - 1]; }
  // What consumers read of what has landed. `quantized` is memory for the view.
  View landed(const Landing& landing, std::vector<QuantizedView>& quantized) const;
  // At G == 1: the shards themselves.
  View whole(std::vector<QuantizedView>& quantized) const;
  // Columns of the whole have to be made by transposition: no shard has them.
  bool derives_columns() const;

  const ReduceShape& reduce() const { return reduce_; }
  int64_t valid_rows() const { return valid_rows_; }  // of the own shard
  const std::vector<TensorView>& main_grads() const { return main_grads_; }
  // Gradients in a send slot: that of all rows, and the part that is written.
  TensorView send(const TensorView& slot) const;
  TensorView send_rows(const TensorView& slot) const;
  // At G == 1: main_grad, as far as rows exist.
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
