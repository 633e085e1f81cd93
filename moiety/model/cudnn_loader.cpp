#include "moiety/model/cudnn_loader.h"

#include "moiety/base/format.h"
#include "moiety/base/shared_library.h"

namespace moiety::model {
namespace {

constexpr size_t kLeast = 91400;

template <class F>
bool find(const SharedLibrary& library, const char* symbol, F*& function) {
  function = library.find<F>(symbol);
  return function != nullptr;
}

Cudnn open() {
  Cudnn f{};
  const SharedLibrary library = SharedLibrary::open({"libcudnn.so.9"});
  if (!library) {
    f.text = text("cuDNN was not found (pip install nvidia-cudnn-cu13): {}", library.error());
    return f;
  }
  const auto version_of = library.find<size_t()>("cudnnGetVersion");
  const size_t version = f.version = version_of ? version_of() : 0;
  f.text = text("cuDNN {}.{}.{} ({})", version / 10000, version / 100 % 100, version % 100,
                library.path());
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
  f.available = find(library, "cudnnCreate", f.create) &&
                find(library, "cudnnSetStream", f.set_stream) &&
                find(library, "cudnnBackendCreateDescriptor", f.create_descriptor) &&
                find(library, "cudnnBackendDestroyDescriptor", f.destroy_descriptor) &&
                find(library, "cudnnBackendSetAttribute", f.set_attribute) &&
                find(library, "cudnnBackendGetAttribute", f.get_attribute) &&
                find(library, "cudnnBackendFinalize", f.finalize) &&
                find(library, "cudnnBackendExecute", f.execute) &&
                find(library, "cudnnGetErrorString", f.error_string) &&
                find(library, "cudnnGetLastErrorString", f.last_error_string);
  if (!f.available) f.text += " lacks functions that are needed";
  return f;
}

}  // namespace

const Cudnn& cudnn() {
  static const Cudnn functions = open();
  return functions;
}

}  // namespace moiety::model
