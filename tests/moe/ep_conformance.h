// Every operation against the oracle, over a pairwise cover of shapes, routings, values, capacities
// and options; bitwise, with everything that is written poisoned first. Typed by what runs it
// (ep_helpers.h); every rank computes the oracle for itself, so ranks may be processes.
#pragma once

#include <limits>
#include <optional>

#include "moiety/base/parallel.h"
#include "tests/moe/ep_helpers.h"
#include "tests/support/pairwise.h"

namespace moiety::moe::conformance {

enum class Values { kRandom, kRamp, kSpecial };
enum class Capacity {
  kWorst,
  kRequired,
  kOneShort,
  kBlockShort,
  kUnderOneBlock,
  kZero,
  kByRank,
  kHalf
};
enum class Addend { kNone, kSame, kFloat, kInPlace };

struct Case {
  int ranks, topk, experts, depth, chunk_rows, threads;
  int direct;  // bits of the ranks whose operands are attached; -1: zero-copy is off
  int64_t tokens, tokens_pattern, model, alignment, peer_rows;
  DType dtype;
  Routing routing;
  Values values;
  Capacity capacity;
  Addend addend;
  Reduction reduction;
  OverflowPolicy overflow;
  bool weights, out_fp32, odd, wide_idx, permuted, limited, zero_tail;

