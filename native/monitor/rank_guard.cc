// Implementation of rank_guard.h.

#include "monitor/rank_guard.h"

#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <utility>

namespace pycollective {
namespace {

constexpr int64_t kAnswerNs = 10000000000;  // for the other rank to answer that it is there

}  // namespace

std::vector<int> RanksGuardedBy(int rank, const std::vector<Process>& processes) {
  const auto host_of = [&processes](int other) { return processes[static_cast<size_t>(other)].host; };
  std::vector<int> ranks;  // host by host
  for (int other = 0; other < static_cast<int>(processes.size()); ++other) {
    if (processes[static_cast<size_t>(other)].pid != 0) ranks.push_back(other);
  }
  std::stable_sort(ranks.begin(), ranks.end(), [&](int a, int b) { return host_of(a) < host_of(b); });
  const auto own = std::find(ranks.begin(), ranks.end(), rank);
  const auto is_on_host = [&](int other) { return host_of(other) == host_of(rank); };
  const int first = *std::find_if(ranks.begin(), ranks.end(), is_on_host);
  const int next = own + 1 == ranks.end() ? ranks.front() : own[1];
  std::vector<int> guarded;
  if (next != rank) guarded.push_back(next);
  if (!is_on_host(next) && first != rank) guarded.push_back(first);
  return guarded;
}

RankGuard::RankGuard(const SideChannel& channel, int rank, std::function<void(int rank)> on_death)
    : channel_(channel), rank_(rank), on_death_(std::move(on_death)) {}

void RankGuard::Start() {
  thread_ = std::thread([this] { Tried("watch another rank", [this] { Wait(); }); });
}

void RankGuard::Stop() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
    if (connection_ >= 0) shutdown(connection_, SHUT_RDWR);  // it wakes the thread
  }
  if (thread_.joinable()) thread_.join();
}

void RankGuard::Wait() {
  const Reply reply = channel_.Ask({rank_}, SideChannel::kStay, "", kAnswerNs)[0];
  const int connection = reply.connection;
  if (connection < 0) return;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (stopping_) {
      close(connection);
      return;
    }
    connection_ = connection;
  }
  const bool has_died = SideChannel::HasDied(connection, reply.farewell);
  {
    // Stop shuts the connection down under the lock, and its number may be another file's as soon as it is closed.
    const std::lock_guard<std::mutex> lock(mutex_);
    close(std::exchange(connection_, -1));
    if (!has_died || stopping_) return;
  }
  on_death_(rank_);
}

}  // namespace pycollective
