// The scalar reference: element by element.
#include <algorithm>
#include <cstring>

#include "moiety/quant/partial_cast/partial_cast_scales.h"
#include "moiety/quant/quantize/ieee_scope.h"

namespace moiety::quant::detail {
namespace {

// Element i of the master values, in the form in which it is quantized.
float element(const PartialItem& item, const PartialArrays& arrays, int64_t i) {
  const float x = arrays.bf16_master
                      ? static_cast<float>(static_cast<const bf16*>(arrays.master)[i])
                      : static_cast<const float*>(arrays.master)[i];
  return item.spec.through_bf16 ? static_cast<float>(bf16(x)) : x;
}

// The words of a direction.
template <class Word, class Bytes>
auto words_of(const PartialBlocks& blocks, Bytes* reduction) {
  using W = std::conditional_t<std::is_const_v<Bytes>, const Word, Word>;
  return reinterpret_cast<W*>(reduction + blocks.offset);
}

int64_t row_block(const PartialItem& item, int64_t r, int64_t c) {
  return r / item.block_rows * item.row.cols + c / item.block_cols;
}
int64_t col_block(const PartialItem& item, int64_t r, int64_t c) {
  return r / 32 * item.col.cols + c;
}

template <class Word>
void raise(Word& word, Word value) {
  word = std::max(word, value);
}

void measure(const PartialItem& item, const PartialArrays& arrays, std::byte* reduction) {
  for (int64_t e = item.start; e < item.end; ++e) {
    const uint32_t amax = abs_bits(element(item, arrays, e - item.start));
    if (item.tensor_word >= 0) {
      raise(*reinterpret_cast<uint32_t*>(reduction + item.tensor_word), amax);
    }
    if (item.row.size() == 0) continue;
    const int64_t r = e / item.cols, c = e % item.cols;
    with_rule(item, reduction, [&]<class Rule>(const Rule& rule) {
      using Word = typename Rule::Word;
      // Words are non-decreasing in the amax, so their maximum is the word of the maximum.
      raise(words_of<Word>(item.row, reduction)[row_block(item, r, c)], rule.word(amax));
      if (item.want_col) {
        raise(words_of<Word>(item.col, reduction)[col_block(item, r, c)], rule.word(amax));
      }
    });
  }
}

// Stores the scales and scalars of the tensor and its blocks.
void store_scales(const PartialItem& item, const PartialArrays& arrays,
                  const std::byte* reduction) {
  bool finite = true;
  if (item.tensor_word >= 0) {
    const float amax = tensor_amax(item, reduction);
    finite = is_finite(amax);
    arrays.amax[0] = amax;
    if (item.delayed && abs_bits(amax) > abs_bits(*arrays.step_amax)) *arrays.step_amax = amax;
  }
  if (arrays.tensor_scale) {
    arrays.tensor_scale[0] = tensor_decode_scale(item, arrays, reduction);
    if (item.want_col) arrays.tensor_scale[1] = 1.0f;
  }
  if (item.row.size() > 0) {
    with_rule(item, reduction, [&]<class Rule>(const Rule& rule) {
      const auto store = [&](const PartialBlocks& blocks, void* out) {
        const auto* words = words_of<typename Rule::Word>(blocks, reduction);
        for (int64_t b = blocks.begin; b < blocks.end; ++b) {
          static_cast<typename Rule::Stored*>(out)[b] = rule.stored(words[b]);
          finite = finite && rule.finite(words[b]);
        }
      };
      store(item.row, arrays.row_scales);
      if (item.want_col) store(item.col, arrays.col_scales);
    });
  }
  if (!finite && arrays.flags) *arrays.flags |= kFlagNonFinite;
}

uint8_t encode(const QuantSpec& spec, float x) {
  switch (spec.element) {
    case DType::kE2M1:
      return E2M1::encode(x);
    case DType::kE5M2:
      return E5M2::encode(x);
    default:
      return E4M3::encode(x);
  }
}

void store_code(const PartialItem& item, uint8_t* codes, int64_t e, uint8_t code) {
  uint8_t* const byte = codes + (position(item, e) - position(item, item.start));
  if (!is_fp4(item.spec.format)) {
    *byte = code;
    return;
  }
  const int64_t c = e % item.cols;
  *byte = c % 2 ? E2M1::pack(*byte & 15, code) : E2M1::pack(code, *byte >> 4);
  if (c + 1 < item.cols) return;
  // The last element of a row brings the row's pads.
  if (c % 2 == 0) *byte = code;
  std::memset(byte + 1, 0, item.pitch - (c / 2 + 1));
}

void store_codes(const PartialItem& item, const PartialArrays& arrays, const std::byte* reduction) {
  for (int64_t e = item.start; e < item.end; ++e) {
    const float x = element(item, arrays, e - item.start);
    if (item.row.size() == 0) {
      const float scale = fp8_tensor_scale(item, arrays, reduction).encode;
      store_code(item, arrays.row, e, encode(item.spec, x * scale));
      continue;
    }
    const int64_t r = e / item.cols, c = e % item.cols;
    with_rule(item, reduction, [&]<class Rule>(const Rule& rule) {
      using Word = typename Rule::Word;
      const Word row = words_of<Word>(item.row, reduction)[row_block(item, r, c)];
      store_code(item, arrays.row, e, encode(item.spec, x * rule.encode(row)));
      if (!item.want_col) return;
      const Word col = words_of<Word>(item.col, reduction)[col_block(item, r, c)];
      store_code(item, arrays.col, e, encode(item.spec, x * rule.encode(col)));
    });
  }
}

}  // namespace

void partial_amax_ref(const PartialCastTable::Impl& table, std::byte* reduction) {
  const IeeeScope ieee;
  std::fill_n(reduction, table.plan->reduction_bytes, std::byte{0});
  for (size_t i = 0; i < table.arrays.size(); ++i) {
    measure(table.plan->items[i], table.arrays[i], reduction);
  }
}

void partial_cast_ref(const PartialCastTable::Impl& table, const std::byte* reduction) {
  const IeeeScope ieee;
  for (size_t i = 0; i < table.arrays.size(); ++i) {
    store_scales(table.plan->items[i], table.arrays[i], reduction);
    store_codes(table.plan->items[i], table.arrays[i], reduction);
  }
}

}  // namespace moiety::quant::detail
