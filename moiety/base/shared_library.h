// A library that is opened at run time, so that the program also runs where it is missing.
//
// The loader of one library (x_loader.cpp) opens it at first use, checks its version, fills a table
// of the functions that are used, and has a sentence for `moiety doctor` when it is missing.
#pragma once

#include <filesystem>
#include <initializer_list>
#include <string>
#include <vector>

namespace moiety {

class SharedLibrary {
 public:
  // Opens the first of `names` ("libnccl.so.2") that the system's loader finds or that lies in one
  // of python_library_folders(). It stays open until the process ends.
  static SharedLibrary open(std::initializer_list<const char*> names);

  explicit operator bool() const { return handle_ != nullptr; }
  // The file that was opened; empty if none was.
  const std::string& path() const { return path_; }
  // The reason why the first name was not opened.
  const std::string& error() const { return error_; }

  // The function of this name, whose type is F; null if the library is missing or lacks the symbol.
  template <class F>
  F* find(const char* symbol) const {
    return reinterpret_cast<F*>(find_symbol(symbol));
  }
  // Finds a function for a table of functions; false if it is not there.
  template <class F>
  bool find(const char* symbol, F*& function) const {
    function = find<F>(symbol);
    return function != nullptr;
  }

 private:
  bool try_file(const std::string& file);
  void* find_symbol(const char* symbol) const;

  void* handle_ = nullptr;
  std::string path_, error_;
};

// A version as NVIDIA's libraries count it, as text: 91400 is "9.14.0".
std::string dotted_version(size_t version);

// The folders into which pip puts NVIDIA's libraries: nvidia/*/lib of the packages of the first
// `python3` on PATH, a virtual environment's or the system's.
std::vector<std::filesystem::path> python_library_folders();

}  // namespace moiety
