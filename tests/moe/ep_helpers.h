// Helpers of the tests of expert parallelism: transports, poisoned matrices, random inputs, and the
// comparison of a plan with the oracle's.
#pragma once

#include <algorithm>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "moiety/base/buffer.h"
#include "moiety/base/copy.h"
#include "moiety/base/integer.h"
#include "moiety/comm/communicator.h"
#include "moiety/comm/symmetric_buffer.h"
#include "moiety/comm/thread_group.h"
#include "moiety/formats/bf16.h"
#include "moiety/formats/fp16.h"
#include "moiety/moe/combine.h"
#include "moiety/moe/combine_ref.h"
#include "moiety/moe/dispatch.h"
#include "moiety/moe/dispatch_ref.h"
#include "moiety/moe/ep_group.h"
#include "moiety/moe/exchange_collective.h"
#include "moiety/moe/exchange_mapped.h"
#include "moiety/moe/peers/peer_exchange.h"
#include "moiety/moe/prepare.h"
#include "moiety/moe/prepare_ref.h"
#include "tests/support/error_of.h"

namespace moiety::moe {

// Sanitizers make everything ten times slower: less of the same is run under them.
#ifdef MOIETY_NO_SIMD_CLONES
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

// The place where a suite runs: its ranks, and their way to reach each other. Such a type has
//   static constexpr EpTransport kTransport;
//   static constexpr int kManyOperations;  // of a test that runs very many
//   static bool has(int ranks);  // false: it cannot run that many
//   static void run(int ranks, body, deadline);  // body(world) on each
template <EpTransport transport>
struct ThreadRanks {
  static constexpr EpTransport kTransport = transport;
  static constexpr int kManyOperations = kSanitized ? 300 : 3000;
  static bool has(int) { return true; }
  static void run(int ranks, const std::function<void(comm::Communicator&)>& body,
                  Seconds deadline = Seconds(60)) {
    comm::run_thread_ranks(ranks, {.deadline = deadline}, body);
  }
};
using Threads = ThreadRanks<EpTransport::kMapped>;
using ThreadCollectives = ThreadRanks<EpTransport::kCollectives>;

// The part of a group that a rank holds for its peers, for tests that look into it.
inline MappedExchange& mapped(const EpGroup& group) {
  return dynamic_cast<MappedExchange&>(*group.impl()->exchange);
}

// The bytes that its memory really takes.
inline int64_t memory_bytes(const EpGroup& group) {
  if (group.transport() == EpTransport::kMapped) return mapped(group).memory().bytes();
  return dynamic_cast<CollectiveExchange&>(*group.impl()->exchange).memory().bytes();
}

// Fills what records go through, so that reading what nobody stored shows.
inline void poison_memory(const EpGroup& group, const Stream& stream = {}) {
  if (const auto& peers = group.impl()->peers) {
    const int64_t first = peers->layout().meta, bytes = peers->memory().bytes() - first;
    const Device device = peers->memory().device();
    fill_bytes({peers->memory().local() + first, DType::kUInt8, {bytes}, device}, 0xFF, stream);
    stream.synchronize();
  } else if (group.impl()->on_gpu()) {  // of one rank, whose rows go through no memory
  } else if (group.transport() == EpTransport::kMapped) {
    const MappedExchange& e = mapped(group);
    std::memset(e.memory().local() + e.layout().meta, 0xFF, e.bytes().total - e.layout().meta);
  } else {
    const auto& e = dynamic_cast<CollectiveExchange&>(*group.impl()->exchange);
    std::memset(e.memory().data(), 0xFF, e.memory().bytes());
  }
}

inline PayloadFormat format_of(DType t) {
  if (t == DType::kFloat32) return PayloadFormat::kFP32;
  return t == DType::kFloat16 ? PayloadFormat::kFP16 : PayloadFormat::kBF16;
}

template <class T>
T poison() {
  T out;
  std::memset(static_cast<void*>(&out), 0xFF, sizeof(T));
  return out;
}

template <class T>
bool same_bytes(const T& a, const T& b) {
  return std::memcmp(&a, &b, sizeof(T)) == 0;
}
template <class T>
bool is_nan(const T& x) {
  return std::isnan(static_cast<float>(x));
}

// A matrix whose every element is poison at first. `odd`: its base and its rows are off by some
// elements, and what lies between the rows must stay poison.
template <class T>
class Mat {
 public:
  Mat(int64_t rows, int64_t cols, bool odd = false)
      : rows_(rows),
        cols_(cols),
        stride_(cols + (odd ? 3 : 0)),
        first_(odd ? 1 : 0),
        data_(first_ + rows * stride_ + 1, poison<T>()) {}
  Mat(const std::vector<T>& values, int64_t cols, bool odd = false)
      : Mat(static_cast<int64_t>(values.size()) / cols, cols, odd) {
    for (int64_t i = 0; i < static_cast<int64_t>(values.size()); ++i)
      at(i / cols, i % cols) = values[i];
  }

