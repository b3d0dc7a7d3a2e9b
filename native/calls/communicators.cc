// Implementation of communicators.h.

#include "calls/communicators.h"

#include <algorithm>
#include <deque>
#include <unordered_map>

#include "calls/messages.h"

namespace pycollective {

// Channels -------------------------------------------------------------------------------------------------------

namespace {

constexpr int kTags = 1 << 15;  // the number of tags that each MPI library has at least

int64_t IdentityOfPart(int64_t whole, const std::vector<int>& members) {
  uint64_t hash = static_cast<uint64_t>(whole);
  for (const int member : members) hash = (hash ^ (static_cast<uint64_t>(member) + 1)) * 0x9E3779B97F4A7C15u;
  return static_cast<int64_t>(hash);
}

}  // namespace

RankGroup::RankGroup(int rank, int size, int devices, int64_t main, int64_t auxiliary, int64_t identity,
             std::vector<int> world)
    : devices_(devices),
      auxiliary_(auxiliary),
      identity_(identity),
      world_(std::move(world)),
      first_tag_(0),
      channels_(static_cast<size_t>(2 * devices)) {
  for (int number = 0; number < 2 * devices; ++number) {
    LazyChannel& channel = channels_[static_cast<size_t>(number)];
    channel.rank = rank;
    channel.size = size;
    channel.permute = auxiliary;
    // Messages of devices other than the first one are sent on `auxiliary`, like those of ppermute. Their tags follow the
    // two ranges of ppermute's tags, the tag 2 * devices * devices, which ranks use outside programs
    // (ranks/out_of_band.py), and that of this package's own messages of channel 0.
    channel.messages = number == 0 ? main : auxiliary;
    channel.first_tag = number == 0 ? 0 : 2 * devices * devices + 1 + number;
    channel.tag_step = number == 0 ? 1 : devices;
    channel.comparison = ComparisonOf(number);
  }
  // Its communicator carries messages of programs.
  channels_[0].own_messages = auxiliary;
  channels_[0].own_tag = 2 * devices * devices + 1;
  channels_[0].collective = main;
  channels_[0].made = true;
}

RankGroup::RankGroup(const RankGroup& whole, std::vector<int> members, int rank)
    : devices_(whole.devices_),
      auxiliary_(whole.auxiliary_),
      members_(std::move(members)),
      identity_(IdentityOfPart(whole.identity_, members_)),
      world_(AtPlaces(whole.world_, members_)),
      channels_(whole.channels_.size()) {
  for (LazyChannel& channel : channels_) {
    channel.permute = auxiliary_;
    channel.rank = rank;
    channel.size = static_cast<int>(members_.size());
    channel.comparison = ComparisonOf(static_cast<int>(&channel - channels_.data()));
  }
  // Parts with other members have other tags, unless their hashes are equal. Equal tags are safe: each device makes one
  // channel at a time, and all ranks make the channels in one order.
  uint32_t hash = 0;
  for (const int member : members_) hash = hash * 1000003u + static_cast<uint32_t>(member) + 1;
  const uint32_t blocks = static_cast<uint32_t>(std::max(1, kTags / (2 * devices_) - 1));
  first_tag_ = static_cast<int>(1 + hash % blocks) * 2 * devices_;
}

Comparison RankGroup::ComparisonOf(int number) const {
  // The devices of a rank compare at the same time. One of them in two levels is enough: others would take communicators of MPI.
  return Comparison(number % devices_ == 0);
}

Outcome RankGroup::MakeChannel(const Library& mpi, int number) {
  LazyChannel& channel = this->channel(number);
  if (channel.made.load(std::memory_order_acquire)) return {};
  int64_t made = 0;
  PYCOLLECTIVE_RETURN_IF_FAILED(mpi.CreateComm(auxiliary_, members_, first_tag_ + number, &made));
  channel.collective = made;
  channel.own.store(made, std::memory_order_release);
  PYCOLLECTIVE_RETURN_IF_FAILED(JoinHosts(mpi, number));
  channel.made.store(true, std::memory_order_release);
  return {};
}

Outcome RankGroup::JoinHosts(const Library& mpi, int number) {
  LazyChannel& channel = this->channel(number);
  if (channel.size == 1) return {};
  if (!AreOnThisHost(world_)) {
    if (!SpanHosts()) return {};
    std::vector<int> members = members_;
    for (int rank = 0; members_.empty() && rank < channel.size; ++rank) members.push_back(rank);
    const int tag = first_tag_ + number;
    channel.levels_of_ranks = std::make_unique<HostLevels>(HostsOf(world_), channel.rank, auxiliary_, members, tag);
    channel.levels = channel.levels_of_ranks.get();
    channel.known_levels.store(channel.levels, std::memory_order_release);
    return {};
  }
  const WithNonblocking on_all_ranks;  // nonblocking on all ranks, since the ranks may come from different calls
  int64_t slot = channel.rank == 0 ? BoardSlot::Take() : -1;
  PYCOLLECTIVE_RETURN_IF_FAILED(mpi.Bcast(channel, {&slot, &slot, 1, Type::kInt64}));
  if (slot < 0) return {};
  BoardSlot board(slot, channel.rank, channel.size);
  CombiningTree tree(slot, channel.rank, channel.size);
  Exchange memory(slot, channel.rank, channel.size);
  const bool on_board = PostOnBoard();
  if (on_board) {
    board.Begin();
  } else {
    tree.Begin();
  }
  memory.Begin();
  PYCOLLECTIVE_RETURN_IF_FAILED(mpi.Barrier(channel));  // all have begun
  channel.slot = slot;
  if (on_board) channel.board = board;
  channel.tree_of_ranks = tree;
  if (!on_board) channel.tree = &channel.tree_of_ranks;
  channel.memory_of_ranks = memory;
  channel.exchange = &channel.memory_of_ranks;
  return {};
}

bool RankGroup::PostOnBoard() const { return AreOnThisHost(world_) && static_cast<int>(world_.size()) <= BoardSlot::kMostRanks; }

bool RankGroup::SpanHosts() const {
  const std::vector<int> hosts = HostsOf(world_);
  const bool all_known = std::find(hosts.begin(), hosts.end(), -1) == hosts.end();
  return all_known && std::any_of(hosts.begin(), hosts.end(), [&](int host) { return host != hosts.front(); });
}

void RankGroup::AddOwnComms(std::vector<int64_t>* comms) const {
  for (const LazyChannel& channel : channels_) {
    const int64_t own = channel.own.load(std::memory_order_acquire);
    if (own != 0) comms->push_back(own);
    const HostLevels* const levels = channel.known_levels.load(std::memory_order_acquire);
    if (levels != nullptr) levels->AddOwnComms(comms);
  }
}

Outcome RankGroup::FreeChannels(const Library& mpi) {
  Outcome first;
  for (LazyChannel& channel : channels_) {
    if (channel.made && channel.levels_of_ranks != nullptr) {
      const Outcome freed = channel.levels_of_ranks->Free(mpi);
      if (first.ok()) first = freed;
    }
    if (!channel.made || channel.slot < 0) continue;
    channel.exchange = nullptr;                // so the barrier is MPI's, and does not use the slot
    const Outcome met = mpi.Barrier(channel);  // after it no rank reads the slot
    if (first.ok()) first = met;
    if (channel.rank == 0) {
      channel.memory_of_ranks.End();
      BoardSlot::Release(channel.slot);
    }
    channel.slot = -1;
    channel.board = BoardSlot();
    channel.tree = nullptr;
  }
  for (size_t number = members_.empty() ? 1 : 0; number < channels_.size(); ++number) {
    LazyChannel& channel = channels_[number];
    if (!channel.made.exchange(false)) continue;
    channel.own.store(0, std::memory_order_relaxed);
    const Outcome outcome = mpi.FreeComm(channel.collective);
    if (first.ok()) first = outcome;
  }
  return first;
}

Team& Communicator::ReplicaTeam(int size) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return replica_teams_.try_emplace(size, size).first->second;
}

