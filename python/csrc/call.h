// One call of an operator, on a CPU or a GPU: tensors of torch as views of the core, torch's current
// stream, checks that name operator and argument, memory from torch's allocator, and errors as torch
// takes them.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <vector>

#include "moiety/base/parallel.h"
#include "moiety/base/stream.h"
#include "moiety/base/tensor_view.h"
#include "moiety/gemm/grouped_tensor.h"
#include "moiety/gemm/swiglu.h"

namespace moiety::torch_ops {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Optional = std::optional<Tensor>;
using Sizes = std::vector<int64_t>;

// Rethrows what the core threw with the prefix by which Python finds the class: "moiety[Kind] ".
[[noreturn]] void rethrow(const char* name);

// Runs f(call); `name` is the operator's.
template <class F>
auto guarded(const char* name, F&& f) {
  try {
    return f();
  } catch (...) {
    rethrow(name);
  }
}

class Call {
 public:
  // `first` says where the operation runs, and who allocates.
  Call(const char* name, const Tensor& first);

  const char* name() const { return name_; }
  Device device() const { return stream_.device(); }
  // The current stream of the first tensor's device; it allows no wait and no read by the host.
  const Stream& stream() const { return stream_; }

  // The view of a tensor of these sizes (-1: any) and this dtype, with contiguous columns.
  TensorView view(const char* argument, const Tensor& x, DType dtype,
                  std::initializer_list<int64_t> sizes) const;
  TensorView view(const char* argument, const Optional& x, DType dtype,
                  std::initializer_list<int64_t> sizes) const;
  // The same for tensors without gaps.
  TensorView whole(const char* argument, const Tensor& x, DType dtype,
                   std::initializer_list<int64_t> sizes) const;
  TensorView whole(const char* argument, const Optional& x, DType dtype,
                   std::initializer_list<int64_t> sizes) const;
  // float32 or bfloat16: the dtype of operands.
  DType operand(const char* argument, const Tensor& x) const;
  // The same for rows and the weights that they are multiplied with, which share it.
  DType operand(const char* argument, const Tensor& x, const char* weight, const Tensor& w) const;
  // Whether there is a number of rows for each matrix of w [E, ...].
  void check_experts(const Tensor& splits, const char* weight, const Tensor& w) const;

  Tensor empty(const Sizes& sizes, ScalarType dtype) const;
  // An absent result: a tensor without elements.
  Tensor absent(ScalarType dtype) const { return empty({0}, dtype); }
  TensorView bytes(int64_t size) { return scratch({size}, ScalarType::Byte); }
  TensorView scratch(const Sizes& sizes, ScalarType dtype);

  // Rows of `capacity` in groups of the sizes that `splits` [E] has, one behind the other; the rows of
  // `results` behind the last become zero. Also makes a work area of `work` bytes, which work_area()
  // then is: one allocation for both.
  gemm::Groups groups(const Tensor& splits, int64_t capacity,
                      std::initializer_list<TensorView> results = {}, int64_t work = 0);
  const TensorView& work_area() const { return work_area_; }
  // Throws if the data had a fault that the core recorded. On a GPU nobody reads what the data are:
  // a group whose size is a fault has no rows there.
  void check_data() const;

 private:
  template <class F>
  auto known(const char* argument, F&& f) const;
  TensorView status() const;

  const char* name_;
  std::string full_name_;  // moiety::<name>
  Stream stream_;
  ThreadBudget threads_;
  std::array<uint32_t, 4> status_{};
  std::vector<Tensor> scratch_;
  TensorView work_area_;
};

ScalarType scalar_type(DType dtype);
TensorView view_of(const Tensor& x);
gemm::Activation activation_of(const Call& call, const std::string& kind, double alpha,
                               double limit, double offset);

}  // namespace moiety::torch_ops
