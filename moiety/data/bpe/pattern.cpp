// The classes \s, \w, \d, \h and \p{...} are spelled out: PCRE2 knows them by its own Unicode, and
// its \s has U+180E, its \h blanks, its \w no marks.
#include "moiety/data/bpe/pattern.h"

#include <algorithm>
#include <cctype>
#include <optional>
#include <vector>

#include "moiety/base/error.h"
#include "moiety/base/printable.h"
#include "moiety/data/bpe/code_points.h"

namespace moiety::data::bpe {
namespace {

constexpr std::string_view kSpaces =
    "\\x{9}-\\x{d}\\x{20}\\x{85}\\x{a0}\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}\\x{202f}"
    "\\x{205f}\\x{3000}";
constexpr std::string_view kNoSpaces =
    "\\x{0}-\\x{8}\\x{e}-\\x{1f}\\x{21}-\\x{84}\\x{86}-\\x{9f}\\x{a1}-\\x{167f}\\x{1681}-\\x{1fff}"
    "\\x{200b}-\\x{2027}\\x{202a}-\\x{202e}\\x{2030}-\\x{205e}\\x{2060}-\\x{2fff}"
    "\\x{3001}-\\x{d7ff}\\x{e000}-\\x{10ffff}";
constexpr std::string_view kHex = "0-9A-Fa-f";
constexpr std::string_view kNoHex =
    "\\x{0}-\\x{2f}\\x{3a}-\\x{40}\\x{47}-\\x{60}\\x{67}-\\x{d7ff}\\x{e000}-\\x{10ffff}";

std::string spelled(char32_t c) {
  const bool plain = c < 128 && std::isalnum(static_cast<int>(c));
  return plain ? std::string(1, static_cast<char>(c)) : text("\\x{{{:x}}}", uint32_t{c});
}

std::string spelled(std::span<const CodePoints> set) {
  std::string out;
  for (const CodePoints& r : set) {
    out += r.first == r.last ? spelled(r.first) : spelled(r.first) + "-" + spelled(r.last);
  }
  return out;
}

// The general categories below a name such as "L" or "Lu". Mn and Mc, of which each has a code point
// that has changed sides, Cn, and what holds it are none; M is.
std::vector<std::string> categories_of(std::string_view name) {
  std::vector<std::string> out;
  for (const std::string_view one :
       {"Lu", "Ll", "Lt", "Lm", "Lo", "Mn", "Mc", "Me", "Nd", "Nl", "No", "Pc", "Pd", "Ps",
        "Pe", "Pi", "Pf", "Po", "Sm", "Sc", "Sk", "So", "Zs", "Zl", "Zp", "Cf", "Cc"}) {
    const bool whole = name == one && one != "Mn" && one != "Mc";
    if (whole || (name.size() == 1 && name[0] == one[0] && name != "C")) out.emplace_back(one);
  }
  return out;
}

// The members of a property, as they stand in a class; empty if the property is not known.
std::string property_members(std::string_view name) {
  constexpr std::pair<std::string_view, std::string_view> kLong[] = {
      {"Letter", "L"},      {"Mark", "M"},   {"Number", "N"},
      {"Punctuation", "P"}, {"Symbol", "S"}, {"Separator", "Z"}};
  for (const auto& [known, category] : kLong) {
    if (name == known) name = category;
  }
  std::string out;
  if (const std::vector<std::string> categories = categories_of(name); !categories.empty()) {
    out = text("\\p{{{}}}", name);
    for (const std::string& category : categories) out += spelled(young(category));
    return out;
  }
  for (const std::string_view script :
       {"Arabic", "Cyrillic", "Devanagari", "Greek", "Han", "Hangul", "Hebrew", "Hiragana",
        "Katakana", "Latin", "Thai"}) {
    if (name == script) return text("\\p{{sc:{}}}", script) + spelled(young(script));
  }
  return out;
}

// The members of \w. In a class it lacks the six powers and fractions of Latin-1.
std::string word_members(bool in_class) {
  std::span<const CodePoints> more = more_of_words();
  while (in_class && !more.empty() && more.front().last < 0x100) more = more.subspan(1);
  return property_members("L") + property_members("M") + property_members("Nd") +
         property_members("Nl") + property_members("Pc") + spelled(more);
}

// A set of code points, as members of a class.
struct Members {
  std::string has;
  std::string lacks;  // if not empty, the set is all but these, and `has` is empty
};

class Rewriter {
 public:
  Rewriter(std::string_view in, const std::string& place) : in_(in), place_(place) {}