  std::string describe() const {
    return text(
        "R {} K {} E {} depth {} chunk {} threads {} T {}/{} D {} a {} P {} {} routing {} values "
        "{} "
        "capacity {} addend {} reduction {} policy {} weights {} fp32 {} odd {} wide {} "
        "permuted {} limited {} tail {} direct {}",
        ranks, topk, experts, depth, chunk_rows, threads, tokens, tokens_pattern, model, alignment,
        peer_rows, name(dtype), int(routing), int(values), int(capacity), int(addend),
        int(reduction), int(overflow), weights, out_fp32, odd, wide_idx, permuted, limited,
        zero_tail, direct);
  }
};

inline std::vector<Case> all_cases() {
  const std::vector<int> ranks{1, 2, 3, 4, 8}, topk{1, 2, 8, 32}, experts{1, 6, 64, 256, 4096};
  const std::vector<int> chunk_rows{16, 1, 3}, threads{1, 2};
  const std::vector<int> direct{-1, 0xFF, 0xAA, 0x25, 0};
  const std::vector<int64_t> tokens{0, 1, 15, 16, 17, 255, 4096};
  const std::vector<int64_t> model{1, 7, 127, 128, 2047, 7168}, alignment{1, 3, 16, 128};
  const std::vector<int64_t> peer_rows{0, 1, 9};
  const std::vector<DType> dtype{DType::kBFloat16, DType::kFloat16, DType::kFloat32};
  const auto rows = pairwise_cover(
      {5, 4, 5, 2, 3, 2, 7, 3, 6, 4, 3, 3, 7, 3, 8, 4, 3, 3, 2, 2, 2, 2, 2, 2, 2, 5});
  std::vector<Case> out;
  for (const auto& r : rows) {
    int i = 0;
    Case c{};
    c.ranks = ranks[r[i++]];
    c.topk = topk[r[i++]];
    c.experts = experts[r[i++]];
    c.depth = 1 + r[i++];
    c.chunk_rows = chunk_rows[r[i++]];
    c.threads = threads[r[i++]];
    c.tokens = tokens[r[i++]];
    c.tokens_pattern = r[i++];
    c.model = model[r[i++]];
    c.alignment = alignment[r[i++]];
    c.peer_rows = peer_rows[r[i++]];
    c.dtype = dtype[r[i++]];
    c.routing = static_cast<Routing>(r[i++]);
    c.values = static_cast<Values>(r[i++]);
    c.capacity = static_cast<Capacity>(r[i++]);
    c.addend = static_cast<Addend>(r[i++]);
    c.reduction = static_cast<Reduction>(r[i++]);
    c.overflow = static_cast<OverflowPolicy>(r[i++]);
    c.weights = r[i++];
    c.out_fp32 = r[i++];
    c.odd = r[i++];
    c.wide_idx = r[i++];
    c.permuted = r[i++];
    c.limited = r[i++];
    c.zero_tail = r[i++];
    c.direct = direct[r[i++]];
    out.push_back(c);
  }
  return out;
}

// Big shapes are named by one factor; together they would take minutes, so the largest give way.
constexpr int64_t kMostElements = kSanitized ? 1 << 14 : 1 << 18;

inline void shrink(Case& c) {
  const auto elements = [&] { return c.ranks * c.tokens * std::min(c.topk, c.experts) * c.model; };
  while (elements() > kMostElements && c.model > 1 && c.tokens > 255) c.model = c.model / 2 | 1;
  while (elements() > kMostElements && c.tokens > 17) c.tokens = c.tokens / 2 | 1;
  while (elements() > kMostElements) c.model /= 2;
}

struct Sizes {
  std::vector<int64_t> tokens, rows, in_force;
  int64_t tokens_max = 0;
};

inline ExpertMap make_map(const Case& c, std::mt19937& rng) {
  if (!c.permuted) return {c.experts, c.ranks};
  std::vector<int32_t> owner(c.experts);
  for (auto& r : owner) r = static_cast<int32_t>(rng() % c.ranks);
  return {owner, c.ranks};
}

template <class T>
T make_value(Values kind, int s, int64_t t, int64_t d, std::mt19937& rng) {
  static constexpr float kInf = std::numeric_limits<float>::infinity();
  static const float kSpecial[] = {0.0f,   -0.0f,    kInf,      -kInf,   NAN,  -NAN,  1e-40f,
                                   -6e-8f, 65504.0f, -65504.0f, 3.3e38f, 1.0f, -1.0f, 1.00390625f};
  switch (kind) {
    case Values::kRandom:
      return T(std::normal_distribution<float>()(rng));
    case Values::kRamp:
      return T(static_cast<float>((s + 1) * 100 + t % 37 * 3 + d % 11));
    default:
      return T(kSpecial[rng() % std::size(kSpecial)]);
  }
}

template <class T>
ref::PerRank<T> make_values(Values kind, const std::vector<int64_t>& rows, int64_t cols,
                            std::mt19937& rng) {
  ref::PerRank<T> out;
  for (size_t s = 0; s < rows.size(); ++s) {
    auto& x = out.emplace_back();
    for (int64_t i = 0; i < rows[s] * cols; ++i) {
      x.push_back(make_value<T>(kind, static_cast<int>(s), i / cols, i % cols, rng));
    }
  }
  return out;
}

// Rows of experts: values where a pair is alive, poison elsewhere, so reading those shows.
template <class T>
ref::PerRank<T> make_expert_values(Values kind, const ref::Plan& plan,
                                   const std::vector<int64_t>& rows, int64_t cols,
                                   std::mt19937& rng) {
  ref::PerRank<T> out = make_values<T>(kind, rows, cols, rng);
  for (size_t r = 0; r < rows.size(); ++r) {
    for (int64_t i = 0; i < rows[r] * cols; ++i) {
      if (plan.rank[r].slot_row[i / cols].first < 0) out[r][i] = poison<T>();
    }
  }
  return out;
}

inline Sizes make_sizes(const Case& c, const ExpertMap& map, ref::PerRank<int64_t>& idx,
                        std::mt19937& rng) {
  Sizes z;
  z.tokens_max = c.tokens;
  for (int s = 0; s < c.ranks; ++s) {
    const int64_t by_pattern[] = {c.tokens, std::max<int64_t>(0, c.tokens - s),
                                  s == c.ranks / 2 ? 0 : c.tokens};
    z.tokens.push_back(by_pattern[c.tokens_pattern]);
  }
  idx = make_routing(c.routing, z.tokens, c.topk, map, rng);
  const ref::PlanInput free{map, c.topk,     c.alignment, std::vector<int64_t>(c.ranks, INT32_MAX),
                            idx, c.peer_rows};
  const ref::Plan plan = ref::make_plan(free);
  for (int r = 0; r < c.ranks; ++r) {
    const int64_t required = plan.rank[r].info[kInfoRequired];
    const bool repeats = true;
    const int64_t choices[] = {
        worst_capacity(c.ranks, c.tokens, c.topk, map.local_count(r), c.alignment, repeats),
        required,
        required - 1,
        required - c.alignment,
        c.alignment - 1,
        0,
        r % 2 ? required : required * 2 / 3,
        required / 2 + 1};
    // The worst case of many short experts is mostly padding: enough is enough.
    const int64_t wanted =
        std::clamp<int64_t>(choices[static_cast<int>(c.capacity)], 0, required + 4 * c.alignment);
    z.rows.push_back(c.limited ? wanted + 5 : wanted);
    z.in_force.push_back(wanted);
  }
  return z;
}

// The inputs of all ranks.
template <class T>
struct Problem {
  Problem(const Case& the_case, int seed) : c(the_case), rng(seed), map(make_map(c, rng)) {
    const Sizes z = make_sizes(c, map, idx, rng);
    rows = z.rows;
    in_force = z.in_force;
    plan = ref::make_plan({map, c.topk, c.alignment, in_force, idx, c.peer_rows}, rows);
    x = make_values<T>(c.values, z.tokens, c.model, rng);
    g = make_values<T>(c.values, z.tokens, c.model, rng);
    w = make_values<float>(Values::kRandom, z.tokens, c.topk, rng);
    y = make_expert_values<T>(c.values, plan, rows, c.model, rng);
    slot_w = make_expert_values<float>(Values::kRandom, plan, rows, 1, rng);
    addend = make_values<float>(c.values, z.tokens, c.model, rng);
    for (auto& rank : addend) {
      for (float& v : rank) v = addend_dtype() == DType::kFloat32 ? v : static_cast<float>(T(v));
    }
    limits = {.tokens = z.tokens_max,
              .model = c.model,
              .topk = c.topk,
              .widest = format_of(c.dtype),
              .depth = c.depth,
              .rank_fp32 = c.reduction == Reduction::kRankFp32,
              .token_order = c.reduction == Reduction::kToken,
              .peer_rows = c.peer_rows};
  }
  DType addend_dtype() const {
    const bool wide = c.addend == Addend::kFloat || (c.addend == Addend::kInPlace && c.out_fp32);
    return wide ? DType::kFloat32 : c.dtype;
  }

