// Random problems for differential tests of every device: for MOIETY_FUZZ_SECONDS (2 if not set),
// from MOIETY_FUZZ_SEED on. A failure names the seed of its problem.
#pragma once

#include <chrono>
#include <cstdlib>
#include <random>
#include <vector>

#include "moiety/base/parallel.h"
#include "moiety/quant/quantize/quantize_job.h"
#include "tests/quant/grouped_cases.h"
#include "tests/quant/partial_cast_cases.h"

namespace moiety::quant {

class FuzzCases {
 public:
  struct TensorCase {
    SpecCase spec;
    Shape shape;
    Input x;
    Directions wanted;
    QuantizeOptions options;
  };
  struct GroupCase {
    SpecCase spec;
    Problem problem;
    Tensor x;
    Directions wanted;
  };

  void seed(int64_t s) { random_.seed(static_cast<uint64_t>(s)); }
  int64_t up_to(int64_t n) { return std::uniform_int_distribution<int64_t>(0, n)(random_); }
  bool coin() { return up_to(1) == 1; }
  DType any_dtype() { return coin() ? DType::kBFloat16 : DType::kFloat32; }

  TensorCase tensor() {
    const SpecCase c = one_of(specs_);
    const int64_t most = up_to(9) == 0 ? 700 : 150;
    const Shape shape{up_to(most), up_to(most)};
    Input x(any_dtype(), shape, any_data(), up_to(2) * up_to(5), static_cast<uint32_t>(random_()));
    const Directions wanted = one_of(directions_of(c.spec));
    QuantizeOptions options = test_options();
    if (coin()) {
      options.row0 = 16 * up_to(50);
      options.col0 = 16 * up_to(50);
      options.full_rows = options.row0 + shape.rows + up_to(100);
      options.full_cols = options.col0 + shape.cols + up_to(100);
    }
    return {c, shape, std::move(x), wanted, options};
  }

  // Groups, also with impossible begins and counts.
  GroupCase groups() {
    SpecCase c = one_of(specs_);
    while (is_tile(c.spec.format)) c = one_of(specs_);
    Routing routing{"", {}, up_to(3), up_to(50)};
    for (int64_t e = up_to(40); e > 0; --e) routing.counts.push_back(coin() ? up_to(150) : 0);
    Problem p(routing);
    if (up_to(3) == 0 && p.experts > 0) {
      p.begin.data<int64_t>()[up_to(p.experts)] = up_to(p.capacity) - 5;
      p.count.data<int64_t>()[up_to(p.experts - 1)] = up_to(300) - 20;
    }
    Tensor x(any_dtype(), {p.capacity, kCols});
    fill(x, any_data(), static_cast<uint32_t>(random_()));
    const Directions wanted = one_of(directions_of(c.spec));
    return {c, std::move(p), std::move(x), wanted};
  }

 private:
  template <class T>
  const T& one_of(const std::vector<T>& all) {
    return all[static_cast<size_t>(up_to(static_cast<int64_t>(all.size()) - 1))];
  }
  Data any_data() { return kAllData[up_to(std::size(kAllData) - 1)]; }

  std::mt19937_64 random_;
  const std::vector<SpecCase> specs_ = spec_cases();
};

// Problem after problem, until one fails or the time is over: runs.tensor(), runs.groups() or
// runs.partial(seed).
template <class Runs>
void for_fuzz_seconds(FuzzCases& cases, Runs& runs) {
  const auto setting = [](const char* name, int64_t otherwise) {
    const char* value = std::getenv(name);
    return value ? std::strtoll(value, nullptr, 10) : otherwise;
  };
  const auto end =
      std::chrono::steady_clock::now() + std::chrono::seconds(setting("MOIETY_FUZZ_SECONDS", 2));
  const int64_t first = setting("MOIETY_FUZZ_SEED", 1);
  int64_t seed = first;
  const auto run = [&] {
    if (seed % 4 == 0) {
      runs.groups();
    } else if (seed % 4 == 1) {
      runs.partial(seed);
    } else {
      runs.tensor();
    }
  };
  for (; std::chrono::steady_clock::now() < end; ++seed) {
    SCOPED_TRACE(text("MOIETY_FUZZ_SEED={}", seed));
    cases.seed(seed);
    const ThreadBudget threads(1 + static_cast<int>(cases.up_to(2)));
    ASSERT_NO_FATAL_FAILURE(run());
  }
  testing::Test::RecordProperty("problems", static_cast<int>(seed - first));
}

}  // namespace moiety::quant
