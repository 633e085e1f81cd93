#include "apps/moiety/report/svg.h"

#include <array>
#include <charconv>
#include <cmath>

#include "moiety/base/format.h"

namespace moiety::app {
namespace {

// The palette on a light and on a dark ground; neighbours differ for color-blind eyes too.
constexpr std::array<const char*, kSvgColors> kLight = {"#2a78d6", "#eb6834", "#1baf7a", "#4a3aa7",
                                                        "#e34948", "#b07a00", "#c2508a", "#4d7c0f"};
constexpr std::array<const char*, kSvgColors> kDark = {"#3987e5", "#e8753f", "#23b684", "#9085e9",
                                                       "#e66767", "#c99a1f", "#d86a9f", "#8cab3f"};

struct Theme {
  const char *ground, *ink, *quiet, *axis, *grid;
  const std::array<const char*, kSvgColors>& palette;
};
constexpr Theme kLightTheme = {"#fdfdfc", "#16181d", "#5d636f", "#b4b8c0", "#e9eaed", kLight};
constexpr Theme kDarkTheme = {"#15171c", "#eceef2", "#9aa1ae", "#4b515d", "#282c34", kDark};

std::string rules(const Theme& t) {
  std::string css = text(
      ".ground{{fill:{0}}}.halo{{stroke:{0}}}.ink{{fill:{1}}}.quiet{{fill:{2}}}"
      ".axis{{stroke:{3}}}.grid{{stroke:{4}}}.lost{{stroke:{5}}}",
      t.ground, t.ink, t.quiet, t.axis, t.grid, t.palette[kSvgWarning]);
  for (int i = 0; i < kSvgColors; ++i) {
    css += text(".s{0}{{stroke:{1}}}.f{0}{{fill:{1}}}", i, t.palette[i]);
  }
  return css;
}

}  // namespace

std::string svg_head(double width, double height, std::string_view title, std::string_view css) {
  return text(
             "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {0} {1}\" width=\"{0}\" "
             "height=\"{1}\" role=\"img\" aria-label=\"{2}\">\n<style>"
             "text{{font:12px system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica Neue',Arial,"
             "sans-serif;font-variant-numeric:tabular-nums}}.title{{font-size:17px;"
             "font-weight:600}}path{{fill:none}}.axis,.grid{{stroke-width:1}}{3}\n",
             width, height, xml_escape(title), css) +
         rules(kLightTheme) +
         text("\n@media(prefers-color-scheme:dark){{{}}}</style>\n", rules(kDarkTheme)) +
         text("<rect class=\"ground\" width=\"{}\" height=\"{}\"/>\n", width, height);
}

std::string svg_label(double x, double y, std::string_view css, std::string_view anchor,
                      std::string_view words) {
  const std::string anchored = anchor.empty() ? "" : text(" text-anchor=\"{}\"", anchor);
  return text("<text x=\"{}\" y=\"{}\" class=\"{}\"{}>{}</text>\n", svg_number(x), svg_number(y),
              css, anchored, xml_escape(words));
}

std::string svg_line(std::string_view css, double x1, double y1, double x2, double y2) {
  return text("<path class=\"{}\" d=\"M{} {}L{} {}\"/>\n", css, svg_number(x1), svg_number(y1),
              svg_number(x2), svg_number(y2));
}

std::string svg_number(double x) {
  std::array<char, 32> buffer;
  const double rounded = std::round(x * 10) / 10;
  const auto end = std::to_chars(buffer.data(), buffer.data() + buffer.size(), rounded).ptr;
  return {buffer.data(), end};
}

std::string xml_escape(std::string_view s) {
  std::string out;
  for (const char c : s) {
    switch (c) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '"':
        out += "&quot;";
        break;
      case '\'':
        out += "&#39;";
        break;
      default:
        // XML has no way to write other control characters.
        out += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
    }
  }
  return out;
}

}  // namespace moiety::app
