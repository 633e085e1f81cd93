// Expert rows to tokens on a CPU: combine and dispatch_backward, and the scaled rows of
// combine_backward. Every partial sum is copied twice on its way (into a record, out of it). Under
// kToken without weights, homes read the rows of owners that are direct (EpGroup::attach).
#include <cstring>
#include <vector>

#include "moiety/moe/combine_row.h"
#include "moiety/moe/plan_maps.h"
#include "moiety/moe/row_movers.h"

namespace moiety::moe {
namespace {

std::byte* scratch_row(int64_t bytes) {
  thread_local std::vector<std::byte> scratch;
  if (static_cast<int64_t>(scratch.size()) < bytes) scratch.resize(bytes);
  return scratch.data();
}

// The sums of combine and dispatch_backward: owners send their parts home, and homes sum them.
class RowSum {
 public:
  RowSum(Exchange& exchange, const EpPlan& plan, const SumArgs& args)
      : exchange_(exchange),
        plan_(plan),
        args_(args),
        maps_(plan),
        y_(args.y_CD),
        slot_w_(args.slot_w),
        side_(args.side),
        addend_(args.addend),
        out_(args.out_TD),
        side_TK_(args.side_TK),
        type_(args.y_CD.dtype()),
        wire_(args.reduction == Reduction::kRankFp32 ? DType::kFloat32 : type_),
        out_type_(args.out_TD.dtype()),
        model_(args.y_CD.size(1)),
        weighted_(args.slot_w.defined()),
        by_token_(args.reduction == Reduction::kToken) {
    const int64_t bytes = byte_size(wire_, model_);
    side_at_ = RowParts{bytes}.side_at();
    stride_ = by_token_ ? pair_record_bytes(bytes) : RowParts{bytes}.record(maps_.topk);
  }

  void run() {
    by_token_ ? send_all_pairs() : send_all_partials();
    exchange_.transfer(maps_.sent_by(rank()));
    const int64_t grain = rows_per_task(byte_size(type_, model_));
    parallel_for(plan_.tokens, grain, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end && !exchange_.failed(); ++t) {
        by_token_ ? sum_pairs(t) : sum_ranks(t);
      }
    });
  }

 private:
  int rank() const { return exchange_.rank(); }
  Term own_term(int32_t slot) const {
    return {y_[slot], type_, weighted_ ? load_float(slot_w_[slot]) : 1};
  }
  Terms own_terms(const int32_t* slot_K) const {
    Terms terms(weighted_);
    for (int k = 0; k < maps_.topk; ++k) {
      if (slot_K[k] >= 0) terms.add(own_term(slot_K[k]));
    }
    return terms;
  }
  // Calls send(home, row, chunk) for the rows that came here, in chunks.
  template <class Send>
  void for_received(const Send& send) {
    const auto received = [&](int home) { return maps_.rows(home, rank()); };
    for_chunks(exchange_, received, [&](int home, int64_t chunk, int64_t begin, int64_t end) {
      exchange_.before_store();
      for (int64_t j = begin; j < end; ++j) send(home, j, chunk);
      exchange_.announce(home, chunk);
    });
  }

  void send_all_partials() {
    exchange_.open(Box::kRows, stride_, maps_.sent_to(rank()));
    for_received([&](int home, int64_t j, int64_t) { send_partial(home, j); });
  }

  void send_partial(int home, int64_t j) {
    const int32_t* slot_K = maps_.slots(home, j);
    const Terms terms = own_terms(slot_K);
    if (terms.count() == 0) return;
    std::byte* record = exchange_.out(home, j);
    partial(terms, record);
    if (!args_.side.defined()) return;
    for (int k = 0; k < maps_.topk; ++k) {
      store32(record + side_at_ + 4 * k, slot_K[k] < 0 ? 0 : load32(side_[slot_K[k]]));
    }
  }

  void send_all_pairs() {
    // The number of each home's pairs, and of those before each of its chunks.
    std::vector<int64_t> count_R(maps_.ranks);
    std::vector<std::vector<int64_t>> before_RC(maps_.ranks);
    for (int home = 0; home < maps_.ranks; ++home) {
      const int64_t rows = home == rank() ? 0 : maps_.rows(home, rank());
      for (int64_t j = 0; j < rows; ++j) {
        if (j % exchange_.chunk_rows() == 0) before_RC[home].push_back(count_R[home]);
        count_R[home] += maps_.count_alive(maps_.slots(home, j));
      }
    }
    exchange_.open(Box::kPairs, stride_, count_R);
    if (exchange_.direct(rank())) return;
    for_received(
        [&](int home, int64_t j, int64_t chunk) { send_pairs(home, j, before_RC[home][chunk]); });
  }

  // `next` is the number of the first pair among those for the home; afterwards that of the row
  // after it.
  void send_pairs(int home, int64_t j, int64_t& next) {
    const int32_t* slot_K = maps_.slots(home, j);
    const int64_t t = maps_.token(home, j);
    for (int k = 0; k < maps_.topk; ++k) {
      const int32_t slot = slot_K[k];
      if (slot < 0) continue;
      const int64_t pair = t * maps_.topk + k;
      std::byte* record = exchange_.pair_out(home, pair, next++);
      std::memcpy(record, y_[slot], byte_size(type_, model_));
      const Rows& value = weighted_ ? slot_w_ : side_;
      if (weighted_ || args_.side.defined()) std::memcpy(record + side_at_, value[slot], 4);
      store32(record + side_at_ + kPairNumber, static_cast<uint32_t>(pair));
    }
  }

