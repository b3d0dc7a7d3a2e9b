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
                     std::function<bool()> job_ends)
    : channel_(channel), processes_(processes), rank_(rank), job_ends_(std::move(job_ends)) {}

void RankGuard::Start() {
  const int next = NextOfHost();
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

int RankGuard::NextOfHost() const {
  const int size = static_cast<int>(processes_.size());
  for (int step = 1; step < size; ++step) {
    const int rank = (rank_ + step) % size;
    const Process& process = processes_[static_cast<size_t>(rank)];
    const Process& own = processes_[static_cast<size_t>(rank_)];
    if (process.pid != 0 && process.host == own.host) return rank;
  }
  return rank_;
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
  const std::lock_guard<std::mutex> lock(mutex_);
  connection_ = -1;
  if (!has_died || stopping_ || job_ends_()) return;
  const Process& process = processes_[static_cast<size_t>(rank)];
  Say("pycollective: rank " + std::to_string(rank) + " of " + std::to_string(processes_.size()) + " died: process " +
      std::to_string(process.pid) + " on host " + process.host_name + " was killed, crashed or called _exit.\n");
}

}  // namespace pycollective
