// Implementation of hmac.h.

#include "monitor/hmac.h"

#include <sys/random.h>

#include <cerrno>
#include <cstdint>
#include <cstring>

#include "base/exports.h"

namespace pycollective {
namespace {

constexpr size_t kBlockBytes = 64;

// The first 32 bits of the fractional parts of the cube roots of the first 64 primes.
constexpr uint32_t kConstants[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

uint32_t Rotated(uint32_t word, int bits) { return (word >> bits) | (word << (32 - bits)); }

void AddBlock(const unsigned char* block, uint32_t (&state)[8]) {
  uint32_t w[64];
  for (size_t t = 0; t < 16; ++t) {
    w[t] = uint32_t{block[4 * t]} << 24 | uint32_t{block[4 * t + 1]} << 16 | uint32_t{block[4 * t + 2]} << 8 |
           uint32_t{block[4 * t + 3]};
  }
  for (size_t t = 16; t < 64; ++t) {
    const uint32_t sigma0 = Rotated(w[t - 15], 7) ^ Rotated(w[t - 15], 18) ^ (w[t - 15] >> 3);
    const uint32_t sigma1 = Rotated(w[t - 2], 17) ^ Rotated(w[t - 2], 19) ^ (w[t - 2] >> 10);
    w[t] = w[t - 16] + sigma0 + w[t - 7] + sigma1;
  }
  uint32_t a = state[0], b = state[1], c = state[2], d = state[3];
  uint32_t e = state[4], f = state[5], g = state[6], h = state[7];
  for (size_t t = 0; t < 64; ++t) {
    const uint32_t choice = (e & f) ^ (~e & g), majority = (a & b) ^ (a & c) ^ (b & c);
    const uint32_t t1 = h + (Rotated(e, 6) ^ Rotated(e, 11) ^ Rotated(e, 25)) + choice + kConstants[t] + w[t];
    const uint32_t t2 = (Rotated(a, 2) ^ Rotated(a, 13) ^ Rotated(a, 22)) + majority;
    h = g, g = f, f = e, e = d + t1, d = c, c = b, b = a, a = t1 + t2;
  }
  const uint32_t last[8] = {a, b, c, d, e, f, g, h};
  for (size_t i = 0; i < 8; ++i) state[i] += last[i];
}

}  // namespace

std::string Sha256(const std::string& text) {
  uint32_t state[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  const auto* const bytes = reinterpret_cast<const unsigned char*>(text.data());
  const size_t whole = text.size() / kBlockBytes * kBlockBytes;
  for (size_t at = 0; at < whole; at += kBlockBytes) AddBlock(bytes + at, state);
  std::string rest = text.substr(whole) + '\x80';  // then zeros, and the number of bits in the last 8 bytes
  rest.resize(rest.size() <= kBlockBytes - 8 ? kBlockBytes : 2 * kBlockBytes);
  const uint64_t bits = uint64_t{text.size()} * 8;
  for (size_t i = 0; i < 8; ++i) rest[rest.size() - 1 - i] = static_cast<char>((bits >> (8 * i)) & 255);
  for (size_t at = 0; at < rest.size(); at += kBlockBytes) {
    AddBlock(reinterpret_cast<const unsigned char*>(rest.data()) + at, state);
  }
  std::string digest;
  for (const uint32_t word : state) {
    for (int shift = 24; shift >= 0; shift -= 8) digest += static_cast<char>((word >> shift) & 255);
  }
  return digest;
}

std::string HmacSha256(const std::string& key, const std::string& text) {
  std::string inner = key.size() > kBlockBytes ? Sha256(key) : key;
  inner.resize(kBlockBytes);
  std::string outer = inner;
  for (char& byte : inner) byte = static_cast<char>(byte ^ 0x36);
  for (char& byte : outer) byte = static_cast<char>(byte ^ 0x5c);
  return Sha256(outer + Sha256(inner + text));
}

bool SameMac(const std::string& expected, const std::string& got) {
  if (expected.size() != got.size()) return false;
  unsigned char difference = 0;
  for (size_t i = 0; i < expected.size(); ++i) difference |= static_cast<unsigned char>(expected[i] ^ got[i]);
  return difference == 0;
}

std::string RandomBytes(size_t count) {
  std::string bytes(count, '\0');
  for (size_t done = 0; done < count;) {
    const ssize_t n = getrandom(bytes.data() + done, count - done, 0);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return "";
    done += static_cast<size_t>(n);
  }
  return bytes;
}

std::string Hex(const std::string& bytes) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (const char byte : bytes) {
    const auto value = static_cast<unsigned char>(byte);
    text += {kDigits[value >> 4], kDigits[value & 15]};
  }
  return text;
}

}  // namespace pycollective

// For tests: HMAC-SHA-256 of a text, 32 bytes.
PYCOLLECTIVE_EXPORT void pycollective_hmac(const char* key, int64_t key_bytes, const char* text, int64_t nbytes, char* mac) {
  const std::string made = pycollective::HmacSha256({key, static_cast<size_t>(key_bytes)}, {text, static_cast<size_t>(nbytes)});
  std::memcpy(mac, made.data(), made.size());
}

namespace {
const pycollective::Listed listed{PYCOLLECTIVE_TYPED(hmac)};
}  // namespace
