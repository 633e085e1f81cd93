#include "moiety/comm/symmetric_buffer.h"

#include <algorithm>
#include <cstring>
#include <unistd.h>
#include <vector>

#include "moiety/base/buffer.h"
#include "moiety/base/cuda_built.h"
#include "moiety/base/error.h"
#include "moiety/base/integer.h"
#include "moiety/base/log.h"
#include "moiety/comm/agree.h"
#include "moiety/comm/flags.h"
#include "moiety/comm/lane.h"
#include "moiety/comm/mapped/gpu_memory.h"
#include "moiety/comm/memory_exchange.h"
#include "moiety/comm/process.h"

namespace moiety::comm {
namespace {

constexpr int64_t kVersion = 3;
constexpr int64_t kPage = 4096;

// A rank's message to its peers. `memory` leads to the rank's memory, for peers of the same
// process.
struct Offer {
  int64_t version = kVersion;
  int64_t bytes = 0;
  int64_t may_map = 1;
  int64_t on_gpu = 0;
  Nonce nonce{};
  ProcessIdentity process;
  const Memory* memory = nullptr;
};

bool may_map(const Communicator& comm, Device device) {
  const auto* lane = dynamic_cast<const LaneCommunicator*>(&comm);
  const bool nccl = lane && lane->gpu_transport() == GpuTransport::kNccl;
  return comm.may_map_memory() && !(nccl && device.type == DeviceType::kCuda);
}

std::vector<Offer> exchange(Bootstrap& bootstrap, const Offer& mine) {
  std::vector<Offer> out(bootstrap.size());
  const std::vector<std::string> all =
      bootstrap.all_gather({reinterpret_cast<const char*>(&mine), sizeof(mine)});
  for (size_t r = 0; r < out.size(); ++r) {
    MOIETY_CHECK(all[r].size() == sizeof(Offer), "symmetric buffer: rank {} sent {} bytes", r,
                 all[r].size());
    std::memcpy(&out[r], all[r].data(), sizeof(Offer));
  }
  return out;
}

// Checks the offers. The verdict is the same on every rank, since all compare the same offers with
// rank 0's.
void check_offers(const std::string& what, const std::vector<Offer>& offers) {
  const Offer& first = offers[0];
  for (size_t r = 1; r < offers.size(); ++r) {
    const Offer& other = offers[r];
    if (other.version != first.version) {
      fail(ErrorKind::kComm, "{}: rank 0 has version {}, rank {} has {}", what, first.version, r,
           other.version);
    }
    if (std::strcmp(first.process.build, other.process.build) != 0) {
      fail(ErrorKind::kComm, "{}: rank 0 runs build {}, rank {} runs {}", what, first.process.build,
           r, other.process.build);
    }
    if (other.bytes != first.bytes) {
      fail(ErrorKind::kComm, "{}: rank 0 asks for {} bytes, rank {} for {}", what, first.bytes, r,
           other.bytes);
    }
    if (other.on_gpu != first.on_gpu) {
      fail(ErrorKind::kComm, "{}: rank 0 asks for memory of a {}, rank {} of a {}", what,
           first.on_gpu ? "GPU" : "CPU", r, other.on_gpu ? "GPU" : "CPU");
    }
  }
}

// The reason why the ranks cannot map each other's memory, the same on every rank; empty if they
// may try.
std::string what_forbids(const std::vector<Offer>& offers) {
  for (size_t r = 0; r < offers.size(); ++r) {
    if (!offers[r].may_map) return text("rank {} was told not to", r);
    const std::string reason = what_separates(offers[0].process, offers[r].process);
    if (!reason.empty()) return text("ranks 0 and {}: {}", r, reason);
  }
  return "";
}

bool in_one_process(const std::vector<Offer>& offers) {
  return std::all_of(offers.begin(), offers.end(), [&](const Offer& other) {
    return same_process(offers[0].process, other.process);
  });
}

int64_t physical_memory() {
  return int64_t{sysconf(_SC_PHYS_PAGES)} * int64_t{sysconf(_SC_PAGESIZE)};
}

// Checks the machine's memory: a request for more may well be granted, and the process be killed
// when it touches it.
void check_physical_memory(Bootstrap& bootstrap, const std::string& what, int64_t bytes) {
  std::string error;
  if (bytes > physical_memory()) {
    error = text("{}: rank {} could not allocate {}: out of memory", what, bootstrap.rank(),
                 bytes_text(bytes));
  }
  agree(bootstrap, error, ErrorKind::kOutOfMemory);
}

// Shares heap memory among the ranks of one process; returns it by rank.
std::vector<Memory> share_heap(Bootstrap& bootstrap, const std::string& what, int64_t bytes,
                               Offer mine) {
  Memory memory;
  std::string error;
  try {
    const auto buffer = std::make_shared<Buffer>(bytes, "symmetric buffer", kPage);
    memory = Memory(buffer, buffer->data());
  } catch (const Error&) {
    error = text("{}: rank {} could not allocate {}: out of memory", what, bootstrap.rank(),
                 bytes_text(bytes));
  }
  agree(bootstrap, error, ErrorKind::kOutOfMemory);

  // Peers copy the pointer out of this box. It is deleted when all have, and leaked if that cannot
  // be known.
  const auto box = new Memory(memory);
  mine.memory = box;
  std::vector<Memory> out;
  for (const Offer& offer : exchange(bootstrap, mine)) out.push_back(*offer.memory);
  agree(bootstrap, "");
  delete box;
  return out;
}

}  // namespace

// Every rank holds the memory of all: it lives until the last one lets go, so stores of a late or
// failing peer still have a place to land.
struct SymmetricBuffer::Impl {
  Communicator* comm = nullptr;
  int rank = 0;
  int64_t bytes = 0;
  Device device;
  std::vector<Memory> memory;  // by rank; one probe word per rank follows the `bytes`

