// The arguments and the work of `moiety dequantize`.
#include <array>
#include <span>

#include <CLI/CLI.hpp>

#include "apps/moiety/commands/command_line.h"
#include "apps/moiety/commands/npy.h"
#include "apps/moiety/commands/output_file.h"
#include "apps/moiety/commands/quantize.h"
#include "apps/moiety/commands/quantized_directory.h"
#include "apps/moiety/exit_code.h"
#include "apps/moiety/report/result.h"
#include "moiety/base/replace_file.h"
#include "moiety/quant/dequantize.h"

namespace moiety::app {
namespace {

constexpr const char* kDequantizeAbout =
    "The values of what `moiety quantize` wrote, as a float32 .npy file in the shape of the "
    "input;\n"
    "of columns ([K, M], in MXFP8 [M, K]) with --col.";

struct DequantizeArguments {
  std::string directory, out;
  bool col = false, operand = false, undo_rht = false, force = false;
};

void check(const StoredTensor& stored, const DequantizeArguments& a) {
  const QuantizedDescription& d = stored.description;
  if (!(a.col ? d.directions.col : d.directions.row)) {
    throw UsageError("{}: has no {} data", a.directory, a.col ? "col" : "row");
  }
  if (a.undo_rht && !(a.col && d.spec.rht_col)) {
    throw UsageError("{}: --undo-rht is for --col of a tensor with --rht", a.directory);
  }
}

}  // namespace

int dequantize_command(const std::vector<std::string>& arguments) {
  DequantizeArguments a;
  CLI::App app(kDequantizeAbout, "moiety dequantize");
  app.add_option("DIR", a.directory, "of `moiety quantize`")->required();
  app.add_option("--out", a.out, "OUT.npy")->required();
  app.add_flag("--col", a.col, "the columns");
  CLI::Option* operand = app.add_flag(
      "--operand", a.operand,
      "what a GEMM without block-scaled instructions multiplies: bfloat16, as uint16, without the "
      "scales that its accumulators get");
  app.add_flag("--undo-rht", a.undo_rht, "take the random Hadamard transform of columns back")
      ->excludes(operand);
  app.add_flag("--force", a.force, "overwrite OUT.npy");
  if (!parse_command_line(app, arguments)) return kExitDone;
  check_free_file(a.out, a.force);
  const StoredTensor stored = read_quantized(a.directory);
  check(stored, a);

  const Direction direction = a.col ? Direction::kCol : Direction::kRow;
  const quant::DequantizedShape is =
      quant::dequantized_shape(stored.view, direction, {.undo_rht = a.undo_rht});
  const std::array<int64_t, 2> matrix{is.rows, is.cols};
  const Tensor out(a.operand ? DType::kBFloat16 : DType::kFloat32, matrix, "values");
  if (a.operand) {
    quant::dequantize_operand(stored.view, direction, out, Stream());
  } else {
    quant::dequantize(stored.view, direction, out, {.undo_rht = a.undo_rht}, Stream());
  }
  std::span<const int64_t> shape = matrix;
  if (!a.col) shape = stored.description.shape;
  const TensorView& values = out;
  const std::string descr = a.operand ? "<u2" : "<f4";
  replace_file(a.out, npy_header(descr, shape),
               {static_cast<const char*>(values.raw()), static_cast<size_t>(values.bytes())});
  print_result(text("{}: {}\n", a.out, NpyHeader{descr, {shape.begin(), shape.end()}}.describe()));
  return kExitDone;
}

}  // namespace moiety::app
