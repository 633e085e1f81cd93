// SHA-256 (FIPS 180-4), for the identity of tokenizers.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

namespace moiety::data {

using Sha256 = std::array<uint8_t, 32>;

Sha256 sha256(std::string_view bytes);
// The digest as 64 lowercase hex digits.
std::string hex(const Sha256& digest);

}  // namespace moiety::data
