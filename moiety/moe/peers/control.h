// What a rank on a GPU keeps of its group: a block of the GPU's memory that kernels are given the
// address of, so that a graph that was captured before the group's memory grew finds the new one;
// the places in all ranks' memory; and which rows of which rank a block of threads looks after.
#pragma once

#include "moiety/moe/exchange_mapped.h"
#include "moiety/moe/findings.h"
#include "moiety/moe/peers/prepare_message.h"
#include "moiety/moe/peers/primitives.h"

namespace moiety::moe::peers {

// What a rank knows of a fault, for the text of its error. Kinds beyond Failure's are its own.
inline constexpr uint32_t kStopped = 6;   // a peer's poison
inline constexpr uint32_t kReleased = 7;  // a graph's operation on a group without memory
struct Fault {
  uint32_t kind = 0;
  int32_t about = 0;             // rank
  Entry mine = {}, theirs = {};  // for kMismatch
  LateWait late{};               // for kLate
  MessageHead heads[2] = {};     // for kPrepare: of rank 0 and of another
  int32_t field = 0, other = 0;
  uint64_t poison = 0, reason[kReasonWords] = {};  // for kStopped
};

// Host memory that kernels reach.
struct FaultPage {
  uint64_t found;  // 1 when `fault` is there
  Fault fault;
  uint64_t abort;  // the host stores 1 to end all waits
};

// The map of experts.
struct MapView {
  const int32_t *owner_E, *local_E, *by_owner_E, *begin_R;

  MOIETY_HD_INLINE int count(int rank) const { return begin_R[rank + 1] - begin_R[rank]; }
};

// Buffers of all ranks that may be attached to a group at a time.
inline constexpr int kMostAttached = 8;

// The rows of a rank that peers reach where they lie, if they do.
struct Direct {
  std::byte* base = nullptr;
  int64_t pitch = 0;

  MOIETY_HD_INLINE explicit operator bool() const { return base; }
  MOIETY_HD_INLINE std::byte* row(int64_t slot) const { return base + slot * pitch; }
};

// What the steps of a prepare tell each other.
struct Trims {
  int64_t padded, kept;            // rows of this rank
  unsigned long long own_dropped;  // of this rank's pairs, anywhere
  unsigned long long dropped;      // of all ranks' pairs, with those that have no row
};
struct Scratch {
  int32_t *kept_E, *offset_E, *before_RE, *uncut_R, *largest_R;
  int64_t *count_E, *required_R, *dropped_R;
  MessageHead* heads_R;
  Trims* trims;
};

// A pair of a token, and where it lies among those that its owner sends home.
struct PairPlace {
  int64_t pair;         // t K + k
  int64_t row, number;  // of its row's live pairs
  int topk;
};

struct Control {
  int32_t rank = 0, ranks = 1, experts = 0;
  MapView map{};
  Scratch scratch{};
  FaultPage* page = nullptr;
  uint64_t deadline_ns = 0;

  // Changed while no operation runs.
  uint32_t open = 0;  // 0 while there is no memory
  int32_t depth = 1;
  int64_t chunk_rows = 1, rows_max = 0;
  MappedLayout layout;
  std::byte* base_R[kMostMappedRanks] = {};
  // Over collectives: where records and messages for peers wait to be carried, in the order of the
  // peers; words for peers go to memory that nobody reads, their base_R.
  std::byte* boxes = nullptr;
  std::byte* attached[kMostAttached][kMostMappedRanks] = {};  // their bases at all ranks

  // Changed by operations, in the order of the stream.
  Epoch epoch = 0;
  int32_t in_half = 0;  // that of the epoch
  Entry entry;
  Entry next;  // of the dispatch in a prepare_dispatch whose prepare runs
  // Its word: when rows may be pushed for it, when that prepare's plan is settled, and when own rows
  // and pairs have their numbers and peers the records; else 0.
  uint64_t early = 0, settled = 0, numbered = 0;
  uint32_t ticket = 0;  // the blocks of a grid that have done their part
  uint32_t pulls = 0;   // 1: homes read the rows of direct ranks in the operation that runs
  Direct direct_R[kMostMappedRanks] = {};  // the rows of each rank that are direct in it
  uint32_t failed = 0, told = 0;           // 1: a fault is known; it is on the page
  // When the last operation that moves rows began to store; the time up to the last chunk's arrival;
  // and all time that was spent waiting for peers while nothing else ran.
  uint64_t began_ns = 0, rows_ns = 0, waited_ns = 0;
  // When what runs beside an operation had come to its end (Join); 0: it has not.
  uint64_t joined_ns = 1;
  Findings findings;
  // Counts of the prepare that runs, zero before and after it: pairs with idx < 0, with idx >= E,
  // those without a row (EpLimits::peer_rows), and those from the first bad one to the batch's end.
  unsigned long long masked = 0, bad = 0, cut = 0, behind_bad = 0;

