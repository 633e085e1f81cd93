#include "moiety/gtp/race.h"

#include <algorithm>
#include <map>
#include <vector>

#include "moiety/base/format.h"
#include "moiety/gtp/plan_stages.h"

namespace moiety::gtp {
namespace {

using Clock = std::vector<int32_t>;

void join(Clock& into, const Clock& from) {
  for (size_t i = 0; i < into.size(); ++i) into[i] = std::max(into[i], from[i]);
}

// The accesses of a piece of memory that a later access has to be behind.
struct Place {
  int32_t writer = kNone, written = 0;  // stream of the last write, and its time
  Clock read;                           // by stream: the latest read since the write
};

// An event of the plan, as it was last recorded on one stream.
struct Mark {
  Clock clock;
  int32_t segment = 0;
};

class Replay {
 public:
  Replay(const Plan& plan, std::span<const TraceEvent> trace, const RaceModel& model)
      : plan_(plan), time_(trace), model_(model) {
    for (const int32_t s : model.streams) callers_ = std::max(callers_, s + 1);
    lanes_ = static_cast<int32_t>(plan.lanes.size());
    for (const TraceEvent& e : trace) bundles_ = std::max(bundles_, e.bundle + 1);
    const int32_t streams = optimizer() + 1;
    clocks_.assign(streams, Clock(streams, 0));
    const Place untouched{.read = Clock(streams, 0)};
    slots_.assign(plan.slots.size(), untouched);
    shards_.assign(bundles_, untouched);
    grads_.assign(bundles_, untouched);
    marks_.resize(plan.events);
    published_.resize(bundles_);
  }

  std::optional<Race> run() {
    publish([](BundleId) { return true; });
    for (step_ = 0; step_ < 2; ++step_) {
      occupant_.assign(plan_.slots.size(), kNone);
      added_.assign(bundles_, kNone);
      consumed_.assign(bundles_, false);
      for (at_ = 0; at_ < plan_.positions && !race_; ++at_) call();
      if (race_) break;
    }
    return race_;
  }

 private:
  // ---- streams

  int32_t lane(int32_t l) const { return callers_ + l; }
  int32_t peer(int32_t l) const { return callers_ + lanes_ + l; }
  int32_t peer_caller() const { return callers_ + 2 * lanes_; }
  int32_t optimizer() const { return peer_caller() + 1; }
  int32_t caller(int32_t p) const { return model_.streams.empty() ? 0 : model_.streams[p]; }
  bool has(Edge edge) const { return model_.without != edge; }

  // Puts everything that `stream` does from now on behind everything that `other` has done.
  void follow(int32_t stream, int32_t other) { join(clocks_[stream], clocks_[other]); }
  void follow_edge(Edge edge, int32_t stream, int32_t other) {
    if (has(edge)) follow(stream, other);
  }
  void wait_published(int32_t stream, BundleId b) {
    if (has(Edge::kPublished)) join(clocks_[stream], published_[b]);
  }
  void record(int32_t event, int32_t stream) {
    marks_[event][stream] = {clocks_[stream], time_.segment[at_]};
  }
  // An event that is internal to a graph orders nothing in another graph.
  void wait(Edge edge, int32_t stream, int32_t event) {
    if (!has(edge)) return;
    for (const auto& [recorded_on, mark] : marks_[event]) {
      if (event >= plan_.external || mark.segment == time_.segment[at_]) {
        join(clocks_[stream], mark.clock);
      }
    }
  }

  // ---- memory

  template <class... What>
  void fault(std::string_view format, const What&... what) {
    if (!race_) race_ = Race{step_, at_, text(format, what...)};
  }
  template <class... What>
  void read(Place& place, int32_t stream, std::string_view what, BundleId b) {
    Clock& clock = clocks_[stream];
    if (place.writer != kNone && clock[place.writer] < place.written) {
      fault("{} of bundle {} is read before it is written", what, b);
    }
    place.read[stream] = ++clock[stream];
  }
  void write(Place& place, int32_t stream, std::string_view what, BundleId b) {
    Clock& clock = clocks_[stream];
    if (place.writer != kNone && clock[place.writer] < place.written) {
      fault("{} of bundle {} is overwritten before it is written", what, b);
    }
    for (size_t s = 0; s < clock.size(); ++s) {
      if (clock[s] < place.read[s])
        fault("{} of bundle {} is overwritten before it is read", what, b);
    }
    place.writer = stream;
    place.written = ++clock[stream];
    std::fill(place.read.begin(), place.read.end(), 0);
  }

  // ---- the step

  template <class Updated>
  void publish(Updated&& updated) {
    for (BundleId b = 0; b < bundles_; ++b) {
      if (!updated(b)) continue;
      write(shards_[b], optimizer(), "a shard", b);
      published_[b] = clocks_[optimizer()];
    }
  }

  void call() {
    const TraceEvent& e = time_.call(at_)[0];
    const int32_t stream = caller(at_);
    if (at_ > 0) record_reads(at_ - 1);
    if (e.kind == Kind::kBegin) begin(stream);
    if (is_consume(e.kind)) wait_for_weights(stream);
    if (e.kind == Kind::kRows) read_rows(e.bundle, stream);
    if (begins_gradient(e.kind)) grad_buffer(plan_.reduces[plan_.reduce_at[at_]], stream);
    if (ends_gradient(e.kind)) reduce(plan_.reduces[plan_.reduce_at[at_]], stream);
    for (const int32_t g : plan_.issues[at_]) issue(g);
    if (is_consume(e.kind)) read_weights(stream);
    if (e.kind == Kind::kFlush) flush(stream);
  }

  void begin(int32_t stream) {
    for (int32_t s = 0; s < callers_; ++s) follow(s, stream);
    for (int32_t l = 0; l < lanes_; ++l) follow_edge(Edge::kBegun, lane(l), stream);
  }

