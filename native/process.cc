// Implementation of process.h.

#include "process.h"

#include <pthread.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <unistd.h>

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

std::string PythonStacks::OfMainThread() const {
  if (signal_ == 0 || ftruncate(file_, 0) != 0 || lseek(file_, 0, SEEK_SET) != 0) return "";
  if (pthread_kill(pthread_self(), signal_) != 0) return "";  // it has run when this returns: it is for this thread
  std::string all;
  char part[4096];
  for (ssize_t n; (n = pread(file_, part, sizeof(part), static_cast<off_t>(all.size()))) > 0;) {
    all.append(part, static_cast<size_t>(n));
  }
  // Each thread has a line with its number, then its frames. The main thread is the last one.
  const size_t last = all.rfind("hread 0x");
  const size_t head_end = all.find('\n', last == std::string::npos ? 0 : last);
  if (head_end == std::string::npos) return "";
  const size_t end = all.find("\n\n", head_end);
  return all.substr(head_end + 1, end == std::string::npos ? end : end - head_end);
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