  std::string run() {
    alternatives();
    if (at_ < in_.size()) refuse("an unmatched )");
    return std::move(out_);
  }

 private:
  static constexpr int kDeepest = 100;

  [[noreturn]] void refuse(std::string_view what) const {
    fail(ErrorKind::kUnsupported, "{}: {} at byte {} of the pattern {}", place_, what, at_,
         printable(in_));
  }
  bool at_end() const { return at_ == in_.size(); }
  char peek() const { return at_end() ? '\0' : in_[at_]; }
  bool take(std::string_view what) {
    if (!in_.substr(at_).starts_with(what)) return false;
    at_ += what.size();
    return true;
  }
  char32_t take_character() {
    const size_t bytes = next_character(in_, at_) - at_;
    const char32_t c = code_point(in_.substr(at_, bytes));
    at_ += bytes;
    return c;
  }

  void alternatives() {
    while (!at_end() && peek() != ')') {
      if (take("|")) {
        out_ += "|";
        last_letter_ = '\0';
      } else {
        piece();
      }
    }
  }

  // One thing that matches, and its quantifier.
  void piece() {
    const char c = peek();
    if (c != '(' && !(ignores_case_ && std::isalpha(static_cast<unsigned char>(c)))) {
      last_letter_ = '\0';
    }
    switch (c) {
      case '(':
        if (!group()) return;
        break;
      case '[':
        out_ += set();
        break;
      case '.':
        ++at_;
        out_ += dot_takes_newline_ ? "(?s:.)" : ".";
        break;
      case '^':
      case '$':
        out_ += in_[at_++];
        return;
      case '\\':
        if (!escape()) return;
        break;
      case '*':
      case '+':
      case '?':
        refuse("a quantifier of nothing");
      default:
        literal(take_character());
    }
    quantifier();
  }

  void literal(char32_t c) {
    if (ignores_case_) check_case(c);
    out_ += spelled(c);
  }

  // Oniguruma lets two letters match one character without case: "ss" and U+00DF.
  void check_case(char32_t c) {
    if (c >= 128) refuse("a character beyond ASCII without case");
    const char letter = static_cast<char>(std::tolower(static_cast<int>(c)));
    const std::string pair{last_letter_, letter};
    for (const std::string_view joined : {"ss", "st", "ff", "fi", "fl"}) {
      if (pair == joined) refuse(text("\"{}\" without case", joined));
    }
    last_letter_ = letter;
  }

  // Returns whether a quantifier may follow.
  bool group() {
    const bool outer_case = ignores_case_, outer_dot = dot_takes_newline_;
    if (++depth_ > kDeepest) refuse("groups too deep");
    ++at_;
    bool is_look = false, to_end = false;
    if (peek() != '?') {
      out_ += "(?:";  // without back references a group is no more than that
    } else {
      for (const std::string_view head : {"?:", "?>", "?=", "?!", "?<=", "?<!"}) {
        if (!take(head)) continue;
        out_ += "(";
        out_ += head;
        is_look = head != "?:" && head != "?>";
      }
      if (peek() == '?') to_end = options();
    }
    if (!to_end) last_letter_ = '\0';
    alternatives();
    if (to_end) {
      // Options without a colon hold to the end of the group around them.
      out_ += ")";
    } else {
      if (!take(")")) refuse("a missing )");
      out_ += ")";
    }
    ignores_case_ = outer_case;
    dot_takes_newline_ = outer_dot;
    --depth_;
    return !to_end && !is_look;
  }

  // Takes "?i-m:" or "?i)"; returns whether it was the latter. The case goes to PCRE2, and the dot
  // is spelled out.
  bool options() {
    ++at_;
    bool on = true;
    for (; !at_end() && peek() != ':' && peek() != ')'; ++at_) {
      switch (peek()) {
        case '-':
          on = false;
          break;
        case 'i':
          ignores_case_ = on;
          break;
        case 'm':
          dot_takes_newline_ = on;
          break;
        default:
          refuse("a group of this kind");
      }
    }
    if (at_end()) refuse("a missing )");
    out_ += ignores_case_ ? "(?i:" : "(?-i:";
    return in_[at_++] == ')';
  }

