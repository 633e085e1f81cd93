// The experts: FC1, activation with the router's probability, FC2, over groups of rows whose sizes
// are data (docs/spec/grouped.md#grouped-mlp). There are T source rows and R_cap rows of the
// buffers; D is the model size, F the ffn size.
//
//    F1  H = round(X[source] w1^T + b1)          B1  dA = round(dO[source] w2)
//    F2  A = round(y(H) * p)                     B2  dH, A, dprob from dA, p, H (+ dO[source] . b2)
//    F3  Y = round(A w2^T + b2 * p)              B3  db2 = sum p dO[source], db1 = sum dH
//    F4  O[t] = round(sum_k Y[row[t, k]])        B4  dX[t] = round(sum_k round(dH w1)[row[t, k]])
//    G2  dW2[e] = sum dO[source]^T A             G1  dW1[e] = sum dH^T X[source]
//
// The rounding points are part of the contract: every named tensor is rounded once to the storage
// dtype. The probability is applied only between the linears. Without `row` F3 writes O and B4 writes
// dX, whose dead rows are not written: those of expert-major input, and with `source` the rows that
// the caller sums. Without `source` rows are read as they lie.
//
// With an interleave that is a multiple of 32, all results on CPUs have the bits that they have
// without: B4 sums over the columns of H in plain order. With others, and on GPUs, it sums over them
// as they lie.
//
// The storage dtype is fp32 or bf16 (fp64 in the reference, for gradient checks). All paths give
// the same bits as long as the products of gemm.h do. On a GPU the host reads nothing and every
// call can be captured; faults of the data are recorded there.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "moiety/base/gpu.h"
#include "moiety/gemm/grouped_gemm.h"
#include "moiety/gemm/swiglu.h"

namespace moiety::gemm {

// F4: out[t] = round(sum_k rows[row_TK[t, k]]), in ascending k in fp32 from the first live term
// (whose index is not -1); +0 if no term is live. An index outside [-1, rows) is a fault and not
// live.
void sum_rows(TensorView rows_RD, TensorView row_TK, TensorView out_TD, TensorView status,
              Stream stream);

// grouped_offsets that also zeroes the rows past the last group of at most four buffers
// [capacity, ...] with contiguous columns, on a GPU in the same launch; views that are not defined
// are passed over.
void grouped_offsets(TensorView count_E, std::span<const OffsetSpec> outputs, int64_t capacity,
                     TensorView status, std::span<const TensorView> zeroed, Stream stream);

// ---- Choice of path: a pure function, made once per layer, never changed during a run.
// kSm90: products by Hopper's tensor cores (sm90/grouped_sm90.h), but for single views that these
// cannot take, whose rows begin at no multiple of 16 bytes; kSm90Fused: with the activation in the
// products' launches (sm90/fused.h), which changes no bit, in the passes that `Passes` names: where
// it was slower it is taken only where it is required; kCudaPlain: for every GPU and view.
enum class MlpPath { kReference, kCpu, kCudaPlain, kSm90, kSm90Fused };
const char* name(MlpPath path);
struct Passes {
  bool forward = true, backward = true;
  constexpr bool both() const { return forward && backward; }
};

struct PathReport {
  struct Rejected {
    MlpPath path;
    std::string reason;    // the first condition that failed, with its values
    bool by_name = false;  // `require` may take it
  };
  MlpPath path = MlpPath::kReference;
  Passes fused;                    // those that kSm90Fused is taken for; in others it is kSm90
  std::vector<Rejected> rejected;  // every better path