  MOIETY_HD_INLINE void begin_epoch() {
    ++epoch;
    in_half = half_of(epoch);
  }
  MOIETY_HD_INLINE int half() const { return in_half; }
  MOIETY_HD_INLINE int half_of(Epoch of) const { return static_cast<int>(of % depth); }
  MOIETY_HD_INLINE int next_half() const { return in_half + 1 < depth ? in_half + 1 : 0; }
  // Peer i < ranks - 1.
  MOIETY_HD_INLINE int peer(int64_t i) const {
    const int r = rank + 1 + static_cast<int>(i);
    return r < ranks ? r : r - ranks;
  }
  MOIETY_HD_INLINE int64_t chunks(int64_t rows) const {
    const auto of = static_cast<uint32_t>(chunk_rows);
    return (static_cast<uint32_t>(rows) + of - 1) / of;
  }
  MOIETY_HD_INLINE uint64_t* word(int at, int64_t array, int64_t index) const {
    return reinterpret_cast<uint64_t*>(base_R[at] + array) + index;
  }
  MOIETY_HD_INLINE uint64_t* entry_word(int at, int64_t array, int from) const {
    return word(at, array, half() * ranks + from);
  }
  MOIETY_HD_INLINE uint64_t* ready_word(int at, int from, int64_t chunk) const {
    return ready_word_in(half(), at, from, chunk);
  }
  MOIETY_HD_INLINE uint64_t* ready_word_in(int half, int at, int from, int64_t chunk) const {
    return word(at, layout.ready, (half * ranks + from) * (layout.chunks + 1) + chunk);
  }
  MOIETY_HD_INLINE uint64_t* poison(int at) const { return word(at, layout.poison, 0); }
  // The number of sender `from` among those that rank `at` has a place for.
  MOIETY_HD_INLINE static int place(int at, int from) { return from < at ? from : from - 1; }
  // Whether the homes of a sum read the rows of rank r where they lie.
  MOIETY_HD_INLINE bool pulled(int r) const { return pulls != 0 && direct_R[r]; }
  MOIETY_HD_INLINE bool in_box(int at) const { return boxes && at != rank; }
  MOIETY_HD_INLINE std::byte* message(int at, int from) const {
    if (in_box(at)) return boxes + place(rank, at) * layout.message;
    return message_in(half(), at, from);
  }
  MOIETY_HD_INLINE std::byte* message_in(int half, int at, int from) const {
    return base_R[at] + layout.meta + (half * (ranks - 1) + place(at, from)) * layout.message;
  }
  // Record j of sender `from`, of `stride` bytes.
  MOIETY_HD_INLINE std::byte* record(int at, int from, int64_t j, int64_t stride) const {
    if (in_box(at)) return boxes + (place(rank, at) * rows_max + j) * stride;
    return record_in(half(), at, from, j, stride);
  }
  MOIETY_HD_INLINE std::byte* record_in(int half, int at, int from, int64_t j,
                                        int64_t stride) const {
    return base_R[at] + layout.regions + half * layout.half +
           (place(at, from) * rows_max + j) * stride;
  }
  // The place for a pair of rank `from` at its home `at`: that of pair t K + k; over collectives that
  // of the n-th live pair, of up to K, in row j.
  MOIETY_HD_INLINE std::byte* pair_record(int at, int from, const PairPlace& pair,
                                          int64_t stride) const {
    if (boxes) return record(at, from, pair.row, pair.topk * stride) + pair.number * stride;
    return base_R[at] + layout.regions + half() * layout.half + pair.pair * stride;
  }
};

// A chunk of rows that pass between this rank and a peer.
struct ChunkTask {
  int peer;
  int64_t chunk;
};
// Task i of those of a rank: peers take turns, from the one behind this rank on, so that the ranks'
// stores go to different receivers at a time.
MOIETY_HD_INLINE ChunkTask chunk_task(int64_t i, int rank, int ranks) {
  const Split split(i, ranks - 1);
  const int r = rank + 1 + static_cast<int>(split.rest);
  return {r < ranks ? r : r - ranks, split.item};
}

// The first of `blocks` blocks of tokens that ends behind row `begin`; end(b) is the number of rows
// up to the end of block b.
template <class End>
MOIETY_HD_INLINE int64_t block_of_row(int64_t blocks, int64_t begin, End&& end) {
  int64_t first = 0;
  for (int64_t count = blocks; count > 0;) {
    const int64_t half = count / 2;
    const bool before = end(first + half) <= begin;
    first += before ? half + 1 : 0;
    count = before ? count - half - 1 : half;
  }
  return first;
}

// The places of a Control and of what it points to, in memory of `bytes` bytes.
struct ControlPlaces {
  int64_t owner, local, by_owner, begin, kept, offset, before, uncut, largest, count, required,
      dropped, heads, trims, bytes;
};
constexpr ControlPlaces control_places(int64_t experts, int64_t ranks) {
  ControlPlaces out{};
  int64_t end = sizeof(Control);
  const auto place = [&](int64_t& where, int64_t bytes) {
    where = end = round_up(end, 128);
    end += bytes;
  };
  place(out.owner, 4 * experts);
  place(out.local, 4 * experts);
  place(out.by_owner, 4 * experts);
  place(out.begin, 4 * (ranks + 1));
  place(out.kept, 4 * experts);
  place(out.offset, 4 * experts);
  place(out.before, 4 * ranks * experts);
  place(out.uncut, 4 * ranks);
  place(out.largest, 4 * ranks);
  place(out.count, 8 * experts);
  place(out.required, 8 * ranks);
  place(out.dropped, 8 * ranks);
  place(out.heads, int64_t{sizeof(MessageHead)} * ranks);
  place(out.trims, sizeof(Trims));
  out.bytes = end;
  return out;
}

}  // namespace moiety::moe::peers
