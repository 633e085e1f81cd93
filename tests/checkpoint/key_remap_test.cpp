// The remap of experts' keys: every row of its table, both ways, and key sets that chance makes,
// against an oracle that knows how they were made.
#include "moiety/checkpoint/key_remap.h"

#include <map>
#include <random>
#include <set>

#include <gtest/gtest.h>

#include "tests/support/error_of.h"

namespace moiety::checkpoint {
namespace {

using Values = std::vector<int64_t>;
using Tensors = std::map<std::string, std::pair<Values, Values>>;  // name -> shape, elements

constexpr ExpertForm kPacked = ExpertForm::kPacked, kIndexed = ExpertForm::kIndexed;

std::vector<KeyShape> keys_of(const Tensors& tensors) {
  std::vector<KeyShape> keys;
  for (const auto& [name, tensor] : tensors) keys.push_back({name, tensor.first});
  return keys;
}

int64_t volume_of(const Values& shape) { return volume(whole(shape)); }

// The place of an element of `box` in a tensor of `shape`; k counts the elements of the box.
int64_t place(const Values& shape, const Box& box, int64_t k) {
  int64_t at = 0, stride = 1;
  for (int d = box.rank - 1; d >= 0; --d) {
    at += (box.start[d] + k % box.size[d]) * stride;
    k /= box.size[d];
    stride *= shape[static_cast<size_t>(d)];
  }
  return at;
}

// Makes the moves, and checks that they fill every element of each target once.
Tensors moved(const Tensors& tensors, const KeyTarget& target) {
  Tensors out;
  std::map<std::string, int64_t> filled;
  for (const KeyMove& move : key_remap(keys_of(tensors), target)) {
    auto& [shape, elements] = out[move.target.name];
    shape = move.target.shape;
    elements.resize(static_cast<size_t>(volume_of(shape)), -1);
    const auto& source = tensors.at(move.source.name);
    EXPECT_EQ(source.first, move.source.shape);
    for (const MovedBox& part : moved_boxes(move, whole(shape))) {
      EXPECT_EQ(volume(part.source), volume(part.target));
      for (int64_t k = 0; k < volume(part.target); ++k) {
        elements[static_cast<size_t>(place(shape, part.target, k))] =
            source.second[static_cast<size_t>(place(move.source.shape, part.source, k))];
      }
      filled[move.target.name] += volume(part.target);
    }
  }
  for (const auto& [name, tensor] : out) {
    EXPECT_EQ(filled[name], volume_of(tensor.first)) << name;
    EXPECT_EQ(std::count(tensor.second.begin(), tensor.second.end(), -1), 0) << name;
  }
  return out;
}

// The row of a tensor of 2F rows that holds row f of half h.
int64_t row_of(int64_t h, int64_t f, int64_t half, int64_t s) {
  return s == 0 ? h * half + f : f / s * 2 * s + h * s + f % s;
}

// Element (expert, row, column) of a module, by the row's place in plain order.
int64_t value(int64_t module, int64_t expert, int64_t row, int64_t column) {
  return ((module * 100 + expert) * 1000 + row) * 10 + column + 1;
}

struct Module {
  ExpertModule is;
  int64_t rows = 4, columns = 3;
};

// The weight or bias of a module as a file holds it.
void add(Tensors& tensors, const Module& m, int64_t number, bool bias, ExpertForm form, int64_t s) {
  const std::string base = m.is.name + (bias ? ".bias" : ".weight");
  const int64_t columns = bias ? 1 : m.columns, half = m.rows / 2;
  for (int64_t e = 0; e < m.is.experts; ++e) {
    Values elements(static_cast<size_t>(m.rows * columns));
    for (int64_t row = 0; row < m.rows; ++row) {
      const int64_t to = m.is.gated ? row_of(row / half, row % half, half, s) : row;
      for (int64_t c = 0; c < columns; ++c) {
        elements[static_cast<size_t>(to * columns + c)] = value(number * 2 + bias, e, row, c);
      }
    }
    Values shape{m.rows};
    if (!bias) shape.push_back(columns);
    if (form == kIndexed) {
      tensors[base + std::to_string(e)] = {shape, elements};
      continue;
    }
    shape.insert(shape.begin(), m.is.experts);
    auto& all = tensors[base];
    all.first = shape;
    all.second.insert(all.second.end(), elements.begin(), elements.end());
  }
}

std::string refusal(const std::vector<KeyShape>& keys, const ExpertModule& module,
                    ExpertForm form = kPacked, int64_t from = 0, int64_t to = 0) {
  const std::vector<ExpertModule> modules{module};
  return kind_and_error_of([&] { key_remap(keys, {modules, form, from, to}); });
}

TEST(KeyRemap, EveryFormIntoEveryOther) {
  for (const int64_t experts : {1, 12}) {
    for (const bool gated : {false, true}) {
      const Module m{{"l.fc1", experts, gated}, 128};
      const std::vector<ExpertModule> modules{m.is};
      for (const ExpertForm from : {kPacked, kIndexed}) {
        for (const ExpertForm to : {kPacked, kIndexed}) {
          for (const int64_t s : {0, 8, 32, 64}) {
            for (const int64_t t : {0, 16, 32, 64}) {
              Tensors before, expected;
              for (const bool bias : {false, true}) {
                add(before, m, 1, bias, from, s);
                add(expected, m, 1, bias, to, t);
              }
              before["other.weight1"] = expected["other.weight1"] = {{2}, {7, 8}};
              const Tensors after = moved(before, {modules, to, s, t});
              EXPECT_EQ(after, expected)
                  << name(from) << " " << s << " to " << name(to) << " " << t;
              EXPECT_EQ(moved(after, {modules, from, t, s}), before);
            }
          }
        }
      }
    }
  }
}

TEST(KeyRemap, WeightAndBiasHaveFormsOfTheirOwn) {
  const Module m{{"fc", 3, false}};
  const std::vector<ExpertModule> modules{m.is};
  Tensors mixed, bias_alone, packed;
  add(mixed, m, 1, false, kIndexed, 0);
  add(mixed, m, 1, true, kPacked, 0);
  add(packed, m, 1, false, kPacked, 0);
  add(packed, m, 1, true, kPacked, 0);
  EXPECT_EQ(moved(mixed, {modules, kPacked, 0, 0}), packed);
  add(bias_alone, m, 1, true, kIndexed, 0);
  const Tensors bias = moved(bias_alone, {modules, kPacked, 0, 0});
  ASSERT_EQ(bias.size(), 1u);
  EXPECT_EQ(bias.begin()->first, "fc.bias");
  EXPECT_EQ(bias.begin()->second.first, (Values{3, 4}));
}

TEST(KeyRemap, NamesAreMatchedWhole) {
  const std::vector<ExpertModule> modules{{"a.fc", 2, false}};
  // Not of the module: others' prefixes, other leaves, no indices.
  const std::vector<KeyShape> foreign{{"b.a.fc.weight1", {4, 3}}, {"a.fc.weight_scale", {2}},
                                      {"a.fc.weight-1", {4, 3}},  {"a.fc2.weight0", {4, 3}},
                                      {"a.fc.weight1.x", {4, 3}}, {"a.fcweight0", {4, 3}}};
  for (const KeyMove& move : key_remap(foreign, {modules, kPacked, 0, 0})) {
    EXPECT_EQ(move.source, move.target);
    EXPECT_FALSE(move.of_experts);
  }
  std::vector<KeyShape> with = foreign;
  with.push_back({"a.fc.weight0", {4, 3}});
  with.push_back({"a.fc.weight1", {4, 3}});
  const std::vector<KeyMove> moves = key_remap(with, {modules, kPacked, 0, 0});
  EXPECT_EQ(std::ssize(moves), std::ssize(with));
  EXPECT_EQ(moves[0].target, (KeyShape{"a.fc.weight", {2, 4, 3}}));
}

TEST(KeyRemap, RefusesWhatLeavesAChoice) {
  const ExpertModule m{"fc", 12, false};
  std::vector<KeyShape> indexed;
  for (int e = 0; e < 12; ++e) indexed.push_back({"fc.weight" + std::to_string(e), {4, 3}});
  EXPECT_EQ(refusal(indexed, m), kNoError);

  std::vector<KeyShape> keys = indexed;
  keys.erase(keys.begin() + 10);
  keys.erase(keys.begin() + 1);
  EXPECT_EQ(
      refusal(keys, m),
      "checkpoint: key_remap: fc.weight<index> is there for 10 of 12 experts; missing are 1, 10");
  EXPECT_EQ(refusal(keys, m, kIndexed), refusal(keys, m));
  EXPECT_EQ(
      refusal({{"fc.weight1", {4, 3}}}, m),
      "checkpoint: key_remap: fc.weight<index> is there for 1 of 12 experts; missing are 0, 2, "
      "3, 4, 5, 6, 7, 8, 9, 10, 11");
  EXPECT_NE(refusal({{"fc.weight1", {4, 3}}}, {"fc", 500, false}).find("19, 20, ..."),
            std::string::npos);

  const auto with = [&](const KeyShape& key) {
    std::vector<KeyShape> out = indexed;
    out.push_back(key);
    return refusal(out, m);
  };
  EXPECT_NE(with({"fc.weight12", {4, 3}}).find("\"fc.weight12\" is of none of 12 experts"),
            std::string::npos);
  EXPECT_NE(with({"fc.weight99999999999999999999", {4, 3}}).find("is of none of 12 experts"),
            std::string::npos);
  EXPECT_NE(with({"fc.weight01", {4, 3}}).find("leading zeros"), std::string::npos);
  EXPECT_NE(with({"fc.weight", {12, 4, 3}}).find("both fc.weight and fc.weight0 are there"),
            std::string::npos);
  EXPECT_NE(with({"fc.weight3", {4, 3}}).find("is there twice"), std::string::npos);

  indexed[7].shape = {4, 4};
  EXPECT_NE(refusal(indexed, m).find("fc.weight0 has shape [4,3], fc.weight7 has [4,4]"),
            std::string::npos);
  // The number of experts is not guessed.
  EXPECT_NE(refusal({{"fc.weight", {48, 3}}}, m).find("has shape [48,3], expected 3 dimensions"),
            std::string::npos);
  EXPECT_NE(refusal({{"fc.weight", {1, 3}}}, {"fc", 1, false}).find("expected 3"),
            std::string::npos);
  EXPECT_NE(refusal({{"fc.weight", {6, 8, 3}}}, m).find("the first of 12 experts"),
            std::string::npos);
  EXPECT_NE(refusal({{"fc.weight0", {1, 4, 3}}}, {"fc", 1, false}).find("expected 2 dimensions"),
            std::string::npos);

  const ExpertModule gated{"fc", 2, true};
  EXPECT_NE(refusal({{"fc.weight", {2, 7, 3}}}, gated).find("7 rows, which are no halves"),
            std::string::npos);
  for (const auto& [from, to] : {std::pair<int64_t, int64_t>{32, 0}, {0, 32}, {4, 0}, {0, -8}}) {
    EXPECT_NE(refusal({{"fc.weight", {2, 96, 3}}}, gated, kPacked, from, to)
                  .find("a multiple of 8 that divides the 48 rows of a half"),
              std::string::npos);
  }
}

TEST(KeyRemap, PartsOfRowsAreThoseOfTheWhole) {
  constexpr int64_t kHalf = 64, kRows = 2 * kHalf;
  for (const int64_t s : {0, 8, 16, 64}) {
    for (const int64_t t : {0, 8, 32}) {
      Values from(kRows);  // by row of the target
      for (int64_t h = 0; h < 2; ++h) {
        for (int64_t f = 0; f < kHalf; ++f) {
          from[static_cast<size_t>(row_of(h, f, kHalf, t))] = row_of(h, f, kHalf, s);
        }
      }
      for (int64_t begin = 0; begin <= kRows; begin += 5) {
        for (int64_t end = begin; end <= kRows; end += 7) {
          int64_t at = begin;
          for (const MovedRows& run : moved_rows(begin, end, kRows, s, t)) {
            ASSERT_EQ(run.to, at);
            for (int64_t k = 0; k < run.rows; ++k, ++at) {
              ASSERT_EQ(run.from + k, from[static_cast<size_t>(at)]) << s << " to " << t;
            }
          }
          ASSERT_EQ(at, end);
        }
      }
    }
  }
}

// A key set as chance makes it, and whether it says without doubt what it holds.
struct RandomKeys {
  std::vector<Module> modules;
  std::vector<ExpertModule> is;
  Tensors tensors;
  int64_t s = 0;
  bool sound = true;