// Hosts ----------------------------------------------------------------------------------------------------------

namespace {

// Set before the first communicator.
auto& hosts_of_world = *new std::vector<int>;
int own_host = -1;

}  // namespace

void SetHosts(std::vector<int> hosts, int own) {
  hosts_of_world = std::move(hosts);
  own_host = own;
}

std::vector<int> HostsOf(const std::vector<int>& world_ranks) {
  std::vector<int> hosts;
  for (const int rank : world_ranks) {
    const auto place = static_cast<size_t>(rank);
    hosts.push_back(place < hosts_of_world.size() ? hosts_of_world[place] : -1);
  }
  return hosts;
}

bool AreOnThisHost(const std::vector<int>& world_ranks) {
  const std::vector<int> hosts = HostsOf(world_ranks);
  return BoardSlot::HasBoard() && std::all_of(hosts.begin(), hosts.end(), [](int host) { return host == own_host; });
}

// The table ------------------------------------------------------------------------------------------------------

namespace {

// The number of freed communicators, the latest ones, that stay in the table for their names in error messages.
constexpr size_t kRemembered = 1000;

std::mutex mutex;
auto& table = *new std::unordered_map<int64_t, std::shared_ptr<Communicator>>;
auto& freed = *new std::deque<int64_t>;  // the oldest first
int64_t next_number = 0;

}  // namespace