  // Takes an escape outside of a class. Returns whether a quantifier may follow.
  bool escape() {
    if (in_.substr(at_).starts_with("\\b") || in_.substr(at_).starts_with("\\B")) {
      const std::string word = "[" + word_members(false) + "]";
      out_ += in_[at_ + 1] == 'b' ? text("(?:(?<={0})(?!{0})|(?<!{0})(?={0}))", word)
                                  : text("(?:(?<={0})(?={0})|(?<!{0})(?!{0}))", word);
      at_ += 2;
      return false;
    }
    for (const std::string_view anchor : {"\\A", "\\z", "\\Z"}) {
      if (!take(anchor)) continue;
      out_ += anchor;
      return false;
    }
    if (const std::optional<Members> members = class_escape(false)) {
      out_ += members->lacks.empty() ? "[" + members->has + "]" : "[^" + members->lacks + "]";
    } else {
      literal(character_escape());
    }
    return true;
  }

  std::optional<Members> class_escape(bool in_class) {
    const auto of = [](std::string_view has) { return Members{std::string(has), ""}; };
    if (take("\\s")) return of(kSpaces);
    if (take("\\S")) return of(kNoSpaces);
    if (take("\\h")) return of(kHex);
    if (take("\\H")) return of(kNoHex);
    if (take("\\d")) return of(property_members("Nd"));
    if (take("\\D")) return Members{"", property_members("Nd")};
    if (take("\\w")) return of(word_members(in_class));
    if (take("\\W")) return Members{"", word_members(in_class)};
    if (!in_.substr(at_).starts_with("\\p") && !in_.substr(at_).starts_with("\\P")) return {};
    const size_t begin = at_;
    bool without = in_[at_ + 1] == 'P';
    at_ += 2;
    const size_t end = in_.find('}', at_);
    if (peek() != '{' || end == in_.npos) refuse("\\p without {}");
    std::string_view name = in_.substr(at_ + 1, end - at_ - 1);
    if (name.starts_with("^")) {
      without = !without;
      name.remove_prefix(1);
    }
    if (ignores_case_ && (name == "Lu" || name == "Ll" || name == "Lt")) {
      refuse(text("\\p{{{}}} without case", name));
    }
    const std::string members = property_members(name);
    if (members.empty()) {
      at_ = begin;
      refuse(text("the property {}", printable(name)));
    }
    at_ = end + 1;
    return without ? Members{"", members} : Members{members, ""};
  }

  // A backslash and what it makes of the next character.
  char32_t character_escape() {
    const size_t begin = at_++;
    const char c = peek();
    constexpr std::string_view kNames = "tnrfvae", kValues = "\t\n\r\f\v\a\x1b";
    if (const size_t known = kNames.find(c); c != '\0' && known != kNames.npos) {
      ++at_;
      return static_cast<char32_t>(kValues[known]);
    }
    if (c == 'x' || c == 'u') return hex_escape(begin);
    const bool is_word = std::isalnum(static_cast<unsigned char>(c)) || c == '_';
    if (is_word || at_end() || c == '\n') {
      at_ = begin;
      refuse("this escape");
    }
    return take_character();
  }

  // \x{1F600}, \xA0 below 128, \u00A0.
  char32_t hex_escape(size_t begin) {
    const bool is_u = in_[at_++] == 'u', braced = !is_u && take("{");
    const size_t most = braced ? 6 : is_u ? 4 : 2;
    char32_t value = 0;
    size_t digits = 0;
    for (; digits < most && std::isxdigit(static_cast<unsigned char>(peek())); ++digits, ++at_) {
      value = value * 16 + static_cast<char32_t>(std::stoi(std::string(1, peek()), nullptr, 16));
    }
    const bool closed = !braced || take("}");
    const bool is_character = value < 0xd800 || (value > 0xdfff && value < 0x110000);
    const bool is_byte = !braced && !is_u && value >= 128;
    if (digits == 0 || (is_u && digits < 4) || !closed || !is_character || is_byte) {
      at_ = begin;
      refuse("this escape");
    }
    return value;
  }

