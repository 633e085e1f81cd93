// Ranks of a grid with an optimizer each, their gradients, and their state put together.
#pragma once

#include <cmath>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "moiety/base/rng.h"
#include "moiety/comm/thread_group.h"
#include "moiety/formats/bf16.h"
#include "moiety/optim/distributed_optimizer.h"
#include "tests/optim/model_specs.h"
#include "tests/support/bits.h"

namespace moiety::optim {

using comm::Communicator;

using Layout = gtp::Grid;
constexpr Layout dense_copies(int ranks, int ep) {
  return {.dp = ranks, .ep = ep, .edp = ranks / ep};
}
inline constexpr std::array kLayouts{
    dense_copies(1, 1),
    dense_copies(2, 1),
    dense_copies(2, 2),
    dense_copies(3, 1),
    dense_copies(3, 3),
    dense_copies(4, 1),
    dense_copies(4, 2),
    dense_copies(4, 4),
    Layout{.tp = 2, .edp = 2},
    Layout{.gtp = 2, .ep = 2},
    Layout{.tp = 3, .egtp = 3},
    Layout{.tp = 4, .ep = 2, .egtp = 2},
    Layout{.gtp = 4, .egtp = 2, .edp = 2},
    Layout{.tp = 2, .gtp = 2, .edp = 4},
    Layout{.gtp = 3, .dp = 2, .egtp = 6},
    Layout{.tp = 2, .gtp = 2, .dp = 2, .ep = 2, .egtp = 2, .edp = 2},
    Layout{.gtp = 2, .dp = 4, .ep = 4, .edp = 2},
};
inline int ranks_of(const Layout& layout) { return layout.tp * layout.gtp * layout.dp; }

// Whole logical tensors by "slot/name", put together from the pieces of all ranks.
using Whole = std::map<std::string, std::vector<float>>;

inline float read(const StatePiece& piece, int64_t i) {
  return piece.dtype == DType::kFloat32 ? static_cast<const float*>(piece.data)[i]
                                        : static_cast<const bf16*>(piece.data)[i];
}

// f(element of the piece, logical index).
inline void for_each_in_piece(const StatePiece& piece,
                              const std::function<void(int64_t, int64_t)>& f) {
  std::array<int64_t, 3> shape{1, 1, 1}, start{}, size{1, 1, 1};
  for (int d = 0; d < piece.box.rank; ++d) {
    shape[d] = piece.shape[d];
    start[d] = piece.box.start[d];
    size[d] = piece.box.size[d];
  }
  int64_t k = 0;
  for (int64_t a = start[0]; a < start[0] + size[0]; ++a) {
    for (int64_t b = start[1]; b < start[1] + size[1]; ++b) {
      for (int64_t c = start[2]; c < start[2] + size[2]; ++c, ++k) {
        f(k, (a * shape[1] + b) * shape[2] + c);
      }
    }
  }
}

inline void put_together(const StateView& view, Whole& whole) {
  for (const StatePiece& piece : view) {
    auto& tensor = whole[piece.slot + "/" + piece.tensor];
    int64_t n = 1;
    for (const int64_t size : piece.shape) n *= size;
    tensor.resize(n, std::nanf(""));
    for_each_in_piece(piece, [&](int64_t k, int64_t i) { tensor[i] = read(piece, k); });
  }
}

inline bool same_bits(const Whole& a, const Whole& b) {
  if (a.size() != b.size()) return false;
  for (const auto& [name, x] : a) {
    const auto it = b.find(name);
    if (it == b.end() || !moiety::same_bits(x, it->second)) return false;
  }
  return true;
}

// The part that token batch `batch` of step `step` adds to an element's gradient.
using Gradient = std::function<float(const LogicalTensor&, int64_t i, int step, int batch)>;
inline constexpr int kBatches = 12;

inline float small_integer(const LogicalTensor& tensor, int64_t i, int step, int batch) {
  const PhiloxBlock w = philox({9, 9}, {static_cast<uint32_t>(i), static_cast<uint32_t>(step),
                                        static_cast<uint32_t>(batch), tensor_id(tensor.name)});
  return static_cast<float>(static_cast<int>(w[0] % 15) - 7);
}

// Random, but each element's whole gradient comes from one batch, so that sums over ranks are
// exact.
inline float lone_normal(const LogicalTensor& tensor, int64_t i, int step, int batch) {
  const PhiloxBlock w = philox(
      {8, 8}, {static_cast<uint32_t>(i), static_cast<uint32_t>(step), 0, tensor_id(tensor.name)});
  return static_cast<int>(w[1] % kBatches) == batch ? normal_from_word(w[0]) : 0.0f;
}

// Elements of rows that no run has.
inline std::vector<int64_t> padding(const ParamSpec& spec) {
  std::vector<bool> is_padding(spec.numel(), true);
  for_each_element(spec,
                   [&](int64_t at, const LogicalTensor&, int64_t) { is_padding[at] = false; });
  std::vector<int64_t> out;
  for (int64_t i = 0; i < spec.numel(); ++i) {
    if (is_padding[i]) out.push_back(i);
  }
  return out;
}

// The specs of which these are frozen, by their names.
inline std::vector<ParamSpec> with_frozen(std::vector<ParamSpec> specs,
                                          const std::set<std::string>& names) {
  for (ParamSpec& spec : specs) spec.frozen = names.contains(spec.name);
  return specs;
}

// One rank of a layout with its optimizer.
class Rank {
 public:
  Rank(Communicator& world, const Layout& layout, const OptimizerConfig& config,
       const std::set<std::string>& frozen = {})
      : groups_(layout, world),
        optimizer_(with_frozen(model_specs(layout, world.rank()), frozen), config, groups_) {}

