// A strict reader of the XML that SVG pictures are made of, for tests: elements, attributes, text
// and the five entities. Anything else, and anything out of place, throws.
#pragma once

#include <cctype>
#include <map>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace moiety::app {

struct XmlElement {
  std::string name;
  std::map<std::string, std::string> attributes;
  std::string text;
  std::vector<XmlElement> children;

  int count(std::string_view element) const {
    int n = name == element;
    for (const XmlElement& child : children) n += child.count(element);
    return n;
  }
  // A <text> element holds exactly this.
  bool has_text(std::string_view wanted) const {
    if (name == "text" && text == wanted) return true;
    for (const XmlElement& child : children) {
      if (child.has_text(wanted)) return true;
    }
    return false;
  }
};

class XmlReader {
 public:
  explicit XmlReader(std::string_view s) : s_(s) {}

  XmlElement document() {
    space();
    XmlElement root = element();
    space();
    if (i_ != s_.size()) fail("text behind the root");
    return root;
  }

 private:
  [[noreturn]] void fail(const std::string& why) const {
    throw std::runtime_error("XML, byte " + std::to_string(i_) + ": " + why);
  }
  char peek() const { return i_ < s_.size() ? s_[i_] : '\0'; }
  void space() {
    while (std::isspace(static_cast<unsigned char>(peek()))) ++i_;
  }
  void expect(std::string_view t) {
    if (s_.substr(i_, t.size()) != t) fail("expected " + std::string(t));
    i_ += t.size();
  }
  std::string word() {
    std::string w;
    while (std::isalnum(static_cast<unsigned char>(peek())) || peek() == '-' || peek() == ':') {
      w += s_[i_++];
    }
    if (w.empty()) fail("expected a name");
    return w;
  }
  // Up to `end`, entities resolved.
  std::string characters(char end) {
    static const std::map<std::string, char> kEntities{
        {"amp", '&'}, {"lt", '<'}, {"gt", '>'}, {"quot", '"'}, {"#39", '\''}};
    std::string out;
    while (peek() != end) {
      const char c = peek();
      if (c == '\0' || c == '<') fail("unexpected end of text");
      ++i_;
      if (c != '&') {
        out += c;
        continue;
      }
      std::string name;
      while (peek() != ';' && name.size() < 8) name += s_[i_++];
      expect(";");
      if (!kEntities.contains(name)) fail("entity " + name);
      out += kEntities.at(name);
    }
    return out;
  }

  XmlElement element() {
    XmlElement e;
    expect("<");
    e.name = word();
    for (space(); peek() != '>' && peek() != '/'; space()) {
      const std::string name = word();
      expect("=\"");
      if (!e.attributes.emplace(name, characters('"')).second) fail("attribute twice: " + name);
      expect("\"");
    }
    if (peek() == '/') {
      expect("/>");
      return e;
    }
    expect(">");
    while (true) {
      e.text += characters('<');
      if (s_.substr(i_, 2) == "</") break;
      e.children.push_back(element());
    }
    expect("</" + e.name + ">");
    return e;
  }

  std::string_view s_;
  size_t i_ = 0;
};

inline XmlElement read_xml(std::string_view s) { return XmlReader(s).document(); }

}  // namespace moiety::app
