// Expert parallelism on GPUs: prepare, dispatch, combine and their backward passes, of one rank, or of
// several with --ranks (ep_ranks_cuda.h).
// The value of a data operation is the rate of the bytes that it must read and write, its ratio is
// to a copy of as many in the same run.
#include "bench/harness.h"
#include "bench/moe/ep_ranks_cuda.h"
#include "moiety/base/copy.h"
#include "moiety/base/gpu.h"
#include "moiety/comm/gpu_environment.h"
#include "moiety/comm/thread_group.h"
#include "moiety/moe/combine.h"
#include "moiety/moe/dispatch.h"

namespace moiety::bench {
namespace {

using namespace moe;

constexpr Device kGpu{DeviceType::kCuda, 0};

struct Shape {
  int64_t tokens, model;
  int topk, experts;
};
constexpr Shape kShapes[] = {{8192, 2048, 8, 128}, {4096, 7168, 8, 64}, {16384, 1024, 2, 16}};

class Measured {
 public:
  Measured(const Shape& s, comm::Communicator& world, const Stream& stream)
      : s_(s),
        stream_(stream),
        map_(s.experts, 1),
        capacity_(capacity_for(1.0, s.tokens, s.topk, 1, s.experts, kAlignment)),
        group_(EpGroup::create(world, map_, {.tokens = s.tokens, .model = s.model, .topk = s.topk},
                               {.device = kGpu})),
        idx_(DType::kInt32, {s.tokens, s.topk}, kGpu),
        x_(DType::kBFloat16, {s.tokens, s.model}, kGpu),
        out_(DType::kBFloat16, {s.tokens, s.model}, kGpu),
        rows_(DType::kBFloat16, {capacity_, s.model}, kGpu),
        gy_(DType::kBFloat16, {capacity_, s.model}, kGpu),
        w_(DType::kFloat32, {s.tokens, s.topk}, kGpu),
        gw_(DType::kFloat32, {s.tokens, s.topk}, kGpu),
        slot_w_(DType::kFloat32, {capacity_}, kGpu),
        g_slot_w_(DType::kFloat32, {capacity_}, kGpu),
        args_{.idx_TK = idx_, .alignment = kAlignment, .capacity = capacity_},
        memory_(DType::kUInt8, {plan_bytes(map_, group_.limits(), args_)}, kGpu) {
    const Tensor idx(DType::kInt32, {s.tokens, s.topk}), x(DType::kBFloat16, {s.tokens, s.model});
    for (int64_t t = 0; t < s.tokens; ++t) {
      // The experts are distinct: a random start and a random stride.
      const uint32_t word = random_word(t);
      const int stride = 1 + static_cast<int>(word >> 16) % (s.experts / s.topk);
      for (int k = 0; k < s.topk; ++k) {
        idx.data<int32_t>()[t * s.topk + k] =
            (static_cast<int>(word % 65536) + k * stride) % s.experts;
      }
    }
    for (int64_t i = 0; i < s.tokens * s.model; ++i) {
      x.data<bf16>()[i] = bf16(static_cast<float>(random_word(i) % 15) - 7.0f);
    }
    copy(idx_, idx, stream);
    copy(x_, x, stream);
    fill_bytes(rows_, 0xFF, stream);
    check(x);
  }

  void run() {
    const double rows = double(s_.tokens) * s_.topk, row = 2.0 * double(s_.model);
    const double there = row * (double(s_.tokens) + rows),
                 both = row * (double(s_.tokens) + 2 * rows);
    copy_bytes_ = there / 2;
    from_ = Buffer(copy_bytes_, kGpu);
    to_ = Buffer(copy_bytes_, kGpu);
    const Timing copied = measure(
        [&](int64_t) {
          copy(to_.view(DType::kUInt8, {copy_bytes_}), from_.view(DType::kUInt8, {copy_bytes_}),
               stream_);
        },
        stream_);
    const double ceiling = report("copy", there, copied, 0);
    print_us("ep.prepare", measure([&](int64_t) { make_plan(); }, stream_));
    const auto time = [&](const char* name, double bytes, auto&& call) {
      report(name, bytes, measure([&](int64_t) { call(); }, stream_), ceiling);
    };
    time("ep.dispatch", there, [&] { forward_copy({}); });
    time("ep.dispatch_weights", there, [&] { forward_copy(w_); });
    time("ep.combine", there, [&] { forward_sum({}, {}, Reduction::kRank); });
    time("ep.combine_weights", there, [&] { forward_sum(slot_w_, {}, Reduction::kRank); });
    time("ep.combine_addend", there + row * double(s_.tokens),
         [&] { forward_sum({}, x_, Reduction::kRank); });
    time("ep.combine_backward", there,
         [&] { combine_backward(group_, plan_, {.g_TD = x_, .gy_CD = gy_}, stream_); });
    time("ep.combine_backward_weights", both, [&] {
      combine_backward(
          group_, plan_,
          {.g_TD = x_, .slot_w = slot_w_, .y_CD = rows_, .gy_CD = gy_, .g_slot_w = g_slot_w_},
          stream_);
    });
    time("ep.dispatch_backward", there, [&] {
      dispatch_backward(group_, plan_,
                        {.g_rows_CD = rows_, .g_slot_w = g_slot_w_, .gx_TD = out_, .gw_TK = gw_},
                        stream_);
    });
    group_.close();
  }