  void record_reads(int32_t p) {
    for (const int32_t g : plan_.waits[p]) {
      if (plan_.gathers[g].read_event != kNone) record(plan_.gathers[g].read_event, caller(p));
    }
  }

  void wait_for_weights(int32_t stream) {
    for (const int32_t g : plan_.waits[at_]) {
      wait(Edge::kReady, stream, plan_.gathers[g].ready_event);
    }
  }

  void read_weights(int32_t stream) {
    std::vector<BundleId> gathered;
    for (const int32_t g : plan_.waits[at_]) {
      const Gather& gather = plan_.gathers[g];
      gathered.push_back(gather.bundle);
      if (occupant_[gather.slot] != g) {
        fault("the slot of bundle {} holds gather {}, expected {}", gather.bundle,
              occupant_[gather.slot], g);
      }
      read(slots_[gather.slot], stream, "the slot", gather.bundle);
    }
    for (const TraceEvent& e : time_.call(at_)) {
      consumed_[e.bundle] = true;
      if (std::find(gathered.begin(), gathered.end(), e.bundle) != gathered.end()) continue;
      wait_published(stream, e.bundle);
      read(shards_[e.bundle], stream, "the shard", e.bundle);
    }
  }

  // Reads in the own shard and the peers'; peers do the same.
  void read_rows(BundleId b, int32_t stream) {
    consumed_[b] = true;
    for (const int32_t s : {stream, peer_caller()}) {
      wait_published(s, b);
      read(shards_[b], s, "the shard, by rows,", b);
    }
  }

  void issue(int32_t g) {
    const Gather& gather = plan_.gathers[g];
    const int32_t on = lane(gather.lane), peers = peer(gather.lane);
    const int32_t before = occupant_[gather.slot];
    if (before != kNone && plan_.gathers[before].read_event != kNone) {
      wait(Edge::kRead, on, plan_.gathers[before].read_event);
    }
    if (gather.publishes) {
      wait_published(on, gather.bundle);
      wait_published(peers, gather.bundle);
    }
    read(shards_[gather.bundle], on, "the shard", gather.bundle);
    read(shards_[gather.bundle], peers, "the shard, by a peer,", gather.bundle);
    write(slots_[gather.slot], on, "the slot", gather.bundle);
    occupant_[gather.slot] = g;
    record(gather.ready_event, on);
  }

  void grad_buffer(const Reduce& r, int32_t stream) {
    if (!consumed_[r.bundle]) wait_published(stream, r.bundle);
    const bool in_place = r.lane == kNone;
    int32_t& occupant = in_place ? added_[r.bundle] : occupant_[r.slot];
    if (occupant != kNone && plan_.reduces[occupant].event != kNone) {
      wait(Edge::kSent, stream, plan_.reduces[occupant].event);
    }
    occupant = plan_.reduce_at[at_];
    write(in_place ? grads_[r.bundle] : slots_[r.slot], stream,
          in_place ? "main_grad" : "the send slot", r.bundle);
  }

  void reduce(const Reduce& r, int32_t stream) {
    const int32_t on = r.lane == kNone ? stream : lane(r.lane);
    if (r.lane != kNone) {
      if (occupant_[r.slot] != plan_.reduce_at[at_]) {
        fault("the send slot of bundle {} holds another gradient", r.bundle);
      }
      follow_edge(Edge::kGradient, on, stream);
      // The transport's own order: peers read when this rank has produced, and it continues when
      // they have consumed.
      follow(peer(r.lane), on);
      read(slots_[r.slot], peer(r.lane), "the send slot, by a peer,", r.bundle);
      read(slots_[r.slot], on, "the send slot", r.bundle);
      follow(on, peer(r.lane));
      write(grads_[r.bundle], on, "main_grad", r.bundle);
    }
    if (r.event != kNone) record(r.event, on);
    if (!r.last) return;
    follow_edge(Edge::kAccumulated, optimizer(), on);
    read(grads_[r.bundle], optimizer(), "main_grad", r.bundle);
  }

  void flush(int32_t stream) {
    for (int32_t s = 0; s < callers_; ++s) follow(stream, s);
    for (int32_t l = 0; l < lanes_; ++l) {
      follow_edge(Edge::kFlushed, stream, lane(l));
      follow_edge(Edge::kFlushed, optimizer(), peer(l));
    }
    follow_edge(Edge::kFlushed, optimizer(), peer_caller());
    follow_edge(Edge::kFlushed, optimizer(), stream);
    std::vector<bool> trained(bundles_);
    for (const Reduce& r : plan_.reduces) trained[r.bundle] = true;
    publish([&](BundleId b) { return trained[b]; });
    for (int32_t s = 0; s < callers_; ++s) follow(s, stream);
  }

  const Plan& plan_;
  const Timeline time_;
  const RaceModel& model_;
  int32_t callers_ = 1, lanes_ = 0;
  BundleId bundles_ = 0;
  std::vector<Clock> clocks_;
  std::vector<Place> slots_, shards_, grads_;
  std::vector<std::map<int32_t, Mark>> marks_;  // by event and stream
  std::vector<Clock> published_;                // E1, by bundle
  std::vector<int32_t> occupant_;               // gather or reduce in a slot, in this step
  std::vector<int32_t> added_;                  // the latest reduce of a bundle, in this step
  std::vector<bool> consumed_;                  // by bundle, in this step
  int32_t step_ = 0, at_ = 0;
  std::optional<Race> race_;
};

}  // namespace

std::optional<Race> find_race(const Plan& plan, std::span<const TraceEvent> trace,
                              const RaceModel& model) {
  return Replay(plan, trace, model).run();
}

}  // namespace moiety::gtp
