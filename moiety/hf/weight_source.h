// The weights of a folder as tensors of Moiety, read part by part: for an import, and for a
// training that begins with them. Values are exact in float32.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "moiety/hf/folder.h"
#include "moiety/hf/tensors.h"

namespace moiety::hf {

// What an upcycled model has that its folder has not.
struct Drawing {
  uint64_t seed = 1234;
  float router_std = 0.02f;
  float noise_std = 0;  // of normal numbers that are added to every expert's weights
};

class WeightSource {
 public:
  // `config` is the folder's own, or one with experts in layers that are dense there. Both outlive
  // the source. Throws CheckpointError listing every key that is missing, not expected, of another
  // shape or of another type than BF16, F16 and F32; nothing but headers was read then.
  WeightSource(const Folder& folder, const model::Config& config, const Drawing& drawing = {});

  const std::vector<ModelTensor>& tensors() const { return tensors_; }
  int64_t keys() const { return keys_; }  // tensors of the folder that are used

  // Fills out, float32 row-major, with the elements of `box` of a tensor. Any threads may read at
  // once. Throws CheckpointError naming key and element for a value that is not finite, IoError for
  // the disk.
  void read(const std::string& tensor, const Box& box, float* out) const;

  // Throws CheckpointError if the folder of a tied model has a head that differs from the
  // embedding.
  void check_tied_head() const;

 private:
  struct Part {
    Box box;
    Folder::Stored stored;
  };
  struct Target {
    ModelTensor tensor;
    std::vector<Part> parts;
  };

  void match(Form form);
  void read_part(const Part& part, const Box& region, const Box& box, float* out) const;
  void draw(const Target& target, const Box& box, float std, bool add, float* out) const;

  const Folder& folder_;
  const model::Config& config_;
  Drawing drawing_;
  std::vector<ModelTensor> tensors_;
  std::map<std::string, Target> targets_;
  int64_t keys_ = 0;
};

}  // namespace moiety::hf
