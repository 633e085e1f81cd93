#include "moiety/nn/cudnn_graph.h"

#include <algorithm>

#include "moiety/base/error.h"

namespace moiety::nn {
namespace {

constexpr int64_t kFirstTemporary = 1000;  // above all ids of bound tensors

std::string last_error() {
  std::array<char, 256> message{};
  cudnn().last_error_string(message.data(), message.size() - 1);
  return message.data();
}

// Whether two runs of a configuration's engine may give different bits.
bool may_differ(const CudnnDescriptor& config) {
  CudnnDescriptor engine(CUDNN_BACKEND_ENGINE_DESCRIPTOR);
  cudnnBackendDescriptor_t to = engine.get();
  int64_t count = 0;
  cudnn_check(cudnn().get_attribute(config.get(), CUDNN_ATTR_ENGINECFG_ENGINE,
                                    CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &count, &to),
              "cudnnBackendGetAttribute");
  std::array<cudnnBackendNumericalNote_t, CUDNN_NUMERICAL_NOTE_TYPE_COUNT> notes{};
  cudnn_check(
      cudnn().get_attribute(engine.get(), CUDNN_ATTR_ENGINE_NUMERICAL_NOTE,
                            CUDNN_TYPE_NUMERICAL_NOTE, std::ssize(notes), &count, notes.data()),
      "cudnnBackendGetAttribute");
  const auto end = notes.begin() + std::min(count, int64_t(std::ssize(notes)));
  return std::find(notes.begin(), end, CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC) != end;
}

// Configurations of engines, the one that should be fastest first.
std::vector<CudnnDescriptor> engine_configs(const CudnnDescriptor& graph) {
  CudnnDescriptor heuristic(CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR);
  heuristic.set(CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, graph);
  heuristic.set(CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, CUDNN_HEUR_MODE_A);
  heuristic.finalize();
  int64_t count = 0;
  cudnn_check(cudnn().get_attribute(heuristic.get(), CUDNN_ATTR_ENGINEHEUR_RESULTS,
                                    CUDNN_TYPE_BACKEND_DESCRIPTOR, 0, &count, nullptr),
              "cudnnBackendGetAttribute");
  std::vector<CudnnDescriptor> configs;
  std::vector<cudnnBackendDescriptor_t> pointers;
  for (int64_t i = 0; i < count; ++i) {
    pointers.push_back(configs.emplace_back(CUDNN_BACKEND_ENGINECFG_DESCRIPTOR).get());
  }
  cudnn_check(cudnn().get_attribute(heuristic.get(), CUDNN_ATTR_ENGINEHEUR_RESULTS,
                                    CUDNN_TYPE_BACKEND_DESCRIPTOR, count, &count, pointers.data()),
              "cudnnBackendGetAttribute");
  configs.erase(configs.begin() + count, configs.end());
  return configs;
}

}  // namespace

void cudnn_check(cudnnStatus_t status, const char* call) {
  if (status == CUDNN_STATUS_SUCCESS) [[likely]]
    return;
  fail(ErrorKind::kCuda, "{}: {} ({})", call, cudnn().error_string(status), last_error());
}

CudnnDescriptor::CudnnDescriptor(cudnnBackendDescriptorType_t type) {
  cudnnBackendDescriptor_t pointer = nullptr;
  cudnn_check(cudnn().create_descriptor(type, &pointer), "cudnnBackendCreateDescriptor");
  pointer_ = {pointer, cudnn().destroy_descriptor};
}

CudnnDescriptor& CudnnDescriptor::finalize() {
  cudnn_check(cudnn().finalize(get()), "cudnnBackendFinalize");
  return *this;
}

CudnnPlan::CudnnPlan(CudnnDescriptor plan) : plan_(std::move(plan)) {
  cudnn_check(cudnn().get_attribute(plan_.get(), CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE,
                                    CUDNN_TYPE_INT64, 1, nullptr, &workspace_),
              "cudnnBackendGetAttribute");
}

CudnnDescriptor CudnnPlan::pack(std::span<const CudnnBinding> bindings, void* workspace) const {
  std::vector<int64_t> ids;
  std::vector<const void*> pointers;
  for (const CudnnBinding& b : bindings) {
    ids.push_back(b.id);
    pointers.push_back(b.data);
  }
  CudnnDescriptor pack(CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR);
  pack.set(CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR,
           std::span<const void* const>(pointers));
  pack.set(CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64, std::span<const int64_t>(ids));
  pack.set(CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, workspace);
  return pack.finalize();
}

CudnnDims packed_strides(const CudnnDims& sizes) {
  return {sizes[1] * sizes[2] * sizes[3], sizes[2] * sizes[3], sizes[3], 1};
}

CudnnTensor CudnnGraph::tensor(int64_t id, cudnnDataType_t type, CudnnDims sizes, CudnnDims strides,
                               bool is_virtual, bool by_value) {
  CudnnDescriptor d(CUDNN_BACKEND_TENSOR_DESCRIPTOR);
  d.set(CUDNN_ATTR_TENSOR_UNIQUE_ID, CUDNN_TYPE_INT64, id);
  d.set(CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_TYPE_DATA_TYPE, type);
  d.set(CUDNN_ATTR_TENSOR_DIMENSIONS, CUDNN_TYPE_INT64, std::span<const int64_t>(sizes));
  d.set(CUDNN_ATTR_TENSOR_STRIDES, CUDNN_TYPE_INT64, std::span<const int64_t>(strides));
  d.set(CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, CUDNN_TYPE_INT64, int64_t{16});
  d.set(CUDNN_ATTR_TENSOR_IS_VIRTUAL, CUDNN_TYPE_BOOLEAN, is_virtual);
  d.set(CUDNN_ATTR_TENSOR_IS_BY_VALUE, CUDNN_TYPE_BOOLEAN, by_value);
  return {sizes, strides, type, d.finalize()};
}

CudnnTensor CudnnGraph::bound(int64_t id, cudnnDataType_t type, CudnnDims sizes,
                              CudnnDims strides) {
  return tensor(id, type, sizes, strides, false, false);
}

CudnnTensor CudnnGraph::by_value(int64_t id) {
  return tensor(id, CUDNN_DATA_FLOAT, {1, 1, 1, 1}, {1, 1, 1, 1}, false, true);
}

CudnnTensor CudnnGraph::temporary(CudnnDims sizes, cudnnDataType_t type) {
  return temporary(sizes, packed_strides(sizes), type);
}

CudnnTensor CudnnGraph::temporary(CudnnDims sizes, CudnnDims strides, cudnnDataType_t type) {
  return tensor(kFirstTemporary + temporaries_++, type, sizes, strides, true, false);
}

void CudnnGraph::matmul(const CudnnTensor& a, const CudnnTensor& b, const CudnnTensor& out) {
  CudnnDescriptor how(CUDNN_BACKEND_MATMUL_DESCRIPTOR);
  how.set(CUDNN_ATTR_MATMUL_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, CUDNN_DATA_FLOAT);
  how.finalize();
  CudnnDescriptor d(CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR);
  d.set(CUDNN_ATTR_OPERATION_MATMUL_ADESC, a.descriptor);
  d.set(CUDNN_ATTR_OPERATION_MATMUL_BDESC, b.descriptor);
  d.set(CUDNN_ATTR_OPERATION_MATMUL_CDESC, out.descriptor);
  d.set(CUDNN_ATTR_OPERATION_MATMUL_DESC, how);
  operations_.push_back(d.finalize());
}

void CudnnGraph::pointwise(const Pointwise& p, const CudnnTensor& out) {
  CudnnDescriptor how(CUDNN_BACKEND_POINTWISE_DESCRIPTOR);
  how.set(CUDNN_ATTR_POINTWISE_MODE, CUDNN_TYPE_POINTWISE_MODE, p.mode);
  how.set(CUDNN_ATTR_POINTWISE_MATH_PREC, CUDNN_TYPE_DATA_TYPE,
          out.type == CUDNN_DATA_BOOLEAN ? CUDNN_DATA_BOOLEAN : CUDNN_DATA_FLOAT);
  if (p.axis >= 0) how.set(CUDNN_ATTR_POINTWISE_AXIS, CUDNN_TYPE_INT64, p.axis);
  how.finalize();
  CudnnDescriptor d(CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR);
  d.set(CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, how);
  d.set(CUDNN_ATTR_OPERATION_POINTWISE_XDESC, p.x.descriptor);
  if (p.y) d.set(CUDNN_ATTR_OPERATION_POINTWISE_BDESC, p.y->descriptor);
  if (p.choice) d.set(CUDNN_ATTR_OPERATION_POINTWISE_TDESC, p.choice->descriptor);
  d.set(CUDNN_ATTR_OPERATION_POINTWISE_YDESC, out.descriptor);
  operations_.push_back(d.finalize());
}

void CudnnGraph::reduce(cudnnReduceTensorOp_t op, const CudnnTensor& x, const CudnnTensor& out) {
  CudnnDescriptor how(CUDNN_BACKEND_REDUCTION_DESCRIPTOR);
  how.set(CUDNN_ATTR_REDUCTION_OPERATOR, CUDNN_TYPE_REDUCTION_OPERATOR_TYPE, op);
  how.set(CUDNN_ATTR_REDUCTION_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, CUDNN_DATA_FLOAT);
  how.finalize();
  CudnnDescriptor d(CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR);
  d.set(CUDNN_ATTR_OPERATION_REDUCTION_DESC, how);
  d.set(CUDNN_ATTR_OPERATION_REDUCTION_XDESC, x.descriptor);
  d.set(CUDNN_ATTR_OPERATION_REDUCTION_YDESC, out.descriptor);
  operations_.push_back(d.finalize());
}

void CudnnGraph::view(const CudnnTensor& x, const CudnnTensor& out) {
  CudnnDescriptor d(CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR);
  d.set(CUDNN_ATTR_OPERATION_RESHAPE_XDESC, x.descriptor);
  d.set(CUDNN_ATTR_OPERATION_RESHAPE_YDESC, out.descriptor);
  operations_.push_back(d.finalize());
}

CudnnPlan CudnnGraph::plan(cudnnHandle_t handle) const {
  std::vector<cudnnBackendDescriptor_t> operations;
  for (const CudnnDescriptor& d : operations_) operations.push_back(d.get());
  CudnnDescriptor graph(CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);
  graph.set(CUDNN_ATTR_OPERATIONGRAPH_HANDLE, CUDNN_TYPE_HANDLE, handle);
  graph.set(CUDNN_ATTR_OPERATIONGRAPH_OPS, CUDNN_TYPE_BACKEND_DESCRIPTOR,
            std::span<const cudnnBackendDescriptor_t>(operations));
  graph.finalize();
  for (const CudnnDescriptor& config : engine_configs(graph)) {
    if (may_differ(config)) continue;
    CudnnDescriptor plan(CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR);
    plan.set(CUDNN_ATTR_EXECUTION_PLAN_HANDLE, CUDNN_TYPE_HANDLE, handle);
    plan.set(CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, config);
    if (cudnn().finalize(plan.get()) == CUDNN_STATUS_SUCCESS) return CudnnPlan(std::move(plan));
  }
  fail(ErrorKind::kUnsupported, "cuDNN has no engine for the graph: {}", last_error());
}

}  // namespace moiety::nn