  T& at(int64_t r, int64_t c) { return data_[first_ + r * stride_ + c]; }
  const T& at(int64_t r, int64_t c) const { return data_[first_ + r * stride_ + c]; }
  TensorView view() {
    const int64_t sizes[] = {rows_, cols_}, strides[] = {stride_, 1};
    return {rows_ ? &data_[first_] : nullptr, dtype_of<T>, sizes, strides};
  }
  // All of its memory.
  TensorView storage() { return {data_.data(), dtype_of<T>, {static_cast<int64_t>(data_.size())}}; }
  // The matrix [n, 1] as a vector [n], with a stride if `odd`.
  TensorView vector() {
    const int64_t sizes[] = {rows_}, strides[] = {stride_};
    return {rows_ ? &data_[first_] : nullptr, dtype_of<T>, sizes, strides};
  }

  // Compares bytes; with `arithmetic` any NaN equals any NaN.
  void expect(const std::vector<T>& expected, bool arithmetic, const std::string& what) const {
    ASSERT_EQ(static_cast<int64_t>(expected.size()), rows_ * cols_) << what;
    for (int64_t r = 0; r < rows_; ++r) {
      for (int64_t c = 0; c < cols_; ++c) {
        const T& a = at(r, c);
        const T& b = expected[r * cols_ + c];
        if (same_bytes(a, b) || (arithmetic && is_nan(a) && is_nan(b))) continue;
        FAIL() << what << " [" << r << ", " << c << "] is " << static_cast<double>(a)
               << ", expected " << static_cast<double>(b);
      }
      for (int64_t c = cols_; c < stride_; ++c) {
        ASSERT_TRUE(same_bytes(at(r, c), poison<T>())) << what << " behind row " << r;
      }
    }
    ASSERT_TRUE(same_bytes(data_.back(), poison<T>())) << what << ", behind the end";
  }

 private:
  int64_t rows_, cols_, stride_, first_;
  std::vector<T> data_;
};

// The place of a suite's tensors and operations: here. Another place makes copies of tensors'
// memory there, as it is now, and brings all of them back. So does this one on ranks whose memory
// is attached to a group, at places that differ from rank to rank.
class OnHost {
 public:
  Stream stream = {};
  // Makes tensors from now on direct, on ranks whose bit is set in `ranks`. Collective; `bytes` hold
  // all tensors up to a `back`, and are equal on all ranks.
  void attach(EpGroup& group, comm::Communicator& world, int64_t bytes, unsigned ranks) {
    shift_ = 64 * (1 + world.rank() * 3 % 7) + 16 * (world.rank() % 3);
    buffer_ = comm::SymmetricBuffer::create(world, "operands", 1024 + bytes);
    group.attach(buffer_);
    direct_ = ranks >> group.rank() & 1;
  }
  // A view of a part of `storage`.
  TensorView operator()(const TensorView& storage, const TensorView& view) {
    if (!direct_ || !view.raw()) return view;
    std::byte* const there = buffer_.local() + shift_ + used_;
    used_ += round_up(storage.bytes(), 64);
    EXPECT_LE(shift_ + used_, buffer_.bytes());
    std::memcpy(there, storage.raw(), storage.bytes());
    copies_.push_back({storage, there});
    const auto* base = static_cast<const std::byte*>(storage.raw());
    return {there + (static_cast<const std::byte*>(view.raw()) - base), view.dtype(), view.sizes(),
            view.strides()};
  }
  void back() {
    for (const auto& [storage, there] : copies_) {
      std::memcpy(storage.raw(), there, storage.bytes());
    }
    copies_.clear();
    used_ = 0;
  }
  const EpPlan& plan(const EpPlan& plan) const { return plan; }

