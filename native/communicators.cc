// Implementation of communicators.h.

#include "communicators.h"

#include <algorithm>
#include <chrono>
#include <deque>
#include <unordered_map>

namespace pycollective {

// Channels -------------------------------------------------------------------------------------------------------

namespace {

constexpr int kTags = 1 << 15;  // that every MPI library has

}  // namespace

Ranks::Ranks(int rank, int size, int devices, int64_t calls, int64_t rest)
    : devices_(devices), rest_(rest), first_tag_(0), channels_(static_cast<size_t>(2 * devices)) {
  for (int number = 0; number < 2 * devices; ++number) {
    OwnChannel& channel = channels_[static_cast<size_t>(number)];
    channel.rank = rank;
    channel.size = size;
    channel.permute = rest;
    // Messages between other devices than the first go with those of ppermute, behind the tags of both its kinds and one
    // more, 2 * devices * devices, by which ranks speak outside programs (control.py).
    channel.messages = number == 0 ? calls : rest;
    channel.first_tag = number == 0 ? 0 : 2 * devices * devices + number;
    channel.tag_step = number == 0 ? 1 : devices;
  }
  channels_[0].collective = calls;
  channels_[0].made = true;
}

Ranks::Ranks(const Ranks& whole, std::vector<int> members, int rank)
    : devices_(whole.devices_), rest_(whole.rest_), members_(std::move(members)), channels_(whole.channels_.size()) {
  for (OwnChannel& channel : channels_) {
    channel.permute = rest_;
    channel.rank = rank;
    channel.size = static_cast<int>(members_.size());
  }
  // Apart from other parts' tags if it can be. It need not: each device makes one channel at a time, in one order.
  uint32_t hash = 0;
  for (const int member : members_) hash = hash * 1000003u + static_cast<uint32_t>(member) + 1;
  const uint32_t blocks = static_cast<uint32_t>(std::max(1, kTags / (2 * devices_) - 1));
  first_tag_ = static_cast<int>(1 + hash % blocks) * 2 * devices_;
}

Outcome Ranks::Make(const Library& mpi, int number) {
  OwnChannel& channel = this->channel(number);
  if (channel.made.load(std::memory_order_acquire)) return {};
  int64_t made = 0;
  PYCOLLECTIVE_RETURN_IF_FAILED(mpi.MakeChannel(rest_, members_, first_tag_ + number, &made));
  channel.collective = made;
  channel.made.store(true, std::memory_order_release);
  return {};
}

Outcome Ranks::Free(const Library& mpi) {
  Outcome first;
  for (size_t number = members_.empty() ? 1 : 0; number < channels_.size(); ++number) {
    OwnChannel& channel = channels_[number];
    if (!channel.made.exchange(false)) continue;
    const Outcome outcome = mpi.FreeChannel(channel.collective);
    if (first.ok()) first = outcome;
  }
  return first;
}

Team& Communicator::CopiesOf(int size) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return copies_.try_emplace(size, size).first->second;
}

// The table ------------------------------------------------------------------------------------------------------

namespace {

// Freed ones are remembered for their names, the last of them.
constexpr size_t kRemembered = 1000;

std::mutex mutex;
std::unordered_map<int64_t, std::shared_ptr<Communicator>> table;
std::deque<int64_t> freed;
int64_t used = 0;

}  // namespace

int64_t AddCommunicator(std::shared_ptr<Communicator> communicator) {
  const std::lock_guard<std::mutex> lock(mutex);
  table.emplace(used, std::move(communicator));
  return used++;
}

std::shared_ptr<Communicator> FindCommunicator(int64_t number) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = table.find(number);
  return found == table.end() ? nullptr : found->second;
}

bool WasCommunicator(int64_t number) {
  const std::lock_guard<std::mutex> lock(mutex);
  return 0 <= number && number < used;
}

std::shared_ptr<Ranks> PartOf(Communicator& whole, const std::vector<int>& members, int rank) {
  const std::lock_guard<std::mutex> lock(mutex);
  std::shared_ptr<Ranks>& part = whole.parts[members];
  if (part == nullptr) part = std::make_shared<Ranks>(*whole.ranks, members, rank);
  return part;
}

Outcome FreeCommunicator(const Library& mpi, int64_t number) {
  const std::shared_ptr<Communicator> whole = FindCommunicator(number);
  if (whole == nullptr) return {};
  {
    const std::lock_guard<std::mutex> lock(mutex);
    for (const auto& [other, communicator] : table) {
      if (communicator != whole && communicator->whole != whole) continue;
      if (!communicator->freed.exchange(true)) freed.push_back(other);
    }
    for (; freed.size() > kRemembered; freed.pop_front()) table.erase(freed.front());
  }
  Outcome first = whole->ranks->Free(mpi);
  // In one order on all ranks: MPI may wait for the others.
  for (const auto& [members, ranks] : whole->parts) {
    const Outcome outcome = ranks->Free(mpi);
    if (first.ok()) first = outcome;
  }
  return first;
}

std::vector<std::shared_ptr<Communicator>> LiveCommunicators() {
  const std::lock_guard<std::mutex> lock(mutex);
  std::vector<std::shared_ptr<Communicator>> live;
  for (const auto& [number, communicator] : table) {
    if (!communicator->freed) live.push_back(communicator);
  }
  return live;
}

int64_t NowNs() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace pycollective
