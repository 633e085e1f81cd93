// The functions of cuBLASLt that are used, from the library that is opened at run time. Only for
// builds that have cuBLASLt's header.
#pragma once

#include <cublasLt.h>
#include <string>

namespace moiety::gemm {

struct CublasLt {
  decltype(&cublasLtCreate) create;
  decltype(&cublasLtMatmul) matmul;
  decltype(&cublasLtMatmulAlgoGetHeuristic) heuristic;
  decltype(&cublasLtMatmulDescCreate) create_operation;
  decltype(&cublasLtMatmulDescSetAttribute) set_operation;
  decltype(&cublasLtMatrixLayoutCreate) create_layout;
  decltype(&cublasLtMatmulPreferenceCreate) create_preference;
  decltype(&cublasLtMatmulPreferenceSetAttribute) set_preference;
  decltype(&cublasLtMatmulPreferenceDestroy) destroy_preference;
  decltype(&cublasLtGetStatusString) status_string;

  bool available = false;
  std::string text;  // version and file, or the reason why it is not available
};

// The table, filled at the first call.
const CublasLt& cublaslt();

}  // namespace moiety::gemm
