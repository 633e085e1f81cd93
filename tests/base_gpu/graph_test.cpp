// Capture and replay.
#include "moiety/base/graph.h"

#include <vector>

#include "moiety/base/buffer.h"
#include "moiety/base/copy.h"
#include "tests/base_gpu/kernels.h"
#include "tests/support/error_of.h"
#include "tests/support/gpu_test.h"

namespace moiety {
namespace {

class GraphTest : public GpuTest {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (IsSkipped()) return;
    x = Tensor(DType::kInt32, {1000}, kGpu);
    amount = Tensor(DType::kInt32, {1}, kGpu);
  }

  void set_amount(int32_t value) {
    copy(amount, {&value, DType::kInt32, {1}}, stream);
    stream.synchronize();
  }
  // The value that all elements have.
  int32_t value() {
    std::vector<int32_t> host(1000);
    copy({host.data(), DType::kInt32, {1000}}, x, stream);
    stream.synchronize();
    EXPECT_EQ(host, std::vector<int32_t>(1000, host[0]));
    return host[0];
  }

  Tensor x, amount;
};

TEST_F(GraphTest, ReplaysReadWhatMemoryHoldsThen) {
  Graph graph(stream, [&] {
    add_amount(x, amount, stream);
    add_one(x, stream);
  });
  EXPECT_EQ(graph.nodes(), 2);
  EXPECT_EQ(value(), 0) << "ran while it was captured";
  int32_t expected = 0;
  for (const int32_t a : {10, -3, 0, 1000}) {
    set_amount(a);
    graph.launch(stream);
    expected += a + 1;
    EXPECT_EQ(value(), expected);
  }
  // The graph runs on another stream than the one it was captured on.
  const Stream other = Stream::on(kGpu);
  graph.launch(other);
  other.synchronize();
  EXPECT_EQ(value(), expected + 1001);
}

TEST_F(GraphTest, AForkedStreamIsPartOfIt) {
  const Stream side = Stream::on(kGpu);
  Tensor y(DType::kInt32, {1000}, kGpu);
  Event fork, join;
  Graph graph(stream, [&] {
    add_one(x, stream);
    fork.record(stream);
    side.wait(fork);
    copy(y, x, side);
    join.record(side);
    stream.wait(join);
    copy(x, y, stream);
    fill_bytes(y, 0, stream);
  });
  EXPECT_EQ(graph.nodes(), 4);
  for (int i = 1; i <= 3; ++i) {
    graph.launch(stream);
    EXPECT_EQ(value(), i);
  }
}

TEST_F(GraphTest, UpdatesInPlaceWhereTheShapeIsTheSame) {
  Graph graph(stream, [&] { add_one(x, stream); });
  graph.launch(stream);
  EXPECT_TRUE(graph.update([&] { add_one(x.view().slice(0, 0, 500), stream); }));
  graph.launch(stream);
  EXPECT_TRUE(graph.update([&] { add_one(x.view().slice(0, 500, 1000), stream); }));
  graph.launch(stream);
  EXPECT_EQ(value(), 2);
  EXPECT_FALSE(graph.update([&] {
    add_one(x, stream);
    fill_bytes(x, 0, stream);
    add_one(x, stream);
  }));
  EXPECT_EQ(graph.nodes(), 3);
  graph.launch(stream);
  EXPECT_EQ(value(), 1);
}

TEST_F(GraphTest, WhatCannotBeCapturedIsAnErrorAndTheStreamGoesOn) {
  const auto error = [&](const std::function<void()>& enqueue) {
    return error_of([&] { const Graph graph(stream, enqueue); }, ErrorKind::kCuda);
  };
  EXPECT_NE(error([&] { stream.synchronize(); }).find("cudaStreamSynchronize"), std::string::npos);
  EXPECT_NE(error([&] { Buffer(64, kGpu); }).find("cudaMalloc"), std::string::npos);
  add_one(x, stream);
  EXPECT_EQ(value(), 1);
  // An error of the caller's own comes through.
  EXPECT_THROW(Graph(stream, [&] { MOIETY_CHECK(false, "mine"); }), Error);
  add_one(x, stream);
  EXPECT_EQ(value(), 2);
  EXPECT_THROW(Graph().launch(stream), Error);
  EXPECT_THROW(Graph(Stream(), [] {}), Error);
}

}  // namespace
}  // namespace moiety