  Case c;
  std::mt19937 rng;
  ExpertMap map;
  ref::PerRank<int64_t> idx;
  std::vector<int64_t> rows, in_force;
  ref::Plan plan;
  EpLimits limits;
  ref::PerRank<T> x, g, y;
  ref::PerRank<float> w, slot_w, addend;
};

// The results that all ranks should get.
template <class T, class Out>
struct Expected {
  explicit Expected(const Problem<T>& p) {
    for (const int64_t n : p.rows) {
      rows.emplace_back(n * p.c.model, poison<T>());
      slot_w.emplace_back(n, poison<float>());
    }
    gy = rows;
    g_slot_w = slot_w;
    const auto* w = p.c.weights ? &p.w : nullptr;
    const auto* weight = p.c.weights ? &p.slot_w : nullptr;
    const auto* add = p.c.addend == Addend::kNone ? nullptr : &p.addend;
    const int64_t model = p.c.model;
    ref::dispatch<T, float>(p.plan, model, p.x, w, p.c.zero_tail, rows, slot_w);
    out = ref::combine<T, float, Out>(p.plan, model, p.y, weight, add, p.c.reduction);
    ref::combine_backward<T, float>(p.plan, model, p.g, weight, p.c.weights ? &p.y : nullptr, gy,
                                    g_slot_w);
    gx = ref::combine<T, float, Out>(p.plan, model, p.y, nullptr, add, p.c.reduction);
    gw = ref::weight_gradients(p.plan, p.slot_w);
  }
  ref::PerRank<T> rows, gy;
  ref::PerRank<Out> out, gx;
  ref::PerRank<float> slot_w, g_slot_w, gw;
};

// One rank's run of all operations.
template <class T, class Out, class Place = OnHost>
class RankRun {
 public:
  RankRun(comm::Communicator& world, const Problem<T>& p, const Expected<T, Out>& e,
          EpTransport transport, const Place& place = {})
      : place_(place),
        p_(p),
        c_(p.c),
        e_(e),
        me_(world.rank()),
        group_(EpGroup::create(world, p.map, p.limits,
                               {.name = "case",
                                .deadline = Seconds(20),
                                .chunk_rows = p.c.chunk_rows,
                                .transport = transport,
                                .zero_copy = c_.direct < 0 ? ZeroCopy::kOff : ZeroCopy::kAuto,
                                .comm_sms = kCommSms[(c_.topk + c_.depth + c_.chunk_rows) % 5],
                                .device = place.stream.device()})) {
    if (group_.bytes().total > 0) poison_memory(group_, place_.stream);
    if constexpr (requires { place_.enter(group_, world); }) place_.enter(group_, world);
    if constexpr (requires { place_.attach(group_, world, 0, 0); }) {
      if (c_.direct >= 0 && group_.transport() == EpTransport::kMapped) {
        operands_ = [this, &world] { place_.attach(group_, world, operand_bytes(), c_.direct); };
      }
    }
    world.barrier();
  }

