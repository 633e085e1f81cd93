// prepare on a CPU: two passes over the own routing (count, then number the pairs and rows and
// write them to their owners), one over what came from the ranks.
#include <algorithm>
#include <cstring>
#include <numeric>
#include <vector>

#include "moiety/base/error.h"
#include "moiety/base/parallel.h"
#include "moiety/moe/exchange.h"
#include "moiety/moe/trim.h"

namespace moiety::moe {
namespace {

// The head of prepare's message (spec ep, 4). Behind it: count[E], rows[R], then the rows' records:
// token, 0, and per choice {local expert or -1, index among the sender's pairs of that expert}.
// layout and cut are of other kinds of plans. Bytes 48 to 63 name the first bad index, so that all
// ranks can tell of it.
struct MessageHead {
  char magic[8] = {'M', 'E', 'P', 1};
  int64_t capacity = 0;
  int32_t tokens = 0, topk = 0, experts = 0, alignment = 0;
  int32_t layout = 0, policy = 0, bad = 0, cut = 0;
  int32_t bad_token = -1, bad_choice = -1;
  int64_t bad_index = 0;
  char rest[64] = {};
};
static_assert(sizeof(MessageHead) == 128);

struct Choice {
  int32_t expert = -1, pair = 0;
};

constexpr int64_t row_message_bytes(int topk) { return 8 + 8 * topk; }

// What one block of tokens found wrong.
struct BlockFindings {
  int64_t masked = 0, bad = 0;
  int32_t bad_token = -1, bad_choice = -1;
  int64_t bad_index = 0;
};

class Prepare {
 public:
  Prepare(Exchange& exchange, const EpPlan& plan, const PrepareArgs& args)
      : exchange_(exchange),
        map_(exchange.group().map),
        plan_(plan),
        args_(args),
        me_(exchange.rank()),
        ranks_(exchange.ranks()),
        experts_(map_.experts()),
        topk_(plan.topk),
        blocks_(ceil_div(plan.tokens, kTokenBlock)),
        wide_(args.idx_TK.dtype() == DType::kInt64),
        heads_(ranks_),
        findings_(blocks_),
        count_RE_(plan.count_RE.data<int32_t>()),
        rows_RR_(plan.rows_RR.data<int32_t>()),
        slot_TK_(plan.slot_TK.data<int32_t>()),
        row_TR_(plan.row_TR.data<int32_t>()),
        row_end_BR_(plan.row_end_BR.data<int32_t>()),
        pair_end_BE_(plan.pair_end_BE.data<int32_t>()) {}

