// Names of tensors as one line that leaves none of them out.
#pragma once

#include <set>
#include <string>

namespace moiety::hf {

// The names, in which numbers that make up a range stand as one: names that differ in one number
// alone are one entry, "layers.{0-3,5}.experts.{0-7}.w1.weight". Beyond `most` entries, which the
// tensors of no model reach, it says how many more there are.
std::string key_list(const std::set<std::string>& names, size_t most = 200);

}  // namespace moiety::hf
