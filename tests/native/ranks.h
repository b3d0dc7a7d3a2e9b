// Ranks that tests play: each serves in a thread of its own, on a socket of this host.

#ifndef PYCOLLECTIVE_TESTS_NATIVE_RANKS_H_
#define PYCOLLECTIVE_TESTS_NATIVE_RANKS_H_

#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <mutex>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "harness.h"
#include "monitor/process.h"
#include "monitor/side_channel.h"

namespace pycollective {

inline const std::string kSecret(64, 's');
constexpr int64_t kSecondNs = 1000000000;

// A new name for a socket of this host.
inline Address NewAddress() {
  static std::atomic<int> names{0};
  return {"@pycollective-test-" + std::to_string(getpid()) + "-" + std::to_string(names++), 0};
}

inline int Listening(Address* address) {
  int fd = -1;
  CHECK(ListenOn(address, &fd));
  return fd;
}

// An address where nobody listens any more.
inline Address Nobody() {
  Address address = NewAddress();
  close(Listening(&address));
  return address;
}

using Asked = std::pair<int64_t, std::string>;

// A rank that answers with answer(kind, text) until it is destroyed.
class PlayedRank {
 public:
  explicit PlayedRank(int rank, SideChannel::Answer answer = [](int64_t, const std::string& text) { return "re: " + text; },
                      const std::string& secret = kSecret, SideChannel::TakesLong takes_long = {})
      : address_(NewAddress()), fd_(Listening(&address_)), channel_(rank, {}, secret), answer_(std::move(answer)), takes_long_(std::move(takes_long)) {
    thread_ = std::thread([this] {
      channel_.Serve({fd_}, [this](int64_t kind, const std::string& text) { return Answer(kind, text); },
                     [this] { return is_over_.load(); }, takes_long_);
    });
  }
  ~PlayedRank() {
    End();
    Leave();
  }

  const Address& address() const { return address_; }
  // It ends in order: those who guard it hear its farewell.
  void Leave() const { channel_.Leave(); }
  // It serves nobody any more.
  void End() {
    is_over_ = true;
    if (fd_ >= 0) shutdown(fd_, SHUT_RDWR);  // it wakes the thread
    if (thread_.joinable()) thread_.join();
    if (fd_ >= 0) close(std::exchange(fd_, -1));
  }
  // The requests that have come, but for those to stay connected.
  std::vector<Asked> requests() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return requests_;
  }

 private:
  std::string Answer(int64_t kind, const std::string& text) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      requests_.emplace_back(kind, text);
    }
    return answer_(kind, text);
  }

  Address address_;
  int fd_;
  const SideChannel channel_;
  const SideChannel::Answer answer_;
  const SideChannel::TakesLong takes_long_;
  std::atomic<bool> is_over_{false};
  std::thread thread_;
  mutable std::mutex mutex_;  // guards what follows
  std::vector<Asked> requests_;
};

// A child that ends with the test, also where that fails.
inline pid_t Fork() {
  const pid_t pid = fork();
  CHECK(pid >= 0);
  if (pid == 0) CHECK(prctl(PR_SET_PDEATHSIG, SIGKILL) == 0);
  return pid;
}

// A child, which has no other threads, that serves as a rank until it is killed.
inline pid_t ServingChild(int rank, int fd) {
  const pid_t pid = Fork();
  if (pid != 0) return pid;
  SideChannel(rank, {}, kSecret).Serve({fd}, [](int64_t, const std::string&) { return ""; }, [] { return false; });
  _exit(0);
}

// When a process of this host was started, as Process::started has it.
inline int64_t StartOf(int64_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::stringstream all;
  all << file.rdbuf();
  std::istringstream fields(all.str().substr(all.str().rfind(')') + 2));
  std::string field;
  for (int number = 3; number <= 22; ++number) fields >> field;
  return std::atoll(field.c_str());
}

inline Process ProcessAt(const Address& address, int64_t pid, int64_t host) {
  return {{address}, pid, StartOf(pid), host, "host" + std::to_string(host)};
}

}  // namespace pycollective

#endif  // PYCOLLECTIVE_TESTS_NATIVE_RANKS_H_
