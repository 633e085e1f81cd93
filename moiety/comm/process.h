// The identity of a process, which peers exchange when a group of processes is set up. It tells
// whether two ranks share a process, a host or a network namespace, run the same code, and whether
// a peer still lives.
#pragma once

#include <array>
#include <cstdint>
#include <string>

namespace moiety::comm {

// A random name, different each time.
using Nonce = std::array<uint64_t, 2>;
Nonce random_nonce();

// The identity, sent as its bytes.
struct ProcessIdentity {
  Nonce nonce = {};  // drawn by the process
  int64_t pid = 0;
  uint64_t start_time =
      0;  // /proc/PID/stat, field 22: tells a process from a later one of that pid
  uint64_t pid_namespace = 0;
  uint64_t network_namespace = 0;
  uint32_t uid = 0;
  uint32_t unused = 0;
  char boot[40] = {};   // the kernel's boot id, which tells the host and its run
  char build[48] = {};  // the linker's id of the code; empty if there is none
};

const ProcessIdentity& this_process();

bool same_process(const ProcessIdentity& a, const ProcessIdentity& b);
bool same_host(const ProcessIdentity& a, const ProcessIdentity& b);
// The reason why processes a and b cannot hand each other memory; empty if they can.
std::string what_separates(const ProcessIdentity& a, const ProcessIdentity& b);

// Whether this process's /proc shows p.
bool is_visible(const ProcessIdentity& p);
// Whether p, which is visible, has ended; a zombie has ended. False in doubt.
bool has_ended(const ProcessIdentity& p);

// Whether the process stands still, by SIGSTOP or the like.
bool is_stopped(int64_t pid);

}  // namespace moiety::comm
