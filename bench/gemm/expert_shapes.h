// The experts of known models, by name, random routing to them, and the way in which what they do on
// a GPU is timed: beside one dense product, in short bursts from rest.
#pragma once

#include <algorithm>
#include <cmath>
#include <numeric>

#include "bench/harness.h"
#include "moiety/base/copy.h"
#include "moiety/gemm/grouped_tensor.h"

namespace moiety::bench {

struct ExpertShape {
  const char* name;
  int64_t tokens, model, ffn, experts, topk;
  int64_t rows() const { return tokens * topk; }
};
inline constexpr ExpertShape kExpertShapes[] = {
    {"q128", 8192, 2048, 768, 128, 8},    {"q16", 8192, 2048, 768, 16, 8},
    {"mixtral", 8192, 4096, 14336, 8, 2}, {"dsv3", 4096, 7168, 2048, 32, 8},
    {"gptoss", 8192, 2880, 2880, 32, 4},  {"s30b", 32768, 4096, 1024, 64, 4},
    {"s7b", 24576, 1536, 256, 128, 8},    {"s120b", 32768, 4096, 2048, 64, 4},
};
inline std::vector<std::string> expert_shape_names() {
  std::vector<std::string> names;
  for (const ExpertShape& s : kExpertShapes) names.push_back(s.name);
  return names;
}

// The rows of each expert, tight and in the order of their tokens.
struct Choices {
  std::vector<int64_t> begin{0};
  std::vector<int32_t> source;  // the token of a row

  // The rows of every token, in ascending order.
  std::vector<int32_t> rows_of_tokens(const ExpertShape& s) const {
    std::vector<int32_t> out(s.rows());
    std::vector<int64_t> next(s.tokens, 0);
    for (size_t r = 0; r < source.size(); ++r) {
      out[source[r] * s.topk + next[source[r]]++] = static_cast<int32_t>(r);
    }
    return out;
  }
};

// How rows are spread over experts: as random choices have it, from 0.7 to 1.3 of the average, by
// Zipf's law (none more than there are tokens), or all to one.
inline const std::vector<std::string> kSpreads = {"random", "near", "zipf", "one"};

// The rows of each expert, T * K in all.
inline std::vector<int64_t> spread_rows(const ExpertShape& s, const std::string& spread) {
  std::vector<double> weight(s.experts);
  for (int64_t e = 0; e < s.experts; ++e) {
    weight[e] = spread == "zipf" ? 1.0 / double(e + 1)
                : spread == "one"
                    ? double(e == 0)
                    : 0.7 + 0.6 * double(e) / double(std::max<int64_t>(s.experts - 1, 1));
  }
  const int64_t most = spread == "one" ? s.rows() : s.tokens;
  std::vector<int64_t> rows(s.experts);
  double weights = std::accumulate(weight.begin(), weight.end(), 0.0);
  int64_t left = s.rows();
  for (int64_t e = 0; e < s.experts; ++e) {  // what one cannot take is shared by the others
    const double share = weights > 0 ? weight[e] / weights : 0;
    rows[e] =
        e + 1 == s.experts ? left : std::min<int64_t>(most, std::llround(double(left) * share));
    left -= rows[e];
    weights -= weight[e];
  }
  return rows;
}

// Expert after expert takes tokens in turn, so that each token has `topk` rows.
inline Choices choose_spread(const ExpertShape& s, const std::string& spread) {
  Choices out;
  int64_t next = 0;
  for (const int64_t rows : spread_rows(s, spread)) {
    const auto first = static_cast<int64_t>(out.source.size());
    for (int64_t i = 0; i < rows; ++i)
      out.source.push_back(static_cast<int32_t>(next++ % s.tokens));
    std::sort(out.source.begin() + first, out.source.end());
    out.begin.push_back(static_cast<int64_t>(out.source.size()));
  }
  return out;
}

// Every token chooses `topk` experts at random.
inline Choices choose_random(const ExpertShape& s) {
  std::vector<std::vector<int32_t>> tokens(s.experts);
  std::vector<int32_t> experts(s.experts);
  std::iota(experts.begin(), experts.end(), 0);
  const PhiloxKey key = rng_key(9, RngDomain::kInit);
  for (int64_t t = 0; t < s.tokens; ++t) {
    for (int64_t k = 0; k < s.topk; ++k) {
      const uint32_t word = philox(key, {uint32_t(t), uint32_t(k), 0, 0})[0];
      std::swap(experts[k], experts[k + word % (s.experts - k)]);
      tokens[experts[k]].push_back(static_cast<int32_t>(t));
    }
  }
  Choices out;
  for (const auto& rows : tokens) {
    out.source.insert(out.source.end(), rows.begin(), rows.end());
    out.begin.push_back(static_cast<int64_t>(out.source.size()));
  }
  return out;
}

inline Choices choose(const ExpertShape& s, const std::string& spread) {
  return spread == "random" ? choose_random(s) : choose_spread(s, spread);
}

// The same in the memory of the stream's GPU.
struct Routing {
  Routing(const ExpertShape& s, const Stream& stream, const std::string& spread = "random")
      : begin_E1(DType::kInt64, {s.experts + 1}, stream.device()),
        source_R(DType::kInt32, {s.rows()}, stream.device()),
        row_TK(DType::kInt32, {s.tokens, s.topk}, stream.device()) {
    Choices c = choose(s, spread);
    for (size_t e = 1; e < c.begin.size(); ++e) live_experts += c.begin[e] > c.begin[e - 1];
    groups.begin_E1 = begin_E1;
    groups.experts = s.experts;
    groups.capacity = s.rows();
    copy(begin_E1, TensorView(c.begin.data(), DType::kInt64, {s.experts + 1}), stream);
    copy(source_R, TensorView(c.source.data(), DType::kInt32, {s.rows()}), stream);
    std::vector<int32_t> rows = c.rows_of_tokens(s);
    copy(row_TK, TensorView(rows.data(), DType::kInt32, {s.tokens, s.topk}), stream);
    stream.synchronize();
  }

  Tensor begin_E1, source_R, row_TK;
  gemm::Groups groups;
  int64_t live_experts = 0;  // that have rows
};

// A line for peers, who multiply the same rows.
inline void print_shape(const ExpertShape& s, const std::string& name,
                        const std::string& spread = "random") {
  const auto list = [](const auto& numbers) {
    std::string out;
    for (const auto& n : numbers) out += text("{}{}", out.empty() ? "" : ", ", n);
    return "[" + out + "]";
  };
  const Choices choices = choose(s, spread);
  std::vector<int64_t> counts;
  for (size_t e = 1; e < choices.begin.size(); ++e) {
    counts.push_back(choices.begin[e] - choices.begin[e - 1]);
  }
  std::puts(
      text(R"({{"case": "{}", "T": {}, "D": {}, "F": {}, "E": {}, "counts": {}, "source": {}}})",
           name, s.tokens, s.model, s.ffn, s.experts, list(counts), list(choices.source))
          .c_str());
}

}  // namespace moiety::bench
