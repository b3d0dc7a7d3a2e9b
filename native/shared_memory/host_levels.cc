// Implementation of host_levels.h.

#include "shared_memory/host_levels.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>

#include "mpi/doubling.h"
#include "mpi/elements.h"
#include "mpi/reduction.h"
#include "shared_memory/board.h"

namespace pycollective {
namespace {

// Smaller arrays go by MPI alone: the ranks of a host would meet twice (docs/performance.md). So do empty ones.
int64_t LeastBytes(Operation operation) {
  switch (operation) {
    case kBcast: return 64 << 10;
    case kAllreduce:
    case kReduce: return 1 << 10;
    default: return 1;
  }
}

// Larger blocks of an all-to-all go by MPI alone: levels would copy them three times more.
constexpr int64_t kMostBlockBytes = 4 << 10;

// The least share of a lane: a message of this size takes little longer than an empty one. In an allgather it is that of the blocks of a
// host; in a reduce-scatter too, and the rank of the lane also adds up as much for each host.
constexpr int64_t kLeastLaneBytes = 8 << 10, kLeastBlocksBytes = 32 << 10, kLeastSumsBytes = 4 << 10;

constexpr int kTagOfSums = 1, kTagOfBlocks = 2;  // of messages in a lane; comparisons have 0

int PlaceOf(int rank, const std::vector<int>& ranks) {
  return static_cast<int>(std::find(ranks.begin(), ranks.end(), rank) - ranks.begin());
}

std::unique_ptr<char[]> MemoryFor(int64_t count, Type type) { return std::unique_ptr<char[]>(new char[Bytes(count, type)]); }

// Writes the blocks of a matrix of blocks column by column.
void Transpose(const void* from, void* to, int rows, int columns, int64_t count, Type type) {
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t column = 0; column < columns; ++column) {
      const void* const block = At(from, (row * columns + column) * count, type);
      std::memcpy(At(to, (column * rows + row) * count, type), block, Bytes(count, type));
    }
  }
}

}  // namespace

std::vector<int> AtPlaces(const std::vector<int>& values, const std::vector<int>& places) {
  std::vector<int> found;
  for (const int place : places) found.push_back(values[static_cast<size_t>(place)]);
  return found;
}

HostLevels::HostLevels(std::vector<int> hosts, int rank, int64_t from, std::vector<int> members, int tag)
    : hosts_(std::move(hosts)), rank_(rank), from_(from), members_(std::move(members)), tag_(tag) {
  std::map<int, std::vector<int>> ranks_of;  // by host
  for (size_t i = 0; i < hosts_.size(); ++i) ranks_of[hosts_[i]].push_back(static_cast<int>(i));
  local_ranks_ = ranks_of[HostOf(rank)];
  const auto number = static_cast<size_t>(PlaceOf(rank, local_ranks_));
  lanes_ = static_cast<int>(hosts_.size());
  const int host_count = static_cast<int>(ranks_of.size());
  in_blocks_ = in_turns_ = true;
  for (const auto& [host, ranks] : ranks_of) {
    const int count = static_cast<int>(ranks.size());
    const auto is_sequence = [&](int step) {  // ranks.front(), ranks.front() + step, ...
      for (int i = 0; i < count; ++i) {
        if (ranks[static_cast<size_t>(i)] != ranks.front() + i * step) return false;
      }
      return ranks.size() == local_ranks_.size();
    };
    lanes_ = std::min(lanes_, count);
    largest_ = std::max(largest_, count);
    in_blocks_ = in_blocks_ && is_sequence(1);
    in_turns_ = in_turns_ && is_sequence(host_count);
    if (number < ranks.size()) lane_ranks_.push_back(ranks[number]);
  }
  std::vector<std::vector<int>> by_host;
  for (const auto& [host, ranks] : ranks_of) by_host.push_back(ranks);
  std::sort(by_host.begin(), by_host.end());  // by their first ranks
  places_.resize(hosts_.size());
  int place = 0;
  for (const std::vector<int>& ranks : by_host) {
    for (const int of_host : ranks) places_[static_cast<size_t>(of_host)] = place++;
  }
  // A lane has its ranks in their order. So lanes may have the hosts in different orders, unless in_blocks_ or in_turns_.
  std::sort(lane_ranks_.begin(), lane_ranks_.end());
  local_.rank = static_cast<int>(number);
  local_.size = static_cast<int>(local_ranks_.size());
  lane_.rank = PlaceOf(rank, lane_ranks_);
  lane_.size = static_cast<int>(lane_ranks_.size());
}

