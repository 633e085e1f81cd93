// The contract of every transport, as one typed suite. A backend is a type with
//   static void run(int ranks, Seconds deadline, const std::function<void(Communicator&)>& body);
// which runs the body on that many ranks and rethrows the failure of the first rank that fails. Its
// tensors are where its Place says: HostPlace here, GpuPlace in tests/comm_gpu/gpu_place.h.
#pragma once

#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <numeric>
#include <type_traits>
#include <vector>

#include <gtest/gtest.h>

#include "moiety/base/buffer.h"
#include "moiety/comm/agree.h"
#include "moiety/comm/communicator.h"
#include "moiety/formats/bf16.h"
#include "moiety/formats/fp16.h"
#include "tests/support/bits.h"

namespace moiety::comm::conformance {

inline constexpr Seconds kPatience{60};

inline uint64_t mix(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

// Element i of what rank r contributes to case `salt`: floats of different exponents, so that the
// order of a sum shows; integers of the whole range, so that sums wrap around.
template <class T>
T value(int r, int64_t i, uint64_t salt = 0) {
  const uint64_t h = mix(salt * 1000003 + uint64_t(r) * 0x9E3779B97F4A7C15ull + uint64_t(i) + 1);
  if constexpr (std::is_integral_v<T>) {
    return static_cast<T>(h);
  } else {
    const double mantissa = static_cast<double>(h >> 12) * 0x1p-52 + 0.5;
    return static_cast<T>(
        static_cast<float>(std::ldexp(h & 1 ? mantissa : -mantissa, int(h >> 1 & 7))));
  }
}

template <class T>
std::vector<T> values(int r, int64_t n, uint64_t salt = 0) {
  std::vector<T> out(n);
  for (int64_t i = 0; i < n; ++i) out[i] = value<T>(r, i, salt);
  return out;
}

// The definition, element by element.
template <class T>
T reduced(int ranks, int64_t i, ReduceOp op, uint64_t salt = 0) {
  using Wide = std::conditional_t<std::is_integral_v<T>, __int128,
                                  std::conditional_t<std::is_same_v<T, double>, double, float>>;
  Wide out = static_cast<Wide>(value<T>(0, i, salt));
  for (int r = 1; r < ranks; ++r) {
    const Wide x = static_cast<Wide>(value<T>(r, i, salt));
    if (op == ReduceOp::kSum) out = out + x;
    if (op == ReduceOp::kMax) out = x > out ? x : out;
    if (op == ReduceOp::kMin) out = x < out ? x : out;
  }
  return static_cast<T>(out);
}

template <class T>
TensorView view(std::vector<T>& x) {
  return TensorView(x.data(), dtype_of<T>, {static_cast<int64_t>(x.size())});
}

struct HostPlace {
  static Stream stream() { return {}; }
  // Makes what the group's operations need; `world` holds up all ranks until they have it.
  static void prepare(Communicator&, Communicator& /*world*/) {}
  // Called where a check begins, with the same arrays to come on all ranks.
  static void begin(Communicator&) {}

  // A tensor of one dimension. `alike`: all ranks make one of this size here.
  template <class T>
  class Array {
   public:
    explicit Array(std::vector<T> x, bool /*alike*/ = true) : x_(std::move(x)) {}
    TensorView view() { return conformance::view(x_); }
    std::vector<T> get() const { return x_; }

   private:
    std::vector<T> x_;
  };
};

template <class T, class Place = HostPlace>
void check_reductions(Communicator& comm, int64_t n) {
  using Array = typename Place::template Array<T>;
  const int ranks = comm.size();
  for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMax, ReduceOp::kMin}) {
    SCOPED_TRACE(text("{} of {} ranks, {}[{}], op {}", comm.rank(), ranks, name(dtype_of<T>), n,
                      static_cast<int>(op)));
    Place::begin(comm);
    Array x(values<T>(comm.rank(), n));
    std::vector<T> expected(n);
    for (int64_t i = 0; i < n; ++i) expected[i] = reduced<T>(ranks, i, op);
    comm.all_reduce(x.view(), op, Place::stream()).wait();
    EXPECT_TRUE(same_bits(x.get(), expected));

    Array send(values<T>(comm.rank(), ranks * n)), part{std::vector<T>(n)};
    for (int64_t i = 0; i < n; ++i) expected[i] = reduced<T>(ranks, comm.rank() * n + i, op);
    comm.reduce_scatter(send.view(), part.view(), op, Place::stream()).wait();
    EXPECT_TRUE(same_bits(part.get(), expected));
    const TensorView own = send.view().slice(0, comm.rank() * n, (comm.rank() + 1) * n);
    comm.reduce_scatter(send.view(), own, op, Place::stream()).wait();
    const std::vector<T> all = send.get();
    const auto first = all.begin() + comm.rank() * n;
    EXPECT_TRUE(same_bits(std::vector<T>(first, first + n), expected));
  }
}

