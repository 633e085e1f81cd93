// `moiety prepare`: its arguments and its summary; what it does is tested in tests/data.
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "apps/moiety/commands/prepare.h"
#include "moiety/base/error.h"
#include "moiety/data/token_file.h"
#include "tests/data/data_helpers.h"

namespace moiety::app {
namespace {

using Texts = std::vector<std::string>;

TEST(PrepareCommand, ArgumentsAndSummary) {
  const TemporaryDirectory dir;
  const std::string in = dir.write("a", "one\n%\ntwo\\n");
  testing::internal::CaptureStdout();
  EXPECT_EQ(prepare_command({in, "--out", dir / "out", "--split", "\\n%\\n", "--quiet"}), 0);
  EXPECT_EQ(testing::internal::GetCapturedStdout(),
            (dir / "out.tok") + ": 2 documents, 10 tokens, 8 bytes of text\n");
  EXPECT_EQ(data::TokenFile::open(dir / "out.tok")->header().documents, 2u);

  testing::internal::CaptureStdout();
  EXPECT_EQ(prepare_command({"--help"}), 0);
  EXPECT_NE(testing::internal::GetCapturedStdout().find("--valid-fraction"), std::string::npos);

  for (const Texts& bad : std::vector<Texts>{{},
                                             {in},
                                             {"--out", "x"},
                                             {in, "--out", "x", "--nope"},
                                             {in, "--out", "x", "--format", "xml"},
                                             {in, "--out", "x", "--workers", "-1"},
                                             {in, "--out", "x", "--tokenizer", "gpt2"},
                                             {in, "--out", "x", "--valid-fraction", "1"},
                                             {in, "--out", "x", "--valid-fraction", "nan"}}) {
    EXPECT_THROW(prepare_command(bad), UsageError) << testing::PrintToString(bad);
  }
}

}  // namespace
}  // namespace moiety::app
