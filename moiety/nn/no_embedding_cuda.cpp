// Linked where CUDA is not built.
#include "moiety/base/gpu.h"
#include "moiety/nn/embedding.h"

namespace moiety::nn {

void embedding_cuda(const EmbeddingArgs&, const Stream&) { fail_without_cuda("embedding"); }
void embedding_backward_cuda(const EmbeddingBackwardArgs&, const Stream&) {
  fail_without_cuda("embedding_backward");
}

}  // namespace moiety::nn