template <class T, class Place = HostPlace>
void check_moves(Communicator& comm, int64_t n) {
  using Array = typename Place::template Array<T>;
  const int ranks = comm.size();
  SCOPED_TRACE(text("{} of {} ranks, {}[{}]", comm.rank(), ranks, name(dtype_of<T>), n));
  Place::begin(comm);
  const std::vector<T> mine = values<T>(comm.rank(), n);
  std::vector<T> expected;
  for (int r = 0; r < ranks; ++r) {
    for (int64_t i = 0; i < n; ++i) expected.push_back(value<T>(r, i));
  }
  Array send(mine), recv{std::vector<T>(ranks * n)};
  comm.all_gather(send.view(), recv.view(), Place::stream()).wait();
  EXPECT_TRUE(same_bits(recv.get(), expected));
  std::vector<T> room(ranks * n);
  std::copy(mine.begin(), mine.end(), room.begin() + comm.rank() * n);
  Array in_place(room);
  const TensorView own = in_place.view().slice(0, comm.rank() * n, (comm.rank() + 1) * n);
  comm.all_gather(own, in_place.view(), Place::stream()).wait();
  EXPECT_TRUE(same_bits(in_place.get(), expected));

  for (int root = 0; root < ranks; ++root) {
    Array x(values<T>(comm.rank(), n, 7));
    comm.broadcast(x.view(), root, Place::stream()).wait();
    EXPECT_TRUE(same_bits(x.get(), values<T>(root, n, 7)));
  }
}

// Rank a sends (3a + b) % 4 rows to rank b, none to itself if a is odd; rows of `width` elements
// name their sender, receiver and place.
inline int64_t rows_between(int a, int b) { return a == b && a % 2 == 1 ? 0 : (3 * a + b) % 4; }

template <class T, class Place = HostPlace>
void check_all_to_all(Communicator& comm, int64_t width) {
  using Array = typename Place::template Array<T>;
  const int ranks = comm.size(), me = comm.rank();
  SCOPED_TRACE(text("{} of {} ranks, {}, width {}", me, ranks, name(dtype_of<T>), width));
  Place::begin(comm);
  const auto row_value = [](int from, int to, int64_t i) {
    return value<T>(from, i, 100 + uint64_t(to));
  };
  std::vector<int64_t> send_counts, recv_counts;
  std::vector<T> sent, expected;
  for (int r = 0; r < ranks; ++r) {
    send_counts.push_back(rows_between(me, r));
    recv_counts.push_back(rows_between(r, me));
    for (int64_t i = 0; i < rows_between(me, r) * width; ++i) sent.push_back(row_value(me, r, i));
    for (int64_t i = 0; i < rows_between(r, me) * width; ++i) {
      expected.push_back(row_value(r, me, i));
    }
  }
  Array send(sent, false), recv(std::vector<T>(expected.size()), false);
  const auto rows = [&](Array& x, const std::vector<int64_t>& counts) {
    return x.view().reshape({std::accumulate(counts.begin(), counts.end(), int64_t{0}), width});
  };
  comm.all_to_all(rows(send, send_counts), send_counts, rows(recv, recv_counts), recv_counts,
                  Place::stream())
      .wait();
  EXPECT_TRUE(same_bits(recv.get(), expected));
}

template <class Backend>
struct PlaceOf {
  using Type = HostPlace;
};
template <class Backend>
requires requires { typename Backend::Place; }
struct PlaceOf<Backend> {
  using Type = typename Backend::Place;
};
template <class Backend>
using Place = typename PlaceOf<Backend>::Type;
template <class Backend>
inline constexpr bool kOnHost = std::is_same_v<Place<Backend>, HostPlace>;

template <class Backend>
class Conformance : public ::testing::Test {
 protected:
  void each(const std::function<void(Communicator&)>& body) {
    for (int ranks = 1; ranks <= 4; ++ranks) Backend::run(ranks, kPatience, body);
    if (!kOnHost<Backend>) Backend::run(8, kPatience, body);
  }
};
TYPED_TEST_SUITE_P(Conformance);

