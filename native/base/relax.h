// What a thread does in each round of a loop in which it spins.

#ifndef PYCOLLECTIVE_NATIVE_BASE_RELAX_H_
#define PYCOLLECTIVE_NATIVE_BASE_RELAX_H_

namespace pycollective {

inline void Relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace pycollective

#endif  // PYCOLLECTIVE_NATIVE_BASE_RELAX_H_
