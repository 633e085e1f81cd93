// Grouped products of many small experts. The peer is bench/peers/grouped_gemm.py, which takes the
// cases from --list: {name, case, E, D, N, counts, dtype, op}, one JSON object a line.
#include <cmath>

#include "bench/harness.h"
#include "moiety/base/parallel.h"
#include "moiety/gemm/gemm_block.h"
#include "moiety/gemm/grouped_block.h"
#include "moiety/gemm/grouped_gemm.h"

namespace moiety::bench {
namespace {

using gemm::GemmEngine;
using gemm::GroupedGemmArgs;
using gemm::GroupedOp;
using gemm::Groups;

constexpr float kPoison = -0x1p100f;

struct Shape {
  int64_t experts, model, features, rows;  // D and N of w [E, N, D]; mean rows of an expert
  bool skewed;                             // Zipf instead of 0.5 to 1.5 of the mean
};
constexpr Shape kShapes[] = {
    {8, 256, 256, 256, false}, {8, 128, 256, 256, true},  {16, 512, 256, 128, false},
    {32, 256, 512, 64, true},  {32, 512, 128, 32, false}, {64, 256, 128, 16, false},
};

struct Op {
  GroupedOp op;
  const char* name;
};
constexpr Op kOps[] = {
    {GroupedOp::kForward, "fwd"}, {GroupedOp::kDgrad, "dgrad"}, {GroupedOp::kWgrad, "wgrad"}};

std::vector<int64_t> counts_of(const Shape& s) {
  std::vector<int64_t> counts(s.experts);
  double harmonic = 0;
  for (int64_t e = 1; e <= s.experts; ++e) harmonic += 1.0 / static_cast<double>(e);
  for (int64_t e = 0; e < s.experts; ++e) {
    const uint32_t word =
        philox(rng_key(9, RngDomain::kInit), {static_cast<uint32_t>(e), 0, 0, 0})[0];
    const double factor =
        s.skewed ? static_cast<double>(s.experts) / harmonic / static_cast<double>(e + 1)
                 : 0.5 + word * 0x1p-32;
    counts[e] = std::llround(static_cast<double>(s.rows) * factor);
  }
  return counts;
}

const char* dtype_label(DType dtype) { return dtype == DType::kBFloat16 ? "bf16" : "fp32"; }

std::string label(const Shape& s, DType dtype) {
  return text("E{} D{} N{} rows~{}{} {}", s.experts, s.model, s.features, s.rows,
              s.skewed ? " zipf" : "", dtype_label(dtype));
}

// One copy of the operands of a case.
struct Operands {
  Tensor x, y, w;
};

class Case {
 public:
  Case(const Shape& s, DType dtype, const Op& op, GemmEngine engine)
      : shape_(s),
        op_(op),
        engine_(engine),
        counts_(counts_of(s)),
        begin_(DType::kInt64, {s.experts + 1}) {
    int64_t* begin = begin_.data<int64_t>();
    for (int64_t e = 0; e < s.experts; ++e) begin[e + 1] = begin[e] + counts_[e];
    rows_ = begin[s.experts];
    const int64_t bytes =
        byte_size(dtype, s.experts * s.model * s.features + rows_ * (s.model + s.features));
    for (int64_t c = 0; c < copies(bytes); ++c) {
      const auto id = static_cast<uint32_t>(3 * c);
      operands_.push_back({random_tensor(dtype, {rows_, s.model}, id),
                           random_tensor(dtype, {rows_, s.features}, id + 1),
                           random_tensor(dtype, {s.experts, s.features, s.model}, id + 2)});
    }
    // As in training, activations are in the storage type and gradients of weights in fp32.
    switch (op.op) {
      case GroupedOp::kForward:
        out_ = Tensor(dtype, {rows_, s.features});
        break;
      case GroupedOp::kDgrad:
        out_ = Tensor(dtype, {rows_, s.model});
        break;
      case GroupedOp::kWgrad:
        out_ = Tensor(DType::kFloat32, {s.experts, s.features, s.model});
    }
  }

  double flop() const { return 2.0 * static_cast<double>(rows_ * shape_.model * shape_.features); }

  void run(int64_t i) const {
    if (engine_ == GemmEngine::kAuto) return grouped_gemm(args(i), Stream());
    grouped_gemm_cpu(args(i), engine_);
  }