  void run() {
    count_blocks();
    add_up_blocks();
    number_blocks();
    send_heads();
    if (!receive_heads()) return;
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
  // The expert of a pair, -1 if it is not valid.
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
  std::byte* row_message(std::byte* message, int64_t j) const {
    return message + 128 + round_up(4 * (experts_ + ranks_), 128) + j * row_message_bytes(topk_);
  }

  void count_blocks();
  void add_up_blocks();
  void number_blocks();
  void send_heads();
  bool receive_heads();
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
  const int me_, ranks_, experts_, topk_;
  const int64_t blocks_;
  const bool wide_;
  std::vector<MessageHead> heads_;  // by rank
  std::vector<BlockFindings> findings_;
  Trimmed trimmed_;
  int32_t *const count_RE_, *const rows_RR_, *const slot_TK_, *const row_TR_;
  int32_t *const row_end_BR_, *const pair_end_BE_;
};

// Pairs per expert and rows per rank of every block.
void Prepare::count_blocks() {
  for_blocks([&](int64_t b, int64_t begin, int64_t end) {
    int32_t* pairs_E = pair_end_BE_ + b * experts_;
    int32_t* rows_R = row_end_BR_ + b * ranks_;
    std::fill_n(pairs_E, experts_, 0);
    std::fill_n(rows_R, ranks_, 0);
    BlockFindings found;
    for (int64_t t = begin; t < end; ++t) {
      uint64_t owners = 0;
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
          rows_R[r] += (owners >> r & 1) == 0;
          owners |= uint64_t{1} << r;
        }
      }
    }
    findings_[b] = found;
  });
}

// Counts become the number of pairs and rows before each block, and the totals.
void Prepare::add_up_blocks() {
  const auto add_up = [&](int32_t* counts, int64_t n, int32_t* total) {
    std::fill_n(total, n, 0);
    for (int64_t b = 0; b < blocks_; ++b) {
      for (int64_t i = 0; i < n; ++i) {
        total[i] += std::exchange(counts[b * n + i], total[i]);
      }
    }
  };
  add_up(pair_end_BE_, experts_, count_RE_ + int64_t{me_} * experts_);
  add_up(row_end_BR_, ranks_, rows_RR_ + int64_t{me_} * ranks_);
}

// Numbers own pairs (for now in slot_TK) and rows, and sends every rank the rows that concern it.
// The counters of a block run from its beginning to its end.
void Prepare::number_blocks() {
  std::vector<std::byte*> message_R(ranks_);
  for (int r = 0; r < ranks_; ++r) {
    if (r != me_) message_R[r] = exchange_.message(r, me_);
  }
  exchange_.before_store();
  for_blocks([&](int64_t b, int64_t begin, int64_t end) {
    int32_t* pairs_E = pair_end_BE_ + b * experts_;
    int32_t* rows_R = row_end_BR_ + b * ranks_;
    for (int64_t t = begin; t < end; ++t) {
      int32_t* pair_K = slot_TK_ + t * topk_;
      int32_t* row_R = row_TR_ + t * ranks_;
      std::fill_n(row_R, ranks_, -1);
      int owner_K[kMaxTopk];
      for (int k = 0; k < topk_; ++k) {
        const int e = expert(t, k);
        owner_K[k] = e < 0 ? -1 : map_.owner(e);
        pair_K[k] = e < 0 ? -1 : pairs_E[e]++;
        if (e >= 0 && row_R[owner_K[k]] < 0) row_R[owner_K[k]] = rows_R[owner_K[k]]++;
      }
      for (int r = 0; r < ranks_; ++r) {
        if (row_R[r] < 0) continue;
        if (r == me_) {
          recv_token(me_, row_R[r]) = static_cast<int32_t>(t);
          continue;
        }
        std::byte* out = row_message(message_R[r], row_R[r]);
        const int32_t head[2] = {static_cast<int32_t>(t), 0};
        std::memcpy(out, head, sizeof(head));
        for (int k = 0; k < topk_; ++k) {
          Choice choice;
          if (owner_K[k] == r) choice = {map_.local_index(expert(t, k)), pair_K[k]};
          std::memcpy(out + 8 + 8 * k, &choice, sizeof(choice));
        }
      }
    }
  });
}

void Prepare::send_heads() {
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
  for (const BlockFindings& found : findings_) {
    if (head.bad == 0 && found.bad > 0) {
      head.bad_token = found.bad_token;
      head.bad_choice = found.bad_choice;
      head.bad_index = found.bad_index;
    }
    head.bad += static_cast<int32_t>(found.bad);
  }
  for (int i = 0; i + 1 < ranks_; ++i) {
    const int r = exchange_.peer(i);
    std::byte* out = exchange_.message(r, me_);
    std::memcpy(out, &head, sizeof(head));
    std::memcpy(out + 128, count_RE_ + int64_t{me_} * experts_, 4 * experts_);
    std::memcpy(out + 128 + 4 * experts_, rows_RR_ + int64_t{me_} * ranks_, 4 * ranks_);
    exchange_.announce_message(r);
  }
}

bool Prepare::receive_heads() {
  for (int i = 0; i + 1 < ranks_; ++i) {
    const int s = exchange_.peer(i);
    if (!exchange_.await_message(s)) return false;
    const std::byte* in = exchange_.message(me_, s);
    std::memcpy(&heads_[s], in, sizeof(MessageHead));
    std::memcpy(count_RE_ + int64_t{s} * experts_, in + 128, 4 * experts_);
    std::memcpy(rows_RR_ + int64_t{s} * ranks_, in + 128 + 4 * experts_, 4 * ranks_);
  }
  for (int s = 0; s < ranks_; ++s) plan_.tokens_R.data<int32_t>()[s] = heads_[s].tokens;
  compare_heads();
  return !exchange_.failed();
}

void Prepare::compare_heads() {
  static constexpr const char* kPolicies[] = {"kError", "kDrop", "kReport"};
  const MessageHead& first = heads_[0];
  for (int r = 1; r < ranks_; ++r) {
    const auto compare = [&](const char* what, auto a, auto b) {
      if (a == b || exchange_.failed()) return;
      exchange_.poison(
          Exchange::Failure::kPrepare, me_ == r ? 0 : r,
          text("ep prepare, group \"{}\", epoch {}: {} differs: rank 0 has {}, rank {} "
               "has {}",
               exchange_.group().options.name, exchange_.epoch(), what, a, r, b));
    };
    const MessageHead& head = heads_[r];
    compare("message version", int{first.magic[3]}, int{head.magic[3]});
    compare("K", first.topk, head.topk);
    compare("E", first.experts, head.experts);
    compare("alignment", first.alignment, head.alignment);
    compare("overflow policy", std::string_view(kPolicies[first.policy]),
            std::string_view(kPolicies[head.policy]));
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

// Own pairs: their position among all ranks' pairs of the expert, hence their slot.
void Prepare::find_slots() {
  std::vector<int64_t> before_E(experts_);
  for (int s = 0; s < me_; ++s) {
    for (int e = 0; e < experts_; ++e) before_E[e] += count_RE_[int64_t{s} * experts_ + e];
  }
  for_blocks([&](int64_t, int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      uint64_t owners = 0;
      const int32_t own_row = row_TR_[t * ranks_ + me_];
      for (int k = 0; k < topk_; ++k) {
        int32_t& slot = slot_TK_[t * topk_ + k];
        const int e = expert(t, k);
        const int64_t position = e < 0 ? 0 : before_E[e] + slot;
        const bool alive = e >= 0 && position < trimmed_.kept[e];
        slot = alive ? static_cast<int32_t>(trimmed_.offset[e] + position) : -1;
        const int r = alive ? map_.owner(e) : -1;
        if (alive) owners |= uint64_t{1} << r;
        if (own_row >= 0) recv_slots(me_, own_row)[k] = r == me_ ? slot : -1;
      }
      for (int r = 0; r < ranks_; ++r) {
        if ((owners >> r & 1) == 0) row_TR_[t * ranks_ + r] = -1;
      }
    }
  });
}

// The rows that come here, and the way back from slots to rows.
void Prepare::find_received() {
  int32_t* slot_row = plan_.slot_row.data<int32_t>();
  std::fill_n(slot_row, plan_.capacity, -1);
  const auto experts = map_.experts_of(me_);
  std::vector<int64_t> before_L(experts.size());
  for (int s = 0; s < ranks_; ++s) {
    std::byte* message = s == me_ ? nullptr : exchange_.message(me_, s);
    parallel_for(rows_RR_[s * ranks_ + me_], kTokenBlock, [&](int64_t begin, int64_t end) {
      for (int64_t j = begin; j < end; ++j) {
        int32_t* slot_K = recv_slots(s, j);
        if (s != me_) {
          const std::byte* in = row_message(message, j);
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
                                          count_RE_ + int64_t{me_ + 1} * experts_, int64_t{0}) -
                          std::count_if(slot_TK_, slot_TK_ + plan_.tokens * topk_,
                                        [](int32_t slot) { return slot >= 0; });
  for (const BlockFindings& found : findings_) {
    info[kInfoOwnMasked] += found.masked;
    info[kInfoOwnBad] += found.bad;
  }
  for (int r = 0; r < ranks_; ++r) {
    info[kInfoGroupRequired] = std::max(info[kInfoGroupRequired], trimmed_.required[r]);
    info[kInfoGroupDropped] += trimmed_.dropped[r];
    for (int s = 0; s < ranks_; ++s) {
      const int64_t rows = s == r ? 0 : rows_RR_[s * ranks_ + r];
      info[kInfoLargestRows] = std::max(info[kInfoLargestRows], rows);
    }
  }
  info[kInfoGroupOverflow] = info[kInfoGroupDropped] > 0;
}

// Equal on all ranks, since all know the heads and counts of all.
void Prepare::record_errors() {
  EpGroup::Impl& g = exchange_.group();
  const auto record = [&](std::string text) {
    constexpr size_t kMost = 64;  // somebody who never asks must not fill the memory
    if (g.errors.size() < kMost) g.errors.push_back({exchange_.epoch(), std::move(text)});
  };
  for (int r = 0; r < ranks_; ++r) {
    const MessageHead& head = heads_[r];
    if (head.bad == 0) continue;
    record(
        text("ep prepare, group \"{}\": rank {}, token {}, choice {}: expert {} is outside [0, {})",
             g.options.name, r, head.bad_token, head.bad_choice, head.bad_index, experts_));
  }
  const int64_t* info = plan_.info.data<int64_t>();
  if (info[kInfoGroupOverflow] == 0) return;
  if (args_.overflow == OverflowPolicy::kReport) {
    ++g.report[0];
    g.report[1] = std::max(g.report[1], info[kInfoGroupRequired]);
    g.report[2] += info[kInfoGroupDropped];
  }
  if (args_.overflow != OverflowPolicy::kError) return;
  int receiver = 0;
  while (trimmed_.dropped[receiver] == 0) ++receiver;
  const auto experts = map_.experts_of(receiver);
  const int largest = *std::max_element(experts.begin(), experts.end(), [&](int a, int b) {
    return trimmed_.count[a] < trimmed_.count[b];
  });
  record(
      text("ep prepare, group \"{}\": rank {} needs {} rows, capacity {}; largest is expert {} "
           "with {}",
           g.options.name, receiver, trimmed_.required[receiver], heads_[receiver].capacity,
           largest, trimmed_.count[largest]));
}

}  // namespace

void make_plan(Exchange& exchange, const EpPlan& plan, const PrepareArgs& args) {
  Prepare(exchange, plan, args).run();
}

}  // namespace moiety::moe
