#include "moiety/data/packing.h"

#include <algorithm>
#include <bit>

#include "moiety/base/error.h"

namespace moiety::data {
namespace {

// The room in samples, as a tree of largest rooms: it finds the first sample in which a piece has
// room.
class Rooms {
 public:
  Rooms(size_t samples, uint32_t room)
      : leaves_(std::bit_ceil(std::max<size_t>(samples, 1))), largest_(2 * leaves_, room) {}

  // The first sample with this room, which is taken from it. There is one.
  size_t take(uint32_t length) {
    size_t node = 1;
    while (node < leaves_) {
      node *= 2;
      if (largest_[node] < length) ++node;
    }
    const size_t sample = node - leaves_;
    largest_[node] -= length;
    while ((node /= 2) > 0) largest_[node] = std::max(largest_[2 * node], largest_[2 * node + 1]);
    return sample;
  }

 private:
  size_t leaves_;
  std::vector<uint32_t> largest_;
};

}  // namespace

Packing::Packing(const TokenFile& file, int64_t seq_len) {
  MOIETY_CHECK(seq_len >= 1 && seq_len <= UINT32_MAX, "packing: seq_len is {}", seq_len);
  const auto length = static_cast<uint64_t>(seq_len);
  std::vector<PackedPiece> window;
  const uint64_t documents = file.header().documents;
  for (uint64_t d = 0; d < documents; ++d) {
    const TokenFile::Document document = file.document(d);
    cut_ += document.end - document.begin > length;
    for (uint64_t at = document.begin; at < document.end; at += length) {
      const uint64_t end = std::min(at + length, document.end);
      window.push_back({at, static_cast<uint32_t>(end - at), end < document.end});
    }
    if ((d + 1) % kPackWindow == 0 || d + 1 == documents) add_window(window, seq_len);
  }
}

void Packing::add_window(std::vector<PackedPiece>& pieces, int64_t seq_len) {
  std::stable_sort(pieces.begin(), pieces.end(),
                   [](const PackedPiece& a, const PackedPiece& b) { return a.length > b.length; });
  Rooms rooms(pieces.size(), static_cast<uint32_t>(seq_len));
  std::vector<std::vector<PackedPiece>> samples;
  for (const PackedPiece& piece : pieces) {
    const size_t sample = rooms.take(piece.length);
    if (sample >= samples.size()) samples.resize(sample + 1);
    samples[sample].push_back(piece);
  }
  for (const std::vector<PackedPiece>& sample : samples) {
    pieces_.insert(pieces_.end(), sample.begin(), sample.end());
    ends_.push_back(pieces_.size());
  }
  pieces.clear();
}

std::span<const PackedPiece> Packing::sample(uint64_t i) const {
  MOIETY_CHECK(i < samples(), "packing: sample {} of {}", i, samples());
  const uint64_t begin = i == 0 ? 0 : ends_[i - 1];
  return {&pieces_[begin], ends_[i] - begin};
}

}  // namespace moiety::data
