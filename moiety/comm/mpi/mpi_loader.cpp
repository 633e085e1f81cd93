#include "moiety/comm/mpi/mpi_loader.h"

#include <dlfcn.h>
#include <filesystem>
#include <string_view>
#include <vector>

#include "moiety/base/error.h"

namespace moiety::comm::mpi {
namespace {

namespace fs = std::filesystem;

constexpr const char* kFile = "libmoiety_mpi.so";

std::vector<fs::path> places() {
  std::vector<fs::path> out;
  const auto add = [&](const fs::path& object) {
    const fs::path folder = object.parent_path();
    out.push_back(folder / kFile);
    out.push_back(folder.parent_path() / "lib" / kFile);
    out.push_back(folder.parent_path() / MOIETY_LIBDIR / kFile);
  };
  std::error_code ignored;
  add(fs::read_symlink("/proc/self/exe", ignored));
  Dl_info here{};
  if (dladdr(reinterpret_cast<const void*>(&load), &here) != 0 && here.dli_fname) {
    add(fs::canonical(here.dli_fname, ignored));
  }
  return out;
}

Module open_file(const std::string& path) {
  // Global, since the parts that Open MPI itself opens look for its symbols.
  void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL);
  if (!handle) {
    const char* reason = dlerror();
    return {nullptr, text("MPI: {} (Debian: openmpi-bin)", reason ? reason : path)};
  }
  using Table = const Functions* (*)();
  const auto table = reinterpret_cast<Table>(dlsym(handle, kFunctionsSymbol));
  const Functions* functions = table ? table() : nullptr;
  if (!functions || functions->version != kFunctionsVersion) {
    return {nullptr, text("MPI: {} is of version {}, this program needs {}: install both anew",
                          path, functions ? functions->version : 0, kFunctionsVersion)};
  }
  const std::string_view library = functions->library();
  return {functions, text("{}, {}", library.substr(0, library.find_first_of(",\n")), path)};
}

Module find() {
  std::error_code ignored;
  for (const fs::path& path : places()) {
    if (fs::exists(path, ignored)) return open_file(path.string());
  }
  const Module elsewhere = open_file(kFile);
  if (elsewhere.functions) return elsewhere;
  return {nullptr, text("MPI: no {} beside the program or in ../lib: built without MPI (Debian: "
                        "libopenmpi-dev, then configure and build again)",
                        kFile)};
}

}  // namespace

const Module& load() {
  static const Module module = find();
  return module;
}

}  // namespace moiety::comm::mpi
