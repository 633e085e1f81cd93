#include "moiety/comm/symmetric_buffer.h"

#include <cstring>
#include <unistd.h>
#include <vector>

#include "moiety/base/buffer.h"
#include "moiety/base/error.h"
#include "moiety/comm/agree.h"
#include "moiety/comm/flags.h"

namespace moiety::comm {
namespace {

constexpr int64_t kVersion = 1;
constexpr int64_t kPage = 4096;

using Memory = std::shared_ptr<Buffer>;

// What a rank tells its peers. `memory` leads to the rank's memory, for peers of the same process.
struct Offer {
  int64_t version = kVersion;
  int64_t process = 0;
  int64_t bytes = 0;
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

// The same verdict on every rank, since all compare the same offers with rank 0's.
void check_offers(const std::string& name, const std::vector<Offer>& offers) {
  for (size_t r = 1; r < offers.size(); ++r) {
    if (offers[r].version != offers[0].version) {
      fail(ErrorKind::kComm, "symmetric buffer \"{}\": rank 0 has version {}, rank {} has {}", name,
           offers[0].version, r, offers[r].version);
    }
    if (offers[r].bytes != offers[0].bytes) {
      fail(ErrorKind::kComm, "symmetric buffer \"{}\": rank 0 asks for {} bytes, rank {} for {}",
           name, offers[0].bytes, r, offers[r].bytes);
    }
    if (offers[r].process != offers[0].process) {
      fail(ErrorKind::kUnsupported,
           "symmetric buffer \"{}\": ranks 0 and {} are different processes", name, r);
    }
  }
}

int64_t physical_memory() {
  return int64_t{sysconf(_SC_PHYS_PAGES)} * int64_t{sysconf(_SC_PAGESIZE)};
}

}  // namespace

// Every rank holds the memory of all: it lives until the last one lets go, so whatever a late or
// failing peer still stores has a place to land.
struct SymmetricBuffer::Impl {
  Communicator* comm = nullptr;
  int rank = 0;
  int64_t bytes = 0;
  std::vector<Memory> memory;  // by rank; behind the `bytes` stand one probe word per rank

  uint64_t* probe_words(int rank) const {
    return reinterpret_cast<uint64_t*>(memory[rank]->data() + (bytes + 7) / 8 * 8);
  }
  void probe(const std::string& name) const;
};

// Every rank stores into every peer's memory and must find what its peers stored into its own.
void SymmetricBuffer::Impl::probe(const std::string& name) const {
  const int me = rank;
  for (int r = 0; r < comm->size(); ++r) store_release(probe_words(r)[me], uint64_t(me) + 1);
  agree(comm->bootstrap(), "");
  std::string error;
  for (int r = 0; r < comm->size() && error.empty(); ++r) {
    if (load_acquire(probe_words(me)[r]) != uint64_t(r) + 1) {
      error =
          text("symmetric buffer \"{}\": what rank {} stores does not reach rank {}", name, r, me);
    }
  }
  agree(comm->bootstrap(), error);
}

SymmetricBuffer SymmetricBuffer::create(Communicator& comm, const std::string& name,
                                        int64_t bytes) {
  Bootstrap& bootstrap = comm.bootstrap();
  Offer mine{.process = getpid(), .bytes = bytes};
  check_offers(name, exchange(bootstrap, mine));
  MOIETY_CHECK(bytes >= 0, "symmetric buffer \"{}\": {} bytes", name, bytes);

  auto impl = std::make_shared<Impl>();
  impl->comm = &comm;
  impl->rank = comm.rank();
  impl->bytes = bytes;
  Memory memory;
  std::string error;
  try {
    // More than the machine has may well be granted, and the process be killed when it is touched.
    if (bytes > physical_memory()) fail(ErrorKind::kOutOfMemory, "more than the machine has");
    const int64_t words = (bytes + 7) / 8 + comm.size();
    memory = std::make_shared<Buffer>(words * 8, "symmetric buffer", kPage);
  } catch (const Error&) {
    error = text("symmetric buffer \"{}\": rank {} could not allocate {}: out of memory", name,
                 comm.rank(), bytes_text(bytes));
  }
  agree(bootstrap, error, ErrorKind::kOutOfMemory);

  // Peers copy the pointer out of this box; it is deleted when all have, and rather leaked if that
  // cannot be known.
  const auto box = new Memory(memory);
  mine.memory = box;
  for (const Offer& offer : exchange(bootstrap, mine)) impl->memory.push_back(*offer.memory);
  agree(bootstrap, "");
  delete box;
  impl->probe(name);
  SymmetricBuffer out;
  out.impl_ = std::move(impl);
  return out;
}

std::byte* SymmetricBuffer::local() const { return peer(impl_->rank); }
std::byte* SymmetricBuffer::peer(int rank) const { return impl_->memory[rank]->data(); }
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
