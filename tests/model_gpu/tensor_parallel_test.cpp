// The communication of tensor parallelism among ranks that are threads, on the GPUs of the machine
// in turn: the bits of
// CPU ranks.
#include "moiety/model/tensor_parallel.h"

#include <cmath>
#include <functional>

#include "moiety/base/copy.h"
#include "moiety/comm/thread_group.h"
#include "moiety/model/parallel_loss.h"
#include "moiety/model/tp_window.h"
#include "moiety/nn/loss.h"
#include "tests/support/gpu_of_rank.h"
#include "tests/support/gpu_test.h"
#include "tests/support/tensors.h"

namespace moiety::model {
namespace {

// A pass of a rank on a device, without a model.
struct Place {
  Place(comm::Communicator& world, DType storage, int64_t sequences, int64_t seq_len, Device where)
      : arena("test", where),
        stream(Stream::on(where)),
        pass{.arena = arena,
             .stream = stream,
             .storage = storage,
             .sequences = sequences,
             .seq_len = seq_len,
             .tp = &world,
             .rope_table = {},
             .position_T = {},
             .document_start_BS = {},
             .routed_T = {},
             .h_TD = {},
             .wide_TD = {}} {}

  Tensor there(const TensorView& x) const {
    Tensor out(x.dtype(), x.sizes(), stream.device(), "test");
    copy(out, x, stream);
    stream.synchronize();
    return out;
  }
  Tensor here(const TensorView& x) const {
    pass.tp->synchronize(stream);
    return to_host(x, stream);
  }

