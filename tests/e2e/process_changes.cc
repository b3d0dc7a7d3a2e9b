// Loaded before all other libraries (LD_PRELOAD), this one notes calls of the C library that change how a process lives. It
// notes those of the native library and of Python's ctypes, in a file whose name begins as PROCESS_CHANGES says and ends with
// the number of the process.

#include <dlfcn.h>
#include <malloc.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

namespace {

template <typename Function>
Function* Next(const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

void Note(const void* caller, const char* what, long argument) {
  Dl_info library{};
  const char* const begin = std::getenv("PROCESS_CHANGES");
  if (begin == nullptr || dladdr(caller, &library) == 0 || library.dli_fname == nullptr) return;
  if (std::strstr(library.dli_fname, "_native.so") == nullptr && std::strstr(library.dli_fname, "ffi") == nullptr &&
      std::strstr(library.dli_fname, "_ctypes") == nullptr) {
    return;
  }
  const std::string path = begin + std::to_string(getpid());
  if (std::FILE* const file = std::fopen(path.c_str(), "a")) {
    std::fprintf(file, "%s %ld\n", what, argument);
    std::fclose(file);
  }
}

}  // namespace

extern "C" int mallopt(int option, int value) {
  Note(__builtin_return_address(0), "mallopt", option);
  return Next<int(int, int)>("mallopt")(option, value);
}

extern "C" int madvise(void* address, size_t size, int advice) {
  Note(__builtin_return_address(0), "madvise", advice);
  return Next<int(void*, size_t, int)>("madvise")(address, size, advice);
}

extern "C" int prctl(int option, ...) {
  va_list list;
  va_start(list, option);
  unsigned long arguments[4];
  for (unsigned long& argument : arguments) argument = va_arg(list, unsigned long);
  va_end(list);
  Note(__builtin_return_address(0), "prctl", option);
  return Next<int(int, ...)>("prctl")(option, arguments[0], arguments[1], arguments[2], arguments[3]);
}
