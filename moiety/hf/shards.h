// The files of an exported folder: which tensor lies where, before anything is written.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <vector>

#include "moiety/checkpoint/file_system.h"
#include "moiety/checkpoint/safetensors.h"
#include "moiety/hf/tensors.h"

namespace moiety::hf {

// Whether a name comes before another when runs of digits count as numbers: layers.2 before
// layers.10.
bool natural_less(const std::string& a, const std::string& b);

class Shards {
 public:
  // Tensors in natural order, in files of at most `shard_bytes` of data (or one tensor).
  Shards(std::vector<FolderTensor> tensors, DType dtype, int64_t shard_bytes);

  struct Shard {
    std::string name;    // "model-00001-of-00002.safetensors"
    std::string header;  // in front of the data
    uint64_t data_bytes = 0;
  };
  struct Placed {
    FolderTensor tensor;
    size_t shard = 0;
    uint64_t begin = 0;  // bytes from the beginning of the file
  };

  DType dtype() const { return dtype_; }
  const std::vector<Shard>& shards() const { return shards_; }
  int64_t keys() const { return keys_; }
  uint64_t bytes() const { return bytes_; }
  // The tensors of the folder that hold elements of a tensor of Moiety.
  const std::vector<Placed>& of(const std::string& model_tensor) const {
    return placed_.at(model_tensor);
  }
  // The text of model.safetensors.index.json.
  std::string index() const { return index_; }

 private:
  DType dtype_;
  std::vector<Shard> shards_;
  std::map<std::string, std::vector<Placed>> placed_;
  std::string index_;
  int64_t keys_ = 0;
  uint64_t bytes_ = 0;
};

}  // namespace moiety::hf
