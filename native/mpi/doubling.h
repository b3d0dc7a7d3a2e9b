// Recursive doubling: messages by which each rank of a channel gets what all ranks bring, combined in the order of the ranks. And recursive
// halving, by which each rank gets its block of a sum.
//
// By doubling a rank exchanges with a partner, in each round, all that both have combined so far. If the number of ranks is no power of two, the
// first ranks combine in pairs before, and one of each pair hands the result to the other afterwards. So a rank sends at most
// 1 + log2(ranks) messages. What is combined stands for ranks that follow each other, and the lower ones come first, so all
// ranks get the same bits, on each run. (With fused multiplications the product of two complex numbers has other bits in the other
// order.)

#ifndef PYCOLLECTIVE_NATIVE_MPI_DOUBLING_H_
#define PYCOLLECTIVE_NATIVE_MPI_DOUBLING_H_

#include <cstdint>
#include <cstring>
#include <utility>

#include "mpi/collectives.h"

namespace pycollective {

// What a rank sends of an array in all rounds, in bytes.
inline int64_t SentByDoubling(int64_t nbytes, int ranks) {
  int64_t rounds = 0;
  while (int64_t{1} << rounds < ranks) ++rounds;
  return nbytes * rounds;
}
// If a host would send more than this of an array, the algorithms of MPI are faster (docs/performance.md).
inline constexpr int64_t kMostByDoubling = 32 << 10;

// @param tag: of messages on `channel.messages` that nobody else sends.
// @param data: what this rank brings, and then the result.
// @param memory: as much memory as `data` has.
// @param capacity: of both, in bytes.
// @param nbytes: nbytes(x) is the length of what lies at x, in bytes.
// @param lengths_differ: whether ranks may bring data of other lengths than this one.
// @param add: add(x, next) adds what lies at `next` to what lies at x, of ranks before those of `next`.
template <typename NBytes, typename Add>
Outcome CombineByDoubling(const Library& mpi, const Channel& channel, int tag, void* data, void* memory, int64_t capacity,
                          NBytes nbytes, bool lengths_differ, Add add) {
  const int rank = channel.rank, size = channel.size;
  void *own = data, *theirs = memory;
  const auto outgoing = [&](int to) { return Outgoing{own, nbytes(own), Type::kUint8, to, tag}; };
  const auto incoming = [&](int from) {
    Incoming in{theirs, capacity, Type::kUint8, from, tag};
    in.may_be_shorter = lengths_differ;
    return in;
  };
  const auto combine = [&](bool they_come_next) {
    if (!they_come_next) std::swap(own, theirs);
    add(own, theirs);
  };
  const auto keep = [&](const void* result) {
    if (result != data) std::memcpy(data, result, static_cast<size_t>(nbytes(result)));
  };
  int power = 1;
  while (power * 2 <= size) power *= 2;
  const int pairs = size - power;  // ranks 2 i and 2 i + 1
  if (rank < 2 * pairs && rank % 2 == 0) {
    PYCOLLECTIVE_RETURN_IF_FAILED(mpi.Send(channel, outgoing(rank + 1)));
    PYCOLLECTIVE_RETURN_IF_FAILED(mpi.Recv(channel, incoming(rank + 1)));
    keep(theirs);
    return {};
  }
  if (rank < 2 * pairs) {
    PYCOLLECTIVE_RETURN_IF_FAILED(mpi.Recv(channel, incoming(rank - 1)));
    combine(false);
  }
  const int place = rank < 2 * pairs ? rank / 2 : rank - pairs;
  for (int distance = 1; distance < power; distance *= 2) {
    const int other = place ^ distance;
    const int partner = other < pairs ? 2 * other + 1 : other + pairs;
    PYCOLLECTIVE_RETURN_IF_FAILED(mpi.Sendrecv(channel, outgoing(partner), incoming(partner)));
    combine(other > place);
  }
  if (rank < 2 * pairs) PYCOLLECTIVE_RETURN_IF_FAILED(mpi.Send(channel, outgoing(rank - 1)));
  keep(own);
  return {};
}

// A reduce-scatter by recursive halving: in each round a rank sends a partner the blocks that the partner's half of the ranks needs, and adds
// what it gets to those of its own half. So a rank sends log2(ranks) messages, and each block is added up in the same order on each run.
// @param channel: its ranks are a power of two.
// @param tag: of messages on `channel.messages` that nobody else sends.
// @param blocks: a block for each rank; then the one of this rank is the sum.
// @param memory: as much memory as half of the blocks.
// @param count: the elements of a block.
// @param add: add(x, next, n) adds the n elements at `next` to those at x.
template <typename Add>
Outcome ScatterSumByHalving(const Library& mpi, const Channel& channel, int tag, void* blocks, void* memory, int64_t count, Type type,
                            Add add) {
  for (int half = channel.size / 2; half > 0; half /= 2) {
    const int partner = channel.rank ^ half;
    const auto of_half = [&](int rank) { return At(blocks, (rank & ~(half - 1)) * count, type); };
    void* const own = of_half(channel.rank);
    PYCOLLECTIVE_RETURN_IF_FAILED(
        mpi.Sendrecv(channel, {of_half(partner), half * count, type, partner, tag}, {memory, half * count, type, partner, tag}));
    add(own, memory, half * count);
  }
  return {};
}

}  // namespace pycollective

#endif  // PYCOLLECTIVE_NATIVE_MPI_DOUBLING_H_