  void run() {
    prepare_plan();
    if (testing::Test::HasFailure()) return;
    if (operands_) operands_();
    run_dispatch();
    run_combine();
    run_combine_backward();
    run_dispatch_backward();
    check_overflow();
    group_.close();
  }

 private:
  static constexpr int kCommSms[] = {0, 1, 3, 24, 1024};  // no bit depends on it
  // Enough for the tensors of any operation.
  int64_t operand_bytes() const {
    const int64_t rows = *std::max_element(p_.rows.begin(), p_.rows.end());
    const int64_t elements = (3 * rows + 3 * p_.limits.tokens + 12) * (c_.model + 3) +
                             (2 * p_.limits.tokens + 2 * rows + 8) * (c_.topk + 3);
    return 4 * elements + 16 * 64;
  }
  template <class Element>
  TensorView at(Mat<Element>& x) {
    return place_(x.storage(), x.view());
  }
  template <class Element>
  TensorView vector_at(Mat<Element>& x) {
    return place_(x.storage(), x.vector());
  }

  void prepare_plan() {
    const auto& idx = p_.idx[me_];
    const std::vector<int32_t> narrow(idx.begin(), idx.end());
    Mat<int32_t> idx32(narrow, c_.topk, c_.odd);
    Mat<int64_t> idx64(idx, c_.topk, c_.odd);
    Tensor limit(DType::kInt64, {1});
    *limit.data<int64_t>() = p_.in_force[me_];
    PrepareArgs args{.idx_TK = c_.wide_idx ? at(idx64) : at(idx32),
                     .alignment = c_.alignment,
                     .capacity = p_.rows[me_],
                     .overflow = c_.overflow};
    if (c_.limited) args.capacity_limit = place_(limit, limit);
    memory_.emplace(p_.map, p_.limits, args);
    plan_ = prepare(group_, args, place_(memory_->view(), memory_->view()), place_.stream);
    place_.back();
    expect_plan(place_.plan(plan_), p_.plan, me_);
  }

  void run_dispatch() {
    Mat<T> x(p_.x[me_], c_.model, c_.odd), rows(p_.rows[me_], c_.model, c_.odd);
    Mat<float> w(p_.w[me_], c_.topk, c_.odd), slot_w(p_.rows[me_], 1, c_.odd);
    DispatchArgs args{.x_TD = at(x), .rows_CD = at(rows), .zero_tail = c_.zero_tail};
    if (c_.weights) {
      args.w_TK = at(w);
      args.slot_w = vector_at(slot_w);
    }
    dispatch(group_, plan_, args, place_.stream);
    place_.back();
    rows.expect(e_.rows[me_], false, "rows");
    slot_w.expect(e_.slot_w[me_], false, "slot_w");
  }

  // The output of a sum, holding the addend already if that is in place; and the addend.
  template <class Args>
  void with_addend(const char* what, const std::vector<Out>& expected, Args args,
                   TensorView Args::*out_of,
                   void (*run)(EpGroup&, const EpPlan&, const Args&, Stream)) {
    const auto& values = p_.addend[me_];
    Mat<Out> out(plan_.tokens, c_.model, c_.odd);
    Mat<T> same(plan_.tokens, c_.model, c_.odd);
    Mat<float> wide(plan_.tokens, c_.model, c_.odd);
    for (size_t i = 0; i < values.size(); ++i) {
      const int64_t t = i / c_.model, d = i % c_.model;
      same.at(t, d) = T(values[i]);
      wide.at(t, d) = values[i];
      if (c_.addend == Addend::kInPlace) out.at(t, d) = Out(values[i]);
    }
    args.*out_of = at(out);
    if (c_.addend == Addend::kSame) args.addend = at(same);
    if (c_.addend == Addend::kFloat) args.addend = at(wide);
    if (c_.addend == Addend::kInPlace) args.addend = args.*out_of;
    run(group_, plan_, args, place_.stream);
    place_.back();
    out.expect(expected, true, what);
  }

  void run_combine() {
    Mat<T> y(p_.y[me_], c_.model, c_.odd);
    Mat<float> slot_w(p_.slot_w[me_], 1, c_.odd);
    CombineArgs args{.y_CD = at(y), .reduction = c_.reduction, .out_TD = {}};
    if (c_.weights) args.slot_w = vector_at(slot_w);
    with_addend("out", e_.out[me_], args, &CombineArgs::out_TD, combine);
  }