  // The first rows of every expert against the reference, to the bound of two roundings.
  void check() const {
    poison();
    run(0);
    const GroupedGemmArgs a = args(0);
    const int64_t columns = out_.view().size(-1);
    std::vector<float> expected(columns);
    for (int64_t e = 0; e < shape_.experts; ++e) {
      gemm::Product g = group_product(a, e);
      if (g.m == 0) continue;
      const int64_t row = g.row + (op_.op == GroupedOp::kWgrad ? e * shape_.features : 0);
      g.m = 1;
      g.epilogue.out = expected.data() - g.row * columns;
      g.epilogue.out_dtype = DType::kFloat32;
      g.epilogue.out_stride = columns;
      block_gemm_reference(g);
      for (int64_t j = 0; j < columns; ++j) {
        const float got = element(row * columns + j);
        MOIETY_CHECK(std::fabs(got - expected[j]) <= 0.01f * (1 + std::fabs(expected[j])),
                     "{} {}: expert {}, column {} is {}, the reference has {}", op_.name,
                     label(shape_, a.a.data.dtype()), e, j, got, expected[j]);
      }
    }
  }

 private:
  GroupedGemmArgs args(int64_t i) const {
    const Operands& o = operands_[i % std::ssize(operands_)];
    GroupedGemmArgs a;
    a.op = op_.op;
    a.groups.begin_E1 = begin_;
    a.groups.experts = shape_.experts;
    a.groups.capacity = rows_;
    a.a.data = op_.op == GroupedOp::kForward ? o.x : o.y;
    if (op_.op == GroupedOp::kWgrad) {
      a.b.data = o.x;
      a.w = out_.view();
    } else {
      a.w = o.w.view();
      a.out = out_;
    }
    return a;
  }

  float element(int64_t i) const {
    return out_.view().dtype() == DType::kFloat32 ? out_.data<float>()[i]
                                                  : float(out_.data<bf16>()[i]);
  }

  void poison() const {
    for (int64_t i = 0; i < out_.view().numel(); ++i) {
      if (out_.view().dtype() == DType::kFloat32) {
        out_.data<float>()[i] = kPoison;
      } else {
        out_.data<bf16>()[i] = bf16(kPoison);
      }
    }
  }

  Shape shape_;
  Op op_;
  GemmEngine engine_;
  std::vector<int64_t> counts_;
  Tensor begin_;
  int64_t rows_ = 0;
  std::vector<Operands> operands_;
  Tensor out_;
};

void print_case(const Shape& s, DType dtype, const Op& op) {
  std::string counts;
  for (int64_t n : counts_of(s)) counts += (counts.empty() ? "" : ", ") + std::to_string(n);
  std::printf(
      "{\"name\": \"grouped_gemm.%s\", \"case\": \"%s\", \"E\": %lld, \"D\": %lld, "
      "\"N\": %lld, \"counts\": [%s], \"dtype\": \"%s\", \"op\": \"%s\"}\n",
      op.name, label(s, dtype).c_str(), static_cast<long long>(s.experts),
      static_cast<long long>(s.model), static_cast<long long>(s.features), counts.c_str(),
      dtype_label(dtype), op.name);
}

GemmEngine engine_of(const std::string& name) {
  return name == "vector"   ? GemmEngine::kVector
         : name == "bf16"   ? GemmEngine::kBf16
         : name == "amx"    ? GemmEngine::kAmx
         : name == "onednn" ? GemmEngine::kOneDnn
                            : GemmEngine::kAuto;
}

void run(Options& options) {
  int threads = thread_budget();
  bool list = false;
  std::string only, engine_name = "auto";
  options.number("--threads", threads, "of the products")
      .choice("--dtype", only, {"bf16", "fp32"}, "cases of this dtype alone")
      .choice("--engine", engine_name, {"auto", "vector", "bf16", "amx", "onednn"},
              "in place of the processor's best")
      .flag("--list", list, "print the cases instead");
  if (!options.parse()) return;
  set_thread_budget(threads);
  const GemmEngine engine = engine_of(engine_name);
  for (DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    if (!only.empty() && only != dtype_label(dtype)) continue;
    if (!list && !gemm::engine_available(engine, dtype)) continue;
    for (const Shape& s : kShapes) {
      for (const Op& op : kOps) {
        if (list) {
          print_case(s, dtype, op);
          continue;
        }
        const Case c(s, dtype, op, engine);
        c.check();
        const Timing time = measure([&](int64_t i) { c.run(i); });
        Row row{text("grouped_gemm.{}", op.name), label(s, dtype), tera(c.flop(), time.ms),
                "TFLOP/s", time};
        row.more =
            text(R"("engine": "{}")",
                 gemm::name(engine == GemmEngine::kAuto ? gemm::automatic_engine(dtype) : engine));
        print(row);
      }
    }
  }
}

}  // namespace
}  // namespace moiety::bench

int main(int argc, char** argv) {
  return moiety::bench::run_main(argc, argv, "Grouped products of many small experts.",
                                 moiety::bench::run);
}
