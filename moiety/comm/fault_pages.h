// The pages of host memory to which kernels that wait for peers write their faults. They are never
// freed, but used again: freeing one would wait for all kernels of the process, also for those that
// wait for a rank which is a thread of it.
#pragma once

#include <mutex>
#include <vector>

#include "moiety/base/gpu_runtime.h"

namespace moiety::comm {

template <class Page>
class FaultPages {
 public:
  // `what` is in the text of a failed allocation.
  explicit FaultPages(const char* what) : what_(what) {}

  // A page as Page{} is.
  Page* take() {
    const std::lock_guard lock(mutex_);
    if (free_.empty()) {
      free_.push_back(static_cast<Page*>(gpu::allocate_pinned(sizeof(Page), what_)));
    }
    Page* page = free_.back();
    free_.pop_back();
    *page = {};
    return page;
  }
  // No kernel may reach the page any more.
  void give_back(Page* page) {
    const std::lock_guard lock(mutex_);
    free_.push_back(page);
  }

 private:
  const char* what_;
  std::mutex mutex_;
  std::vector<Page*> free_;
};

}  // namespace moiety::comm