TYPED_TEST_P(Conformance, Reductions) {
  this->each([](Communicator& comm) {
    for (const int64_t n : {0, 1, 65, 1000}) {
      check_reductions<double, Place<TypeParam>>(comm, n);
      check_reductions<float, Place<TypeParam>>(comm, n);
      check_reductions<bf16, Place<TypeParam>>(comm, n);
      check_reductions<fp16, Place<TypeParam>>(comm, n);
      check_reductions<int64_t, Place<TypeParam>>(comm, n);
      check_reductions<int32_t, Place<TypeParam>>(comm, n);
    }
    check_reductions<float, Place<TypeParam>>(comm, 70001);  // several tasks and tiles
    check_reductions<bf16, Place<TypeParam>>(comm, 70001);
  });
}

TYPED_TEST_P(Conformance, NanWins) {
  this->each([](Communicator& comm) {
    for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMax, ReduceOp::kMin}) {
      for (int r = 0; r < comm.size(); ++r) {
        Place<TypeParam>::begin(comm);
        typename Place<TypeParam>::template Array<float> y(
            {1.0f, comm.rank() == r ? std::nanf("") : 2.0f});
        comm.all_reduce(y.view(), op, Place<TypeParam>::stream()).wait();
        const std::vector<float> x = y.get();
        EXPECT_EQ(x[0], op == ReduceOp::kSum ? float(comm.size()) : 1.0f);
        EXPECT_TRUE(std::isnan(x[1]));
      }
    }
  });
}

TYPED_TEST_P(Conformance, Moves) {
  this->each([](Communicator& comm) {
    for (const int64_t n : {0, 1, 5, 129}) {
      check_moves<double, Place<TypeParam>>(comm, n);
      check_moves<float, Place<TypeParam>>(comm, n);
      check_moves<bf16, Place<TypeParam>>(comm, n);
      check_moves<fp16, Place<TypeParam>>(comm, n);
      check_moves<int64_t, Place<TypeParam>>(comm, n);
      check_moves<int32_t, Place<TypeParam>>(comm, n);
      check_moves<uint8_t, Place<TypeParam>>(comm, n);
    }
    check_moves<float, Place<TypeParam>>(comm, 300001);
    for (const int64_t width : {0, 1, 7, 64}) {
      check_all_to_all<float, Place<TypeParam>>(comm, width);
      check_all_to_all<bf16, Place<TypeParam>>(comm, width);
      check_all_to_all<uint8_t, Place<TypeParam>>(comm, width);
    }
    std::vector<int64_t> none(comm.size());  // nobody sends anything
    const Stream stream = Place<TypeParam>::stream();
    const TensorView empty(nullptr, DType::kFloat32, {0, 8}, stream.device());
    comm.all_to_all(empty, none, empty, none, stream).wait();
  });
}

TYPED_TEST_P(Conformance, Barriers) {
  this->each([](Communicator& comm) {
    for (int i = 0; i < 50; ++i) comm.barrier();
  });
}

TYPED_TEST_P(Conformance, SubGroups) {
  this->each([](Communicator& comm) {
    const int ranks = comm.size(), me = comm.rank();
    // Odd and even ranks, in descending order.
    const auto half = comm.split(me % 2, -me, "half");
    EXPECT_EQ(half->name(), "half");
    EXPECT_EQ(half->size(), (ranks + 1 - me % 2) / 2);
    EXPECT_EQ(half->rank(), half->size() - 1 - me / 2);
    std::vector<int32_t> mine{me}, members(half->size());
    half->all_gather(view(mine), view(members), Stream()).wait();
    for (int i = 0; i < half->size(); ++i) {
      EXPECT_EQ(members[i], me % 2 + 2 * (half->size() - 1 - i));
    }
    Place<TypeParam>::prepare(*half, comm);
    check_reductions<float, Place<TypeParam>>(*half, 100);
    check_all_to_all<float, Place<TypeParam>>(*half, 3);
    // All but rank 0, made of ranks that just worked in another group; then groups of one.
    const auto rest = comm.split(me == 0 ? -1 : 5, 0, "rest");
    EXPECT_EQ(rest == nullptr, me == 0);
    Place<TypeParam>::prepare(rest ? *rest : comm, comm);
    if (rest) check_reductions<bf16, Place<TypeParam>>(*rest, 77);
    const auto alone = half->split(half->rank(), 0, "alone");
    EXPECT_EQ(alone->size(), 1);
    check_moves<float, Place<TypeParam>>(*alone, 10);
    EXPECT_EQ(half->bootstrap().all_gather("x").size(), size_t(half->size()));
  });
}

