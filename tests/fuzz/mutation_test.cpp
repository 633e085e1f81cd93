// The fuzz targets over their corpus, and over mutations of it with fixed seeds: what libFuzzer
// does for longer, in every run of the tests and under every sanitizer.
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "moiety/base/deadline.h"
#include "tests/fuzz/targets.h"

namespace moiety::fuzz {
namespace {

namespace fs = std::filesystem;

struct Seed {
  std::string name, bytes;
};

std::vector<Seed> corpus(const char* target) {
  std::vector<Seed> seeds;
  for (const auto& entry :
       fs::directory_iterator(fs::path(MOIETY_SOURCE_DIR) / "tests/fuzz/corpus" / target)) {
    std::ifstream file(entry.path(), std::ios::binary);
    seeds.push_back({entry.path().filename().string(), {std::istreambuf_iterator<char>(file), {}}});
  }
  std::sort(seeds.begin(), seeds.end(),
            [](const Seed& a, const Seed& b) { return a.name < b.name; });
  return seeds;
}

class Mutator {
 public:
  Mutator(const std::vector<Seed>& seeds, uint64_t seed) : seeds_(seeds), random_(seed) {}

  std::string next() {
    std::string s = any();
    for (size_t i = 1 + below(6); i > 0; --i) mutate(s);
    return s.substr(0, 1 << 16);
  }

 private:
  size_t below(size_t n) { return n == 0 ? 0 : random_() % n; }
  const std::string& any() { return seeds_[below(seeds_.size())].bytes; }

  void mutate(std::string& s) {
    const size_t at = below(s.size() + 1), length = std::min(below(24), s.size() - at);
    switch (below(8)) {
      case 0:
        if (!s.empty()) s[at % s.size()] ^= static_cast<char>(1 << below(8));
        break;
      case 1:
        if (!s.empty()) s[at % s.size()] = "\0\xff\x7f\x80{}[]\",:0-.\n="[below(17)];
        break;
      case 2:
        s.erase(at, length);
        break;
      case 3:
        s.insert(at, s.substr(at, length));
        break;
      case 4:
        s.resize(at);  // a cut file
        break;
      case 5: {  // from another file, or another place
        const std::string& other = any();
        const size_t from = below(other.size());
        s.replace(at, length, other.substr(from, below(64)));
        break;
      }
      default:
        change_number(s, at);
    }
  }

  // Numbers at the edges of their types, in text and as bytes.
  void change_number(std::string& s, size_t at) {
    static const char* const kTexts[] = {"0",
                                         "-1",
                                         "1",
                                         "2147483648",
                                         "9007199254740993",
                                         "9223372036854775807",
                                         "9223372036854775808",
                                         "18446744073709551616",
                                         "1e400",
                                         "0.5",
                                         "00",
                                         "1e-3"};
    const size_t begin = s.find_first_of("0123456789", at);
    if (begin != s.npos && below(4) > 0) {
      const size_t end = s.find_first_not_of("0123456789", begin);
      s.replace(begin, std::min(end, s.size()) - begin, kTexts[below(std::size(kTexts))]);
    } else if (s.size() >= 8) {
      static constexpr uint64_t kWords[] = {
          0, 1, 64, 1u << 31, uint64_t{1} << 48, uint64_t{1} << 63, ~uint64_t{0}};
      const uint64_t word = kWords[below(std::size(kWords))];
      const size_t place = std::min(at / 8 * 8, s.size() - 8);
      std::copy_n(reinterpret_cast<const char*>(&word), below(2) ? 8 : 4,
                  s.begin() + ptrdiff_t(place));
    }
  }

  const std::vector<Seed>& seeds_;
  std::mt19937_64 random_;
};

// Keeps an input that is a finding; returns its place.
std::string keep(const Target& target, const std::string& input) {
  const std::string path = testing::TempDir() + "moiety-finding-" + target.name;
  std::ofstream(path, std::ios::binary) << input;
  return path;
}

class Mutations : public ::testing::TestWithParam<Target> {};

TEST_P(Mutations, FindNothing) {
  const Target& target = GetParam();
  const std::vector<Seed> seeds = corpus(target.name);
  ASSERT_FALSE(seeds.empty());
  for (const Seed& seed : seeds) EXPECT_NO_THROW(target.run(seed.bytes)) << seed.name;
  target.run({});
  Mutator mutator(seeds, 1);
  // The same inputs everywhere, as many as three seconds allow.
  const Deadline limit(Seconds(3));
  for (int i = 0; i < 20000 && !limit.expired(); ++i) {
    const std::string input = mutator.next();
    try {
      target.run(input);
    } catch (const std::exception& e) {
      FAIL() << "input " << i << ", kept in " << keep(target, input) << ": " << e.what();
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Targets, Mutations, ::testing::ValuesIn(kTargets),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace moiety::fuzz
