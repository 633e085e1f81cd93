// prepare on a CPU: two passes over the own routing (count; then number the pairs and rows and
// write them to their owners) and one over the messages of the other ranks.
#include <algorithm>
#include <cstring>
#include <numeric>
#include <vector>

#include "moiety/base/error.h"
#include "moiety/base/parallel.h"
#include "moiety/moe/exchange.h"
#include "moiety/moe/peers/prepare_message.h"
#include "moiety/moe/trim.h"

namespace moiety::moe {
namespace {

// The errors in one block of tokens.
struct BlockFindings {
  int64_t masked = 0, bad = 0, cut = 0;
  int32_t bad_token = -1, bad_choice = -1;
  int64_t bad_index = 0;
};

// The pairs of a token: expert and rank, -1 where there is none.
struct TokenPairs {
  int expert_K[kMaxTopk], owner_K[kMaxTopk];
};

class Prepare {
 public:
  Prepare(Exchange& exchange, const EpPlan& plan, const PrepareArgs& args, Findings& findings)
      : exchange_(exchange),
        map_(exchange.map()),
        plan_(plan),
        args_(args),
        findings_(findings),
        me_(exchange.rank()),
        ranks_(exchange.ranks()),
        experts_(map_.experts()),
        topk_(plan.topk),
        blocks_(ceil_div(plan.tokens, kTokenBlock)),
        wide_(args.idx_TK.dtype() == DType::kInt64),
        heads_(ranks_),
        found_(blocks_),
        sent_R_(ranks_),
        received_R_(ranks_),
        count_RE_(plan.count_RE.data<int32_t>()),
        rows_RR_(plan.rows_RR.data<int32_t>()),
        slot_TK_(plan.slot_TK.data<int32_t>()),
        owner_TK_(plan.owner_TK.data<int32_t>()),
        row_TR_(plan.row_TR.data<int32_t>()),
        row_end_BR_(plan.row_end_BR.data<int32_t>()),
        pair_end_BE_(plan.pair_end_BE.data<int32_t>()) {}

  void run(const std::function<void()>& between) {
    count_blocks();
    number_rows_of_blocks();
    add_up(pair_end_BE_, experts_, count_RE_ + int64_t{me_} * experts_);
    number_blocks();
    send_head();
    if (between) between();
    if (!receive_heads() || !receive_rows()) return;
    trim_all();
    find_slots();
    find_received();
    write_counts();
    write_info();
    record_errors();
  }

 private:
  int64_t index(int64_t t, int k) const {
    const int64_t at = t * args_.idx_TK.stride(0) + k * args_.idx_TK.stride(1);
    return wide_ ? static_cast<const int64_t*>(args_.idx_TK.raw())[at]
                 : static_cast<const int32_t*>(args_.idx_TK.raw())[at];
  }
  // The expert of a pair; -1 if the pair is not valid.
  int expert(int64_t t, int k) const {
    const int64_t e = index(t, k);
    return e >= 0 && e < experts_ ? static_cast<int>(e) : -1;
  }
  template <class Body>
  void for_blocks(const Body& body) const {
    parallel_tasks(blocks_, [&](int64_t b) {
      body(b, b * kTokenBlock, std::min<int64_t>((b + 1) * kTokenBlock, plan_.tokens));
    });
  }
  int32_t* recv_slots(int s, int64_t j) const {
    return plan_.recv_slot.data<int32_t>() + (s * plan_.tokens_max + j) * topk_;
  }
  int32_t& recv_token(int s, int64_t j) const {
    return plan_.recv_token.data<int32_t>()[s * plan_.tokens_max + j];
  }
  // The most rows that there may be for a rank.
  int64_t most_rows(int r) const { return r == me_ ? plan_.tokens_max : plan_.rows_max; }

  void count_blocks();
  void add_up(int32_t* counts, int64_t n, int32_t* total) const;
  void number_rows_of_blocks();
  void cut_rows();
  void number_rows(int64_t t, int32_t* rows_R, int32_t* row_R, TokenPairs& pairs) const;
  void number_blocks();
  void send_head();
  bool receive_heads();
  bool receive_rows();
  void compare_heads();
  void trim_all();
  void find_slots();
  void find_received();
  void write_counts();
  void write_info();
  void record_errors();

