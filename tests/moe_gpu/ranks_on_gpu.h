// The place of a suite's tensors for ranks that are threads and share some GPUs. Their memory is
// taken before they start, and kept: nothing may be allocated while a kernel waits.
#pragma once

#include <map>

#include "moiety/base/copy.h"
#include "tests/moe/ep_helpers.h"

namespace moiety::moe {

// What one rank has on the GPU.
struct GpuRank {
  static constexpr int64_t kBytes = int64_t{256} << 20;

  explicit GpuRank(Device device)
      : there(kBytes, device), staged(Buffer::pinned(kBytes)), stream(Stream::on(device)) {}
  Buffer there, staged;
  Stream stream;

  // The ranks' GPUs are the first `gpus`, in turns.
  static GpuRank& of(int rank, int gpus) {
    static auto& pool = *new std::map<std::pair<int, int>, GpuRank>;  // CUDA may end before it
    const int gpu = rank % gpus;
    return pool.try_emplace({rank, gpu}, Device{DeviceType::kCuda, gpu}).first->second;
  }
};

class OnGpuRank {
 public:
  explicit OnGpuRank(GpuRank& rank)
      : stream(rank.stream), rank_(&rank), base_(rank.there.data()), room_(GpuRank::kBytes) {}

  // Makes tensors from now on direct, on ranks whose bit is set in `ranks`, as OnHost::attach does.
  void attach(EpGroup& group, comm::Communicator& world, int64_t bytes, unsigned ranks) {
    const int64_t shift = 256 * (1 + world.rank() * 3 % 7) + 16 * (world.rank() % 3);
    constexpr int kOperations = 8;  // tensors are not given back
    attached_ =
        comm::SymmetricBuffer::create(world, "operands", 4096 + kOperations * bytes, device());
    group.attach(attached_);
    if ((ranks >> group.rank() & 1) == 0) return;
    attached_from_ = used_;
    base_ = attached_.local() + shift - used_;
    room_ = used_ + kOperations * bytes;
  }

  TensorView operator()(const TensorView& storage, const TensorView& view) {
    const int64_t at = used_;
    used_ += round_up(storage.bytes(), 256);
    MOIETY_CHECK(used_ <= room_, "the tests' memory is used up, by {} bytes", used_ - room_);
    copies_.push_back({storage, at});
    std::memcpy(rank_->staged.data() + at, storage.raw(), size_t(storage.bytes()));
    copy(there(at, storage.bytes()), staged(at, storage.bytes()), stream);
    if (!view.raw()) return {nullptr, view.dtype(), view.sizes(), view.strides(), device()};
    const int64_t offset = address(view) - address(storage);
    return {base_ + at + offset, view.dtype(), view.sizes(), view.strides(), device()};
  }
  void back() {
    for (size_t i = brought_; i < copies_.size(); ++i) {
      const auto& [storage, at] = copies_[i];
      copy(staged(at, storage.bytes()), there(at, storage.bytes()), stream);
    }
    stream.synchronize();
    for (; brought_ < copies_.size(); ++brought_) {
      const auto& [storage, at] = copies_[brought_];
      std::memcpy(storage.raw(), rank_->staged.data() + at, size_t(storage.bytes()));
    }
  }
  // The plan with views of the memory that plan memory was copied from and brought back to.
  EpPlan plan(const EpPlan& plan) const {
    EpPlan out = plan;
    for (TensorView* x :
         {&out.info, &out.rows_real, &out.rows_padded, &out.rows_before, &out.offset, &out.slot_TK,
          &out.owner_TK, &out.row_TR, &out.recv_token, &out.recv_slot, &out.slot_row, &out.count_RE,
          &out.rows_RR, &out.tokens_R, &out.row_end_BR, &out.pair_end_BE}) {
      *x = here(*x);
    }
    return out;
  }

  Device device() const { return stream.device(); }

  Stream stream;

 private:
  static intptr_t address(const TensorView& x) { return reinterpret_cast<intptr_t>(x.raw()); }
  TensorView there(int64_t at, int64_t bytes) const {
    std::byte* const base = at < attached_from_ ? rank_->there.data() : base_;
    return {base + at, DType::kUInt8, {bytes}, device()};
  }
  TensorView staged(int64_t at, int64_t bytes) const {
    return {rank_->staged.data() + at, DType::kUInt8, {bytes}};
  }
  TensorView here(const TensorView& x) const {
    const int64_t at = address(x) - reinterpret_cast<intptr_t>(rank_->there.data());
    for (const auto& [storage, begin] : copies_) {
      if (at < begin || at + x.bytes() > begin + storage.bytes()) continue;
      return {static_cast<std::byte*>(storage.raw()) + (at - begin), x.dtype(), x.sizes(),
              x.strides()};
    }
    ADD_FAILURE() << "no copy has " << x.describe();
    return x;
  }

  GpuRank* rank_;
  comm::SymmetricBuffer attached_;
  std::byte* base_;  // of the tensors from byte `attached_from_` on
  int64_t room_, used_ = 0, attached_from_ = 0;
  std::vector<std::pair<TensorView, int64_t>> copies_;
  size_t brought_ = 0;
};

// Runs body(world, place) on ranks that are threads and share the first `gpus` GPUs.
inline void run_on_gpus(int gpus, int ranks, Seconds deadline,
                        const std::function<void(comm::Communicator&, OnGpuRank)>& body,
                        comm::GpuTransport transport = comm::GpuTransport::kAuto) {
  for (int r = 0; r < ranks; ++r) GpuRank::of(r, gpus);
  comm::run_thread_ranks(
      ranks, {.deadline = deadline, .gpu_transport = transport},
      [&](comm::Communicator& world) { body(world, OnGpuRank(GpuRank::of(world.rank(), gpus))); });
}

}  // namespace moiety::moe
