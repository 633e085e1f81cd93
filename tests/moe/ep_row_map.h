// Rows by a map (make_row_map), which come once each: what runs an operation against CPU ranks, by
// bytes, with everything that is written poisoned first. For any place of tensors (ep_helpers.h).
#pragma once

#include "moiety/moe/slot_maps.h"
#include "tests/moe/ep_helpers.h"

namespace moiety::moe::row_map {

struct Sizes {
  int ranks, topk, experts;
  int64_t tokens, model, capacity, alignment;
  DType dtype;
};
// Enough room, drops, no room, and rows of any length.
inline const Sizes kSizes[] = {{2, 4, 6, 300, 40, 4000, 8, DType::kBFloat16},
                               {3, 2, 7, 129, 7, 150, 1, DType::kBFloat16},
                               {2, 8, 4, 33, 64, 16, 16, DType::kFloat32},
                               {2, 2, 4, 20, 24, 0, 1, DType::kFloat32},
                               {4, 2, 2, 65, 200, 600, 128, DType::kBFloat16}};

// A rank's tensors: the odd ranks have fewer tokens, and the last one has none.
struct Tensors {
  Tensors(const Sizes& z, int rank, bool quantized)
      : map(z.experts, z.ranks),
        limits{
            .tokens = z.tokens, .model = z.model, .topk = z.topk, .widest = PayloadFormat::kFP32},
        tokens(rank > 0 && rank == z.ranks - 1 ? 0 : z.tokens - rank % 2 * 9),
        places(mapped_rows(z.ranks, z.tokens, z.capacity)),
        idx(DType::kInt32, {tokens, z.topk}),
        w(DType::kFloat32, {tokens, z.topk}),
        x(z.dtype, {tokens, z.model}),
        rows(z.dtype, {places, z.model}),
        gy(z.dtype, {places, z.model}),
        slot_w(DType::kFloat32, {z.capacity}),
        source(DType::kInt32, {z.capacity}),
        args{.idx_TK = idx,
             .alignment = z.alignment,
             .capacity = z.capacity,
             .overflow = OverflowPolicy::kDrop},
        memory(DType::kUInt8, {plan_bytes(map, limits, args)}) {
    std::mt19937 random(rank + 10 * z.ranks + quantized);
    for (int64_t i = 0; i < tokens * z.topk; ++i) {
      idx.data<int32_t>()[i] = static_cast<int32_t>(random() % (z.experts + 1)) - 1;
      w.data<float>()[i] = std::normal_distribution<float>()(random);
    }
    for (int64_t i = 0; i < x.view().bytes(); ++i) {
      static_cast<uint8_t*>(x.view().raw())[i] = static_cast<uint8_t>(random());
    }
    for (const Tensor* t : {&rows, &gy, &slot_w, &source, &memory}) {
      if (t->view().bytes() > 0) std::memset(t->view().raw(), 0xFF, size_t(t->view().bytes()));
    }
  }

  template <class Place>
  void run(EpGroup& group, Place& place) {
    const auto at = [&](const Tensor& t) { return place(t, t); };
    PrepareArgs there = args;
    there.idx_TK = at(idx);
    const EpPlan plan = prepare(group, there, at(memory), place.stream);
    const TensorView source_there = at(source);
    make_row_map(plan, source_there, place.stream);
    const TensorView x_there = at(x);
    dispatch(group, plan,
             {.x_TD = x_there,
              .w_TK = at(w),
              .rows_CD = at(rows),
              .slot_w = at(slot_w),
              .source_C = source_there},
             place.stream);
    combine_backward(group, plan, {.g_TD = x_there, .gy_CD = at(gy), .source_C = source_there},
                     place.stream);
    place.back();
    group.check();
  }

  ExpertMap map;
  EpLimits limits;
  int64_t tokens, places;
  Tensor idx, w, x, rows, gy, slot_w, source;
  PrepareArgs args;
  Tensor memory;
};

inline void expect_same(const Tensor& got, const Tensor& expected, const char* what) {
  const size_t bytes = size_t(got.view().bytes());
  EXPECT_TRUE(bytes == 0 || std::memcmp(got.view().raw(), expected.view().raw(), bytes) == 0)
      << what;
}

// Runs the sizes in a group that `enter` makes of the one with these options.
template <class Place, class Enter>
void run_rank(comm::Communicator& world, const Sizes& z, EpOptions options, Place& place,
              Enter&& enter) {
  Tensors expected(z, world.rank(), false), got(z, world.rank(), false);
  EpGroup cpu = EpGroup::create(world, got.map, got.limits, {.name = "cpu"});
  OnHost here;
  expected.run(cpu, here);
  cpu.close();
  EpGroup group = EpGroup::create(world, got.map, got.limits, options);
  enter(group);
  got.run(group, place);
  expect_same(got.source, expected.source, "map");
  expect_same(got.rows, expected.rows, "rows");
  expect_same(got.gy, expected.gy, "gy");
  expect_same(got.slot_w, expected.slot_w, "slot_w");
  group.close();
}

}  // namespace moiety::moe::row_map
