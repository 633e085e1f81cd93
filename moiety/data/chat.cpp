#include "moiety/data/chat.h"

#include <algorithm>
#include <array>

#include <nlohmann/json.hpp>

#include "moiety/base/error.h"
#include "moiety/base/printable.h"

namespace moiety::data {
namespace {

constexpr std::array<std::string_view, 4> kRoles{"system", "user", "assistant", "tool"};

// The character at the start of a text and its bytes. What is not UTF-8 is no space.
size_t space_at(std::string_view s) {
  if (s.empty()) return 0;
  const auto c = static_cast<unsigned char>(s[0]);
  if ((c >= 0x09 && c <= 0x0d) || (c >= 0x1c && c <= 0x20)) return 1;
  for (const std::string_view space :
       {"\xc2\x85", "\xc2\xa0", "\xe1\x9a\x80", "\xe2\x80\xa8", "\xe2\x80\xa9", "\xe2\x80\xaf",
        "\xe2\x81\x9f", "\xe3\x80\x80"}) {
    if (s.starts_with(space)) return space.size();
  }
  const bool is_quad = s.starts_with("\xe2\x80") && s.size() > 2 &&
                       static_cast<unsigned char>(s[2]) >= 0x80 &&
                       static_cast<unsigned char>(s[2]) <= 0x8a;
  return is_quad ? 3 : 0;
}

// As Jinja's trim: without the spaces of Unicode at both ends.
std::string_view trim(std::string_view s) {
  while (const size_t bytes = space_at(s)) s.remove_prefix(bytes);
  for (bool found = true; found;) {
    found = false;
    for (size_t bytes = 1; bytes <= std::min<size_t>(3, s.size()); ++bytes) {
      if (space_at(s.substr(s.size() - bytes)) != bytes) continue;
      s.remove_suffix(bytes);
      found = true;
      break;
    }
  }
  return s;
}

std::string text_field(const nlohmann::json& object, const char* key, const std::string& place) {
  const auto field = object.is_object() ? object.find(key) : object.end();
  if (field == object.end()) throw DataError("{}: no key '{}'", place, key);
  if (!field->is_string()) {
    throw DataError("{}: '{}' is a JSON {}, not a string", place, key, field->type_name());
  }
  return field->get<std::string>();
}

ChatMessage message_of(const nlohmann::json& object, size_t number) {
  const std::string place = text("message {}", number);
  ChatMessage message{text_field(object, "role", place), text_field(object, "content", place)};
  if (std::find(kRoles.begin(), kRoles.end(), message.role) == kRoles.end()) {
    throw DataError("{}: the role '{}' is none of system, user, assistant, tool", place,
                    printable(message.role));
  }
  return message;
}

}  // namespace

std::vector<ChatMessage> parse_chat(std::string_view json) {
  nlohmann::json object;
  try {
    object = nlohmann::json::parse(json);
  } catch (const nlohmann::json::exception& e) {
    throw DataError("bad JSON: {}", parser_text(e.what()));
  }
  if (object.is_object() && object.contains("prompt") && object.contains("completion")) {
    return {{"user", text_field(object, "prompt", "the conversation")},
            {"assistant", text_field(object, "completion", "the conversation")}};
  }
  const auto list = object.is_object() ? object.find("messages") : object.end();
  if (list == object.end()) {
    throw DataError("the conversation: no key 'messages', and not both 'prompt' and 'completion'");
  }
  if (!list->is_array()) {
    throw DataError("the conversation: 'messages' is a JSON {}, not a list", list->type_name());
  }
  std::vector<ChatMessage> messages;
  for (const nlohmann::json& message : *list) {
    messages.push_back(message_of(message, messages.size() + 1));
  }
  if (messages.empty()) throw DataError("the conversation: 'messages' is empty");
  return messages;
}

// Collects text up to the next token, encodes it in one, and finds which of its ids are targets.
class ChatRenderer::Writer {
 public:
  explicit Writer(const Tokenizer& tokenizer) : tokenizer_(tokenizer) {}

  void text(std::string_view s, bool is_target = false) {
    if (s.empty()) return;
    if (is_target != is_target_) {
      borders_.push_back(text_.size());
      is_target_ = is_target;
    }
    text_ += s;
  }
  void id(uint32_t id, bool is_target = false) {
    if (id == Tokenizer::kNoToken) return;
    flush();
    out_.ids.push_back(id);
    out_.targets.push_back(is_target);
  }
  void marker(const Marker& m, bool is_target = false) {
    m.id == Tokenizer::kNoToken ? text(m.text, is_target) : id(m.id, is_target);
  }
  // The assistant's message.
  void answer(std::string_view s) {
    out_.target_bytes += s.size();
    text(s, true);
  }
  ChatTokens finish() {
    flush();
    return std::move(out_);
  }

 private:
  // Encodes a text as it stands here: a text at the start may begin otherwise than one behind a token.
  std::vector<uint32_t> encode(std::string_view s) const {
    std::vector<uint32_t> ids;
    tokenizer_.encode_part(s, out_.ids.empty(), ids);
    return ids;
  }

  void flush() {
    if (text_.empty()) return;
    const std::vector<uint32_t> ids = encode(text_);
    const size_t first = out_.targets.size();
    out_.ids.insert(out_.ids.end(), ids.begin(), ids.end());
    out_.targets.resize(out_.ids.size(), 0);
    // An id that spans a border is a target: it has some of the target's text.
    for (size_t b = 0; b < borders_.size(); b += 2) {
      const size_t begin = place_of(borders_[b], ids).first;
      const size_t end =
          b + 1 < borders_.size() ? place_of(borders_[b + 1], ids).second : ids.size();
      std::fill(out_.targets.begin() + static_cast<ptrdiff_t>(first + begin),
                out_.targets.begin() + static_cast<ptrdiff_t>(first + end), uint8_t{1});
    }
    text_.clear();
    borders_.clear();
    is_target_ = false;
  }

