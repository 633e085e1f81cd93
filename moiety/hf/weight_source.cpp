#include "moiety/hf/weight_source.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <set>

#include "moiety/base/printable.h"
#include "moiety/base/rng.h"
#include "moiety/checkpoint/checkpoint_error.h"
#include "moiety/checkpoint/json.h"
#include "moiety/formats/bf16.h"
#include "moiety/formats/fp16.h"
#include "moiety/hf/key_list.h"

namespace moiety::hf {
namespace {

using checkpoint::BoxRuns, checkpoint::Entry, checkpoint::refuse, checkpoint::shape_text;
using checkpoint::whole;

constexpr int64_t kReadBytes = int64_t{8} << 20;    // of float32 elements that are read at a time
constexpr int64_t kMostExperts = int64_t{1} << 18;  // of all layers: a bound of what is listed

bool is_readable(const Entry& entry) {
  const auto type = entry.type->dtype;
  return type == DType::kBFloat16 || type == DType::kFloat16 || type == DType::kFloat32;
}

// Lists of what does not fit, by kind.
class Differences {
 public:
  void add(const char* kind, const std::string& what) { lists_[kind].insert(what); }
  void check(const std::string& path) const {
    if (lists_.empty()) return;
    std::string out;
    for (const auto& [kind, names] : lists_) {
      out += text("{}{} {}: {}", out.empty() ? "" : "; ", names.size(), kind, key_list(names));
    }
    refuse("{} does not fit its config.json: {}", path, out);
  }

