// Parts that the benchmark programs share: options, timing, random operands, rows (bench/README.md)
// and main.
#pragma once

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "moiety/base/buffer.h"
#include "moiety/base/error.h"
#include "moiety/base/graph.h"
#include "moiety/base/parallel.h"
#include "moiety/base/rng.h"
#include "moiety/base/stream.h"
#include "moiety/formats/bf16.h"

namespace moiety::bench {

// ---- options

// Options of the form --name VALUE, or --name alone for a flag; --help prints them all with their
// defaults.
class Options {
 public:
  Options(int argc, char** argv, std::string about) : about_(std::move(about)) {
    arguments_.assign(argv + 1, argv + argc);
  }

  Options& flag(const char* name, bool& value, const char* help) {
    return add({name, "", help, [&value](const std::string&) { value = true; }});
  }
  template <class Int>
  Options& number(const char* name, Int& value, const char* help, Int least = 1) {
    const auto set = [&value, name, least](const std::string& typed) {
      const char* end = typed.data() + typed.size();
      const auto [stop, error] = std::from_chars(typed.data(), end, value);
      MOIETY_CHECK(error == std::errc() && stop == end && value >= least,
                   "{} {} is not a whole number of at least {}", name, typed, least);
    };
    return add({name, value > 0 ? text("N={}", value) : "N", help, set});
  }
  Options& word(const char* name, std::string& value, const char* help) {
    return add({name, value.empty() ? "TEXT" : "TEXT=" + value, help,
                [&value](const std::string& typed) { value = typed; }});
  }
  // An option that is one of some words; empty by default if `value` is.
  Options& choice(const char* name, std::string& value, std::vector<std::string> words,
                  const char* help) {
    std::string list;
    for (const std::string& w : words) list += (list.empty() ? "" : "|") + w;
    const auto set = [&value, name, words, list](const std::string& typed) {
      MOIETY_CHECK(std::find(words.begin(), words.end(), typed) != words.end(), "{} {} is not {}",
                   name, typed, list);
      value = typed;
    };
    return add({name, value.empty() ? list : list + "=" + value, help, set});
  }

  // Parses the arguments; false if help was printed. Throws for unknown options.
  bool parse() const {
    for (size_t i = 0; i < arguments_.size(); ++i) {
      const std::string& typed = arguments_[i];
      if (typed == "--help") {
        print_help();
        return false;
      }
      const auto known = std::find_if(options_.begin(), options_.end(),
                                      [&](const Option& o) { return typed == o.name; });
      MOIETY_CHECK(known != options_.end(), "unknown option {} (--help)", typed);
      const bool takes_value = !known->values.empty();
      MOIETY_CHECK(!takes_value || i + 1 < arguments_.size(), "{} needs a value", typed);
      known->set(takes_value ? arguments_[++i] : std::string());
    }
    return true;
  }

 private:
  struct Option {
    std::string name, values, help;
    std::function<void(const std::string&)> set;
  };
  Options& add(Option option) {
    options_.push_back(std::move(option));
    return *this;
  }
  void print_help() const {
    std::printf("%s\n\n", about_.c_str());
    for (const Option& o : options_) {
      std::printf("  %-34s %s\n", (o.name + " " + o.values).c_str(), o.help.c_str());
    }
  }

  std::string about_;
  std::vector<std::string> arguments_;
  std::vector<Option> options_;
};

// ---- timing

struct Timing {
  double ms = 0;      // the median
  double spread = 0;  // the middle half of the times, over the median
  double least = 0;   // ms
};
inline Timing timing(std::vector<double> ms) {
  std::sort(ms.begin(), ms.end());
  const double median = ms[ms.size() / 2];
  return {median, (ms[ms.size() * 3 / 4] - ms[ms.size() / 4]) / median, ms.front()};
}

// Wall time of one call.
template <class Run>
double milliseconds(Run&& run) {
  const auto start = std::chrono::steady_clock::now();
  run();
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start)
      .count();
}

// The time of run(i), which puts work on `stream`, for i = 0, 1, ... over at least `seconds` after
// the first. Calls that are too short for the clock are timed in batches; on a GPU batches are
// graphs that are replayed, so that the host's launches do not count.
template <class Run>
Timing measure(Run&& run, const Stream& stream = Stream(), double seconds = 0.3) {
  const bool gpu = stream.device().type == DeviceType::kCuda;
  int64_t i = 0;
  Event begin = Event::timed(), end = Event::timed();
  const auto ms_of = [&](auto&& work) {
    begin.record(stream);
    work();
    end.record(stream);
    stream.synchronize();
    return elapsed_ms(begin, end);
  };
  const double first = std::max(ms_of([&] { run(i++); }), 1e-6);
  const auto batch =
      static_cast<int64_t>(gpu ? std::clamp(2.0 / first, 8.0, 256.0) : std::max(1.0, 0.05 / first));
  const auto calls = [&] {
    for (int64_t n = 0; n < batch; ++n) run(i++);
  };
  Graph graph;
  if (gpu) graph = Graph(stream, calls);
  const auto replay = [&] { gpu ? graph.launch(stream) : calls(); };
  if (gpu) ms_of(replay);  // the first launch of a graph uploads it
  std::vector<double> times;
  for (double total = 0; times.size() < 5 || total < 1e3 * seconds;) {
    const double ms = ms_of(replay);
    times.push_back(ms / static_cast<double>(batch));
    total += ms;
  }
  return timing(std::move(times));
}

