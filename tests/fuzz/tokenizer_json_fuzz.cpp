#include <string>
#include <vector>

#include "moiety/base/error.h"
#include "moiety/data/documents.h"
#include "moiety/data/tokenizer.h"
#include "tests/fuzz/targets.h"

namespace moiety::fuzz {
namespace {

using namespace data;

// Texts that meet most of what a tokenizer may do.
constexpr std::string_view kTexts[] = {
    "", "a", " the  quick\tbrown\r\nfox's 12345 \xc3\xa9\xe2\x96\x81 e\xcc\x81</s> <mask>x",
    "\xe4\xb8\xad\xe6\x96\x87 aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa "
    "\xf0\x9f\x98\x80"};

void use(const Tokenizer& tokenizer) {
  for (const std::string_view text : kTexts) {
    for (const bool special : {false, true}) {
      std::vector<uint32_t> ids, again;
      tokenizer.encode(text, ids, special);
      tokenizer.encode(text, again, special);
      require(ids == again, "the same text has the same ids");
      for (const uint32_t id : ids) require(id < tokenizer.vocab(), "ids are below the vocabulary");
      const std::vector<int32_t> tokens(ids.begin(), ids.end());
      TokenStream stream(tokenizer);
      std::string streamed;
      for (const int32_t id : tokens) streamed += stream.add(id);
      require(streamed == tokenizer.decode(tokens), "a stream gives the text of all");
    }
  }
}

}  // namespace

void tokenizer_json(std::string_view json) {
  try {
    const TokenizerFile file{"tokenizer.json", std::string(json)};
    const Tokenizer tokenizer = Tokenizer::of_files("fuzz", {file});
    require(Tokenizer::of_files("other", {file}).identity() == tokenizer.identity(),
            "an identity is of the contents");
    use(tokenizer);
  } catch (const DataError&) {
  } catch (const ErrorOf<ErrorKind::kUnsupported>&) {
  }
}

}  // namespace moiety::fuzz
