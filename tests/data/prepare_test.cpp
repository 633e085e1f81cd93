#include "moiety/data/prepare.h"

#include <chrono>
#include <cstdlib>
#include <fcntl.h>
#include <filesystem>
#include <string>
#include <sys/stat.h>
#include <thread>
#include <unistd.h>
#include <vector>

#include <gtest/gtest.h>

#include "moiety/data/token_file.h"
#include "tests/data/data_helpers.h"
#include "tests/support/error_of.h"

namespace moiety::data {
namespace {

namespace fs = std::filesystem;

PrepareOptions options(std::vector<std::string> inputs, std::string out) {
  PrepareOptions o;
  o.inputs = std::move(inputs);
  o.out = std::move(out);
  return o;
}

// The documents of a token file as text, without eos.
std::vector<std::string> documents(const std::string& path) {
  const auto file = TokenFile::open(path);
  std::vector<int32_t> ids(file->header().tokens), positions(ids.size());
  file->read(0, ids);
  file->positions(0, positions);
  std::vector<std::string> list;
  const Tokenizer bytes = Tokenizer::load("bytes");
  for (size_t i = 0; i < ids.size(); ++i) {
    if (positions[i] == 0) list.emplace_back();
    list.back() += bytes.decode(std::span(ids).subspan(i, 1));
    const bool last = i + 1 == ids.size() || positions[i + 1] == 0;
    EXPECT_EQ(ids[i] == 256, last) << path << ": token " << i;
  }
  EXPECT_EQ(list.size(), file->header().documents);
  return list;
}

std::string gzip(const std::string& path) {
  EXPECT_EQ(std::system(("gzip -n " + path).c_str()), 0);
  return path + ".gz";
}

using Texts = std::vector<std::string>;

TEST(FindBadUtf8, TellsFormsApart) {
  for (const char* good : {"", "plain", "\xc3\xa9", "\xe0\xa0\x80", "\xed\x9f\xbf", "\xee\x80\x80",
                           "\xf0\x90\x80\x80", "\xf4\x8f\xbf\xbf", "\xef\xbb\xbfx"}) {
    EXPECT_EQ(find_bad_utf8(good), std::string::npos) << good;
  }
  EXPECT_EQ(find_bad_utf8(std::string_view("a\0b", 3)), std::string::npos);
  for (const char* bad :
       {"\x80", "\xbf", "\xc0\x80", "\xc1\xbf", "\xc3", "\xc3(", "\xe0\x9f\xbf", "\xe2\x82",
        "\xe2(\xa1", "\xed\xa0\x80", "\xed\xbf\xbf", "\xf0\x8f\xbf\xbf", "\xf0\x90\x80",
        "\xf4\x90\x80\x80", "\xf5\x80\x80\x80", "\xfe", "\xff", "\xe9t\xe9"}) {
    EXPECT_EQ(find_bad_utf8(std::string("ok ") + bad), 3u) << bad;
  }
}

TEST(Prepare, OneDocumentAFile) {
  const TemporaryDirectory dir;
  const auto o = options({dir.write("b.txt", "second\n"), dir.write("a.txt", "h\xc3\xa9\r\n")},
                         dir / "out/corpus");
  const PrepareSummary summary = prepare(o);
  EXPECT_EQ(documents(dir / "out/corpus.tok"), (Texts{"second\n", "h\xc3\xa9\r\n"}));
  ASSERT_EQ(summary.files.size(), 1u);
  EXPECT_EQ(summary.files[0].path, dir / "out/corpus.tok");
  EXPECT_EQ(summary.files[0].documents, 2u);
  EXPECT_EQ(summary.files[0].tokens, 14u);
  EXPECT_EQ(summary.files[0].source_bytes, 12u);
  EXPECT_EQ(summary.inputs, 2);
  EXPECT_EQ(TokenFile::open(dir / "out/corpus.tok")->header().flags,
            kDocumentsEndInEos | kPiecesHaveChecksums);
}

TEST(Prepare, DirectoriesAreSortedAndEachFileIsTakenOnce) {
  const TemporaryDirectory dir;
  dir.write("in/z.txt", "z");
  dir.write("in/sub/b.txt", "b");
  dir.write("in/sub/a.txt", "a");
  dir.write("in/.hidden", "no");
  dir.write("in/.git/x.txt", "no");
  dir.write("in/old.tok", "no");
  dir.write("in/empty.txt", "");
  fs::create_symlink("z.txt", dir / "in/zz.u8");
  fs::create_symlink("nowhere", dir / "in/broken");
  const PrepareSummary summary =
      prepare(options({dir / "in/z.txt", dir / "in", dir / "in/sub/../z.txt"}, dir / "out"));
  EXPECT_EQ(documents(dir / "out.tok"), (Texts{"z", "a", "b"}));
  EXPECT_EQ(summary.inputs, 4);
  EXPECT_EQ(summary.repeated, 3);
}

TEST(Prepare, SplitText) {
  const TemporaryDirectory dir;
  auto o = options({dir.write("a", "one\n%\ntwo %\n\n%\n%\nthree\n%\n")}, dir / "out");
  o.rules.split = "\n%\n";
  const PrepareSummary summary = prepare(o);
  EXPECT_EQ(documents(dir / "out.tok"), (Texts{"one", "two %\n", "%\nthree"}));
  EXPECT_EQ(summary.empty, 0);
}

TEST(Prepare, Jsonl) {
  const TemporaryDirectory dir;
  const std::string path = dir.write("a.jsonl",
                                     "{\"id\": 1, \"text\": \"one\\nline \\u00e9\"}\n"
                                     "\n"
                                     "  {\"text\": \"two\", \"more\": {\"text\": \"no\"}}\r\n"
                                     "{\"text\": \"\"}\n"
                                     "{\"text\": \"\\ud83d\\ude00 end\"}");
  const PrepareSummary summary = prepare(options({path}, dir / "out"));
  EXPECT_EQ(documents(dir / "out.tok"),
            (Texts{"one\nline \xc3\xa9", "two", "\xf0\x9f\x98\x80 end"}));
  EXPECT_EQ(summary.empty, 1);

  auto o = options({dir.write("b.json", "{\"body\": \"B\"}")}, dir / "out");
  o.rules.format = InputFormat::kJsonl;
  o.rules.text_keys = {"body"};
  prepare(o);
  EXPECT_EQ(documents(dir / "out.tok"), (Texts{"B"}));
}

TEST(Prepare, SeveralKeys) {
  const TemporaryDirectory dir;
  auto o = options(
      {dir.write("a.jsonl", "{\"b\": \"two\", \"a\": \"one\"}\n{\"a\": \"\", \"b\": \"\"}")},
      dir / "out");
  o.rules.text_keys = {"a", "b"};
  prepare(o);
  EXPECT_EQ(documents(dir / "out.tok"), (Texts{"one\ntwo", "\n"}));
  o.rules.text_keys = {"a", "c"};
  EXPECT_EQ(kind_and_error_of([&] { prepare(o); }),
            "data: " + (dir / "a.jsonl") + ": line 1, byte 1: no key 'c' (see --text-key)");
}

TEST(Prepare, Conversations) {
  const TemporaryDirectory dir;
  const std::string path = dir.write("chat.json",
                                     "{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}, "
                                     "{\"role\": \"assistant\", \"content\": "
                                     "\"b\\u00e9\"}]}\n\n"
                                     "{\"prompt\": \"p\", \"completion\": \"c\"}\n");
  auto o = options({path}, dir / "out");
  o.rules.chat = ChatTemplate::kMistral;
  const PrepareSummary summary = prepare(o);
  const auto file = TokenFile::open(dir / "out.tok");
  file->verify();
  EXPECT_EQ(file->header().flags, kHasLossMask | kPiecesHaveChecksums);
  EXPECT_EQ(file->header().documents, 2u);
  EXPECT_EQ(file->header().source_bytes, 4u);
  std::vector<int32_t> ids(file->header().tokens);
  std::vector<uint8_t> targets(ids.size());
  file->read(0, ids);
  file->targets(0, targets);
  const std::string first = " [INST] a [/INST] b\xc3\xa9";
  EXPECT_EQ(Tokenizer::load("bytes").decode(ids), first + " [INST] p [/INST] c");
  EXPECT_EQ(ids[0], 257);
  EXPECT_EQ(ids[first.size() + 1], 256);
  EXPECT_EQ(file->target_count(), 5u + 3u);
  EXPECT_EQ(summary.files[0].targets, 8u);
  EXPECT_EQ(std::vector<uint8_t>(targets.begin() + 16, targets.begin() + 25),
            (std::vector<uint8_t>{0, 0, 1, 1, 1, 1, 1, 0, 0}));
}

template <class T>
void put(std::string& bytes, const std::vector<T>& values) {
  bytes.append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
}

std::vector<std::vector<int32_t>> ids_of_documents(const std::string& path) {
  const auto file = TokenFile::open(path);
  file->verify();
  std::vector<std::vector<int32_t>> all;
  for (uint64_t d = 0; d < file->header().documents; ++d) {
    const auto [begin, end] = file->document(d);
    file->read(begin, all.emplace_back(end - begin));
  }
  return all;
}

TEST(Prepare, TokenFilesOfLlmc) {
  const TemporaryDirectory dir;
  std::vector<int32_t> header(256);
  header[0] = 20240520;
  header[1] = 1;
  header[2] = 7;
  std::string file;
  put(file, header);
  put(file, std::vector<uint16_t>{256, 97, 98, 256, 99, 256, 100});
  auto o = options({dir.write("a.bin", file)}, dir / "out");
  o.from = ForeignTokens::kLlmc;
  prepare(o);
  EXPECT_EQ(ids_of_documents(dir / "out.tok"),
            (std::vector<std::vector<int32_t>>{{256, 97, 98}, {256, 99}, {256, 100}}));
  EXPECT_EQ(TokenFile::open(dir / "out.tok")->header().source_bytes, 4u);
  EXPECT_EQ(TokenFile::open(dir / "out.tok")->header().flags, kPiecesHaveChecksums);

  const auto error = [&](const std::string& bytes) {
    dir.write("a.bin", bytes);
    return kind_and_error_of([&] { prepare(o); }).substr(6 + (dir / "a.bin: ").size());
  };
  EXPECT_EQ(error(file.substr(0, 1030)), "1030 bytes, its header says 1038");
  EXPECT_EQ(error(file.substr(0, 100)), "100 bytes, cut off in its header: there should be 256");
  header[0] = 5;
  std::string other;
  put(other, header);
  EXPECT_EQ(error(other), "no token file of llm.c: its magic is 5");
  file[1025] = 0x7f;
  EXPECT_EQ(error(file), "an id is 32512, the vocabulary of --tokenizer has 264");
}

TEST(Prepare, TokenFilesOfMegatron) {
  const TemporaryDirectory dir;
  std::string index("MMIDIDX\0\0", 9);
  put(index, std::vector<uint64_t>{1});
  put(index, std::vector<uint8_t>{4});
  put(index, std::vector<uint64_t>{3, 3});
  put(index, std::vector<int32_t>{2, 1, 3});
  put(index, std::vector<int64_t>{0, 8, 12});
  put(index, std::vector<int64_t>{0, 2, 3});
  std::string bin;
  put(bin, std::vector<int32_t>{97, 98, 256, 99, 100, 256});
  dir.write("a.idx", index);
  const std::string path = dir.write("a.bin", bin);
  auto o = options({path}, dir / "out");
  o.from = ForeignTokens::kMegatron;
  prepare(o);
  EXPECT_EQ(ids_of_documents(dir / "out.tok"),
            (std::vector<std::vector<int32_t>>{{97, 98, 256}, {99, 100, 256}}));

  const auto error = [&] { return kind_and_error_of([&] { prepare(o); }); };
  dir.write("a.bin", bin.substr(0, 20));
  EXPECT_EQ(error(), "data: " + (dir / "a.idx") + ": sequence 2 is 3 ids at byte 12 of 20");
  dir.write("a.bin", bin);
  for (size_t n = 1; n < index.size(); ++n) {
    dir.write("a.idx", index.substr(0, n));
    ASSERT_NE(error().find("cut off"), std::string::npos) << n;
  }
  index[17] = 7;
  dir.write("a.idx", index);
  EXPECT_EQ(error(), "data: " + (dir / "a.idx") +
                         ": version 1 with ids of type 7; read is version 1 with integers");
  std::filesystem::remove(dir / "a.bin");
  EXPECT_EQ(error(), "data: " + path + ": cannot be read");
  EXPECT_FALSE(fs::exists(dir / "b.tok"));
}

TEST(Prepare, BadConversations) {
  const TemporaryDirectory dir;
  const std::string good = "{\"prompt\": \"p\", \"completion\": \"c\"}\n";
  const auto error = [&](const std::string& bad, bool bos = false) {
    auto o = options({dir.write("a", good + bad)}, dir / "out");
    o.rules.chat = ChatTemplate::kChatml;
    o.rules.bos = bos;
    return kind_and_error_of([&] { prepare(o); });
  };
  const std::string place = "data: " + (dir / "a") + ": line 2, byte 36: ";
  EXPECT_EQ(error("{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}]}"),
            place + "a conversation without a message of the assistant: nothing to learn");
  EXPECT_EQ(error("{\"messages\": [{\"role\": \"gpt\"}]}"), place + "message 1: no key 'content'");
  EXPECT_EQ(error("{\"prompt\": 1, \"completion\": \"\"}"),
            place + "the conversation: 'prompt' is a JSON number, not a string");
  EXPECT_EQ(error("{").substr(0, place.size() + 9), place + "bad JSON:");
  EXPECT_EQ(error("", true), "usage: --bos: a chat template says where bos stands");
  auto o = options({dir.write("a", good + "{}")}, dir / "out");
  o.rules.chat = ChatTemplate::kChatml;
  o.rules.skip_bad = true;
  EXPECT_EQ(prepare(o).bad, 1);
}

TEST(Prepare, Bos) {
  const TemporaryDirectory dir;
  auto o = options({dir.write("a", "x")}, dir / "out");
  o.rules.bos = true;
  prepare(o);
  const auto file = TokenFile::open(dir / "out.tok");
  std::vector<int32_t> ids(file->header().tokens);
  file->read(0, ids);
  EXPECT_EQ(ids, (std::vector<int32_t>{257, 'x', 256}));
  EXPECT_EQ(file->header().flags,
            kDocumentsEndInEos | kDocumentsStartWithBos | kPiecesHaveChecksums);
}

TEST(Prepare, GzipIsSeenByItsContent) {
  const TemporaryDirectory dir;
  const std::string jsonl = gzip(dir.write("a.jsonl", "{\"text\": \"packed\"}\n"));
  const std::string text = gzip(dir.write("b.dict", std::string(300000, 'x') + "y"));
  fs::rename(text, dir / "b.dict.dz");
  // Two members, one after the other, are one stream.
  const std::string first = read_all(gzip(dir.write("c", "ab")));
  dir.write("c.gz", first + read_all(gzip(dir.write("d", "cd"))));
  fs::rename(dir / "c.gz", dir / "e");
  const PrepareSummary summary =
      prepare(options({jsonl, dir / "b.dict.dz", dir / "e"}, dir / "out"));
  EXPECT_EQ(documents(dir / "out.tok"), (Texts{"packed", std::string(300000, 'x') + "y", "abcd"}));
  EXPECT_EQ(summary.files[0].source_bytes, 6u + 300001 + 4);
}

TEST(Prepare, DamagedGzip) {
  const TemporaryDirectory dir;
  const std::string good = read_all(gzip(dir.write("a", std::string(1000, 'x'))));
  const auto error = [&](const std::string& bytes) {
    const std::string path = dir.write("bad.gz", bytes);
    return kind_and_error_of([&] { prepare(options({path}, dir / "out")); })
        .substr(0, 6 + path.size() + 23);
  };
  const std::string path = dir / "bad.gz";
  EXPECT_EQ(error(good.substr(0, good.size() - 1)), "data: " + path + ": the gzip stream is cu");
  EXPECT_EQ(error(good.substr(0, 2)), "data: " + path + ": the gzip stream is cu");
  std::string flipped = good;
  flipped[good.size() - 5] ^= 1;
  EXPECT_EQ(error(flipped), "data: " + path + ": the gzip stream is da");
  EXPECT_EQ(error(good + "trailing"), "data: " + path + ": the gzip stream is da");
  EXPECT_FALSE(fs::exists(dir / "out.tok"));
}

std::string from_hex(const std::string& digits) {
  std::string bytes;
  for (size_t i = 0; i < digits.size(); i += 2) {
    bytes += static_cast<char>(std::stoi(digits.substr(i, 2), nullptr, 16));
  }
  return bytes;
}

// What `zstd` made of {"text": "packed"} and of 300,000 times x, then y.
const std::string kZstdLine =
    from_hex("28b52ffd04589900007b2274657874223a20227061636b6564227d0ac3c4a4ed");
const std::string kZstdLong =
    from_hex("28b52ffd04585400001078780100fbff39c002020010785500001078790100dc131d08014d52e2d7");

TEST(Prepare, ZstdIsSeenByItsContent) {
  const TemporaryDirectory dir;
  const std::string skipped("\x50\x2a\x4d\x18\x02\0\0\0zz", 10);
  const std::vector<std::string> inputs{dir.write("a.jsonl.zst", kZstdLine + kZstdLine),
                                        dir.write("b", skipped + kZstdLong)};
  prepare(options(inputs, dir / "out"));
  EXPECT_EQ(documents(dir / "out.tok"),
            (Texts{"packed", "packed", std::string(300000, 'x') + "y"}));
}

TEST(Prepare, DamagedZstd) {
  const TemporaryDirectory dir;
  const std::string path = dir / "bad.zst";
  const auto error = [&](const std::string& bytes) {
    dir.write("bad.zst", bytes);
    return kind_and_error_of([&] { prepare(options({path}, dir / "out")); })
        .substr(0, 6 + path.size() + 23);
  };
  for (size_t n = 4; n < kZstdLong.size(); ++n) {
    ASSERT_EQ(error(kZstdLong.substr(0, n)), "data: " + path + ": the zstd stream is cu") << n;
  }
  std::string flipped = kZstdLong;
  flipped.back() ^= 1;
  EXPECT_EQ(error(flipped), "data: " + path + ": the zstd stream is da");
  EXPECT_EQ(error(kZstdLine + "trailing"), "data: " + path + ": the zstd stream is da");
  EXPECT_FALSE(fs::exists(dir / "out.tok"));
}

TEST(Prepare, AKeyMayStandAgainInsideAValue) {
  const TemporaryDirectory dir;
  const std::string path =
      dir.write("a.jsonl", "{\"text\": \"\\\"text\\\"\", \"meta\": {\"text\": 1, \"text\": 2}}\n");
  prepare(options({path}, dir / "out"));
  EXPECT_EQ(documents(dir / "out.tok"), Texts{"\"text\""});
}

TEST(Prepare, AFifoWithoutAWriterIsEmptyAndNotWaitedFor) {
  const TemporaryDirectory dir;
  const std::string fifo = dir / "fifo";
  ASSERT_EQ(::mkfifo(fifo.c_str(), 0600), 0);
  EXPECT_EQ(kind_and_error_of([&] { prepare(options({fifo}, dir / "out")); }),
            "data: " + (dir / "out.tok") +
                ": none of 0 documents would be in it: the inputs hold no text");
  const int both = ::open(fifo.c_str(), O_RDWR);
  ASSERT_EQ(::write(both, "from a pipe", 11), 11);
  std::thread writer([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    ::close(both);
  });
  prepare(options({fifo}, dir / "out"));
  writer.join();
  EXPECT_EQ(documents(dir / "out.tok"), Texts{"from a pipe"});
}

TEST(Prepare, BadDocumentsStopWithFileLineAndByte) {
  struct Case {
    const char* name;
    const char* bytes;
    const char* error;
  };
  const std::vector<Case> cases{
      {"a.txt", "line\nna\xefve\n",
       "line 2, byte 8: byte 0xef is not UTF-8 (Latin-1 text? iconv -f latin1 -t utf-8 converts "
       "it; --skip-bad leaves the document out)"},
      {"b.jsonl", "{\"text\": \"a\"}\n{\"text\": \"\xe9\"}\n", "line 2, byte 25: byte 0xe9 is not"},
      {"c.jsonl", "{\"text\": \"a\"}\n{\"text\": oops}\n", "line 2, byte 24: bad JSON: "},
      {"d.jsonl", "{\"txt\": \"a\"}\n", "line 1, byte 1: no key 'text' (see --text-key)"},
      {"e.jsonl", "\n\n{\"text\": 5}\n", "line 3, byte 3: 'text' is a JSON number, not a string"},
      {"f.jsonl", "[1]\n", "line 1, byte 1: no key 'text'"},
      {"g.jsonl", "{\"text\": \"\\ud800\"}\n", "line 1, byte 17: bad JSON: "},
      {"h.jsonl", "{\"text\": \"a\"", "line 1, byte 13: bad JSON: "},
      {"i.jsonl", "{\"text\": \"a\"} x\n", "line 1, byte 15: bad JSON: "},
      {"j.jsonl", "{\"text\": \"a\", \"text\": \"b\"}\n",
       "line 1, byte 1: key 'text' stands 2 times"},
      {"k.jsonl", "{\"text\": 1e999}\n", "line 1, byte 1: bad JSON: a number is beyond double"},
  };
  const TemporaryDirectory dir;
  for (const Case& c : cases) {
    const std::string path = dir.write(c.name, c.bytes);
    const std::string expected = "data: " + path + ": " + c.error;
    const std::string error = kind_and_error_of([&] { prepare(options({path}, dir / "out")); });
    EXPECT_EQ(error.substr(0, expected.size()), expected) << error;
  }
  EXPECT_EQ(std::distance(fs::directory_iterator(dir / ""), {}), std::ssize(cases));

  auto o = options({dir / "a.txt", dir / "b.jsonl", dir / "c.jsonl", dir / "e.jsonl"}, dir / "out");
  o.rules.skip_bad = true;
  const PrepareSummary summary = prepare(o);
  EXPECT_EQ(summary.bad, 4);
  EXPECT_EQ(documents(dir / "out.tok"), (Texts{"a", "a"}));
}

// Lines, bytes and the first error do not depend on where blocks are cut and how many run at once.
TEST(Prepare, LargeInputIsIndependentOfWorkers) {
  const TemporaryDirectory dir;
  std::string jsonl;
  Texts expected;
  for (int i = 0; i < 40000; ++i) {
    const std::string text = "document " + std::to_string(i) + std::string(i % 97, 'x');
    expected.push_back(text);
    jsonl += "{\"text\": \"" + text + "\"}\n";
  }
  const std::string path = dir.write("a.jsonl", jsonl);
  std::string first;
  for (const int workers : {1, 2, 5}) {
    auto o = options({path}, dir / "out");
    o.workers = workers;
    prepare(o);
    if (workers == 1) {
      first = read_all(dir / "out.tok");
      EXPECT_EQ(documents(dir / "out.tok"), expected);
    }
    EXPECT_EQ(read_all(dir / "out.tok"), first) << workers;
  }
  // A bad byte in each of the last two blocks: the first one is reported.
  const size_t at = jsonl.find("document 20000");
  const auto lines = std::count(jsonl.begin(), jsonl.begin() + static_cast<ptrdiff_t>(at), '\n');
  jsonl[at] = jsonl[jsonl.size() - 10] = '\xff';
  const std::string bad = dir.write("bad.jsonl", jsonl);
  const std::string gz = dir.write("cut.gz", "\x1f\x8b");
  const std::string start = "data: " + bad + ": line " + std::to_string(lines + 1) + ", byte " +
                            std::to_string(at + 1) + ": ";
  for (const int workers : {1, 2, 5}) {
    auto o = options({bad, gz}, dir / "out2");
    o.workers = workers;
    EXPECT_EQ(kind_and_error_of([&] { prepare(o); }).substr(0, start.size()), start);
  }
}

TEST(BlockReader, BlocksNeverDisagreeWithTheWhole) {
  const TemporaryDirectory dir;
  std::string bytes;
  for (int i = 0; i < 3000; ++i) bytes += "aab"[i * i % 3];
  const std::string path = dir.write("a", bytes);
  DocumentRules rules;
  for (const char* split : {"aa", "aba", "b", "zz"}) {
    rules.split = split;
    const Tokenizer tokenizer = Tokenizer::load("bytes");
    const EncodedBlock whole = encode({path, false, bytes, 0, 1}, rules, tokenizer);
    std::vector<uint32_t> ids;
    uint64_t offset = 0;
    BlockReader reader(path, rules, 7);
    while (const auto block = reader.next()) {
      EXPECT_EQ(block->offset, offset);
      offset += block->bytes.size();
      const EncodedBlock part = encode(*block, rules, tokenizer);
      ids.insert(ids.end(), part.ids.begin(), part.ids.end());
    }
    EXPECT_EQ(offset, bytes.size());
    EXPECT_EQ(ids, whole.ids) << split;
  }
}

TEST(Prepare, ValidationDocumentsDependOnTheirNumberAlone) {
  std::vector<uint64_t> chosen;
  for (uint64_t d = 0; d < 100; ++d) {
    if (is_validation_document(d, 0.1)) chosen.push_back(d);
  }
  EXPECT_EQ(chosen, (std::vector<uint64_t>{17, 27, 44, 54, 58, 67, 82}));

  const TemporaryDirectory dir;
  std::string text;
  for (int i = 0; i < 100; ++i) text += std::to_string(i) + "\n";
  auto o = options({dir.write("a", text)}, dir / "out");
  o.rules.split = "\n";
  o.valid_fraction = 0.1;
  const PrepareSummary summary = prepare(o);
  EXPECT_EQ(documents(dir / "out.valid.tok"), (Texts{"17", "27", "44", "54", "58", "67", "82"}));
  EXPECT_EQ(documents(dir / "out.train.tok").size(), 93u);
  ASSERT_EQ(summary.files.size(), 2u);
  EXPECT_EQ(summary.files[0].path, dir / "out.train.tok");
  EXPECT_EQ(summary.files[1].documents, 7u);
  EXPECT_FALSE(fs::exists(dir / "out.tok"));
}

TEST(Prepare, NothingToWriteIsAnErrorThatLeavesNothing) {
  const TemporaryDirectory dir;
  const std::string empty = dir.write("in/empty.txt", "");
  EXPECT_EQ(kind_and_error_of([&] { prepare(options({empty}, dir / "out")); }),
            "data: " + (dir / "out.tok") +
                ": none of 0 documents would be in it: the inputs hold no text");
  auto o = options({dir.write("in/a", "a")}, dir / "out");
  o.valid_fraction = 0.01;
  EXPECT_EQ(kind_and_error_of([&] { prepare(o); }),
            "data: " + (dir / "out.valid.tok") +
                ": none of 1 documents would be in it (see --valid-fraction)");
  EXPECT_EQ(kind_and_error_of([&] { prepare(options({dir / "no.txt"}, dir / "out")); }),
            "data: " + (dir / "no.txt") + ": no such file or directory");
  EXPECT_EQ(std::distance(fs::directory_iterator(dir / ""), {}), 1);
}

}  // namespace
}  // namespace moiety::data
