// Host tensors and copies of them on a GPU: views of the host's memory have their counterparts
// there.
#pragma once

#include <initializer_list>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "moiety/base/buffer.h"
#include "moiety/base/copy.h"
#include "tests/support/bits.h"

namespace moiety {

// A copy on the stream's GPU.
inline Tensor to_gpu(const TensorView& host, const Stream& stream) {
  Tensor out(host.dtype(), host.sizes(), stream.device());
  copy(out, host, stream);
  stream.synchronize();
  return out;
}

class Mirror {
 public:
  // Copies tensors without gaps as they are now; the tensors must outlive the copies.
  Mirror(std::initializer_list<TensorView> tensors, const Stream& stream) : stream_(stream) {
    for (const TensorView& host : tensors) {
      if (!host.defined()) continue;
      pairs_.push_back({host, Tensor(host.dtype(), host.sizes(), stream.device())});
      if (host.bytes() > 0) copy(pairs_.back().there, host, stream);
    }
    stream.synchronize();
  }

  // The part of a copy that `host` is of a tensor; absent views stay absent.
  TensorView operator()(const TensorView& host) const {
    if (!host.defined()) return host;
    for (const Pair& p : pairs_) {
      const int64_t at =
          static_cast<std::byte*>(host.raw()) - static_cast<std::byte*>(p.host.raw());
      if (at < 0 || at > p.host.bytes() || (at == p.host.bytes() && at > 0)) continue;
      auto* there = static_cast<std::byte*>(p.there.view().raw());
      return {there + at, host.dtype(), host.sizes(), host.strides(), stream_.device()};
    }
    ADD_FAILURE() << "no copy of " << host.describe();
    return {};
  }

  // The present contents of a copy.
  Tensor back(const TensorView& host) const {
    Tensor out(host.dtype(), host.sizes());
    if (host.bytes() > 0) copy(out, (*this)(host), stream_);
    stream_.synchronize();
    return out;
  }

  // Empty if the copy has the bytes of the tensor as it is now, all of it, not only some view.
  std::string difference(const char* what, const TensorView& host) const {
    return moiety::difference(what, back(host), host);
  }

 private:
  struct Pair {
    TensorView host;
    Tensor there;
  };
  Stream stream_;
  std::vector<Pair> pairs_;
};

}  // namespace moiety
