// The bytes of an input, taken one after another as what a test needs. After the end: zeros and empty texts.

#ifndef PYCOLLECTIVE_TESTS_FUZZ_INPUT_H_
#define PYCOLLECTIVE_TESTS_FUZZ_INPUT_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>

// What must hold for every input.
#define ALWAYS(condition)                                                              \
  do {                                                                                 \
    if (!(condition)) {                                                                \
      std::fprintf(stderr, "%s:%d: does not hold: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                    \
    }                                                                                  \
  } while (false)

class Input {
 public:
  Input(const uint8_t* data, size_t size) : data_(data), left_(size) {}

  bool is_over() const { return left_ == 0; }

  uint8_t Byte() {
    if (left_ == 0) return 0;
    --left_;
    return *data_++;
  }

  // A number below `count`.
  int Below(int count) { return Byte() % count; }

  // Small numbers often, and those at the ends of the range.
  int64_t Number() {
    const uint8_t kind = Byte();
    if (kind < 200) return kind % 8;
    if (kind < 220) return int64_t{kind} - 210;
    if (kind < 228) return INT64_MIN + (kind - 220);
    if (kind < 236) return INT64_MAX - (kind - 228);
    uint64_t number = 0;
    for (int byte = 0; byte < 8; ++byte) number = number << 8 | Byte();
    return static_cast<int64_t>(number);
  }

  // Up to `most` bytes.
  std::string Text(size_t most) { return Bytes(std::min<size_t>(Byte(), most)); }
  std::string Rest() { return Bytes(left_); }

 private:
  std::string Bytes(size_t count) {
    count = std::min(count, left_);
    const std::string text(reinterpret_cast<const char*>(data_), count);
    data_ += count;
    left_ -= count;
    return text;
  }

  const uint8_t* data_;
  size_t left_;
};

#endif  // PYCOLLECTIVE_TESTS_FUZZ_INPUT_H_