 private:
  std::map<std::string, std::set<std::string>> lists_;
};

template <class T>
bool widen(const std::byte* from, int64_t n, float* out) {
  bool finite = true;
  for (int64_t i = 0; i < n; ++i) {
    T x;
    std::memcpy(&x, from + i * static_cast<int64_t>(sizeof(T)), sizeof(T));
    out[i] = static_cast<float>(x);
    finite &= std::isfinite(out[i]);
  }
  return finite;
}

// Float32 values of n stored elements; false if one is not finite.
bool widen(DType type, const std::byte* from, int64_t n, float* out) {
  if (type == DType::kBFloat16) return widen<bf16>(from, n, out);
  if (type == DType::kFloat16) return widen<fp16>(from, n, out);
  return widen<float>(from, n, out);
}

// Elements [begin, begin + n) of a stored tensor, row-major.
void read_elements(const Folder::Stored& stored, int64_t begin, int64_t n, float* out) {
  const DType type = *stored.entry->type->dtype;
  std::vector<std::byte> bytes(static_cast<size_t>(byte_size(type, n)));
  stored.file->read(stored.entry->begin + static_cast<uint64_t>(byte_size(type, begin)), bytes);
  if (widen(type, bytes.data(), n, out)) return;
  const auto* bad = std::find_if(out, out + n, [](float x) { return !std::isfinite(x); });
  refuse("{}: {}: element {} is {}, expected a finite number", stored.file->path(),
         printable(stored.entry->name), begin + (bad - out), *bad);
}

int64_t elements(const Entry& entry) { return checkpoint::volume(whole(entry.shape)); }

}  // namespace

WeightSource::WeightSource(const Folder& folder, const model::Config& config,
                           const Drawing& drawing)
    : folder_(folder), config_(config), drawing_(drawing) {
  const Family family = folder.description().family;
  if (const int64_t n = config.moe_layers() * config.router.experts; n > kMostExperts) {
    refuse("{}: {} layers of {} experts are more than {} in all", folder.path(),
           config.moe_layers(), config.router.experts, kMostExperts);
  }
  tensors_ = model_tensors(config, family);
  for (const ModelTensor& tensor : tensors_) targets_[tensor.name].tensor = tensor;
  Form form = Form::kOneByOne;
  for (const auto& [key, stored] : folder.tensors()) {
    if (key.ends_with(".experts.gate_up_proj")) form = Form::kStacked;
  }
  match(form);
}

void WeightSource::match(Form form) {
  Differences differences;
  std::set<std::string> expected;
  for (const FolderTensor& t : folder_tensors(config_, folder_.description().family, form)) {
    expected.insert(t.name);
    const auto at = folder_.tensors().find(t.name);
    if (at == folder_.tensors().end()) {
      differences.add("missing", t.name);
      continue;
    }
    const Entry& entry = *at->second.entry;
    if (!is_readable(entry)) {
      differences.add("of another type",
                      text("{} {} (read are BF16, F16, F32)", t.name, entry.type->name));
    } else if (entry.shape != t.shape) {
      differences.add("of another shape", text("{} {} (needed {})", t.name, shape_text(entry.shape),
                                               shape_text(t.shape)));
    } else {
      targets_.at(t.model_tensor).parts.push_back({t.box, at->second});
    }
  }
  for (const auto& [key, stored] : folder_.tensors()) {
    const bool head = config_.tie_embeddings && key == kHeadName;
    if (!head && !expected.contains(key)) differences.add("unexpected", key);
  }
  differences.check(folder_.path());
  keys_ = static_cast<int64_t>(expected.size());
}

void WeightSource::check_tied_head() const {
  const auto head = folder_.tensors().find(kHeadName);
  if (!config_.tie_embeddings || head == folder_.tensors().end()) return;
  const Folder::Stored& embed = targets_.at("embed.weight").parts.at(0).stored;
  const Entry& entry = *head->second.entry;
  if (!is_readable(entry) || entry.shape != embed.entry->shape) {
    refuse("{}: the model is tied, and {} is {} {}, the embedding {} {}", folder_.path(), kHeadName,
           entry.type->name, shape_text(entry.shape), embed.entry->type->name,
           shape_text(embed.entry->shape));
  }
  const int64_t all = elements(entry), step = kReadBytes / 4;
  std::vector<float> a(static_cast<size_t>(std::min(all, step))), b(a.size());
  for (int64_t at = 0; at < all; at += step) {
    const int64_t n = std::min(step, all - at);
    read_elements(head->second, at, n, a.data());
    read_elements(embed, at, n, b.data());
    const size_t bytes = static_cast<size_t>(n) * sizeof(float);
    if (std::memcmp(a.data(), b.data(), bytes) == 0) continue;
    const int64_t i = std::mismatch(a.begin(), a.begin() + n, b.begin()).first - a.begin();
    refuse("{}: the model is tied, and {} differs from the embedding at element {}: {} and {}",
           folder_.path(), kHeadName, at + i, a[static_cast<size_t>(i)], b[static_cast<size_t>(i)]);
  }
}

// Copies `region`, which lies in the part, to its place in `box`.
void WeightSource::read_part(const Part& part, const Box& region, const Box& box,
                             float* out) const {
  std::vector<Box> pieces;
  checkpoint::cut_box(region, sizeof(float), kReadBytes, pieces);
  std::vector<float> near, values;
  for (const Box& piece : pieces) {
    const BoxRuns runs(part.box, piece);
    if (runs.count() == 0 || runs.length() == 0) continue;
    // The elements from the first run's to the last one's; where the box has all columns, just its.
    const int64_t first = runs.outer_offset(0);
    const int64_t span = runs.outer_offset(runs.count() - 1) + runs.length() - first;
    near.resize(static_cast<size_t>(span));
    read_elements(part.stored, first, span, near.data());
    const float* from = near.data();
    if (runs.count() > 1) {
      values.resize(static_cast<size_t>(runs.count() * runs.length()));
      for (int64_t k = 0; k < runs.count(); ++k) {
        std::copy_n(near.data() + (runs.outer_offset(k) - first), runs.length(),
                    values.data() + k * runs.length());
      }
      from = values.data();
    }
    checkpoint::copy_region(piece, sizeof(float), piece, reinterpret_cast<const std::byte*>(from),
                            box, reinterpret_cast<std::byte*>(out));
  }
}

// Sets or adds std x normal numbers of the tensor's elements.
void WeightSource::draw(const Target& target, const Box& box, float std, bool add,
                        float* out) const {
  const BoxRuns runs(whole(target.tensor.shape), box);
  std::vector<float> numbers(static_cast<size_t>(runs.length()));
  for (int64_t k = 0; k < runs.count(); ++k, out += runs.length()) {
    init_normals(drawing_.seed, tensor_id(target.tensor.name),
                 static_cast<uint64_t>(runs.outer_offset(k)), runs.length(), std, numbers.data());
    for (int64_t i = 0; i < runs.length(); ++i) {
      out[i] = numbers[static_cast<size_t>(i)] + (add ? out[i] : 0);
    }
  }
}

void WeightSource::read(const std::string& tensor, const Box& box, float* out) const {
  const Target& target = targets_.at(tensor);
  std::fill_n(out, checkpoint::volume(box), 0.0f);
  for (const Part& part : target.parts) {
    const auto region = checkpoint::intersect(part.box, box);
    if (region && checkpoint::volume(*region) > 0) read_part(part, *region, box, out);
  }
  if (target.tensor.drawn) draw(target, box, drawing_.router_std, false, out);
  if (target.tensor.noisy && drawing_.noise_std > 0) {
    draw(target, box, drawing_.noise_std, true, out);
  }
}

}  // namespace moiety::hf
