#include "moiety/base/tensor_probe.h"

#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "moiety/base/buffer.h"

namespace moiety {
namespace {

struct Recorder final : TensorProbe {
  void enter(int64_t, bool) override {}
  void stored(const StoredTensor& tensor) override {
    names.push_back(std::string(tensor.operation) + "." + std::string(tensor.name));
    first = tensor.view.data<float>()[0];
    inputs = tensor.inputs.size();
    rows = tensor.rows;
  }

  std::vector<std::string> names;
  float first = 0;
  size_t inputs = 0;
  const ExpertRows* rows = nullptr;
};

TEST(TensorProbe, SeesWhatTheStreamHasStored) {
  Recorder recorder;
  const Tensor x(DType::kFloat32, {2}), y(DType::kFloat32, {2});
  const Stream stream = Stream::deferred();
  stream.run([&] { x.data<float>()[0] = 3; });
  show(&recorder, stream, "attention", "o", x, y, y);
  EXPECT_EQ(recorder.first, 3);
  EXPECT_EQ(recorder.inputs, 2u);
  EXPECT_EQ(recorder.rows, nullptr);
  const ExpertRows rows;
  show_rows(&recorder, stream, rows, "experts", "h", y);
  EXPECT_EQ(recorder.rows, &rows);
  show(nullptr, stream, "attention", "dx", x);
  EXPECT_EQ(recorder.names, (std::vector<std::string>{"attention.o", "experts.h"}));
}

}  // namespace
}  // namespace moiety