  // Writes a rank's part of a token's sum, in the form in which it goes over the wire.
  void partial(const Terms& terms, std::byte* out) const {
    if (terms.count() == 1 && !weighted_ && wire_ == type_) {
      copy_term(terms[0], out, wire_, model_);
    } else {
      sum_terms(terms, nullptr, wire_, out, wire_, model_);
    }
  }

  void sum_ranks(int64_t t) {
    const int32_t* row_R = maps_.row_TR + t * maps_.ranks;
    const int32_t* own_K = row_R[rank()] < 0 ? nullptr : maps_.slots(rank(), row_R[rank()]);
    const Terms own = own_K ? own_terms(own_K) : Terms(weighted_);
    if (args_.side.defined()) begin_side(t, own_K);
    if (own.count() == alive(t) && own.count() > 0 && sums_once()) {
      store(own, t);
      return;
    }
    Terms ranks(false);
    for (int r = 0; r < maps_.ranks; ++r) {
      if (row_R[r] < 0) continue;
      if (r == rank()) {
        ranks.add(own_partial(own));
        continue;
      }
      const std::byte* record = exchange_.in(r, row_R[r]);
      ranks.add({record, wire_, 1});
      if (args_.side.defined()) add_side(t, record + side_at_);
    }
    store(ranks, t);
  }

  // Whether rounding the partial and then the sum is one rounding: nothing comes between, or the
  // first changes nothing.
  bool sums_once() const {
    return wire_ == DType::kFloat32 || (out_type_ == wire_ && !args_.addend.defined());
  }

  Term own_partial(const Terms& own) const {
    if (own.count() == 1 && !weighted_) return own[0];
    std::byte* scratch = scratch_row(byte_size(wire_, model_));
    partial(own, scratch);
    return {scratch, wire_, 1};
  }

  void sum_pairs(int64_t t) {
    const int32_t* row_R = maps_.row_TR + t * maps_.ranks;
    const int32_t* own_K = row_R[rank()] < 0 ? nullptr : maps_.slots(rank(), row_R[rank()]);
    if (args_.side.defined()) begin_side(t, own_K);
    Terms pairs(weighted_);
    for (int k = 0; k < maps_.topk; ++k) {
      if (maps_.slot_TK[t * maps_.topk + k] < 0) continue;
      if (own_K && own_K[k] >= 0) {
        pairs.add(own_term(own_K[k]));
        continue;
      }
      const int32_t slot = maps_.slot_TK[t * maps_.topk + k];
      const int owner = maps_.owner_TK[t * maps_.topk + k];
      if (exchange_.direct(owner)) {
        pairs.add({exchange_.direct_row(owner, slot), type_, 1});
        continue;
      }
      const std::byte* record = exchange_.pair_in(t * maps_.topk + k);
      const std::byte* value = record + side_at_;
      pairs.add({record, type_, weighted_ ? load_float(value) : 1});
      if (args_.side.defined()) store32(side_TK_[t] + 4 * k, load32(value));
    }
    store(pairs, t);
  }

  int alive(int64_t t) const { return maps_.count_alive(maps_.slot_TK + t * maps_.topk); }

  void store(const Terms& terms, int64_t t) const {
    const bool add = args_.addend.defined();
    if (alive(t) == 1 && !weighted_ && !add && out_type_ == type_) {
      copy_term(terms[0], out_[t], out_type_, model_);
    } else {
      sum_terms(terms, add ? addend_[t] : nullptr, args_.addend.dtype(), out_[t], out_type_,
                model_);
    }
  }

  // Sets the side values of own pairs, and 0 for all others; then each rank's values come, with 0
  // for pairs that are not its own.
  void begin_side(int64_t t, const int32_t* own_K) const {
    for (int k = 0; k < maps_.topk; ++k) {
      const bool own = own_K && own_K[k] >= 0;
      store32(side_TK_[t] + 4 * k, own ? load32(side_[own_K[k]]) : 0);
    }
  }
  void add_side(int64_t t, const std::byte* values) const {
    std::byte* out = side_TK_[t];
    for (int k = 0; k < maps_.topk; ++k) {
      store32(out + 4 * k, load32(out + 4 * k) | load32(values + 4 * k));
    }
  }

  Exchange& exchange_;
  const EpPlan& plan_;
  const SumArgs& args_;
  const PlanMaps maps_;
  const Rows y_, slot_w_, side_, addend_, out_, side_TK_;
  const DType type_, wire_, out_type_;
  const int64_t model_;
  const bool weighted_, by_token_;
  int64_t side_at_ = 0, stride_ = 0;
};

}  // namespace

void sum_rows(Exchange& exchange, const EpPlan& plan, const SumArgs& args) {
  RowSum(exchange, plan, args).run();
}

void scale_rows(Exchange& exchange, const EpPlan& plan, const ScaledRows& a) {
  const Rows y(a.y_CD), slot_w(a.slot_w);
  expand_rows(exchange, plan, a.g, [&](const Row& row, const int32_t* slot_K) {
    for (int k = 0; k < plan.topk; ++k) {
      const int32_t slot = slot_K[k];
      if (slot < 0) continue;
      if (a.y_CD.defined()) {
        *a.gy.values.as<float>(slot) = dot_row(a.dtype, y[slot], row.data, a.g.model);
      }
      scale_row(a.dtype, *slot_w.as<float>(slot), row.data, a.gy.data[slot], a.g.model);
    }
  });
}

}  // namespace moiety::moe
