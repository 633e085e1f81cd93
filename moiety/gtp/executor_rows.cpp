// Calls that move rows of a table instead of the table.
#include "moiety/base/error.h"
#include "moiety/gtp/embedding.h"
#include "moiety/gtp/executor_impl.h"

namespace moiety::gtp {

MappedTransport& Executor::Impl::rows_transport(const char* call, BundleId b) const {
  MOIETY_CHECK(specs_[b].rows.tokens > 0, "gtp executor: {} of bundle {}, whose rows do not move",
               call, bundles_[b].name);
  // BundleLayout has checked this
  return static_cast<MappedTransport&>(*transports_[specs_[b].group]);
}

void Executor::Impl::look_up(BundleId b, TensorView token_T, TensorView out_TD, TensorView faults,
                             Work work, const Stream& stream) {
  const Call call(*this);
  const BundleLayout& layout = checked("look_up", b);
  MappedTransport& transport = rows_transport("look_up", b);
  const BundleId ids[] = {b};
  enter(Kind::kRows, ids, work);
  see(stream);
  publish(b, stream);
  embedding_lookup(transport, b, layout.layout(), token_T, out_TD, faults, stream);
  rows_read_.record(stream);
  StepCounts::Moved& count = moved(b);
  ++count.lookups;
  count.gathered += specs_[b].rows.lookup;
  if (planned()) issue(at_);
}

void Executor::Impl::add_rows(BundleId b, TensorView token_T, TensorView dout_TD, Work work,
                              const Stream& stream) {
  const Call call(*this);
  const BundleLayout& layout = checked("add_rows", b);
  rows_transport("add_rows", b);
  open_gradient("add_rows", b, Kind::kRowsGrad, work, stream);
  embedding_send(layout.layout(), dout_TD, token_T, specs_[b].rows.tokens, row_send(b), stream);
  end_gradient(b, stream);
}

// The slot may be larger than needed.
TensorView Executor::Impl::row_send(BundleId b) const {
  return steps_[b].send.memory.slice(0, 0, specs_[b].rows.reduce.slot);
}

void Executor::Impl::send_rows(BundleId b, bool first, TensorView scratch, ExecutorLane& lane) {
  const BundleLayout& layout = layouts_[b];
  const int64_t capacity = specs_[b].rows.tokens;
  embedding_reduce(rows_transport("add_rows", b),
                   {.bundle = b,
                    .layout = layout.layout(),
                    .capacity = capacity,
                    .dout = layout.storage(),
                    .send = row_send(b),
                    .main_grad = layout.main_grads()[0],
                    .first = first,
                    .workspace = {scratch.raw(), DType::kInt64, {layout.ranks() * capacity}}},
                   lane.stream);
}

}  // namespace moiety::gtp
