#include "moiety/data/token_file.h"

#include <cstring>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "moiety/base/crc32c.h"
#include "moiety/base/error.h"
#include "tests/data/data_helpers.h"
#include "tests/support/error_of.h"

namespace moiety::data {
namespace {

template <class T>
void put(std::string& bytes, size_t at, T value) {
  if (bytes.size() < at + sizeof(T)) bytes.resize(at + sizeof(T));
  std::memcpy(bytes.data() + at, &value, sizeof(T));
}

void seal(std::string& file) {
  put<uint32_t>(file, 112, crc32c(file.data(), 112));
  if (file[60] & 8) put<uint32_t>(file, 148, crc32c(file.data() + 136, 12));
}

// A file that is damaged is refused at the latest when all of it is checked.
std::string error_of_file(const std::string& path) {
  return kind_and_error_of([&] { TokenFile::open(path)->verify(); });
}

// Documents "ab" and "c", each with eos: the file as docs/spec/trainer.md#token-files spells it,
// without checksums of pieces.
std::string golden_without_pieces() {
  std::string f(4096, '\0');
  std::memcpy(f.data(), "MOIETOK1", 8);
  put<uint32_t>(f, 8, 4096);
  put<uint32_t>(f, 12, 2);
  put<uint64_t>(f, 16, 5);
  put<uint64_t>(f, 24, 2);
  put<uint64_t>(f, 32, 4096);
  put<uint64_t>(f, 40, 4160);
  put<uint32_t>(f, 48, 264);
  put<uint32_t>(f, 52, 256);
  put<uint32_t>(f, 56, 257);
  put<uint32_t>(f, 60, 1);
  const Sha256 identity = Tokenizer::load("bytes").identity();
  std::memcpy(f.data() + 64, identity.data(), 32);
  put<uint64_t>(f, 104, 3);
  size_t at = 4096;
  for (const uint16_t id : {97, 98, 256, 99, 256}) {
    put<uint16_t>(f, at, id);
    at += 2;
  }
  put<uint32_t>(f, 96, crc32c(f.data() + 4096, 10));
  put<uint64_t>(f, 4160, 0);
  put<uint64_t>(f, 4168, 3);
  put<uint64_t>(f, 4176, 5);
  put<uint32_t>(f, 100, crc32c(f.data() + 4160, 24));
  seal(f);
  return f;
}

std::string golden() {
  std::string f = golden_without_pieces();
  put<uint32_t>(f, 60, 9);
  put<uint64_t>(f, 136, 4184);
  put<uint32_t>(f, 4184, crc32c(f.data() + 4096, 10));
  put<uint32_t>(f, 144, crc32c(f.data() + 4184, 4));
  seal(f);
  return f;
}

// More documents and targets than a writer keeps in memory: the table and the mask take 1.1 MiB each.
TEST(TokenFile, ATableAndAMaskThatDoNotFitTheBuffersAreWhole) {
  constexpr uint64_t kDocuments = 140000, kIds = 65;
  const TemporaryDirectory dir;
  TokenFileWriter writer(dir / "a.tok", Tokenizer::load("bytes"), kHasLossMask);
  std::vector<uint32_t> ids(kIds);
  std::vector<uint8_t> targets(kIds);
  std::string starts, mask;
  uint64_t tokens = 0;
  for (uint64_t d = 0; d < kDocuments; ++d) {
    put<uint64_t>(starts, 8 * d, tokens);
    for (uint64_t i = 0; i < kIds; ++i, ++tokens) {
      ids[i] = static_cast<uint32_t>((d + i) % 250);
      targets[i] = (d * 7 + i) % 3 == 0;
      if (tokens % 8 == 0) mask.push_back('\0');
      mask.back() = static_cast<char>(mask.back() | targets[i] << tokens % 8);
    }
    writer.add(ids, kIds, targets);
  }
  put<uint64_t>(starts, 8 * kDocuments, tokens);
  writer.finish();
  writer.publish();
  int files = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(dir / "")) ++files;
  EXPECT_EQ(files, 1);
  const std::string file = read_all(dir / "a.tok");
  uint64_t table_at = 0, mask_at = 0;
  std::memcpy(&table_at, file.data() + 40, 8);
  std::memcpy(&mask_at, file.data() + 120, 8);
  EXPECT_TRUE(file.substr(table_at, starts.size()) == starts);
  EXPECT_TRUE(file.substr(mask_at, mask.size()) == mask);
  EXPECT_EQ(error_of_file(dir / "a.tok"), kNoError);
}

TEST(TokenFile, WriterMakesTheGoldenBytes) {
  const TemporaryDirectory dir;
  write_tokens(dir / "a.tok", {{97, 98, 256}, {99, 256}});
  EXPECT_EQ(read_all(dir / "a.tok"), golden());
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(dir / ""), {}), 1);
}

