#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "moiety/base/deadline.h"
#include "moiety/base/format.h"
#include "moiety/checkpoint/interrupt.h"
#include "moiety/train/health.h"

namespace moiety::train {
namespace fs = std::filesystem;
namespace {

constexpr double kGiga = 1 << 30;

// A file descriptor, or none.
class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }

 private:
  int fd_;
};

// The MB/s of writing and fsync, over at most a second of writing.
double write_speed(int fd) {
  const std::vector<char> block(1 << 20, 'm');
  const Deadline limit{Seconds(1)};
  double bytes = 0;
  while (bytes < (64 << 20) && !limit.expired() && !interrupted()) {
    const ssize_t written = ::write(fd, block.data(), block.size());
    if (written <= 0) return 0;
    bytes += double(written);
  }
  return ::fsync(fd) == 0 ? bytes / limit.elapsed().count() * 1e-6 : 0;
}

HealthCheck failed_disk(const fs::path& directory, const std::string& what) {
  const std::string why = std::strerror(errno);
  return {.health = Health::kFail,
          .name = "disk",
          .text = text("{}: {}: {}", directory.string(), what, why),
          .fix = "choose a run directory that can be written to"};
}

}  // namespace

HealthCheck disk_check(const fs::path& directory, bool measure) {
  struct statvfs space {};
  if (::statvfs(directory.c_str(), &space) != 0) return failed_disk(directory, "cannot be read");
  const std::string path = directory / text(".moiety-doctor-{}", ::getpid());
  const Descriptor file(::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  if (!file) return failed_disk(directory, "no file can be made");
  const bool direct = bool(Descriptor(::open(path.c_str(), O_RDONLY | O_DIRECT | O_CLOEXEC)));
  ::unlink(path.c_str());
  if (::fsync(file.get()) != 0) return failed_disk(directory, "fsync");
  const bool locks = ::flock(file.get(), LOCK_EX | LOCK_NB) == 0;

  const double available = double(space.f_bavail) * double(space.f_frsize);
  HealthCheck f{.name = "disk", .text = text("{:.1f} GiB free", available / kGiga)};
  f.facts.add("free", available).add("direct", direct).add("locks", locks);
  if (measure) {
    const double speed = write_speed(file.get());
    f.facts.add("write_mb_s", speed);
    f.text += text(", writes {:.0f} MB/s", speed);
  }
  f.text += direct ? ", reads past the cache (O_DIRECT)" : ", no O_DIRECT";
  if (!locks) {
    f.health = Health::kFail;
    f.text += ", no locks (flock)";
    f.fix = "two trainers could write one run directory: use a file system with locks";
  } else if (available < 2 * kGiga) {
    f.health = Health::kWarn;
    f.fix = "a checkpoint takes 12 bytes a parameter, and at least two are kept: free some space";
  } else if (!direct) {
    f.fix = "what is verified after a save may come from the system's cache";
  }
  return f;
}

}  // namespace moiety::train
