// Functions of every test program: checks, waiting, and the main function. `PROGRAM NAME` runs a test, `PROGRAM` lists
// all names.

#ifndef PYCOLLECTIVE_TESTS_NATIVE_HARNESS_H_
#define PYCOLLECTIVE_TESTS_NATIVE_HARNESS_H_

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <string>
#include <thread>

#define CHECK(condition)                                                            \
  do {                                                                              \
    if (!(condition)) {                                                             \
      std::fprintf(stderr, "%s:%d: failed: %s\n", __FILE__, __LINE__, #condition);  \
      std::exit(1);                                                                 \
    }                                                                               \
  } while (false)

inline void Sleep(int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

// Waits until a condition is true. Returns whether it became true within the limit of 20 seconds or more.
inline bool BecomesTrue(const std::function<bool()>& condition) {
  for (int i = 0; i < 20000; ++i) {
    if (condition()) return true;
    Sleep(1);
  }
  return false;
}

using Tests = std::map<std::string, void (*)()>;

inline int RunOne(const Tests& tests, int argc, char** argv) {
  if (argc < 2) {
    for (const auto& [name, test] : tests) std::printf("%s\n", name.c_str());
    return 0;
  }
  tests.at(argv[1])();
  std::fflush(nullptr);
  std::_Exit(0);  // does not wait for threads: those of the stand-in's streams never end
}

#endif  // PYCOLLECTIVE_TESTS_NATIVE_HARNESS_H_
