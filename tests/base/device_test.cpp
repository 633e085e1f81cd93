// Devices as every build and machine sees them: what a GPU request says where there is none, copies
// and timed events of the CPU, and libraries opened at run time.
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <numeric>

#include <gtest/gtest.h>

#include "moiety/base/buffer.h"
#include "moiety/base/copy.h"
#include "moiety/base/gpu.h"
#include "moiety/base/graph.h"
#include "moiety/base/shared_library.h"

namespace moiety {
namespace {

namespace fs = std::filesystem;

constexpr Device kGpu{DeviceType::kCuda, 0};

// The kind and the text of the error.
std::pair<ErrorKind, std::string> error_of(auto&& f) {
  try {
    f();
  } catch (const Error& e) {
    return {e.kind(), e.what()};
  }
  return {ErrorKind::kIo, "no error"};
}

TEST(Device, WithoutAGpuARequestSaysWhy) {
  const GpuStatus& status = gpu_status();
  if (status.count > 0) GTEST_SKIP() << "there is a GPU";
  EXPECT_EQ(status.built, status.runtime > 0);
  EXPECT_EQ(status.text.find(status.built ? "no GPU is visible: " : "this build has no CUDA"), 0u)
      << status.text;
  const std::string why = "cuda:0 was asked for, but " + status.text;
  const auto check = [&](const std::string& what, auto&& f) {
    const auto [kind, text] = error_of(f);
    EXPECT_EQ(kind, ErrorKind::kUnsupported) << text;
    EXPECT_EQ(text, what + ": " + why);
  };
  check("weights", [] { Buffer(64, kGpu, "weights"); });
  check("empty", [] { Buffer(0, kGpu, "empty"); });
  check("x", [] { Tensor(DType::kFloat32, {2, 3}, kGpu, "x"); });
  check("staging", [] { Tensor::pinned(DType::kFloat32, {2, 3}, "staging"); });
  check("stream", [] { Stream::on(kGpu); });
  check("stream", [] { Stream::external(kGpu, nullptr); });
  check("gpu_properties", [] { gpu_properties(0); });
  check("gpu_free_memory", [] { gpu_free_memory(0); });
  EXPECT_EQ(error_of([] { fail_without_cuda("quantize"); }).second, "quantize: " + status.text);
}

TEST(Device, TheCpuIsAlwaysThere) {
  require_device("x", {});
  EXPECT_EQ(name(Device{}), "cpu");
  EXPECT_EQ(name(Device{DeviceType::kCuda, 3}), "cuda:3");
  EXPECT_EQ(Stream::on({}).device(), Device{});
  EXPECT_EQ(Tensor(DType::kFloat32, {2}, Device{}).view().device(), Device{});
  EXPECT_EQ(error_of([] { Stream().cuda_stream(); }).second,
            "stream: a CPU stream has no cudaStream_t");
  EXPECT_EQ(error_of([] { Graph(Stream(), [] {}); }).second, "graph: the stream is the CPU's");
}

TEST(Device, ATensorOnAnotherDeviceIsNamed) {
  float data = 0;
  const TensorView x(&data, DType::kFloat32, {1}, kGpu);
  EXPECT_EQ(x.describe(), "float32[1] on cuda:0");
  EXPECT_EQ(error_of([&] { check_device("scale", "x", x, Stream()); }).second,
            "scale: x is float32[1] on cuda:0, but must be on cpu as the stream");
  check_device("scale", "bias", TensorView(), Stream());
  Tensor y(DType::kFloat32, {1});
  EXPECT_EQ(error_of([&] { copy(y, x, Stream()); }).second,
            "copy: dst is on cpu, src is on cuda:0, the stream is the CPU's");
}

TEST(Copy, RowsOfAnyPitchInTheOrderOfTheStream) {
  Tensor from(DType::kInt32, {4, 5}), to(DType::kInt32, {6, 8});
  std::iota(from.data<int32_t>(), from.data<int32_t>() + 20, 1);
  const Stream stream = Stream::deferred();
  const TensorView window = to.view().slice(0, 1, 5).slice(1, 2, 5);
  fill_bytes(to, 0xFF, stream);
  copy(window, from.view().slice(1, 1, 4), stream);
  // From strided rows to a contiguous tensor and back.
  Tensor rows(DType::kInt32, {4, 3});
  copy(rows, window, stream);
  fill_bytes(window, 0, stream);
  copy(to.view().slice(0, 1, 5).slice(1, 5, 8), rows, stream);
  EXPECT_EQ(to.data<int32_t>()[0], 0);
  stream.synchronize();
  for (int64_t r = 0; r < 6; ++r) {
    for (int64_t c = 0; c < 8; ++c) {
      const bool row = r >= 1 && r < 5;
      const int32_t expected = !row || c < 2 ? -1 : c < 5 ? 0 : int32_t((r - 1) * 5 + c - 3);
      ASSERT_EQ(to.data<int32_t>()[r * 8 + c], expected) << r << " " << c;
    }
  }
  // Packed nibbles: rows of whole bytes only.
  uint8_t a[4] = {0x12, 0x34, 0x56, 0x78}, b[2] = {};
  const TensorView packed(a, DType::kE2M1, {2, 4});
  copy({b, DType::kE2M1, {2, 2}}, packed.slice(1, 0, 2), Stream());
  EXPECT_EQ(b[0], 0x12);
  EXPECT_EQ(b[1], 0x56);
  EXPECT_EQ(error_of([&] {
              copy({b, DType::kE2M1, {2, 1}}, packed.slice(1, 0, 1), Stream());
            }).second.find("copy: "),
            0u);
}

TEST(Copy, RefusesWhatDoesNotFit) {
  Tensor a(DType::kInt32, {2, 3, 4}), b(DType::kInt32, {2, 3, 4}), c(DType::kFloat32, {2, 3, 4});
  EXPECT_EQ(error_of([&] { copy(a, c, Stream()); }).second,
            "copy: dst is int32[2, 3, 4], src is float32[2, 3, 4]");
  EXPECT_EQ(
      error_of([&] { copy(a.view().slice(1, 0, 2), b.view().slice(1, 0, 2), Stream()); }).second,
      "no error");
  EXPECT_EQ(
      error_of([&] { copy(a.view().slice(2, 0, 2), b.view().slice(2, 0, 2), Stream()); }).second,
      "copy: int32[2, 3, 2] with strides [12, 4, 1] is not a run of contiguous rows of "
      "whole bytes");
  copy(a.view().slice(0, 0, 0), b.view().slice(0, 1, 1), Stream());
}

TEST(Event, TimedOnACpu) {
  const Stream stream = Stream::deferred();
  Event begin = Event::timed(), end = Event::timed();
  begin.record(stream);
  int64_t spun = 0;
  stream.run([&] {
    while (spun < 1000000) spun = spun + 1;
  });
  end.record(stream);
  EXPECT_NE(error_of([&] { elapsed_ms(begin, end); }).second, "no error");  // not yet
  end.wait();
  EXPECT_EQ(spun, 1000000);
  EXPECT_GT(elapsed_ms(begin, end), 0);
  EXPECT_LT(elapsed_ms(begin, end), 60000);
  EXPECT_EQ(elapsed_ms(begin, begin), 0);
  EXPECT_EQ(error_of([&] { elapsed_ms(begin, Event()); }).second,
            "elapsed_ms: an event is not timed");
}

TEST(Event, ACopyKeepsItsPoint) {
  const Stream stream = Stream::deferred();
  Event a;
  a.record(stream);
  const Event b = a;
  stream.run([] {});
  a.record(stream);
  EXPECT_TRUE(b.complete());
  EXPECT_FALSE(a.complete());
}

class SharedLibraries : public testing::Test {
 protected:
  void SetUp() override {
    std::string name = (fs::temp_directory_path() / "moiety-libraries-XXXXXX").string();
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    root = name;
    path = std::getenv("PATH");
  }
  void TearDown() override {
    setenv("PATH", path.c_str(), 1);
    fs::remove_all(root);
  }
  static constexpr const char* kName = "libmoiety_test_of_loading.so.7";