// ---- operands

inline constexpr int64_t kRotatedBytes = int64_t{128} << 20;  // operands of a case, past the caches

// The number of copies of operands that a case takes in turn.
inline int64_t copies(int64_t operand_bytes, int64_t most = 8) {
  return std::clamp<int64_t>(kRotatedBytes / std::max<int64_t>(operand_bytes, 1) + 1, 2, most);
}

// Numbers of mean 0 and variance 1, nearly normal and quick to make.
inline Tensor random_tensor(DType dtype, std::initializer_list<int64_t> sizes, uint32_t id) {
  Tensor out(dtype, sizes);
  const PhiloxKey key = rng_key(5, RngDomain::kInit);
  parallel_for(out.view().numel(), 1 << 14, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      // A number is the sum of 16 bytes, scaled.
      const PhiloxBlock block = philox(key, {static_cast<uint32_t>(i), id, 0, 0});
      int sum = -16 * 255 / 2;
      for (uint32_t word : block) {
        for (int shift = 0; shift < 32; shift += 8) sum += (word >> shift) & 255;
      }
      const float x = static_cast<float>(sum) / 296.0f;
      if (dtype == DType::kBFloat16) {
        out.data<bf16>()[i] = bf16(x);
      } else {
        out.data<float>()[i] = x;
      }
    }
  });
  return out;
}

// ---- rows

// The rate of `amount` operations (flop, bytes or other things) in `ms`.
inline double tera(double amount, double ms) { return amount / ms / 1e9; }
inline double giga(double amount, double ms) { return amount / ms / 1e6; }

// Whether --only, words by commas, wants rows of this name: one that holds a word, or after = is it.
inline bool wanted(std::string_view name, std::string_view only) {
  for (size_t begin = 0; begin <= only.size();) {
    const std::string_view word = only.substr(begin, only.find(',', begin) - begin);
    if (word.starts_with('=') ? name == word.substr(1) : name.find(word) != name.npos) return true;
    begin += word.size() + 1;
  }
  return false;
}
inline constexpr const char* kOnlyHelp = "rows whose names hold one of these words, or are =NAME";

struct Row {
  std::string name, label;  // "grouped_gemm.fwd", the shape
  double value = 0;
  const char* unit = "GB/s";
  Timing time;
  // The thing that the ratio compares with; empty if there is none. A ratio above 1 is better for
  // Moiety; target 0 means none.
  std::string against = {};
  double ratio = 0, target = 0;
  std::string more = {};  // further members, as `"ranks": 2`
  Device device = {};
};

// Prints one line of JSON, with the spread if it is over 5 %.
inline void print(const Row& row) {
  std::string line = text(
      R"({{"name": "{}", "case": "{}", "device": "{}", "value": {:.4f}, "unit": "{}", "ms": {:.4f})",
      row.name, row.label, row.device.type == DeviceType::kCpu ? "cpu" : "cuda", row.value,
      row.unit, row.time.ms);
  if (!row.against.empty()) {
    line += text(R"(, "ratio": {:.3f}, "against": "{}")", row.ratio, row.against);
    if (row.target > 0) line += text(R"(, "target": {})", row.target);
  }
  if (row.time.spread > 0.05) line += text(R"(, "spread": {:.3f})", row.time.spread);
  if (!row.more.empty()) line += ", " + row.more;
  std::puts((line + "}").c_str());
  std::fflush(stdout);
}

// ---- main

// Runs run(options). Errors are a line on stderr and exit code 1; or `end` is called with 2, since
// processes of MPI have to end together.
inline int run_main(int argc, char** argv, const char* about, void (*run)(Options&),
                    void (*end)(int) = nullptr) {
  try {
    Options options(argc, argv, about);
    run(options);
    return 0;
  } catch (const std::exception& e) {
    const std::string_view path = argv[0];
    std::fprintf(stderr, "%s: %s\n", path.substr(path.rfind('/') + 1).data(), e.what());
    if (end) end(2);
    return 1;
  }
}

}  // namespace moiety::bench
