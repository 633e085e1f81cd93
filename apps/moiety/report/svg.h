// Pieces of the pictures that the program draws: SVG text, light and dark by prefers-color-scheme,
// without scripts and without fonts of its own, so any browser shows it.
//
// Classes: ground, ink and quiet are fills; axis, grid, halo and lost (a warning) are strokes; s0,
// s1 ... stroke and f0, f1 ... fill in the colors of the palette, whose neighbours differ for
// color-blind eyes too.
#pragma once

#include <string>
#include <string_view>

namespace moiety::app {

inline constexpr int kSvgColors = 8;
inline constexpr int kSvgWarning = 4;  // number of the color of "lost"

// Opens the document and paints the ground; `css` are more rules. The caller ends it with "</svg>".
std::string svg_head(double width, double height, std::string_view title, std::string_view css);
// A label. `anchor` is "" (start), middle or end.
std::string svg_label(double x, double y, std::string_view css, std::string_view anchor,
                      std::string_view words);
std::string svg_line(std::string_view css, double x1, double y1, double x2, double y2);

// A number with at most one decimal.
std::string svg_number(double x);
std::string xml_escape(std::string_view text);

}  // namespace moiety::app
