// Expert rows to tokens among GPU ranks where own parts were found ahead (PushSums): what is left is
// to add up the parts of all ranks.
#pragma once

#include "moiety/moe/peers/sum_steps.h"

namespace moiety::moe::peers {

// Adds up the parts of a token at home: those that came, and its own one, which lies in `out`. All are
// of type Out.
template <class T, class Out>
struct AddParts : HomeSums<T, Out> {
  static constexpr int kThreads = 256, kResident = 4;

  template <class Team>
  MOIETY_STEP void operator()(Team& team) const {
    const Control& c = *control;
    if (failed(team, c)) return;
    const Near near{c.rank, c.ranks, c.record(c.rank, c.rank == 0 ? 1 : 0, 0, a.record),
                    c.rows_max * a.record};
    with_parts<T>(a, [&](const auto& sums) { add(team, c, near, sums); });
  }

 private:
  using Home = HomeSums<T, Out>;
  using Home::a, Home::plan, Home::control, Home::put, Home::finish;

  // What a thread needs of a control, and keeps: behind a store it would read all of it anew. The
  // first peer's records, and from there to the next one's.
  struct Near {
    int rank, ranks;
    const std::byte* records;
    int64_t of_peer;
  };

  template <class Team, class Sums>
  MOIETY_STEP void add(Team& team, const Control& c, const Near& near, const Sums& sums) const {
    constexpr int kPieces = Sums::kVectors && sizeof(Out) == 2 ? 2 : 1;
    this->for_pieces(team, c, kPieces, [&](auto& warp, int64_t t, int64_t piece) {
      const int32_t* row_R = plan.row_TR + t * near.ranks;
      int parts = 0;
      for (int r = 0; r < near.ranks; ++r) parts += row_R[r] >= 0;
      const bool own = row_R[near.rank] >= 0;
      if (own && parts == 1 && !a.has_addend) return;
      const bool copy = parts == 1 && !own && !a.has_addend;
      warp.lanes([&](int lane) {
        int64_t at[kPieces];
        MOIETY_UNROLL
        for (int q = 0; q < kPieces; ++q) at[q] = ((piece * kPieces + q) * 32 + lane) * kEight;
        if (copy) {
          copy_part(near, sums, row_R, t, at);
        } else {
          add_parts(near, sums, row_R, t, at);
        }
      });
    });
  }
  MOIETY_STEP const std::byte* part_of(const Near& near, int r, int32_t row) const {
    return near.records + (r < near.rank ? r : r - 1) * near.of_peer + row * a.record;
  }
  template <int n, class Sums>
  MOIETY_STEP void copy_part(const Near& near, const Sums& sums, const int32_t* row_R, int64_t t,
                             const int64_t (&at)[n]) const {
    int r = 0;
    while (row_R[r] < 0) ++r;
    for (int q = 0; q < n; ++q) {
      if (at[q] >= a.model) continue;
      put(sums, t, at[q],
          load_eight<Out>(part_of(near, r, row_R[r]), at[q], a.model, sums.whole()));
    }
  }
  template <int n, class Sums>
  MOIETY_STEP void add_parts(const Near& near, const Sums& sums, const int32_t* row_R, int64_t t,
                             const int64_t (&at)[n]) const {
    constexpr int kTogether = 2;  // ranks whose parts wait for memory together
    EightSum sum[n];
    for (int first = 0; first < near.ranks; first += kTogether) {
      Held<Out> held[kTogether][n];
      const auto for_parts = [&](auto&& use) {
        MOIETY_UNROLL
        for (int k = 0; k < kTogether * n; ++k) {
          const int i = k / n, q = k % n, r = first + i;
          if (r < near.ranks && row_R[r] >= 0 && at[q] < a.model) use(i, q, r);
        }
      };
      for_parts([&](int i, int q, int r) {
        const bool own = r == near.rank;
        const std::byte* const from = own ? a.out + t * a.out_stride : part_of(near, r, row_R[r]);
        held[i][q] = load_eight<Out>(from, at[q], a.model, own ? sums.wide() : sums.whole());
      });
      for_parts([&](int i, int q, int) { sum[q].add(held[i][q]); });
    }
    MOIETY_UNROLL
    for (int q = 0; q < n; ++q) {
      if (at[q] < a.model) finish(sums, t, at[q], sum[q]);
    }
  }
};

}  // namespace moiety::moe::peers
