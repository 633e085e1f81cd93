#include "moiety/gtp/transport.h"

#include <algorithm>
#include <cstring>

#include "moiety/base/error.h"
#include "moiety/comm/agree.h"
#include "moiety/gtp/accumulate.h"
#include "moiety/gtp/hash.h"
#include "moiety/gtp/transport_collective.h"
#include "moiety/gtp/transport_mapped.h"

namespace moiety::gtp {
namespace {

void check_bundle(const std::string& group, const SharedBundle& b) {
  MOIETY_CHECK(b.id >= 0 && b.bucket >= 0 && !b.members.empty(),
               "gtp \"{}\": bundle \"{}\" has id {}, bucket {} and {} members", group, b.name, b.id,
               b.bucket, b.members.size());
  for (size_t e = 0; e < b.members.size(); ++e) {
    for (size_t a = 0; a < b.members[e].size(); ++a) {
      const TensorView &x = b.members[e][a], &first = b.members[0][a];
      MOIETY_CHECK(x.defined() == first.defined() && x.dtype() == first.dtype() &&
                       std::ranges::equal(x.sizes(), first.sizes()) && x.contiguous(),
                   "gtp \"{}\": bundle \"{}\", array {} of member {} is {}, of member 0 {}; "
                   "expected the same, without gaps",
                   group, b.name, a, e, x.describe(), first.describe());
    }
  }
}

uint64_t signature(const SharedBundle& b, uint64_t place) {
  Hash hash;
  hash.add(b.id, b.expert, b.bucket, b.members.size(), place);
  for (const char c : b.name) hash.add(c);
  for (const TensorView& x : b.members[0]) hash.add(x.defined(), x.dtype(), x.bytes());
  return hash.value();
}

}  // namespace

const char* name(TransportKind kind) {
  constexpr const char* kNames[] = {"mapped", "all_to_all", "ring"};
  return kNames[static_cast<int>(kind)];
}

Subject subject_of(const GatherJob& job) {
  Subject out{.bundle = job.bundle, .action = Subject::Action::kGather};
  const GatherLayout& layout = job.landing->layout();
  for (const Plane& plane : layout.planes) {
    out.detail |= static_cast<uint16_t>(1 << static_cast<int>(plane.array));
    out.bytes += layout.shape.members * plane.bytes;
  }
  return out;
}

Subject subject_of(const ReduceJob& job) {
  return {.bundle = job.bundle,
          .action = Subject::Action::kReduce,
          .detail = static_cast<uint16_t>(job.send.dtype()),
          .bytes = job.send.bytes()};
}

void Transport::share(std::vector<SharedBundle> bundles) {
  MOIETY_CHECK(!shared_, "gtp \"{}\": share is called twice", name());
  std::ranges::sort(bundles, {}, &SharedBundle::id);
  std::vector<uint64_t> mine;
  std::string error;
  try {
    for (const SharedBundle& b : bundles) {
      check_bundle(name(), b);
      mine.push_back(signature(b, place_of(b)));
    }
    const auto twice = std::ranges::adjacent_find(bundles, {}, &SharedBundle::id);
    MOIETY_CHECK(twice == bundles.end(), "gtp \"{}\": two bundles have id {}", name(), twice->id);
  } catch (const Error& e) {
    error = e.what();
  }
  comm::Bootstrap& bootstrap = comm_.bootstrap();
  comm::agree(bootstrap, error, ErrorKind::kInvalidArgument);
  const std::vector<std::string> all =
      bootstrap.all_gather({reinterpret_cast<const char*>(mine.data()), 8 * mine.size()});
  for (int r = 1; r < ranks() && error.empty(); ++r) {
    if (all[r] == all[0]) continue;
    const size_t same = std::ranges::mismatch(all[r], all[0]).in1 - all[r].begin();
    const size_t b = same / 8;
    error = text(
        "gtp \"{}\": ranks 0 and {} share different bundles, from \"{}\" on: ids, names, "
        "shapes, buckets or places differ",
        name(), r, b < bundles.size() ? bundles[b].name : "the end");
  }
  comm::agree(bootstrap, error, ErrorKind::kInvalidArgument);
  bundles_ = std::move(bundles);
  on_shared();
  shared_ = true;
}

const SharedBundle& Transport::bundle(BundleId id) const {
  const auto found = std::ranges::lower_bound(bundles_, id, {}, &SharedBundle::id);
  MOIETY_CHECK(shared_ && found != bundles_.end() && found->id == id,
               "gtp \"{}\": bundle {} is not among the {} shared ones", name(), id,
               bundles_.size());
  return *found;
}

void Transport::check_gather(const GatherJob& job) const {
  check();
  const SharedBundle& b = bundle(job.bundle);
  MOIETY_CHECK(job.landing, "gtp gather: bundle \"{}\" has no landing", b.name);
  const GatherLayout& layout = job.landing->layout();
  const size_t members = layout.shape.members;
  MOIETY_CHECK(layout.shape.ranks == ranks() && members == b.members.size(),
               "gtp gather: the landing of bundle \"{}\" is for {} ranks and {} members, expected "
               "{} and {}",
               b.name, layout.shape.ranks, members, ranks(), b.members.size());
  for (const Plane& plane : layout.planes) {
    const TensorView& shard = b.members[0][static_cast<size_t>(plane.array)];
    MOIETY_CHECK(shard.defined() && shard.bytes() == plane.bytes,
                 "gtp gather: array {} of bundle \"{}\" is {}, expected {} bytes",
                 static_cast<int>(plane.array), b.name,
                 shard.defined() ? shard.describe() : "absent", plane.bytes);
  }
}

ReduceShape Transport::check_reduce(const ReduceJob& job) const {
  check();
  const SharedBundle& b = bundle(job.bundle);
  const auto members = static_cast<int64_t>(b.members.size());
  const TensorView& send = job.send;
  check_tensor("gtp reduce", "send", send, send.dtype(), {members, -1, -1});
  MOIETY_CHECK(send.contiguous() && send.size(1) % ranks() == 0 &&
                   static_cast<int64_t>(job.main_grads.size()) == members,
               "gtp reduce: bundle \"{}\" sends {} to {} main_grads, expected rows in {} equal "
               "parts without gaps and {} of them",
               b.name, send.describe(), job.main_grads.size(), ranks(), members);
  const ReduceShape shape{static_cast<int>(members), send.size(1) / ranks(), send.size(2),
                          send.dtype(), job.main_grads[0].dtype()};
  for (const TensorView& main : job.main_grads) {
    check_tensor("gtp reduce", "main_grad", main, shape.main, {shape.shard_rows, shape.cols});
  }
  const int64_t scratch = reduce_transfer(shape).scratch;
  MOIETY_CHECK(scratch == 0 || job.scratch.bytes() >= scratch,
               "gtp reduce: bundle \"{}\" has {} bytes of scratch, expected {}", b.name,
               job.scratch.bytes(), scratch);
  return shape;
}

std::string Transport::describe(const Subject& s) const {
  const std::string& of = bundle(s.bundle).name;
  if (s.action == Subject::Action::kGather) {
    const bool rows = s.detail & 1 << static_cast<int>(Array::kRowData);
    return text("gathers the {} view of bundle \"{}\", {} bytes", rows ? "row" : "column", of,
                s.bytes);
  }
  return text("reduces {}bundle \"{}\", {} bytes in {}",
              s.action == Subject::Action::kReduceRows ? "rows of " : "", of, s.bytes,
              moiety::name(static_cast<DType>(s.detail)));
}

void Transport::check_subjects(const std::string& operation, std::span<const Subject> subjects) {
  for (size_t r = 1; r < subjects.size(); ++r) {
    if (subjects[r] == subjects[0]) continue;
    fail_with(text("gtp \"{}\", {}: rank 0 {}; rank {} {}; expected the same on all ranks", name(),
                   operation, describe(subjects[0]), r, describe(subjects[r])));
  }
}

void Transport::add_chunks(const ReduceJob& job, const ReduceShape& s,
                           std::span<std::byte* const> chunks, int64_t stride) {
  std::vector<TensorView> of_member(chunks.size());
  for (int e = 0; e < s.members; ++e) {
    for (size_t j = 0; j < chunks.size(); ++j) {
      of_member[j] = TensorView(chunks[j] + e * stride, s.wire, {1, s.shard_rows, s.cols});
    }
    const TensorView& main = job.main_grads[e];
    const int64_t sizes[] = {1, s.shard_rows, s.cols};
    const int64_t strides[] = {s.shard_rows * main.stride(0), main.stride(0), main.stride(1)};
    accumulate(of_member, TensorView(main.raw(), s.main, sizes, strides), job.valid_rows, job.first,
               Stream());
  }
}

void Transport::check() const {
  if (!failure_.empty()) throw_error(ErrorKind::kComm, failure_);
}

void Transport::fail_with(const std::string& reason) {
  if (failure_.empty()) failure_ = reason;
  throw_error(ErrorKind::kComm, failure_);
}

std::unique_ptr<Transport> make_transport(comm::Communicator& comm, TransportOptions options,
                                          std::optional<TransportKind> wish) {
  const TransportKind kind = wish                   ? *wish
                             : comm::mappable(comm) ? TransportKind::kMapped
                                                    : TransportKind::kAllToAll;
  if (kind == TransportKind::kMapped) {
    return std::make_unique<MappedTransport>(comm, std::move(options));
  }
  return std::make_unique<CollectiveTransport>(comm, std::move(options), kind);
}

}  // namespace moiety::gtp