 private:
  bool direct_ = false;
  int64_t shift_ = 0, used_ = 0;
  comm::SymmetricBuffer buffer_;
  std::vector<std::pair<TensorView, std::byte*>> copies_;
};

// Memory of one plan, poisoned.
class PlanMemory {
 public:
  PlanMemory(const ExpertMap& map, const EpLimits& limits, const PrepareArgs& args)
      : buffer_(plan_bytes(map, limits, args)) {
    std::memset(buffer_.data(), 0xFF, buffer_.bytes());
  }
  TensorView view() const { return buffer_.view(DType::kUInt8, {buffer_.bytes()}); }

 private:
  Buffer buffer_;
};

enum class Routing {
  kRandom,
  kOneRank,
  kOneExpert,
  kNotRankZero,
  kAllMasked,
  kSomeMasked,
  kDuplicates,
};

// Routing of every rank; distinct experts per token where the kind allows it.
inline ref::PerRank<int64_t> make_routing(Routing kind, const std::vector<int64_t>& tokens,
                                          int topk, const ExpertMap& map, std::mt19937& rng) {
  std::vector<int64_t> pool;
  for (int e = 0; e < map.experts(); ++e) {
    if (kind == Routing::kNotRankZero && map.owner(e) == 0) continue;
    if (kind == Routing::kOneRank && map.owner(e) != map.owner(map.experts() / 2)) continue;
    if (kind == Routing::kOneExpert && e != map.experts() / 3) continue;
    pool.push_back(e);
  }
  ref::PerRank<int64_t> out;
  for (const int64_t n : tokens) {
    auto& idx = out.emplace_back();
    for (int64_t t = 0; t < n; ++t) {
      const size_t start = rng(), step = 1 + rng() % std::max<size_t>(1, pool.size() / topk);
      for (int k = 0; k < topk; ++k) {
        const bool masked = kind == Routing::kAllMasked || pool.empty() ||
                            (kind == Routing::kSomeMasked && rng() % 10 < 3);
        const size_t pick = kind == Routing::kDuplicates ? k / 2 : k;
        idx.push_back(masked ? -1 - static_cast<int64_t>(rng() % 3)
                             : pool[(start + pick * step) % pool.size()]);
      }
    }
  }
  return out;
}

inline void expect_plan(const EpPlan& plan, const ref::Plan& all, int me) {
  const ref::Plan::Rank& expected = all.rank[me];
  const int ranks = all.in.map.ranks(), topk = all.in.topk;
  const auto words = [](const TensorView& x) {
    return std::vector<int64_t>(x.data<int64_t>(), x.data<int64_t>() + x.numel());
  };
  const auto ints = [](const TensorView& x) {
    return std::vector<int32_t>(x.data<int32_t>(), x.data<int32_t>() + x.numel());
  };
  EXPECT_EQ(words(plan.rows_real), expected.real);
  EXPECT_EQ(words(plan.rows_padded), expected.padded);
  EXPECT_EQ(words(plan.rows_before), expected.before);
  EXPECT_EQ(words(plan.offset), expected.offset);
  EXPECT_EQ(words(plan.info), std::vector<int64_t>(expected.info.begin(), expected.info.end()));
  EXPECT_EQ(ints(plan.slot_TK), expected.slot_TK);
  EXPECT_EQ(ints(plan.row_TR), expected.row_TR);
  if (ranks > 1) {
    EXPECT_EQ(ints(plan.owner_TK), expected.owner_TK);
  }
  for (int s = 0; s < ranks; ++s) {
    const auto n = static_cast<int64_t>(expected.token[s].size());
    EXPECT_EQ(plan.rows_RR.data<int32_t>()[s * ranks + me], n);
    EXPECT_EQ(plan.tokens_R.data<int32_t>()[s], all.in.tokens(s));
    const int32_t* token = plan.recv_token.data<int32_t>() + s * plan.tokens_max;
    EXPECT_EQ(std::vector<int32_t>(token, token + n), expected.token[s]);
    const int32_t* slot = plan.recv_slot.data<int32_t>() + s * plan.tokens_max * topk;
    EXPECT_EQ(std::vector<int32_t>(slot, slot + n * topk), expected.slot_K[s]);
  }
  std::vector<int32_t> slot_row;
  for (const auto& [s, j] : expected.slot_row) {
    slot_row.push_back(s < 0 ? -1 : static_cast<int32_t>(s * plan.tokens_max + j));
  }
  EXPECT_EQ(ints(plan.slot_row), slot_row);
}

}  // namespace moiety::moe
