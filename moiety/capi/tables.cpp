// Tables of tensors by address: optimizer steps, gradient statistics, partial casts.
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include <nlohmann/json.hpp>

#include "moiety/capi/guarded.h"
#include "moiety/optim/adamw.h"
#include "moiety/optim/grad_norm.h"
#include "moiety/quant/partial_cast.h"

namespace moiety::capi {
namespace {

using nlohmann::json;

// What a handle stands for.
struct Table {
  Device device;

  virtual ~Table() = default;
  Stream stream(void* cuda_stream) const {
    return device.type == DeviceType::kCuda ? Stream::external(device, cuda_stream) : Stream();
  }
  TensorView bytes(void* data, int64_t size) const { return {data, DType::kUInt8, {size}, device}; }
};

struct Tables {
  std::mutex mutex;
  std::map<int64_t, std::shared_ptr<const Table>> by_handle;
  int64_t last = 0;
};
Tables& tables() {
  static auto* const all = new Tables;  // outlives whoever releases at the end of the process
  return *all;
}

template <class T>
std::shared_ptr<const T> table_of(const char* operation, int64_t handle) {
  Tables& all = tables();
  const std::lock_guard lock(all.mutex);
  const auto found = all.by_handle.find(handle);
  auto out =
      found == all.by_handle.end() ? nullptr : std::dynamic_pointer_cast<const T>(found->second);
  MOIETY_CHECK(out != nullptr, "{}: {} is no handle of such a table", operation, handle);
  return out;
}

DType dtype_of(const std::string& word) {
  for (const DType t : {DType::kFloat32, DType::kBFloat16, DType::kInt32, DType::kUInt8,
                        DType::kE4M3, DType::kE5M2, DType::kUE8M0}) {
    if (word == name(t)) return t;
  }
  fail(ErrorKind::kUnsupported, "a tensor is {}", word);
}

TensorView tensor_of(const json& x, Device device) {
  if (x.is_null()) return {};
  const auto sizes = x.at("sizes").get<std::vector<int64_t>>();
  return {reinterpret_cast<void*>(x.at("data").get<uintptr_t>()), dtype_of(x.at("dtype")), sizes,
          device};
}
// The same without its shape.
TensorView flat_of(const json& x, Device device) {
  const TensorView whole = tensor_of(x, device);
  return whole.defined() ? whole.reshape({whole.numel()}) : whole;
}

// Parses the request, makes its table with `make`, and gives it a handle.
template <class Make>
int create(const char* operation, const char* request, int64_t* handle, char** facts, Make&& make) {
  return guarded([&] {
    MOIETY_CHECK(request && handle && facts, "{}: an address is null", operation);
    json said = json::object();
    std::shared_ptr<Table> made;
    try {
      const json asked = json::parse(request);
      const int index = asked.at("device");
      const Device device = index < 0 ? Device{} : Device{DeviceType::kCuda, index};
      made = make(asked, device, said);
      made->device = device;
    } catch (const json::exception& e) {
      fail(ErrorKind::kInvalidArgument, "{}: the request is no request: {}", operation, e.what());
    }
    give(facts, said.dump());
    Tables& all = tables();
    const std::lock_guard lock(all.mutex);
    all.by_handle[*handle = ++all.last] = std::move(made);
  });
}

std::vector<optim::ElementRun> whole_run(int64_t n, int parameter) {
  optim::ElementRun run;
  run.end = n;
  run.parameter = parameter;
  run.tensor_id = static_cast<uint32_t>(parameter);
  return {run};
}

struct AdamWSteps : Table {
  optim::AdamW adam;
  uint64_t seed = 0;
  optim::AdamWTable table;
};

struct Statistics : Table {
  optim::GradStatisticsTable table;
};

struct Casts : Table {
  std::unique_ptr<const quant::PartialCastPlan> plan;
  std::unique_ptr<const quant::PartialCastTable> table;
};

quant::PartialCastItem item_of(const json& x) {
  const std::string word = x.at("format");
  const std::optional<Format> format = format_of(word);
  MOIETY_CHECK(format.has_value(), "partial_cast: format is '{}', which is none", word);
  quant::PartialCastItem item;
  item.spec = QuantSpec::of(*format);
  if (!is_fp4(*format)) item.spec.element = dtype_of(x.at("element"));
  item.spec.pow2_scales = x.at("pow2_scales");
  item.spec.through_bf16 = x.at("through_bf16");
  item.rows = x.at("rows");
  item.cols = x.at("cols");
  item.start = x.at("start");
  item.end = x.at("end");
  item.col = x.at("col");
  return item;
}

quant::PartialCastArrays arrays_of(const json& x, const quant::PartialCastItem& item,
                                   Device device) {
  const auto array = [&](const char* key) {
    return x.contains(key) ? tensor_of(x.at(key), device) : TensorView();
  };
  quant::PartialCastArrays out;
  out.master = flat_of(x.at("master"), device);
  out.out.spec = item.spec;
  out.out.rows = item.rows;
  out.out.cols = item.cols;
  out.out.row_data = array("row_data");
  out.out.row_scales = array("row_scales");
  out.out.col_data = array("col_data");
  out.out.col_scales = array("col_scales");
  out.out.amax = array("amax");
  out.out.tensor_scale = array("tensor_scale");
  const TensorView flags = array("flags");  // int32 outside
  out.out.flags = {flags.raw(), DType::kUInt32, flags.sizes(), device};
  return out;
}

}  // namespace
}  // namespace moiety::capi

