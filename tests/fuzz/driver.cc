// Runs a target of a fuzzer without libFuzzer: `PROGRAM FOLDER SECONDS SEED` gives it each file of the folder, and then,
// for so many seconds, files that are changed at random. An input that fails, or that takes 20 seconds, ends the
// process; the input lies in the file crash-SEED of the current directory then.

#include <fcntl.h>
#include <sanitizer/common_interface_defs.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace {

constexpr unsigned kLimitS = 20;  // for one input
constexpr size_t kMostBytes = 1 << 12;

std::string input;
std::string crash_name;

// Called where the process may only make system calls.
void KeepInput() {
  const int file = open(crash_name.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0644);
  if (file < 0 || write(file, input.data(), input.size()) < 0) _exit(3);
  close(file);
}

void OnSignal(int number) {
  KeepInput();
  if (number == SIGALRM) {
    constexpr char kText[] = "an input takes too long\n";
    if (write(STDERR_FILENO, kText, sizeof(kText) - 1) < 0) _exit(3);
  }
  _exit(2);
}

void Run(const std::string& next) {
  input = next;
  alarm(kLimitS);
  // A block of its own, so that the sanitizer sees what reads beyond its end.
  const std::vector<uint8_t> bytes(input.begin(), input.end());
  LLVMFuzzerTestOneInput(bytes.data(), bytes.size());
  alarm(0);
}

std::string Changed(const std::vector<std::string>& corpus, std::mt19937_64& random) {
  const auto below = [&random](size_t count) { return static_cast<size_t>(random() % count); };
  std::string text = corpus[below(corpus.size())];
  static const std::vector<uint8_t> kBytes = {0, 1, 2, 7, 8, 16, 31, 32, 63, 64, 127, 128, 200, 219, 227, 235, 254, 255};
  for (size_t changes = 1 + below(8); changes > 0; --changes) {
    const size_t at = below(text.size() + 1);
    switch (below(7)) {
      case 0: text.insert(at, 1, static_cast<char>(random())); break;
      case 1: text.erase(at, 1 + below(16)); break;
      case 2: if (at < text.size()) text[at] = static_cast<char>(random()); break;
      case 3: if (at < text.size()) text[at] = static_cast<char>(kBytes[below(kBytes.size())]); break;
      case 4: if (at < text.size()) text[at] = static_cast<char>(text[at] ^ (1 << below(8))); break;
      case 5: text.insert(at, text, below(text.size() + 1), below(64)); break;
      default: {  // the rest of another one
        const std::string& other = corpus[below(corpus.size())];
        text = text.substr(0, at) + other.substr(below(other.size() + 1));
      }
    }
  }
  if (text.size() > kMostBytes) text.resize(kMostBytes);
  return text;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) {
    std::fprintf(stderr, "usage: %s FOLDER SECONDS SEED\n", argv[0]);
    return 1;
  }
  const std::filesystem::path folder = argv[1];
  const auto limit = std::chrono::duration<double>(std::atof(argv[2]));
  const uint64_t seed = std::strtoull(argv[3], nullptr, 10);
  crash_name = "crash-" + std::to_string(seed);
  for (const int number : {SIGABRT, SIGALRM}) signal(number, OnSignal);
  __sanitizer_set_death_callback(KeepInput);

  std::vector<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) files.push_back(entry.path());
  std::sort(files.begin(), files.end());
  std::vector<std::string> corpus{""};
  for (const auto& path : files) {
    std::ifstream file(path, std::ios::binary);
    corpus.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  }
  for (const std::string& text : corpus) Run(text);
  std::mt19937_64 random(seed);
  int64_t runs = 0;
  const auto begun = std::chrono::steady_clock::now();
  while (std::chrono::steady_clock::now() - begun < limit) {
    Run(Changed(corpus, random));
    ++runs;
  }
  std::printf("%zu files, %lld changed ones\n", files.size(), static_cast<long long>(runs));
  std::fflush(nullptr);
  std::_Exit(0);  // does not wait for threads of the target
}