bool HostLevels::Has(Operation operation, const Arguments& a) const {
  const auto nbytes = static_cast<int64_t>(Bytes(a.count, a.type));
  if (largest_ == 1 || nbytes < LeastBytes(operation) || (operation == kAlltoall && nbytes > kMostBlockBytes)) return false;
  const Hierarchy hierarchy = TraitsOf(operation).hierarchy;
  return hierarchy == kHierarchical || (hierarchy == kHierarchicalIfEqual && (in_blocks_ || in_turns_));
}

Outcome HostLevels::Make(const Library& mpi, const Channel& channel, bool* has) {
  if (!made_) {
    const auto make = [&](const std::vector<int>& ranks, Channel* made, std::atomic<int64_t>* comm) -> Outcome {
      PYCOLLECTIVE_RETURN_IF_FAILED(mpi.CreateComm(from_, AtPlaces(members_, ranks), tag_, &made->collective));
      comm->store(made->collective, std::memory_order_release);
      return {};
    };
    const bool has_local = make(local_ranks_, &local_, &comms_[0]).ok();
    const bool takes_slot = has_local && local_.rank == 0 && local_.size > 1 && BoardSlot::HasBoard();
    if (takes_slot && slot_ < 0) slot_ = BoardSlot::Take();
    int64_t slot = slot_;
    if (has_local) PYCOLLECTIVE_RETURN_IF_FAILED(mpi.Bcast(local_, {&slot, &slot, 1, Type::kInt64}));
    if (slot >= 0) {
      memory_of_local_ = Exchange(slot, local_.rank, local_.size);
      tree_of_local_ = CombiningTree(slot, local_.rank, local_.size);
      memory_of_local_.Begin();
      tree_of_local_.Begin();
    }
    Channel flat = channel;
    flat.levels = nullptr;
    const auto all_have = [&](bool has_this, bool* all) {
      const int64_t own = has_this;
      int64_t least = 0;
      const Outcome outcome = mpi.Allreduce(flat, {&own, &least, 1, Type::kInt64, Op::kMin});
      *all = least != 0;
      return outcome;
    };
    PYCOLLECTIVE_RETURN_IF_FAILED(all_have(has_local && (slot >= 0 || local_.size == 1), &has_));  // and all ranks have begun
    // Ranks beyond the lanes of some host send nothing.
    const auto has_lane = [&] { return local_.rank >= lanes_ || make(lane_ranks_, &lane_, &comms_[1]).ok(); };
    if (has_) PYCOLLECTIVE_RETURN_IF_FAILED(all_have(has_lane(), &has_));
    if (has_ && slot >= 0) {
      local_.exchange = &memory_of_local_;
      local_.tree = &tree_of_local_;
    }
    if (!has_) GiveSlotBack();  // no rank has used it
    lane_.messages = lane_.collective;
    made_ = true;
  }
  *has = has_;
  return {};
}

void HostLevels::GiveSlotBack() {
  if (slot_ >= 0) {
    memory_of_local_.End();
    BoardSlot::Release(slot_);
    slot_ = -1;
  }
}

Outcome HostLevels::Run(const Library& mpi, Operation operation, const Arguments& a) {
  return calls_.Run([&] { return RunByOperation(mpi, operation, a); });
}

Outcome HostLevels::RunByOperation(const Library& mpi, Operation operation, const Arguments& a) {
  switch (operation) {
    case kAllreduce: return Allreduce(mpi, a);
    case kReduce: return Reduce(mpi, a);
    case kBcast: return Bcast(mpi, a);
    case kReduceScatter: return ReduceScatter(mpi, a);
    case kAlltoall: return Alltoall(mpi, a);
    case kAllgather: return Allgather(mpi, a);
    default: return {kOperationNames[operation], 0, "expected a collective that has a function of HostLevels, got another one"};
  }
}