using namespace moiety;        // NOLINT: the functions below are C's
using namespace moiety::capi;  // NOLINT

int moiety_adamw_create(const char* request, int64_t* handle, char** facts) {
  return create("adamw", request, handle, facts, [](const json& asked, Device device, json&) {
    auto out = std::make_shared<AdamWSteps>();
    out->adam = {asked.at("beta1"), asked.at("beta2"), asked.at("eps")};
    out->seed = asked.at("seed");
    std::vector<std::vector<optim::ElementRun>> runs;
    std::vector<optim::AdamWArgs> segments;
    for (const json& s : asked.at("segments")) {
      optim::AdamWArgs args;
      args.grad = flat_of(s.at("grad"), device);
      args.master = flat_of(s.at("master"), device);
      args.exp_avg = flat_of(s.at("exp_avg"), device);
      args.exp_avg_sq = flat_of(s.at("exp_avg_sq"), device);
      args.weight = flat_of(s.at("weight"), device);
      runs.push_back(whole_run(args.master.numel(), static_cast<int>(runs.size())));
      segments.push_back(args);
    }
    for (size_t i = 0; i < segments.size(); ++i) segments[i].runs = runs[i];
    out->table = {segments, device};
    return out;
  });
}

int moiety_adamw_step(int64_t handle, void* step, void* stream) {
  return guarded([&] {
    const auto t = table_of<AdamWSteps>("adamw", handle);
    optim::adamw(t->adam, t->seed, t->bytes(step, sizeof(optim::AdamWStep)), t->table,
                 t->stream(stream));
  });
}

int moiety_grad_statistics_create(const char* request, int64_t* handle, char** facts) {
  return create(
      "grad_statistics", request, handle, facts, [](const json& asked, Device device, json& said) {
        auto out = std::make_shared<Statistics>();
        std::vector<std::vector<optim::ElementRun>> runs;
        std::vector<optim::GradSegment> segments;
        for (const json& x : asked.at("grads")) {
          segments.push_back({flat_of(x, device), {}});
          runs.push_back(whole_run(segments.back().grad.numel(), static_cast<int>(runs.size())));
        }
        for (size_t i = 0; i < segments.size(); ++i) segments[i].runs = runs[i];
        out->table = {segments, device};
        said["bytes"] = sizeof(optim::GradStatistics);
        return out;
      });
}

int moiety_grad_statistics_step(int64_t handle, void* out, void* stream) {
  return guarded([&] {
    const auto t = table_of<Statistics>("grad_statistics", handle);
    optim::grad_statistics(t->table, t->bytes(out, sizeof(optim::GradStatistics)),
                           t->stream(stream));
  });
}

int moiety_partial_cast_create(const char* request, int64_t* handle, char** facts) {
  return create("partial_cast", request, handle, facts,
                [](const json& asked, Device device, json& said) {
                  auto out = std::make_shared<Casts>();
                  std::vector<quant::PartialCastItem> items;
                  std::vector<quant::PartialCastArrays> arrays;
                  for (const json& x : asked.at("items")) {
                    items.push_back(item_of(x));
                    arrays.push_back(arrays_of(x, items.back(), device));
                  }
                  out->plan = std::make_unique<quant::PartialCastPlan>(items, false);
                  out->table = std::make_unique<quant::PartialCastTable>(*out->plan, arrays);
                  said["bytes"] = out->plan->reduction_bytes();
                  said["reductions"] = json::array();
                  for (const quant::PartialReduction& r : out->plan->reductions()) {
                    said["reductions"].push_back(
                        {{"dtype", name(r.dtype)}, {"offset", r.offset}, {"bytes", r.bytes}});
                  }
                  return out;
                });
}

int moiety_partial_amax(int64_t handle, void* reduction, void* stream) {
  return guarded([&] {
    const auto t = table_of<Casts>("partial_amax", handle);
    quant::partial_amax(*t->plan, *t->table, t->bytes(reduction, t->plan->reduction_bytes()),
                        t->stream(stream));
  });
}

int moiety_partial_cast(int64_t handle, void* reduction, void* stream) {
  return guarded([&] {
    const auto t = table_of<Casts>("partial_cast", handle);
    quant::partial_cast(*t->plan, *t->table, t->bytes(reduction, t->plan->reduction_bytes()),
                        t->stream(stream));
  });
}

int moiety_release(int64_t handle) {
  return guarded([&] {
    Tables& all = tables();
    const std::lock_guard lock(all.mutex);
    all.by_handle.erase(handle);
  });
}