TEST(TokenFile, ReadsTheGoldenBytes) {
  const TemporaryDirectory dir;
  const auto file = TokenFile::open(dir.write("a.tok", golden()));
  EXPECT_EQ(file->header().tokens, 5u);
  EXPECT_EQ(file->header().documents, 2u);
  EXPECT_EQ(file->header().vocab, 264u);
  EXPECT_EQ(file->header().source_bytes, 3u);
  EXPECT_EQ(file->header().tokenizer, Tokenizer::load("bytes").identity());
  std::vector<int32_t> ids(5);
  file->read(0, ids);
  EXPECT_EQ(ids, (std::vector<int32_t>{97, 98, 256, 99, 256}));
  ids.resize(2);
  file->read(2, ids);
  EXPECT_EQ(ids, (std::vector<int32_t>{256, 99}));
  EXPECT_THROW(file->read(4, ids), Error);
}

TEST(TokenFile, ReadsFilesWithoutChecksumsOfPieces) {
  const TemporaryDirectory dir;
  const auto file = TokenFile::open(dir.write("a.tok", golden_without_pieces()));
  file->verify();
  std::vector<int32_t> ids(5);
  file->read(0, ids);
  EXPECT_EQ(ids, (std::vector<int32_t>{97, 98, 256, 99, 256}));
  std::string bad = golden_without_pieces();
  bad[4098] ^= 1;
  EXPECT_EQ(error_of_file(dir.write("b.tok", bad)).substr(0, 6 + (dir / "b.tok").size() + 32),
            "data: " + (dir / "b.tok") + ": the tokens are damaged: crc32c");
}

TEST(TokenFile, Documents) {
  const TemporaryDirectory dir;
  const auto file = TokenFile::open(dir.write("a.tok", golden()));
  EXPECT_EQ(file->document(0).end, 3u);
  EXPECT_EQ(file->document(1).begin, 3u);
  EXPECT_EQ(file->document(1).end, 5u);
  EXPECT_THROW(file->document(2), Error);
}

// The same with the loss mask 01001, and checksums of pieces.
std::string golden_masked() {
  std::string f = golden_without_pieces();
  put<uint32_t>(f, 60, 13);
  put<uint64_t>(f, 120, 4184);
  f += char(0b10010);
  put<uint32_t>(f, 128, crc32c(f.data() + 4184, 1));
  put<uint32_t>(f, 132, crc32c(f.data() + 116, 16));
  put<uint64_t>(f, 136, 4185);
  put<uint32_t>(f, 4185, crc32c(f.data() + 4096, 10));
  put<uint32_t>(f, 144, crc32c(f.data() + 4185, 4));
  seal(f);
  return f;
}

TEST(TokenFile, LossMask) {
  const TemporaryDirectory dir;
  write_masked(dir / "a.tok", {{{97, 98, 256}, {0, 1, 0}}, {{99, 256}, {0, 1}}});
  EXPECT_EQ(read_all(dir / "a.tok"), golden_masked());
  const auto file = TokenFile::open(dir / "a.tok");
  file->verify();
  EXPECT_TRUE(file->has_mask());
  EXPECT_EQ(file->target_count(), 2u);
  EXPECT_EQ(file->count_targets(2, 3), 1u);
  std::vector<uint8_t> targets(4);
  file->targets(1, targets);
  EXPECT_EQ(targets, (std::vector<uint8_t>{1, 0, 0, 1}));
  EXPECT_THROW(file->targets(2, targets), Error);
  const auto plain = TokenFile::open(dir.write("b.tok", golden()));
  EXPECT_FALSE(plain->has_mask());
  EXPECT_EQ(plain->target_count(), 5u);
  plain->targets(1, targets);
  EXPECT_EQ(targets, (std::vector<uint8_t>{1, 1, 1, 1}));
  TokenFileWriter writer(dir / "c.tok", Tokenizer::load("bytes"), kHasLossMask);
  EXPECT_THROW(writer.add(std::vector<uint32_t>{1, 2}, 2), Error);
  EXPECT_THROW(writer.add(std::vector<uint32_t>{1, 2}, 2, std::vector<uint8_t>{1}), Error);
}

