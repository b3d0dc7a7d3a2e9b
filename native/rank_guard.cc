// Implementation of rank_guard.h.

#include "rank_guard.h"

#include <sys/socket.h>
#include <unistd.h>

#include <cstdint>
#include <string>
#include <utility>

namespace pycollective {
namespace {

constexpr int64_t kAnswerNs = 10000000000;  // for the next rank to answer that it is there

}  // namespace

RankGuard::RankGuard(const SideChannel& channel, const std::vector<Process>& processes, int rank,
                     std::function<bool()> on_death)
    : channel_(channel), processes_(processes), rank_(rank), on_death_(std::move(on_death)) {}

void RankGuard::Start() {
  const int next = Next();
  if (next != rank_) thread_ = std::thread([this, next] { Wait(next); });
}

void RankGuard::Stop() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
    if (connection_ >= 0) shutdown(connection_, SHUT_RDWR);  // it wakes the thread
  }
  if (thread_.joinable()) thread_.join();
}

int RankGuard::Next() const {
  const int size = static_cast<int>(processes_.size());
  int next = (rank_ + 1) % size;
  while (processes_[static_cast<size_t>(next)].pid == 0) next = (next + 1) % size;
  return next;
}

void RankGuard::Wait(int rank) {
  const int connection = channel_.Ask({rank}, SideChannel::kStay, "", kAnswerNs)[0].connection;
  if (connection < 0) return;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (stopping_) {
      close(connection);
      return;
    }
    connection_ = connection;
  }
  const bool has_died = SideChannel::HasDied(connection);
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    connection_ = -1;
    if (!has_died || stopping_) return;
  }
  const bool is_said = on_death_();
  const Process& process = processes_[static_cast<size_t>(rank)];
  // A launcher that ends a job ends the ranks of one host after those of another.
  if (!is_said || process.host != processes_[static_cast<size_t>(rank_)].host) return;
  Say("pycollective: rank " + std::to_string(rank) + " of " + std::to_string(processes_.size()) + " died: process " +
      std::to_string(process.pid) + " on host " + process.host_name + " was killed, crashed or called _exit.\n");
}

}  // namespace pycollective
