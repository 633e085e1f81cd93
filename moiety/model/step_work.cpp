#include "moiety/model/step_work.h"

#include <algorithm>

namespace moiety::model {
namespace {

// The number of ranks, other than its own, that a token goes to on average if all choices of
// experts are equally likely.
double remote_ranks(const ExchangeShape& s) {
  const auto experts = static_cast<double>(s.experts);
  double missed = 1;  // probability that none of a given rank's experts is chosen
  for (int64_t k = 0; k < s.top_k; ++k) {
    missed *= std::max(0.0, experts - experts / s.ranks - double(k)) / (experts - double(k));
  }
  return (s.ranks - 1) * (1 - missed);
}

}  // namespace

gtp::Work product_work(int64_t rows, int64_t n, int64_t k, DType storage, int64_t members) {
  const double r = double(rows), out = double(n), in = double(k);
  return {2 * r * out * in,
          double(byte_size(storage, 1)) * (r * (out + in) + out * in * double(members))};
}

gtp::Work attention_work(int products, int64_t tokens, int64_t seq_len, int64_t qkv, int64_t o,
                         DType storage) {
  return {double(products) * double(tokens) * double(seq_len) * double(o),
          double(byte_size(storage, tokens * (qkv + o)))};
}

gtp::Work elementwise_work(int64_t elements, DType storage) {
  return {0, double(byte_size(storage, elements))};
}

gtp::Work exchange_work(const ExchangeShape& s, DType storage,
                        const std::optional<QuantSpec>& format) {
  auto row = double(byte_size(storage, s.d));
  if (format) {
    const QuantizedSizes sizes = quantized_sizes(*format, 1, s.d, {true, false});
    row = double(sizes.row_data.bytes() + sizes.row_scales.bytes());
  }
  const auto tokens = double(s.tokens);
  return {0, tokens * double(s.top_k) * row, remote_ranks(s) * tokens * row};
}

}  // namespace moiety::model
