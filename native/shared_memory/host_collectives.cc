// Implementation of host_collectives.h.

#include "shared_memory/host_collectives.h"

#include <errno.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "mpi/elements.h"
#include "mpi/reduction.h"
#include "shared_memory/process_memory.h"
#include "shared_memory/shared_arrays.h"

namespace pycollective {
namespace {

// Up to this size each rank reduces everything: the second step would cost more than it saves. And what others read stays in
// the caches: see WriteForOthers.
constexpr int64_t kSmallBytes = 8 << 10;

// The smallest block that ranks read straight from each other's arrays, and the smallest array of an allreduce, in
// which they do so twice.
constexpr int64_t kReadBytes = 8 << 10;
// The smallest block of a part: the ranks without a part wait until theirs are read.
constexpr int64_t kReadPartBytes = 32 << 10;
constexpr int64_t kReadAllreduceBytes = 1 << 20;

// What the rank of a lane may read to reduce its share alone. Of more, all ranks of the host reduce a part, and the ranks of the lanes
// gather these.
constexpr int64_t kAloneBytes = 64 << 10;

// The algorithms of an allreduce, as Exchange::NextAlgorithm() counts them. The first is tried first.
constexpr int kReading = 0, kBuffering = 1;

// What a rank reads at once of the arrays that it reduces: what stays in the cache of its core, since each time the kernel must look
// up the pages of the other process.
int64_t ScratchBytes() { return std::max<int64_t>(256 << 10, CacheBytesOfCore()); }

// The bytes of the arrays of all ranks. What the caches cannot hold, it pays to write past them.
int64_t BytesOfAll(Operation operation, const Arguments& a, int ranks) {
  const Traits& traits = TraitsOf(operation);
  const int64_t blocks = (traits.operand == kBlocks ? ranks : 1) + (traits.result == kBlocks ? ranks : 1);
  return static_cast<int64_t>(Bytes(a.count, a.type)) * blocks * ranks;
}

void Copy(void* to, const void* from, size_t nbytes, bool past_caches) {
  if (past_caches) {
    CopyPastCaches(to, from, nbytes);
  } else {
    std::memcpy(to, from, nbytes);
  }
}

// Writes elements that another core reads next, past the caches: else that core must give up each line that it has read before,
// and where the cores share no cache, that takes many times as long. fill(first, n, to) makes some of the elements.
template <typename Fill>
void WriteForOthers(void* to, int64_t count, Type type, Fill fill) {
  constexpr int64_t kAtOnceBytes = 16 << 10;  // it stays in the first cache
  alignas(64) char made[kAtOnceBytes];
  const int64_t at_once = kAtOnceBytes / kTypeBytes[int(type)];
  for (int64_t first = 0; first < count; first += at_once) {
    const int64_t n = std::min(at_once, count - first);
    fill(first, n, made);
    CopyPastCaches(At(to, first, type), made, Bytes(n, type));
  }
}

// Whether the arrays of a call lie in memory that all ranks of the host have mapped: the same on all of them (shared_arrays.h).
bool AreShared(const Arguments& a) { return SharedArrays::Has(a.send) && SharedArrays::Has(a.recv); }

// The arrays that this rank shows. If it leaves a call before End, the others must not believe what they have read.
class ShownArrays {
 public:
  ShownArrays(Exchange& exchange, const void* send, const void* recv) : exchange_(exchange) {
    exchange.ShowArrays(send, recv);
  }
  ~ShownArrays() {
    if (!has_ended_) exchange_.GiveUp();
  }
  ShownArrays(const ShownArrays&) = delete;
  ShownArrays& operator=(const ShownArrays&) = delete;
  void End() { has_ended_ = true; }