 private:
  static constexpr int64_t kAlignment = 16;

  static uint32_t random_word(int64_t i) {
    return philox(rng_key(1, RngDomain::kGeneration), {static_cast<uint32_t>(i), 0, 0, 0})[0];
  }
  void make_plan() { plan_ = prepare(group_, args_, memory_, stream_); }
  void forward_copy(const TensorView& w) {
    dispatch(group_, plan_,
             {.x_TD = x_,
              .w_TK = w,
              .rows_CD = rows_,
              .slot_w = w.defined() ? slot_w_.view() : TensorView()},
             stream_);
  }
  void forward_sum(const TensorView& w, const TensorView& addend, Reduction reduction) {
    combine(group_, plan_,
            {.y_CD = rows_, .slot_w = w, .addend = addend, .reduction = reduction, .out_TD = out_},
            stream_);
  }
  // Sums of small integers are exact: every token comes back K times.
  void check(const Tensor& x) {
    make_plan();
    forward_copy({});
    forward_sum({}, {}, Reduction::kRank);
    const Tensor out(DType::kBFloat16, x.view().sizes());
    copy(out, out_, stream_);
    stream_.synchronize();
    group_.check(plan_.epoch);
    for (int64_t i = 0; i < x.view().numel(); ++i) {
      const float expected = static_cast<float>(s_.topk) * float(x.data<bf16>()[i]);
      MOIETY_CHECK(float(out.data<bf16>()[i]) == expected, "ep bench: element {} is {}, not {}", i,
                   float(out.data<bf16>()[i]), expected);
    }
  }
  std::string shape() const {
    return text("T{} D{} K{} E{}", s_.tokens, s_.model, s_.topk, s_.experts);
  }
  double report(const char* name, double bytes, const Timing& time, double ceiling) const {
    Row row{name, shape(), bytes / time.ms * 1e-6, "GB/s", time};
    row.device = kGpu;
    if (ceiling > 0) {
      row.ratio = row.value / ceiling;
      row.against = "copy";
    }
    print(row);
    return row.value;
  }
  void print_us(const char* name, const Timing& time) const {
    Row row{name, shape(), time.ms * 1e3, "us", time};
    row.device = kGpu;
    print(row);
  }

  Shape s_;
  Stream stream_;
  ExpertMap map_;
  int64_t capacity_, copy_bytes_ = 0;
  EpGroup group_;
  Tensor idx_, x_, out_, rows_, gy_, w_, gw_, slot_w_, g_slot_w_;
  PrepareArgs args_;
  Tensor memory_;
  EpPlan plan_;
  Buffer from_, to_;
};

void run(Options& options) {
  comm::prepare_gpu_environment();
  std::string device = "cuda";
  int ranks = 1;
  RanksRun several;
  options.choice("--device", device, {"cuda"}, "where")
      .number("--ranks", ranks, "threads with a GPU each, or that share what there is")
      .number("--repeat", several.repeat, "rounds of several ranks")
      .number("--shape", several.shape, "of several ranks, from 1; without it all")
      .number("--comm-sms", several.comm_sms, "multiprocessors that push; without it the default")
      .number("--chunk-rows", several.chunk_rows, "rows that are announced together");
  if (!options.parse()) return;
  require_device("ep_cuda_bench", kGpu);
  if (ranks > 1) return run_ranks(ranks, several);
  comm::run_thread_ranks(1, {}, [](comm::Communicator& world) {
    for (const Shape& s : kShapes) Measured(s, world, Stream::on(kGpu)).run();
  });
}

}  // namespace
}  // namespace moiety::bench

int main(int argc, char** argv) {
  return moiety::bench::run_main(argc, argv, "Expert parallelism on a GPU.", moiety::bench::run);
}
