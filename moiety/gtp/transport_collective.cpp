#include "moiety/gtp/transport_collective.h"

#include <algorithm>

#include "moiety/base/error.h"

namespace moiety::gtp {
namespace {

constexpr int64_t kPage = 4096;

int64_t shard_bytes(const ReduceShape& s) { return byte_size(s.wire, s.shard_rows * s.cols); }

}  // namespace

SlotArena::Block CollectiveTransport::allocate(const std::string& what, int64_t bytes) {
  auto buffer = std::make_shared<Buffer>(bytes, what.c_str(), kPage);
  return {buffer->view(DType::kUInt8, {bytes}), buffer};
}

// An operation under way. The subjects of the ranks travel first, so that their difference is the
// error and not its consequences.
struct CollectiveTransport::Pending {
  std::vector<Subject> subjects;  // the own one, then all, by rank
  Tickets tickets;                // for the subjects, then for the operations
  std::string error;              // the first error

  TensorView bytes(size_t begin, size_t end) {
    return {
        &subjects[begin], DType::kUInt8, {static_cast<int64_t>((end - begin) * sizeof(Subject))}};
  }
  std::span<const Subject> of_ranks() const { return std::span(subjects).subspan(1); }
  bool as_long() const {
    return std::ranges::all_of(subjects,
                               [&](const Subject& s) { return s.bytes == subjects[0].bytes; });
  }
  bool complete(comm::Ticket& ticket) {
    try {
      ticket.wait();
      return true;
    } catch (const Error& e) {
      if (error.empty()) error = e.what();
      return false;
    }
  }
};

void CollectiveTransport::run(const char* operation, const Subject& subject, const Stream& lane,
                              const std::function<void(Tickets&)>& issue,
                              std::function<void()> then) {
  const SharedBundle& b = bundle(subject.bundle);
  const uint64_t number = ++operations_;
  const std::string label =
      text("gtp \"{}\", {} {} on lane \"{} {}\", bundle \"{}\"", name(), operation, number,
           b.expert ? "expert" : "dense", operation, b.name);
  const auto pending = std::make_shared<Pending>();
  pending->subjects.assign(static_cast<size_t>(1 + ranks()), subject);
  try {
    pending->tickets.push_back(
        comm_.all_gather(pending->bytes(0, 1), pending->bytes(1, pending->subjects.size()), lane));
    issue(pending->tickets);
  } catch (const Error& e) {
    if (e.kind() != ErrorKind::kComm) throw;
    pending->error = e.what();
  }
  lane.run([=, this, then = std::move(then)] {
    check();
    bool told = false;
    for (comm::Ticket& ticket : pending->tickets) {
      const WaitSpan span(axis(), operation);
      const bool complete = pending->complete(ticket);
      if (!complete || &ticket != pending->tickets.data()) continue;
      told = true;
      // A rank that moves less has fewer collectives, and would leave others waiting in theirs.
      if (!pending->as_long())
        comm_.bootstrap().abort(text("{}: the ranks move other bytes", label));
    }
    if (told) check_subjects(text("operation {}", number), pending->of_ranks());
    if (!pending->error.empty()) fail_with(text("{}: {}", label, pending->error));
    then();
  });
}

void CollectiveTransport::gather(const GatherJob& job, const Stream& lane) {
  check_gather(job);
  const auto issue = [&](Tickets& tickets) {
    const auto& members = bundle(job.bundle).members;
    for (const Plane& plane : job.landing->layout().planes) {
      const TensorView parts = job.landing->part(plane, 0);
      for (size_t e = 0; e < members.size(); ++e) {
        const TensorView& shard = members[e][static_cast<size_t>(plane.array)];
        auto* to = static_cast<std::byte*>(parts.raw()) + static_cast<int64_t>(e) * parts.stride(0);
        tickets.push_back(comm_.all_gather(TensorView(shard.raw(), DType::kUInt8, {plane.bytes}),
                                           TensorView(to, DType::kUInt8, {ranks() * plane.bytes}),
                                           lane));
      }
    }
  };
  const int64_t bytes = job.landing->layout().received();
  run("gather", subject_of(job), lane, issue, [this, bytes] { received_.gathered += bytes; });
}

// Whether the library's sum is taken: on a ring, and where it is one addition and so has the bits
// of any other.
bool CollectiveTransport::scatters(const ReduceShape& s) const {
  return kind_ == TransportKind::kRing || (ranks() == 2 && s.wire == DType::kFloat32);
}

BundleSpec::Transfer CollectiveTransport::reduce_transfer(const ReduceShape& s) const {
  MOIETY_CHECK(kind_ != TransportKind::kRing || s.wire == s.main,
               "gtp \"{}\": a ring cannot send {} for a main_grad in {}: it rounds every sum",
               name(), moiety::name(s.wire), moiety::name(s.main));
  const int64_t shards = s.members * shard_bytes(s);
  return {shards * (ranks() - 1), shards * ranks(), scatters(s) ? shards : shards * ranks()};
}

void CollectiveTransport::reduce(const ReduceJob& job, const Stream& lane) {
  const ReduceShape shape = check_reduce(job);
  const int64_t G = ranks(), s = shape.shard_rows, K = shape.cols, shard = shard_bytes(shape);
  const bool scatter = scatters(shape);
  auto* const scratch = static_cast<std::byte*>(job.scratch.raw());
  const auto issue = [&](Tickets& tickets) {
    const std::vector<int64_t> counts(static_cast<size_t>(G), s);
    for (int e = 0; e < shape.members; ++e) {
      const TensorView send = job.send.select(e);
      if (scatter) {
        const TensorView sum(scratch + e * shard, shape.wire, {s * K});
        tickets.push_back(
            comm_.reduce_scatter(send.reshape({G * s * K}), sum, comm::ReduceOp::kSum, lane));
      } else {
        const TensorView parts(scratch + e * G * shard, shape.wire, {G * s, K});
        tickets.push_back(comm_.all_to_all(send, counts, parts, counts, lane));
      }
    }
  };
  run("reduce", subject_of(job), lane, issue, [=, this] {
    std::vector<std::byte*> chunks;
    for (int64_t j = 0; j < (scatter ? 1 : G); ++j) chunks.push_back(scratch + j * shard);
    add_chunks(job, shape, chunks, scatter ? shard : G * shard);
    received_.reduced += shape.members * shard * (G - 1);
  });
}

}  // namespace moiety::gtp
