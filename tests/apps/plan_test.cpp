// moiety plan --gtp: the report, and the picture of the schedule.

#include "apps/moiety/commands/plan_timeline.h"
#include "apps/moiety/exit_code.h"
#include "tests/apps/train_helpers.h"
#include "tests/apps/xml_reader.h"

namespace moiety::app {
namespace {

using gtp::Kind;

const Arguments kModel{"plan",
                       "--gtp",
                       "--ranks=8",
                       "--model.layers=3",
                       "--model.d_model=512",
                       "--moe.d_ffn=256",
                       "--data.seq_len=512",
                       "--train.global_batch=16",
                       "--parallel.gtp=8",
                       "--parallel.ep=4",
                       "--parallel.egtp=2"};

TEST(Plan, ReportsWhatAStepMoves) {
  const ProgramResult result = run(kModel);
  ASSERT_EQ(result.code, kExitDone) << result.err;
  EXPECT_TRUE(result.out.starts_with(
      "layout     tp 1 x gtp 8 x dp 1, ep 4 x egtp 2 x edp 1; 2 micro-batches of 512 tokens; bf16 "
      "on h200\n"))
      << result.out;
  // kBegin and kFlush; per micro-batch embed (fwd, gradient: 3), head (3), and of a layer qkv and
  // o (4 each), experts (fwd 1, dx 1, gradients 4).
  EXPECT_NE(result.out.find(text("calls      {}, ", 2 + 2 * (3 + 3 + 3 * 14))), std::string::npos)
      << result.out;
  const size_t hash = result.out.find("hash       ");
  ASSERT_NE(hash, std::string::npos) << result.out;
  EXPECT_EQ(result.out.find_first_not_of("0123456789abcdef", hash + 11), hash + 27);
  EXPECT_EQ(run(kModel).out, result.out);
  EXPECT_NE(run(kModel + Arguments{"--memory.recompute=full"}).out, result.out);
}

TEST(Plan, NothingMovesWithoutPeers) {
  const ProgramResult result = run(kModel + Arguments{"--parallel.gtp=1", "--parallel.egtp=1"});
  ASSERT_EQ(result.code, kExitDone) << result.err;
  EXPECT_NE(result.out.find("transfers  0 gathers, 0 reduces, 0 B received"), std::string::npos)
      << result.out;
  EXPECT_NE(result.out.find("exposed    0 us (0.00 % of the step)"), std::string::npos);
}

TEST(Plan, LayoutsThatDoNotFitAreUsageErrors) {
  const auto error = [](const Arguments& more) {
    const ProgramResult result = run(kModel + more);
    EXPECT_EQ(result.code, kExitUsage);
    return result.last_line();
  };
  EXPECT_NE(error({"--parallel.gtp=3"}).find("must be a multiple of parallel.gtp x tp = 3 x 1"),
            std::string::npos);
  EXPECT_NE(error({"--parallel.dp=2"}).find("parallel.dp x gtp x tp = 2 x 8 x 1 = 16"),
            std::string::npos);
  EXPECT_NE(error({"--parallel.gtp=1", "--parallel.tp=8"}).find("parallel.tp = 8"),
            std::string::npos);
  EXPECT_NE(error({"--train.global_batch=9"}).find("train.global_batch = 9"), std::string::npos);
  EXPECT_NE(error({"--precision.recipe=fp32"}).find("fp32"), std::string::npos);
  EXPECT_NE(error({"--hardware=abacus"}).find("abacus"), std::string::npos);
  const ProgramResult what = run({"plan", "--ranks=2"});
  EXPECT_EQ(what.code, kExitUsage);
}

// One weight over two ranks, used twice, with times that can be worked out by hand.
struct Small {
  Small() {
    gtp::BundleSpec b;
    b.name = "layers.0.attn.qkv.weight";
    b.group_size = 2;
    b.gather = {{{1000, 2000, 0}, {1000, 2000, 0}, {1000, 2000, 0}}};
    b.reduce = {2000, 4000, 0};
    bundles.push_back(b);
    policy.latency_ns = 0;
    policy.bytes_per_ns = 1;
    policy.keep_span = 0;
    trace = {{Kind::kBegin, gtp::kNoBundle, false, 0},
             {Kind::kFwd, 0, false, 5000},
             {Kind::kBwd, 0, false, 3000},
             {Kind::kGradBuffer, 0, false, 2000},
             {Kind::kGrad, 0, false, 0},
             {Kind::kFlush, gtp::kNoBundle, false, 0}};
    step.trace = trace;
    step.bundles = bundles;
    step.plan = gtp::plan(trace, bundles, policy);
    step.schedule = gtp::simulate(step.plan, trace, bundles, policy);
  }
  std::vector<gtp::BundleSpec> bundles;
  std::vector<gtp::TraceEvent> trace;
  gtp::Policy policy;
  PlannedStep step;
};

size_t count(const std::string& text, const std::string& piece) {
  size_t n = 0;
  for (size_t at = text.find(piece); at != std::string::npos; at = text.find(piece, at + 1)) ++n;
  return n;
}

TEST(Plan, TimelineShowsWorkTransfersAndWaits) {
  const Small small;
  // The first gather is waited for in full, the second is behind the forward pass, and the flush
  // waits for the reduce.
  ASSERT_EQ(small.step.schedule.gather_wait, 1000);
  ASSERT_EQ(small.step.schedule.flush_wait, 2000);
  const std::string svg = draw_timeline(small.step, {.title = "a <step>", .note = "n"});
  EXPECT_NO_THROW(read_xml(svg));
  EXPECT_NE(svg.find("a &lt;step&gt;"), std::string::npos);
  EXPECT_NE(svg.find("@media(prefers-color-scheme:dark)"), std::string::npos);
  for (const char* tip :
       {"<title>waits for gather of 0 attn.qkv: 1 us</title>",
        "<title>forward 0 attn.qkv: 5 us</title>", "<title>backward 0 attn.qkv: 3 us</title>",
        "<title>waits for the last reduces: 2 us</title>",
        "<title>reduce dense 0 attn.qkv: 2 us</title>"}) {
    EXPECT_EQ(count(svg, tip), 1u) << tip << "\n" << svg;
  }
  EXPECT_EQ(count(svg, "<title>gather dense 0 attn.qkv: 1 us</title>"), 2u);
  // The step is 1 + 5 + 3 + 2 + 2 us over the 1446 px between the margins.
  const double us = (1600 - 24 - 130) / 13.0;
  EXPECT_NE(svg.find(text("x=\"{:.2f}\" y=\"104\" width=\"{:.2f}\" height=\"44\"><title>forward",
                          130 + us, 5 * us - 0.6)),
            std::string::npos)
      << svg;
  EXPECT_EQ(count(svg, ">0 attn.qkv</text>"), 6u);  // labels of three calls and three transfers
}

TEST(Plan, TimelineOfAPart) {
  const Small small;
  const std::string svg =
      draw_timeline(small.step, {.title = "t", .note = "", .begin_ns = 6500, .end_ns = 8500});
  EXPECT_NO_THROW(read_xml(svg));
  EXPECT_EQ(count(svg, "<title>backward"), 1u);
  EXPECT_EQ(count(svg, "<title>forward"), 0u);
  EXPECT_EQ(count(svg, "<title>waits"), 0u);
}

TEST(Plan, APictureOfALongStepStaysSmall) {
  const TemporaryDirectory dir;
  const ProgramResult result =
      run({"plan", "--gtp", "--ranks=8", "--model.preset=qwen3-30b-a3b", "--parallel.gtp=8",
           "--parallel.ep=8", "--train.global_batch=128", "--out=" + (dir / "x.svg")});
  ASSERT_EQ(result.code, kExitDone) << result.err;
  const std::string svg = read_all(dir / "x.svg");
  EXPECT_NO_THROW(read_xml(svg));
  EXPECT_LT(svg.size(), 2u << 20);
  EXPECT_GT(count(svg, "<rect"), 500u);
}

}  // namespace
}  // namespace moiety::app
