#include "moiety/gemm/cublaslt_loader.h"

#include "moiety/base/format.h"
#include "moiety/base/shared_library.h"

namespace moiety::gemm {
namespace {

constexpr size_t kLeast = 130000;  // 13.0, in cuBLASLt's count

CublasLt open() {
  CublasLt f{};
  const SharedLibrary library = SharedLibrary::open({"libcublasLt.so.13"});
  if (!library) {
    f.text = text("cuBLASLt was not found (pip install nvidia-cublas): {}", library.error());
    return f;
  }
  const auto version_of = library.find<size_t()>("cublasLtGetVersion");
  const size_t version = version_of ? version_of() : 0;
  f.text = text("cuBLASLt {} ({})", dotted_version(version), library.path());
  if (version < kLeast) {
    f.text += ", at least 13.0 is needed";
    return f;
  }
  f.available = library.find("cublasLtCreate", f.create) &&
                library.find("cublasLtMatmul", f.matmul) &&
                library.find("cublasLtMatmulAlgoGetHeuristic", f.heuristic) &&
                library.find("cublasLtMatmulDescCreate", f.create_operation) &&
                library.find("cublasLtMatmulDescSetAttribute", f.set_operation) &&
                library.find("cublasLtMatrixLayoutCreate", f.create_layout) &&
                library.find("cublasLtMatmulPreferenceCreate", f.create_preference) &&
                library.find("cublasLtMatmulPreferenceSetAttribute", f.set_preference) &&
                library.find("cublasLtMatmulPreferenceDestroy", f.destroy_preference) &&
                library.find("cublasLtGetStatusString", f.status_string);
  if (!f.available) f.text += " lacks functions that are needed";
  return f;
}

}  // namespace

const CublasLt& cublaslt() {
  static const CublasLt functions = open();
  return functions;
}

}  // namespace moiety::gemm