  fs::path root;
  std::string path;
};

TEST_F(SharedLibraries, ByTheirUsualNames) {
  const SharedLibrary math = SharedLibrary::open({kName, "libm.so.6"});
  ASSERT_TRUE(math);
  EXPECT_EQ(fs::path(math.path()).filename(), "libm.so.6");
  EXPECT_EQ(math.find<double(double)>("sqrt")(9), 3);
  EXPECT_EQ(math.find<double(double)>("no_such_function"), nullptr);
}

TEST_F(SharedLibraries, InThePackagesOfPython) {
  const std::string real = SharedLibrary::open({"libm.so.6"}).path();
  // A virtual environment: its python3 is a link to an interpreter elsewhere.
  fs::create_directories(root / "venv/bin");
  fs::create_directories(root / "system/bin");
  std::ofstream(root / "system/bin/python3.12");
  fs::create_symlink(root / "system/bin/python3.12", root / "venv/bin/python3");
  setenv("PATH", ("/nowhere:" + (root / "venv/bin").string() + ":" + path).c_str(), 1);
  EXPECT_TRUE(python_library_folders().empty());
  const SharedLibrary none = SharedLibrary::open({kName});
  EXPECT_FALSE(none);
  EXPECT_NE(none.error().find(kName), std::string::npos) << none.error();
  EXPECT_EQ(none.find<int()>("sqrt"), nullptr);
  for (const char* prefix : {"system", "venv"}) {
    const fs::path folder = root / prefix / "lib/python3.12/site-packages/nvidia/thing/lib";
    fs::create_directories(folder);
    // Loaders tell files apart by what they are, not by name: a copy is a library of its own.
    fs::copy_file(real, folder / kName);
    EXPECT_EQ(python_library_folders().front(), folder);
    const SharedLibrary found = SharedLibrary::open({kName});
    EXPECT_EQ(found.path(), (folder / kName).string());
    EXPECT_EQ(found.find<double(double)>("sqrt")(16), 4);
  }
  EXPECT_EQ(python_library_folders().size(), 2u);
}

}  // namespace
}  // namespace moiety