  // "reference (cpu: dtype float64 is not float32 or bfloat16)"
  std::string describe() const;
  // Makes `required` the path, also where a better one is there, which is then rejected for that,
  // and where it is a better one that is only taken by name. Throws Unsupported, with the reasons,
  // if it was rejected or is a path of other devices.
  void require(MlpPath required);
};

struct GroupedMlpDesc {
  DType dtype = DType::kFloat32;
  int64_t model = 0;       // D
  int64_t ffn = 0;         // F
  int64_t interleave = 0;  // of the GLU (swiglu.h)
};
// Float64 is Error(kUnsupported) on a GPU, and so is a GPU that is not there.
PathReport choose_grouped_mlp(const GroupedMlpDesc& desc, Device device);
// The choice for a GPU with these properties, whether there is one or not.
PathReport choose_grouped_mlp(const GroupedMlpDesc& desc, const GpuProperties& gpu);

// ---- The operation.
struct GroupedMlp {
  MlpPath path = MlpPath::kReference;  // from choose_grouped_mlp, for the stream's device
  Passes fused = {};                   // likewise
  Activation activation;
  int64_t interleave = 0;
  GroupedWeight w1;       // [E, 2F, D]; squared ReLU [E, F, D]
  GroupedWeight w2;       // [E, D, F]
  TensorView b1_EH = {};  // [E, 2F], optional
  TensorView b2_ED = {};  // [E, D], optional
  int sm_limit = 0;       // GPU: the most multiprocessors that its products take; 0: all
};

struct MlpInput {
  Groups groups;
  TensorView x;              // [R_cap, D], or [T, D] with source_R
  TensorView prob_R = {};    // float32 [R_cap], optional
  TensorView source_R = {};  // int32 [R_cap], optional: the rows of x and d_o
  TensorView row_TK = {};    // int32 [T, K], its inverse, optional: -1 where a pair is not alive
};

// Bytes of `workspace` (uint8 [bytes], aligned to 64). forward keeps A there and, with row_TK, Y;
// backward_data keeps dA there, with row_TK dXr, and on kSm90Fused the segments of dprob. On kCpu A and
// dA are rows of the threads.
int64_t grouped_mlp_workspace(const GroupedMlp& mlp, const MlpInput& input);

// Writes h [R_cap, 2F], to be kept for backward, and o [T, D], without row_TK [R_cap, D]. Without
// source_R o may be x exactly.
void grouped_mlp_forward(const GroupedMlp& mlp, const MlpInput& input, TensorView h, TensorView o,
                         TensorView workspace, Stream stream);
// Runs only F1, with the same bits: for layers that keep only their input.
void grouped_mlp_hidden(const GroupedMlp& mlp, const MlpInput& input, TensorView h, Stream stream);

struct MlpGradients {
  TensorView d_o;           // in: like x
  TensorView h;             // in: [R_cap, 2F]
  TensorView dh;            // out: [R_cap, 2F]; may be h exactly
  TensorView a = {};        // out: [R_cap, F], for backward_weights; absent if w2 is frozen
  TensorView dx = {};       // out: [T, D], without row_TK [R_cap, D]; absent: without B4
  TensorView dprob_R = {};  // out, optional: float32 [R_cap]
  TensorView db1_EH = {};   // out, optional: float32 or the storage dtype
  TensorView db2_ED = {};   // out, optional
  GroupScalar bias_beta = {};
};
void grouped_mlp_backward_data(const GroupedMlp& mlp, const MlpInput& input,
                               const MlpGradients& gradients, TensorView workspace, Stream stream);

// Runs B4 alone, after a backward_data without dx, for a caller that has use for dx's memory until
// then. Without row_TK.
void grouped_mlp_backward_input(const GroupedMlp& mlp, const MlpInput& input,
                                const MlpGradients& gradients, Stream stream);

// The target of a weight gradient: an fp32 or bf16 main_grad. beta 0 overwrites, 1 adds.
struct GradTarget {
  GroupedWeight grad;
  GroupScalar beta = {};
};
// Runs G2, then G1. Reads x, maps and groups of `input` and the d_o, dh and a that backward_data
// left; may run any time after it. An undefined target is skipped (frozen weight).
void grouped_mlp_backward_weights(const GroupedMlp& mlp, const MlpInput& input,
                                  const MlpGradients& gradients, const GradTarget& w2,
                                  const GradTarget& w1, Stream stream);

}  // namespace moiety::gemm
