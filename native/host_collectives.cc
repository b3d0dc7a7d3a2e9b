// Implementation of host_collectives.h.

#include "host_collectives.h"

#include <algorithm>
#include <cstring>

#include "elements.h"
#include "reduction.h"

namespace pycollective {
namespace {

// Up to this size each rank reduces everything: the second step would cost more than it saves.
constexpr int64_t kSmallBytes = 8 << 10;

constexpr bool HasBlocks(Operation operation) {
  constexpr bool kAnswers[] = {
#define PYCOLLECTIVE_AS_ROW_SAYS(name, Name, attributes, operand, ...) operand == kBlocks,
#define PYCOLLECTIVE_NO(...) false,
      PYCOLLECTIVE_OPERATIONS(PYCOLLECTIVE_AS_ROW_SAYS, PYCOLLECTIVE_NO)
#undef PYCOLLECTIVE_NO
#undef PYCOLLECTIVE_AS_ROW_SAYS
  };
  return kAnswers[operation];
}

}  // namespace

Outcome HostCollective::HasBuffers(bool* has) {
  Outcome progress;
  exchange_.FindBuffers([&](int rank) {
    progress = mpi_.Progress(channel_, rank);
    return progress.ok();
  });
  *has = exchange_.HasBuffers();
  return progress;
}

Outcome HostCollective::WaitFor(int rank, uint64_t number) {
  const std::atomic<uint64_t>& counter = exchange_.counter(rank);
  if (counter.load(std::memory_order_acquire) >= number) return {};
  Outcome progress;
  WaitUntil(counter, number, [&] {
    progress = mpi_.Progress(channel_, rank);
    return progress.ok();
  });
  return progress;
}

Outcome HostCollective::WaitForAll(uint64_t number) {
  for (int rank = 0; rank < member_.size; ++rank) {
    if (rank != member_.rank) PYCOLLECTIVE_RETURN_IF_FAILED(WaitFor(rank, number));
  }
  return {};
}

Outcome HostCollective::Run(Operation operation, const Arguments& a) {
  const bool in_two_steps = operation == kAllreduce && static_cast<int64_t>(Bytes(a.count, a.type)) > kSmallBytes;
  return in_two_steps ? Allreduce(a) : InOneStep(operation, a);
}

Outcome HostCollective::Barrier() { return WaitForAll(exchange_.Post()); }

Outcome HostCollective::InOneStep(Operation operation, const Arguments& a) {
  const int64_t blocks = HasBlocks(operation) ? member_.size : 1;
  const int64_t at_once = std::max<int64_t>(1, Exchange::kBufferBytes / (blocks * kTypeBytes[int(a.type)]));
  for (int64_t first = 0; first < a.count; first += at_once) {
    const int64_t n = std::min(at_once, a.count - first);
    uint64_t free_at = 0;
    const uint64_t piece = exchange_.BeginPiece(&free_at);
    PYCOLLECTIVE_RETURN_IF_FAILED(WaitForAll(free_at));
    for (int64_t block = 0; block < blocks && Brings(operation, a, member_); ++block) {
      if (blocks > 1 && block == member_.rank) continue;  // for this rank itself
      std::memcpy(At(exchange_.BufferOf(member_.rank, piece), block * n, a.type), At(a.send, block * a.count + first, a.type),
                  Bytes(n, a.type));
    }
    const uint64_t filled = exchange_.Post();
    for (int rank = 0; rank < member_.size; ++rank) {
      if (rank != member_.rank && Reads(operation, a, member_, rank)) PYCOLLECTIVE_RETURN_IF_FAILED(WaitFor(rank, filled));
    }
    Combine(operation, a, member_, first, n, [&](int rank) {
      return rank == member_.rank ? Blocks{At(a.send, first, a.type), a.count} : Blocks{exchange_.BufferOf(rank, piece), n};
    });
    exchange_.Post();
    exchange_.EndPiece(piece);
  }
  return {};
}

Outcome HostCollective::Allreduce(const Arguments& a) {
  constexpr int64_t kLineBytes = 64;  // of the cache: shares begin at lines
  const int64_t at_once = Exchange::kBufferBytes / kTypeBytes[int(a.type)];
  const int64_t line = std::max<int64_t>(1, kLineBytes / kTypeBytes[int(a.type)]);
  for (int64_t first = 0; first < a.count; first += at_once) {
    const int64_t n = std::min(at_once, a.count - first);
    const int64_t share = ((n + member_.size - 1) / member_.size + line - 1) / line * line;
    const auto begin = [&](int rank) { return std::min(n, rank * share); };
    const auto of_share = [&](int rank) { return begin(rank + 1) - begin(rank); };
    uint64_t free_at = 0;
    const uint64_t piece = exchange_.BeginPiece(&free_at);
    PYCOLLECTIVE_RETURN_IF_FAILED(WaitForAll(free_at));
    const auto buffer = [&](int rank, int64_t element) { return At(exchange_.BufferOf(rank, piece), element, a.type); };
    const auto operand = [&](int64_t element) { return At(a.send, first + element, a.type); };
    const int64_t own = begin(member_.rank), own_end = begin(member_.rank + 1);
    std::memcpy(buffer(member_.rank, 0), operand(0), Bytes(own, a.type));
    std::memcpy(buffer(member_.rank, own_end), operand(own_end), Bytes(n - own_end, a.type));
    PYCOLLECTIVE_RETURN_IF_FAILED(WaitForAll(exchange_.Post()));
    // The place of the own share in the own buffer is free for the result.
    ReduceInOrder(
        member_.size, [&](int rank) -> const void* { return rank == member_.rank ? operand(own) : buffer(rank, own); },
        own_end - own, buffer(member_.rank, own), a.type, a.op);
    const uint64_t reduced = exchange_.Post();
    for (int step = 0; step < member_.size; ++step) {
      const int rank = (member_.rank + step) % member_.size;
      if (step > 0) PYCOLLECTIVE_RETURN_IF_FAILED(WaitFor(rank, reduced));
      std::memcpy(At(a.recv, first + begin(rank), a.type), buffer(rank, begin(rank)), Bytes(of_share(rank), a.type));
    }
    exchange_.Post();
    exchange_.EndPiece(piece);
  }
  return {};
}

}  // namespace pycollective