  // The ids before the byte `border` of the text: without and with the one that spans it. They are
  // those of the text up to there, as far as these are the same; behind that, bytes are counted.
  std::pair<size_t, size_t> place_of(size_t border, const std::vector<uint32_t>& ids) const {
    const std::vector<uint32_t> before = encode(std::string_view(text_).substr(0, border));
    const auto same = static_cast<size_t>(
        std::mismatch(before.begin(), before.end(), ids.begin(), ids.end()).first - before.begin());
    TokenStream own(tokenizer_), all(tokenizer_);
    for (size_t i = 0; i < same; ++i) {
      own.add(static_cast<int32_t>(ids[i]));
      all.add(static_cast<int32_t>(ids[i]));
    }
    size_t bytes = 0;
    for (size_t i = same; i < before.size(); ++i) {
      bytes += own.add(static_cast<int32_t>(before[i])).size();
    }
    size_t i = same;
    for (size_t done = 0; i < ids.size() && done < bytes; ++i) {
      done += all.add(static_cast<int32_t>(ids[i])).size();
      if (done > bytes) return {i, i + 1};
    }
    return {i, i};
  }

  const Tokenizer& tokenizer_;
  ChatTokens out_;
  std::string text_;             // not encoded yet
  std::vector<size_t> borders_;  // where targets begin and end in it, in turn
  bool is_target_ = false;
};

ChatRenderer::ChatRenderer(const Tokenizer& tokenizer, ChatTemplate kind)
    : tokenizer_(tokenizer), kind_(kind) {
  switch (kind) {
    case ChatTemplate::kChatml:
      begin_ = marker("<|im_start|>");
      content_end_ = marker("<|im_end|>");
      break;
    case ChatTemplate::kLlama3:
      begin_ = marker("<|start_header_id|>");
      role_end_ = marker("<|end_header_id|>");
      content_end_ = marker("<|eot_id|>");
      break;
    case ChatTemplate::kMistral:
      if (tokenizer.eos() == Tokenizer::kNoToken) {
        throw UsageError("the tokenizer {} has no eos, in which the template mistral ends messages",
                         tokenizer.name());
      }
      begin_ = marker("[INST]");
      role_end_ = marker("[/INST]");
      content_end_.id = tokenizer.eos();
      break;
  }
  if (content_end_.id == Tokenizer::kNoToken) {
    tokenizer_.encode(content_end_.text, end_);
  } else {
    end_ = {content_end_.id};
  }
}

ChatRenderer::Marker ChatRenderer::marker(std::string_view text) const {
  return {std::string(text), tokenizer_.find_added(text)};
}

std::vector<std::string> ChatRenderer::spelled() const {
  std::vector<std::string> list;
  if (kind_ == ChatTemplate::kMistral) return list;  // most of its tokenizers have them as text
  for (const Marker* m : {&begin_, &role_end_, &content_end_}) {
    if (!m->text.empty() && m->id == Tokenizer::kNoToken) list.push_back(m->text);
  }
  return list;
}

ChatTokens ChatRenderer::render(std::span<const ChatMessage> messages, bool prompts) const {
  Writer out(tokenizer_);
  if (kind_ == ChatTemplate::kMistral) {
    write_mistral(messages, out);
  } else {
    write_tagged(messages, prompts, out);
  }
  return out.finish();
}

void ChatRenderer::write_tagged(std::span<const ChatMessage> messages, bool prompts,
                                Writer& out) const {
  const bool is_llama = kind_ == ChatTemplate::kLlama3;
  const auto begin = [&](std::string_view role) {
    out.marker(begin_);
    out.text(role);
    out.marker(role_end_);
    out.text(is_llama ? "\n\n" : "\n");
  };
  if (is_llama && !messages.empty()) out.id(tokenizer_.bos());
  for (const ChatMessage& message : messages) {
    const bool answers = message.role == "assistant";
    const std::string_view content = is_llama ? trim(message.content) : message.content;
    begin(message.role);
    answers ? out.answer(content) : out.text(content);
    out.marker(content_end_, answers);
    if (!is_llama) out.text("\n");
  }
  if (prompts) begin("assistant");
}

void ChatRenderer::write_mistral(std::span<const ChatMessage> messages, Writer& out) const {
  out.id(tokenizer_.bos());
  const ChatMessage* system = nullptr;
  if (!messages.empty() && messages[0].role == "system") {
    system = &messages[0];
    messages = messages.subspan(1);
  }
  for (size_t i = 0; i < messages.size(); ++i) {
    const ChatMessage& message = messages[i];
    if (message.role != (i % 2 == 0 ? "user" : "assistant")) {
      throw DataError(
          "message {}: the role is '{}'; behind the system's, if there is one, the template "
          "mistral "
          "has user and assistant in turn",
          i + 1 + (system != nullptr), message.role);
    }
    if (i % 2 == 1) {
      out.text(" ", true);
      out.answer(message.content);
      out.marker(content_end_, true);
      continue;
    }
    out.text(" ");
    out.marker(begin_);
    out.text(" ");
    if (i == 0 && system != nullptr) {
      out.text(system->content);
      out.text("\n\n");
    }
    out.text(message.content);
    out.text(" ");
    out.marker(role_end_);
  }
}

}  // namespace moiety::data
