// CRC-32C (Castagnoli: reflected polynomial 0x82F63B78, initial and final xor 0xFFFFFFFF).
// crc32c("123456789") = 0xE3069283.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace moiety {

// The checksum of `bytes` bytes. With `previous` it continues another one: crc32c(b, n, crc32c(a,
// m)) is the checksum of a followed by b.
uint32_t crc32c(const void* data, size_t bytes, uint32_t previous = 0);
// The checksum of a followed by b, from the checksums of both and the length of b.
uint32_t crc32c_combine(uint32_t a, uint32_t b, uint64_t b_bytes);
inline uint32_t crc32c(std::string_view s) { return crc32c(s.data(), s.size()); }

}  // namespace moiety
