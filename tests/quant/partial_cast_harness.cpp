#include "tests/quant/partial_cast_harness.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <map>

#include "moiety/base/copy.h"
#include "moiety/base/format.h"
#include "moiety/base/parallel.h"
#include "moiety/formats/bf16.h"
#include "moiety/quant/partial_cast/partial_cast_plan.h"
#include "moiety/quant/quantize.h"
#include "moiety/quant/transpose.h"
#include "tests/support/bits.h"

namespace moiety::quant {
namespace {

// A state of delayed scaling that owns its values.
struct DelayedState {
  explicit DelayedState(float scale_value) : scale(scale_value), inverse(1.0f / scale_value) {}
  DelayedState(const DelayedState&) = delete;
  float history = 0, scale, inverse, step_amax = 0.25f;
  int32_t position = 0;
  DelayedScaling view() {
    return {TensorView(&history, DType::kFloat32, {1}), TensorView(&position, DType::kInt32, {1}),
            TensorView(&scale, DType::kFloat32, {1}), TensorView(&inverse, DType::kFloat32, {1}),
            TensorView(&step_amax, DType::kFloat32, {1})};
  }
};
constexpr float kDelayedScale = 37.5f;
constexpr int64_t kMasterRoom = 4;  // elements of a master's memory that are not its own

int64_t pitch_of(const PartialWeight& w) {
  return is_fp4(w.spec.format) ? (w.cols + 15) / 16 * 8 : w.cols;
}

// The bits of each byte of the row data that belong to elements [start, end); pads belong to the
// last element of their row.
std::vector<uint8_t> owned_bits(const PartialWeight& w, int64_t start, int64_t end) {
  const int64_t pitch = pitch_of(w);
  std::vector<uint8_t> out(w.rows * pitch);
  for (int64_t e = start; e < end; ++e) {
    const int64_t r = e / w.cols, c = e % w.cols;
    if (!is_fp4(w.spec.format)) {
      out[r * pitch + c] = 0xFF;
      continue;
    }
    out[r * pitch + c / 2] |= c % 2 ? 0xF0 : 0x0F;
    if (c + 1 < w.cols) continue;
    for (int64_t n = w.cols; n < 2 * pitch; ++n) out[r * pitch + n / 2] |= n % 2 ? 0xF0 : 0x0F;
  }
  return out;
}

// The results of quantize for the weight, after its masters were rounded as they should be.
struct Expected {
  QuantizedTensor tensor;
  float step_amax = 0;
};

// Whether the col data are the row data transposed.
bool transposes(const PartialWeight& w) {
  const Format f = w.spec.format;
  return f == Format::kFp8Tensor || f == Format::kFp8Block128x128 || f == Format::kNvfp4Tile16;
}

Expected quantize_whole(const PartialWeight& w, const TensorView& elements) {
  const Tensor rounded(DType::kFloat32, {w.rows, w.cols});
  for (int64_t i = 0; i < elements.numel(); ++i) {
    const float value = w.master == DType::kBFloat16 ? static_cast<float>(elements.data<bf16>()[i])
                                                     : elements.data<float>()[i];
    rounded.data<float>()[i] = w.spec.through_bf16 ? static_cast<float>(bf16(value)) : value;
  }
  Expected out;
  out.tensor =
      QuantizedTensor(w.spec, w.rows, w.cols, {.row = true, .col = w.col || transposes(w)});
  DelayedState state(kDelayedScale);
  const DelayedScaling delayed = state.view();
  QuantizeOptions options;
  if (w.delayed) options.delayed = &delayed;
  quantize(rounded, out.tensor, options, Stream());
  out.step_amax = state.step_amax;
  return out;
}

// The arrays of one weight on one rank.
QuantizedSizes rank_sizes(const PartialWeight& w, int64_t start, int64_t end, bool shard_only) {
  QuantizedSizes sizes = quantized_sizes(w.spec, w.rows, w.cols, {.row = true, .col = w.col});
  if (!shard_only) return sizes;
  const ByteRange range = shard_bytes(w.spec, w.rows, w.cols, start, end);
  sizes.row_data = {DType::kUInt8, 1, {range.end - range.begin, 0}};
  if (w.col) sizes.col_data = sizes.row_data;
  return sizes;
}

// Arrays of the host with bytes around them, and where they are on a device: on a GPU copies with
// the same alignment, on a CPU themselves.
class Image {
 public:
  explicit Image(Device device) : stream_(Stream::on(device)) {}

