// SHA-256 (FIPS 180-4) and HMAC-SHA-256 (RFC 2104), and random bytes.
//
// Code of our own: the kernel's AF_ALG is forbidden in many containers, and the package needs no library of cryptography.

#ifndef PYCOLLECTIVE_NATIVE_MONITOR_HMAC_H_
#define PYCOLLECTIVE_NATIVE_MONITOR_HMAC_H_

#include <cstddef>
#include <string>

namespace pycollective {

constexpr size_t kMacBytes = 32;

std::string Sha256(const std::string& text);
std::string HmacSha256(const std::string& key, const std::string& text);

// Equal, in a time that does not tell how far.
bool SameMac(const std::string& expected, const std::string& got);

// Bytes from the kernel that nobody can guess; "" if there are none.
std::string RandomBytes(size_t count);

// The bytes in hexadecimal digits.
std::string Hex(const std::string& bytes);

}  // namespace pycollective

#endif  // PYCOLLECTIVE_NATIVE_MONITOR_HMAC_H_
