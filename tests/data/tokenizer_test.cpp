#include "moiety/data/tokenizer.h"

#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "moiety/base/error.h"
#include "tests/data/data_helpers.h"
#include "tests/support/files.h"

namespace moiety::data {
namespace {

TEST(Tokenizer, BytesAreIds) {
  const Tokenizer t = Tokenizer::load("bytes");
  EXPECT_EQ(t.vocab(), 264u);
  EXPECT_EQ(t.eos(), 256u);
  EXPECT_EQ(t.bos(), 257u);
  EXPECT_EQ(t.pad(), 258u);
  std::vector<uint32_t> ids{7};
  t.encode("A\xc3\xa9\n", ids);
  EXPECT_EQ(ids, (std::vector<uint32_t>{7, 65, 0xc3, 0xa9, 10}));
}

TEST(Tokenizer, DecodeDropsWhatIsNotText) {
  const Tokenizer t = Tokenizer::load("bytes");
  const std::vector<int32_t> ids{257, 72, 105, 0, 255, 256, 258, 263, -1};
  EXPECT_EQ(t.decode(ids), std::string("Hi\0\xff", 4));
}

// Stands in token files: a change makes all of them unreadable.
TEST(Tokenizer, IdentityIsFixed) {
  EXPECT_EQ(hex(Tokenizer::load("bytes").identity()),
            "89eb2a774d35c4660e614b98c185de9bfe662284157fa4246bcfe833bf414560");
}

TEST(Tokenizer, UnknownNameIsUsageError) {
  try {
    Tokenizer::load("gpt2.json");
    FAIL();
  } catch (const UsageError& e) {
    EXPECT_EQ(e.kind(), ErrorKind::kUsage);
    EXPECT_STREQ(e.what(),
                 "tokenizer 'gpt2.json' does not exist; there are: bytes, and the path of a "
                 "tokenizer.json, of its folder, or of a token file");
  }
}

TEST(Tokenizer, TokenFileKnowsIdsAndNoText) {
  const TemporaryDirectory dir;
  write_tokens(dir / "t.tok", {ramp(40)});
  const Tokenizer t = Tokenizer::load(dir / "t.tok"), bytes = Tokenizer::load("bytes");
  EXPECT_EQ(t.vocab(), bytes.vocab());
  EXPECT_EQ(t.eos(), bytes.eos());
  EXPECT_EQ(t.bos(), bytes.bos());
  EXPECT_EQ(t.identity(), bytes.identity());
  EXPECT_TRUE(t.files().empty());
  std::vector<uint32_t> ids;
  for (const bool decodes : {false, true}) {
    try {
      decodes ? (void)t.decode(std::vector<int32_t>{1}) : t.encode("a", ids);
      FAIL();
    } catch (const Error& e) {
      EXPECT_EQ(e.kind(), ErrorKind::kUnsupported);
      EXPECT_EQ(e.what(), "tokenizer " + dir / "t.tok" +
                              ": a token file knows ids and no text; a tokenizer.json is needed");
    }
  }
  EXPECT_THROW(Tokenizer::load(dir / "none.tok"), DataError);
}

}  // namespace
}  // namespace moiety::data
