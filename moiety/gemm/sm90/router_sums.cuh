// The addend of a router's backward pass as sums of rows (router_products.h): two warp groups sum 64
// tokens by 128 columns at a time into a buffer. A thread has an octet of four tokens; it copies
// their rows' octets into places of shared memory that are its own, two groups of eight ahead of
// those that it adds.
#pragma once

#include "moiety/formats/octet.cuh"
#include "moiety/gemm/sm90/router_block.cuh"

namespace moiety::gemm::sm90 {

template <class B>
class RowSummer {
 public:
  using L = typename B::L;

  __device__ explicit RowSummer(const B& b)
      : b_(b),
        topk_(b.p.rows.topk),
        tokens_(min(kChunks / topk_, kTokensOfThread)),
        groups_(kTokensOfThread / tokens_),
        total_((b.end - b.first) * groups_),
        octet_(static_cast<int>(threadIdx.x) % 16),
        token_(static_cast<int>(threadIdx.x) / 16),
        term_(octet_ % topk_),
        of_term_(octet_ / topk_),
        exists_(b.column + 8 * octet_ < b.p.model),
        from_(b.p.rows.rows + 2 * (b.column + 8 * octet_)) {}

  __device__ void run() {
    if (threadIdx.x == 0) {
      b_.load_w();
      for (int i = 0; i < L::kStages; ++i) b_.load_stage(b_.first + i, stage_);
    }
    next_ = slot(0);
    for (int g = 0; g < total_ + kAhead; ++g) {
      copy_group(g);
      commit_copies();
      if (g < kAhead) continue;
      wait_copies_but<kAhead>();
      add_group(g - kAhead);
    }
  }

 private:
  static constexpr int kThreads = L::kLoaders * kWarpGroup, kApart = kThreads / 16;
  static constexpr int kTokensOfThread = kTokens / kApart;
  static constexpr int kChunks = 8, kAhead = L::kRing - 1;

  // The first of the tokens of a group that the thread has, kApart apart, within the tile.
  __device__ int first_token(int g) const { return g % groups_ * tokens_ * kApart + token_; }
  // Of a group, lane j of 16 has the slot of octet j: those of a token follow each other.
  __device__ int32_t slot(int g) const {
    const int64_t t =
        int64_t{b_.first + g / groups_} * kTokens + first_token(g) + kApart * of_term_;
    const bool has = g < total_ && of_term_ < tokens_ && t < b_.p.rows.tokens;
    return has ? b_.p.rows.slots[t * topk_ + term_] : -1;
  }
  __device__ uint32_t place(int g, int chunk) const {
    const int at = (g % L::kRing * kChunks + chunk) * kThreads + static_cast<int>(threadIdx.x);
    return b_.base + L::kRingAt + at * 16;
  }
  __device__ void copy_group(int g) {
    const int32_t own = next_;
    next_ = slot(g + 1);
    const uint32_t alive = __ballot_sync(~0u, own >= 0) >> (threadIdx.x & 16) & 0xFFFF;
    alive_ = alive_ << 8 | (alive & 0xFF);
#pragma unroll
    for (int j = 0; j < kChunks; ++j) {
      const int32_t slot = __shfl_sync(~0u, own, j, 16);
      if (slot >= 0 && exists_) copy_16(place(g, j), from_ + slot * b_.p.rows.stride, 16);
    }
  }
  __device__ void add_group(int g) {
    if (g % groups_ == 0) {
      if (threadIdx.x == 0 && g > 0) {
        b_.load_stage(b_.first + g / groups_ - 1 + L::kStages, stage_);
      }
      barrier_wait(b_.buffer_empty(buffer_.at), buffer_.phase ^ 1);
    }
    const uint32_t alive = alive_ >> 8 * kAhead, of_token = (1u << topk_) - 1;
    Octet<bf16> x[kChunks];
#pragma unroll
    for (int j = 0; j < kChunks; ++j) {
      asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(x[j].word[0]), "=r"(x[j].word[1]), "=r"(x[j].word[2]), "=r"(x[j].word[3])
                   : "r"(place(g, j))
                   : "memory");
    }
    float v[kOctet];
    int token = first_token(g), k = 0;
#pragma unroll
    for (int j = 0; j < kChunks; ++j) {
      if (j == tokens_ * topk_) break;
      if (k == 0) {
#pragma unroll
        for (float& f : v) f = -0.0f;  // to which anything may be added
      }
      if (alive >> j & 1) {
#pragma unroll
        for (int i = 0; i < kOctet; ++i) v[i] += x[j][i];
      }
      if (++k < topk_) continue;
      const bool any = alive >> (j + 1 - topk_) & of_token;
      store(token, any ? round_octet<bf16>(v) : Octet<bf16>());
      token += kApart;
      k = 0;
    }
    if (g % groups_ != groups_ - 1) return;
    // All lanes' stores come before lane 0's arrival, which releases them to who waits for the
    // barrier. racecheck follows an arrival to its own thread's stores alone, and reports those of
    // the other lanes (docs/adr/0015).
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(b_.buffer_full(buffer_.at));
    buffer_.next();
  }
  __device__ void store(int token, const Octet<bf16>& v) const {
    const uint32_t to = b_.buffer(buffer_.at) + octet_ / 8 * kBox + token * 128;
    asm volatile(
        "st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to + (octet_ % 8 ^ token % 8) * 16),
        "r"(v.word[0]), "r"(v.word[1]), "r"(v.word[2]), "r"(v.word[3])
        : "memory");
  }

  const B& b_;
  const int topk_, tokens_, groups_, total_, octet_, token_, term_, of_term_;
  const bool exists_;
  const char* from_;
  int32_t next_ = -1;
  uint32_t alive_ = 0;
  Turn<L::kStages> stage_;
  Turn<L::kBuffers> buffer_;
};

}  // namespace moiety::gemm::sm90