Outcome HostLevels::Allreduce(const Library& mpi, const Arguments& a) {
  // All lanes of a host share its link.
  const bool by_doubling = a.op != Op::kSumBfloat16 && SentByDoubling(static_cast<int64_t>(Bytes(a.count, a.type)), lane_.size) <= kMostByDoubling;
  return AddUp(mpi, a, [&](void* share, int64_t count) {
    const Arguments of_lane = a.On(share, share, count);
    return by_doubling ? AddUpByDoubling(mpi, of_lane) : mpi.Allreduce(lane_, of_lane);
  });
}

Outcome HostLevels::AddUpByDoubling(const Library& mpi, const Arguments& a) {
  const auto nbytes = static_cast<int64_t>(Bytes(a.count, a.type));
  const std::unique_ptr<char[]> memory = MemoryFor(a.count, a.type);
  const auto add = [&](void* sum, const void* next) { ReduceInPlace(sum, next, a.count, a.type, a.op); };
  return CombineByDoubling(mpi, lane_, kTagOfSums, a.recv, memory.get(), nbytes, [&](const void*) { return nbytes; }, false, add);
}

Outcome HostLevels::AddUp(const Library& mpi, const Arguments& a, const HostCollective::InterHostStep& inter_host_step) {
  if (local_.size > 1) return HostCollective(mpi, local_).Allreduce(a, LanesOf(a), inter_host_step);
  // A rank alone on its host has all of it, and there is one lane.
  PYCOLLECTIVE_RETURN_IF_FAILED(CopyInMemory(0, a.recv, a.send, Bytes(a.count, a.type)));
  return inter_host_step(a.recv, a.count);
}

int HostLevels::LanesOf(const Arguments& a) const {
  return static_cast<int>(std::clamp<int64_t>(static_cast<int64_t>(Bytes(a.count, a.type)) / kLeastLaneBytes, 1, lanes_));
}

int HostLevels::LaneRootOf(int root) const {
  const auto found = std::find_if(lane_ranks_.begin(), lane_ranks_.end(), [&](int rank) { return HostOf(rank) == HostOf(root); });
  return static_cast<int>(found - lane_ranks_.begin());
}

Outcome HostLevels::Reduce(const Library& mpi, const Arguments& a) {
  PYCOLLECTIVE_RETURN_IF_FAILED(AddUp(mpi, a, [&](void* share, int64_t count) {
    Arguments sum = a.On(share, share, count);
    sum.root = LaneRootOf(a.root);
    return mpi.Reduce(lane_, sum);
  }));
  if (rank_ != a.root) std::memset(a.recv, 0, Bytes(a.count, a.type));
  return {};
}

// The root's host gets the array. Each lane brings a share of it to the other hosts, where its ranks hand it on.
Outcome HostLevels::Bcast(const Library& mpi, const Arguments& a) {
  const bool is_roots_host = HostOf(rank_) == HostOf(a.root);
  if (is_roots_host) {
    Arguments within = a;
    within.root = PlaceOf(a.root, local_ranks_);
    PYCOLLECTIVE_RETURN_IF_FAILED(mpi.Bcast(local_, within));
  }
  const int lanes = LanesOf(a);
  const Shares shares(a.count, lanes, a.type);
  void* const share = At(a.recv, shares.Begin(local_.rank), a.type);
  if (local_.rank < lanes) {
    Arguments of_lane = a.On(share, share, shares.CountOf(local_.rank));
    of_lane.root = LaneRootOf(a.root);
    PYCOLLECTIVE_RETURN_IF_FAILED(mpi.Bcast(lane_, of_lane));
  }
  if (is_roots_host || local_.size == 1) return {};
  return HostCollective(mpi, local_).Allgather(a.On(share, a.recv, a.count), Distribution::Of(shares, lanes));
}

int HostLevels::LanesOfBlocks(const Arguments& a, int64_t least_bytes) const {
  const int64_t of_host = a.count * local_.size;
  const auto most = std::clamp<int64_t>(static_cast<int64_t>(Bytes(of_host, a.type)) / least_bytes, 1, local_.size);
  if (!in_blocks_ && most > 1) return local_.size;
  int64_t lanes = most;  // their shares must be equal
  while (of_host % lanes != 0) --lanes;
  return 2 * lanes < most ? local_.size : static_cast<int>(lanes);
}

