#include "moiety/checkpoint/shared_directory.h"

#include "moiety/base/error.h"
#include "moiety/base/log.h"
#include "moiety/checkpoint/together.h"

namespace moiety::checkpoint {
namespace {

constexpr std::string_view kProbe = ".probe-";

// Removes what starts left behind that were killed here.
void remove_probes(const std::string& directory, FileSystem& files) {
  const std::string failed = report_of([&] {
    for (const std::string& name : list(files, directory)) {
      if (name.starts_with(kProbe)) remove(files, directory + "/" + name);
    }
  });
  if (!failed.empty()) log(LogLevel::kWarning, "checkpoint: {}", failed.substr(1));
}

}  // namespace

void check_shared_directory(const std::string& directory, comm::Bootstrap& bootstrap,
                            FileSystem& files) {
  const std::string nonce = gather(bootstrap, random_id())[0];
  const std::string path = directory + "/" + std::string(kProbe) + nonce;
  const bool first = bootstrap.rank() == 0;
  if (first) remove_probes(directory, files);
  std::string seen;
  const std::string error = report_of([&] {
    together(bootstrap, [&] {
      if (first) write_text(files, path, nonce);
    });
    together(bootstrap, [&] {
      if (size_of(files, path)) seen = read_text(files, path, nonce.size());
      if (seen != nonce) {
        fail(ErrorKind::kIo,
             "{} is not the directory that rank 0 sees there: it must be one file system for all "
             "ranks",
             directory);
      }
    });
  });
  if (first) {
    const std::string left = report_of([&] { remove(files, path); });
    if (!left.empty()) log(LogLevel::kWarning, "checkpoint: {}", left.substr(1));
  }
  if (!error.empty()) throw_report(error);
}

}  // namespace moiety::checkpoint
