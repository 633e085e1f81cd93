// Few cases that contain every pair of values of any two factors.
#pragma once

#include <vector>

namespace moiety {

// Each row gives a value index for every factor; levels[f] is the number of values of factor f.
// Greedy: a row starts with the first pair not yet covered; each other factor then takes the value
// that covers the most new pairs with what is set already.
inline std::vector<std::vector<int>> pairwise_cover(const std::vector<int>& levels) {
  const int factors = static_cast<int>(levels.size());
  std::vector<std::vector<std::vector<char>>> covered;  // [f * factors + g][value of f][value of g]
  for (int f = 0; f < factors; ++f) {
    for (int g = 0; g < factors; ++g) {
      covered.emplace_back(levels[f], std::vector<char>(levels[g], f == g));
    }
  }
  std::vector<std::vector<int>> rows;
  const auto start_row = [&](std::vector<int>& row) {
    for (int f = 0; f < factors; ++f) {
      for (int g = 0; g < factors; ++g) {
        for (int a = 0; a < levels[f]; ++a) {
          for (int b = 0; b < levels[g]; ++b) {
            if (covered[f * factors + g][a][b]) continue;
            row[f] = a;
            row[g] = b;
            return true;
          }
        }
      }
    }
    return false;
  };
  std::vector<int> row(factors, -1);
  while (start_row(row)) {
    for (int f = 0; f < factors; ++f) {
      if (row[f] >= 0) continue;
      int best = -1, choice = 0;
      for (int i = 0; i < levels[f]; ++i) {
        const int a = (i + static_cast<int>(rows.size())) % levels[f];  // ties are spread
        int gain = 0;
        for (int g = 0; g < factors; ++g) {
          if (row[g] >= 0) gain += !covered[f * factors + g][a][row[g]];
        }
        if (gain > best) {
          best = gain;
          choice = a;
        }
      }
      row[f] = choice;
    }
    for (int f = 0; f < factors; ++f) {
      for (int g = 0; g < factors; ++g) covered[f * factors + g][row[f]][row[g]] = 1;
    }
    rows.push_back(row);
    row.assign(factors, -1);
  }
  return rows;
}

}  // namespace moiety