int64_t AddCommunicator(std::shared_ptr<Communicator> communicator) {
  const std::lock_guard<std::mutex> lock(mutex);
  table.emplace(next_number, std::move(communicator));
  return next_number++;
}

std::shared_ptr<Communicator> FindCommunicator(int64_t number) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = table.find(number);
  return found == table.end() ? nullptr : found->second;
}

bool WasCommunicator(int64_t number) {
  const std::lock_guard<std::mutex> lock(mutex);
  return 0 <= number && number < next_number;
}

std::shared_ptr<RankGroup> PartOf(Communicator& whole, const std::vector<int>& members, int rank) {
  const std::lock_guard<std::mutex> lock(mutex);
  std::shared_ptr<RankGroup>& part = whole.parts[members];
  if (part == nullptr) part = std::make_shared<RankGroup>(*whole.ranks, members, rank);
  return part;
}

bool IsHeld(int64_t number) {
  // Under the lock no thread can take a share from the table, so the number of shares can only decrease.
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = table.find(number);
  if (found == table.end()) return false;
  const std::shared_ptr<Communicator>& whole = found->second;
  long own = 1;  // the table's
  for (const auto& [other, part] : table) {
    if (part->whole != whole) continue;
    own += 1;
    if (part.use_count() > 1) return true;
  }
  return whole.use_count() > own;
}

std::vector<int64_t> OwnCommsOfAll() {
  const std::lock_guard<std::mutex> lock(mutex);
  std::vector<int64_t> comms;
  for (const auto& [number, communicator] : table) {
    if (communicator->freed || communicator->whole != nullptr) continue;
    communicator->ranks->AddOwnComms(&comms);
    for (const auto& [members, ranks] : communicator->parts) ranks->AddOwnComms(&comms);
  }
  return comms;
}

void AbandonAll() {
  const std::lock_guard<std::mutex> lock(mutex);
  for (const auto& [number, communicator] : table) {
    if (communicator->freed.exchange(true)) continue;
    communicator->lost = true;
    freed.push_back(number);
    if (communicator->whole == nullptr) EndStartedMessages(nullptr, communicator->ranks->channel(0).permute);
  }
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
  EndStartedMessages(&mpi, whole->ranks->channel(0).permute);
  Outcome first = whole->ranks->FreeChannels(mpi);
  // MPI may wait for the other ranks, so all ranks must free the parts in one order: that of the map.
  for (const auto& [members, ranks] : whole->parts) {
    const Outcome outcome = ranks->FreeChannels(mpi);
    if (first.ok()) first = outcome;
  }
  return first;
}

}  // namespace pycollective