  Exchange& exchange_;
  const ExpertMap& map_;
  const EpPlan& plan_;
  const PrepareArgs& args_;
  Findings& findings_;
  const int me_, ranks_, experts_, topk_;
  const int64_t blocks_;
  const bool wide_;
  std::vector<MessageHead> heads_;  // by rank
  std::vector<BlockFindings> found_;
  std::vector<int64_t> sent_R_, received_R_;  // numbers of rows
  Trimmed trimmed_;
  int32_t *const count_RE_, *const rows_RR_, *const slot_TK_, *const owner_TK_, *const row_TR_;
  int32_t *const row_end_BR_, *const pair_end_BE_;
};

// Counts the pairs per expert and the rows per rank of every block.
void Prepare::count_blocks() {
  for_blocks([&](int64_t b, int64_t begin, int64_t end) {
    int32_t* pairs_E = pair_end_BE_ + b * experts_;
    int32_t* rows_R = row_end_BR_ + b * ranks_;
    std::fill_n(pairs_E, experts_, 0);
    std::fill_n(rows_R, ranks_, 0);
    std::vector<int64_t> last_token_R(ranks_, -1);
    BlockFindings found;
    for (int64_t t = begin; t < end; ++t) {
      for (int k = 0; k < topk_; ++k) {
        const int64_t e = index(t, k);
        if (e < 0) {
          ++found.masked;
        } else if (e >= experts_) {
          if (found.bad++ == 0) {
            found.bad_token = static_cast<int32_t>(t);
            found.bad_choice = k;
            found.bad_index = e;
          }
        } else {
          ++pairs_E[e];
          const int r = map_.owner(static_cast<int>(e));
          rows_R[r] += std::exchange(last_token_R[r], t) != t;
        }
      }
    }
    found_[b] = found;
  });
}

// Turns the counts of n things in each block into the numbers before it, and computes the totals.
void Prepare::add_up(int32_t* counts, int64_t n, int32_t* total) const {
  std::fill_n(total, n, 0);
  for (int64_t b = 0; b < blocks_; ++b) {
    for (int64_t i = 0; i < n; ++i) {
      total[i] += std::exchange(counts[b * n + i], total[i]);
    }
  }
}

void Prepare::number_rows_of_blocks() {
  int32_t* rows_R = rows_RR_ + int64_t{me_} * ranks_;
  add_up(row_end_BR_, ranks_, rows_R);
  MessageHead& head = heads_[me_];
  for (int r = 0; r < ranks_; ++r) {
    if (r == me_ || rows_R[r] <= head.most_rows) continue;
    head.most_rows = rows_R[r];
    head.most_rows_to = r;
  }
  if (head.most_rows > plan_.rows_max) cut_rows();
  std::copy_n(rows_R, ranks_, sent_R_.begin());
}

// Counts again without the pairs of surplus rows, since there are more rows than may be sent.
void Prepare::cut_rows() {
  int32_t* total_R = rows_RR_ + int64_t{me_} * ranks_;
  for (int r = 0; r < ranks_; ++r) {
    const auto most = static_cast<int32_t>(most_rows(r));
    total_R[r] = std::min(total_R[r], most);
    for (int64_t b = 0; b < blocks_; ++b) {
      row_end_BR_[b * ranks_ + r] = std::min(row_end_BR_[b * ranks_ + r], most);
    }
  }
  for_blocks([&](int64_t b, int64_t begin, int64_t end) {
    int32_t* pairs_E = pair_end_BE_ + b * experts_;
    std::fill_n(pairs_E, experts_, 0);
    const int32_t* before = row_end_BR_ + b * ranks_;
    std::vector<int32_t> rows_R(before, before + ranks_), row_R(ranks_);
    TokenPairs pairs;
    for (int64_t t = begin; t < end; ++t) {
      number_rows(t, rows_R.data(), row_R.data(), pairs);
      for (int k = 0; k < topk_; ++k) {
        const int e = pairs.expert_K[k];
        if (e >= 0) ++pairs_E[e];
        found_[b].cut += e < 0 && expert(t, k) >= 0;
      }
    }
  });
}

// Numbers the rows of a token at all ranks, from rows_R on, with -1 where there is none, and gives
// the pairs that have a row.
void Prepare::number_rows(int64_t t, int32_t* rows_R, int32_t* row_R, TokenPairs& pairs) const {
  std::fill_n(row_R, ranks_, -1);
  for (int k = 0; k < topk_; ++k) {
    const int e = expert(t, k);
    pairs.expert_K[k] = pairs.owner_K[k] = -1;
    if (e < 0) continue;
    const int r = map_.owner(e);
    if (row_R[r] < 0 && rows_R[r] < most_rows(r)) row_R[r] = rows_R[r]++;
    if (row_R[r] < 0) continue;
    pairs.expert_K[k] = e;
    pairs.owner_K[k] = r;
  }
}

// Numbers own pairs (for now in slot_TK) and rows, and stores the rows that concern a peer for it.
// The counters of a block run from its beginning to its end.
void Prepare::number_blocks() {
  exchange_.open(Box::kRouting, routing_bytes(topk_), sent_R_);
  exchange_.before_store();
  for_blocks([&](int64_t b, int64_t begin, int64_t end) {
    int32_t* pairs_E = pair_end_BE_ + b * experts_;
    int32_t* rows_R = row_end_BR_ + b * ranks_;
    TokenPairs pairs;
    for (int64_t t = begin; t < end; ++t) {
      int32_t* pair_K = slot_TK_ + t * topk_;
      int32_t* row_R = row_TR_ + t * ranks_;
      number_rows(t, rows_R, row_R, pairs);
      for (int k = 0; k < topk_; ++k) {
        pair_K[k] = pairs.expert_K[k] < 0 ? -1 : pairs_E[pairs.expert_K[k]]++;
      }
      for (int r = 0; r < ranks_; ++r) {
        if (row_R[r] < 0) continue;
        if (r == me_) {
          recv_token(me_, row_R[r]) = static_cast<int32_t>(t);
          continue;
        }
        std::byte* out = exchange_.out(r, row_R[r]);
        const int32_t head[2] = {static_cast<int32_t>(t), 0};
        std::memcpy(out, head, sizeof(head));
        for (int k = 0; k < topk_; ++k) {
          Choice choice;
          if (pairs.owner_K[k] == r) choice = {map_.local_index(pairs.expert_K[k]), pair_K[k]};
          std::memcpy(out + 8 + 8 * k, &choice, sizeof(choice));
        }
      }
    }
  });
}

void Prepare::send_head() {
  MessageHead& head = heads_[me_];
  const auto limit = [&] {
    return std::clamp<int64_t>(*args_.capacity_limit.data<int64_t>(), 0, args_.capacity);
  };
  head.capacity = args_.capacity_limit.defined() ? limit() : args_.capacity;
  head.tokens = static_cast<int32_t>(plan_.tokens);
  head.topk = topk_;
  head.experts = experts_;
  head.alignment = static_cast<int32_t>(args_.alignment);
  head.policy = static_cast<int32_t>(args_.overflow);
  for (const BlockFindings& found : found_) {
    if (head.bad == 0 && found.bad > 0) {
      head.bad_token = found.bad_token;
      head.bad_choice = found.bad_choice;
      head.bad_index = found.bad_index;
    }
    head.bad += static_cast<int32_t>(found.bad);
    head.cut += static_cast<int32_t>(found.cut);
  }
  std::vector<std::byte> message(head_bytes(experts_, ranks_));
  std::memcpy(message.data(), &head, sizeof(head));
  std::byte* counts = message.data() + sizeof(head);
  std::memcpy(counts, count_RE_ + int64_t{me_} * experts_, 4 * experts_);
  std::memcpy(counts + 4 * experts_, rows_RR_ + int64_t{me_} * ranks_, 4 * ranks_);
  exchange_.send_head(message.data());
}

bool Prepare::receive_heads() {
  for (int i = 0; i + 1 < ranks_; ++i) {
    const int s = exchange_.peer(i);
    const std::byte* in = exchange_.await_head(s);
    if (!in) return false;
    std::memcpy(&heads_[s], in, sizeof(MessageHead));
    const std::byte* counts = in + sizeof(MessageHead);
    std::memcpy(count_RE_ + int64_t{s} * experts_, counts, 4 * experts_);
    std::memcpy(rows_RR_ + int64_t{s} * ranks_, counts + 4 * experts_, 4 * ranks_);
  }
  for (int s = 0; s < ranks_; ++s) plan_.tokens_R.data<int32_t>()[s] = heads_[s].tokens;
  compare_heads();
  return !exchange_.failed();
}

bool Prepare::receive_rows() {
  for (int s = 0; s < ranks_; ++s) received_R_[s] = rows_RR_[int64_t{s} * ranks_ + me_];
  exchange_.transfer(received_R_);
  return !exchange_.failed();
}

void Prepare::compare_heads() {
  for (int r = 1; r < ranks_; ++r) {
    const int field = differing_field(heads_[0], heads_[r]);
    if (field < 0 || exchange_.failed()) continue;
    exchange_.poison(
        Exchange::Failure::kPrepare, me_ == r ? 0 : r,
        difference_text(exchange_.name(), exchange_.epoch(), field, heads_[0], r, heads_[r]));
  }
}

void Prepare::trim_all() {
  std::vector<int64_t> count(experts_), capacity(ranks_);
  for (int s = 0; s < ranks_; ++s) {
    capacity[s] = heads_[s].capacity;
    for (int e = 0; e < experts_; ++e) count[e] += count_RE_[int64_t{s} * experts_ + e];
  }
  trimmed_ = trim(map_, std::move(count), capacity, args_.alignment);
}

// Finds the slots of own pairs, from their position among all ranks' pairs of the expert.
void Prepare::find_slots() {
  std::vector<int64_t> before_E(experts_);
  for (int s = 0; s < me_; ++s) {
    for (int e = 0; e < experts_; ++e) before_E[e] += count_RE_[int64_t{s} * experts_ + e];
  }
  for_blocks([&](int64_t, int64_t begin, int64_t end) {
    std::vector<int64_t> last_token_R(ranks_, -1);  // the last token with a live pair there
    for (int64_t t = begin; t < end; ++t) {
      const int32_t own_row = row_TR_[t * ranks_ + me_];
      for (int k = 0; k < topk_; ++k) {
        int32_t& slot = slot_TK_[t * topk_ + k];
        const int e = slot < 0 ? -1 : expert(t, k);  // masked and cut pairs have no number
        const int64_t position = e < 0 ? 0 : before_E[e] + slot;
        const bool alive = e >= 0 && position < trimmed_.kept[e];
        slot = alive ? static_cast<int32_t>(trimmed_.offset[e] + position) : -1;
        const int r = alive ? map_.owner(e) : -1;
        if (ranks_ > 1) owner_TK_[t * topk_ + k] = r;
        if (alive) last_token_R[r] = t;
        if (own_row >= 0) recv_slots(me_, own_row)[k] = r == me_ ? slot : -1;
      }
      for (int r = 0; r < ranks_; ++r) {
        if (last_token_R[r] != t) row_TR_[t * ranks_ + r] = -1;
      }
    }
  });
}

// Finds the rows that come here, and the way back from slots to rows.
void Prepare::find_received() {
  int32_t* slot_row = plan_.slot_row.data<int32_t>();
  std::fill_n(slot_row, plan_.capacity, -1);
  const auto experts = map_.experts_of(me_);
  std::vector<int64_t> before_L(experts.size());
  for (int s = 0; s < ranks_; ++s) {
    parallel_for(rows_RR_[s * ranks_ + me_], kTokenBlock, [&](int64_t begin, int64_t end) {
      for (int64_t j = begin; j < end; ++j) {
        int32_t* slot_K = recv_slots(s, j);
        if (s != me_) {
          const std::byte* in = exchange_.in(s, j);
          std::memcpy(&recv_token(s, j), in, sizeof(int32_t));
          for (int k = 0; k < topk_; ++k) {
            Choice choice;
            std::memcpy(&choice, in + 8 + 8 * k, sizeof(choice));
            slot_K[k] = -1;
            if (choice.expert < 0) continue;
            const int e = experts[choice.expert];
            const int64_t position = before_L[choice.expert] + choice.pair;
            if (position < trimmed_.kept[e]) {
              slot_K[k] = static_cast<int32_t>(trimmed_.offset[e] + position);
            }
          }
        }
        for (int k = 0; k < topk_; ++k) {
          if (slot_K[k] < 0) continue;
          slot_row[slot_K[k]] = static_cast<int32_t>(s * plan_.tokens_max + j);
        }
      }
    });
    for (size_t i = 0; i < experts.size(); ++i) {
      before_L[i] += count_RE_[int64_t{s} * experts_ + experts[i]];
    }
  }
}

void Prepare::write_counts() {
  const auto experts = map_.experts_of(me_);
  int64_t* offset = plan_.offset.data<int64_t>();
  offset[0] = 0;
  for (size_t i = 0; i < experts.size(); ++i) {
    const int e = experts[i];
    const int64_t padded = round_up(trimmed_.kept[e], args_.alignment);
    plan_.rows_before.data<int64_t>()[i] = trimmed_.count[e];
    plan_.rows_real.data<int64_t>()[i] = trimmed_.kept[e];
    plan_.rows_padded.data<int64_t>()[i] = padded;
    offset[i + 1] = offset[i] + padded;
  }
}

void Prepare::write_info() {
  int64_t* info = plan_.info.data<int64_t>();
  std::fill_n(info, 16, 0);
  const auto experts = map_.experts_of(me_);
  info[kInfoPadded] = plan_.offset.data<int64_t>()[experts.size()];
  for (const int e : experts) info[kInfoKept] += trimmed_.kept[e];
  info[kInfoRequired] = trimmed_.required[me_];
  info[kInfoDropped] = trimmed_.dropped[me_];
  info[kInfoCapacity] = heads_[me_].capacity;
  for (const MessageHead& head : heads_) info[kInfoGroupTokens] += head.tokens;
  info[kInfoOwnDropped] = std::accumulate(count_RE_ + int64_t{me_} * experts_,
                                          count_RE_ + int64_t{me_ + 1} * experts_, int64_t{0}) +
                          heads_[me_].cut -
                          std::count_if(slot_TK_, slot_TK_ + plan_.tokens * topk_,
                                        [](int32_t slot) { return slot >= 0; });
  for (const BlockFindings& found : found_) {
    info[kInfoOwnMasked] += found.masked;
    info[kInfoOwnBad] += found.bad;
  }
  for (int r = 0; r < ranks_; ++r) {
    info[kInfoGroupRequired] = std::max(info[kInfoGroupRequired], trimmed_.required[r]);
    info[kInfoGroupDropped] += trimmed_.dropped[r] + heads_[r].cut;
    info[kInfoLargestRows] = std::max<int64_t>(info[kInfoLargestRows], heads_[r].most_rows);
  }
  info[kInfoGroupOverflow] = info[kInfoGroupDropped] > 0;
}

// Records errors, which are equal on all ranks, since all know the heads and counts of all.
void Prepare::record_errors() {
  const auto add = [&](Finding::Kind kind, int rank, std::initializer_list<int64_t> values) {
    Finding out{.epoch = exchange_.epoch(), .kind = kind, .rank = rank};
    std::copy(values.begin(), values.end(), out.value);
    findings_.add(out);
  };
  for (int r = 0; r < ranks_; ++r) {
    const MessageHead& head = heads_[r];
    if (head.bad == 0) continue;
    add(Finding::Kind::kBadIndex, r, {head.bad_token, head.bad_choice, head.bad_index});
  }
  const int64_t* info = plan_.info.data<int64_t>();
  if (info[kInfoGroupOverflow] == 0) return;
  if (args_.overflow == OverflowPolicy::kReport) {
    findings_.add_overflow(info[kInfoGroupRequired], info[kInfoGroupDropped]);
  }
  if (args_.overflow != OverflowPolicy::kError) return;
  for (int r = 0; r < ranks_; ++r) {
    const MessageHead& head = heads_[r];
    if (head.cut == 0) continue;
    add(Finding::Kind::kPeerRows, r, {head.most_rows, head.most_rows_to, plan_.rows_max});
    break;
  }
  for (int r = 0; r < ranks_; ++r) {
    if (trimmed_.dropped[r] == 0) continue;
    const auto experts = map_.experts_of(r);
    const int largest = *std::max_element(experts.begin(), experts.end(), [&](int a, int b) {
      return trimmed_.count[a] < trimmed_.count[b];
    });
    add(Finding::Kind::kCapacity, r,
        {trimmed_.required[r], heads_[r].capacity, largest, trimmed_.count[largest]});
    break;
  }
}

}  // namespace

void make_plan(Exchange& exchange, const EpPlan& plan, const PrepareArgs& args, Findings& findings,
               const std::function<void()>& between) {
  Prepare(exchange, plan, args, findings).run(between);
}

}  // namespace moiety::moe
