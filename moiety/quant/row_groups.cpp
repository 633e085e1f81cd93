#include "moiety/quant/row_groups.h"

#include <string>

#include "moiety/quant/quantize_group.h"

namespace moiety::quant {
namespace {

const char* name(OperationId operation) {
  switch (operation) {
    case OperationId::kGroupedOffsets:
      return "grouped_offsets";
    case OperationId::kGroupedGemm:
      return "grouped_gemm";
    case OperationId::kGroupedBiasGrad:
      return "grouped_bias_grad";
    case OperationId::kActivation:
      return "activation";
    case OperationId::kGroupedMlp:
      return "grouped_mlp";
    case OperationId::kSumRows:
      return "sum_rows";
    case OperationId::kQuantizeGrouped:
      return "quantize_grouped";
  }
  return "an unknown operation";
}

Claim claim_of(const RowGroups& g, int64_t e) {
  const int64_t* begin = g.begin_E1.data<int64_t>();
  return quant::claim(begin[e], begin[e + 1],
                      g.count_E.defined() ? g.count_E.data<int64_t>() + e : nullptr, g.capacity);
}

}  // namespace

void record_fault(const TensorView& status, uint32_t bit, OperationId operation, int64_t group,
                  int64_t value) {
  if (!status.defined()) return;
  uint32_t* s = status.data<uint32_t>();
  if (s[0] == 0) {
    s[1] = static_cast<uint32_t>(operation);
    s[2] = static_cast<uint32_t>(group);
    s[3] = static_cast<uint32_t>(value);
  }
  s[0] |= bit;
}

RowRange group_rows(const RowGroups& groups, int64_t e) {
  const Claim c = claim_of(groups, e);
  return c.valid ? RowRange{c.begin, c.rows} : RowRange{};
}

void check_groups(const char* operation, const RowGroups& g) {
  MOIETY_CHECK(g.experts >= 0 && g.capacity >= 0, "{}: {} experts, capacity {}", operation,
               g.experts, g.capacity);
  check_tensor(operation, "groups.begin_E1", g.begin_E1, DType::kInt64, {g.experts + 1});
  if (g.count_E.defined()) {
    check_tensor(operation, "groups.count_E", g.count_E, DType::kInt64, {g.experts});
  }
  if (g.status.defined()) check_tensor(operation, "groups.status", g.status, DType::kUInt32, {4});
}

void record_faults(const RowGroups& groups, OperationId operation) {
  if (!groups.status.defined()) return;
  for (int64_t e = 0; e < groups.experts; ++e) {
    const Claim c = claim_of(groups, e);
    if (!c.valid) record_fault(groups.status, kFaultGroup, operation, e, c.rows);
  }
}

void throw_on_fault(const TensorView& status) {
  check_tensor("throw_on_fault", "status", status, DType::kUInt32, {4});
  const uint32_t* s = status.data<uint32_t>();
  if (s[0] == 0) return;
  std::string what;
  if (s[0] & kFaultGroup) what += "; a group is out of bounds and was treated as empty";
  if (s[0] & kFaultSaturated) what += "; an offset did not fit its type";
  if (s[0] & kFaultIndex) what += "; a row index is out of range and was read as zeros";
  fail(ErrorKind::kInvalidArgument, "{}: group {}, value {}{}",
       name(static_cast<OperationId>(s[1])), s[2], static_cast<int32_t>(s[3]), what);
}

}  // namespace moiety::quant