  DistributedOptimizer& optimizer() { return optimizer_; }
  Parameter& parameter(const std::string& name) {
    for (Parameter& p : optimizer_.parameters()) {
      if (p.spec.name == name) return p;
    }
    throw std::runtime_error(name);
  }

  const Communicator& domain(const Parameter& p) const { return groups_.of(p.spec.domain); }

  // Runs backward for the batches of this rank: parameters see those of their place in the domain.
  // Values written to padding rows make no difference.
  void backward(int step, const Gradient& gradient) {
    for (Parameter& p : optimizer_.parameters()) {
      if (!p.trained()) continue;
      for (const int64_t i : padding(p.spec)) p.grad.data<float>()[i] = std::nanf("");
      const Communicator& domain = this->domain(p);
      for (int batch = 0; batch < kBatches; ++batch) {
        if (batch % domain.size() == domain.rank()) contribute(p, step, batch, gradient);
      }
    }
  }
  static void contribute(Parameter& p, int step, int batch, const Gradient& gradient) {
    float* grad = p.grad.data<float>();
    for_each_element(p.spec, [&](int64_t at, const LogicalTensor& tensor, int64_t i) {
      const float g = gradient(tensor, i, step, batch);
      grad[at] = p.overwrite ? g : grad[at] + g;
    });
    p.overwrite = false;
  }

  // The weights are the masters, rounded: everywhere.
  void check_weights(const Whole& whole) {
    for (Parameter& p : optimizer_.parameters()) {
      for (const int64_t i : padding(p.spec)) {
        ASSERT_EQ(p.weight.dtype() == DType::kFloat32 ? p.weight.data<float>()[i]
                                                      : float(p.weight.data<bf16>()[i]),
                  0);
      }
      for_each_element(p.spec, [&](int64_t at, const LogicalTensor& tensor, int64_t i) {
        const float master = whole.at("weight/" + tensor.name)[i];
        if (p.weight.dtype() == DType::kFloat32) {
          ASSERT_EQ(p.weight.data<float>()[at], master) << tensor.name << " " << i;
        } else {
          ASSERT_EQ(p.weight.data<bf16>()[at].bits, bf16(master).bits) << tensor.name << " " << i;
        }
      });
    }
  }

 private:
  GridGroups groups_;
  DistributedOptimizer optimizer_;
};

inline constexpr uint64_t kSeed = 1234;

inline OptimizerConfig small_buckets(DType weights = DType::kBFloat16,
                                     DType moments = DType::kFloat32) {
  return {.weights = weights, .moments = moments, .seed = kSeed, .bucket_elements = 700};
}

inline StepInput input(int64_t tokens = 1) {
  return {.lr = 1e-2, .weight_decay = 0.1, .clip = 1.0, .tokens = tokens, .losses = {0.5, 2.0}};
}

// Runs the body on every rank of a layout; the whole state at its end.
inline Whole run_layout(Layout layout, const OptimizerConfig& config,
                        const std::function<void(Rank&, Communicator&)>& body,
                        const std::set<std::string>& frozen = {}) {
  Whole whole;
  std::mutex mutex;
  comm::run_thread_ranks(ranks_of(layout), {Seconds(60)}, [&](Communicator& world) {
    Rank rank(world, layout, config, frozen);
    rank.optimizer().initialize(kSeed, Stream());
    body(rank, world);
    {
      const std::lock_guard lock(mutex);
      put_together(rank.optimizer().state_view(), whole);
    }
    world.barrier();
    rank.check_weights(whole);
  });
  return whole;
}

inline void for_each_layout(const std::function<void(Layout)>& body) {
  for (const Layout layout : kLayouts) {
    SCOPED_TRACE(grid_text(layout));
    body(layout);
  }
}

}  // namespace moiety::optim
