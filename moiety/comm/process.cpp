#include "moiety/comm/process.h"

#include <cstdio>
#include <cstring>
#include <elf.h>
#include <fstream>
#include <iterator>
#include <link.h>
#include <optional>
#include <random>
#include <string_view>
#include <sys/stat.h>
#include <unistd.h>

#include "moiety/base/format.h"

namespace moiety::comm {
namespace {

template <size_t n>
void assign(char (&to)[n], std::string_view from) {
  const size_t length = from.size() < n ? from.size() : n - 1;
  std::memcpy(to, from.data(), length);
}

uint64_t inode(const char* path) {
  struct stat s {};
  return ::stat(path, &s) == 0 ? s.st_ino : 0;
}

std::string first_line(const char* path) {
  std::string line;
  std::ifstream file(path);
  std::getline(file, line);
  return line;
}

std::string hex(const unsigned char* bytes, size_t count) {
  std::string out;
  for (size_t i = 0; i < count; ++i) out += text("{:02x}", bytes[i]);
  return out;
}

// The build id that the linker leaves in one loaded object.
std::string build_note(const dl_phdr_info& object) {
  for (int i = 0; i < object.dlpi_phnum; ++i) {
    const auto& header = object.dlpi_phdr[i];
    if (header.p_type != PT_NOTE) continue;
    const auto* at = reinterpret_cast<const unsigned char*>(object.dlpi_addr + header.p_vaddr);
    const auto* end = at + header.p_memsz;
    while (at + sizeof(ElfW(Nhdr)) <= end) {
      ElfW(Nhdr) note;
      std::memcpy(&note, at, sizeof(note));
      const auto* name = at + sizeof(note);
      const auto* value = name + (note.n_namesz + 3) / 4 * 4;
      if (note.n_type == NT_GNU_BUILD_ID && note.n_namesz == 4 &&
          std::memcmp(name, "GNU", 4) == 0) {
        return hex(value, note.n_descsz);
      }
      at = value + (note.n_descsz + 3) / 4 * 4;
    }
  }
  return "";
}

// The build id of the program or library which this function is part of.
std::string build_id() {
  std::string out;
  dl_iterate_phdr(
      [](dl_phdr_info* object, size_t, void* result) {
        const auto here = reinterpret_cast<ElfW(Addr)>(&build_id);
        for (int i = 0; i < object->dlpi_phnum; ++i) {
          const auto& header = object->dlpi_phdr[i];
          const ElfW(Addr) begin = object->dlpi_addr + header.p_vaddr;
          if (header.p_type == PT_LOAD && here >= begin && here < begin + header.p_memsz) {
            *static_cast<std::string*>(result) = build_note(*object);
            return 1;
          }
        }
        return 0;
      },
      &out);
  return out;
}

struct ProcessState {
  char state = '?';
  uint64_t start_time = 0;
};

// The state in /proc/PID/stat; empty if there is no such process.
std::optional<ProcessState> process_state(int64_t pid) {
  errno = 0;
  std::FILE* file = std::fopen(text("/proc/{}/stat", pid).c_str(), "re");
  if (!file) {
    if (errno == ENOENT || errno == ESRCH) return std::nullopt;
    return ProcessState{};
  }
  char line[1024] = {};
  const size_t length = std::fread(line, 1, sizeof(line) - 1, file);
  std::fclose(file);
  if (length == 0) return std::nullopt;  // the process ended between open and read
  // The program's name in parentheses may hold anything; the text after the last one is regular.
  const char* rest = std::strrchr(line, ')');
  ProcessState out;
  unsigned long long start = 0;
  if (!rest || std::sscanf(rest + 1,
                           " %c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d "
                           "%*d %*d %llu",
                           &out.state, &start) != 2) {
    return ProcessState{};
  }
  out.start_time = start;
  return out;
}

ProcessIdentity make_identity() {
  ProcessIdentity out;
  out.nonce = random_nonce();
  out.pid = getpid();
  if (const auto state = process_state(out.pid)) out.start_time = state->start_time;
  out.pid_namespace = inode("/proc/self/ns/pid");
  out.network_namespace = inode("/proc/self/ns/net");
  out.uid = getuid();
  assign(out.boot, first_line("/proc/sys/kernel/random/boot_id"));
  assign(out.build, build_id());
  return out;
}

}  // namespace

Nonce random_nonce() {
  std::random_device random;
  Nonce out;
  for (uint64_t& word : out) word = uint64_t{random()} << 32 | random();
  return out;
}

const ProcessIdentity& this_process() {
  static const ProcessIdentity identity = make_identity();
  return identity;
}

bool same_process(const ProcessIdentity& a, const ProcessIdentity& b) { return a.nonce == b.nonce; }

bool same_host(const ProcessIdentity& a, const ProcessIdentity& b) {
  return std::string_view(a.boot) == b.boot;
}

std::string what_separates(const ProcessIdentity& a, const ProcessIdentity& b) {
  if (!same_host(a, b)) return "they are on different hosts";
  if (a.network_namespace != b.network_namespace) return "their network namespaces differ";
  if (a.uid != b.uid) return text("they belong to users {} and {}", a.uid, b.uid);
  return "";
}

bool is_visible(const ProcessIdentity& p) {
  const ProcessIdentity& me = this_process();
  return same_host(p, me) && p.pid_namespace == me.pid_namespace;
}

bool has_ended(const ProcessIdentity& p) {
  const auto state = process_state(p.pid);
  if (!state) return true;
  if (state->state == 'Z' || state->state == 'X') return true;
  return state->start_time != 0 && state->start_time != p.start_time;
}

bool is_stopped(int64_t pid) {
  std::ifstream file(text("/proc/{}/stat", pid));
  std::string line;
  std::getline(file, line);
  const size_t name = line.rfind(')');  // a name may hold anything
  return name != std::string::npos && line.size() > name + 2 && line[name + 2] == 'T';
}

}  // namespace moiety::comm