  void run_combine_backward() {
    Mat<T> g(p_.g[me_], c_.model, c_.odd), gy(p_.rows[me_], c_.model, c_.odd);
    Mat<T> y(p_.y[me_], c_.model, c_.odd);
    Mat<float> slot_w(p_.slot_w[me_], 1, c_.odd), g_slot_w(p_.rows[me_], 1, c_.odd);
    CombineBackwardArgs args{.g_TD = at(g), .gy_CD = at(gy)};
    if (c_.weights) {
      args.slot_w = vector_at(slot_w);
      args.y_CD = at(y);
      args.g_slot_w = vector_at(g_slot_w);
    }
    combine_backward(group_, plan_, args, place_.stream);
    place_.back();
    gy.expect(e_.gy[me_], c_.weights, "gy");
    g_slot_w.expect(e_.g_slot_w[me_], true, "g_slot_w");
  }

  void run_dispatch_backward() {
    Mat<T> g_rows(p_.y[me_], c_.model, c_.odd);
    Mat<float> g_slot_w(p_.slot_w[me_], 1, c_.odd), gw(plan_.tokens, c_.topk, c_.odd);
    DispatchBackwardArgs args{.g_rows_CD = at(g_rows), .reduction = c_.reduction, .gx_TD = {}};
    if (c_.weights) {
      args.g_slot_w = vector_at(g_slot_w);
      args.gw_TK = at(gw);
    }
    with_addend("gx", e_.gx[me_], args, &DispatchBackwardArgs::gx_TD, dispatch_backward);
    if (c_.weights) gw.expect(e_.gw[me_], false, "gw");
  }

  void check_overflow() {
    const auto& info = p_.plan.rank[me_].info;
    const bool over = info[kInfoGroupOverflow] == 1;
    const std::string error = error_of([&] { group_.check(plan_.epoch); });
    const bool expected = over && c_.overflow == OverflowPolicy::kError;
    EXPECT_EQ(error != "no error", expected) << error;
    EXPECT_EQ(error_of([&] { group_.check(plan_.epoch); }), "no error");
    Tensor report(DType::kInt64, {3});
    group_.take_report(place_(report, report), place_.stream);
    place_.back();
    const bool reported = over && c_.overflow == OverflowPolicy::kReport;
    EXPECT_EQ(report.data<int64_t>()[0], reported);
    EXPECT_EQ(report.data<int64_t>()[1], reported ? info[kInfoGroupRequired] : 0);
    EXPECT_EQ(report.data<int64_t>()[2], reported ? info[kInfoGroupDropped] : 0);
  }

  Place place_;
  const Problem<T>& p_;
  const Case& c_;
  const Expected<T, Out>& e_;
  const int me_;
  std::function<void()> operands_;  // makes operands direct, where they are to be
  EpGroup group_;
  std::optional<PlanMemory> memory_;
  EpPlan plan_;
};

template <class Transport, class T, class Out>
void run_case(const Case& c, int seed) {
  const Problem<T> problem(c, seed);
  const Expected<T, Out> expected(problem);
  Transport::run(c.ranks, [&](comm::Communicator& world) {
    SCOPED_TRACE(text("rank {} of case {}: {}", world.rank(), seed, c.describe()));
    set_thread_budget(c.threads);
    RankRun<T, Out>(world, problem, expected, Transport::kTransport).run();
  });
}

template <class Transport, class T>
void run_case_of(const Case& c, int seed) {
  c.out_fp32 ? run_case<Transport, T, float>(c, seed) : run_case<Transport, T, T>(c, seed);
}

// The cases that Transport can run; every `stride`-th of them, up to the first failure.
template <class Transport>
void run_cases(int first_seed, int stride = 1) {
  std::vector<Case> cases = all_cases();
  EXPECT_LE(cases.size(), 400u);
  std::erase_if(cases, [](const Case& c) { return !Transport::has(c.ranks); });
  for (size_t i = 0; i < cases.size() && !testing::Test::HasFailure(); i += stride) {
    Case& c = cases[i];
    shrink(c);
    const int seed = first_seed + static_cast<int>(i);
    if (c.dtype == DType::kBFloat16) run_case_of<Transport, bf16>(c, seed);
    if (c.dtype == DType::kFloat16) run_case_of<Transport, fp16>(c, seed);
    if (c.dtype == DType::kFloat32) run_case_of<Transport, float>(c, seed);
  }
}

}  // namespace moiety::moe::conformance
