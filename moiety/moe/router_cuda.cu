// The router on GPUs, with the arithmetic of router_block.h. A group of lanes, which are the lanes
// of lane_sum, has a token, and a thread block has the 64 tokens of a block of the statistics, so
// that their sums can run in the order of router_block.h. The scores of the tokens that a block has
// at a time lie in shared memory.
#include "moiety/base/kernel_list.cuh"
#include "moiety/base/math.h"
#include "moiety/formats/octet.cuh"
#include "moiety/moe/block_sums.cuh"
#include "moiety/moe/router_block.h"
#include "moiety/moe/router_cuda.h"
#include "moiety/moe/router_kernel.h"

namespace moiety::moe::detail {
namespace {

constexpr uint32_t kWarp = 0xFFFFFFFFu;

// The way in which the lanes of a token hold its experts: octets in turns. The further lanes of
// lane_sum would hold +0.
template <RouterLayout kLayout>
struct Layout {
  static constexpr int kLanes = kLayout.lanes, kThreads = kLayout.threads;
  static constexpr int kEach = kLayout.experts / kLanes;
  // Thread blocks that a multiprocessor must hold in the forward pass.
  static constexpr int kResident = kThreads == 512 ? 2 : 1;

  __device__ static int lane() { return threadIdx.x % kLanes; }
  // The expert of a lane's i-th element.
  __device__ static int expert(int i) {
    return (i / kOctet * kLanes + lane()) * kOctet + i % kOctet;
  }
  __device__ static uint32_t mask() {
    return kWarp >> (32 - kLanes) << (threadIdx.x % 32 / kLanes * kLanes);
  }
  // The sum, in all lanes of the token; all lanes of a warp call together.
  __device__ static float sum(float v) {
#pragma unroll
    for (int o = kLanes / 2; o >= 1; o /= 2) v += __shfl_xor_sync(kWarp, v, o);
    return v;
  }
  // The maximum, which passes over NaN.
  __device__ static float largest(float v) {
#pragma unroll
    for (int o = kLanes / 2; o >= 1; o /= 2) v = fmaxf(v, __shfl_xor_sync(kWarp, v, o));
    return v;
  }
  // That of integers: one instruction for a whole warp, which parts of it would take in turn.
  __device__ static uint32_t most(uint32_t v) {
    if constexpr (kLanes == 32) {
      return __reduce_max_sync(kWarp, v);
    } else {
#pragma unroll
      for (int o = kLanes / 2; o >= 1; o /= 2) v = max(v, __shfl_xor_sync(kWarp, v, o));
      return v;
    }
  }
  // The least expert of the lanes that have one.
  __device__ static int least(bool has, int expert) {
    if constexpr (kEach == kOctet) {  // that of the first lane
      const uint32_t lanes = __ballot_sync(kWarp, has) & mask();
      return __shfl_sync(kWarp, expert, __ffs(lanes) - 1);
    } else {
      return __reduce_min_sync(mask(), has ? expert : INT_MAX);
    }
  }
};

// Loads logits; those that do not exist are -inf.
template <class L>
__device__ void load_logits(const float* x, int experts, bool vector, float (&v)[L::kEach]) {
#pragma unroll
  for (int i = 0; i < L::kEach; i += kOctet) {
    const int e = L::expert(i);
    const Octet<float> octet =
        vector ? load_octet<true>(x + e, experts - e) : load_octet<false>(x + e, experts - e);
#pragma unroll
    for (int j = 0; j < kOctet; ++j) v[i + j] = e + j < experts ? octet[j] : -INFINITY;
  }
}

// Stores the three pieces of a row, `width` columns each. Each rounds the rest that
// the ones before it leave, which is exact, so they add up to an element except for the part below
// bf16's least, 2^-133. An element that bf16 has no finite value for has a NaN among its pieces.
template <class L>
__device__ void store_pieces(bf16* row, int width, bool vector, float (&v)[L::kEach]) {
#pragma unroll
  for (int i = 0; i < L::kEach; i += kOctet) {
    const int e = L::expert(i);
#pragma unroll
    for (int piece = 0; piece < 3; ++piece) {
      float rest[kOctet];
#pragma unroll
      for (int j = 0; j < kOctet; ++j) rest[j] = v[i + j];
      const Octet<bf16> octet = round_octet<bf16>(rest);
#pragma unroll
      for (int j = 0; j < kOctet; ++j) v[i + j] -= octet[j];
      bf16* to = row + piece * width + e;
      vector ? store_octet<true>(to, octet, width - e) : store_octet<false>(to, octet, width - e);
    }
  }
}

template <class L>
__device__ void store_row(float* row, int experts, bool vector, const float (&v)[L::kEach]) {
#pragma unroll
  for (int i = 0; i < L::kEach; i += kOctet) {
    const int e = L::expert(i);
    Octet<float> octet;
#pragma unroll
    for (int j = 0; j < kOctet; ++j) octet.word[j] = __float_as_uint(v[i + j]);
    vector ? store_octet<true>(row + e, octet, experts - e)
           : store_octet<false>(row + e, octet, experts - e);
  }
}

// Scores<float>, spread over the lanes. A p that does not exist is 0, or NaN where all are NaN, so
// it changes no sum.
template <class L>
struct TokenScores {
  float p[L::kEach];
  float largest, sum, lse, divisor;

