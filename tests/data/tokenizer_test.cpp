#include "moiety/data/tokenizer.h"

#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "moiety/base/error.h"
#include "moiety/data/sha256.h"

namespace moiety::data {
namespace {

TEST(Sha256, NistVectors) {
  EXPECT_EQ(hex(sha256("")), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(hex(sha256("abc")), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(hex(sha256("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq")),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  EXPECT_EQ(hex(sha256("abcdefghbcdefghicdefghijdefghijkefghijklfghijklmghijklmnhijklmno"
                       "ijklmnopjklmnopqklmnopqrlmnopqrsmnopqrstnopqrstu")),
            "cf5b16a778af8380036ce59e7b0492370b249b11e8f07a51afac45037afee9d1");
  EXPECT_EQ(hex(sha256(std::string(1000000, 'a'))),
            "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

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
    EXPECT_STREQ(e.what(), "tokenizer 'gpt2.json' does not exist; there is: bytes");
  }
}

}  // namespace
}  // namespace moiety::data