  void add(const TensorView& host, int64_t around) {
    if (!host.defined() || there_.count(host.raw())) return;
    const int64_t shift = reinterpret_cast<uintptr_t>(host.raw()) % 64;
    there_[host.raw()] = used_ + around + shift;
    parts_.push_back(
        {static_cast<std::byte*>(host.raw()) - around, used_ + shift, host.bytes() + 2 * around});
    used_ += (shift + host.bytes() + 2 * around + 63) / 64 * 64;
  }
  // Must be called once, before the others.
  void upload() {
    if (!on_gpu()) return;
    memory_ = Buffer(used_, stream_.device());
    staging_ = Buffer(used_);
    for (const Part& p : parts_) std::memcpy(staging_.data() + p.at, p.host, p.bytes);
    copy(whole(memory_), whole(staging_), stream_);
  }
  TensorView there(const TensorView& host) const {
    if (!on_gpu() || !host.defined()) return host;
    return {memory_.data() + there_.at(host.raw()), host.dtype(), host.sizes(), stream_.device()};
  }
  void download() {
    if (!on_gpu()) return;
    copy(whole(staging_), whole(memory_), stream_);
    stream_.synchronize();
    for (const Part& p : parts_) std::memcpy(p.host, staging_.data() + p.at, p.bytes);
  }
  // Sends only one array.
  void send(const TensorView& host) const {
    if (on_gpu()) copy(there(host), host, stream_);
  }
  void fetch(const TensorView& host) const {
    if (!on_gpu()) return;
    copy(host, there(host), stream_);
    stream_.synchronize();
  }
  const Stream& stream() const { return stream_; }

 private:
  struct Part {
    std::byte* host;
    int64_t at, bytes;
  };
  static TensorView whole(const Buffer& b) { return b.view(DType::kUInt8, {b.bytes()}); }
  bool on_gpu() const { return stream_.device().type == DeviceType::kCuda; }

  Stream stream_;
  int64_t used_ = 0;
  std::vector<Part> parts_;
  std::map<const void*, int64_t> there_;
  Buffer memory_, staging_;
};

// One weight on one rank.
struct RankWeight {
  RankWeight(const PartialWeight& w, const TensorView& elements, int64_t first, int64_t last,
             bool only_shard, uint8_t poison_byte)
      : weight(w),
        start(first),
        end(last),
        shard_only(only_shard),
        poison(poison_byte),
        master(w.master, {last - first + kMasterRoom}),
        memory(w.spec, w.rows, w.cols, rank_sizes(w, first, last, only_shard), 1, poison_byte),
        state(kDelayedScale),
        delayed(state.view()) {
    const auto* from = static_cast<const std::byte*>(elements.raw());
    std::copy(from + byte_size(w.master, start), from + byte_size(w.master, end),
              static_cast<std::byte*>(own_master().raw()));
    if (shard_only) origin = shard_bytes(w.spec, w.rows, w.cols, start, end).begin;
  }
  RankWeight(const RankWeight&) = delete;

  // The own master; some weights are aligned only to their elements.
  TensorView own_master() const {
    const int64_t at = weight.seed % kMasterRoom;
    return master.view().slice(0, at, at + end - start);
  }
  PartialCastItem item() const {
    return {weight.spec, weight.rows, weight.cols, start, end, weight.col, weight.delayed};
  }
  void add_to(Image& image) {
    const QuantizedView& v = memory;
    for (const TensorView* x : {&v.row_data, &v.row_scales, &v.col_data, &v.col_scales, &v.amax,
                                &v.tensor_scale, &v.flags}) {
      image.add(*x, Guarded::kGuard);
    }
    if (start < end) image.add(own_master(), 0);
    for (const TensorView* x : {&delayed.scale, &delayed.scale_inv, &delayed.step_amax}) {
      image.add(*x, 0);
    }
  }
  PartialCastArrays arrays(const Image& image) {
    PartialCastArrays a;
    if (start < end) a.master = image.there(own_master());
    a.out = memory;
    for (TensorView* x : {&a.out.row_data, &a.out.row_scales, &a.out.col_data, &a.out.col_scales,
                          &a.out.amax, &a.out.tensor_scale, &a.out.flags}) {
      *x = image.there(*x);
    }
    a.shard_only = shard_only;
    for (TensorView DelayedScaling::*x :
         {&DelayedScaling::scale, &DelayedScaling::scale_inv, &DelayedScaling::step_amax}) {
      there.*x = image.there(delayed.*x);
    }
    if (weight.delayed) a.delayed = &there;
    return a;
  }

