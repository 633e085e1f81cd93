// The functions of cuDNN that are used, from the library that is opened at run time. Only for
// builds that have cuDNN's headers.
#pragma once

#include <cudnn.h>
#include <string>

namespace moiety::nn {

struct Cudnn {
  decltype(&cudnnCreate) create;
  decltype(&cudnnSetStream) set_stream;
  decltype(&cudnnBackendCreateDescriptor) create_descriptor;
  decltype(&cudnnBackendDestroyDescriptor) destroy_descriptor;
  decltype(&cudnnBackendSetAttribute) set_attribute;
  decltype(&cudnnBackendGetAttribute) get_attribute;
  decltype(&cudnnBackendFinalize) finalize;
  decltype(&cudnnBackendExecute) execute;
  decltype(&cudnnGetErrorString) error_string;
  decltype(&cudnnGetLastErrorString) last_error_string;

  bool available = false;
  size_t version = 0;  // 91400 is 9.14
  std::string text;    // version and file, or the reason why it is not available
};

// The table, filled at the first call.
const Cudnn& cudnn();

}  // namespace moiety::nn
