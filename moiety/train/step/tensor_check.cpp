#include "moiety/train/step/tensor_check.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>

#include "moiety/base/buffer.h"
#include "moiety/base/copy.h"
#include "moiety/formats/bf16.h"
#include "moiety/formats/fp32.h"

namespace moiety::train {
namespace {

using Index = std::array<int64_t, kMaxDims>;

// Tensors where the host can read them: those on a GPU as copies by its stream, gaps and all, which
// live as long as this object.
class OnHost {
 public:
  explicit OnHost(const Stream& stream) : stream_(stream) {}

  TensorView operator()(const TensorView& x) {
    if (!x.defined() || x.device().type == DeviceType::kCpu || x.numel() == 0) return x;
    int64_t last = 0;
    for (int d = 0; d < x.dims(); ++d) last += (x.size(d) - 1) * x.stride(d);
    const int64_t bytes = byte_size(x.dtype(), last + 1);
    const TensorView there(x.raw(), DType::kUInt8, {bytes}, x.device());
    copies_.push_back(to_host(there, stream_));
    return {copies_.back().view().raw(), x.dtype(), x.sizes(), x.strides()};
  }

 private:
  const Stream& stream_;
  std::vector<Tensor> copies_;
};

// Calls row(index, pointer) for every index of all dimensions but the last, in row-major order,
// until it returns false.
template <class T, class Row>
void for_each_row(const TensorView& x, Row&& row) {
  const int outer = std::max(0, x.dims() - 1);
  if (x.numel() == 0) return;
  Index at{};
  for (;;) {
    const T* p = static_cast<const T*>(x.raw());
    for (int d = 0; d < outer; ++d) p += at[d] * x.stride(d);
    if (!row(at, p)) return;
    int d = outer - 1;
    while (d >= 0 && ++at[d] == x.size(d)) at[d--] = 0;
    if (d < 0) return;
  }
}

template <class F>
void with_float(DType dtype, F&& f) {
  if (dtype == DType::kFloat32) f(float());
  if (dtype == DType::kBFloat16) f(bf16());
  if (dtype == DType::kFloat64) f(double());
}

double value_of(float x) { return x; }
double value_of(double x) { return x; }
double value_of(bf16 x) { return static_cast<float>(x); }

// The expert that an index belongs to: -1 for no particular one, -2 if nothing lies there.
class ExpertOf {
 public:
  ExpertOf(const TensorView& x, const ExpertRows* rows) : rows_(rows) {
    if (!rows || !rows->count_L.defined()) return;
    by_row_.assign(static_cast<size_t>(x.size(0)), -2);
    for (size_t l = 0; l < rows->experts.size(); ++l) {
      const int64_t begin = rows->begin_L1.data<int64_t>()[l];
      std::fill_n(by_row_.begin() + begin, rows->count_L.data<int64_t>()[l], rows->experts[l]);
    }
  }
  int operator()(const Index& at) const {
    if (!rows_) return -1;
    return by_row_.empty() ? rows_->experts[at[0]] : by_row_[at[0]];
  }

