// A stream of a GPU for what runs beside computing: of the lowest priority, where those of
// Stream::on have the highest, so its kernels take the places that computing leaves.
#pragma once

#include "moiety/base/stream.h"

namespace moiety {

class LaneStream {
 public:
  explicit LaneStream(Device gpu);
  ~LaneStream();
  LaneStream(const LaneStream&) = delete;
  LaneStream& operator=(const LaneStream&) = delete;

  // Good as long as this object.
  const Stream& stream() const { return stream_; }

 private:
  Stream stream_;
};

}  // namespace moiety
