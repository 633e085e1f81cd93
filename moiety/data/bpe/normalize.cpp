#include "moiety/data/bpe/normalize.h"

namespace moiety::data::bpe {

Normalizer::Normalizer(const std::vector<NormalStep>& steps) {
  for (const NormalStep& step : steps) {
    if (const auto* replace = std::get_if<Replace>(&step)) {
      steps_.emplace_back(Replacement{Pattern(replace->sought), replace->content});
    } else if (const auto* prepend = std::get_if<Prepend>(&step)) {
      steps_.emplace_back(*prepend);
    } else {
      require_nfc("normalizer");
      steps_.emplace_back(Nfc{});
    }
  }
}

Normalizer::Run::Run(const Normalizer& normalizer) : normalizer_(normalizer) {
  for (const auto& step : normalizer.steps_) {
    if (const auto* r = std::get_if<Replacement>(&step)) matchers_.emplace_back(r->pattern);
  }
}

void Normalizer::Run::operator()(std::string& text) {
  auto matcher = matchers_.begin();
  for (const auto& step : normalizer_.steps_) {
    if (const auto* replace = std::get_if<Replacement>(&step)) {
      replace_all(text, *matcher++, replace->content);
    } else if (const auto* prepend = std::get_if<Prepend>(&step)) {
      if (!text.empty()) text.insert(0, prepend->text);
    } else {
      text = to_nfc(text);
    }
  }
}

void replace_all(std::string& text, Matcher& matcher, std::string_view content) {
  std::string out;
  size_t done = 0;
  matcher.find_all(text, [&](Matcher::Range m) {
    out.append(text, done, m.begin - done);
    out += content;
    done = m.end;
  });
  if (done == 0 && out.empty()) return;
  out.append(text, done);
  text = std::move(out);
}

}  // namespace moiety::data::bpe
