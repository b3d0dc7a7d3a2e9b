// Loaded before all other libraries (LD_PRELOAD), this one tells on the standard error whom a process lets read its memory: no
// kernel can be asked, and one without Yama refuses to be told. The kernel traps that call, from whichever library it comes.

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#include <cstddef>
#include <cstdio>
#include <cstdlib>

namespace {

void Tell(int, siginfo_t*, void* context) {
  mcontext_t& machine = static_cast<ucontext_t*>(context)->uc_mcontext;
#if defined(__x86_64__)
  const long whom = static_cast<long>(machine.gregs[REG_RSI]);
  machine.gregs[REG_RAX] = 0;
#elif defined(__aarch64__)
  const long whom = static_cast<long>(machine.regs[1]);
  machine.regs[0] = 0;
#endif
  char line[80];
  const int size = std::snprintf(line, sizeof(line), "process %d lets %ld read\n", static_cast<int>(getpid()), whom);
  if (write(STDERR_FILENO, line, static_cast<size_t>(size)) != size) abort();
}

__attribute__((constructor)) void Trap() {
  struct sigaction action {};
  action.sa_sigaction = Tell;
  action.sa_flags = SA_SIGINFO | SA_RESTART;
  sock_filter rules[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_prctl, 0, 3),
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, args)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, PR_SET_PTRACER, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_TRAP),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog program{sizeof(rules) / sizeof(rules[0]), rules};
  if (sigaction(SIGSYS, &action, nullptr) != 0 || prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 ||
      prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0) {
    abort();
  }
}

}  // namespace
