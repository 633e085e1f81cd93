// A rank's way to the observer: words of rank 0 arrive, those of the others are dropped.
#pragma once

#include "moiety/train/observer.h"

namespace moiety::train {

class Journal {
 public:
  // `observer` is set on rank 0 and null on the others. Without `events` nothing is recorded: a dry
  // run.
  Journal(Observer* observer, bool events) : observer_(observer), events_(events) {}

  template <class... Args>
  void say(LogLevel level, std::string_view format, const Args&... args) const {
    if (observer_) observer_->say(level, text(format, args...));
  }
  void event(std::string_view name, int64_t step, const JsonLine& fields = {}) const {
    if (observer_ && events_) observer_->event(name, step, fields);
  }
  // Null on other ranks than 0.
  Observer* observer() const { return observer_; }

 private:
  Observer* observer_;
  bool events_;
};

}  // namespace moiety::train
