#include "python/csrc/call.h"

#include <algorithm>
#include <array>
#include <dlfcn.h>
#include <stdexcept>

#include "moiety/base/error.h"
#include "moiety/capi/moiety.h"
#include "moiety/gemm/grouped_mlp.h"

namespace moiety::torch_ops {
namespace {

DType dtype_of_tensor(const Tensor& x) {
  switch (x.scalar_type()) {
    case ScalarType::Float:
      return DType::kFloat32;
    case ScalarType::BFloat16:
      return DType::kBFloat16;
    case ScalarType::Half:
      return DType::kFloat16;
    case ScalarType::Double:
      return DType::kFloat64;
    case ScalarType::Long:
      return DType::kInt64;
    case ScalarType::Int:
      return DType::kInt32;
    case ScalarType::Byte:
    case ScalarType::Bool:
      return DType::kUInt8;
    case ScalarType::Short:
      fail(ErrorKind::kUnsupported, "int16, which no operator takes");
    case ScalarType::Char:
      fail(ErrorKind::kUnsupported, "int8, which no operator takes");
    default:
      fail(ErrorKind::kUnsupported, "of torch's dtype {}, which no operator takes",
           static_cast<int64_t>(x.scalar_type()));
  }
}

Device device_of(const Tensor& x) {
  if (x.is_cpu()) return {};
  if (x.is_cuda()) return {DeviceType::kCuda, static_cast<int>(x.get_device_index())};
  fail(ErrorKind::kUnsupported, "neither on a CPU nor on a GPU of NVIDIA");
}

// The current stream of torch. Its function is in the library that only a torch with CUDA has, and
// has loaded; by that one's name it is found without being linked.
Stream current_stream(Device device) {
  if (device.type == DeviceType::kCpu) return {};
  using Function = AOTITorchError (*)(int32_t device, void** stream);
  static const auto function = [] {
    void* library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    void* found = library ? dlsym(library, "aoti_torch_get_current_cuda_stream") : nullptr;
    return reinterpret_cast<Function>(found);
  }();
  void* stream = nullptr;
  if (!function || function(device.index, &stream) != 0) {
    fail(ErrorKind::kCuda, "torch does not tell its current stream of {}: libtorch_cuda.so {}",
         name(device), function ? "refused" : "has no such function");
  }
  return Stream::external(device, stream);
}

}  // namespace

void rethrow(const char* name) {
  try {
    throw;
  } catch (const Error& e) {
    const std::string what = e.what();
    const std::string own = std::string("moiety::") + name;
    throw std::runtime_error(std::string("moiety[") +
                             moiety_code_name(static_cast<int>(e.kind()) + 1) + "] " +
                             (what.rfind(own, 0) == 0 ? what : own + ": " + what));
  } catch (const std::bad_alloc&) {
    throw std::runtime_error(text("moiety[OutOfMemory] moiety::{}: memory is short", name));
  }
}

ScalarType scalar_type(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return ScalarType::Float;
    case DType::kBFloat16:
      return ScalarType::BFloat16;
    case DType::kInt64:
      return ScalarType::Long;
    case DType::kInt32:
      return ScalarType::Int;
    default:
      return ScalarType::Byte;
  }
}

TensorView view_of(const Tensor& x) {
  const auto sizes = x.sizes(), strides = x.strides();
  MOIETY_CHECK(x.dim() <= kMaxDims, "a tensor of {} dimensions", x.dim());
  // Without elements strides say nothing, and torch makes them what it likes.
  if (x.numel() == 0) {
    return TensorView(x.data_ptr(), dtype_of_tensor(x),
                      std::span<const int64_t>(sizes.data(), sizes.size()), device_of(x));
  }
  return TensorView(x.data_ptr(), dtype_of_tensor(x),
                    std::span<const int64_t>(sizes.data(), sizes.size()),
                    std::span<const int64_t>(strides.data(), strides.size()), device_of(x));
}

Call::Call(const char* name, const Tensor& first)
    : name_(name),
      full_name_(std::string("moiety::") + name),
      stream_(current_stream(device_of(first))),
      threads_(device().type == DeviceType::kCpu
                   ? static_cast<int>(torch::stable::get_num_threads())
                   : thread_budget()) {}

// f() of a tensor, whose fault is then the argument's.
template <class F>
auto Call::known(const char* argument, F&& f) const {
  try {
    return f();
  } catch (const Error& e) {
    fail(e.kind(), "moiety::{}: {} is {}", name_, argument, e.what());
  }
}

TensorView Call::view(const char* argument, const Tensor& x, DType dtype,
                      std::initializer_list<int64_t> sizes) const {
  const TensorView out = known(argument, [&] { return view_of(x); });
  MOIETY_CHECK(out.device() == device(), "moiety::{}: {} is on {}, other arguments on {}", name_,
               argument, moiety::name(out.device()), moiety::name(device()));
  check_tensor(full_name_.c_str(), argument, out, dtype, sizes);
  MOIETY_CHECK(out.dims() == 0 || out.stride(-1) == 1 || out.size(-1) <= 1 || out.numel() == 0,
               "moiety::{}: {} is {}, whose last dimension is not contiguous", name_, argument,
               out.describe());
  return out;
}

