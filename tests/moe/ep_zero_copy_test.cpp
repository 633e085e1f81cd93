// Rows that peers reach where they lie (EpOptions::zero_copy): every subset of ranks, buffers that
// come and go, and an owner that waits for those that read its rows. The conformance suites
// (ep_conformance.h, ep_quantized.h) have direct ranks too.
#include <chrono>
#include <thread>

#include "tests/moe/ep_batch.h"
#include "tests/moe/ep_conformance.h"

namespace moiety::moe {
namespace {

constexpr int kRanks = 3;

conformance::Case case_of(int direct, bool weights, DType dtype) {
  conformance::Case c{};
  c.ranks = kRanks;
  c.topk = 3;
  c.experts = 7;
  c.depth = 1 + direct % 2;
  c.chunk_rows = 4;
  c.threads = 1 + direct % 2;
  c.direct = direct;
  c.tokens = 40;
  c.tokens_pattern = 1;
  c.model = 33;
  c.alignment = 4;
  c.dtype = dtype;
  c.routing = direct % 3 == 0 ? Routing::kDuplicates : Routing::kSomeMasked;
  c.values = conformance::Values::kRandom;
  c.capacity = conformance::Capacity::kByRank;
  c.overflow = OverflowPolicy::kDrop;
  c.reduction = Reduction::kToken;
  c.weights = weights;
  return c;
}

TEST(ZeroCopy, AnySubsetOfRanksMayBeDirect) {
  for (int direct = 0; direct < 1 << kRanks; ++direct) {
    for (const bool weights : {false, true}) {
      conformance::run_case_of<Threads, bf16>(case_of(direct, weights, DType::kBFloat16), direct);
      conformance::run_case_of<Threads, float>(case_of(direct, weights, DType::kFloat32), direct);
    }
  }
}

EpOptions automatic(std::function<void()> before_store = {}) {
  return {.name = "moe", .zero_copy = ZeroCopy::kAuto, .before_store = std::move(before_store)};
}

// Homes are late with reading; the owner overwrites its rows as soon as its operation has ended.
TEST(ZeroCopy, AnOwnerEndsAfterThoseThatReadItsRows) {
  const ExpertMap map(4, 2);
  constexpr int64_t kTokens = 8, kModel = 16;
  const EpLimits limits{.tokens = kTokens,
                        .model = kModel,
                        .topk = 2,
                        .widest = PayloadFormat::kFP32,
                        .token_order = true};
  Threads::run(2, [&](comm::Communicator& world) {
    const int me = world.rank();
    bool slow = false;
    EpGroup group = EpGroup::create(world, map, limits, automatic([&] {
                                      if (slow && me == 0)
                                        std::this_thread::sleep_for(std::chrono::milliseconds(2));
                                    }));
    std::vector<int64_t> idx;
    for (int64_t t = 0; t < kTokens; ++t) idx.insert(idx.end(), {t % 4, (t + 1) % 4});
    Mat<int64_t> routing(idx, 2);
    const PrepareArgs args{.idx_TK = routing.view(), .capacity = 2 * 2 * kTokens};
    const PlanMemory memory(map, limits, args);
    comm::SymmetricBuffer buffer =
        comm::SymmetricBuffer::create(world, "y", args.capacity * kModel * 4);
    group.attach(buffer);
    const TensorView y(buffer.local(), DType::kFloat32, {args.capacity, kModel});
    Mat<float> out(kTokens, kModel);
    const EpPlan plan = prepare(group, args, memory.view(), {});
    slow = true;
    for (int i = 0; i < (kSanitized ? 3 : 20); ++i) {
      const auto value = static_cast<float>(i + 1);
      std::fill_n(y.data<float>(), y.numel(), value);
      combine(group, plan, {.y_CD = y, .reduction = Reduction::kToken, .out_TD = out.view()}, {});
      std::fill_n(y.data<float>(), y.numel(), NAN);
      out.expect(std::vector<float>(kTokens * kModel, 2 * value), false, "out");
    }
    group.close();
    buffer.close();
  });
}

// Whether nothing was stored into a rank's regions since they were poisoned.
bool regions_are_untouched(const EpGroup& group) {
  const MappedExchange& e = mapped(group);
  const std::byte* const begin = e.memory().local() + e.layout().regions;
  return std::all_of(begin, begin + e.bytes().regions,
                     [](std::byte byte) { return byte == std::byte{0xFF}; });
}

// Rows of direct ranks take no way through the regions, those of others do.
TEST(ZeroCopy, RowsOfDirectRanksLeaveTheRegionsAlone) {
  const ExpertMap map(5, kRanks);
  const int64_t model = 20;
  const Batch batch(map, {9, 7, 12}, 2, 1, model, 3, Routing::kRandom);
  const EpLimits limits{.tokens = 12, .model = model, .topk = 2, .token_order = true};
  Threads::run(kRanks, [&](comm::Communicator& world) {
    const int me = world.rank();
    EpGroup group = EpGroup::create(world, map, limits, automatic());
    const int64_t most = *std::max_element(batch.capacity.begin(), batch.capacity.end());
    comm::SymmetricBuffer buffer = comm::SymmetricBuffer::create(world, "rows", 2 * model * most);
    group.attach(buffer);
    BatchRun run(batch, me);
    run.prepare_plan(group);
    const auto rows_of = [&](bool direct) {
      static thread_local std::vector<std::byte> own;
      own.resize(buffer.bytes());
      return TensorView(direct ? buffer.local() : own.data(), DType::kBFloat16,
                        {batch.capacity[me], model});
    };
    Mat<bf16> x(batch.x[me], model), out(batch.plan.in.tokens(me), model);
    for (const bool odd_alone : {false, true}) {
      const bool direct = !odd_alone || me % 2 == 1;
      const TensorView rows = rows_of(direct);
      poison_memory(group);
      world.barrier();
      dispatch(group, run.plan, {.x_TD = x.view(), .rows_CD = rows}, {});
      world.barrier();
      EXPECT_EQ(regions_are_untouched(group), direct);
      world.barrier();
      poison_memory(group);
      world.barrier();
      combine(group, run.plan, {.y_CD = rows, .reduction = Reduction::kToken, .out_TD = out.view()},
              {});
      world.barrier();
      // Rank 1 alone is direct; all others store for each other.
      EXPECT_EQ(regions_are_untouched(group), !odd_alone);
    }
    group.close();
    buffer.close();
  });
}

TEST(ZeroCopy, BuffersComeAndGo) {
  const ExpertMap map(5, kRanks);
  const Batch batch(map, {9, 0, 12}, 2, 1, 20, 3);
  const EpLimits limits{.tokens = 12, .model = 20, .topk = 2};
  Threads::run(kRanks, [&](comm::Communicator& world) {
    EpGroup group = EpGroup::create(world, map, limits, automatic());
    const int me = world.rank();
    const int64_t bytes = 2 * 20 * *std::max_element(batch.capacity.begin(), batch.capacity.end());
    const auto check_rows = [&](comm::SymmetricBuffer* buffer, const char* what) {
      BatchRun run(batch, me);
      run.prepare_plan(group);
      Mat<bf16> x(batch.x[me], 20), rows(batch.capacity[me], 20);
      TensorView to = rows.view();
      if (buffer) {
        to = {buffer->local(), to.dtype(), to.sizes(), to.strides()};
        std::memset(buffer->local(), 0xFF, buffer->bytes());
        world.barrier();
      }
      dispatch(group, run.plan, {.x_TD = x.view(), .rows_CD = to}, {});
      if (buffer) std::memcpy(rows.view().raw(), to.raw(), to.bytes());
      rows.expect(batch.rows[me], false, what);
    };
    comm::SymmetricBuffer first = comm::SymmetricBuffer::create(world, "first", bytes),
                          second = comm::SymmetricBuffer::create(world, "second", bytes);
    check_rows(&first, "not attached");
    group.attach(first);
    group.attach(second);
    check_rows(&second, "second");
    group.detach(first);
    first.close();
    check_rows(&second, "second alone");
    EpLimits more = limits;
    more.tokens = 40;
    group.reserve(more);
    check_rows(&second, "after reserve");
    check_rows(nullptr, "elsewhere");
    group.detach(second);
    check_rows(&second, "detached");
    group.close();
    EXPECT_NE(error_of([&] { group.attach(second); }), "no error");
  });
}

TEST(ZeroCopy, AGroupMayHaveNoMemoryForRowsOnTheirWay) {
  const ExpertMap map(5, kRanks);
  const int64_t model = 20;
  const Batch batch(map, {9, 7, 12}, 2, 1, model, 3, Routing::kRandom);
  const EpLimits limits{
      .tokens = 12, .model = model, .topk = 2, .token_order = true, .staged = false};
  EXPECT_EQ(EpGroup::bytes(map, limits, {}).regions, 2 * 2 * 12 * 128);  // weights alone
  Threads::run(kRanks, [&](comm::Communicator& world) {
    const int me = world.rank();
    EpGroup group = EpGroup::create(world, map, limits, automatic());
    const int64_t most = *std::max_element(batch.capacity.begin(), batch.capacity.end());
    comm::SymmetricBuffer buffer = comm::SymmetricBuffer::create(world, "rows", 2 * model * most);
    group.attach(buffer);
    BatchRun run(batch, me);
    run.prepare_plan(group);
    const auto why = [](const char* operation) {
      return text(
          "ep {}, group \"moe\": peers cannot reach these rows, and no memory is reserved for rows "
          "on their way (EpLimits staged)",
          operation);
    };
    EXPECT_EQ(error_of([&] { run.dispatch_rows(group); }), why("dispatch"));
    EXPECT_EQ(error_of([&] { run.combine_rows(group); }), why("combine"));
    EXPECT_EQ(error_of([&] { run.backward(group); }), why("combine_backward"));

    const TensorView rows(buffer.local(), DType::kBFloat16, {batch.capacity[me], model});
    std::memset(buffer.local(), 0xFF, buffer.bytes());
    world.barrier();
    Mat<bf16> x(batch.x[me], model), received(batch.capacity[me], model);
    const int64_t tokens = batch.plan.in.tokens(me);
    Mat<float> w(std::vector<float>(tokens * 2, 0.5f), 2), slot_w(batch.capacity[me], 1);
    dispatch(group, run.plan,
             {.x_TD = x.view(), .w_TK = w.view(), .rows_CD = rows, .slot_w = slot_w.vector()}, {});
    std::memcpy(received.view().raw(), rows.raw(), rows.bytes());
    received.expect(batch.rows[me], false, "rows");
    Mat<bf16> out(tokens, model);
    combine(group, run.plan, {.y_CD = rows, .reduction = Reduction::kToken, .out_TD = out.view()},
            {});
    EpLimits staged = limits;
    staged.staged = true;
    group.reserve(staged);
    run.forward(group);
    run.backward(group);
    run.expect_all("staged");
    group.close();
    buffer.close();
  });
}

TEST(ZeroCopy, IsAskedForByTheOptions) {
  Threads::run(2, [](comm::Communicator& world) {
    const EpLimits limits{.tokens = 1, .model = 1, .topk = 1};
    EpGroup group = EpGroup::create(world, ExpertMap(2, 2), limits, {.name = "moe"});
    const comm::SymmetricBuffer buffer = comm::SymmetricBuffer::create(world, "rows", 64);
    EXPECT_EQ(error_of([&] { group.attach(buffer); }),
              "ep attach, group \"moe\": zero_copy is kOff");
    group.close();
  });
}

}  // namespace
}  // namespace moiety::moe
