#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include "moiety/base/error.h"
#include "moiety/base/printable.h"
#include "moiety/data/bpe/pattern.h"
#include "moiety/data/bpe/regex.h"

namespace moiety::data::bpe {
namespace {

constexpr uint32_t kMostSteps = 100'000'000;
constexpr size_t kLeastStack = 32 << 10, kMostStack = 16 << 20;

std::string message(int error) {
  PCRE2_UCHAR out[256] = {};
  pcre2_get_error_message(error, out, sizeof(out));
  return reinterpret_cast<const char*>(out);
}

std::string config_text(uint32_t what) {
  char out[64] = {};
  pcre2_config(what, out);
  return out;
}

// The tables of code points reach from Unicode 14, the oldest that PCRE2 may be of, to 16.
void check_unicode(const std::string& place) {
  const std::string version = config_text(PCRE2_CONFIG_UNICODE_VERSION);
  const int major = std::atoi(version.c_str());
  if (major >= 14 && major <= 16) return;
  fail(ErrorKind::kUnsupported,
       "{}: patterns need a PCRE2 of Unicode 14 to 16 (10.40 to 10.46); this one is of {}", place,
       version);
}

}  // namespace

std::string regex_library() {
  uint32_t jit = 0;
  pcre2_config(PCRE2_CONFIG_JIT, &jit);
  const std::string version = config_text(PCRE2_CONFIG_VERSION);  // with its date
  return text("PCRE2 {} of Unicode {}{}", version.substr(0, version.find(' ')),
              config_text(PCRE2_CONFIG_UNICODE_VERSION), jit ? "" : " without JIT");
}

struct Pattern::Code {
  pcre2_code* code = nullptr;
  ~Code() { pcre2_code_free(code); }
};

Pattern::Pattern(const Sought& sought) : place_(sought.place) {
  if (!sought.is_pattern) {
    text_ = sought.text;
    return;
  }
  const std::string pattern = pcre_pattern(sought.text, sought.place);
  check_unicode(sought.place);
  auto code = std::make_shared<Code>();
  pcre2_compile_context* context = pcre2_compile_context_create(nullptr);
  pcre2_set_newline(context, PCRE2_NEWLINE_LF);
  int error = 0;
  PCRE2_SIZE at = 0;
  code->code = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pattern.data()), pattern.size(),
                             PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE | PCRE2_NEVER_BACKSLASH_C,
                             &error, &at, context);
  pcre2_compile_context_free(context);
  if (!code->code) {
    fail(ErrorKind::kUnsupported, "{}: PCRE2 refuses the pattern {}: {}", sought.place,
         printable(sought.text), message(error));
  }
  pcre2_jit_compile(code->code, PCRE2_JIT_COMPLETE);  // where there is no JIT it is interpreted
  code_ = std::move(code);
}

struct Matcher::State {
  pcre2_match_data* data = nullptr;
  pcre2_match_context* context = nullptr;
  pcre2_jit_stack* stack = nullptr;
  ~State() {
    pcre2_match_data_free(data);
    pcre2_match_context_free(context);
    pcre2_jit_stack_free(stack);
  }
};

Matcher::Matcher(const Pattern& pattern) : pattern_(pattern), state_(std::make_unique<State>()) {
  if (!pattern_.code_) return;
  State& s = *state_;
  s.data = pcre2_match_data_create(1, nullptr);
  s.context = pcre2_match_context_create(nullptr);
  s.stack = pcre2_jit_stack_create(kLeastStack, kMostStack, nullptr);
  if (!s.data || !s.context) throw MemoryError("tokenizer: no memory for PCRE2");
  pcre2_set_match_limit(s.context, kMostSteps);
  if (s.stack) pcre2_jit_stack_assign(s.context, nullptr, s.stack);
}

std::optional<Matcher::Range> Matcher::find_pattern(std::string_view text, size_t from) {
  const State& s = *state_;
  const auto match = [&](uint32_t options) {
    return pcre2_match(pattern_.code_->code, reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(),
                       from, PCRE2_NO_UTF_CHECK | options, s.data, s.context);
  };
  int rc = match(0);
  // The interpreter keeps its places on the heap.
  if (rc == PCRE2_ERROR_JIT_STACKLIMIT) rc = match(PCRE2_NO_JIT);
  if (rc == PCRE2_ERROR_NOMATCH) return std::nullopt;
  if (rc < 0) throw DataError("{}: the pattern fails on a text: {}", pattern_.place_, message(rc));
  const PCRE2_SIZE* places = pcre2_get_ovector_pointer(s.data);
  return Range{places[0], places[1]};
}

// The rest is the same with and without PCRE2 (no_pcre2.cpp), but needs State.
Matcher::Matcher(Matcher&&) noexcept = default;
Matcher::~Matcher() = default;

std::optional<Matcher::Range> Matcher::find(std::string_view text, size_t from) {
  if (pattern_.code_) return find_pattern(text, from);
  const size_t at = text.find(pattern_.text_, from);
  if (at == text.npos) return std::nullopt;
  return Range{at, at + pattern_.text_.size()};
}

}  // namespace moiety::data::bpe