  bool on_gpu() const { return device.type == DeviceType::kCuda; }

  static int64_t probe_offset(int64_t bytes) { return round_up(bytes, 8); }
  uint64_t* probe_words(int rank) const {
    return reinterpret_cast<uint64_t*>(memory[rank].get() + probe_offset(bytes));
  }
  void probe(const std::string& what) const;
};

// Proves the mapping: every rank stores into every peer's memory and must find the words that its
// peers stored into its own.
void SymmetricBuffer::Impl::probe(const std::string& what) const {
  const int me = rank, ranks = comm->size();
  const uint64_t mark = uint64_t(me) + 1;
  std::vector<uint64_t*> outboxes;
  for (int r = 0; r < ranks; ++r) outboxes.push_back(probe_words(r) + me);
  if (!on_gpu()) {
    for (uint64_t* word : outboxes) store_release(*word, mark);
  } else if constexpr (kCudaBuilt) {
    mapped::store_words(device.index, outboxes, mark);
  }
  agree(comm->bootstrap(), "");
  std::vector<uint64_t> inbox;
  if (!on_gpu()) {
    for (int r = 0; r < ranks; ++r) inbox.push_back(load_acquire(probe_words(me)[r]));
  } else if constexpr (kCudaBuilt) {
    inbox = mapped::load_words(device.index, probe_words(me), ranks);
  }
  std::string error;
  for (int r = 0; r < ranks && error.empty(); ++r) {
    if (inbox[r] != uint64_t(r) + 1) {
      error = text("{}: what rank {} stores does not reach rank {}", what, r, me);
    }
  }
  agree(comm->bootstrap(), error, ErrorKind::kUnsupported);
}

SymmetricBuffer SymmetricBuffer::create(Communicator& comm, const std::string& name, int64_t bytes,
                                        Device device) {
  require_device("symmetric buffer", device);
  Bootstrap& bootstrap = comm.bootstrap();
  const std::string what = text("symmetric buffer \"{}\"", name);
  const Offer mine{.bytes = bytes,
                   .may_map = may_map(comm, device),
                   .on_gpu = device.type == DeviceType::kCuda,
                   .nonce = random_nonce(),
                   .process = this_process()};
  const std::vector<Offer> offers = exchange(bootstrap, mine);
  check_offers(what, offers);
  MOIETY_CHECK(bytes >= 0, "{}: {} bytes", what, bytes);
  const std::string reason = what_forbids(offers);
  if (!reason.empty()) {
    fail(ErrorKind::kUnsupported, "{}: the ranks do not map each other's memory: {}", what, reason);
  }
  if (!mine.on_gpu) check_physical_memory(bootstrap, what, bytes);

  auto impl = std::make_shared<Impl>();
  impl->comm = &comm;
  impl->rank = comm.rank();
  impl->bytes = bytes;
  impl->device = device;
  const int64_t allocated = Impl::probe_offset(bytes) + 8 * comm.size();
  std::vector<Nonce> nonces;  // of ranks that are processes
  for (const Offer& offer : offers) {
    if (!in_one_process(offers)) nonces.push_back(offer.nonce);
  }
  if (impl->on_gpu()) {
    if constexpr (kCudaBuilt) {
      impl->memory = mapped::share_gpu_memory(bootstrap, what, allocated, device.index, nonces);
    }
  } else if (nonces.empty()) {
    impl->memory = share_heap(bootstrap, what, allocated, mine);
  } else {
    impl->memory = exchange_memory(bootstrap, what, allocated, nonces);
  }
  impl->probe(what);
  SymmetricBuffer out;
  out.impl_ = std::move(impl);
  return out;
}

SymmetricBuffer SymmetricBuffer::adopt(Communicator& comm, std::vector<std::byte*> peers,
                                       int64_t bytes, std::shared_ptr<void> keep_alive,
                                       Device device) {
  MOIETY_CHECK(peers.size() == size_t(comm.size()) && bytes >= 0,
               "symmetric buffer: {} peers of {} bytes for {} ranks", peers.size(), bytes,
               comm.size());
  SymmetricBuffer out;
  out.impl_ = std::make_shared<Impl>();
  out.impl_->comm = &comm;
  out.impl_->rank = comm.rank();
  out.impl_->bytes = bytes;
  out.impl_->device = device;
  for (std::byte* peer : peers) out.impl_->memory.emplace_back(keep_alive, peer);
  return out;
}

SymmetricBuffer SymmetricBuffer::view(Communicator& sub) const {
  SymmetricBuffer out;
  out.impl_ = std::make_shared<Impl>(*impl_);
  out.impl_->comm = &sub;
  out.impl_->rank = sub.rank();
  out.impl_->memory.clear();
  const int mine = impl_->rank;
  for (const std::string& word :
       sub.bootstrap().all_gather({reinterpret_cast<const char*>(&mine), sizeof(mine)})) {
    int rank = -1;
    if (word.size() == sizeof(rank)) std::memcpy(&rank, word.data(), sizeof(rank));
    MOIETY_CHECK(rank >= 0 && rank < ranks(), "symmetric buffer: view: rank {} of {}", rank,
                 ranks());
    out.impl_->memory.push_back(impl_->memory[rank]);
  }
  return out;
}

bool mappable(Communicator& comm, Device device) {
  std::optional<bool>& known = comm.mappable_[device.type == DeviceType::kCuda];
  if (!known) {
    try {
      SymmetricBuffer::create(comm, "probe", 0, device);
      known = true;
    } catch (const Error& e) {
      if (e.kind() != ErrorKind::kUnsupported) throw;
      known = false;
      if (comm.rank() == 0) {
        log(LogLevel::kInfo, "communicator \"{}\" works without symmetric memory: {}", comm.name(),
            e.what());
      }
    }
  }
  return *known;
}

std::byte* SymmetricBuffer::local() const { return peer(impl_->rank); }
std::byte* SymmetricBuffer::peer(int rank) const { return impl_->memory[rank].get(); }
int64_t SymmetricBuffer::bytes() const { return impl_ ? impl_->bytes : 0; }
int SymmetricBuffer::ranks() const { return static_cast<int>(impl_->memory.size()); }
Device SymmetricBuffer::device() const { return impl_->device; }

bool SymmetricBuffer::contains(const void* p, int64_t bytes) const {
  if (!impl_) return false;
  const auto* begin = static_cast<const std::byte*>(p);
  return begin >= local() && bytes <= impl_->bytes && begin - local() <= impl_->bytes - bytes;
}

void SymmetricBuffer::close() {
  if (!impl_) return;
  if constexpr (kCudaBuilt) {
    if (impl_->on_gpu()) mapped::wait_for_gpu(impl_->device.index);
  }
  agree(impl_->comm->bootstrap(), "");  // nobody uses it any more
  impl_.reset();
}

}  // namespace moiety::comm