  explicit RandomKeys(std::mt19937& random) {
    const auto draw = [&](int64_t n) { return static_cast<int64_t>(random() % uint64_t(n)); };
    const auto one_in = [&](int64_t n) { return draw(n) == 0; };
    constexpr int64_t kExperts[] = {1, 2, 3, 10, 11, 12, 21};
    const char* const names[] = {"a.fc", "b.a.fc", "a.fc1", "a.fc.weight"};
    s = one_in(2) ? 0 : 8;
    for (int64_t i = 0, n = 1 + draw(4); i < n; ++i) {
      const bool gated = one_in(2);
      modules.push_back({{names[i], kExperts[draw(7)], gated}, gated ? 32 : 3, 1 + draw(2)});
      is.push_back(modules.back().is);
      for (const bool bias : {false, true}) {
        if (one_in(4)) continue;
        add(tensors, modules.back(), i, bias, one_in(2) ? kPacked : kIndexed, s);
      }
    }
    const Module& m = modules[static_cast<size_t>(draw(std::ssize(modules)))];
    const std::string base = m.is.name + (one_in(2) ? ".weight" : ".bias");
    const int64_t e = draw(m.is.experts);
    const std::string indexed = base + std::to_string(e);
    const bool has_packed = tensors.contains(base), has_indexed = tensors.contains(base + "0");
    switch (draw(8)) {
      case 0:  // an expert is missing
        sound = !has_indexed || m.is.experts == 1;
        tensors.erase(indexed);
        break;
      case 1:  // one too many
        tensors[base + std::to_string(m.is.experts + draw(3))] = {{1}, {1}};
        sound = false;
        break;
      case 2:
        tensors[base + "0" + std::to_string(e)] = {{1}, {1}};
        sound = false;
        break;
      case 3:  // both forms, or a part of one, or no tensor of that kind
        tensors[has_packed ? indexed : base] = {{1}, {1}};
        sound = false;
        break;
      case 4:  // a tensor of another shape
        if (has_indexed) {
          tensors[indexed] = {{5, 1, 1}, {1, 2, 3, 4, 5}};
          sound = false;
        } else if (has_packed) {
          tensors[base] = {{m.is.experts + 1, 2}, Values(size_t(m.is.experts + 1) * 2, 3)};
          sound = false;
        }
        break;
      case 5:  // names that only look alike
        tensors["x." + indexed] = {{2}, {5, 6}};
        tensors[base + "s1"] = {{1}, {9}};
        tensors[indexed + "_scale"] = {{1}, {9}};
        break;
      default:
        break;
    }
  }

