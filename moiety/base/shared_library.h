// A library that is opened at run time, so that the program runs where it is missing.
//
// A loader of one (x_loader.cpp) opens it at first use, checks its version, fills a table of the
// functions that are used, and has a sentence for `moiety doctor` when it is missing.
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
  // The file; empty if nothing was opened.
  const std::string& path() const { return path_; }
  // Why the first name was not opened.
  const std::string& error() const { return error_; }

  // F is a function type. Null if the library is missing or lacks the symbol.
  template <class F>
  F* find(const char* symbol) const {
    return reinterpret_cast<F*>(find_symbol(symbol));
  }
  // For tables of functions: whether it was found.
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

// "9.14.0" of 91400, as NVIDIA's libraries count.
std::string dotted_version(size_t version);

// Where pip puts NVIDIA's libraries: the nvidia/*/lib folders of the packages of the first
// `python3` on PATH, a virtual environment's or the system's.
std::vector<std::filesystem::path> python_library_folders();

}  // namespace moiety
