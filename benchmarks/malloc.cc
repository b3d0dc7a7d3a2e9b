// Measures what pycollective.init's settings of malloc cost the rest of a process: the memory that it keeps after 4 GiB have
// been freed, and the time of threads that allocate at the same time.
//
//   g++ -O2 benchmarks/malloc.cc -o /tmp/malloc -ldl -pthread
//   /tmp/malloc; /tmp/malloc pycollective/_native.so

#include <dlfcn.h>
#include <malloc.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;

double SecondsSince(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

long ResidentMiB() {
  long pages = 0, resident = 0;
  std::FILE* const file = std::fopen("/proc/self/statm", "r");
  if (std::fscanf(file, "%ld %ld", &pages, &resident) != 2) std::abort();
  std::fclose(file);
  return resident * sysconf(_SC_PAGESIZE) >> 20;
}

void Hold(size_t nbytes) {
  const long before = ResidentMiB();
  std::vector<void*> blocks((size_t{4} << 30) / nbytes);
  for (void*& block : blocks) std::memset(block = std::malloc(nbytes), 1, nbytes);
  const long most = ResidentMiB();
  for (void* block : blocks) std::free(block);
  std::printf("%2zu MiB blocks: %ld MiB before, %ld with them, %ld when freed\n", nbytes >> 20, before, most,
              ResidentMiB());
}

// Each thread keeps 16 blocks of size/2 to 3/2 size. Again and again it frees one of them and allocates another.
void Exchange(size_t size, int threads) {
  const int pairs = size >= (1 << 20) ? 4000 : 200000;
  const auto work = [=](uint32_t random) {
    void* blocks[16] = {};
    for (int i = 0; i < pairs; ++i) {
      random = random * 1664525u + 1013904223u;
      void*& block = blocks[(random >> 16) % 16];
      std::free(block);
      block = std::malloc(size / 2 + (random >> 8) % size);
      *static_cast<volatile char*>(block) = 1;
    }
    for (void* block : blocks) std::free(block);
  };
  const auto start = Clock::now();
  std::vector<std::thread> running;
  for (int i = 0; i < threads; ++i) running.emplace_back(work, i + 1);
  for (std::thread& thread : running) thread.join();
  std::printf("%7zu B, %d threads: %6.0f ns\n", size, threads, SecondsSince(start) * 1e9 / pairs);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1) {
    void* const library = dlopen(argv[1], RTLD_NOW);
    void* const tune = library != nullptr ? dlsym(library, "pycollective_tune_malloc") : nullptr;
    if (tune == nullptr || !reinterpret_cast<bool (*)(int32_t)>(tune)(1)) {
      std::printf("%s: cannot be loaded, or glibc refuses\n", argv[1]);
      return 1;
    }
  }
  for (const size_t size : {64, 4096, 65536, 1 << 20}) {
    for (const int threads : {1, 2, 8}) Exchange(size, threads);
  }
  for (const size_t mib : {1, 64}) Hold(mib << 20);
}