TensorView Call::view(const char* argument, const Optional& x, DType dtype,
                      std::initializer_list<int64_t> sizes) const {
  return x ? view(argument, *x, dtype, sizes) : TensorView();
}

TensorView Call::whole(const char* argument, const Tensor& x, DType dtype,
                       std::initializer_list<int64_t> sizes) const {
  const TensorView out = view(argument, x, dtype, sizes);
  MOIETY_CHECK(out.contiguous() || out.numel() == 0, "moiety::{}: {} is {}, expected contiguous",
               name_, argument, out.describe());
  return out;
}

TensorView Call::whole(const char* argument, const Optional& x, DType dtype,
                       std::initializer_list<int64_t> sizes) const {
  return x ? whole(argument, *x, dtype, sizes) : TensorView();
}

DType Call::operand(const char* argument, const Tensor& x) const {
  const DType dtype = known(argument, [&] { return dtype_of_tensor(x); });
  if (dtype != DType::kFloat32 && dtype != DType::kBFloat16) {
    fail(ErrorKind::kUnsupported, "moiety::{}: {} is {}, expected float32 or bfloat16", name_,
         argument, moiety::name(dtype));
  }
  return dtype;
}

DType Call::operand(const char* argument, const Tensor& x, const char* weight,
                    const Tensor& w) const {
  const DType of_x = operand(argument, x), of_w = operand(weight, w);
  MOIETY_CHECK(of_x == of_w, "moiety::{}: {} is {}, but {} is {}", name_, argument,
               moiety::name(of_x), weight, moiety::name(of_w));
  return of_x;
}

void Call::check_experts(const Tensor& splits, const char* weight, const Tensor& w) const {
  MOIETY_CHECK(splits.dim() == 1 && w.dim() > 0 && splits.size(0) == w.size(0),
               "moiety::{}: splits is {}, but {} has {} experts", name_, view_of(splits).describe(),
               weight, w.dim() > 0 ? w.size(0) : 0);
}

Tensor Call::empty(const Sizes& sizes, ScalarType dtype) const {
  std::array<int64_t, kMaxDims> strides{};
  MOIETY_CHECK(sizes.size() <= strides.size(), "moiety::{}: a tensor of {} dimensions", name_,
               sizes.size());
  int64_t count = 1;
  for (size_t d = sizes.size(); d-- > 0; count *= sizes[d])
    strides[d] = std::max<int64_t>(count, 1);
  // The shim's own function: torch::stable::new_empty looks the operator up by its name in each call.
  const bool cuda = device().type == DeviceType::kCuda;
  AtenTensorHandle made = nullptr;
  const AOTITorchError fault = aoti_torch_empty_strided(
      static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(),
      torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype)),
      cuda ? aoti_torch_device_type_cuda() : aoti_torch_device_type_cpu(),
      cuda ? device().index : 0, &made);
  if (fault != 0) {  // torch's own text is lost
    fail(ErrorKind::kOutOfMemory, "moiety::{}: torch gave no memory for {} elements", name_, count);
  }
  return Tensor(made);
}

TensorView Call::scratch(const Sizes& sizes, ScalarType dtype) {
  scratch_.push_back(empty(sizes, dtype));
  return view_of(scratch_.back());
}

TensorView Call::status() const {
  if (device().type != DeviceType::kCpu) return {};
  return {const_cast<uint32_t*>(status_.data()), DType::kUInt32, {4}};
}

gemm::Groups Call::groups(const Tensor& splits, int64_t capacity,
                          std::initializer_list<TensorView> results, int64_t work) {
  const DType dtype = splits.scalar_type() == ScalarType::Int ? DType::kInt32 : DType::kInt64;
  const TensorView count = whole("splits", splits, dtype, {-1});
  const int64_t experts = count.size(0);
  // The area begins where an allocation of torch's would.
  constexpr int64_t kAligned = 512;
  const int64_t offsets =
      (byte_size(DType::kInt64, experts + 1) + kAligned - 1) / kAligned * kAligned;
  const TensorView memory = bytes(offsets + work);
  work_area_ = memory.slice(0, offsets, offsets + work);
  const gemm::OffsetSpec spec{
      .out = TensorView(memory.raw(), DType::kInt64, {experts + 1}, memory.device())};
  gemm::grouped_offsets(count, {&spec, 1}, capacity, status(), results, stream());
  if (status_[0] != 0) {  // of a CPU
    fail(ErrorKind::kInvalidArgument,
         "moiety::{}: splits[{}] is {}, which is negative or more than is left of {} rows", name_,
         status_[2], static_cast<int32_t>(status_[3]), capacity);
  }
  return {.begin_E1 = spec.out, .status = status(), .experts = experts, .capacity = capacity};
}

void Call::check_data() const {
  if (const TensorView words = status(); words.defined()) gemm::throw_on_fault(words);
}

gemm::Activation activation_of(const Call& call, const std::string& kind, double alpha,
                               double limit, double offset) {
  const auto f = [](double x) { return static_cast<float>(x); };
  if (kind == "glu") return gemm::qgeglu(f(alpha), f(limit), f(offset));
  MOIETY_CHECK(kind == "relu2", "moiety::{}: kind is '{}', expected glu or relu2", call.name(),
               kind);
  return gemm::squared_relu();
}

}  // namespace moiety::torch_ops