TEST(TokenFile, DamagedLossMasks) {
  const TemporaryDirectory dir;
  const auto error = [&](const std::string& bytes) {
    const std::string path = dir.write("a.tok", bytes);
    return error_of_file(path).substr(8 + path.size());
  };
  std::string f = golden_masked();
  f[4184] = 0b10011;
  EXPECT_EQ(error(f).substr(0, 24), "the loss mask is damaged");
  f[4184] = char(0b1010010);
  put<uint32_t>(f, 128, crc32c(f.data() + 4184, 1));
  EXPECT_TRUE(error(f).starts_with("the header is damaged: crc32c")) << error(f);
  put<uint32_t>(f, 132, crc32c(f.data() + 116, 16));
  EXPECT_EQ(error(f), "the loss mask has bits behind its 5 tokens");
  f = golden_masked();
  put<uint64_t>(f, 120, 4185);
  put<uint32_t>(f, 132, crc32c(f.data() + 116, 16));
  EXPECT_EQ(error(f), "the header contradicts itself: loss mask at 4185, expected at 4184");
  f = golden();
  put<uint64_t>(f, 120, 4184);
  EXPECT_EQ(error(f), "the header is damaged: byte 120 is 88, not 0");
  for (size_t bytes = 0; bytes < golden_masked().size(); bytes += 1 + bytes / 64) {
    EXPECT_THROW(TokenFile::open(dir.write("b.tok", golden_masked().substr(0, bytes))), DataError);
  }
}

TEST(TokenFile, FourByteTokens) {
  const TemporaryDirectory dir;
  std::string f = golden_without_pieces();
  f.resize(4096);
  put<uint32_t>(f, 12, 4);
  put<uint32_t>(f, 48, 100000);
  const std::vector<uint32_t> ids{97, 99999, 256, 70000, 256};
  for (size_t i = 0; i < ids.size(); ++i) put<uint32_t>(f, 4096 + 4 * i, ids[i]);
  put<uint32_t>(f, 96, crc32c(f.data() + 4096, 20));
  put<uint64_t>(f, 4160, 0);
  put<uint64_t>(f, 4168, 3);
  put<uint64_t>(f, 4176, 5);
  seal(f);
  const auto file = TokenFile::open(dir.write("a.tok", f));
  std::vector<int32_t> got(5);
  file->read(0, got);
  EXPECT_EQ(got, (std::vector<int32_t>{97, 99999, 256, 70000, 256}));
}

TEST(TokenFile, PositionsRestartWithDocuments) {
  const TemporaryDirectory dir;
  const auto file =
      TokenFile::open(write_tokens(dir / "a.tok", {ramp(3), ramp(1), ramp(4), ramp(2)}));
  const std::vector<int32_t> whole{0, 1, 2, 0, 0, 1, 2, 3, 0, 1};
  for (size_t begin = 0; begin < 10; ++begin) {
    std::vector<int32_t> got(10 - begin);
    file->positions(begin, got);
    std::vector<int32_t> expected(whole.begin() + begin, whole.end());
    const int32_t first = expected[0];  // the document that has started before counts from `begin`
    for (size_t i = 0; i < expected.size() && expected[i] == first + static_cast<int32_t>(i); ++i) {
      expected[i] -= first;
    }
    EXPECT_EQ(got, expected) << begin;
  }
}

TEST(TokenFile, EveryDamagedByteIsFound) {
  const TemporaryDirectory dir;
  const std::string good = golden();
  for (size_t at = 0; at < good.size(); at += at < 128 || at >= 4080 ? 1 : 97) {
    std::string bad = good;
    bad[at] ^= 0x10;
    const std::string error = error_of_file(dir.write("bad.tok", bad));
    EXPECT_EQ(error.substr(0, 6), "data: ") << "byte " << at << ": " << error;
  }
}

TEST(TokenFile, EveryLengthIsChecked) {
  const TemporaryDirectory dir;
  const std::string good = golden();
  const auto open = [&](const std::string& bytes) {
    const std::string path = dir.write("x.tok", bytes);
    return error_of_file(path).substr(6 + path.size() + 2);
  };
  for (const size_t size : {0, 1, 8, 112, 4095}) {
    EXPECT_EQ(open(good.substr(0, size)),
              "not a token file: " + std::to_string(size) + " bytes, less than its header of 4096");
  }
  for (const size_t size : {4096, 4100, 4160, 4184, 4187}) {
    EXPECT_EQ(open(good.substr(0, size)), "the file has " + std::to_string(size) +
                                              " bytes, its header says 4188: it was cut off");
  }
  EXPECT_EQ(open(good + "x"), "the file has 4189 bytes, its header says 4188: it was added to");
}

