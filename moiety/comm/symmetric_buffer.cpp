#include "moiety/comm/symmetric_buffer.h"

#include <algorithm>
#include <cstring>
#include <unistd.h>
#include <vector>

#include "moiety/base/buffer.h"
#include "moiety/base/error.h"
#include "moiety/base/integer.h"
#include "moiety/base/log.h"
#include "moiety/comm/agree.h"
#include "moiety/comm/flags.h"
#include "moiety/comm/memory_exchange.h"
#include "moiety/comm/process.h"

namespace moiety::comm {
namespace {

constexpr int64_t kVersion = 2;
constexpr int64_t kPage = 4096;

// A rank's message to its peers. `memory` leads to the rank's memory, for peers of the same
// process.
struct Offer {
  int64_t version = kVersion;
  int64_t bytes = 0;
  int64_t may_map = 1;
  Nonce nonce{};
  ProcessIdentity process;
  const Memory* memory = nullptr;
};

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
  std::vector<Memory> memory;  // by rank; one probe word per rank follows the `bytes`

  static int64_t probe_offset(int64_t bytes) { return round_up(bytes, 8); }
  uint64_t* probe_words(int rank) const {
    return reinterpret_cast<uint64_t*>(memory[rank].get() + probe_offset(bytes));
  }
  void probe(const std::string& what) const;
};

// Proves the mapping: every rank stores into every peer's memory and must find the words that its
// peers stored into its own.
void SymmetricBuffer::Impl::probe(const std::string& what) const {
  const int me = rank;
  for (int r = 0; r < comm->size(); ++r) store_release(probe_words(r)[me], uint64_t(me) + 1);
  agree(comm->bootstrap(), "");
  std::string error;
  for (int r = 0; r < comm->size() && error.empty(); ++r) {
    if (load_acquire(probe_words(me)[r]) != uint64_t(r) + 1) {
      error = text("{}: what rank {} stores does not reach rank {}", what, r, me);
    }
  }
  agree(comm->bootstrap(), error, ErrorKind::kUnsupported);
}

SymmetricBuffer SymmetricBuffer::create(Communicator& comm, const std::string& name,
                                        int64_t bytes) {
  Bootstrap& bootstrap = comm.bootstrap();
  const std::string what = text("symmetric buffer \"{}\"", name);
  const Offer mine{.bytes = bytes,
                   .may_map = comm.may_map_memory(),
                   .nonce = random_nonce(),
                   .process = this_process()};
  const std::vector<Offer> offers = exchange(bootstrap, mine);
  check_offers(what, offers);
  MOIETY_CHECK(bytes >= 0, "{}: {} bytes", what, bytes);
  const std::string reason = what_forbids(offers);
  if (!reason.empty()) {
    fail(ErrorKind::kUnsupported, "{}: the ranks do not map each other's memory: {}", what, reason);
  }
  check_physical_memory(bootstrap, what, bytes);

  auto impl = std::make_shared<Impl>();
  impl->comm = &comm;
  impl->rank = comm.rank();
  impl->bytes = bytes;
  const int64_t allocated = Impl::probe_offset(bytes) + 8 * comm.size();
  if (in_one_process(offers)) {
    impl->memory = share_heap(bootstrap, what, allocated, mine);
  } else {
    std::vector<Nonce> nonces;
    for (const Offer& offer : offers) nonces.push_back(offer.nonce);
    impl->memory = exchange_memory(bootstrap, what, allocated, nonces);
  }
  impl->probe(what);
  SymmetricBuffer out;
  out.impl_ = std::move(impl);
  return out;
}

bool mappable(Communicator& comm) {
  if (!comm.mappable_) {
    try {
      SymmetricBuffer::create(comm, "probe", 0);
      comm.mappable_ = true;
    } catch (const Error& e) {
      if (e.kind() != ErrorKind::kUnsupported) throw;
      comm.mappable_ = false;
      if (comm.rank() == 0) {
        log(LogLevel::kInfo, "communicator \"{}\" works without symmetric memory: {}", comm.name(),
            e.what());
      }
    }
  }
  return *comm.mappable_;
}

std::byte* SymmetricBuffer::local() const { return peer(impl_->rank); }
std::byte* SymmetricBuffer::peer(int rank) const { return impl_->memory[rank].get(); }
int64_t SymmetricBuffer::bytes() const { return impl_ ? impl_->bytes : 0; }

bool SymmetricBuffer::contains(const void* p, int64_t bytes) const {
  if (!impl_) return false;
  const auto* begin = static_cast<const std::byte*>(p);
  return begin >= local() && bytes <= impl_->bytes && begin - local() <= impl_->bytes - bytes;
}

void SymmetricBuffer::close() {
  if (!impl_) return;
  agree(impl_->comm->bootstrap(), "");  // nobody uses it any more
  impl_.reset();
}

}  // namespace moiety::comm