// Of H hosts with n ranks each, the ranks of host h have the blocks h * n, h * n + 1, ...; or, in turns, h, h + H, ... With fewer lanes than n
// each lane has a share of each n blocks that follow each other; in turns there is one lane then, which has all.
Distribution HostLevels::PartsOf(const Arguments& a, int lanes) const {
  const int64_t count = a.count * lane_.size * local_.size;
  return {count, in_blocks_ ? a.count * local_.size / lanes : count / lanes, lanes};
}

// Not by MPI's reduce-scatter: its library may let one rank add up all blocks.
Outcome HostLevels::AddUpBlocks(const Library& mpi, const Arguments& a) {
  const int hosts = lane_.size;
  const bool by_halving = (hosts & (hosts - 1)) == 0;
  const std::unique_ptr<char[]> memory = MemoryFor(a.count * (by_halving ? hosts / 2 : hosts), a.type);
  const auto add = [&](void* sum, const void* next, int64_t count) { ReduceInPlace(sum, next, count, a.type, a.op); };
  if (by_halving) {
    void* const blocks = const_cast<void*>(a.send);
    PYCOLLECTIVE_RETURN_IF_FAILED(ScatterSumByHalving(mpi, lane_, kTagOfSums, blocks, memory.get(), a.count, a.type, add));
    return CopyInMemory(0, a.recv, At(a.send, lane_.rank * a.count, a.type), Bytes(a.count, a.type));
  }
  PYCOLLECTIVE_RETURN_IF_FAILED(mpi.Alltoall(lane_, a.On(a.send, memory.get(), a.count)));
  const auto of = [&](int host) { return At(static_cast<const void*>(memory.get()), host * a.count, a.type); };
  ReduceInOrder(hosts, of, a.count, a.recv, a.type, a.op);
  return {};
}

Outcome HostLevels::ReduceScatter(const Library& mpi, const Arguments& a) {
  const int hosts = lane_.size, ranks = local_.size, lanes = LanesOfBlocks(a, kLeastSumsBytes);
  const int64_t of_host = a.count * ranks, share = of_host / lanes;
  HostCollective within_host(mpi, local_);
  const std::unique_ptr<char[]> sums = MemoryFor(share * hosts, a.type);
  const std::unique_ptr<char[]> blocks = MemoryFor(lanes < ranks ? of_host : 0, a.type);  // of which this rank needs its own
  PYCOLLECTIVE_RETURN_IF_FAILED(within_host.ReduceScatter(a.On(a.send, sums.get(), a.count), PartsOf(a, lanes)));
  void* const own = lanes == ranks ? a.recv : At(static_cast<void*>(blocks.get()), std::min(of_host, local_.rank * share), a.type);
  if (local_.rank < lanes) {
    const bool is_by_host = in_blocks_ || lanes == ranks;
    const std::unique_ptr<char[]> by_host = MemoryFor(is_by_host ? 0 : share * hosts, a.type);
    if (!is_by_host) Transpose(sums.get(), by_host.get(), ranks, hosts, a.count, a.type);
    void* const send = is_by_host ? sums.get() : by_host.get();
    PYCOLLECTIVE_RETURN_IF_FAILED(AddUpBlocks(mpi, a.On(send, own, share)));
  }
  if (lanes == ranks) return {};
  const int64_t first = local_.rank * a.count;
  PYCOLLECTIVE_RETURN_IF_FAILED(
      within_host.Allgather(a.On(own, blocks.get(), of_host), {of_host, share, lanes}, {first, first + a.count}));
  return CopyInMemory(0, a.recv, At(blocks.get(), first, a.type), Bytes(a.count, a.type));
}