  __device__ void compute(const RouterConfig& config, const float* x, bool vector) {
    const int experts = static_cast<int>(config.experts);
    load_logits<L>(x, experts, vector, p);
    largest = -INFINITY;
#pragma unroll
    for (const float v : p) largest = fmaxf(largest, v);
    largest = L::largest(largest);
    float part = 0;
    float e[L::kEach];
#pragma unroll
    for (int i = 0; i < L::kEach; ++i) part += e[i] = exp_nonpositive(p[i] - largest);
    sum = L::sum(part);
    lse = largest + log(sum);
    divisor = 1;
    if (config.score == Score::kSigmoid) {
      part = 0;
#pragma unroll
      for (float& v : p) part += v = sigmoid(v);
      divisor = kTiny<float> + L::sum(part);
    } else {
#pragma unroll
      for (int i = 0; i < L::kEach; ++i) p[i] = e[i] / sum;
    }
  }
};

// The divisor such that the weights of the chosen are scale * p / divisor.
__device__ float weight_divisor(const RouterConfig& config, const float* p, const int32_t* idx) {
  if (!config.renormalize) return 1;
  float z = p[idx[0]];
  for (int k = 1; k < config.top_k; ++k) z += p[idx[k]];
  return z + kTiny<float>;
}

// Keys in the order of the choice: NaN comes last, before kTaken only, and -0 is as +0.
constexpr uint32_t kTaken = 0, kNanKey = 1, kMinusInfinityKey = 0x007FFFFF;

__device__ uint32_t choice_key(float c) {
  if (c != c) return kNanKey;
  const uint32_t bits = __float_as_uint(c == 0 ? 0.0f : c);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// keep_best_groups of router_block.h. `score` is shared memory for the groups' keys.
template <class L>
__device__ void keep_best_groups(const RouterConfig& config, const float* p, const float* bias,
                                 uint32_t* score, uint32_t (&key)[L::kEach]) {
  const int experts = static_cast<int>(config.experts), groups = static_cast<int>(config.groups);
  const int size = experts / groups;
  for (int g = L::lane(); g < groups; g += L::kLanes) {
    float first = 0, second = 0;
    for (int i = 0; i < size; ++i) {
      const int e = g * size + i;
      const float c = bias ? p[e] + bias[e] : p[e];
      if (i == 0) {
        first = c;
      } else if (exceeds(c, first)) {
        second = first;
        first = c;
      } else if (i == 1 || exceeds(c, second)) {
        second = c;
      }
    }
    score[g] = choice_key(size > 1 ? first + second : first);
  }
  __syncwarp();
  int group = -1;
  bool kept = false;
#pragma unroll 1
  for (int i = 0; i < L::kEach; ++i) {
    const int e = L::expert(i);
    if (e >= experts) break;
    if (e / size != group) {
      group = e / size;
      int before = 0;
      for (int g = 0; g < groups; ++g) {
        before += score[g] > score[group] || (score[g] == score[group] && g < group);
      }
      kept = before < config.group_top_k;
    }
    if (kept) continue;
#pragma unroll
    for (int j = 0; j < L::kEach; ++j) {
      if (j == i) key[j] = kMinusInfinityKey;
    }
  }
}

// chosen[0..k) := the experts of the largest keys, equal ones by index; the keys are used up.
template <class L>
__device__ void choose(uint32_t (&key)[L::kEach], int k, int32_t* chosen) {
  int taken = -1;
  for (int round = 0; round < k; ++round) {
    uint32_t best = kTaken;
    int at = 0;
#pragma unroll
    for (int i = 0; i < L::kEach; ++i) {
      if (i == taken) key[i] = kTaken;
      if (key[i] > best) {
        best = key[i];
        at = i;
      }
    }
    const int expert = L::expert(at);
    const int first = L::least(best == L::most(best), expert);
    taken = expert == first ? at : -1;
    if (L::lane() == 0) chosen[round] = first;
  }
}

struct ForwardParams {
  ForwardRows<float> rows;
  Blocks blocks;
  int32_t* count;  // counts of the blocks
  float* sum;
  bool vector;
};

// The shared memory of a thread block that takes `tokens` at a time.
struct ForwardShared {
  int64_t stride, groups, tokens, top_k, experts;

  ForwardShared(const RouterConfig& config, int64_t tokens_at_a_time)
      : stride((config.experts + kOctet - 1) / kOctet * kOctet),
        groups(config.groups > 1 ? config.groups : 0),
        tokens(tokens_at_a_time),
        top_k(config.top_k),
        experts(config.experts) {}
  static RouterBlock block(const RouterConfig& config) {
    const ForwardShared one(config, 1);
    return choose_block(one.experts, 4 * (one.experts + 1),
                        4 * (one.stride + one.groups + one.top_k + 1));
  }

  __device__ float* row(float* memory, int64_t token) const { return memory + token * stride; }
  __device__ float* lse2(float* memory) const { return memory + tokens * stride; }
  __device__ uint32_t* score(float* memory, int64_t token) const {
    return reinterpret_cast<uint32_t*>(lse2(memory) + tokens) + token * groups;
  }
  __device__ int32_t* chosen(float* memory, int64_t token) const {
    return reinterpret_cast<int32_t*>(score(memory, tokens)) + token * top_k;
  }
  __device__ int32_t* count(float* memory) const { return chosen(memory, tokens); }
};

// Routes token t, the `slot`-th of those at a time: computes its choice and weights, and puts its
// part of the statistics into shared memory.
template <class L>
__device__ void route_token(const ForwardParams& p, const ForwardShared& at, float* memory,
                            int64_t t, int slot, bool live) {
  const RouterConfig& config = p.rows.config;
  const int experts = static_cast<int>(config.experts), top_k = static_cast<int>(config.top_k);
  float* row = at.row(memory, slot);
  int32_t* chosen = at.chosen(memory, slot);
  TokenScores<L> scores;
  scores.compute(config, p.rows.logits + t * experts, p.vector);
  store_row<L>(row, static_cast<int>(at.stride), true, scores.p);
  __syncwarp();
  if (p.rows.given) {
    // A token that is left out goes through the same steps, with some choice.
    for (int k = L::lane(); k < top_k; k += L::kLanes) {
      chosen[k] = live ? p.rows.given[t * top_k + k] : 0;
    }
  } else if (config.force_balance) {
    for (int k = L::lane(); k < top_k; k += L::kLanes) {
      chosen[k] = static_cast<int32_t>((t * top_k + k) % experts);
    }
  } else {
    float choice[L::kEach];
#pragma unroll
    for (int i = 0; i < L::kEach; ++i) choice[i] = scores.p[i];
    if (p.rows.bias) {
#pragma unroll
      for (int i = 0; i < L::kEach; ++i) {
        if (L::expert(i) < experts) choice[i] += p.rows.bias[L::expert(i)];
      }
    }
    uint32_t key[L::kEach];
#pragma unroll
    for (int i = 0; i < L::kEach; ++i) {
      key[i] = L::expert(i) < experts ? choice_key(choice[i]) : kTaken;
    }
    if (config.groups > 1) {
      keep_best_groups<L>(config, row, p.rows.bias, at.score(memory, slot), key);
    }
    choose<L>(key, top_k, chosen);
  }
  __syncwarp();
  const float z = weight_divisor(config, row, chosen);
  for (int k = L::lane(); live && k < top_k; k += L::kLanes) {
    p.rows.idx[t * top_k + k] = chosen[k];
    p.rows.weight[t * top_k + k] = config.scale * row[chosen[k]] / z;
    atomicAdd(at.count(memory) + chosen[k], 1);
  }
  __syncwarp();
  if (config.score == Score::kSigmoid) {
    for (int i = 0; i < L::kEach; ++i) {
      if (L::expert(i) < experts) row[L::expert(i)] /= scores.divisor;
    }
  }
  if (L::lane() == 0) {
    at.lse2(memory)[slot] = scores.lse * scores.lse;
    if (live) atomicAdd(at.count(memory) + experts, 1);
  }
}

template <class L>
__device__ void leave_out(const ForwardParams& p, const ForwardShared& at, float* memory, int64_t t,
                          int slot) {
  const int top_k = static_cast<int>(p.rows.config.top_k);
  for (int k = L::lane(); k < top_k; k += L::kLanes) {
    p.rows.idx[t * top_k + k] = -1;
    p.rows.weight[t * top_k + k] = 0;
  }
  for (int e = L::lane(); e < at.stride; e += L::kLanes) at.row(memory, slot)[e] = 0;
  if (L::lane() == 0) at.lse2(memory)[slot] = 0;
}

template <class L>
__global__ void __launch_bounds__(L::kThreads, L::kResident)
    route_block(const __grid_constant__ ForwardParams p, const __grid_constant__ ForwardShared at) {
  extern __shared__ float4 shared[];
  float* memory = reinterpret_cast<float*>(shared);
  const int experts = static_cast<int>(at.experts), slots = static_cast<int>(at.tokens);
  const int slot = threadIdx.x / L::kLanes;
  const int64_t begin = p.blocks.begin(blockIdx.x), end = p.blocks.end(blockIdx.x);
  int32_t* count = at.count(memory);
  float* block_sum = p.sum + blockIdx.x * (at.experts + 1);
  for (int e = threadIdx.x; e <= experts; e += blockDim.x) count[e] = 0;
  for (int64_t first = begin; first < end; first += slots) {
    __syncthreads();
    const int64_t t = first + slot;
    const bool live = t < end && !(p.rows.mask && !p.rows.mask[t]) && !given_none(p.rows, t);
    // All lanes of a warp compute together, whatever their tokens.
    route_token<L>(p, at, memory, min(t, end - 1), slot, live);
    __syncwarp();
    if (t < end && !live) leave_out<L>(p, at, memory, t, slot);
    __syncthreads();
    const int tokens = static_cast<int>(min(int64_t{slots}, end - first));
    for (int e = threadIdx.x; e <= experts; e += blockDim.x) {
      const float* term = e < experts ? memory + e : at.lse2(memory);
      const int64_t stride = e < experts ? at.stride : 1;
      float sum = first == begin ? 0 : block_sum[e];
#pragma unroll 8
      for (int k = 0; k < tokens; ++k) sum += term[k * stride];
      block_sum[e] = sum;
    }
  }
  __syncthreads();
  int32_t* block_count = p.count + blockIdx.x * (at.experts + 1);
  for (int e = threadIdx.x; e <= experts; e += blockDim.x) block_count[e] = count[e];
}

constexpr int kSumThreads = 256;

__global__ void __launch_bounds__(kSumThreads) add_all_blocks(const __grid_constant__ BlockSums p) {
  add_blocks<kSumThreads>(p, blockIdx.x);
}

struct BackwardParams {
  BackwardRows<float> rows;
  Blocks blocks;
  const int64_t* count;
  const int64_t* scope;
  const int32_t* slots;  // [T, K], or null: of pairs, whose gradients of weights are by slot
  const float* slot_dweight;
  bf16* pieces;  // [T, 3 width], instead of rows.dlogits
  int width;
  int64_t stride;  // distance between rows in shared memory
  bool vector;
};

template <class L>
__device__ void store_gradient(const BackwardParams& p, int64_t t, float (&dx)[L::kEach]) {
  const int experts = static_cast<int>(p.rows.config.experts);
  if (!p.pieces) return store_row<L>(p.rows.dlogits + t * experts, experts, p.vector, dx);
  for (int i = 0; i < L::kEach; ++i) dx[i] = L::expert(i) < experts ? dx[i] : 0;
  store_pieces<L>(p.pieces + t * 3 * p.width, p.width, p.vector, dx);
}

// The row of scores becomes the gradient of scores by the weights. Behind `dweight` [K] there is room
// for K terms of the mean; a lane has the division of its choices.
template <class L>
__device__ void add_weight_gradient(const RouterConfig& config, int64_t stride, const int32_t* idx,
                                    float* dweight, bool live, float* row) {
  const int top_k = static_cast<int>(config.top_k);
  float* const term = dweight + top_k;
  const float z = live ? weight_divisor(config, row, idx) : 1;
  for (int k = L::lane(); live && config.renormalize && k < top_k; k += L::kLanes) {
    term[k] = dweight[k] * (row[idx[k]] / z);
  }
  __syncwarp();
  float mean = 0;
  for (int k = 0; live && config.renormalize && k < top_k; ++k) mean += term[k];
    // From here on the row holds dp.
#pragma unroll
  for (int i = 0; i < L::kEach; ++i) {
    if (L::expert(i) < stride) row[L::expert(i)] = 0;
  }
  __syncwarp();
  for (int k = L::lane(); live && k < top_k; k += L::kLanes) {
    row[idx[k]] += config.scale / z * (dweight[k] - mean);
  }
  __syncwarp();
}

// Computes dlogits of token t. `dq` [E], `row` [E], and room for K choices, their gradients and terms
// are in shared memory.
template <class L>
__device__ void route_back(const BackwardParams& p, const float* dq, float* row, float* choices,
                           int64_t t, bool exists, float z_slope) {
  const RouterConfig& config = p.rows.config;
  const int experts = static_cast<int>(config.experts), top_k = static_cast<int>(config.top_k);
  const float* x = p.rows.logits + t * experts;
  auto* const idx = reinterpret_cast<int32_t*>(choices);
  float* const dweight = choices + top_k;
  for (int k = L::lane(); k < top_k; k += L::kLanes) {
    const int64_t pair = t * top_k + k;
    const int32_t slot = p.slots ? p.slots[pair] : 0;
    idx[k] = p.rows.idx[pair];
    dweight[k] = !p.slots ? p.rows.dweight[pair] : slot >= 0 ? p.slot_dweight[slot] : 0;
  }
  const bool live = exists && p.rows.idx[t * top_k] >= 0;
  TokenScores<L> scores;
  scores.compute(config, x, p.vector);
  store_row<L>(row, static_cast<int>(p.stride), true, scores.p);
  __syncwarp();
  add_weight_gradient<L>(config, p.stride, idx, dweight, live, row);
  const bool has_dq = has_aux(config), softmax = config.score == Score::kSoftmax;
  float dx[L::kEach], part = 0;
#pragma unroll
  for (int i = 0; i < L::kEach; ++i) {
    const int e = L::expert(i);
    dx[i] = e < experts ? row[e] : 0;
    const float slope = has_dq && e < experts ? dq[e] : 0;
    if (softmax) {
      if (has_dq) dx[i] += slope;
      part += dx[i] * scores.p[i];
    } else {
      part += slope * (scores.p[i] / scores.divisor);
    }
  }
  const float dot = L::sum(part);
#pragma unroll
  for (int i = 0; i < L::kEach; ++i) {
    const int e = L::expert(i);
    const float score = scores.p[i];
    if (softmax) {
      dx[i] = score * (dx[i] - dot);
    } else {
      if (has_dq) dx[i] += ((e < experts ? dq[e] : 0) - dot) / scores.divisor;
      dx[i] = dx[i] * score * (1.0f - score);
    }
  }
  if (z_slope != 0) {
    const float factor = z_slope * scores.lse;
    if (!softmax) {
      load_logits<L>(x, experts, p.vector, scores.p);
#pragma unroll
      for (float& v : scores.p) v = exp_nonpositive(v - scores.largest) / scores.sum;
    }
#pragma unroll
    for (int i = 0; i < L::kEach; ++i) dx[i] += factor * scores.p[i];
  }
#pragma unroll
  for (float& v : dx) v = live ? v : 0;
  if (exists) store_gradient<L>(p, t, dx);
}

template <class L>
__global__ void __launch_bounds__(L::kThreads)
    route_block_back(const __grid_constant__ BackwardParams p) {
  extern __shared__ float4 shared[];
  float* dq = reinterpret_cast<float*>(shared);
  const RouterConfig& config = p.rows.config;
  const int slots = blockDim.x / L::kLanes, slot = threadIdx.x / L::kLanes;
  const int64_t begin = p.blocks.begin(blockIdx.x), end = p.blocks.end(blockIdx.x);
  if (has_aux(config)) {
    const int64_t* count = p.count + p.blocks.segment(blockIdx.x) * (config.experts + 1);
    for (int e = threadIdx.x; e < config.experts; e += blockDim.x) {
      dq[e] = aux_gradient(config, count, p.scope, e);
    }
    __syncthreads();
  }
  const float z = z_slope(config, p.scope);
  for (int64_t first = begin; first < end; first += slots) {
    const int64_t t = first + slot;
    // All lanes of a warp compute together, whatever their tokens.
    float* const row = dq + (slot + 1) * p.stride;
    float* const choices = dq + (slots + 1) * p.stride + slot * 3 * config.top_k;
    route_back<L>(p, dq, row, choices, min(t, end - 1), t < end, z);
    __syncwarp();
  }
}

// Eight warps each compute the terms of a segment at a time; one thread adds them.
constexpr int kLossThreads = 256;

struct LossParams {
  RouterConfig config;
  const int64_t* count;
  const double* sum;
  int64_t segments;
  const int64_t* scope;
  double* loss;
};

__global__ void __launch_bounds__(kLossThreads) add_losses(const __grid_constant__ LossParams p) {
  constexpr int kWarps = kLossThreads / 32, kTerms = 128;
  __shared__ double terms[kWarps][kTerms], of_segment[kWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t experts = p.config.experts, scope_tokens = p.scope[1];
  double aux = 0, lse2 = 0;
  for (int64_t first = 0; first < p.segments; first += kWarps) {
    const int64_t segment = first + warp;
    const bool exists = segment < p.segments;
    const int64_t* count = p.count + (exists ? segment : 0) * (experts + 1);
    const double* sum = p.sum + (exists ? segment : 0) * (experts + 1);
    double total = 0;
    for (int64_t base = 0; base < experts; base += kTerms) {
      const int n = static_cast<int>(min(int64_t{kTerms}, experts - base));
#pragma unroll
      for (int i = lane; i < kTerms; i += 32) {
        if (i >= n) continue;
        terms[warp][i] = aux_slope(p.config, count[base + i], count[experts]) * sum[base + i];
      }
      __syncwarp();
      if (lane == 0) {
#pragma unroll 8
        for (int i = 0; i < n; ++i) total += terms[warp][i];
      }
      __syncwarp();
    }
    if (lane == 0) of_segment[warp] = total;
    __syncthreads();
    for (int64_t s = first; threadIdx.x == 0 && s < min(first + kWarps, p.segments); ++s) {
      const int64_t tokens =
          aux_tokens(p.config, p.count[s * (experts + 1) + experts], scope_tokens);
      if (tokens > 0) aux += of_segment[s - first] / static_cast<double>(tokens);
      lse2 += p.sum[s * (experts + 1) + experts];
    }
    __syncthreads();
  }
  if (threadIdx.x != 0) return;
  if (p.config.aux != AuxLoss::kNone) p.loss[0] += aux;
  if (scope_tokens > 0) p.loss[1] += lse2 / static_cast<double>(scope_tokens);
}

constexpr int kBiasThreads = 256;

__global__ void __launch_bounds__(kBiasThreads)
    update_bias(float* bias, const int64_t* count, int64_t experts, float rate,
                const int32_t* skip) {
  __shared__ unsigned long long total;
  if (skip && *skip != 0) return;
  if (threadIdx.x == 0) total = 0;
  __syncthreads();
  unsigned long long part = 0;
  for (int64_t e = threadIdx.x; e < experts; e += kBiasThreads) part += count[e];
  atomicAdd(&total, part);
  __syncthreads();
  for (int64_t e = threadIdx.x; e < experts; e += kBiasThreads) {
    bias[e] = moved_bias(bias[e], rate, static_cast<int64_t>(total), experts, count[e]);
  }
}

}  // namespace

BlockSums forward_rows_cuda(const RouterConfig& config, const RouterChooseArgs& args,
                            const Stream& stream) {
  const int64_t segments = args.stats.count.size(0), columns = config.experts + 1;
  const Blocks blocks(args.logits_TE.size(0), segments);
  auto* block_count = reinterpret_cast<int32_t*>(args.workspace.raw());
  auto* block_sum = reinterpret_cast<float*>(block_count + blocks.count * columns);
  const ForwardParams p{{config, args.logits_TE.data<float>(), args.bias_E.data<float>(),
                         args.mask_T.data<uint8_t>(), args.given_idx_TK.data<int32_t>(),
                         args.idx_TK.data<int32_t>(), args.weight_TK.data<float>()},
                        blocks,
                        block_count,
                        block_sum,
                        octets_fit({&args.logits_TE})};
  const RouterBlock block = ForwardShared::block(config);
  const ForwardShared shared(config, block.tokens);
  const LaunchShape shape{blocks.count, block.threads(), block.shared_bytes};
  using Start = KernelStart<ForwardParams, ForwardShared>;
  const Start start = start_of<kRouterLayouts>(block.layout, [&]<RouterLayout k>() -> Start {
    return {route_block<Layout<k>>, shape};
  });
  launch("router_forward", start.kernel, start.shape, stream, p, shared);
  return {.block_count = block_count,
          .block_sum = block_sum,
          .segments = segments,
          .rows = blocks.per_segment,
          .columns = columns,
          .count = args.stats.count.data<int64_t>(),
          .sum = args.stats.sum.data<double>()};
}

void add_blocks_cuda(const BlockSums& sums, const Stream& stream) {
  launch("router_forward: statistics", add_all_blocks, {thread_blocks(sums), kSumThreads}, stream,
         sums);
}

void backward_rows_cuda(const RouterConfig& config, const RouterChooseBackwardArgs& args,
                        const RouterSlots& slots, const Stream& stream) {
  const TensorView& dlogits = args.dlogits_TE;
  const bool pieces = dlogits.dtype() == DType::kBFloat16;
  const Blocks blocks(args.logits_TE.size(0), args.count.size(0));
  const int64_t stride = blocks_for(config.experts, kOctet) * kOctet;
  const BackwardParams p{{config, args.logits_TE.data<float>(), args.idx_TK.data<int32_t>(),
                          args.dweight_TK.data<float>(), pieces ? nullptr : dlogits.data<float>()},
                         blocks,
                         args.count.data<int64_t>(),
                         args.scope.data<int64_t>(),
                         slots.slot_TK.data<int32_t>(),
                         slots.dweight_C.data<float>(),
                         pieces ? dlogits.data<bf16>() : nullptr,
                         static_cast<int>(dlogits.size(1) / 3),
                         stride,
                         octets_fit({&args.logits_TE, &dlogits})};
  const RouterBlock block =
      choose_block(config.experts, 4 * stride, 4 * (stride + 3 * config.top_k));
  const LaunchShape shape{blocks.count, block.threads(), block.shared_bytes};
  using Start = KernelStart<BackwardParams>;
  const Start start = start_of<kRouterLayouts>(block.layout, [&]<RouterLayout k>() -> Start {
    return {route_block_back<Layout<k>>, shape};
  });
  launch("router_backward", start.kernel, start.shape, stream, p);
}

void add_losses_cuda(const RouterConfig& config, const RouterLossArgs& args, const Stream& stream) {
  const LossParams p{config,
                     args.stats.count.data<int64_t>(),
                     args.stats.sum.data<double>(),
                     args.stats.count.size(0),
                     args.scope.data<int64_t>(),
                     args.loss_2.data<double>()};
  launch("router_losses", add_losses, {1, kLossThreads}, stream, p);
}

void update_bias_cuda(const TensorView& bias_E, const TensorView& count_E, float rate,
                      const TensorView& skip, const Stream& stream) {
  launch("router_update_bias", update_bias, {1, kBiasThreads}, stream, bias_E.data<float>(),
         count_E.data<int64_t>(), bias_E.size(0), rate, skip.data<int32_t>());
}

}  // namespace moiety::moe::detail