  // Takes a class in brackets and returns what matches it.
  std::string set() {
    ++at_;
    const bool negated = take("^");
    if (peek() == ']') refuse("an empty class");
    std::string has;
    std::vector<std::string> lacks;  // of each member that is all but something
    while (peek() != ']') {
      if (at_end()) refuse("a missing ]");
      member(has, lacks);
    }
    ++at_;
    if (lacks.empty()) return (negated ? "[^" : "[") + has + "]";
    // PCRE2 cannot unite "all but" with more, so it is alternatives; none of them, if negated.
    std::string out = "(?:";
    if (!negated) {
      if (!has.empty()) out += "[" + has + "]|";
      for (const std::string& l : lacks) out += "[^" + l + "]" + (&l == &lacks.back() ? ")" : "|");
      return out;
    }
    if (!has.empty()) out += "(?![" + has + "])";
    for (const std::string& l : lacks) {
      out += &l == &lacks.back() ? "[" + l + "])" : "(?=[" + l + "])";
    }
    return out;
  }

  void member(std::string& has, std::vector<std::string>& lacks) {
    if (in_.substr(at_).starts_with("&&")) refuse("the intersection of classes");
    if (peek() == '[') refuse("a class in a class");
    if (const std::optional<Members> members = class_escape(true)) {
      has += members->has;
      if (!members->lacks.empty()) lacks.push_back(members->lacks);
      if (peek() == '-' && at_ + 1 < in_.size() && in_[at_ + 1] != ']') {
        refuse("a range from a class");
      }
      return;
    }
    const char32_t first = set_character();
    const bool is_range = peek() == '-' && at_ + 1 < in_.size() && in_[at_ + 1] != ']';
    if (!is_range) {
      has += spelled(first);
      return;
    }
    ++at_;
    if (peek() == '[' || class_escape(true)) refuse("a range to a class");
    const char32_t last = set_character();
    if (last < first) refuse("a range backwards");
    has += spelled(first) + "-" + spelled(last);
  }

  char32_t set_character() {
    const char32_t c = peek() == '\\' ? set_escape() : take_character();
    if (ignores_case_ && c >= 128) refuse("a character beyond ASCII without case");
    return c;
  }
  char32_t set_escape() {
    if (take("\\b")) return '\b';
    return character_escape();
  }

  void quantifier() {
    const size_t begin = at_;
    if (peek() == '*' || peek() == '+' || peek() == '?') {
      out_ += in_[at_++];
      if (peek() == '?' || peek() == '+') out_ += in_[at_++];
    } else if (!interval()) {
      return;
    }
    last_letter_ = '\0';
    const size_t mark = at_;
    if (peek() == '*' || peek() == '+' || peek() == '?' || interval()) {
      at_ = mark;
      refuse(text("more behind the quantifier {}", in_.substr(begin, mark - begin)));
    }
  }

  // Takes {n}, {n,}, {n,m} or {,m}; any other brace stands for itself.
  bool interval() {
    if (peek() != '{') return false;
    const size_t end = in_.find('}', at_);
    if (end == in_.npos) return false;
    const std::string_view inner = in_.substr(at_ + 1, end - at_ - 1);
    const size_t comma = inner.find(',');
    const auto is_number = [](std::string_view s) {
      return s.size() <= 4 &&
             std::all_of(s.begin(), s.end(), [](char c) { return c >= '0' && c <= '9'; });
    };
    const std::string_view low = inner.substr(0, comma);
    const std::string_view high = comma == inner.npos ? low : inner.substr(comma + 1);
    if (!is_number(low) || !is_number(high) || (low.empty() && high.empty())) return false;
    out_ += comma == inner.npos ? text("{{{}}}", low)
                                : text("{{{},{}}}", low.empty() ? "0" : low, high);
    at_ = end + 1;
    if (comma != inner.npos && take("?")) out_ += "?";
    return true;
  }

  std::string_view in_;
  const std::string& place_;
  std::string out_;
  size_t at_ = 0;
  int depth_ = 0;
  bool ignores_case_ = false, dot_takes_newline_ = false;
  char last_letter_ = '\0';  // before this one, where case is ignored
};

}  // namespace

std::string pcre_pattern(std::string_view oniguruma, const std::string& place) {
  return Rewriter(oniguruma, place).run();
}

std::string literal_pattern(std::string_view text) {
  std::string out;
  for (size_t at = 0; at < text.size(); at = next_character(text, at)) {
    out += spelled(code_point(text.substr(at)));
  }
  return out;
}

}  // namespace moiety::data::bpe
