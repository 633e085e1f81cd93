// Whole documents in samples: the order and the places of a file's documents with
// data.pack = "documents" (docs/spec/trainer.md#order-of-samples).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "moiety/data/token_file.h"

namespace moiety::data {

inline constexpr uint64_t kPackWindow = 4096;  // documents that are packed together

// Tokens [begin, begin + length) of a file: a document, or a part of one that is longer than a
// sample.
struct PackedPiece {
  uint64_t begin = 0;
  uint32_t length = 0;
  bool goes_on = false;  // token begin + length is of the same document
  bool operator==(const PackedPiece&) const = default;
};

// The samples of a file: first fit decreasing within windows of documents in the order of the file.
// A document longer than a sample is cut. It is a function of the file's table and of seq_len alone,
// and takes 16 bytes of memory for a document.
class Packing {
 public:
  Packing(const TokenFile& file, int64_t seq_len);

  uint64_t samples() const { return ends_.size(); }
  // The pieces of a sample in their order; what is left of it is padding.
  std::span<const PackedPiece> sample(uint64_t i) const;
  uint64_t cut_documents() const { return cut_; }

 private:
  void add_window(std::vector<PackedPiece>& pieces, int64_t seq_len);

  std::vector<PackedPiece> pieces_;
  std::vector<uint64_t> ends_;  // of the samples, in pieces_
  uint64_t cut_ = 0;
};

}  // namespace moiety::data