  const PartialWeight& weight;
  int64_t start, end;
  bool shard_only;
  uint8_t poison;
  int64_t origin = 0;  // byte of the row data that the rank's codes begin with
  Tensor master;
  Guarded memory;
  DelayedState state;
  DelayedScaling delayed, there;  // there: on the device
};

const uint8_t* raw_bytes(const TensorView& x) { return static_cast<const uint8_t*>(x.raw()); }

// Takes the owned bits of `codes` into `whole`; the others must be poison.
bool take_owned(const RankWeight& w, const TensorView& codes, std::vector<uint8_t>& whole) {
  const std::vector<uint8_t> mask = owned_bits(w.weight, w.start, w.end);
  for (int64_t i = 0; i < codes.bytes(); ++i) {
    const uint8_t m = mask[w.origin + i], byte = raw_bytes(codes)[i];
    if ((byte & ~m) != (w.poison & ~m)) return false;
    whole[w.origin + i] = static_cast<uint8_t>((whole[w.origin + i] & ~m) | (byte & m));
  }
  return true;
}

// Scales: all of them, or those of the own rows of blocks, the others poison.
bool scales_equal(const RankWeight& w, const TensorView& scales, const TensorView& expected,
                  int64_t block_rows, bool aligned) {
  if (!scales.defined()) return true;
  const int64_t line = expected.size(0) == 0 ? 0 : expected.bytes() / expected.size(0);
  const int64_t unit = std::max<int64_t>(block_rows * w.weight.cols, 1);
  for (int64_t i = 0; i < expected.bytes(); ++i) {
    const int64_t first = i / line * unit;  // element of the block row
    const bool own = !aligned || (w.start <= first && first < w.end);
    if (raw_bytes(scales)[i] != (own ? raw_bytes(expected)[i] : w.poison)) return false;
  }
  return true;
}

// Index 0 is `expected`, index 1 too or poison.
bool scalars_equal(const RankWeight& w, const TensorView& got, const TensorView& expected,
                   bool col) {
  if (!expected.defined()) return true;
  for (int64_t i = 0; i < 8; ++i) {
    if (raw_bytes(got)[i] != (i < 4 || col ? raw_bytes(expected)[i] : w.poison)) return false;
  }
  return true;
}

std::string compare_rank(const RankWeight& w, const Expected& expected, bool aligned) {
  const QuantizedView &want = expected.tensor, &got = w.memory;
  const Format format = w.weight.spec.format;
  std::string bad;
  if (!w.memory.guards_intact()) bad += " guards";
  if (!scales_equal(w, got.row_scales, want.row_scales, block_shape(format).rows, aligned)) {
    bad += " row_scales";
  }
  if (!scales_equal(w, got.col_scales, want.col_scales, 32, aligned)) bad += " col_scales";
  if (!scalars_equal(w, got.amax, want.amax, false)) bad += " amax";
  if (!scalars_equal(w, got.tensor_scale, want.tensor_scale, w.weight.col)) bad += " tensor_scale";
  if (!same_bits(w.state.step_amax, w.weight.delayed ? expected.step_amax : 0.25f)) {
    bad += " step_amax";
  }
  const uint32_t flags = *want.flags.data<uint32_t>(), own_flags = w.memory.flag();
  // A rank that sees only its own blocks knows only them.
  const bool knows_all = !aligned || is_tensor_scaled(format);
  if (knows_all ? own_flags != flags : (own_flags & ~flags) != 0) bad += " flags";
  return bad;
}

std::string compare_bytes(const char* name, const std::vector<uint8_t>& got,
                          const TensorView& want) {
  if (!want.defined()) return "";
  const auto* bytes = static_cast<const uint8_t*>(want.raw());
  for (int64_t i = 0; i < want.bytes(); ++i) {
    if (got[i] != bytes[i]) {
      return text(" {}[{}] is {}, expected {}", name, i, int{got[i]}, int{bytes[i]});
    }
  }
  return "";
}

// The gathered row codes transposed, against the col half of quantize.
std::string compare_transposed(const PartialWeight& w, std::vector<uint8_t>& row,
                               const Expected& expected) {
  if (!transposes(w)) return "";
  QuantizedTensor gathered(w.spec, w.rows, w.cols, {.row = true, .col = true});
  const QuantizedView& view = gathered;
  const QuantizedView& want = expected.tensor;
  std::copy(row.begin(), row.end(), static_cast<uint8_t*>(view.row_data.raw()));
  std::memcpy(view.tensor_scale.raw(), want.tensor_scale.raw(), 4);
  if (view.amax.defined()) std::memcpy(view.amax.raw(), want.amax.raw(), 4);
  const QuantizeItem item{{}, view, {}};
  const QuantizeTable table(std::span(&item, 1));
  transpose_quantized(table, Stream());
  for (const auto& [a, b] :
       {std::pair{view.col_data, want.col_data}, std::pair{view.amax, want.amax},
        std::pair{view.tensor_scale, want.tensor_scale}}) {
    if (!same_bits(a, b)) return " transposed";
  }
  return "";
}

// All ranks of one run.
class Simulation {
 public:
  Simulation(const std::vector<PartialWeight>& weights, const std::vector<Tensor>& elements,
             const PartialRun& run, uint8_t poison)
      : run_(run), image_(run.device) {
    const size_t ranks = weights[0].cuts.size() - 1;
    std::vector<std::vector<PartialCastItem>> items(ranks);
    for (size_t r = 0; r < ranks; ++r) {
      auto& own = ranks_.emplace_back();
      for (size_t i = 0; i < weights.size(); ++i) {
        const PartialWeight& w = weights[i];
        own.push_back(std::make_unique<RankWeight>(w, elements[i], w.cuts[r], w.cuts[r + 1],
                                                   run.shard_only, poison));
        own.back()->add_to(image_);
        items[r].push_back(own.back()->item());
      }
      plans_.push_back(std::make_unique<PartialCastPlan>(items[r], run.aligned));
      const int64_t bytes = plans_.back()->reduction_bytes();
      reductions_.emplace_back(DType::kUInt8, std::initializer_list<int64_t>{bytes});
      std::fill_n(reductions_.back().data<uint8_t>(), bytes, poison);
      image_.add(reductions_.back(), 0);
    }
    image_.upload();
    for (size_t r = 0; r < ranks; ++r) {
      std::vector<PartialCastArrays> arrays;
      for (const auto& own : ranks_[r]) arrays.push_back(own->arrays(image_));
      tables_.emplace_back(*plans_[r], arrays);
    }
  }

