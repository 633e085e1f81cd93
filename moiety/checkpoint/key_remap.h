// The names and the order of rows that experts' tensors have in a file, and the one function that
// leads from any of them to any other. A module ("layers.3.moe.experts.fc1") of E experts has
//
//    <module>.weight [E, N, K]                              packed: one tensor of all experts
//    <module>.weight0 ... <module>.weight<E-1> [N, K]       indexed: one tensor of each
//
// and <module>.bias [E, N] in the same way, in a form of its own; every slot (weights, each moment)
// is remapped by itself. The N = 2F rows of a gated module are F gate rows, then F up rows; with
// interleave s > 0 the row f of half h lies at f/s * 2s + h*s + f%s instead.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "moiety/checkpoint/box.h"

namespace moiety::checkpoint {

enum class ExpertForm { kPacked, kIndexed };
const char* name(ExpertForm form);  // "packed", "indexed"

struct ExpertModule {
  std::string name;
  int64_t experts = 0;
  bool gated = false;  // its rows are those of two halves
  friend bool operator==(const ExpertModule&, const ExpertModule&) = default;
};

// The way in which a file holds its experts. A plain one (packed, in plain row order) does not list
// its modules.
struct ExpertLayout {
  ExpertForm form = ExpertForm::kPacked;
  int64_t interleave = 0;  // of the gated modules' rows
  std::vector<ExpertModule> modules;

  bool is_plain() const { return form == ExpertForm::kPacked && interleave == 0; }
  std::string describe() const;  // "indexed, interleave 32"
  friend bool operator==(const ExpertLayout&, const ExpertLayout&) = default;
};

struct KeyShape {
  std::string name;
  std::vector<int64_t> shape;
  friend bool operator==(const KeyShape&, const KeyShape&) = default;
};

// What is asked for. The form in which the keys are now is seen from their names; the interleave of
// their rows cannot be seen, and is stated.
struct KeyTarget {
  std::span<const ExpertModule> modules;
  ExpertForm form = ExpertForm::kPacked;
  int64_t from_interleave = 0;
  int64_t to_interleave = 0;
};

// The elements of `source` that become elements of `target`.
struct KeyMove {
  KeyShape source, target;
  bool of_experts = false;  // else the tensor stays as it is
  int64_t expert = -1;      // the one expert that moves; -1: all that there are
  bool packed_source = false, packed_target = false;  // where `of_experts`
  int64_t from_interleave = 0, to_interleave = 0;     // equal unless the rows change their order
};

// The moves that lead from these keys to the target: every key is the source of at least one, and
// the targets' elements come from one source each. Pure, and total: tensors of no module move as
// they are. Names are matched whole, so weight1 is not weight10.
//
// Throws CheckpointError, beginning with `where`, for keys that leave a choice: some of a module's
// indices without the others (the missing ones are listed), an index that is too large or has
// leading zeros, both forms at once, shapes that are unequal, of another number of experts or not
// of a weight (3 dimensions packed, 2 indexed) or bias, a name twice; and where the rows of a gated
// module are no two halves of whole interleaved blocks.
std::vector<KeyMove> key_remap(std::span<const KeyShape> keys, const KeyTarget& target,
                               const std::string& where = "key_remap");

// Throws CheckpointError, beginning with `where`, unless s is 0 or a positive multiple of 8 that
// divides `half`, the rows of each half of a gated module.
void check_interleave(int64_t s, int64_t half, const std::string& where);

// Rows [to, to + rows) of the target are rows [from, from + rows) of the source.
struct MovedRows {
  int64_t from = 0, to = 0, rows = 0;
};
// Rows [begin, end) of a gated tensor of `rows` rows, from one interleave to another.
std::vector<MovedRows> moved_rows(int64_t begin, int64_t end, int64_t rows, int64_t from_interleave,
                                  int64_t to_interleave);

// A part of a move: equal boxes of both tensors, but for the dimension of experts.
struct MovedBox {
  Box source, target;
};
// The parts of a move that fill its part of `box`, a box of the target. In memory that holds `box`
// row-major, the elements of a part are consecutive.
std::vector<MovedBox> moved_boxes(const KeyMove& move, const Box& box);

}  // namespace moiety::checkpoint