Outcome HostLevels::Allgather(const Library& mpi, const Arguments& a) {
  const int hosts = lane_.size, ranks = local_.size, lanes = LanesOfBlocks(a, kLeastBlocksBytes);
  const int64_t of_host = a.count * ranks, share = of_host / lanes;
  HostCollective within_host(mpi, local_);
  const std::unique_ptr<char[]> blocks = MemoryFor(lanes < ranks ? of_host : 0, a.type);  // of which this rank needs the share of its lane
  const int64_t first = local_.rank * share;
  if (lanes < ranks) {
    const HostCollective::Range of_lane{first, local_.rank < lanes ? first + share : first};
    PYCOLLECTIVE_RETURN_IF_FAILED(within_host.Allgather(a.On(a.send, blocks.get(), of_host), {of_host, a.count, ranks}, of_lane));
  }
  const std::unique_ptr<char[]> shares = MemoryFor(local_.rank < lanes ? share * hosts : 0, a.type);
  const void* own = shares.get();
  if (local_.rank < lanes) {
    const void* const send = lanes < ranks ? At(blocks.get(), first, a.type) : a.send;
    PYCOLLECTIVE_RETURN_IF_FAILED(mpi.Allgather(lane_, a.On(send, shares.get(), share)));
    if (!in_blocks_ && lanes < ranks) {
      Transpose(shares.get(), a.recv, hosts, ranks, a.count, a.type);
      own = a.recv;
    }
  }
  return within_host.Allgather(a.On(own, a.recv, a.count), PartsOf(a, lanes));
}

// Within each host a rank gets the blocks for its lane, and in its lane those for itself. Of H hosts with n ranks each, a rank has n rows of
// H blocks between the two steps, and needs them as H rows of n blocks.
Outcome HostLevels::Alltoall(const Library& mpi, const Arguments& a) {
  const int hosts = lane_.size, ranks = local_.size;
  const int64_t count = a.count * hosts * ranks;
  const std::unique_ptr<char[]> one = MemoryFor(count, a.type), other = MemoryFor(count, a.type);
  if (!in_turns_) Transpose(a.send, one.get(), hosts, ranks, a.count, a.type);
  const void* const by_lane = in_turns_ ? a.send : one.get();
  PYCOLLECTIVE_RETURN_IF_FAILED(mpi.Alltoall(local_, a.On(by_lane, other.get(), a.count * hosts)));
  Transpose(other.get(), one.get(), ranks, hosts, a.count, a.type);
  void* const by_host = in_turns_ ? other.get() : a.recv;
  PYCOLLECTIVE_RETURN_IF_FAILED(AlltoallInLane(mpi, a.On(one.get(), by_host, a.count * ranks)));
  if (in_turns_) Transpose(by_host, a.recv, hosts, ranks, a.count, a.type);
  return {};
}

// Two hosts exchange a message each: on 2 x 2 ranks a call with blocks of 4 KiB took 43 us so, and 54 by MPICH's all-to-all.
Outcome HostLevels::AlltoallInLane(const Library& mpi, const Arguments& a) {
  if (lane_.size != 2) return mpi.Alltoall(lane_, a);
  const int other = 1 - lane_.rank;
  PYCOLLECTIVE_RETURN_IF_FAILED(CopyInMemory(0, At(a.recv, lane_.rank * a.count, a.type), At(a.send, lane_.rank * a.count, a.type), Bytes(a.count, a.type)));
  return mpi.Sendrecv(lane_, {At(a.send, other * a.count, a.type), a.count, a.type, other, kTagOfBlocks},
                      {At(a.recv, other * a.count, a.type), a.count, a.type, other, kTagOfBlocks});
}

void HostLevels::AddOwnComms(std::vector<int64_t>* comms) const {
  for (const auto& comm : comms_) {
    const int64_t own = comm.load(std::memory_order_acquire);
    if (own != 0) comms->push_back(own);
  }
}

Outcome HostLevels::Free(const Library& mpi) {
  Outcome first;
  const auto keep = [&](const Outcome& outcome) {
    if (first.ok()) first = outcome;
  };
  if (local_.exchange != nullptr) {
    local_.exchange = nullptr;  // the barrier is MPI's: it leaves the slot alone
    local_.tree = nullptr;
    keep(mpi.Barrier(local_));  // no rank reads the slot any more
  }
  GiveSlotBack();
  made_ = false;
  calls_ = StopAfterFailure();
  for (auto& comm : comms_) {
    const int64_t own = comm.exchange(0);
    if (own != 0) keep(mpi.FreeComm(own));
  }
  return first;
}

}  // namespace pycollective