TYPED_TEST_P(Conformance, TicketsInAnyOrder) {
  this->each([](Communicator& comm) {
    const int64_t n = 1000;
    const int ranks = comm.size();
    std::vector<float> a = values<float>(comm.rank(), ranks * n), part(n), all(ranks * n), b(n);
    b = values<float>(comm.rank(), n, 3);
    // The second operation takes what the first gives.
    Ticket first = comm.reduce_scatter(view(a), view(part), ReduceOp::kSum, Stream());
    Ticket second = comm.all_gather(view(part), view(all), Stream());
    Ticket third = comm.all_reduce(view(b), ReduceOp::kMax, Stream());
    third.wait();
    first.wait();
    second.wait();
    second.wait();  // complete already
    for (int64_t i = 0; i < ranks * n; ++i) {
      ASSERT_EQ(all[i], reduced<float>(ranks, i, ReduceOp::kSum));
    }
    for (int64_t i = 0; i < n; ++i) ASSERT_EQ(b[i], reduced<float>(ranks, i, ReduceOp::kMax, 3));
    {
      std::vector<float> dropped = values<float>(comm.rank(), n);
      Ticket ticket = comm.all_reduce(view(dropped), ReduceOp::kSum, Stream());
      ticket = comm.all_reduce(view(b), ReduceOp::kMin, Stream());  // waits for the former
      EXPECT_EQ(dropped[5], reduced<float>(ranks, 5, ReduceOp::kSum));
    }
    comm.barrier();
  });
}

TYPED_TEST_P(Conformance, RanksWaitForDifferentCommunicators) {
  this->each([](Communicator& comm) {
    const auto other = comm.split(0, 0, "other");
    std::vector<float> a = values<float>(comm.rank(), 500, 1), b = values<float>(comm.rank(), 9, 2);
    Ticket in_world = comm.all_reduce(view(a), ReduceOp::kSum, Stream());
    Ticket in_other = other->all_reduce(view(b), ReduceOp::kSum, Stream());
    if (comm.rank() % 2 == 0) in_world.wait();
    in_other.wait();
    in_world.wait();
    EXPECT_EQ(a[499], reduced<float>(comm.size(), 499, ReduceOp::kSum, 1));
    EXPECT_EQ(b[8], reduced<float>(comm.size(), 8, ReduceOp::kSum, 2));
  });
}

TYPED_TEST_P(Conformance, InputsOfADeferredStream) {
  this->each([](Communicator& comm) {
    const Stream stream = Stream::deferred();
    std::vector<float> x(100);
    stream.run([&] {
      for (int64_t i = 0; i < 100; ++i) x[i] = value<float>(comm.rank(), i);
    });
    Ticket ticket = comm.all_reduce(view(x), ReduceOp::kSum, stream);
    EXPECT_EQ(x[0], 0);
    ticket.wait();
    EXPECT_EQ(x[99], reduced<float>(comm.size(), 99, ReduceOp::kSum));
  });
}

TYPED_TEST_P(Conformance, BootstrapGathersStrings) {
  this->each([](Communicator& comm) {
    Bootstrap& bootstrap = comm.bootstrap();
    EXPECT_EQ(bootstrap.rank(), comm.rank());
    EXPECT_EQ(bootstrap.size(), comm.size());
    for (const int64_t scale : {0, 1, 1000}) {
      const auto all = bootstrap.all_gather(std::string(comm.rank() * scale, 'a' + comm.rank()));
      ASSERT_EQ(all.size(), size_t(comm.size()));
      for (int r = 0; r < comm.size(); ++r) EXPECT_EQ(all[r], std::string(r * scale, 'a' + r));
    }
    EXPECT_FALSE(bootstrap.aborted());
    EXPECT_THROW(bootstrap.all_gather(std::string((64 << 10) + 1, 'x')), Error);
    agree(bootstrap, "");
  });
}

REGISTER_TYPED_TEST_SUITE_P(Conformance, Reductions, NanWins, Moves, Barriers, SubGroups,
                            TicketsInAnyOrder, RanksWaitForDifferentCommunicators,
                            InputsOfADeferredStream, BootstrapGathersStrings);

}  // namespace moiety::comm::conformance
