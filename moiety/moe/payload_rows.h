// The rows of a payload, part by part, inside expert parallelism: as they are read, as a record
// holds them on the wire, and as they are written (docs/spec/ep.md#payloads).
#pragma once

#include <cstddef>
#include <cstring>
#include <string>

#include "moiety/base/integer.h"
#include "moiety/base/stream.h"
#include "moiety/moe/payload.h"
#include "moiety/moe/prepare.h"

namespace moiety::moe {

// The rows of an operation that peers may reach where they lie, if that is in an attached buffer:
// the rows that a copy brings, or those that are summed.
struct Operand {
  std::byte* base = nullptr;
  int64_t rows = 0, stride = 0, bytes = 0;  // distance of rows, and bytes of one
};

// The rows of a matrix, or the elements of a vector, in a view that may be strided or absent.
class Rows {
 public:
  Rows() = default;
  explicit Rows(const TensorView& x)
      : base_(static_cast<std::byte*>(x.raw())),
        stride_(x.defined() ? x.stride(0) * bits(x.dtype()) / 8 : 0) {}
  // One row that stands for all.
  static Rows repeated(const TensorView& one) {
    Rows out(one);
    out.stride_ = 0;
    return out;
  }
  std::byte* operator[](int64_t i) const { return base_ + i * stride_; }
  // Distance between rows in bytes.
  int64_t stride() const { return stride_; }
  template <class T>
  T* as(int64_t i) const {
    return reinterpret_cast<T*>((*this)[i]);
  }

 private:
  std::byte* base_ = nullptr;
  int64_t stride_ = 0;
};

// The bytes of a row's parts and their places in a record: data, scales, then the row's own scale
// with the side part, K floats. A row of floating-point numbers has only data.
struct RowParts {
  int64_t data = 0, scales = 0, row_scale = 0;

  constexpr int64_t bytes() const { return data + scales + row_scale; }
  constexpr int64_t scales_at() const { return round_up(data, 16); }
  constexpr int64_t row_scale_at() const { return scales_at() + round_up(scales, 16); }
  constexpr int64_t side_at() const { return row_scale_at() + row_scale; }
  constexpr int64_t record(int topk) const {
    return round_up(row_scale_at() + round_up(row_scale + 4 * topk, 16), 128);
  }
};
RowParts row_parts(PayloadFormat format, int64_t model);
// The largest record of a format with rows no longer than those of `widest`.
int64_t largest_record(PayloadFormat widest, int64_t model, int topk);
// The same for records of the parts beside the data.
int64_t largest_rest(PayloadFormat widest, int64_t model, int topk);
// Whether long rows of format a have more bytes than those of b.
bool wider(PayloadFormat a, PayloadFormat b);

PayloadFormat payload_format(DType dtype);
std::string describe(const Payload& x);

// The parts of one row, wherever they are.
struct Row {
  const std::byte* data;
  const float* weights;                  // null if there are none
  const std::byte* scales = nullptr;     // for quantized rows
  const std::byte* row_scale = nullptr;  // for NVFP4
};

// Rows that are sent.
struct SourceRows {
  PayloadFormat format = PayloadFormat::kBF16;
  int64_t model = 0;
  RowParts parts;
  Rows data, scales, row_scale;
  bool quantized() const { return parts.scales > 0; }
};
// The rows of `x`; throws Error(kInvalidArgument) unless it is a payload of `rows` rows that may be
// sent.
SourceRows source_rows(const char* operation, const char* argument, const Payload& x, int64_t rows);

// The scales of received rows, in the layout of the output.
class ScaleRows {
 public:
  ScaleRows() = default;
  explicit ScaleRows(const QuantizedView& x);
  void put(int64_t r, const std::byte* scales) const {
    if (layout_ == ScaleLayout::kCompact) {
      std::memcpy(compact_[r], scales, bytes_);
      return;
    }
    std::byte* to = word(r);
    int64_t i = 0;
    for (; i + 4 <= bytes_; i += 4, to += step_) std::memcpy(to, scales + i, 4);
    if (i == bytes_) return;
    std::memset(to, 0, 4);
    std::memcpy(to, scales + i, bytes_ - i);
  }
  void zero(int64_t r) const;
  ScaleLayout layout() const { return layout_; }
  // The rows of compact scales.
  const Rows& compact() const { return compact_; }
  int64_t rows() const { return rows_; }
  int64_t cols() const { return cols_; }  // scales of a row
  // The bytes between a row's words of 4 bytes, in the layouts of GEMMs.
  int64_t step() const { return step_; }
  // Zeroes the rows and columns that the layout adds.
  void zero_pads() const;

 private:
  // The layouts of GEMMs keep a row's scales in words of 4 bytes, `step_` apart.
  std::byte* word(int64_t r) const;

  ScaleLayout layout_ = ScaleLayout::kCompact;
  Rows compact_;
  int64_t rows_ = 0, cols_ = 0, bytes_ = 0, step_ = 0;
};

// The places of received rows, by slot; with a value for each, if there is such a vector. With a
// map a row has one place, that of any of its slots.
struct ExpertRows {
  RowParts parts;
  Rows data, row_scale, values;
  ScaleRows scales;
  bool has_values = false;
  const int32_t* source = nullptr;  // [C], for places by a map
  int64_t places = 0;               // rows of `data`

  // Puts the row.
  template <bool quantized>
  void put(int64_t place, const Row& row) const {
    if (data[place] != row.data) std::memcpy(data[place], row.data, parts.data);
    if constexpr (quantized) {
      scales.put(place, row.scales);
      if (row.row_scale) std::memcpy(row_scale[place], row.row_scale, sizeof(float));
    }
  }
  // Puts the weight of choice k.
  void put_value(int64_t slot, const Row& row, int k) const {
    if (row.weights) std::memcpy(values[slot], row.weights + k, sizeof(float));
  }
  void zero(int64_t place) const;
  void zero_value(int64_t slot) const {
    if (has_values) std::memset(values[slot], 0, sizeof(float));
  }
  // The data of `count` rows, for peers; by a map a row has no slot that a peer could store into.
  Operand operand(int64_t count) const {
    if (source) return {nullptr, 1, 0, parts.data};
    return {data[0], count, data.stride(), parts.data};
  }
};
// The places in `rows`; throws Error(kInvalidArgument) unless it can receive the rows of `from`,
// which source_rows accepted, at the plan's capacity, or by the map. `values_C` has been checked.
ExpertRows expert_rows(const char* operation, const char* argument, const Payload& rows,
                       const Payload& from, const EpPlan& plan, const TensorView& values_C,
                       const TensorView& source_C);

// Throws unless a GPU can write the rows in a group of one rank: without a map, with compact scales.
void check_alone_on_gpu(const char* operation, const char* argument, const ExpertRows& rows);

// Throws Error(kInvalidArgument) unless all parts of the payload are on the stream's device.
void check_payload_device(const char* operation, const char* argument, const Payload& x,
                          const Stream& stream);

// Throws Error(kInvalidArgument) unless `x` is [rows, D] of a floating-point payload dtype, with
// contiguous rows. `model` -1 allows any D.
void check_rows(const char* operation, const char* argument, const TensorView& x, int64_t rows,
                int64_t model);

}  // namespace moiety::moe
