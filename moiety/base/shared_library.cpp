#include "moiety/base/shared_library.h"

#include <algorithm>
#include <cstdlib>
#include <dlfcn.h>
#include <link.h>
#include <sstream>

#include "moiety/base/format.h"

namespace moiety {
namespace {

namespace fs = std::filesystem;

// The folders in `folder` whose names start with `beginning`, in the order of their names.
std::vector<fs::path> folders_in(const fs::path& folder, std::string_view beginning = "") {
  std::vector<fs::path> out;
  std::error_code ignored;
  for (fs::directory_iterator it(folder, ignored), end; it != end; it.increment(ignored)) {
    if (it->path().filename().string().starts_with(beginning) && it->is_directory(ignored)) {
      out.push_back(it->path());
    }
  }
  std::sort(out.begin(), out.end());
  return out;
}

// The prefixes of the first python3 on PATH: its own, and that of the file it links to.
std::vector<fs::path> python_prefixes() {
  const char* path = std::getenv("PATH");
  std::istringstream entries(path ? path : "");
  std::error_code ignored;
  for (std::string entry; std::getline(entries, entry, ':');) {
    const fs::path python = fs::path(entry) / "python3";
    if (!fs::exists(python, ignored)) continue;
    std::vector<fs::path> out;
    for (const fs::path& place : {fs::absolute(python, ignored), fs::canonical(python, ignored)}) {
      const fs::path prefix = place.parent_path().parent_path();
      if (std::find(out.begin(), out.end(), prefix) == out.end()) out.push_back(prefix);
    }
    // Debian's python3 in /usr also finds packages that its administrator installs in /usr/local.
    if (out.back() == "/usr") out.push_back("/usr/local");
    return out;
  }
  return {};
}

}  // namespace

std::string dotted_version(size_t version) {
  return text("{}.{}.{}", version / 10000, version / 100 % 100, version % 100);
}

std::vector<fs::path> python_library_folders() {
  std::vector<fs::path> out;
  std::error_code ignored;
  for (const fs::path& prefix : python_prefixes()) {
    for (const fs::path& python : folders_in(prefix / "lib", "python3")) {
      for (const char* packages : {"site-packages", "dist-packages"}) {
        for (const fs::path& package : folders_in(python / packages / "nvidia")) {
          if (fs::is_directory(package / "lib", ignored)) out.push_back(package / "lib");
        }
      }
    }
  }
  return out;
}

SharedLibrary SharedLibrary::open(std::initializer_list<const char*> names) {
  SharedLibrary out;
  for (const char* name : names) {
    if (out.try_file(name)) return out;
  }
  for (const fs::path& folder : python_library_folders()) {
    for (const char* name : names) {
      std::error_code ignored;
      if (fs::exists(folder / name, ignored) && out.try_file(folder / name)) return out;
    }
  }
  return out;
}

bool SharedLibrary::try_file(const std::string& file) {
  handle_ = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!handle_) {
    const char* reason = dlerror();
    if (error_.empty()) error_ = reason ? reason : file;
    return false;
  }
  link_map* map = nullptr;
  path_ = dlinfo(handle_, RTLD_DI_LINKMAP, &map) == 0 ? map->l_name : file;
  error_.clear();
  return true;
}

void* SharedLibrary::find_symbol(const char* symbol) const {
  return handle_ ? dlsym(handle_, symbol) : nullptr;
}

}  // namespace moiety
