// Rotary position embedding (Su et al., 2021) in the half-split form: the pair (i, i + C/2) of a
// head is rotated by the angle position * theta^(-2i/C).
#pragma once

#include "moiety/base/buffer.h"
#include "moiety/base/stream.h"

namespace moiety::nn {

// The table [P, 2, C/2] in fp32: for each position the cosines, then the sines. It is made on the
// host, so that all devices use the same bits: inv_i = fp32(1 / fp32(theta^(2i/C))), angle =
// fp32(position * inv_i), and cosine and sine of that angle in double, rounded.
Tensor rope_table(int64_t positions, int64_t head_dim, double theta);

// Rotates in place: x_i := x_i cos - x_{i+C/2} sin; x_{i+C/2} := x_{i+C/2} cos + x_i sin. `inverse`
// rotates back, which is the backward pass. Products and sums are rounded one by one in fp32.
struct RopeArgs {
  TensorView x_TGNC;  // storage; all but the last dimension may be strided
  // rope_table; a position beyond it is an error, on a GPU it gives a head of NaN
  TensorView table;
  TensorView position_T;  // optional int32; if absent, position t is t mod seq_len
  int64_t seq_len = 0;
  bool inverse = false;
};
void rope(const RopeArgs& args, Stream stream);

// The scalar reference (also double) and the fast paths, which give the same bits.
void rope_ref(const RopeArgs& args);
void rope_cpu(const RopeArgs& args);
void rope_cuda(const RopeArgs& args, const Stream& stream);

}  // namespace moiety::nn