 private:
  Exchange& exchange_;
  bool has_ended_ = false;
};

Outcome CannotRead(int rank, const std::string& why) {
  Outcome outcome{"process_vm_readv", 0, {}};
  outcome.detail = "expected to read the array of rank " + std::to_string(rank) + ", got " + why;
  outcome.remedy = "Set PYCOLLECTIVE_SHARED_MEMORY=buffers.";
  return outcome;
}

const auto& kNoInterHostStep = *new HostCollective::InterHostStep([](void*, int64_t) -> Outcome { return {}; });

// Cuts an array into pieces. A rank fills the next one before it waits for the others' parts of this one: so they wait
// less for it.
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

// Calls make(rank, element of the array, element of the rank's part, number of elements) for each block, in the same order on all ranks.
template <typename Make>
Outcome EachBlock(const Distribution& parts, Make make) {
  for (int rank = 0; rank < parts.ranks; ++rank) {
    PYCOLLECTIVE_RETURN_IF_FAILED(parts.ForEachRun(
        rank, 0, parts.count, [&](int64_t element, int64_t at, int64_t n) { return make(rank, element, at, n); }));
  }
  return {};
}

}  // namespace

HostCollective::Algorithm HostCollective::AlgorithmOf(Operation operation, const Arguments& a, int ranks) {
  const HostExchange exchange = TraitsOf(operation).host_exchange;
  if (exchange == kByMpi) return Algorithm::kByMpi;
  const int64_t least = operation == kAllreduce ? kReadAllreduceBytes : kReadBytes;
  // If no element is read twice, it does not matter whether the caches can hold the arrays.
  const bool pays = exchange == kReadableOnce || (exchange == kReadable && BytesOfAll(operation, a, ranks) <= Exchange::ReadBytes());
  const bool reads = AreShared(a) ? exchange != kBuffered : pays && Exchange::MayRead();
  return reads && static_cast<int64_t>(Bytes(a.count, a.type)) >= least ? Algorithm::kByReading : Algorithm::kThroughBuffers;
}

bool HostCollective::GoesWithComparison(Operation operation, const Arguments& a, int ranks) {
  const auto nbytes = static_cast<int64_t>(Bytes(a.count, a.type));
  const int64_t blocks = TraitsOf(operation).operand == kBlocks ? ranks : 1;
  return nbytes <= kSmallBytes && nbytes * blocks <= Exchange::kBufferBytes &&
         AlgorithmOf(operation, a, ranks) == Algorithm::kThroughBuffers;
}

Outcome HostCollective::FreeBuffer(uint64_t comparison, bool* has) {
  *has = exchange_.HasBuffers();
  return *has ? WaitForEach(exchange_.FreeAt(comparison)) : Outcome{};
}

HostCollective::Algorithm HostCollective::FasterAlgorithm(const Arguments& a) {
  is_autotuned_ = true;
  const int next = exchange_.NextAlgorithm(static_cast<int64_t>(Bytes(a.count, a.type)));
  return next == kReading ? Algorithm::kByReading : Algorithm::kThroughBuffers;
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
  Outcome progress;
  exchange_.WaitFor(rank, number, [&](int other) { return (progress = mpi_.Progress(channel_, other)).ok(); });
  return progress;
}

Outcome HostCollective::WaitForEach(uint64_t number) {
  Outcome progress;
  exchange_.WaitForEach(number, [&](int other) { return (progress = mpi_.Progress(channel_, other)).ok(); });
  return progress;
}

Outcome HostCollective::WaitForAll(uint64_t number) {
  Outcome progress;
  exchange_.WaitForAll(number, [&](int other) { return (progress = mpi_.Progress(channel_, other)).ok(); });
  return progress;
}

Outcome HostCollective::WaitForAllIf(bool needs_all, uint64_t number) {
  return needs_all || exchange_.WaitsInTree() ? WaitForAll(number) : Outcome{};
}

Outcome HostCollective::ThroughBuffers(Operation operation, const Arguments& a) {
  if (a.count == 0) return {};
  const bool in_two_steps = operation == kAllreduce && static_cast<int64_t>(Bytes(a.count, a.type)) > kSmallBytes;
  return in_two_steps ? AllreduceThroughBuffers(a, nullptr) : InOneStep(operation, a);
}

bool HostCollective::TakesScattered(const Arguments& a) { return static_cast<int64_t>(Bytes(a.count, a.type)) > kSmallBytes; }

Outcome HostCollective::Barrier() { return WaitForAll(exchange_.Post()); }

template <typename Fill, typename Take>
Outcome HostCollective::InOneStep(int64_t count, int64_t at_once, Fill fill, Take take) {
  const auto begin = [&](int64_t first, Piece* piece) -> Outcome {
    const uint64_t number = exchange_.BeginPiece();
    *piece = {number, first, std::min(at_once, count - first), 0};
    PYCOLLECTIVE_RETURN_IF_FAILED(WaitForEach(exchange_.FreeAt(number)));
    PYCOLLECTIVE_RETURN_IF_FAILED(fill(*piece));
    piece->filled = exchange_.Post();
    return {};
  };
  const auto end = [&](const Piece& piece) -> Outcome {
    PYCOLLECTIVE_RETURN_IF_FAILED(take(piece));
    exchange_.Post();
    exchange_.EndPiece(piece.number);
    return {};
  };
  return InPieces<Piece>(count, at_once, begin, [](Piece*) { return Outcome{}; }, end);
}

Outcome HostCollective::InOneStep(Operation operation, const Arguments& a) {
  const int64_t blocks = TraitsOf(operation).operand == kBlocks ? member_.size : 1;
  const bool past_caches = BytesOfAll(operation, a, member_.size) > CacheBytesOfHost();
  const int64_t at_once = std::max<int64_t>(1, Exchange::kBufferBytes / (blocks * kTypeBytes[int(a.type)]));
  const int own = member_.rank;
  const auto fill = [&](const Piece& piece) -> Outcome {
    for (int64_t block = 0; block < blocks && IsRead(operation, a, member_); ++block) {
      if (blocks > 1 && block == own) continue;  // for this rank itself
      const size_t nbytes = Bytes(piece.count, a.type);
      Copy(At(exchange_.BufferOf(own, piece.number), block * piece.count, a.type), At(a.send, block * a.count + piece.first, a.type),
           nbytes, static_cast<int64_t>(nbytes) > kSmallBytes);
    }
    return {};
  };
  const auto take = [&](const Piece& piece) -> Outcome {
    for (int rank = 0; rank < member_.size; ++rank) {
      if (rank != own && Reads(operation, a, member_, rank)) PYCOLLECTIVE_RETURN_IF_FAILED(WaitFor(rank, piece.filled));
    }
    const auto blocks_of = [&](int rank) {
      return rank == own ? Blocks{At(a.send, piece.first, a.type), a.count}
                         : Blocks{exchange_.BufferOf(rank, piece.number), piece.count};
    };
    const auto copy = [&](int, void* to, const void* from, size_t nbytes) -> Outcome {
      if (to != from) Copy(to, from, nbytes, past_caches);
      return {};
    };
    return Combine(operation, a, member_, piece.first, piece.count, blocks_of, copy);
  };
  return InOneStep(a.count, at_once, fill, take);
}

Outcome HostCollective::AllreduceThroughBuffers(const Arguments& a, const ScatteredArray* scattered) {
  const int64_t at_once = Exchange::kBufferBytes / kTypeBytes[int(a.type)];
  const bool past_caches = BytesOfAll(kAllreduce, a, member_.size) > CacheBytesOfHost();
  struct Piece {
    uint64_t number;
    int64_t first;
    Shares shares;
    uint64_t filled, reduced;
  };
  const auto buffer = [&](int rank, const Piece& piece, int64_t element) {
    return At(exchange_.BufferOf(rank, piece.number), element, a.type);
  };
  const auto operand = [&](const Piece& piece, int64_t element) { return At(a.send, piece.first + element, a.type); };
  const int own = member_.rank;
  const auto nbytes = static_cast<int64_t>(Bytes(a.count, a.type));
  int64_t begin_ns = 0;  // without the wait for ranks that come late

  // Copies what the others reduce.
  const auto fill = [&](int64_t first, Piece* piece) -> Outcome {
    const uint64_t number = exchange_.BeginPiece();
    const int64_t count = std::min(at_once, a.count - first);
    *piece = {number, first, Shares(count, member_.size, a.type), 0, 0};
    PYCOLLECTIVE_RETURN_IF_FAILED(WaitForEach(exchange_.FreeAt(number)));
    const int64_t filling_ns = NowNs();
    const auto copy = [&](int64_t from, int64_t n) {
      void* const to = buffer(own, *piece, from);
      if (scattered == nullptr) {
        CopyPastCaches(to, operand(*piece, from), Bytes(n, a.type));
      } else {
        WriteForOthers(to, n, a.type, [&](int64_t at, int64_t some, void* made) { scattered->bring(first + from + at, some, made); });
      }
    };
    const int64_t begin = piece->shares.Begin(own), end = piece->shares.Begin(own + 1);
    copy(0, begin);
    copy(end, count - end);
    piece->filled = exchange_.Post();
    if (first == 0) begin_ns = filling_ns - NowNs();
    return {};
  };
  // Reduces the own share. Its place in the own buffer is free for the result.
  const auto reduce = [&](Piece* piece) -> Outcome {
    PYCOLLECTIVE_RETURN_IF_FAILED(WaitForAll(piece->filled));
    if (piece->first == 0) {
      begin_ns += NowNs();
      if (is_autotuned_) exchange_.PublishNextAlgorithm(nbytes);
    }
    const int64_t begin = piece->shares.Begin(own);
    WriteForOthers(buffer(own, *piece, begin), piece->shares.CountOf(own), a.type, [&](int64_t at, int64_t n, void* to) {
      if (scattered != nullptr) scattered->bring(piece->first + begin + at, n, to);  // `to` may be an operand's memory
      const auto operand_of = [&](int rank) -> const void* {
        if (rank != own) return buffer(rank, *piece, begin + at);
        return scattered == nullptr ? operand(*piece, begin + at) : to;
      };
      ReduceInOrder(member_.size, operand_of, n, to, a.type, a.op);
    });
    piece->reduced = exchange_.Post();
    return {};
  };
  // Copies all shares.
  const auto take = [&](const Piece& piece) -> Outcome {
    for (int step = 0; step < member_.size; ++step) {
      const int rank = (own + step) % member_.size;
      if (step > 0) PYCOLLECTIVE_RETURN_IF_FAILED(WaitFor(rank, piece.reduced));
      const int64_t begin = piece.shares.Begin(rank);
      const int64_t first = piece.first + begin, count = piece.shares.CountOf(rank);
      if (scattered != nullptr) {
        scattered->take(first, count, buffer(rank, piece, begin));
      } else {
        Copy(At(a.recv, first, a.type), buffer(rank, piece, begin), Bytes(count, a.type), past_caches);
      }
    }
    exchange_.Post();
    exchange_.EndPiece(piece.number);
    return {};
  };

  PYCOLLECTIVE_RETURN_IF_FAILED(InPieces<Piece>(a.count, at_once, fill, reduce, take));
  if (is_autotuned_) exchange_.Learn(kBuffering, nbytes, NowNs() - begin_ns);
  return {};
}

Outcome HostCollective::ByReading(Operation operation, const Arguments& a) {
  if (a.count == 0) return {};
  if (operation == kAllreduce) return AllreduceByReading(a, member_.size, kNoInterHostStep);
  ShownArrays own(exchange_, a.send, a.recv);
  const uint64_t shown = exchange_.Post();
  for (int rank = 0; rank < member_.size; ++rank) {
    if (rank != member_.rank && Reads(operation, a, member_, rank)) PYCOLLECTIVE_RETURN_IF_FAILED(WaitFor(rank, shown));
  }
  const Outcome outcome = operation == kReduceScatter ? ReadAndReduce(a, member_.rank * a.count, a.count, a.recv)
                                                      : ReadBlocks(operation, a);
  // After an error, too: the others wait for this step.
  const uint64_t read = exchange_.Post();
  for (int rank = 0; rank < member_.size; ++rank) {
    const bool is_read = rank != member_.rank && IsReadBy(operation, a, member_, rank);
    if (is_read) PYCOLLECTIVE_RETURN_IF_FAILED(WaitFor(rank, read));
  }
  own.End();
  return outcome;
}

Outcome HostCollective::ReadBlocks(Operation operation, const Arguments& a) {
  const auto blocks_of = [&](int rank) {
    return Blocks{rank == member_.rank ? a.send : exchange_.ArraysOf(rank).send, a.count};
  };
  return Combine(operation, a, member_, 0, a.count, blocks_of,
                 [&](int rank, void* to, const void* from, size_t nbytes) { return Read(rank, to, from, nbytes); });
}

Outcome HostCollective::ReadAndReduce(const Arguments& a, int64_t first, int64_t count, void* to) {
  const int64_t others = member_.size - 1;
  const int64_t at_once = std::max<int64_t>(1, ScratchBytes() / (others * kTypeBytes[int(a.type)]));
  thread_local std::vector<char> scratch;
  scratch.resize(Bytes(others * at_once, a.type));
  const auto scratch_of = [&](int rank) {
    return At(static_cast<void*>(scratch.data()), (rank < member_.rank ? rank : rank - 1) * at_once, a.type);
  };
  const auto mapped_of = [&](int rank) { return exchange_.Mapped(rank, exchange_.ArraysOf(rank).send); };
  for (int64_t done = 0; done < count; done += at_once) {
    const int64_t n = std::min(at_once, count - done);
    for (int rank = 0; rank < member_.size; ++rank) {
      if (rank == member_.rank || mapped_of(rank) != nullptr) continue;
      const void* const from = At(exchange_.ArraysOf(rank).send, first + done, a.type);
      PYCOLLECTIVE_RETURN_IF_FAILED(Read(rank, scratch_of(rank), from, Bytes(n, a.type)));
    }
    ReduceInOrder(
        member_.size,
        [&](int rank) -> const void* {
          const void* const whole = rank == member_.rank ? a.send : mapped_of(rank);
          return whole != nullptr ? At(whole, first + done, a.type) : scratch_of(rank);
        },
        n, At(to, done, a.type), a.type, a.op);
  }
  for (int rank = 0; rank < member_.size; ++rank) {  // Read has not asked those whose arrays are mapped
    if (rank != member_.rank && exchange_.HasGivenUp(rank)) return WaitFor(rank, UINT64_MAX);
  }
  return {};
}

Outcome HostCollective::AllreduceByReading(const Arguments& a, int num_shares, const InterHostStep& inter_host_step) {
  const Shares shares(a.count, num_shares, a.type);
  const int own = member_.rank;
  ShownArrays arrays(exchange_, a.send, a.recv);
  PYCOLLECTIVE_RETURN_IF_FAILED(WaitForAll(exchange_.Post()));
  const auto nbytes = static_cast<int64_t>(Bytes(a.count, a.type));
  const int64_t begin_ns = NowNs();
  if (is_autotuned_) exchange_.PublishNextAlgorithm(nbytes);
  void* const share = At(a.recv, shares.Begin(own), a.type);
  Outcome outcome;
  if (shares.CountOf(own) > 0) {
    outcome = ReadAndReduce(a, shares.Begin(own), shares.CountOf(own), share);
    if (outcome.ok()) {
      PYCOLLECTIVE_RETURN_IF_FAILED(inter_host_step(share, shares.CountOf(own)));
    } else {
      exchange_.HideResult();
    }
  }
  const uint64_t reduced = exchange_.Post();
  for (int step = 1; step < member_.size; ++step) {
    const int rank = (own + step) % member_.size;
    PYCOLLECTIVE_RETURN_IF_FAILED(WaitFor(rank, reduced));
    const int64_t begin = shares.Begin(rank);
    const void* const result = exchange_.ArraysOf(rank).recv;
    const Outcome read = result == nullptr ? CannotRead(rank, "an error there")
                                           : Read(rank, At(a.recv, begin, a.type), At(result, begin, a.type),
                                                  Bytes(shares.CountOf(rank), a.type));
    if (outcome.ok()) outcome = read;
  }
  PYCOLLECTIVE_RETURN_IF_FAILED(WaitForAll(exchange_.Post()));
  arrays.End();
  if (is_autotuned_ && outcome.ok()) exchange_.Learn(kReading, nbytes, NowNs() - begin_ns);
  return outcome;
}

// Distributed arrays ---------------------------------------------------------------------------------------------

Outcome HostCollective::AlgorithmOf(const Distribution& parts, Type type, Algorithm* algorithm) {
  const auto nbytes = static_cast<int64_t>(Bytes(parts.count, type));
  const bool pays = static_cast<int64_t>(Bytes(std::min(parts.block, parts.CountOf(0)), type)) >= kReadPartBytes &&
                    nbytes * (member_.size + 1) <= Exchange::ReadBytes();
  *algorithm = Algorithm::kByReading;
  if (pays && Exchange::MayRead()) return {};
  bool has_buffers = false;
  PYCOLLECTIVE_RETURN_IF_FAILED(HasBuffers(&has_buffers));
  if (has_buffers) *algorithm = Algorithm::kThroughBuffers;
  if (!has_buffers && !Exchange::MayRead()) *algorithm = Algorithm::kByMpi;
  return {};
}

Outcome HostCollective::ReduceScatter(const Arguments& a, const Distribution& parts) {
  Algorithm algorithm;
  PYCOLLECTIVE_RETURN_IF_FAILED(AlgorithmOf(parts, a.type, &algorithm));
  return ReduceScatter(a, parts, algorithm);
}

Outcome HostCollective::ReduceScatter(const Arguments& a, const Distribution& parts, Algorithm algorithm) {
  if (algorithm == Algorithm::kThroughBuffers) return ReduceScatterThroughBuffers(a, parts);
  if (algorithm == Algorithm::kByReading) return ReduceScatterByReading(a, parts);
  const std::unique_ptr<char[]> unused(new char[Bytes(parts.block, a.type)]);
  return EachBlock(parts, [&](int root, int64_t first, int64_t of_part, int64_t n) {
    void* const to = root == member_.rank ? At(a.recv, of_part, a.type) : unused.get();
    Arguments block = a.On(At(a.send, first, a.type), to, n);
    block.root = root;
    if (block.op == Op::kSumBfloat16) block.op = Op::kSum;  // it is one of float32 within a host
    return mpi_.Reduce(channel_, block);
  });
}

Outcome HostCollective::Allgather(const Arguments& a, const Distribution& parts, Range range) {
  Algorithm algorithm;
  PYCOLLECTIVE_RETURN_IF_FAILED(AlgorithmOf(parts, a.type, &algorithm));
  return Allgather(a, parts, range, algorithm);
}

Outcome HostCollective::Allgather(const Arguments& a, const Distribution& parts, Range range, Algorithm algorithm) {
  if (algorithm == Algorithm::kThroughBuffers) return AllgatherThroughBuffers(a, parts, range);
  if (algorithm == Algorithm::kByReading) return AllgatherByReading(a, parts, range);
  return EachBlock(parts, [&](int root, int64_t first, int64_t of_part, int64_t n) -> Outcome {
    void* const to = At(a.recv, first, a.type);
    if (root == member_.rank) PYCOLLECTIVE_RETURN_IF_FAILED(Read(root, to, At(a.send, of_part, a.type), Bytes(n, a.type)));
    Arguments block = a.On(to, to, n);  // on the root as well: all ranks choose the algorithm of the broadcast by where these lie
    block.root = root;
    return mpi_.Bcast(channel_, block);
  });
}

Outcome HostCollective::ReduceScatterThroughBuffers(const Arguments& a, const Distribution& parts) {
  const int64_t at_once = std::max<int64_t>(1, Exchange::kBufferBytes / (parts.ranks * kTypeBytes[int(a.type)]));
  const int own = member_.rank;
  const auto fill = [&](const Piece& piece) -> Outcome {
    const bool past_caches = static_cast<int64_t>(Bytes(piece.count * parts.ranks, a.type)) > kSmallBytes;
    for (int rank = 0; rank < parts.ranks; ++rank) {
      if (rank == own) continue;
      void* const of_rank = At(exchange_.BufferOf(own, piece.number), rank * piece.count, a.type);
      PYCOLLECTIVE_RETURN_IF_FAILED(parts.ForEachRun(rank, piece.first, piece.count, [&](int64_t element, int64_t at, int64_t n) -> Outcome {
        Copy(At(of_rank, at - piece.first, a.type), At(a.send, element, a.type), Bytes(n, a.type), past_caches);
        return {};
      }));
    }
    return {};
  };
  const auto take = [&](const Piece& piece) -> Outcome {
    PYCOLLECTIVE_RETURN_IF_FAILED(WaitForAllIf(piece.first < parts.CountOf(own), piece.filled));
    return parts.ForEachRun(own, piece.first, piece.count, [&](int64_t element, int64_t at, int64_t n) -> Outcome {
      const auto operand_of = [&](int rank) -> const void* {
        if (rank == own) return At(a.send, element, a.type);
        return At(exchange_.BufferOf(rank, piece.number), own * piece.count + at - piece.first, a.type);
      };
      ReduceInOrder(member_.size, operand_of, n, At(a.recv, at, a.type), a.type, a.op);
      return {};
    });
  };
  return InOneStep(parts.CountOf(0), at_once, fill, take);
}

Outcome HostCollective::AllgatherThroughBuffers(const Arguments& a, const Distribution& parts, Range range) {
  const int64_t at_once = Exchange::kBufferBytes / kTypeBytes[int(a.type)];
  const bool past_caches = static_cast<int64_t>(Bytes(parts.count, a.type)) * (member_.size + 1) > CacheBytesOfHost();
  const int own = member_.rank;
  const auto fill = [&](const Piece& piece) -> Outcome {
    const size_t nbytes = Bytes(std::clamp<int64_t>(parts.CountOf(own) - piece.first, 0, piece.count), a.type);
    Copy(exchange_.BufferOf(own, piece.number), At(a.send, piece.first, a.type), nbytes, static_cast<int64_t>(nbytes) > kSmallBytes);
    return {};
  };
  const auto take = [&](const Piece& piece) -> Outcome {
    for (int step = 0; step < member_.size; ++step) {
      const int rank = (own + step) % member_.size;
      const void* const part = rank == own ? At(a.send, piece.first, a.type) : exchange_.BufferOf(rank, piece.number);
      PYCOLLECTIVE_RETURN_IF_FAILED(parts.ForEachRun(rank, piece.first, piece.count, [&](int64_t element, int64_t at, int64_t n) -> Outcome {
        const int64_t first = range.First(element), wanted = range.CountOf(element, n);
        if (wanted == 0) return {};
        if (rank != own) PYCOLLECTIVE_RETURN_IF_FAILED(WaitFor(rank, piece.filled));
        void* const to = At(a.recv, first, a.type);
        const void* const from = At(part, at + first - element - piece.first, a.type);
        if (to != from) Copy(to, from, Bytes(wanted, a.type), past_caches);
        return {};
      }));
    }
    return {};
  };
  return InOneStep(parts.CountOf(0), at_once, fill, take);
}

Outcome HostCollective::ReduceScatterByReading(const Arguments& a, const Distribution& parts) {
  ShownArrays own(exchange_, a.send, a.recv);
  const uint64_t shown = exchange_.Post();
  const bool has_part = parts.CountOf(member_.rank) > 0;
  Outcome outcome;
  PYCOLLECTIVE_RETURN_IF_FAILED(WaitForAllIf(has_part, shown));
  if (has_part) {
    outcome = parts.ForEachRun(member_.rank, 0, parts.count, [&](int64_t element, int64_t at, int64_t n) {
      return ReadAndReduce(a, element, n, At(a.recv, at, a.type));
    });
  }
  const uint64_t read = exchange_.Post();  // after an error, too: the others wait for this step
  for (int rank = 0; rank < parts.ranks; ++rank) {
    if (rank != member_.rank) PYCOLLECTIVE_RETURN_IF_FAILED(WaitFor(rank, read));
  }
  own.End();
  return outcome;
}

Outcome HostCollective::AllgatherByReading(const Arguments& a, const Distribution& parts, Range range) {
  ShownArrays own(exchange_, a.send, a.recv);
  const uint64_t shown = exchange_.Post();
  Outcome outcome;
  for (int step = 0; step < member_.size; ++step) {
    const int rank = (member_.rank + step) % member_.size;
    if (parts.CountOf(rank) == 0) continue;
    if (step > 0) PYCOLLECTIVE_RETURN_IF_FAILED(WaitFor(rank, shown));
    const void* const part = step == 0 ? a.send : exchange_.ArraysOf(rank).send;
    const Outcome read = parts.ForEachRun(rank, 0, parts.count, [&](int64_t element, int64_t at, int64_t n) -> Outcome {
      const int64_t first = range.First(element), wanted = range.CountOf(element, n);
      if (wanted == 0) return {};
      return Read(rank, At(a.recv, first, a.type), At(part, at + first - element, a.type), Bytes(wanted, a.type));
    });
    if (outcome.ok()) outcome = read;
  }
  const uint64_t read = exchange_.Post();  // after an error, too: the others wait for this step
  PYCOLLECTIVE_RETURN_IF_FAILED(WaitForAllIf(parts.CountOf(member_.rank) > 0, read));
  own.End();
  return outcome;
}

Outcome HostCollective::Allreduce(const Arguments& a, int lanes, const InterHostStep& inter_host_step) {
  if (a.count == 0) return {};
  const auto nbytes = static_cast<int64_t>(Bytes(a.count, a.type));
  bool has_buffers = false;
  const bool may_read = Exchange::MayRead() || AreShared(a);
  if (!may_read || nbytes < kReadAllreduceBytes) PYCOLLECTIVE_RETURN_IF_FAILED(HasBuffers(&has_buffers));
  if (may_read && !has_buffers) return AllreduceByReading(a, lanes, inter_host_step);
  const Algorithm algorithm = has_buffers ? Algorithm::kThroughBuffers : Algorithm::kByMpi;
  // The shares are those of AllreduceByReading: on another host the ranks may read.
  const auto parts_of = [&](int ranks) { return Distribution::Of(Shares(a.count, ranks, a.type), ranks); };
  const auto own_part = [&](const Distribution& parts) {
    return At(a.recv, std::min(a.count, member_.rank * parts.block), a.type);
  };
  const Distribution of_lanes = parts_of(lanes);
  void* const share = own_part(of_lanes);
  const int64_t count = of_lanes.CountOf(member_.rank);
  const bool all_reduce = has_buffers && lanes < member_.size && nbytes / lanes * member_.size > kAloneBytes;
  const Distribution of_reducers = all_reduce ? parts_of(member_.size) : of_lanes;
  PYCOLLECTIVE_RETURN_IF_FAILED(ReduceScatter(a.On(a.send, own_part(of_reducers), a.count), of_reducers, algorithm));
  if (all_reduce) {
    const int64_t begin = std::min(a.count, member_.rank * of_lanes.block);
    PYCOLLECTIVE_RETURN_IF_FAILED(AllgatherThroughBuffers(a.On(own_part(of_reducers), a.recv, a.count), of_reducers, {begin, begin + count}));
  }
  if (count > 0) PYCOLLECTIVE_RETURN_IF_FAILED(inter_host_step(share, count));
  return Allgather(a.On(share, a.recv, a.count), of_lanes, {0, a.count}, algorithm);
}

Outcome HostCollective::Read(int rank, void* to, const void* from, size_t nbytes) {
  if (rank == member_.rank) {
    if (to != from) Copy(to, from, nbytes, static_cast<int64_t>(nbytes) * 2 >= CacheBytesOfCore());
    return {};
  }
  const void* const mapped = exchange_.Mapped(rank, from);
  if (mapped != nullptr) Copy(to, mapped, nbytes, static_cast<int64_t>(nbytes) * 2 >= CacheBytesOfCore());
  const int error = mapped != nullptr ? 0 : CopyFromProcess(exchange_.ArraysOf(rank).process, to, from, nbytes);
  // Its process is gone, or has left the call. This wait ends when MPI or the monitor says so, as each wait for it does.
  if (error == ESRCH || exchange_.HasGivenUp(rank)) return WaitFor(rank, UINT64_MAX);
  return error == 0 ? Outcome{} : CannotRead(rank, std::strerror(error));
}

}  // namespace pycollective