// Files with right checksums and wrong contents.
TEST(TokenFile, ContradictionsAreRefused) {
  struct Case {
    const char* name;
    std::function<void(std::string&)> change;
    const char* error;
  };
  const std::vector<Case> cases{
      {"magic", [](std::string& f) { f[7] = '2'; }, "not a token file: it does not begin with"},
      {"header size", [](std::string& f) { put<uint32_t>(f, 8, 8192); },
       "its header has 8192 bytes, this version reads 4096"},
      {"token bytes", [](std::string& f) { put<uint32_t>(f, 12, 4); },
       "the header contradicts itself: vocabulary 264, 4 bytes a token"},
      {"vocabulary", [](std::string& f) { put<uint32_t>(f, 48, 0); },
       "the header contradicts itself: vocabulary 0"},
      {"token offset", [](std::string& f) { put<uint64_t>(f, 32, 4098); },
       "the header contradicts itself"},
      {"table offset", [](std::string& f) { put<uint64_t>(f, 40, 4224); },
       "the header contradicts itself"},
      {"tokens that overflow", [](std::string& f) { put<uint64_t>(f, 16, (1ull << 63) + 5); },
       "the header contradicts itself"},
      {"documents that overflow", [](std::string& f) { put<uint64_t>(f, 24, ~0ull); },
       "the header contradicts itself"},
      {"more documents", [](std::string& f) { put<uint64_t>(f, 24, 3); },
       "the file has 4188 bytes, its header says 4196"},
      {"rest of the header", [](std::string& f) { f[4000] = 1; },
       "the header is damaged: byte 4000 is 1, not 0"},
      {"bytes of another field", [](std::string& f) { f[135] = 1; },
       "the header is damaged: byte 135 is 1, not 0"},
      {"pieces without their flag", [](std::string& f) { f[60] = 1; },
       "the header is damaged: byte 136 is 88, not 0"},
      {"flags of later versions", [](std::string& f) { f[60] = 25; },
       "its header has flags 25, of which this version knows 15"},
      {"offset of the pieces", [](std::string& f) { put<uint64_t>(f, 136, 4192); },
       "the header contradicts itself: checksums of pieces at 4192, expected at 4184"},
      {"checksums of pieces", [](std::string& f) { f[4184] ^= 1; },
       "the checksums of pieces are damaged: crc32c"},
      {"checksums of pieces and of the whole",
       [](std::string& f) {
         f[4184] ^= 1;
         put<uint32_t>(f, 144, crc32c(f.data() + 4184, 4));
       },
       "the tokens are damaged: crc32c"},
      {"table start",
       [](std::string& f) {
         put<uint64_t>(f, 4160, 1);
         put<uint32_t>(f, 100, crc32c(f.data() + 4160, 24));
       },
       "entry 0 of the document table is 1, behind 0 and with 5 tokens"},
      {"table order",
       [](std::string& f) {
         put<uint64_t>(f, 4168, 6);
         put<uint32_t>(f, 100, crc32c(f.data() + 4160, 24));
       },
       "entry 2 of the document table is 5, behind 6 and with 5 tokens"},
      {"table end",
       [](std::string& f) {
         put<uint64_t>(f, 4176, 4);
         put<uint32_t>(f, 100, crc32c(f.data() + 4160, 24));
       },
       "entry 2 of the document table is 4, behind 3 and with 5 tokens"},
      {"id beyond the vocabulary",
       [](std::string& f) {
         put<uint16_t>(f, 4098, 264);
         put<uint32_t>(f, 96, crc32c(f.data() + 4096, 10));
         put<uint32_t>(f, 4184, crc32c(f.data() + 4096, 10));
         put<uint32_t>(f, 144, crc32c(f.data() + 4184, 4));
       },
       "token 1 is 264, the vocabulary has 264"},
      {"gap", [](std::string& f) { f[4110] = 1; },
       "byte 4110 between tokens and table is 1, not 0"},
      {"token checksum", [](std::string& f) { put<uint32_t>(f, 96, 0); },
       "the tokens are damaged: crc32c"},
  };
  const TemporaryDirectory dir;
  for (const Case& c : cases) {
    std::string f = golden();
    c.change(f);
    seal(f);
    const std::string path = dir.write("x.tok", f);
    const std::string error = error_of_file(path);
    EXPECT_EQ(error.substr(0, 6 + path.size() + 2 + std::strlen(c.error)),
              "data: " + path + ": " + c.error)
        << c.name;
  }
}

