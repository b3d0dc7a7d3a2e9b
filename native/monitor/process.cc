// Implementation of process.h.

#include "monitor/process.h"

#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <sstream>
#include <thread>

#include "base/clock.h"
#include "base/exports.h"


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

namespace {

std::atomic<double> read_timeout_s{0};  // how long the launcher may take to read
std::atomic<double> forwarding_s{0};    // how long its part on this host may take then to forward this to it

// The standard error for writing without waiting. To set that on the descriptor would set it for all processes that share
// it. Regular files never wait, and have a place that a descriptor of its own would not share.
int OpenStderr() {
  struct stat kind;
  const bool waits = fstat(STDERR_FILENO, &kind) == 0 && (S_ISFIFO(kind.st_mode) || S_ISCHR(kind.st_mode));
  return waits ? open("/proc/self/fd/2", O_WRONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC) : -1;
}

ssize_t WriteSome(int fd, const char* text, size_t size) {
  const ssize_t sent = send(fd, text, size, MSG_DONTWAIT | MSG_NOSIGNAL);
  return sent < 0 && errno == ENOTSOCK ? write(fd, text, size) : sent;
}

}  // namespace

void Say(std::string_view text, int64_t limit_ns) {
  const int64_t until_ns = NowNs() + limit_ns;
  const int own = OpenStderr();
  const int fd = own < 0 ? STDERR_FILENO : own;
  for (size_t done = 0; done < text.size();) {
    const int64_t left_ns = until_ns - NowNs();
    pollfd console{fd, POLLOUT, 0};
    if (left_ns <= 0 || (poll(&console, 1, static_cast<int>(left_ns / 1000000) + 1) < 0 && errno != EINTR)) break;
    if (console.revents == 0) continue;
    // Where that descriptor could not be had, a pipe that can be written to takes so many bytes at once.
    const ssize_t n = WriteSome(fd, text.data() + done, std::min<size_t>(text.size() - done, PIPE_BUF));
    if (n < 0 && errno != EINTR && errno != EAGAIN) break;
    if (n > 0) done += static_cast<size_t>(n);
  }
  if (own >= 0) close(own);
}

void SayFailure(const char* what, const char* why) {
  static std::atomic<int> failures{0};
  constexpr int kSaid = 5;
  if (failures.fetch_add(1) >= kSaid) return;
  char text[512];
  std::snprintf(text, sizeof(text), "pycollective: the monitor of process %d could not %s: %s. The process goes on.\n",
                static_cast<int>(getpid()), what, why);
  Say(text);
}

void WaitUntilRead() {
  const int64_t until_ns = NowNs() + static_cast<int64_t>(read_timeout_s * 1e9);
  int left = 0;
  while (ioctl(STDERR_FILENO, FIONREAD, &left) == 0 && left > 0 && NowNs() < until_ns) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  std::this_thread::sleep_for(std::chrono::duration<double>(forwarding_s));
}

}  // namespace pycollective

// Sets the times of WaitUntilRead: when Python loads the library, before it starts a thread.
PYCOLLECTIVE_EXPORT void pycollective_set_read_times(double timeout_s, double forwarding_s) {
  pycollective::read_timeout_s = timeout_s;
  pycollective::forwarding_s = forwarding_s;
}

namespace {
const pycollective::Listed listed{PYCOLLECTIVE_TYPED(set_read_times)};
}  // namespace
