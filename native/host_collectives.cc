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

// The largest block of a collective without a reduction (docs/performance.md).
constexpr int64_t kMovedBytes = 32 << 10;

constexpr bool Reduces(Operation operation) {
  constexpr bool kAnswers[] = {
#define PYCOLLECTIVE_AS_ROW_SAYS(name, Name, attributes, ...) ((attributes) & kOp) != 0,
#define PYCOLLECTIVE_IS_ALLREDUCE(name, Name, ...) k##Name == kAllreduce,
      PYCOLLECTIVE_OPERATIONS(PYCOLLECTIVE_AS_ROW_SAYS, PYCOLLECTIVE_IS_ALLREDUCE)
#undef PYCOLLECTIVE_IS_ALLREDUCE
#undef PYCOLLECTIVE_AS_ROW_SAYS
  };
  return kAnswers[operation];
}

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

// Cuts an array into pieces. A rank fills the next one before it waits for the others' parts of this one: so they wait less for it.
template <typename Piece, typename Fill, typename Reduce, typename Take>
Outcome InPieces(int64_t count, int64_t at_once, Fill fill, Reduce reduce, Take take) {
  Piece piece{}, next{};
  PYCOLLECTIVE_RETURN_IF_FAILED(fill(0, &piece));
  for (int64_t first = 0; first < count; first += at_once) {
    PYCOLLECTIVE_RETURN_IF_FAILED(reduce(&piece));
    if (first + at_once < count) PYCOLLECTIVE_RETURN_IF_FAILED(fill(first + at_once, &next));
    PYCOLLECTIVE_RETURN_IF_FAILED(take(piece));
    piece = next;
  }
  return {};
}

}  // namespace

bool HostCollective::IsFaster(Operation operation, const Arguments& a) {
  return CanCombine(operation) && (Reduces(operation) || static_cast<int64_t>(Bytes(a.count, a.type)) <= kMovedBytes);
}

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
  if (a.count == 0) return {};
  const bool in_two_steps = operation == kAllreduce && static_cast<int64_t>(Bytes(a.count, a.type)) > kSmallBytes;
  return in_two_steps ? Allreduce(a) : InOneStep(operation, a);
}

Outcome HostCollective::Barrier() { return WaitForAll(exchange_.Post()); }

Outcome HostCollective::InOneStep(Operation operation, const Arguments& a) {
  const int64_t blocks = HasBlocks(operation) ? member_.size : 1;
  const int64_t at_once = std::max<int64_t>(1, Exchange::kBufferBytes / (blocks * kTypeBytes[int(a.type)]));
  struct Piece {
    uint64_t number;
    int64_t first, count;
    uint64_t filled;
  };
  const int own = member_.rank;
  const auto fill = [&](int64_t first, Piece* piece) -> Outcome {
    uint64_t free_at = 0;
    const uint64_t number = exchange_.BeginPiece(&free_at);
    *piece = {number, first, std::min(at_once, a.count - first), 0};
    PYCOLLECTIVE_RETURN_IF_FAILED(WaitForAll(free_at));
    for (int64_t block = 0; block < blocks && Brings(operation, a, member_); ++block) {
      if (blocks > 1 && block == own) continue;  // for this rank itself
      std::memcpy(At(exchange_.BufferOf(own, number), block * piece->count, a.type),
                  At(a.send, block * a.count + first, a.type), Bytes(piece->count, a.type));
    }
    piece->filled = exchange_.Post();
    return {};
  };
  const auto take = [&](const Piece& piece) -> Outcome {
    for (int rank = 0; rank < member_.size; ++rank) {
      if (rank != own && Reads(operation, a, member_, rank)) PYCOLLECTIVE_RETURN_IF_FAILED(WaitFor(rank, piece.filled));
    }
    Combine(operation, a, member_, piece.first, piece.count, [&](int rank) {
      return rank == own ? Blocks{At(a.send, piece.first, a.type), a.count}
                         : Blocks{exchange_.BufferOf(rank, piece.number), piece.count};
    });
    exchange_.Post();
    exchange_.EndPiece(piece.number);
    return {};
  };
  return InPieces<Piece>(a.count, at_once, fill, [](Piece*) { return Outcome{}; }, take);
}

Outcome HostCollective::Allreduce(const Arguments& a) {
  constexpr int64_t kLineBytes = 64;  // of the cache: shares begin at lines
  const int64_t at_once = Exchange::kBufferBytes / kTypeBytes[int(a.type)];
  const int64_t line = std::max<int64_t>(1, kLineBytes / kTypeBytes[int(a.type)]);
  // A piece: its elements are cut into a share for each rank.
  struct Piece {
    uint64_t number;
    int64_t first, count, share;
    uint64_t filled, reduced;
    int64_t Begin(int64_t rank) const { return std::min(count, rank * share); }
    int64_t CountOf(int64_t rank) const { return Begin(rank + 1) - Begin(rank); }
  };
  const auto buffer = [&](int rank, const Piece& piece, int64_t element) {
    return At(exchange_.BufferOf(rank, piece.number), element, a.type);
  };
  const auto operand = [&](const Piece& piece, int64_t element) { return At(a.send, piece.first + element, a.type); };
  const int own = member_.rank;

  // Copies what the others reduce.
  const auto fill = [&](int64_t first, Piece* piece) -> Outcome {
    uint64_t free_at = 0;
    const uint64_t number = exchange_.BeginPiece(&free_at);
    const int64_t count = std::min(at_once, a.count - first);
    const int64_t share = ((count + member_.size - 1) / member_.size + line - 1) / line * line;
    *piece = {number, first, count, share, 0, 0};
    PYCOLLECTIVE_RETURN_IF_FAILED(WaitForAll(free_at));
    const int64_t begin = piece->Begin(own), end = piece->Begin(own + 1);
    std::memcpy(buffer(own, *piece, 0), operand(*piece, 0), Bytes(begin, a.type));
    std::memcpy(buffer(own, *piece, end), operand(*piece, end), Bytes(count - end, a.type));
    piece->filled = exchange_.Post();
    return {};
  };
  // Reduces the own share. Its place in the own buffer is free for the result.
  const auto reduce = [&](Piece* piece) -> Outcome {
    PYCOLLECTIVE_RETURN_IF_FAILED(WaitForAll(piece->filled));
    const int64_t begin = piece->Begin(own);
    ReduceInOrder(
        member_.size,
        [&](int rank) -> const void* { return rank == own ? operand(*piece, begin) : buffer(rank, *piece, begin); },
        piece->CountOf(own), buffer(own, *piece, begin), a.type, a.op);
    piece->reduced = exchange_.Post();
    return {};
  };
  // Copies all shares.
  const auto take = [&](const Piece& piece) -> Outcome {
    for (int step = 0; step < member_.size; ++step) {
      const int rank = (own + step) % member_.size;
      if (step > 0) PYCOLLECTIVE_RETURN_IF_FAILED(WaitFor(rank, piece.reduced));
      const int64_t begin = piece.Begin(rank);
      std::memcpy(At(a.recv, piece.first + begin, a.type), buffer(rank, piece, begin), Bytes(piece.CountOf(rank), a.type));
    }
    exchange_.Post();
    exchange_.EndPiece(piece.number);
    return {};
  };

  return InPieces<Piece>(a.count, at_once, fill, reduce, take);
}

}  // namespace pycollective