TEST(TokenFile, MissingFileAndDirectory) {
  const TemporaryDirectory dir;
  EXPECT_EQ(kind_and_error_of([&] { TokenFile::open(dir / "no.tok"); }),
            "data: " + (dir / "no.tok") + ": cannot open: No such file or directory");
  EXPECT_EQ(kind_and_error_of([&] { TokenFile::open(dir / ""); }),
            "data: " + (dir / "") + ": not a file");
}

TEST(TokenFile, ChangedSizeIsAnErrorNotACrash) {
  const TemporaryDirectory dir;
  const std::string path = write_tokens(dir / "a.tok", {ramp(100000)});
  const auto file = TokenFile::open(path);
  const auto size = std::filesystem::file_size(path);
  std::vector<int32_t> ids(10);
  for (const uintmax_t changed : {uintmax_t{0}, uintmax_t{4096}, size - 1, size + 1}) {
    std::filesystem::resize_file(path, changed);
    const std::string expected = "data: " + path + ": the file had " + std::to_string(size) +
                                 " bytes when it was opened and has " + std::to_string(changed) +
                                 " now";
    EXPECT_EQ(kind_and_error_of([&] { file->read(90000, ids); }), expected);
    EXPECT_EQ(kind_and_error_of([&] { file->positions(90000, ids); }), expected);
  }
}

TEST(TokenFileWriter, NothingRemainsWithoutPublish) {
  const TemporaryDirectory dir;
  const std::string old = dir.write("a.tok", "old");
  {
    TokenFileWriter writer(dir / "a.tok", Tokenizer::load("bytes"), kDocumentsEndInEos);
    writer.add(ramp(10), 9);
    writer.finish();
  }
  EXPECT_EQ(read_all(old), "old");
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(dir / ""), {}), 1);
}

TEST(TokenFileWriter, LongFilesAreWrittenInPieces) {
  const TemporaryDirectory dir;
  std::vector<std::vector<uint32_t>> documents;
  for (uint32_t d = 1; d <= 100; ++d) documents.push_back(ramp(20000, d));
  const auto file = TokenFile::open(write_tokens(dir / "a.tok", documents));
  EXPECT_EQ(file->header().tokens, 2000000u);
  std::vector<int32_t> ids(20000);
  for (uint32_t d = 0; d < 100; ++d) {
    file->read(d * 20000, ids);
    EXPECT_TRUE(std::equal(ids.begin(), ids.end(), documents[d].begin())) << d;
  }
}

TEST(TokenFileWriter, EveryPieceHasItsChecksum) {
  const TemporaryDirectory dir;
  const std::string path = dir / "a.tok";
  // The second piece ends in the middle of a document.
  write_tokens(path, std::vector(21, ramp(1'000'000)));
  const auto file = TokenFile::open(path);
  ASSERT_EQ(file->pieces(), 3u);
  file->verify();
  for (const uint64_t at : {kPieceBytes - 1, kPieceBytes, uint64_t{42'000'000} - 1}) {
    flip_bit(path, 4096 + at);
  }
  const auto damaged = TokenFile::open(path);
  for (uint64_t p = 0; p < 3; ++p) {
    const uint64_t begin = 4096 + p * kPieceBytes;
    const uint64_t end = p == 2 ? 4096 + 42'000'000 : begin + kPieceBytes;
    const std::string place = text("bytes [{}, {}) have crc32c", begin, end);
    EXPECT_NE(damaged->check_piece(p).fault.find(place), std::string::npos)
        << damaged->check_piece(p).fault;
  }
  const std::string error = kind_and_error_of([&] { damaged->verify(); });
  EXPECT_NE(error.find("bytes [4096, 16781312) have crc32c"), std::string::npos) << error;
  EXPECT_NE(error.find("; so are 2 more of 3 pieces"), std::string::npos) << error;
}

TEST(TokenFileWriter, DiskErrors) {
  const Tokenizer bytes = Tokenizer::load("bytes");
  EXPECT_EQ(
      kind_and_error_of([&] { TokenFileWriter("/nonexistent/a.tok", bytes, 0); }).substr(0, 4),
      "io: ");
  EXPECT_THROW(TokenFileWriter("/tmp/x", bytes, 0).add(std::vector<uint32_t>{264}, 0), Error);
}

}  // namespace
}  // namespace moiety::data