  // What the keys are in another form, made by itself and not moved.
  Tensors expected(ExpertForm form, int64_t t) const {
    Tensors out = tensors;
    for (size_t i = 0; i < modules.size(); ++i) {
      const Module& m = modules[i];
      for (const bool bias : {false, true}) {
        const std::string base = m.is.name + (bias ? ".bias" : ".weight");
        if (!tensors.contains(base) && !tensors.contains(base + "0")) continue;
        out.erase(base);
        for (int64_t e = 0; e < m.is.experts; ++e) out.erase(base + std::to_string(e));
        add(out, m, int64_t(i), bias, form, t);
      }
    }
    return out;
  }
};

TEST(KeyRemap, NoneOfManyRandomKeySetsIsSilentlyWrong) {
  std::mt19937 random(17);
  int sound = 0;
  for (int round = 0; round < 10000; ++round) {
    const RandomKeys keys(random);
    for (const ExpertForm form : {kPacked, kIndexed}) {
      const int64_t t = random() % 2 ? 16 : 0;
      const KeyTarget target{keys.is, form, keys.s, t};
      if (!keys.sound) {
        EXPECT_EQ(kind_and_error_of([&] { moved(keys.tensors, target); }).substr(0, 12),
                  "checkpoint: ")
            << "round " << round;
        continue;
      }
      ASSERT_EQ(moved(keys.tensors, target), keys.expected(form, t)) << "round " << round;
      ++sound;
    }
    if (HasFailure()) break;
  }
  EXPECT_GT(sound, 5000);
  EXPECT_LT(sound, 19000);
}

}  // namespace
}  // namespace moiety::checkpoint
