// Where the experts of a rank read their rows (moe.layout): a pure choice.
#pragma once

#include <cstdint>
#include <string_view>

#include "moiety/formats/quantized.h"
#include "moiety/gemm/grouped_mlp.h"

namespace moiety::moe {

enum class RowLayout : uint8_t {
  kAuto,    // kRank in groups of one rank
  kExpert,  // in copies, which lie in the order of experts
  // Through maps (slot_maps.h): in groups of one rank where the tokens lie, in others in one copy of
  // each row that came, in the order of ranks and tokens.
  kRank,
};
std::string_view name(RowLayout layout);

// The layout of the layers of a group of so many ranks: kExpert or kRank.
RowLayout choose_row_layout(RowLayout wanted, int64_t ranks);

// Which products of experts in kRank read a copy of their rows that is made for them alone, in memory
// that they need anyhow, instead of gathering rows as they load them. A product loses by gathering
// the more the more columns it has, a copy costs the same for each row; on Hopper the measured times
// cross at some thousands of columns (docs/adr/0015), on other paths products read rows as they need
// them. The bits are the same.
struct RowCopies {
  bool forward = false;          // of h for F1 (the names are those of grouped_mlp.h)
  bool gradient = false;         // of the gradient of out for B1 and G2
  bool weight_gradient = false;  // of h for G1
};
RowCopies choose_row_copies(gemm::MlpPath path, int64_t model, int64_t ffn, int64_t hidden);

// Whether forward keeps column codes of the rows that came, for `experts` and so many slots, in place
// of these `rows` of bfloat16: where they take less memory. Blocks along tokens are padded for each
// expert, and with maps a row is in the columns of each expert that has it.
bool keeps_columns(const QuantSpec& format, int64_t capacity, int64_t model, int64_t experts,
                   int64_t rows);

}  // namespace moiety::moe
