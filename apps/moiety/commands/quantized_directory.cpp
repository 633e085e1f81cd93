#include "apps/moiety/commands/quantized_directory.h"

#include <filesystem>

#include "apps/moiety/commands/npy.h"
#include "apps/moiety/commands/output_file.h"
#include "apps/moiety/exit_code.h"
#include "apps/moiety/report/run_directory.h"
#include "moiety/base/crc32c.h"
#include "moiety/base/replace_file.h"
#include "moiety/checkpoint/checkpoint_error.h"
#include "moiety/checkpoint/file_system.h"
#include "moiety/quant/scale_layout.h"

namespace moiety::app {
namespace {

namespace fs = std::filesystem;

constexpr const char* kDescription = "quantized.json";
constexpr uint64_t kLongestDescription = 64 << 10;

struct NamedArray {
  const char* name;
  TensorView QuantizedView::*view;
  ArraySpec QuantizedSizes::*size;
};
constexpr NamedArray kArrays[] = {
    {"row_data", &QuantizedView::row_data, &QuantizedSizes::row_data},
    {"row_scales", &QuantizedView::row_scales, &QuantizedSizes::row_scales},
    {"col_data", &QuantizedView::col_data, &QuantizedSizes::col_data},
    {"col_scales", &QuantizedView::col_scales, &QuantizedSizes::col_scales},
    {"amax", &QuantizedView::amax, &QuantizedSizes::amax},
    {"tensor_scale", &QuantizedView::tensor_scale, &QuantizedSizes::tensor_scale},
};

std::string file_name(const char* array) { return text("{}.npy", array); }
std::string path_of(const std::string& directory, const char* array) {
  return directory + "/" + file_name(array);
}

const char* descr_of(DType dtype) { return dtype == DType::kFloat32 ? "<f4" : "|u1"; }

std::span<const int64_t> sizes_of(const ArraySpec& array) {
  return {array.sizes.data(), static_cast<size_t>(array.dims)};
}

QuantizedDescription read_description(const std::string& path) {
  std::string json;
  try {
    json = checkpoint::read_text(checkpoint::posix(), path, kLongestDescription);
  } catch (const Error& e) {
    throw DataError("{}", e.what());
  }
  return parse_quantized_description(path, json);
}

void compare_checksum(const std::string& path, const QuantizedDescription& d, const char* array,
                      uint32_t crc) {
  if (d.checksums.empty()) return;  // files of an older version
  const auto at = d.checksums.find(file_name(array));
  if (at == d.checksums.end()) throw DataError("{}: {} has no checksum of it", path, kDescription);
  if (at->second == crc) return;
  throw DataError("{}: the file is damaged: crc32c {:08x}, {} says {:08x}", path, crc, kDescription,
                  at->second);
}

// Reads the file of an array, which must have this dtype and shape.
TensorView read_array(const std::string& directory, const QuantizedDescription& d, const char* name,
                      const ArraySpec& expected, std::vector<Buffer>& memory) {
  const std::string path = path_of(directory, name);
  NpyArray array = read_npy(path);
  const NpyHeader wanted{descr_of(expected.dtype),
                         {sizes_of(expected).begin(), sizes_of(expected).end()}};
  if (array.header.descr != wanted.descr || array.header.shape != wanted.shape) {
    throw DataError("{}: is {}, but by {} it is {}", path, array.header.describe(), kDescription,
                    wanted.describe());
  }
  compare_checksum(path, d, name, array.crc32c);
  memory.push_back(std::move(array.data));
  return TensorView(memory.back().data(), expected.dtype, sizes_of(expected));
}

// The array as its file has it.
ArraySpec stored_size(const QuantizedDescription& d, const QuantizedView& view,
                      const NamedArray& a) {
  const bool row = a.view == &QuantizedView::row_scales;
  const bool is_scales = row || a.view == &QuantizedView::col_scales;
  if (!is_scales || d.layout == ScaleLayout::kCompact) {
    return quantized_sizes(d.spec, d.rows(), d.cols(), d.directions).*a.size;
  }
  return quant::scale_layout_size(view, row ? Direction::kRow : Direction::kCol, d.layout);
}

// Reads the scales of a direction in their layout, and puts compact ones in their place.
void read_scales(const std::string& directory, const NamedArray& a, StoredTensor& out) {
  const Direction direction =
      a.view == &QuantizedView::row_scales ? Direction::kRow : Direction::kCol;
  const bool row = direction == Direction::kRow;
  const QuantizedDescription& d = out.description;
  const QuantizedSizes sizes = quantized_sizes(d.spec, d.rows(), d.cols(), d.directions);
  const ArraySpec& compact = row ? sizes.row_scales : sizes.col_scales;
  TensorView& view = row ? out.view.row_scales : out.view.col_scales;
  const TensorView scales =
      read_array(directory, d, a.name, stored_size(d, out.view, a), out.memory);
  out.memory.emplace_back(compact.bytes(), "scales");
  view = TensorView(out.memory.back().data(), compact.dtype, sizes_of(compact));
  quant::compact_scales(scales, d.layout, out.view, direction, Stream());
}

// Writes the files into a directory that exists.
std::vector<std::string> write_arrays(const std::string& directory,
                                      const QuantizedDescription& description,
                                      const QuantizedView& view) {
  std::error_code error;
  const std::string json = text("{}/{}", directory, kDescription);
  fs::remove(json, error);  // without it there is no tensor
  std::vector<std::string> lines;
  QuantizedDescription checked = description;
  for (const NamedArray& a : kArrays) {
    const TensorView& array = view.*a.view;
    const std::string path = path_of(directory, a.name);
    if (!array.defined()) {
      fs::remove(path, error);
      continue;
    }
    const std::string header = npy_header(descr_of(array.dtype()), array.sizes());
    const std::string_view data(static_cast<const char*>(array.raw()),
                                static_cast<size_t>(array.bytes()));
    replace_file(path, header, data);
    checked.checksums[file_name(a.name)] = crc32c(data.data(), data.size(), crc32c(header));
    const NpyHeader stored{descr_of(array.dtype()), {array.sizes().begin(), array.sizes().end()}};
    lines.push_back(text("{}: {}", path, stored.describe()));
  }
  replace_file(json, to_json(checked));
  return lines;
}

}  // namespace

void check_free(const std::string& directory, bool overwrite) {
  if (overwrite) return;
  std::vector<std::string> paths{text("{}/{}", directory, kDescription)};
  for (const NamedArray& a : kArrays) paths.push_back(path_of(directory, a.name));
  for (const std::string& path : paths) check_free_file(path, false);
}

std::vector<std::string> write_quantized(const std::string& directory,
                                         const QuantizedDescription& description,
                                         const QuantizedView& view) {
  std::error_code error;
  const bool made = fs::create_directories(directory, error);
  if (error) throw IoError("{}: cannot be made: {}", directory, error.message());
  try {
    return write_arrays(directory, description, view);
  } catch (...) {
    if (made) fs::remove_all(directory, error);  // what was made here alone
    throw;
  }
}

StoredTensor read_quantized(const std::string& directory) {
  StoredTensor out;
  out.description = read_description(text("{}/{}", directory, kDescription));
  const QuantizedDescription& d = out.description;
  out.view.spec = d.spec;
  out.view.rows = d.rows();
  out.view.cols = d.cols();
  const bool compact = d.layout == ScaleLayout::kCompact;
  if (!compact && is_tile(d.spec.format)) {
    fail(ErrorKind::kUnsupported,
         "{}: scales of tiles in layout {} cannot be read back; quantize with --layout compact",
         directory, kLayoutWords[static_cast<size_t>(d.layout)]);
  }
  const QuantizedSizes sizes = quantized_sizes(d.spec, d.rows(), d.cols(), d.directions);
  for (const NamedArray& a : kArrays) {
    const ArraySpec& size = sizes.*a.size;
    if (size.dims == 0) continue;
    const bool is_scales =
        a.view == &QuantizedView::row_scales || a.view == &QuantizedView::col_scales;
    if (!compact && is_scales) {
      read_scales(directory, a, out);
    } else {
      out.view.*a.view = read_array(directory, d, a.name, size, out.memory);
    }
  }
  return out;
}

bool is_quantized(const std::string& directory) {
  return fs::exists(text("{}/{}", directory, kDescription));
}

QuantizedCheck check_quantized(const std::string& directory) {
  QuantizedCheck check{read_description(text("{}/{}", directory, kDescription))};
  const QuantizedDescription& d = check.description;
  QuantizedView view;
  view.spec = d.spec;
  view.rows = d.rows();
  view.cols = d.cols();
  const QuantizedSizes sizes = quantized_sizes(d.spec, d.rows(), d.cols(), d.directions);
  for (const NamedArray& a : kArrays) {
    if ((sizes.*a.size).dims == 0) continue;
    std::vector<Buffer> memory;
    read_array(directory, d, a.name, stored_size(d, view, a), memory);
    check.bytes += memory.back().bytes();
    ++check.arrays;
  }
  return check;
}

}  // namespace moiety::app
