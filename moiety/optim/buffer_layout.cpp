#include "moiety/optim/buffer_layout.h"

#include <algorithm>
#include <functional>
#include <map>
#include <numeric>
#include <set>
#include <string_view>

#include "moiety/base/crc32c.h"
#include "moiety/base/error.h"
#include "moiety/base/integer.h"
#include "moiety/base/rng.h"

namespace moiety::optim {
namespace {

int64_t product(std::span<const int64_t> sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>());
}

// Parameters that share buckets.
struct Family {
  explicit Family(const ParamSpec& spec, const gtp::Grid& grid)
      : expert(spec.expert),
        domain(grid.several(spec.domain)),
        format_class(spec.format_class),
        frozen(spec.frozen) {}
  bool expert;
  gtp::Axes domain;
  int format_class;
  bool frozen;
  friend auto operator<=>(const Family&, const Family&) = default;
};

void layout_family(std::span<const ParamSpec> specs, const gtp::Grid& grid, const Family& family,
                   int64_t bucket_elements, std::vector<BucketLayout>& out) {
  const int ranks = grid.degree(family.domain);
  const size_t first = out.size();
  int64_t end = 0;  // end of the last bucket
  for (int p = static_cast<int>(specs.size()) - 1; p >= 0; --p) {
    if (Family(specs[p], grid) != family) continue;
    const int64_t numel = specs[p].numel();
    int64_t start = round_up(end, kParameterAlignment);
    if (out.size() == first || start + numel > bucket_elements) {
      out.push_back({.expert = family.expert,
                     .frozen = family.frozen,
                     .domain = family.domain,
                     .ranks = ranks,
                     .slots = {}});
      start = 0;
    }
    out.back().slots.push_back({p, start});
    end = start + numel;
    out.back().length = round_up(end, kParameterAlignment * ranks);
  }
}

void check_spec(const ParamSpec& spec) {
  MOIETY_CHECK(spec.rows >= 0 && spec.row_elements >= 1 && product(spec.shape) == spec.numel(),
               "parameter {}: its shape has {} elements, its matrix is {} x {}", spec.name,
               product(spec.shape), spec.rows, spec.row_elements);
  int64_t row = 0;
  for (const RowRun& run : spec.row_map) {
    MOIETY_CHECK(run.memory_row >= row && run.rows >= 0, "parameter {}: a row run at {} follows {}",
                 spec.name, run.memory_row, row);
    MOIETY_CHECK(run.tensor >= 0 && run.tensor < static_cast<int>(spec.tensors.size()),
                 "parameter {}: row run of tensor {} of {}", spec.name, run.tensor,
                 spec.tensors.size());
    const LogicalTensor& tensor = spec.tensors[run.tensor];
    MOIETY_CHECK(!tensor.shape.empty() && spec.first_column >= 0 &&
                     spec.first_column + spec.row_elements <= tensor.row_elements(),
                 "parameter {}: columns [{}, {}) are outside of {}", spec.name, spec.first_column,
                 spec.first_column + spec.row_elements, tensor.name);
    MOIETY_CHECK(run.logical_row >= 0 &&
                     (run.logical_row + run.rows) * tensor.row_elements() <= product(tensor.shape),
                 "parameter {}: rows [{}, {}) are outside of {}", spec.name, run.logical_row,
                 run.logical_row + run.rows, tensor.name);
    row = run.memory_row + run.rows;
  }
  MOIETY_CHECK(row <= spec.rows, "parameter {}: its row runs end at {}, it has {} rows", spec.name,
               row, spec.rows);
  for (const gtp::Axis axis : gtp::kAllAxes) {
    MOIETY_CHECK(!spec.domain.has(axis) || gtp::of_experts(axis) == spec.expert,
                 "parameter {}: {} is not an axis of its grid", spec.name, gtp::name(axis));
  }
}

std::string describe(std::span<const ParamSpec> specs, const BucketLayout& bucket, bool parts) {
  std::string all = text("bucket {} {}\n", bucket.ranks, bucket.length);
  for (const BucketLayout::Slot& slot : bucket.slots) {
    const ParamSpec& spec = specs[slot.parameter];
    all += text("{} {} {} {} {} {}\n", spec.name, slot.start, spec.rows, spec.row_elements,
                spec.decay, spec.frozen);
    if (!parts) continue;
    all += text("{}\n", spec.first_column);
    for (const RowRun& run : spec.row_map) {
      all += text("{} {} {} {}\n", run.memory_row, spec.tensors[run.tensor].name, run.logical_row,
                  run.rows);
    }
  }
  return all;
}

}  // namespace

std::vector<BucketLayout> layout_buffers(std::span<const ParamSpec> specs, const gtp::Grid& grid,
                                         int64_t bucket_elements) {
  std::vector<BucketLayout> out;
  std::set<Family> families;
  for (const ParamSpec& spec : specs) families.emplace(spec, grid);
  for (const Family& family : families) {
    layout_family(specs, grid, family, bucket_elements, out);
  }
  return out;
}

TensorView slot_view(const TensorView& flat, const BucketLayout::Slot& slot,
                     const ParamSpec& spec) {
  const TensorView part = flat.slice(0, slot.start, slot.start + spec.numel());
  return TensorView(part.raw(), part.dtype(), spec.shape, part.device());
}

std::vector<ElementRun> segment_runs(std::span<const ParamSpec> specs, const BucketLayout& bucket,
                                     int rank) {
  const int64_t first = rank * bucket.segment();
  std::vector<ElementRun> out;
  for (const BucketLayout::Slot& slot : bucket.slots) {
    const ParamSpec& spec = specs[slot.parameter];
    for (const RowRun& rows : spec.row_map) {
      const int64_t at = slot.start + rows.memory_row * spec.row_elements - first;
      const int64_t begin = std::max<int64_t>(at, 0);
      const int64_t end = std::min(at + rows.rows * spec.row_elements, bucket.segment());
      if (begin >= end) continue;
      const int64_t logical = rows.logical_row * spec.row_elements + begin - at;
      // Row runs that continue each other, in memory and in the tensor, become one.
      if (!out.empty() && out.back().end == begin && out.back().parameter == slot.parameter &&
          out.back().tensor == rows.tensor &&
          out.back().logical + out.back().end - out.back().begin == logical) {
        out.back().end = end;
        continue;
      }
      out.push_back({.begin = begin,
                     .end = end,
                     .parameter = slot.parameter,
                     .tensor = rows.tensor,
                     .logical = logical,
                     .columns = {spec.first_column, spec.row_elements,
                                 spec.tensors[rows.tensor].row_elements()},
                     .tensor_id = tensor_id(spec.tensors[rows.tensor].name),
                     .decay = spec.decay,
                     .kind = spec.kind});
    }
  }
  return out;
}

void check_specs(std::span<const ParamSpec> specs) {
  std::map<uint32_t, std::string_view> names;
  for (const ParamSpec& spec : specs) {
    check_spec(spec);
    for (const LogicalTensor& tensor : spec.tensors) {
      const auto [it, fresh] = names.emplace(tensor_id(tensor.name), tensor.name);
      MOIETY_CHECK(fresh, "parameter {}: tensors {} and {} have the same tensor id", spec.name,
                   it->second, tensor.name);
    }
  }
}

uint32_t size_hash(std::span<const ParamSpec> specs, const BucketLayout& bucket) {
  return crc32c(describe(specs, bucket, false));
}

uint32_t part_hash(std::span<const ParamSpec> specs, const BucketLayout& bucket) {
  return crc32c(describe(specs, bucket, true));
}

}  // namespace moiety::optim