 private:
  const ExpertRows* rows_;
  std::vector<int> by_row_;
};

struct Place {
  Index index{};
  int expert = -1;
  double value = 0;
};

std::optional<Place> first_non_finite(const TensorView& x, const ExpertRows* rows) {
  std::optional<Place> place;
  const ExpertOf expert_of(x, rows);
  with_float(x.dtype(), [&](auto element) {
    using T = decltype(element);
    const int64_t n = x.dims() ? x.size(-1) : 1, stride = x.dims() ? x.stride(-1) : 1;
    for_each_row<T>(x, [&](const Index& at, const T* p) {
      const auto scan = [&](int64_t i, int expert) {
        const double v = value_of(p[i * stride]);
        if (std::isfinite(v)) return true;
        place = Place{at, expert, v};
        if (x.dims()) place->index[x.dims() - 1] = i;
        return false;
      };
      if (x.dims() == 1) {  // the rows are elements
        for (int64_t i = 0; i < n; ++i) {
          const int expert = expert_of({i});
          if (expert != -2 && !scan(i, expert)) return false;
        }
        return true;
      }
      const int expert = expert_of(at);
      for (int64_t i = 0; expert != -2 && i < n; ++i) {
        if (!scan(i, expert)) return false;
      }
      return true;
    });
  });
  return place;
}

std::string index_text(std::span<const int64_t> index) {
  std::string out;
  for (const int64_t i : index) out += (out.empty() ? "" : ", ") + std::to_string(i);
  return "[" + out + "]";
}

JsonLine statistics_json(const TensorStatistics& s) {
  return JsonLine()
      .add("tensor", s.tensor)
      .add("elements", s.elements)
      .add("nan", s.nan)
      .add("infinite", s.infinite)
      .add("min", s.min)
      .add("max", s.max)
      .add("mean", s.mean)
      .add("rms", s.rms);
}

// The layer in a name: "layers.12.attn.q.weight" gives 12.
int64_t layer_of(const std::string& name) {
  constexpr std::string_view kPrefix = "layers.";
  return name.starts_with(kPrefix) ? std::atoll(name.c_str() + kPrefix.size()) : -1;
}

// Sets the name and index that a checkpoint has for element `at` of a parameter's memory.
void to_logical(const optim::ParamSpec& spec, int64_t at, Finding& finding) {
  const int64_t row = at / spec.row_elements;
  const auto run = std::find_if(spec.row_map.begin(), spec.row_map.end(), [&](const auto& r) {
    return row >= r.memory_row && row < r.memory_row + r.rows;
  });
  const optim::LogicalTensor& tensor = spec.tensors[run->tensor];
  finding.tensor = tensor.name;
  int64_t i = (run->logical_row + row - run->memory_row) * tensor.row_elements() +
              spec.first_column + at % spec.row_elements;
  finding.index.resize(tensor.shape.size());
  for (size_t d = tensor.shape.size(); d-- > 0; i /= tensor.shape[d]) {
    finding.index[d] = i % tensor.shape[d];
  }
  if (spec.expert) finding.expert = static_cast<int>(finding.index[0]);
}

}  // namespace

TensorStatistics tensor_statistics(const TensorView& x, const ExpertRows* rows) {
  TensorStatistics s;
  s.tensor = x.describe();
  double sum = 0, squares = 0;
  const ExpertOf expert_of(x, rows);
  with_float(x.dtype(), [&](auto element) {
    using T = decltype(element);
    const int64_t n = x.dims() ? x.size(-1) : 1, stride = x.dims() ? x.stride(-1) : 1;
    for_each_row<T>(x, [&](const Index& at, const T* p) {
      for (int64_t i = 0; i < n; ++i) {
        if (expert_of(x.dims() == 1 ? Index{i} : at) == -2) continue;
        const double v = value_of(p[i * stride]);
        const int64_t finite = s.elements++ - s.nan - s.infinite;
        s.nan += std::isnan(v);
        s.infinite += std::isinf(v);
        if (!std::isfinite(v)) continue;
        s.min = finite == 0 ? v : std::min(s.min, v);
        s.max = finite == 0 ? v : std::max(s.max, v);
        sum += v;
        squares += v * v;
      }
      return true;
    });
  });
  const auto finite = static_cast<double>(std::max<int64_t>(1, s.elements - s.nan - s.infinite));
  s.mean = sum / finite;
  s.rms = std::sqrt(squares / finite);
  return s;
}

std::string Finding::sentence() const {
  std::string where = layer >= 0 ? text("layer {}", layer) : "";
  if (expert >= 0) where += text("{}expert {}", where.empty() ? "" : ", ", expert);
  if (!where.empty()) where += ": ";
  const char* what = std::isnan(value) ? "nan" : value > 0 ? "inf" : "-inf";
  if (operation == "weight") {
    return text("{}weight {} is {} at {}", where, tensor, what, index_text(index));
  }
  return text("{}{} ({}) stored {} at {} of {}", where, operation,
              backward ? "backward" : "forward", what, index_text(index), tensor);
}

JsonLine Finding::json() const {
  JsonLine line;
  if (layer >= 0) line.add("layer", layer);
  if (expert >= 0) line.add("expert", expert);
  line.add("operation", operation)
      .add("tensor", tensor)
      .add("pass", operation == "weight" ? "none"
                   : backward            ? "backward"
                                         : "forward")
      .raw("index", index_text(index))
      .add("value", value)
      .raw("statistics", statistics_json(statistics).text());
  std::string list;
  for (const TensorStatistics& s : inputs) {
    list += (list.empty() ? "" : ", ") + statistics_json(s).text();
  }
  return line.raw("inputs", "[" + list + "]");
}

void FirstNonFinite::stored(const StoredTensor& t) {
  ++order_;
  if (finding_ || !t.view.defined()) return;
  OnHost on_host(stream_);
  const TensorView view = on_host(t.view);
  std::optional<ExpertRows> expert_rows;
  if (t.rows) {
    expert_rows = {on_host(t.rows->begin_L1), on_host(t.rows->count_L), t.rows->experts};
  }
  const ExpertRows* rows = expert_rows ? &*expert_rows : nullptr;
  const std::optional<Place> place = first_non_finite(view, rows);
  if (!place) return;
  finding_ = Finding{.order = order_,
                     .layer = layer_,
                     .expert = place->expert,
                     .backward = backward_,
                     .operation = std::string(t.operation),
                     .tensor = std::string(t.name),
                     .index = {place->index.begin(), place->index.begin() + view.dims()},
                     .value = place->value,
                     .statistics = tensor_statistics(view, rows),
                     .inputs = {}};
  const bool by_row = rows && rows->count_L.defined();
  for (const TensorView& input : t.inputs) {
    if (!input.defined()) continue;
    const bool same_rows = by_row && input.dims() > 0 && input.size(0) == view.size(0);
    finding_->inputs.push_back(tensor_statistics(on_host(input), same_rows ? rows : nullptr));
  }
}

void FirstNonFinite::look_at_weights(std::span<const optim::Parameter> parameters) {
  for (const optim::Parameter& p : parameters) {
    if (finding_) return;
    OnHost on_host(stream_);
    // A cast tells which of its tensors held such a value, but not which element.
    for (size_t e = 0; e < p.quantized.size() && !finding_; ++e) {
      const QuantizedView& q = p.quantized[e];
      if (!(*on_host(q.flags).data<uint32_t>() & kFlagNonFinite)) continue;
      Finding found;
      to_logical(p.spec, int64_t(e) * q.rows * q.cols, found);
      found.operation = "weight";
      found.layer = layer_of(found.tensor);
      found.value = kCanonicalNan;
      finding_ = std::move(found);
    }
    if (!p.weight.defined()) continue;
    const TensorView weight = on_host(p.weight);
    const std::optional<Place> place = first_non_finite(weight, nullptr);
    if (!place) continue;
    int64_t at = 0;
    for (int d = 0; d < weight.dims(); ++d) at = at * weight.size(d) + place->index[d];
    Finding found;
    to_logical(p.spec, at, found);
    found.operation = "weight";
    found.layer = layer_of(found.tensor);
    found.value = place->value;
    found.statistics = tensor_statistics(weight);
    finding_ = std::move(found);
  }
}

}  // namespace moiety::train
