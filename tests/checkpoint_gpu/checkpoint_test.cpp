// Checkpoints of state that lies on a GPU: the files of the same state in host memory, and loaded
// from files of any layout.
#include <gtest/gtest.h>

#include "moiety/base/copy.h"
#include "moiety/base/log.h"
#include "moiety/checkpoint/retention.h"
#include "tests/checkpoint/state_testing.h"
#include "tests/support/gpu_test.h"

namespace moiety::checkpoint {
namespace {

// The state of a single rank. Every fifth piece is in the host's memory, as a trainer's counters
// would be.
class GpuState {
 public:
  GpuState(const State& state, const Stream& stream)
      : host_(state, Cut::kBlocks, 0, 1), view_(host_.view()), stream_(stream) {
    for (size_t i = 0; i < view_.size(); ++i) {
      if (i % 5 == 4) continue;
      memory_.emplace_back(bytes(i), stream.device());
      view_[i].data = memory_.back().data();
      view_[i].device = stream.device();
    }
  }
  const StateView& view() const { return view_; }

  void fill(int version) {
    host_.fill(version);
    move(true);
  }
  void poison() {
    host_.poison();
    move(true);
  }
  int64_t differences(int version) {
    move(false);
    return host_.differences(version);
  }
  // Behind what is on the stream, without waiting.
  void destroy() const {
    for (const Buffer& b : memory_) fill_bytes(b.view(DType::kUInt8, {b.bytes()}), 0xA5, stream_);
  }

 private:
  int64_t bytes(size_t i) const { return byte_size(view_[i].dtype, volume(view_[i].box)); }
  void move(bool to_gpu) {
    for (size_t i = 0; i < view_.size(); ++i) {
      if (view_[i].device.type == DeviceType::kCpu) continue;
      const TensorView here(host_.view()[i].data, DType::kUInt8, {bytes(i)});
      const TensorView there(view_[i].data, DType::kUInt8, {bytes(i)}, view_[i].device);
      copy(to_gpu ? there : here, to_gpu ? here : there, stream_);
    }
    stream_.synchronize();
  }

  RankState host_;
  StateView view_;
  std::vector<Buffer> memory_;
  Stream stream_;
};

// More than a part that is staged at a time, rows of it in several pieces.
const State& large_state() {
  static const State state{{"wide", "weight", DType::kFloat32, {700, 9000}},
                           {"experts", "exp_avg", DType::kBFloat16, {4, 96, 1000}},
                           {"long", "exp_avg_sq", DType::kFloat32, {5'000'001}}};
  return state;
}

class GpuCheckpoint : public GpuTest {
 protected:
  void SetUp() override {
    set_log_level(LogLevel::kOff);
    GpuTest::SetUp();
  }
  void TearDown() override { set_log_level(LogLevel::kInfo); }

  // Saves `version` from the GPU, and destroys it at once if the save is beside training.
  SaveResult save(const State& state, const std::string& directory, int version, bool beside,
                  const SaveOptions& options) {
    SaveResult result;
    on_ranks(1, [&](int, comm::Bootstrap& bootstrap) {
      GpuState own(state, stream);
      Saver saver(directory, bootstrap, options);
      if (beside) saver.reserve(own.view());
      own.fill(version);
      if (beside) {
        saver.start(own.view(), run_state(7, 1), stream);
        own.destroy();
        result = saver.wait().value();
      } else {
        result = saver.save(own.view(), run_state(7, 1), stream);
      }
    });
    return result;
  }

  int64_t load_to_gpu(const State& state, const std::string& path, int version) {
    int64_t differences = -1;
    on_ranks(1, [&](int, comm::Bootstrap& bootstrap) {
      GpuState own(state, stream);
      own.poison();
      load(path, own.view(), {}, bootstrap);
      differences = own.differences(version);
    });
    return differences;
  }
};

// A file without the checkpoint's id.
std::string content(const std::string& path, const std::string& id) {
  std::string bytes = read_file(path);
  for (size_t at; (at = bytes.find(id)) != bytes.npos;) bytes.replace(at, id.size(), "");
  return bytes;
}

TEST_F(GpuCheckpoint, FilesAreThoseOfStateInHostMemory) {
  for (const State* state : {&small_state(), &large_state()}) {
    const SaveOptions options = state == &small_state() ? small_pieces() : SaveOptions{};
    const TemporaryDirectory directory;
    const SaveResult host = save_state(*state, directory / "host", Cut::kBlocks, 1, 7, 3, options);
    for (const bool beside : {false, true}) {
      const SaveResult gpu = save(*state, directory / "gpu", 3, beside, options);
      EXPECT_EQ(gpu.bytes, host.bytes);
      EXPECT_EQ(list(posix(), gpu.path), list(posix(), host.path));
      const std::string file = "/" + rank_file_name(0, 1);
      EXPECT_EQ(content(gpu.path + file, gpu.id), content(host.path + file, host.id)) << beside;
      EXPECT_EQ(read_manifest(gpu.path).tensors, read_manifest(host.path).tensors);
      EXPECT_EQ(load_state(*state, gpu.path, Cut::kFlat, 2, 3), 0);
    }
  }
}

TEST_F(GpuCheckpoint, IsLoadedFromAnyLayout) {
  for (const Cut cut : {Cut::kRows, Cut::kColumns, Cut::kFlat, Cut::kBlocks, Cut::kLast}) {
    for (const int ranks : {1, 3}) {
      const TemporaryDirectory directory;
      const std::string small = save_small(directory / "s", cut, ranks, 7, 2, small_pieces()).path;
      EXPECT_EQ(load_to_gpu(small_state(), small, 2), 0) << int(cut) << " of " << ranks;
      const std::string large = save_state(large_state(), directory / "l", cut, ranks, 7, 2).path;
      EXPECT_EQ(load_to_gpu(large_state(), large, 2), 0) << int(cut) << " of " << ranks;
    }
  }
}

TEST_F(GpuCheckpoint, AStreamOfAnotherDeviceIsRefused) {
  const TemporaryDirectory directory;
  on_ranks(1, [&](int, comm::Bootstrap& bootstrap) {
    const GpuState own(small_state(), stream);
    Saver saver(directory / "c", bootstrap);
    const std::string error = error_of([&] { saver.start(own.view(), run_state(7, 1), Stream()); });
    EXPECT_NE(error.find("save: the state is on cuda:0, the stream is of cpu"), error.npos)
        << error;
    EXPECT_EQ(find_newest_complete(directory / "c"), std::nullopt);
  });
}

}  // namespace
}  // namespace moiety::checkpoint
