// Implementation of process.h.

#include "process.h"

#include <pthread.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <sstream>
#include <thread>

#include "recorder.h"

namespace pycollective {

int64_t StateOf(const Process& process) {
  FILE* const file = std::fopen(("/proc/" + std::to_string(process.pid) + "/stat").c_str(), "r");
  if (file == nullptr) return 0;
  char text[1024];
  const size_t size = std::fread(text, 1, sizeof(text), file);
  std::fclose(file);
  const std::string stat(text, size);
  const size_t name_end = stat.rfind(')');  // the name may hold anything
  if (name_end == std::string::npos) return 0;
  std::istringstream fields(stat.substr(name_end + 1));
  std::string field;
  int64_t state = 0, started = 0;
  for (int number = 3; fields >> field; ++number) {
    if (number == 3) state = field[0];
    if (number == 22) started = std::strtoll(field.c_str(), nullptr, 10);
  }
  return started == process.started ? state : 0;
}

void EndStopped(const std::vector<Process>& processes, int64_t host) {
  for (const Process& process : processes) {
    if (process.pid == 0 || process.host != host) continue;
    const int64_t state = StateOf(process);
    if (state == 'T' || state == 't') kill(static_cast<pid_t>(process.pid), SIGKILL);
  }
}

PythonStacks::Frames PythonStacks::Now() const {
  if (signal_ == 0 || ftruncate(file_, 0) != 0 || lseek(file_, 0, SEEK_SET) != 0) return {};
  if (pthread_kill(pthread_self(), signal_) != 0) return {};  // it has run when this returns: it is for this thread
  std::string all;
  char part[4096];
  for (ssize_t n; (n = pread(file_, part, sizeof(part), static_cast<off_t>(all.size()))) > 0;) {
    all.append(part, static_cast<size_t>(n));
  }
  // Each thread has a line with its number, then its frames, then an empty line. The main thread is the last one.
  Frames frames;
  for (size_t begin = all.find("hread 0x"); begin != std::string::npos;) {
    const size_t next = all.find("hread 0x", begin + 1);
    const size_t head_end = all.find('\n', begin);
    if (head_end == std::string::npos) break;
    const size_t end = std::min(all.find("\n\n", head_end), next);
    const std::string thread = all.substr(head_end + 1, end == std::string::npos ? end : end - head_end);
    if (next == std::string::npos) {
      frames.main_thread = thread;
    } else if (thread.find("/jax/_src/callback.py") != std::string::npos) {
      frames.callbacks += thread;
    }
    begin = next;
  }
  return frames;
}

void Say(const std::string& text) {
  for (size_t done = 0; done < text.size();) {
    const ssize_t n = write(STDERR_FILENO, text.data() + done, text.size() - done);
    if (n < 0 && errno != EINTR && errno != EAGAIN) return;
    if (n > 0) done += static_cast<size_t>(n);
  }
}

void WaitUntilRead(int64_t limit_ns) {
  constexpr auto kPassingOn = std::chrono::milliseconds(100);  // from the launcher's part on this host to the launcher
  const int64_t until_ns = NowNs() + limit_ns;
  int left = 0;
  while (ioctl(STDERR_FILENO, FIONREAD, &left) == 0 && left > 0 && NowNs() < until_ns) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  std::this_thread::sleep_for(kPassingOn);
}

}  // namespace pycollective
