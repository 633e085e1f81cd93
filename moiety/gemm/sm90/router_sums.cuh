// The addend of a router's backward pass as sums of rows (router_products.h): a warp group sums 64
// tokens by 128 columns at a time into a buffer. A thread has an octet of eight tokens; it copies
// their rows' octets into places of shared memory that are its own, three groups of eight ahead of
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
        tokens_(kChunks / topk_),
        groups_(8 / tokens_),
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
  // Eight octets at a time, in a ring of four groups.
  static constexpr int kChunks = 8, kAhead = 3;

  // The first of the tokens of a group that the thread has, 8 apart, within the tile.
  __device__ int first_token(int g) const { return g % groups_ * tokens_ * 8 + token_; }
  // Of a group, lane j of 16 has the slot of octet j: those of a token follow each other.
  __device__ int32_t slot(int g) const {
    const int64_t t = int64_t{b_.first + g / groups_} * kTokens + first_token(g) + 8 * of_term_;
    const bool has = g < total_ && of_term_ < tokens_ && t < b_.p.rows.tokens;
    return has ? b_.p.rows.slots[t * topk_ + term_] : -1;
  }
  __device__ uint32_t place(int g, int chunk) const {
    return b_.base + L::kRingAt +
           ((g % (kAhead + 1) * kChunks + chunk) * kWarpGroup + threadIdx.x) * 16;
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
    const uint32_t alive = alive_ >> 8 * kAhead;
    for (int i = 0; i < tokens_; ++i) {
      float v[kOctet] = {};
      bool any = false;
      for (int k = 0; k < topk_; ++k) {
        const int chunk = i * topk_ + k;
        if (!(alive >> chunk & 1)) continue;
        Octet<bf16> x;
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(x.word[0]), "=r"(x.word[1]), "=r"(x.word[2]), "=r"(x.word[3])
                     : "r"(place(g, chunk))
                     : "memory");
#pragma unroll
        for (int j = 0; j < kOctet; ++j) v[j] = any ? v[j] + x[j] : x[j];
        any = true;
      }
      if (b_.p.rows.rounds) {
        const Octet<bf16> rounded = round_octet<bf16>(v);
#pragma unroll
        for (int j = 0; j < kOctet; ++j) v[j] = rounded[j];
      }
      store(first_token(g) + 8 * i, v);
    }
    if (g % groups_ != groups_ - 1) return;
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(b_.buffer_full(buffer_.at));
    buffer_.next();
  }
  __device__ void store(int token, const float (&v)[kOctet]) const {
    const uint32_t to = b_.buffer(buffer_.at) + octet_ / 4 * kBox + token * 128;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int piece = octet_ % 4 * 2 + half;
      asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to + (piece ^ token % 8) * 16),
                   "f"(v[4 * half]), "f"(v[4 * half + 1]), "f"(v[4 * half + 2]),
                   "f"(v[4 * half + 3])
                   : "memory");
    }
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
