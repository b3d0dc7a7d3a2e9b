// Loaded before all other libraries (LD_PRELOAD), this one tells on the standard error whom a process lets read its memory: a
// kernel without Yama refuses to be told, and no kernel can be asked.

#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdarg>
#include <cstdio>

extern "C" int prctl(int option, ...) {
  va_list arguments;
  va_start(arguments, option);
  unsigned long words[4];
  for (unsigned long& word : words) word = va_arg(arguments, unsigned long);
  va_end(arguments);
  if (option == PR_SET_PTRACER) dprintf(STDERR_FILENO, "process %d lets %ld read\n", getpid(), static_cast<long>(words[0]));
  return static_cast<int>(syscall(SYS_prctl, option, words[0], words[1], words[2], words[3]));
}