  Arena arena;
  Stream stream;
  Pass pass;
};

class TensorParallelGpu : public GpuTest {
 protected:
  static void run(int ranks, const std::function<void(comm::Communicator&)>& body) {
    comm::run_thread_ranks(ranks, {.deadline = Seconds(20)}, [&](comm::Communicator& world) {
      world.run_alone(true);
      world.prepare(gpu_of(world.rank()), {.staging_bytes = 1 << 20});
      body(world);
      world.barrier();
    });
  }
};

// Whole numbers, whose products are exact on every device.
Tensor whole_numbers(DType dtype, std::vector<int64_t> sizes, uint32_t seed) {
  Tensor out(dtype, sizes);
  fill_integers(out, seed, 4);
  return out;
}

// Rows of the rank's own tokens, partial sums for all tokens, and an addend in fp32.
struct RowsOfRank {
  Tensor x, partial, wide;
};
RowsOfRank rows_of_rank(int rank, DType storage, int64_t own, int64_t all, int64_t width) {
  const uint32_t seed = 10 * uint32_t(rank);
  return {normal_tensor(storage, {own, width}, seed + 1),
          normal_tensor(storage, {all, width}, seed + 2),
          normal_tensor(DType::kFloat32, {own, width}, seed + 3)};
}

TEST_F(TensorParallelGpu, TokensAndSumsHaveTheBitsOfCpuRanks) {
  for (const int ranks : {2, 3}) {
    for (const int64_t sequences : {1, 3}) {
      for (const DType storage : {DType::kFloat32, DType::kBFloat16}) {
        run(ranks, [&](comm::Communicator& world) {
          const int64_t seq_len = 4 * ranks, own = 4 * sequences, all = own * ranks, width = 37;
          const auto [x, partial, wide] = rows_of_rank(world.rank(), storage, own, all, width);
          std::vector<Tensor> results[2];
          for (const Device where : {Device{}, gpu_of(world.rank())}) {
            Place place(world, storage, sequences, seq_len, where);
            std::vector<Tensor>& out = results[where.type == DeviceType::kCuda];
            const Tensor own_x = place.there(x), own_partial = place.there(partial),
                         own_wide = place.there(wide);
            out.push_back(place.here(gather_tokens(place.pass, own_x)));
            for (const DType to : {DType::kFloat32, DType::kBFloat16}) {
              for (const TensorView& addend : {TensorView(), own_x.view(), own_wide.view()}) {
                const Tensor sum = place.there(Tensor(to, {own, width}));
                sum_to_own(place.pass, own_partial, addend, sum);
                out.push_back(place.here(sum));
              }
            }
            sum_to_own(place.pass, own_partial, own_x, own_x);  // in place
            out.push_back(place.here(own_x));
          }
          for (size_t i = 0; i < results[0].size(); ++i) {
            expect_same_bits(results[0][i], results[1][i], text("result {}", i));
          }
        });
      }
    }
  }
}

// Operands large enough for the window; several passes, in which both halves are used in turns.
TEST_F(TensorParallelGpu, TheWindowHasTheBitsOfCpuRanks) {
  for (const int ranks : {2, 3}) {
    for (const int64_t sequences : {1, 3}) {
      for (const DType storage : {DType::kFloat32, DType::kBFloat16}) {
        for (const int64_t width : {37, 64}) {
          run(ranks, [&](comm::Communicator& world) {
            const int64_t seq_len = 512 * ranks, own = 512 * sequences, all = own * ranks;
            const auto [x, partial, wide] = rows_of_rank(world.rank(), storage, own, all, width);
            std::vector<Tensor> results[2];
            for (const Device where : {Device{}, gpu_of(world.rank())}) {
              const bool gpu = where.type == DeviceType::kCuda;
              Place place(world, storage, sequences, seq_len, where);
              TpWindow window(world, where);
              std::vector<Tensor>& out = results[gpu];
              const Tensor own_x = place.there(x), own_partial = place.there(partial),
                           own_wide = place.there(wide), parts = place.there(partial);
              for (int pass = 0; pass < 2; ++pass) {
                if (gpu) {
                  window.begin(partial.view().bytes(), place.stream);
                  place.pass.window = &window;
                }
                out.push_back(place.here(gather_tokens(place.pass, own_x)));
                for (const DType to : {DType::kFloat32, DType::kBFloat16}) {
                  for (const TensorView& addend : {TensorView(), own_x.view(), own_wide.view()}) {
                    const Tensor sum = place.there(Tensor(to, {own, width}));
                    for (const bool by_rank : {false, true}) {
                      const TensorView mine = partial_tensor(place.pass, all, width);
                      EXPECT_EQ(gpu, window.holds(mine.raw()));
                      copy(mine, own_partial, place.stream);
                      (by_rank ? sum_parts_to_own : sum_to_own)(place.pass, mine, addend, sum);
                      out.push_back(place.here(sum));
                    }
                  }
                }
                gather_parts(place.pass, own_x, parts);
                out.push_back(place.here(parts));
              }
            }
            for (size_t i = 0; i < results[0].size(); ++i) {
              expect_same_bits(results[0][i], results[1][i], text("result {}", i));
            }
          });
        }
      }
    }
  }
}

// A rank without columns, targets that are ignored or masked, chunks, and a target outside of the
// vocabulary, which is NaN on a GPU.
TEST_F(TensorParallelGpu, TheLossHasTheBitsOfCpuRanks) {
  for (const int ranks : {2, 3}) {
    for (const int64_t vocabulary : {700, 2}) {
      for (const DType storage : {DType::kFloat32, DType::kBFloat16}) {
        run(ranks, [&](comm::Communicator& world) {
          constexpr int64_t kModel = 16, kSequences = 2;
          const int64_t seq_len = 6 * ranks, own = 6 * kSequences, all = own * ranks;
          const int64_t slice = (vocabulary + ranks - 1) / ranks;
          const int64_t first = std::min(vocabulary, world.rank() * slice),
                        columns = std::min(vocabulary, first + slice) - first;
          const Tensor x = whole_numbers(storage, {own, kModel}, 5 + uint32_t(world.rank()));
          const Tensor head = whole_numbers(storage, {vocabulary, kModel}, 2);
          std::vector<int32_t> targets;
          Tensor mask(DType::kUInt8, {all});
          for (int64_t t = 0; t < all; ++t) {
            targets.push_back(t % 7 == 5 ? nn::kIgnoredTarget : int32_t(t * 31 % vocabulary));
            mask.data<uint8_t>()[t] = t % 5 != 3;
          }
          const Tensor target = int32_tensor(targets);
          struct Result {
            Tensor loss, dx, grad;
          } results[2];
          for (const Device where : {Device{}, gpu_of(world.rank())}) {
            Place place(world, storage, kSequences, seq_len, where);
            const Tensor there_x = place.there(x), there_target = place.there(target),
                         there_mask = place.there(mask), there_head = place.there(head);
            const Tensor loss = place.there(Tensor(DType::kFloat32, {all})),
                         dx = place.there(Tensor(storage, {own, kModel})),
                         grad = place.there(Tensor(DType::kFloat32, {slice, kModel}));
            parallel_cross_entropy(place.pass,
                                   {.x_TD = there_x,
                                    .head_VD = there_head.view().slice(0, first, first + columns),
                                    .slice = {first, vocabulary},
                                    .target_T = there_target,
                                    .mask_T = there_mask,
                                    .loss_T = loss,
                                    .dx_TD = dx,
                                    .grad_VD = grad.view().slice(0, 0, columns),
                                    .chunk = 5,
                                    .z_coef = 0.1f});
            results[where.type == DeviceType::kCuda] = {place.here(loss), place.here(dx),
                                                        place.here(grad)};
          }
          expect_same_bits(results[0].loss, results[1].loss, "loss");
          const double bound = storage == DType::kBFloat16 ? 2e-2 : 1e-4;
          for (const auto& [a, b] : {std::pair(&results[0].dx, &results[1].dx),
                                     std::pair(&results[0].grad, &results[1].grad)}) {
            for (int64_t i = 0; i < a->view().numel(); ++i) {
              const double expected = get(*a, i);
              ASSERT_NEAR(get(*b, i), expected, bound * (1 + std::abs(expected))) << i;
            }
          }
        });
      }
    }
  }
}

}  // namespace
}  // namespace moiety::model
