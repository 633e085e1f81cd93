// Graphs of operations in cuDNN's backend API, and plans that run them. Internal to moiety/nn; only
// for builds that have cuDNN's headers. (The cudnn-frontend library would build the same
// descriptors, but it needs a CUDA run time and NVRTC's header of its own, takes half a minute of
// every build, and reads the environment.)
#pragma once

#include <array>
#include <memory>
#include <span>
#include <vector>

#include "moiety/nn/cudnn_loader.h"

namespace moiety::nn {

// Throws Error(kCuda) with cuDNN's own words if the call failed.
void cudnn_check(cudnnStatus_t status, const char* call);

class CudnnDescriptor {
 public:
  explicit CudnnDescriptor(cudnnBackendDescriptorType_t type);

  template <class T>
  void set(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type,
           std::span<const T> values) {
    cudnn_check(cudnn().set_attribute(get(), name, type, std::ssize(values), values.data()),
                "cudnnBackendSetAttribute");
  }
  template <class T>
  void set(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, const T& value) {
    set(name, type, std::span<const T>(&value, 1));
  }
  void set(cudnnBackendAttributeName_t name, const CudnnDescriptor& value) {
    set(name, CUDNN_TYPE_BACKEND_DESCRIPTOR, value.get());
  }
  CudnnDescriptor& finalize();
  cudnnBackendDescriptor_t get() const { return pointer_.get(); }

 private:
  std::shared_ptr<void> pointer_;
};

// A tensor that a plan reads or writes: the id that it has in the graph, and its memory. By-value
// tensors are floats on the host.
struct CudnnBinding {
  int64_t id = 0;
  const void* data = nullptr;
};

// A graph that cuDNN has found an engine for.
class CudnnPlan {
 public:
  int64_t workspace_bytes() const { return workspace_; }
  // The tensors of one execution, as cudnnBackendExecute takes them with get().
  CudnnDescriptor pack(std::span<const CudnnBinding> bindings, void* workspace) const;
  cudnnBackendDescriptor_t get() const { return plan_.get(); }

 private:
  friend class CudnnGraph;
  explicit CudnnPlan(CudnnDescriptor plan);
  CudnnDescriptor plan_;
  int64_t workspace_ = 0;
};

using CudnnDims = std::array<int64_t, 4>;
CudnnDims packed_strides(const CudnnDims& sizes);

struct CudnnTensor {
  CudnnDims sizes{}, strides{};
  cudnnDataType_t type = CUDNN_DATA_FLOAT;
  CudnnDescriptor descriptor;
};

// A graph in the making; operations are added in order. Arithmetic is fp32 unless a type is given.
class CudnnGraph {
 public:
  // A tensor in memory that is given when the plan runs; 16-byte aligned.
  CudnnTensor bound(int64_t id, cudnnDataType_t type, CudnnDims sizes, CudnnDims strides);
  CudnnTensor by_value(int64_t id);
  // A tensor that is never in memory, or only in the workspace.
  CudnnTensor temporary(CudnnDims sizes, cudnnDataType_t type = CUDNN_DATA_FLOAT);
  CudnnTensor temporary(CudnnDims sizes, CudnnDims strides, cudnnDataType_t type);

  // out = a b over the last two dimensions. b may have fewer heads than a: each serves a group of
  // a's.
  void matmul(const CudnnTensor& a, const CudnnTensor& b, const CudnnTensor& out);
  // out = x mode y or, with `choice`, out = choice ? x : y. Unary modes have no y.
  struct Pointwise {
    cudnnPointwiseMode_t mode;
    const CudnnTensor& x;
    const CudnnTensor* y = nullptr;
    const CudnnTensor* choice = nullptr;
    int64_t axis = -1;  // for CUDNN_POINTWISE_GEN_INDEX
  };
  void pointwise(const Pointwise& p, const CudnnTensor& out);
  // Reduces x over the dimensions in which out has size 1.
  void reduce(cudnnReduceTensorOp_t op, const CudnnTensor& x, const CudnnTensor& out);
  // out has the elements of x under other sizes and strides.
  void view(const CudnnTensor& x, const CudnnTensor& out);

  // A plan with the first engine, of those that the heuristics name, that gives the same bits every
  // time and takes the graph. Throws Error(kUnsupported) if there is none.
  CudnnPlan plan(cudnnHandle_t handle) const;

 private:
  CudnnTensor tensor(int64_t id, cudnnDataType_t type, CudnnDims sizes, CudnnDims strides,
                     bool is_virtual, bool by_value);

  std::vector<CudnnDescriptor> operations_;
  int64_t temporaries_ = 0;
};

}  // namespace moiety::nn
