// A rank's part of one of NCCL's groups. It ends with its last owner.
#pragma once

#include <atomic>
#include <functional>
#include <memory>

#include "moiety/comm/bootstrap.h"
#include "moiety/comm/nccl/functions.h"

namespace moiety::comm::nccl {

// Runs f, which waits for peers inside NCCL, on a thread of its own, and returns what it returned.
// After the deadline, or when a peer aborts, that thread is left alone and this throws Error(kComm),
// which begins with `what`. f owns all that it uses.
int run_within_deadline(Bootstrap& bootstrap, const std::string& what, std::function<int()> f);

class Group {
 public:
  // Takes what `functions` made on this device.
  Group(const Functions& functions, void* group, int device)
      : functions_(functions), group_(group), device_(device) {}
  // No operation is under way, or all were aborted. Where an error unwinds the stack they are, as a
  // peer may wait in one.
  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  // Makes the group of a bootstrap's ranks. Collective.
  static std::shared_ptr<Group> join(const Functions& functions, Bootstrap& bootstrap,
                                     const std::string& what, int device);
  // Divides the group. Collective; null for a negative color.
  std::shared_ptr<Group> split(Bootstrap& bootstrap, const std::string& what, int color, int key);

  const Functions& functions() const { return functions_; }
  void* get() const { return group_; }
  // Throws Error(kComm) naming the call if the code is not 0.
  void check(int code, const char* call) const;
  // Ends all operations of the group, of which there will be no more. Does not wait.
  void abort();
  // The error that an operation has met; empty if none.
  std::string error() const;

 private:
  const Functions& functions_;
  void* group_;
  int device_;
  std::shared_ptr<std::atomic<bool>>
      aborted_;  // whether that has come to its end; null: it was not
};

}  // namespace moiety::comm::nccl
