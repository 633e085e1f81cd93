// The GPU's copy of a grouped MLP with everything that it reads and writes.
#pragma once

#include "tests/gemm/mlp_problem.h"
#include "tests/support/mirror.h"

namespace moiety::gemm {

// The GPU's copy of a problem.
class There {
 public:
  There(const MlpProblem& p, const Stream& stream)
      : There(p, choose_grouped_mlp({p.o.dtype, p.o.model, p.o.ffn}, stream.device()).path,
              stream) {}
  There(const MlpProblem& p, MlpPath path, const Stream& stream)
      : p_(p),
        stream_(stream),
        m_({p.groups().count_E,
            p.groups().begin_E1,
            p.groups().status,
            p.w1,
            p.w2,
            p.b1,
            p.b2,
            p.x,
            p.prob,
            p.d_o,
            p.source,
            p.row,
            p.h,
            p.out,
            p.dh,
            p.a,
            p.dx,
            p.dprob,
            p.db1,
            p.db2,
            p.dw1,
            p.dw2},
           stream),
        mlp(p.mlp),
        input(p.input),
        gradients(p.gradients) {
    mlp.path = path;
    mlp.w1 = m_(p.mlp.w1.packed());
    mlp.w2 = m_(p.mlp.w2.packed());
    Groups& g = input.groups;
    for (TensorView* x :
         {&mlp.b1_EH, &mlp.b2_ED, &g.count_E, &g.begin_E1, &g.status, &input.x, &input.prob_R,
          &input.source_R, &input.row_TK, &gradients.d_o, &gradients.h, &gradients.dh, &gradients.a,
          &gradients.dx, &gradients.dprob_R, &gradients.db1_EH, &gradients.db2_ED}) {
      *x = m_(*x);
    }
    workspace_ = Tensor(DType::kUInt8, {grouped_mlp_workspace(mlp, input)}, stream.device());
  }

  void forward() const {
    grouped_mlp_forward(mlp, input, gradients.h, m_(p_.out), workspace_, stream_);
  }
  void backward_data() const {
    grouped_mlp_backward_data(mlp, input, gradients, workspace_, stream_);
  }
  void backward_weights(const GroupScalar& beta = {}) const {
    grouped_mlp_backward_weights(mlp, input, gradients, {m_(p_.dw2), beta}, {m_(p_.dw1), beta},
                                 stream_);
  }
  void run() const {
    forward();
    backward_data();
    backward_weights();
  }
  void upload(const TensorView& host) const {
    if (host.numel() > 0) copy(m_(host), host, stream_);
  }
  Tensor back(const TensorView& host) const { return m_.back(host); }

  // Empty if all that is written is as on the host.
  std::string difference() const {
    std::string all = m_.difference("status", p_.groups().status);
    for (const auto& [what, x] : p_.results()) {
      if (x->view().defined()) all += m_.difference(what, *x);
    }
    return all;
  }

 private:
  const MlpProblem& p_;
  Stream stream_;
  Mirror m_;
  Tensor workspace_;

 public:
  GroupedMlp mlp;
  MlpInput input;
  MlpGradients gradients;
};

}  // namespace moiety::gemm
