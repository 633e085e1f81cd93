// `moiety prepare`: its arguments and its summary; what it does is tested in tests/data.
#include <filesystem>
#include <string>
#include <sys/stat.h>
#include <vector>

#include <gtest/gtest.h>

#include "apps/moiety/commands/prepare.h"
#include "moiety/base/error.h"
#include "moiety/data/token_file.h"
#include "tests/data/data_helpers.h"
#include "tests/support/error_of.h"

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

  const std::string chat = dir.write("chat", R"({"prompt": "p", "completion": "ab"})");
  testing::internal::CaptureStdout();
  EXPECT_EQ(prepare_command(
                {chat, "--out", dir / "chat", "--chat", "--chat-template", "mistral", "--quiet"}),
            0);
  EXPECT_EQ(testing::internal::GetCapturedStdout(),
            (dir / "chat.tok") +
                ": 1 document, 22 tokens (18.2 % are targets), 2 bytes of text in them\n");

  // An input may follow the keys.
  const std::string lines = dir.write("l", R"({"title": "t", "body": "b"})");
  testing::internal::CaptureStdout();
  EXPECT_EQ(prepare_command({"--quiet", "--format", "jsonl", "--out", dir / "keys", "--text-key",
                             "title,body", lines}),
            0);
  EXPECT_EQ(testing::internal::GetCapturedStdout(),
            (dir / "keys.tok") + ": 1 document, 4 tokens, 3 bytes of text\n");

  for (const Texts& bad : std::vector<Texts>{{},
                                             {in},
                                             {"--out", "x"},
                                             {in, "--out", "x", "--nope"},
                                             {in, "--out", "x", "--format", "xml"},
                                             {in, "--out", "x", "--workers", "-1"},
                                             {in, "--out", "x", "--tokenizer", "gpt2"},
                                             {in, "--out", "x", "--chat-template", "llama3"},
                                             {in, "--out", "x", "--chat", "--chat-template", "x"},
                                             {in, "--out", "x", "--from", "x"},
                                             {in, "--out", "x", "--valid-fraction", "1"},
                                             {in, "--out", "x", "--valid-fraction", "nan"}}) {
    EXPECT_THROW(prepare_command(bad), UsageError) << testing::PrintToString(bad);
  }
}

TEST(PrepareCommand, FilesThatAreThereAreNotLost) {
  const TemporaryDirectory dir;
  const std::string in = dir.write("a", "one");
  const auto prepare = [&](const Texts& more) {
    Texts arguments{"--quiet"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    testing::internal::CaptureStdout();
    const std::string error = error_of([&] { prepare_command(arguments); }, ErrorKind::kUsage);
    testing::internal::GetCapturedStdout();
    return error;
  };
  EXPECT_EQ(prepare({in, "--out", dir / "out"}), kNoError);
  EXPECT_EQ(prepare({in, "--out", dir / "out"}),
            (dir / "out.tok") + ": is there already; --force overwrites");
  EXPECT_EQ(prepare({in, "--out", dir / "out", "--force"}), kNoError);
  EXPECT_EQ(prepare({dir / "out.tok", "--format=text", "--out", dir / "out", "--force"}),
            (dir / "out.tok") + ": is an input too");
  EXPECT_EQ(prepare({in, "--out", dir / ""}),
            "--out " + (dir / "") + ": is a directory; the PREFIX of the files in it is missing");
  ASSERT_EQ(::mkfifo((dir / "pipe.tok").c_str(), 0600), 0);
  EXPECT_EQ(prepare({in, "--out", dir / "pipe", "--force"}),
            (dir / "pipe.tok") + ": is not a regular file");
  EXPECT_FALSE(std::filesystem::exists(dir / ".tok"));
}

}  // namespace
}  // namespace moiety::app
