// The arguments and the work of `moiety quantize`.

#include <CLI/CLI.hpp>

#include "apps/moiety/commands/command_line.h"
#include "apps/moiety/commands/npy.h"
#include "apps/moiety/commands/quantize.h"
#include "apps/moiety/commands/quantized_directory.h"
#include "apps/moiety/exit_code.h"
#include "apps/moiety/report/result.h"
#include "moiety/base/log.h"
#include "moiety/quant/quantize.h"
#include "moiety/quant/scale_layout.h"

namespace moiety::app {
namespace {

constexpr const char* kQuantizeAbout =
    "Quantizes a matrix, as training does, into files that any other implementation can read.\n\n"
    "IN.npy is float32, or bfloat16: '<V2' as ml_dtypes writes it, or uint16 with --bf16. It is "
    "in\n"
    "C order; dimensions before the last are taken together as rows. DIR gets row_data, "
    "row_scales,\n"
    "col_data, col_scales, amax and tensor_scale .npy, as far as the format has them, and\n"
    "quantized.json, which says what they are. Codes and byte scales are uint8; 4-bit codes lie "
    "two\n"
    "in a byte, the first in the low half. docs/formats.md has the formats.";

constexpr Format kFormats[] = {
    Format::kFp8Tensor,   Format::kFp8Block1x128, Format::kFp8Block128x128, Format::kMxfp8,
    Format::kMxfp8Tile32, Format::kNvfp4,         Format::kNvfp4Tile16};

struct QuantizeArguments {
  std::string input, directory;
  Format format = Format::kMxfp8;
  std::string element, layout = "compact";
  Directions directions{false, false};
  bool bf16 = false, stochastic = false, rht = false, row_scaled = false, force = false;
  bool pow2 = false, no_pow2 = false;
  quant::RngState rng;
  int64_t tensor_id = 0;
};

void add_options(CLI::App& app, QuantizeArguments& a) {
  std::vector<std::pair<std::string_view, Format>> formats;
  std::string names;
  for (const Format f : kFormats) {
    formats.emplace_back(name(f), f);
    names += text("{}{}", names.empty() ? "" : ", ", name(f));
  }
  app.add_option("IN.npy", a.input, "the matrix")->required();
  add_choice(app, "--format", a.format, formats, names)->required()->default_str("");
  app.add_option("--out", a.directory, "DIR of the files to write")->required();
  add_word(app, "--element", a.element, one_of("e4m3", "e5m2"),
           "e4m3 or e5m2, of FP8 formats [e4m3]");
  app.add_flag("--row", a.directions.row, "blocks along rows: the default");
  app.add_flag("--col", a.directions.col, "blocks along columns; both with --row");
  CLI::Option* stochastic =
      add_choice<bool>(app, "--rounding", a.stochastic, {{"nearest", false}, {"stochastic", true}},
                       "nearest or stochastic");
  add_seed(app, "--seed", a.rng.seed, "of stochastic rounding")->needs(stochastic);
  add_number(app, "--tensor-id", a.tensor_id, between(0, UINT32_MAX), "of stochastic rounding")
      ->needs(stochastic);
  add_seed(app, "--draw", a.rng.draw, "number of the pass, of stochastic rounding")
      ->needs(stochastic);
  app.add_flag("--rht", a.rht, "nvfp4: random Hadamard transform of the columns");
  app.add_flag("--row-scaled", a.row_scaled, "nvfp4: a tensor scale for every row");
  CLI::Option* pow2 = app.add_flag(
      "--pow2", a.pow2, "FP8 scales are powers of two, as those of blocks are by default");
  app.add_flag("--no-pow2", a.no_pow2,
               "FP8 scales keep all their bits, as those of tensors by default")
      ->excludes(pow2);
  Rule layouts;
  layouts.choices.assign(kLayoutWords.begin(), kLayoutWords.end());
  add_word(app, "--layout", a.layout, layouts,
           "of block scales: compact, sm100 (swizzled), padded, or of FP8 blocks sm90");
  app.add_flag("--bf16", a.bf16, "uint16 in IN.npy are the bits of bfloat16");
  app.add_flag("--force", a.force, "overwrite files in DIR");
}

// Describes the tensor; options that do not go together are named before anything is read.
QuantizedDescription describe(const QuantizeArguments& a) {
  QuantizedDescription d;
  d.spec = QuantSpec::of(a.format);
  if (a.element == "e5m2") d.spec.element = DType::kE5M2;
  if (a.element == "e4m3") d.spec.element = DType::kE4M3;
  d.spec.rounding = a.stochastic ? Rounding::kStochastic : Rounding::kNearest;
  d.spec.pow2_scales = a.pow2 || (d.spec.pow2_scales && !a.no_pow2);
  d.spec.row_scaled = a.row_scaled;
  d.spec.rht_col = a.rht;
  d.directions = {a.directions.row || !a.directions.col, a.directions.col};
  d.rng = a.rng;
  d.tensor_id = static_cast<uint32_t>(a.tensor_id);
  for (size_t i = 0; i < kLayoutWords.size(); ++i) {
    if (kLayoutWords[i] == a.layout) d.layout = static_cast<ScaleLayout>(i);
  }
  try {  // the format may not have the element, the option or the layout
    quantized_sizes(d.spec, 0, 0, d.directions);
    QuantizedView shape;
    shape.spec = d.spec;
    if (d.layout != ScaleLayout::kCompact) {
      quant::scale_layout_size(shape, Direction::kRow, d.layout);
    }
  } catch (const Error& e) {
    throw UsageError("quantize: {}", e.what());
  }
  if (a.rht && !d.directions.col) {
    throw UsageError("quantize: --rht transforms columns, and --col is not given");
  }
  return d;
}

TensorView matrix(const NpyArray& in, const QuantizeArguments& a, QuantizedDescription& d) {
  const NpyHeader& header = in.header;
  const bool is_bf16 =
      header.descr == "<V2" || header.descr == "|V2" || (header.descr == "<u2" && a.bf16);
  if (header.descr != "<f4" && !is_bf16) {
    throw DataError("{}: is {}, expected '<f4', or bfloat16 as '<V2', or as '<u2' with --bf16",
                    a.input, header.describe());
  }
  if (header.shape.empty()) throw DataError("{}: is a scalar, expected a matrix", a.input);
  d.shape = header.shape;
  return TensorView(in.data.data(), is_bf16 ? DType::kBFloat16 : DType::kFloat32,
                    {d.rows(), d.cols()});
}

// Replaces the compact scales in `view` by scales in another layout.
void lay_out(const QuantizedDescription& d, QuantizedView& view, std::vector<Tensor>& memory) {
  if (d.layout == ScaleLayout::kCompact) return;
  QuantizedView out = view;
  out.row_scales = out.col_scales = {};
  for (const Direction direction : {Direction::kRow, Direction::kCol}) {
    const bool row = direction == Direction::kRow;
    if (!(row ? d.directions.row : d.directions.col)) continue;
    const ArraySpec size = quant::scale_layout_size(view, direction, d.layout);
    memory.emplace_back(size.dtype, std::span(size.sizes.data(), static_cast<size_t>(size.dims)),
                        "scales");
    quant::convert_scales(view, direction, d.layout, memory.back(), Stream());
    (row ? out.row_scales : out.col_scales) = memory.back();
  }
  view = out;
}

}  // namespace

int quantize_command(const std::vector<std::string>& arguments) {
  QuantizeArguments a;
  CLI::App app(kQuantizeAbout, "moiety quantize");
  add_options(app, a);
  if (!parse_command_line(app, arguments)) return kExitDone;
  QuantizedDescription d = describe(a);
  check_free(a.directory, a.force);
  const NpyArray in = read_npy(a.input);
  const TensorView x = matrix(in, a, d);

  const QuantizedTensor tensor(d.spec, d.rows(), d.cols(), d.directions);
  quant::QuantizeOptions options;
  if (a.stochastic) options.rng = &d.rng;
  options.tensor_id = d.tensor_id;
  quant::quantize(x, tensor, options, Stream());
  QuantizedView view = tensor;
  d.non_finite = *view.flags.data<uint32_t>() & kFlagNonFinite;
  if (d.non_finite) log(LogLevel::kWarning, "quantize: {} holds inf or NaN", a.input);
  std::vector<Tensor> scales;
  lay_out(d, view, scales);
  for (const std::string& line : write_quantized(a.directory, d, view)) print_result(line + "\n");
  return kExitDone;
}

}  // namespace moiety::app
