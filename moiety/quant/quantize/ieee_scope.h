// Rounding to nearest with gradual underflow for a scope of the calling thread, whatever its mode
// was; the scope restores the mode at its end. Scales of tiny tensors depend on it, and worker
// threads have modes of their own, so every task of a parallel loop opens a scope.
#pragma once

namespace moiety::quant {

class IeeeScope {
 public:
  IeeeScope();
  ~IeeeScope();
  IeeeScope(const IeeeScope&) = delete;
  IeeeScope& operator=(const IeeeScope&) = delete;

 private:
  unsigned before_ = 0;
};

}  // namespace moiety::quant
