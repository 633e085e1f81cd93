#include "moiety/nn/cudnn_loader.h"

#include "moiety/base/format.h"
#include "moiety/base/shared_library.h"

namespace moiety::nn {
namespace {

constexpr size_t kLeast = 91400;

Cudnn open() {
  Cudnn f{};
  const SharedLibrary library = SharedLibrary::open({"libcudnn.so.9"});
  if (!library) {
    f.text = text("cuDNN was not found (pip install nvidia-cudnn-cu13 nvidia-cuda-nvrtc): {}",
                  library.error());
    return f;
  }
  const auto version_of = library.find<size_t()>("cudnnGetVersion");
  const size_t version = f.version = version_of ? version_of() : 0;
  f.text = text("cuDNN {} ({})", dotted_version(version), library.path());
  if (version < kLeast) {
    f.text += ", at least 9.14 is needed";
    return f;
  }
  // cuDNN opens these by their names alone, wherever they lie, and ends the process without them.
  for (const char* name : {"libcublasLt.so.13", "libnvrtc.so.13"}) {
    if (const SharedLibrary needed = SharedLibrary::open({name}); !needed) {
      f.text += text(", which needs {}: {}", name, needed.error());
      return f;
    }
  }
  f.available = library.find("cudnnCreate", f.create) &&
                library.find("cudnnSetStream", f.set_stream) &&
                library.find("cudnnBackendCreateDescriptor", f.create_descriptor) &&
                library.find("cudnnBackendDestroyDescriptor", f.destroy_descriptor) &&
                library.find("cudnnBackendSetAttribute", f.set_attribute) &&
                library.find("cudnnBackendGetAttribute", f.get_attribute) &&
                library.find("cudnnBackendFinalize", f.finalize) &&
                library.find("cudnnBackendExecute", f.execute) &&
                library.find("cudnnGetErrorString", f.error_string) &&
                library.find("cudnnGetLastErrorString", f.last_error_string);
  if (!f.available) f.text += " lacks functions that are needed";
  return f;
}

}  // namespace

const Cudnn& cudnn() {
  static const Cudnn functions = open();
  return functions;
}

}  // namespace moiety::nn
