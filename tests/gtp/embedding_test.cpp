// Embeddings over a cut table: both ways against a loop that is written from the definition.
#include "moiety/gtp/embedding.h"

#include <map>
#include <random>

#include "moiety/comm/thread_group.h"
#include "tests/gtp/transport_cases.h"

namespace moiety::gtp {
namespace {

constexpr int64_t kCapacity = 400, kCols = 20;

float at(const TensorView& x, int64_t i) {
  return x.dtype() == DType::kBFloat16 ? static_cast<float>(x.data<bf16>()[i]) : x.data<float>()[i];
}

// The tokens that the ranks of a group look up, and the gradients.
struct Batch {
  Layout layout;  // of rank 0
  DType storage;
  Tensor table;  // of the slice, [padded_rows, D]
  std::vector<std::vector<int32_t>> tokens;
  std::vector<Tensor> dout;

  Batch(const Layout& l, DType dtype, uint32_t seed)
      : layout(l), storage(dtype), table(dtype, {l.padded_rows(), l.cols}) {
    const TensorView real = table.view().slice(0, 0, l.real_rows());
    if (real.numel() > 0) quant::fill(real, quant::Data::kNormal, seed);
    std::mt19937 random(seed);
    // Ranks of unlike lengths; one without tokens, one that has a token 200 times.
    for (int r = 0; r < l.gtp_size; ++r) {
      const int64_t T = r == 1 ? 0 : r == 2 ? kCapacity : 33;
      auto& mine = tokens.emplace_back();
      for (int64_t t = 0; t < T; ++t) {
        mine.push_back(r == 2 && t % 2 == 0 ? 3 : static_cast<int32_t>(random() % l.rows));
      }
      Tensor& x = dout.emplace_back(dtype, std::initializer_list<int64_t>{T, l.cols});
      quant::fill(x, quant::Data::kNormal, seed + 10 + static_cast<uint32_t>(r));
    }
    // The borders of the cuts, and what is no token.
    const int64_t s = l.shard_rows();
    const int64_t last = l.rows - 1;
    const int64_t border[] = {
        0, s - 1, std::min(s, last), std::min(2 * s - 1, last), last, -1, l.rows, 1 << 30};
    for (int64_t i = 0; i < 8; ++i) tokens[0][20 + i] = static_cast<int32_t>(border[i]);
  }
  TensorView token_T(int r) const {
    return {const_cast<int32_t*>(tokens[r].data()),
            DType::kInt32,
            {static_cast<int64_t>(tokens[r].size())}};
  }
  Layout layout_of(int g) const {
    Layout out = layout;
    out.gtp_rank = g;
    return out;
  }
  // -1: the slice does not have it.
  int64_t row(int r, int64_t t) const {
    const int64_t row = tokens[r][t] - layout.tp_rank * layout.slice_rows();
    return tokens[r][t] < layout.rows && row >= 0 && row < layout.real_rows() ? row : -1;
  }
};

void expect_rows(const Batch& batch, int r, const TensorView& out, const std::string& what) {
  for (size_t t = 0; t < batch.tokens[r].size(); ++t) {
    const int64_t row = batch.row(r, t);
    for (int64_t d = 0; d < kCols; ++d) {
      const float want = row < 0 ? 0 : at(batch.table, row * kCols + d);
      ASSERT_EQ(at(out, t * kCols + d), want) << what << " token " << batch.tokens[r][t];
    }
  }
}

// The part that rank g adds to element (row, d) of the slice's table.
float sum_of(const Batch& batch, int64_t row, int64_t d) {
  float x = 0;
  for (int r = 0; r < batch.layout.gtp_size; ++r) {
    float of_rank = 0, block = 0;
    int64_t count = 0;
    for (size_t t = 0; t < batch.tokens[r].size(); ++t) {
      if (batch.row(r, t) != row) continue;
      block += at(batch.dout[r], t * kCols + d);
      if (++count % 64 == 0) of_rank += block, block = 0;
    }
    if (count % 64 != 0) of_rank += block;
    x = r == 0 ? of_rank : x + of_rank;
  }
  return x;
}

template <class Main>
void add_to(const Batch& batch, int g, const Tensor& main, bool first) {
  const Layout layout = batch.layout_of(g);
  const Range valid = layout.valid(g);
  for (int64_t i = 0; i < layout.shard_rows() * kCols; ++i) {
    const int64_t row = i / kCols;
    Main& m = main.data<Main>()[i];
    if (row >= valid.size()) {
      if (first) m = Main(0.0f);
      continue;
    }
    const float x = sum_of(batch, valid.begin + row, i % kCols);
    m = Main(first ? x : static_cast<float>(m) + x);
  }
}

// A rank's shard of the table in the transport's memory, and slots to send in.
struct RankMemory {
  RankMemory(MappedTransport& t, const Batch& batch) {
    const Layout& l = batch.layout;
    const int64_t shard = byte_size(batch.storage, l.shard_rows() * l.cols);
    weights = t.allocate("table", shard);
    const TensorView mine(weights.memory.raw(), batch.storage, {l.shard_rows(), l.cols});
    const auto* whole = static_cast<const std::byte*>(batch.table.view().raw());
    std::memcpy(mine.raw(), whole + t.rank() * shard, static_cast<size_t>(shard));
    SharedBundle bundle = bundle_without_shards(0, 1, false);
    bundle.members[0][0] = mine;
    t.share({bundle});
    t.publish(0, Stream());
    table_slot = t.allocate("table slot", 4 * l.padded_rows() * l.cols);
    rows_slot = t.allocate("rows slot", embedding_send_bytes(kCapacity, l.cols, batch.storage));
  }
  SlotArena::Block weights, table_slot, rows_slot;
};

void forward(MappedTransport& t, const Batch& batch, const std::string& what) {
  const int me = t.rank();
  const Layout layout = batch.layout_of(me);
  const int64_t T = static_cast<int64_t>(batch.tokens[me].size());
  Tensor by_rows(batch.storage, {T, kCols}), by_table(batch.storage, {T, kCols});
  Tensor faults(DType::kInt64, {3});
  embedding_lookup(t, 0, layout, batch.token_T(me), by_rows, faults, Stream());
  expect_rows(batch, me, by_rows, what + ", rows,");
  const int64_t* f = faults.data<int64_t>();
  const bool bad = me == 0;
  EXPECT_EQ(f[0], bad ? 3 : 0);
  EXPECT_EQ(f[1], bad ? 25 : 0);
  EXPECT_EQ(f[2], bad ? -1 : 0);
  embedding_lookup(layout, batch.table, batch.token_T(me), by_table, {}, Stream());
  EXPECT_EQ(difference("out", by_rows, by_table), "") << what;
  if (batch.storage != DType::kBFloat16) return;
  const GatherLayout gather =
      gather_layout({Codec(), layout.shard_rows(), kCols, t.ranks(), 1}, Payload::kRow, kRowView);
  const Poisoned slot(gather.slot_bytes);
  const Landing landing(gather, slot.view(), {});
  t.gather({0, &landing}, Stream());
  landing.finish(Stream());
  embedding_lookup(layout, landing.data(0), batch.token_T(me), by_table, {}, Stream());
  EXPECT_EQ(difference("out", by_rows, by_table), "") << what;
}

// Both paths, overwriting and then adding.
void backward(MappedTransport& t, RankMemory& memory, const Batch& batch, const std::string& what) {
  const int me = t.rank();
  const Layout layout = batch.layout_of(me);
  const auto sizes = {layout.shard_rows(), kCols};
  Tensor by_rows(DType::kFloat32, sizes), by_table(DType::kFloat32, sizes),
      want(DType::kFloat32, sizes), in_bf16(DType::kBFloat16, sizes),
      want_bf16(DType::kBFloat16, sizes);
  Tensor workspace(DType::kInt64, {t.ranks() * kCapacity});
  const TensorView send(memory.table_slot.memory.raw(), DType::kFloat32,
                        {layout.padded_rows(), kCols});
  for (const bool first : {true, false}) {
    embedding_send(layout, batch.dout[me], batch.token_T(me), kCapacity, memory.rows_slot.memory,
                   Stream());
    EmbeddingReduceJob job{.bundle = 0,
                           .layout = layout,
                           .capacity = kCapacity,
                           .dout = batch.storage,
                           .send = memory.rows_slot.memory,
                           .main_grad = by_rows,
                           .first = first,
                           .workspace = workspace};
    embedding_reduce(t, job, Stream());
    job.main_grad = in_bf16;
    embedding_reduce(t, job, Stream());

    std::memset(send.raw(), 0xFF, static_cast<size_t>(send.bytes()));
    embedding_gradient(layout, batch.dout[me], batch.token_T(me), send,
                       workspace.view().slice(0, 0, batch.token_T(me).size(0)), Stream());
    t.reduce({.bundle = 0,
              .send = send.reshape({1, layout.padded_rows(), kCols}),
              .scratch = {},
              .main_grads = {by_table},
              .valid_rows = layout.valid(me).size(),
              .first = first},
             Stream());
    t.await_readers(false, Stream());
    add_to<float>(batch, me, want, first);
    add_to<bf16>(batch, me, want_bf16, first);
    EXPECT_EQ(difference("rows", by_rows, want), "") << what << " first " << first;
    EXPECT_EQ(difference("table", by_table, want), "") << what << " first " << first;
    EXPECT_EQ(difference("bf16", in_bf16, want_bf16), "") << what << " first " << first;
    // A minus zero is where nothing is added to; both ways make it plus zero.
    for (const Tensor* main : {&by_rows, &by_table, &want}) {
      if (layout.valid(me).size() > 0) main->data<float>()[kCols] = -0.0f;
    }
  }
}

TEST(Embedding, RowsAndTableAreTheDefinition) {
  struct Case {
    int64_t vocabulary;
    int ranks, tp_rank, tp_size;
  };
  // Several shards and a short last one; a whole number; all padding but on one rank; slices of
  // TP, of which the last has few rows.
  for (const Case& c : {Case{50, 4, 0, 1}, Case{96, 3, 0, 1}, Case{16, 4, 0, 1}, Case{32, 1, 0, 1},
                        Case{150, 3, 0, 2}, Case{150, 3, 1, 2}, Case{100, 2, 3, 4}}) {
    for (const DType storage : {DType::kFloat32, DType::kBFloat16}) {
      Layout layout{.rows = c.vocabulary, .cols = kCols, .gtp_size = c.ranks, .align = 16};
      if (c.tp_size > 1) {
        layout.tp_axis = 0, layout.vocabulary = true;
        layout.tp_rank = c.tp_rank, layout.tp_size = c.tp_size;
      }
      const Batch batch(layout, storage, 7);
      const std::string what = text("V {} G {} tp {} of {} {}", c.vocabulary, c.ranks, c.tp_rank,
                                    c.tp_size, name(storage));
      run_threads(c.ranks, [&](comm::Communicator& world) {
        MappedTransport transport(world, {});
        RankMemory memory(transport, batch);
        forward(transport, batch, what);
        backward(transport, memory, batch, what);
        transport.drain(Stream());
        transport.await_drained(Stream());
      });
    }
  }
}

TEST(Embedding, CountsOnlyWhatCameFromPeers) {
  const Batch batch({.rows = 50, .cols = kCols, .gtp_size = 3, .align = 16}, DType::kBFloat16, 3);
  run_threads(3, [&](comm::Communicator& world) {
    const int me = world.rank();
    MappedTransport t(world, {});
    RankMemory memory(t, batch);
    const int64_t T = batch.token_T(me).size(0);
    Tensor out(DType::kBFloat16, {T, kCols}), workspace(DType::kInt64, {3 * kCapacity}),
        main(DType::kFloat32, {batch.layout.shard_rows(), kCols});
    embedding_lookup(t, 0, batch.layout_of(me), batch.token_T(me), out, {}, Stream());
    embedding_send(batch.layout_of(me), batch.dout[me], batch.token_T(me), kCapacity,
                   memory.rows_slot.memory, Stream());
    embedding_reduce(t,
                     {.bundle = 0,
                      .layout = batch.layout_of(me),
                      .capacity = kCapacity,
                      .dout = batch.storage,
                      .send = memory.rows_slot.memory,
                      .main_grad = main,
                      .first = true,
                      .workspace = workspace},
                     Stream());
    int64_t gathered = 0, reduced = 0;
    const Range own = batch.layout.valid(me);
    for (int r = 0; r < 3; ++r) {
      if (r != me) reduced += 4 * batch.token_T(r).size(0);
      for (int64_t t2 = 0; t2 < batch.token_T(r).size(0); ++t2) {
        const int64_t row = batch.row(r, t2);
        const bool mine = row >= own.begin && row < own.end;
        if (r == me && row >= 0 && !mine) gathered += 2 * kCols;
        if (r != me && mine) reduced += 2 * kCols;
      }
    }
    EXPECT_EQ(t.received().gathered, gathered);
    EXPECT_EQ(t.received().reduced, reduced);
    world.barrier();
  });
}

TEST(Embedding, IsChosenByBytes) {
  const Layout layout{.rows = 32000, .cols = 1024, .gtp_size = 4, .align = 16};
  const EmbeddingTraffic few = embedding_traffic(layout, 4096, DType::kBFloat16, DType::kFloat32);
  EXPECT_EQ(few.table, int64_t{3} * 8000 * 1024 * 6);
  EXPECT_EQ(few.rows, int64_t{3} * 4096 * (512 + 2048 + 4));
  EXPECT_EQ(few.smaller(), EmbeddingPath::kRows);
  const BundleSpec::Rows rows = embedding_rows(layout, 4096, DType::kBFloat16);
  EXPECT_EQ(rows.lookup + rows.reduce.received, few.rows);
  EXPECT_EQ(rows.reduce.slot, 64 + 4096 * (4 + 2048));
  EXPECT_EQ(rows.reduce.scratch, 4 * 4096 * 8);
  const EmbeddingTraffic many = embedding_traffic(layout, 65536, DType::kBFloat16, DType::kFloat32);
  EXPECT_EQ(many.smaller(), EmbeddingPath::kTable);
  EXPECT_STREQ(name(many.smaller()), "table");
}

TEST(Embedding, BadTokensAreReportedOnce) {
  const Layout layout{.rows = 10, .cols = 4, .align = 16};
  Tensor table(DType::kFloat32, {16, 4}), out(DType::kFloat32, {4, 4}), faults(DType::kInt64, {3});
  std::vector<int32_t> tokens{3, 10, 2, -7};
  const TensorView token_T(tokens.data(), DType::kInt32, {4});
  EXPECT_EQ(kind_and_error_of([&] { check_tokens(layout, faults); }), "no error");
  for (int i = 0; i < 2; ++i) embedding_lookup(layout, table, token_T, out, faults, Stream());
  EXPECT_EQ(
      kind_and_error_of([&] { check_tokens(layout, faults); }),
      "invalid argument: embedding: token 10 at position 1 is outside the vocabulary of 10 (4 "
      "such)");
  EXPECT_EQ(kind_and_error_of([&] {
              embedding_lookup(layout, table, token_T, out.view().slice(0, 0, 3), {}, Stream());
            }),
            "invalid argument: gtp embedding: out is float32[3, 4], expected float32[4, 4]");
}

// The cases are rows from one rank and the whole from the other, of one table; then rows of other
// capacities.
TEST(Embedding, RanksThatReduceInOtherWays) {
  const Batch batch({.rows = 50, .cols = kCols, .gtp_size = 2, .align = 16}, DType::kFloat32, 3);
  const Layout& cut = batch.layout;
  const int64_t table_bytes = cut.padded_rows() * kCols * 4;
  for (const bool same_way : {false, true}) {
    run_threads(2, [&](comm::Communicator& world) {
      const int me = world.rank();
      MappedTransport t(world, {.name = "gtp"});
      RankMemory memory(t, batch);
      Tensor main(DType::kFloat32, {cut.shard_rows(), kCols}),
          workspace(DType::kInt64, {2 * kCapacity});
      std::fill_n(main.data<float>(), main.view().numel(), 5.0f);
      const int64_t capacity = me == 1 ? kCapacity - 16 : kCapacity;
      const int64_t bytes = embedding_send_bytes(capacity, kCols, DType::kFloat32);
      const std::string error = kind_and_error_of([&] {
        if (me == 1 && !same_way) {
          const TensorView send(memory.table_slot.memory.raw(), DType::kFloat32,
                                {1, cut.padded_rows(), kCols});
          return t.reduce({.bundle = 0,
                           .send = send,
                           .scratch = {},
                           .main_grads = {main},
                           .valid_rows = cut.valid(me).size(),
                           .first = true},
                          Stream());
        }
        embedding_reduce(t,
                         {.bundle = 0,
                          .layout = batch.layout_of(me),
                          .capacity = capacity,
                          .dout = batch.storage,
                          .send = memory.rows_slot.memory.slice(0, 0, bytes),
                          .main_grad = main,
                          .first = true,
                          .workspace = workspace.view().slice(0, 0, 2 * capacity)},
                         Stream());
      });
      EXPECT_EQ(
          error,
          text("communication: gtp \"gtp\", reduce 1 on lane \"dense reduce\": rank 0 reduces "
               "rows of bundle \"bundle 0\", {} bytes in float32; rank 1 reduces {}bundle "
               "\"bundle 0\", {} bytes in float32; expected the same on all ranks",
               embedding_send_bytes(kCapacity, kCols, DType::kFloat32), same_way ? "rows of " : "",
               same_way ? embedding_send_bytes(kCapacity - 16, kCols, DType::kFloat32)
                        : table_bytes));
      for (int64_t i = 0; i < main.view().numel(); ++i) ASSERT_EQ(main.data<float>()[i], 5.0f);
    });
  }
}

TEST(Embedding, APeerThatSendsNothing) {
  const Batch batch({.rows = 50, .cols = kCols, .gtp_size = 2, .align = 16}, DType::kBFloat16, 3);
  comm::run_thread_ranks(2, {.deadline = Seconds(0.3)}, [&](comm::Communicator& world) {
    MappedTransport t(world, {.name = "gtp", .deadline = Seconds(0.3)});
    RankMemory memory(t, batch);
    if (world.rank() == 1) return;
    Tensor main(DType::kFloat32, {batch.layout.shard_rows(), kCols}),
        workspace(DType::kInt64, {2 * kCapacity});
    std::fill_n(main.data<float>(), main.view().numel(), 5.0f);
    EXPECT_EQ(
        kind_and_error_of([&] {
          embedding_reduce(t,
                           {.bundle = 0,
                            .layout = batch.layout_of(0),
                            .capacity = kCapacity,
                            .dout = batch.storage,
                            .send = memory.rows_slot.memory,
                            .main_grad = main,
                            .first = true,
                            .workspace = workspace},
                           Stream());
        }),
        "communication: gtp \"gtp\", E4 of reduce 1 on lane \"dense reduce\", bundle \"bundle "
        "0\": rank 0 waited 0.3 s for rank 1 (produced at 0, expected 1)");
    for (int64_t i = 0; i < main.view().numel(); ++i) ASSERT_EQ(main.data<float>()[i], 5.0f);
  });
}

}  // namespace
}  // namespace moiety::gtp