  // `filled`: the reduction buffers of another run, which these must equal; empty: they become so.
  std::string cast(std::vector<Tensor>& filled) {
    std::string bad;
    std::vector<std::byte*> buffers;
    for (size_t r = 0; r < ranks_.size(); ++r) {
      auto* buffer = reinterpret_cast<std::byte*>(reductions_[r].data<uint8_t>());
      if (run_.reference) {
        detail::partial_amax_ref(tables_[r].impl(), buffer);
      } else {
        partial_amax(*plans_[r], tables_[r], image_.there(reductions_[r]), image_.stream());
        image_.fetch(reductions_[r]);
      }
      buffers.push_back(buffer);
      if (filled.size() == r) {
        filled.emplace_back(DType::kUInt8, reductions_[r].view().sizes());
        copy(filled[r], reductions_[r], Stream());
      }
      if (!same_bits(filled[r], reductions_[r])) bad += text(" reduction buffer of rank {}", r);
    }
    for (const auto over : {PartialReduction::Over::kTensor, PartialReduction::Over::kShard}) {
      reduce_max(plans_[0]->reductions(), over, buffers);
    }
    for (size_t r = 0; r < ranks_.size(); ++r) {
      if (run_.reference) {
        detail::partial_cast_ref(tables_[r].impl(), buffers[r]);
      } else {
        image_.send(reductions_[r]);
        partial_cast(*plans_[r], tables_[r], image_.there(reductions_[r]), image_.stream());
      }
    }
    image_.download();
    return bad;
  }

