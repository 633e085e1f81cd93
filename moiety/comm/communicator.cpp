#include "moiety/comm/communicator.h"

#include "moiety/base/log.h"

namespace moiety::comm {
namespace {

// Completes the operation of a ticket that nobody waits for. An error can only be logged; the
// communicator keeps it for its next operation.
void finish(const std::shared_ptr<Ticket::Operation>& operation) noexcept {
  if (!operation) return;
  try {
    operation->wait();
  } catch (const std::exception& e) {
    log(LogLevel::kError, "an operation that nobody waited for failed: {}", e.what());
  }
}

}  // namespace

Ticket& Ticket::operator=(Ticket&& other) {
  if (this != &other) {
    finish(operation_);
    operation_ = std::move(other.operation_);
  }
  return *this;
}

Ticket::~Ticket() { finish(operation_); }

void Ticket::wait() {
  if (const auto operation = std::move(operation_)) operation->wait();
}

}  // namespace moiety::comm
