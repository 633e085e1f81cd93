// Training with an embedding that gtp cuts and of which rows travel: the bits of the table, and
// what is planned and counted.
#include <atomic>

#include "moiety/model/step_trace.h"
#include "moiety/train/evaluation.h"
#include "tests/apps/train_rank.h"

namespace moiety::app {
namespace {

using namespace train;

using gtp::EmbeddingPath;

struct Cut {
  const char* name;
  int ranks = 1, tp = 1, gtp = 1, ep = 1, egtp = 1;
};
constexpr Cut kGtp2{"gtp2", 2, 1, 2}, kGtp3{"gtp3", 3, 1, 3}, kTp2Gtp2{"tp2.gtp2", 4, 2, 2, 2, 2};

// A step is 12 sequences in two micro-steps. The vocabulary fills no shard, and of tp's slices not
// the last one.
Arguments rows_model(const Cut& c, const Arguments& more = {}) {
  return tiny("r", c.ranks, c.ep) +
         Arguments{text("--parallel.tp={}", c.tp),
                   text("--parallel.gtp={}", c.gtp),
                   text("--parallel.egtp={}", c.egtp),
                   text("--train.micro_batch={}", 6 * c.tp / c.ranks),
                   "--train.global_batch=12",
                   "--model.kv_heads=4",
                   "--model.vocab=299"} +
         more;
}

const optim::Parameter& embedding_of(Rank& rank) {
  for (const optim::Parameter& p : rank.optimizer.parameters()) {
    if (p.spec.name == "embed.weight") return p;
  }
  throw std::out_of_range("embed.weight");
}
bool moves_rows(Rank& rank) {
  return rank.gathering.executor()->bundle(embedding_of(rank).bundle).rows.tokens > 0;
}

// Everything that some steps leave on the ranks, and the loss of an evaluation.
struct Trained {
  std::vector<std::vector<char>> state;  // by rank
  std::vector<double> reports;           // of rank 0
  gtp::StepCounts counts;                // of its last step
};

Trained train_by(const Arguments& arguments, EmbeddingPath path, bool planned = true) {
  Trained out;
  out.state.resize(options_of(arguments).run.ranks);
  const auto body = [&](Rank& rank) {
    EXPECT_EQ(moves_rows(rank), path == EmbeddingPath::kRows);
    const int me = rank.model.world().rank();
    for (int64_t k = 0; k < 4; ++k) {
      const optim::StepReport r = rank.step(k, planned ? "train" : text("train {}", k));
      if (me > 0) continue;
      out.reports.insert(out.reports.end(), r.losses.begin(), r.losses.end());
      out.reports.push_back(r.norm);
    }
    const gtp::ExecutorCounts& counts = rank.gathering.executor()->counts();
    EXPECT_EQ(counts.planned, planned ? 3 : 0);
    EXPECT_EQ(counts.departures, 0);
    if (me == 0) out.counts = counts.step;
    for (const optim::StatePiece& p : rank.optimizer.state_view()) {
      int64_t elements = 1;
      for (int d = 0; d < p.box.rank; ++d) elements *= p.box.size[d];
      const auto* data = static_cast<const char*>(p.data);
      out.state[me].insert(out.state[me].end(), data, data + byte_size(p.dtype, elements));
    }
  };
  run_ranks(arguments, body, path);
  return out;
}

// Weights and moments, too: every bit of what is trained.
TEST(EmbeddingRows, TrainAsTheTableDoes) {
  struct Case {
    Cut cut;
    Arguments more;
  };
  for (const Case& c :
       {Case{kGtp2, {}}, Case{kGtp2, {"--precision.recipe=bf16", "--memory.recompute=full"}},
        Case{kGtp3, {"--model.tie_embeddings"}},
        Case{kTp2Gtp2, {"--precision.recipe=nvfp4", "--memory.recompute=moe"}},
        Case{kTp2Gtp2, {"--model.tie_embeddings"}}}) {
    const Arguments arguments = rows_model(c.cut, c.more);
    SCOPED_TRACE(text("{} {}", c.cut.name, c.more.empty() ? "" : c.more[0]));
    const Trained table = train_by(arguments, EmbeddingPath::kTable);
    const Trained rows = train_by(arguments, EmbeddingPath::kRows);
    EXPECT_EQ(rows.reports, table.reports);
    EXPECT_TRUE(rows.state == table.state);
    EXPECT_EQ(table.counts.dense.lookups, 0);
    EXPECT_EQ(rows.counts.dense.lookups, 2);
    EXPECT_EQ(rows.counts.dense.reduces, table.counts.dense.reduces);
    const Trained on_demand = train_by(arguments, EmbeddingPath::kRows, false);
    EXPECT_EQ(on_demand.reports, rows.reports);
    EXPECT_TRUE(on_demand.state == rows.state);
  }
}

// (G-1) T (2 D/G + 2 D + 4) bytes in every pass, in place of (G-1) shards of (2 + wire) bytes an
// element; in float32 2 is 4. (embedding_test.cpp counts what tokens really make of it.)
TEST(EmbeddingRows, BytesAreThoseOfTheFormula) {
  for (const Cut& c : {kGtp2, kGtp3, kTp2Gtp2}) {
    for (const int64_t item : {2, 4}) {
      SCOPED_TRACE(text("{} {}", c.name, item));
      const Arguments arguments =
          rows_model(c, {item == 4 ? "--precision.recipe=fp32" : "--precision.recipe=bf16"});
      const gtp::StepCounts table = train_by(arguments, EmbeddingPath::kTable, false).counts;
      const gtp::StepCounts rows = train_by(arguments, EmbeddingPath::kRows, false).counts;
      const int64_t passes = 2, peers = c.gtp - 1, T = 6 * c.tp / c.ranks * 16, D = 32;
      const int64_t slice = c.tp == 1 ? 299 : 160;
      const int64_t shard = (slice + 16 * c.gtp - 1) / (16 * c.gtp) * 16 * D;
      EXPECT_EQ(rows.dense.gathered - table.dense.gathered,
                passes * (peers * T * item * D / c.gtp - peers * shard * item));
      EXPECT_EQ(rows.dense.reduced - table.dense.reduced,
                passes * peers * (T * (item * D + 4) - shard * 4));
      EXPECT_EQ(rows.dense.gathers - table.dense.gathers, -passes);
    }
  }
}

std::string words(std::span<const gtp::TraceEvent> events,
                  const std::function<const gtp::BundleSpec&(gtp::BundleId)>& bundle) {
  std::string out;
  for (const gtp::TraceEvent& e : events) {
    if (e.bundle != gtp::kNoBundle && bundle(e.bundle).group_size == 1) continue;
    if (!e.same_call) out += std::string("\n") + gtp::name(e.kind);
    if (e.bundle != gtp::kNoBundle) out += " " + bundle(e.bundle).name;
  }
  return out;
}

// The path is chosen by bytes, and `moiety plan` chooses the same one.
TEST(EmbeddingRows, AreChosenByBytesHereAndInAPlan) {
  for (const Cut& c : {kGtp2, kTp2Gtp2}) {
    for (const char* tied : {"--model.tie_embeddings=false", "--model.tie_embeddings=true"}) {
      for (const int64_t seq_len : {16, 128}) {
        const Arguments arguments =
            rows_model(c, {text("--data.seq_len={}", seq_len), tied, "--precision.recipe=bf16"});
        run_ranks(arguments, [&](Rank& rank) {
          EXPECT_EQ(moves_rows(rank), seq_len == 16) << c.name;
          rank.step(0, "train");
          const gtp::Executor& executor = *rank.gathering.executor();
          const model::StepTrace trace = model::step_trace(
              rank.model.transformer().config(), precision_of_recipe(rank.config, Recipe::kBf16),
              {.grid = rank.grid,
               .sequences = rank.config.train.micro_batch,
               .seq_len = seq_len,
               .micro_batches = int(rank.passes_of_step()),
               .storage = DType::kBFloat16,
               .mapped = true},
              {});
          const auto spec_of = [&](const std::string& name) -> const gtp::BundleSpec& {
            for (const gtp::BundleSpec& b : trace.bundles) {
              if (b.name == name) return b;
            }
            throw std::out_of_range(name);
          };
          EXPECT_EQ(words(
                        trace.events, [&](gtp::BundleId b) -> auto& { return trace.bundles[b]; }),
                    words(
                        executor.trace_of({"train", rank.passes_of_step()}),
                        [&](gtp::BundleId b) -> auto& { return executor.bundle(b); }));
          const gtp::BundleSpec& runs = executor.bundle(embedding_of(rank).bundle);
          const gtp::BundleSpec& planned = spec_of("embed.weight");
          EXPECT_EQ(planned.rows.tokens, runs.rows.tokens);
          EXPECT_EQ(planned.rows.lookup, runs.rows.lookup);
          EXPECT_EQ(planned.rows.reduce.received, runs.rows.reduce.received);
          EXPECT_EQ(planned.rows.reduce.slot, runs.rows.reduce.slot);
          EXPECT_EQ(planned.gather_of(gtp::kRowView).received,
                    runs.gather_of(gtp::kRowView).received);
        });
      }
    }
  }
}

// The ids of a pass are looked at by every rank that has them; the first wrong one is named when
// the step has ended, and nothing has been updated.
TEST(EmbeddingRows, ABadTokenIsNamedAtTheStepsEnd) {
  std::atomic<int> passes = 0;
  std::string error;
  try {
    run_ranks(
        rows_model(kGtp2),
        [&](Rank& rank) {
          rank.step(0, "train");
          rank.on_pass = [&](int64_t pass, const model::Batch& batch) {
            ++passes;
            if (rank.model.world().rank() == 1 && pass == 0) {
              batch.token_BS.data<int32_t>()[21] = 299;
              batch.token_BS.data<int32_t>()[30] = -1;
            }
          };
          rank.step(1, "train");
        },
        EmbeddingPath::kRows);
  } catch (const Error& e) {
    error = e.what();
  }
  EXPECT_NE(error.find("embedding: token 299 at position 21 is outside the vocabulary of 299 (2 "
                       "such)"),
            std::string::npos)
      << error;
  EXPECT_EQ(passes, 2 * 2);
}

// One token everywhere: all its gradients are summed on one rank.
TEST(EmbeddingRows, OneTokenInAllPlaces) {
  const auto train_on = [](int32_t token, EmbeddingPath path) {
    std::vector<double> reports;
    run_ranks(
        rows_model(kGtp3),
        [&](Rank& rank) {
          rank.on_pass = [&](int64_t, const model::Batch& batch) {
            std::fill_n(batch.token_BS.data<int32_t>(), batch.token_BS.numel(), token);
          };
          for (int64_t k = 0; k < 3; ++k) {
            const optim::StepReport r = rank.step(k, "train");
            if (rank.model.world().rank() > 0) continue;
            reports.insert(reports.end(), r.losses.begin(), r.losses.end());
            reports.insert(reports.end(), r.class_norms.begin(), r.class_norms.end());
          }
        },
        path);
    return reports;
  };
  // Borders of shards of 112 rows, and the last token.
  for (const int32_t token : {111, 112, 298}) {
    const std::vector<double> rows = train_on(token, EmbeddingPath::kRows);
    EXPECT_EQ(rows, train_on(token, EmbeddingPath::kTable)) << token;
  }
}

TEST(EmbeddingRows, AreEvaluatedAsTheTableIs) {
  std::vector<double> losses;
  for (const EmbeddingPath path : {EmbeddingPath::kTable, EmbeddingPath::kRows}) {
    run_ranks(
        rows_model(kGtp2),
        [&](Rank& rank) {
          const auto& o = rank.config;
          data::ValidationSet set(data::synthetic_source("markov", o.data.seq_len, 264, 1), 6,
                                  {.micro_batch = o.train.micro_batch,
                                   .global_batch = o.train.global_batch,
                                   .data_rank = data_rank(rank.grid, rank.model.world().rank()),
                                   .data_ranks = data_ranks(rank.grid)});
          for (int k = 0; k < 2; ++k) {
            const EvaluationResult result =
                evaluate(rank.model, set, rank.capacity, rank.arena, Stream(), &rank.gathering);
            if (rank.model.world().rank() == 0) losses.push_back(result.loss);
          }
          EXPECT_GT(rank.gathering.executor()->counts().planned, 0);
        },
        path);
  }
  ASSERT_EQ(losses.size(), 4u);
  for (const double loss : losses) EXPECT_EQ(loss, losses[0]);
}

}  // namespace
}  // namespace moiety::app
