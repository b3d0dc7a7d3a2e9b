// Implementation of comparison.h.

#include "calls/comparison.h"

#include <algorithm>
#include <vector>

#include "calls/messages.h"
#include "mpi/backoff.h"

namespace pycollective {
namespace {

struct Block {
  uint64_t digest;
  alignas(8) char data[kPiggybackBytes];
};
static_assert(sizeof(Block) == 128, "ranks send it as bytes");

}  // namespace

Outcome CompareWithAll(const Library& mpi, const Channel& channel, const Post& own, const PiggybackedCollective* piggybacked,
                       Difference* found) {
  const WithNonblocking on_all_ranks;  // nonblocking on all ranks, since the ranks may come from different calls
  Block mine{own.Digest(), {}};
  if (piggybacked != nullptr) piggybacked->Pack({channel.rank, channel.size}, mine.data);
  std::vector<Block> all(static_cast<size_t>(channel.size));
  PYCOLLECTIVE_RETURN_IF_FAILED(mpi.Allgather(channel, {&mine, all.data(), sizeof(Block), Type::kUint8}));
  if (std::any_of(all.begin(), all.end(), [&](const Block& block) { return block.digest != mine.digest; })) {
    const CallDescription own_call(own);
    std::vector<CallDescription> calls(all.size());
    PYCOLLECTIVE_RETURN_IF_FAILED(mpi.Allgather(channel, {&own_call, calls.data(), sizeof(CallDescription), Type::kUint8}));
    for (size_t rank = 0; rank < calls.size(); ++rank) {
      if (own.Matches(calls[rank].post)) continue;
      *found = {static_cast<int>(rank), calls[rank].post, calls[rank].line};
      return {};
    }
  }
  if (piggybacked != nullptr) {
    piggybacked->Complete({channel.rank, channel.size}, [&](int rank) { return all[static_cast<size_t>(rank)].data; });
  }
  return {};
}

}  // namespace pycollective