  std::string compare(size_t i, const PartialWeight& w, const Expected& expected) {
    const QuantizedView& want = expected.tensor;
    std::vector<uint8_t> row(want.row_data.bytes()), col(w.col ? want.col_data.bytes() : 0);
    std::string bad;
    for (size_t r = 0; r < ranks_.size(); ++r) {
      const RankWeight& own = *ranks_[r][i];
      const QuantizedView& got = own.memory;
      const std::string rank = compare_rank(own, expected, run_.aligned);
      if (!rank.empty()) bad += text(" rank {}:{}", r, rank);
      if (!take_owned(own, got.row_data, row)) bad += text(" rank {}: foreign codes", r);
      if (w.col && !take_owned(own, got.col_data, col))
        bad += text(" rank {}: foreign col codes", r);
    }
    bad += compare_bytes("row_data", row, want.row_data);
    if (w.col) bad += compare_bytes("col_data", col, want.col_data);
    return bad + compare_transposed(w, row, expected);
  }

 private:
  PartialRun run_;
  Image image_;
  std::vector<std::vector<std::unique_ptr<RankWeight>>> ranks_;
  std::vector<std::unique_ptr<PartialCastPlan>> plans_;
  std::vector<PartialCastTable> tables_;
  std::vector<Tensor> reductions_;
};

template <class T>
void reduce_range(const PartialReduction& range, std::span<std::byte* const> buffers) {
  for (int64_t i = range.offset; i < range.offset + range.bytes; i += sizeof(T)) {
    T largest = 0;
    for (std::byte* b : buffers) largest = std::max(largest, *reinterpret_cast<T*>(b + i));
    for (std::byte* b : buffers) *reinterpret_cast<T*>(b + i) = largest;
  }
}

}  // namespace

uint64_t mix(uint64_t seed, uint64_t i) {
  uint64_t z = seed * 0x9E3779B97F4A7C15ull + i + 1;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

std::string PartialWeight::describe() const {
  std::string out =
      text("{} {} {} x {}{}{}{}{}{} data {} seed {} cuts", name(spec.format), name(spec.element),
           rows, cols, col ? " col" : "", delayed ? " delayed" : "",
           spec.pow2_scales ? " pow2" : "", spec.through_bf16 ? " through_bf16" : "",
           master == DType::kBFloat16 ? " bf16" : "", moiety::quant::name(data), seed);
  for (const int64_t c : cuts) out += text(" {}", c);
  return out;
}

Tensor make_elements(const PartialWeight& w) {
  Tensor out(w.master, {w.rows, w.cols});
  fill(out, w.data, w.seed);
  return out;
}

void reduce_max(std::span<const PartialReduction> ranges, PartialReduction::Over over,
                std::span<std::byte* const> buffers) {
  for (const PartialReduction& range : ranges) {
    if (range.over != over) continue;
    range.dtype == DType::kInt32 ? reduce_range<int32_t>(range, buffers)
                                 : reduce_range<uint8_t>(range, buffers);
  }
}

std::string run_partial_cast(const std::vector<PartialWeight>& weights,
                             const std::vector<PartialRun>& runs) {
  const ThreadBudget serial(1);
  std::vector<Tensor> elements;
  std::vector<Expected> expected;
  for (const PartialWeight& w : weights) {
    elements.push_back(make_elements(w));
    expected.push_back(quantize_whole(w, elements.back()));
  }
  std::string out;
  std::vector<Tensor> filled[2];  // of unaligned and aligned shards
  for (size_t n = 0; n < 2 * runs.size(); ++n) {
    const PartialRun& run = runs[n / 2];
    const ThreadBudget threads(run.threads);
    Simulation simulation(weights, elements, run, n % 2 ? 0xA5 : 0x5A);
    const std::string unlike = simulation.cast(filled[run.aligned]);
    for (size_t i = 0; i < weights.size() && out.size() < 4000; ++i) {
      const std::string difference = unlike + simulation.compare(i, weights[i], expected[i]);
      if (difference.empty()) continue;
      out += text("{}{}{}: {}:{}\n", run.reference ? "reference" : name(run.device),
                  run.aligned ? " aligned" : "", run.shard_only ? " shard_only" : "",
                  weights[i].describe(), difference);
    }
  }
  return out;
}

std::vector<int64_t> even_cuts(int64_t n, int ranks) {
  std::vector<int64_t> out;
  for (int64_t r = 0; r <= ranks; ++r) out.push_back(n * r / ranks);
  return out;
}

std::vector<int64_t> random_cuts(int64_t n, int ranks, uint64_t seed) {
  std::vector<int64_t> out{0, n};
  for (int r = 1; r < ranks; ++r) {
    out.push_back(static_cast<int64_t>(mix(seed, r) % static_cast<uint64_t>(n + 1)));
  }
  std::sort(out.begin(), out.end());
  return out;
}

}  // namespace moiety::quant
