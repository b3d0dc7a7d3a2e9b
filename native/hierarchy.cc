// Implementation of hierarchy.h. An error on one lane is returned after the last meeting: members never leave each
// other waiting.

#include "hierarchy.h"

#include <algorithm>
#include <complex>
#include <cstring>
#include <memory>

#include "reduction.h"

namespace pycollective {

bool all_lanes = false;

namespace {

// Up to this size of one member's array one member does all the work: two more meetings would cost more than the
// others' help saves (docs/performance.md).
constexpr int64_t kSmallBytes = 256 << 10;

// Of a large array on one lane: while one piece is between ranks the next is combined and the last copied.
constexpr int64_t kAtOnceBytes = 2 << 20;

// Equal parts of an array, the last ones perhaps shorter.
struct Slices {
  int64_t count;
  int64_t parts;
  int64_t First(int64_t part) const { return std::min(count, (count + parts - 1) / parts * part); }
};

size_t Bytes(int64_t count, Type type) { return static_cast<size_t>(count * kTypeBytes[int(type)]); }
bool IsSmall(int64_t count, Type type) { return count * kTypeBytes[int(type)] <= kSmallBytes; }

void* At(void* base, int64_t index, Type type) { return static_cast<char*>(base) + Bytes(index, type); }
const void* At(const void* base, int64_t index, Type type) {
  return static_cast<const char*>(base) + Bytes(index, type);
}

void Copy(void* to, const void* from, int64_t count, Type type) {
  if (count > 0 && to != from) std::memcpy(to, from, Bytes(count, type));
}

std::unique_ptr<char[]> Scratch(int64_t count, Type type) {
  return std::unique_ptr<char[]>(new char[std::max<size_t>(Bytes(count, type), 1)]);
}

template <typename T>
struct IsComplex : std::false_type {};
template <typename T>
struct IsComplex<std::complex<T>> : std::true_type {};

template <Op kOp, typename T>
void CombineTyped(const Team& team, int64_t first, int64_t count, T* y) {
  constexpr int64_t kBlock = 512;
  T sum[kBlock];  // y may be the memory of one of the operands
  for (int64_t start = 0; start < count; start += kBlock) {
    const int64_t n = std::min(kBlock, count - start);
    for (int member = 0; member < team.size(); ++member) {
      const T* x = static_cast<const T*>(team.PostOf(member).in) + first + start;
      if (member == 0) {
        std::copy(x, x + n, sum);
      } else {
        for (int64_t i = 0; i < n; ++i) sum[i] = Apply<kOp>(sum[i], x[i]);
      }
    }
    std::copy(sum, sum + n, y + start);
  }
}

template <typename T>
void CombineOp(const Team& team, int64_t first, int64_t count, void* y, Op op) {
  T* out = static_cast<T*>(y);
  switch (op) {
    case Op::kSum:
    case Op::kSumBfloat16: return CombineTyped<Op::kSum>(team, first, count, out);
    case Op::kProd: return CombineTyped<Op::kProd>(team, first, count, out);
    case Op::kMin:
      if constexpr (!IsComplex<T>::value) return CombineTyped<Op::kMin>(team, first, count, out);
      break;
    case Op::kMax:
      if constexpr (!IsComplex<T>::value) return CombineTyped<Op::kMax>(team, first, count, out);
      break;
  }
}

}  // namespace

void Hierarchy::Combine(int64_t first, int64_t count, void* y, Type type, Op op) const {
  switch (type) {
    case Type::kInt8: return CombineOp<int8_t>(team_, first, count, y, op);
    case Type::kInt16: return CombineOp<int16_t>(team_, first, count, y, op);
    case Type::kInt32: return CombineOp<int32_t>(team_, first, count, y, op);
    case Type::kInt64: return CombineOp<int64_t>(team_, first, count, y, op);
    case Type::kUint8: return CombineOp<uint8_t>(team_, first, count, y, op);
    case Type::kUint16: return CombineOp<uint16_t>(team_, first, count, y, op);
    case Type::kUint32: return CombineOp<uint32_t>(team_, first, count, y, op);
    case Type::kUint64: return CombineOp<uint64_t>(team_, first, count, y, op);
    case Type::kFloat32: return CombineOp<float>(team_, first, count, y, op);
    case Type::kFloat64: return CombineOp<double>(team_, first, count, y, op);
    case Type::kComplex64: return CombineOp<std::complex<float>>(team_, first, count, y, op);
    case Type::kComplex128: return CombineOp<std::complex<double>>(team_, first, count, y, op);
  }
}

template <typename Work>
Outcome Hierarchy::Alone(Work work) {
  team_.Meet([&] { team_.outcome = Tried(work); });
  return team_.outcome;
}

template <typename Local, typename Between>
Outcome Hierarchy::InSlices(void* y, int64_t count, Type type, bool wants, Local local, Between between) {
  return all_lanes || ranks_ == 1 ? OnAllLanes(y, count, type, wants, local, between)
                                  : OnOneLane(y, count, type, wants, local, between);
}

template <typename Local, typename Between>
Outcome Hierarchy::OnAllLanes(void* y, int64_t count, Type type, bool wants, Local local, Between between) {
  const Slices slices{count, members_};
  const int64_t own = slices.First(member_);
  const int64_t n = slices.First(member_ + 1) - own;
  team_.Meet();
  local(own, n, At(y, own, type));
  const Outcome outcome =
      n > 0 && ranks_ > 1 ? Tried([&] { return between(lane_, At(y, own, type), n); }) : Outcome{};
  team_.Meet();
  for (int member = 0; wants && member < members_; ++member) {
    const int64_t start = slices.First(member);
    Copy(At(y, start, type), At(Out(member), start, type), slices.First(member + 1) - start, type);
  }
  team_.Meet();
  return outcome;
}

template <typename Local, typename Between>
Outcome Hierarchy::OnOneLane(void* y, int64_t count, Type type, bool wants, Local local, Between between) {
  const int64_t at_once = kAtOnceBytes / kTypeBytes[int(type)];
  const int64_t pieces = (count + at_once - 1) / at_once;
  const auto first = [&](int64_t piece) { return std::min(count, piece * at_once); };
  const auto size = [&](int64_t piece) { return first(piece + 1) - first(piece); };
  Outcome outcome;
  team_.Meet();
  void* const whole = Out(0);
  for (int64_t piece = 0; piece < pieces + 2; ++piece) {
    if (member_ == 0) {
      // After an error the other ranks' calls would find no partner here either way; the team goes on to its end.
      if (outcome.ok() && piece >= 1 && piece <= pieces) {
        outcome = Tried([&] { return between(first_lane_, At(whole, first(piece - 1), type), size(piece - 1)); });
      }
    } else {
      if (piece < pieces) {
        const Slices slices{size(piece), members_ - 1};
        const int64_t own = slices.First(member_ - 1);
        const int64_t start = first(piece) + own;
        local(start, slices.First(member_) - own, At(whole, start, type));
      }
      if (wants && piece >= 2) {
        const int64_t start = first(piece - 2);
        Copy(At(y, start, type), At(whole, start, type), size(piece - 2), type);
      }
    }
    if (member_ == 0 && piece == pieces + 1) team_.outcome = outcome;
    team_.Meet();
  }
  return team_.outcome;
}

Outcome Hierarchy::Allreduce(const void* x, void* y, int64_t count, Type type, Op op) {
  team_.SetPost(member_, {x, y});
  if (IsSmall(count, type)) {
    return Alone([&]() -> Outcome {
      Combine(0, count, y, type, op);
      const Outcome outcome = ranks_ > 1 ? mpi_.Allreduce(first_lane_, y, y, count, type, op) : Outcome{};
      for (int member = 0; member < members_; ++member) Copy(Out(member), y, count, type);
      return outcome;
    });
  }
  return InSlices(
      y, count, type, true, [&](int64_t first, int64_t n, void* slice) { Combine(first, n, slice, type, op); },
      [&](const Channel& lane, void* part, int64_t n) { return mpi_.Allreduce(lane, part, part, n, type, op); });
}

Outcome Hierarchy::Reduce(const void* x, void* y, int64_t count, Type type, Op op, int root) {
  const int root_rank = static_cast<int>(root / members_);
  const bool is_root = lane_.rank == root_rank && member_ == root % members_;
  team_.SetPost(member_, {x, y});
  Outcome outcome;
  if (IsSmall(count, type)) {
    outcome = Alone([&]() -> Outcome {
      const auto sum = Scratch(count, type);
      Combine(0, count, sum.get(), type, op);
      const Outcome reduced =
          ranks_ > 1 ? mpi_.Reduce(first_lane_, sum.get(), sum.get(), count, type, op, root_rank) : Outcome{};
      if (lane_.rank == root_rank) Copy(Out(static_cast<int>(root % members_)), sum.get(), count, type);
      return reduced;
    });
  } else {
    outcome = InSlices(
        y, count, type, is_root, [&](int64_t first, int64_t n, void* slice) { Combine(first, n, slice, type, op); },
        [&](const Channel& lane, void* part, int64_t n) {
          return mpi_.Reduce(lane, part, part, n, type, op, root_rank);
        });
  }
  if (!is_root && count > 0) std::memset(y, 0, Bytes(count, type));
  return outcome;
}

Outcome Hierarchy::Bcast(const void* x, void* y, int64_t count, Type type, int root) {
  const int root_rank = static_cast<int>(root / members_);
  const int root_member = static_cast<int>(root % members_);
  team_.SetPost(member_, {x, y});
  if (IsSmall(count, type)) {
    return Alone([&]() -> Outcome {
      if (lane_.rank == root_rank) Copy(y, In(root_member), count, type);
      const Outcome outcome = ranks_ > 1 ? mpi_.Bcast(first_lane_, y, y, count, type, root_rank) : Outcome{};
      for (int member = 0; member < members_; ++member) Copy(Out(member), y, count, type);
      return outcome;
    });
  }
  return InSlices(
      y, count, type, true,
      [&](int64_t first, int64_t n, void* slice) {
        if (lane_.rank == root_rank) Copy(slice, At(In(root_member), first, type), n, type);
      },
      [&](const Channel& lane, void* part, int64_t n) { return mpi_.Bcast(lane, part, part, n, type, root_rank); });
}

Outcome Hierarchy::Allgather(const void* x, void* y, int64_t count, Type type) {
  if (IsSmall(count * members_ * ranks_, type)) {
    team_.SetPost(member_, {x, y});
    return Alone([&]() -> Outcome {
      const auto own = Scratch(count * members_, type);
      for (int member = 0; member < members_; ++member) {
        Copy(At(own.get(), member * count, type), In(member), count, type);
      }
      Outcome outcome;
      if (ranks_ > 1) {
        outcome = mpi_.Allgather(first_lane_, own.get(), y, count * members_, type);
      } else {
        Copy(y, own.get(), count * members_, type);
      }
      for (int member = 0; member < members_; ++member) Copy(Out(member), y, count * members_ * ranks_, type);
      return outcome;
    });
  }
  const auto scratch = Scratch(ranks_ > 1 ? count * ranks_ : 0, type);
  Outcome outcome;
  const void* gathered = x;
  if (ranks_ > 1) {
    gathered = scratch.get();
    outcome = mpi_.Allgather(lane_, x, scratch.get(), count, type);
  }
  team_.SetPost(member_, {gathered, y});
  team_.Meet();
  for (int64_t rank = 0; rank < ranks_; ++rank) {
    for (int member = 0; member < members_; ++member) {
      Copy(At(y, (rank * members_ + member) * count, type), At(In(member), rank * count, type), count, type);
    }
  }
  team_.Meet();
  return outcome;
}

Outcome Hierarchy::ReduceScatter(const void* x, void* y, int64_t count, Type type, Op op) {
  team_.SetPost(member_, {x, y});
  if (IsSmall(count * members_ * ranks_, type)) {
    return Alone([&]() -> Outcome {
      const auto sums = Scratch(count * members_ * ranks_, type);
      Combine(0, count * members_ * ranks_, sums.get(), type, op);
      const auto own = Scratch(count * members_, type);
      const char* blocks = sums.get();
      Outcome outcome;
      if (ranks_ > 1) {
        outcome = mpi_.ReduceScatter(first_lane_, sums.get(), own.get(), count * members_, type, op);
        blocks = own.get();
      }
      for (int member = 0; member < members_; ++member) {
        Copy(Out(member), At(blocks, member * count, type), count, type);
      }
      return outcome;
    });
  }
  const auto scratch = Scratch(ranks_ > 1 ? count * ranks_ : 0, type);
  void* sums = ranks_ > 1 ? static_cast<void*>(scratch.get()) : y;
  team_.Meet();
  for (int64_t rank = 0; rank < ranks_; ++rank) {
    Combine((rank * members_ + member_) * count, count, At(sums, rank * count, type), type, op);
  }
  team_.Meet();
  return ranks_ > 1 ? mpi_.ReduceScatter(lane_, sums, y, count, type, op) : Outcome{};
}

Outcome Hierarchy::Alltoall(const void* x, void* y, int64_t count, Type type) {
  const auto number = [&](int64_t rank, int64_t member) { return rank * members_ + member; };
  team_.SetPost(member_, {x, y});
  if (IsSmall(count * members_ * ranks_, type)) {
    return Alone([&]() -> Outcome {
      // For each rank what its members get from each of ours: [rank][to][from].
      const int64_t total = count * members_ * members_ * ranks_;
      const auto sent = Scratch(total, type);
      const auto received = Scratch(total, type);
      const auto at = [&](int64_t rank, int64_t to, int64_t from) {
        return (number(rank, to) * members_ + from) * count;
      };
      for (int64_t rank = 0; rank < ranks_; ++rank) {
        for (int to = 0; to < members_; ++to) {
          for (int from = 0; from < members_; ++from) {
            Copy(At(sent.get(), at(rank, to, from), type), At(In(from), number(rank, to) * count, type), count, type);
          }
        }
      }
      const char* blocks = sent.get();
      Outcome outcome;
      if (ranks_ > 1) {
        outcome = mpi_.Alltoall(first_lane_, sent.get(), received.get(), count * members_ * members_, type);
        blocks = received.get();
      }
      for (int64_t rank = 0; rank < ranks_; ++rank) {
        for (int to = 0; to < members_; ++to) {
          Copy(At(Out(to), number(rank, 0) * count, type), At(blocks, at(rank, to, 0), type), count * members_, type);
        }
      }
      return outcome;
    });
  }
  const auto scratch = Scratch(ranks_ > 1 ? count * members_ * ranks_ : 0, type);
  void* blocks = ranks_ > 1 ? static_cast<void*>(scratch.get()) : y;
  team_.Meet();
  for (int64_t rank = 0; rank < ranks_; ++rank) {
    for (int member = 0; member < members_; ++member) {
      Copy(At(blocks, number(rank, member) * count, type), At(In(member), number(rank, member_) * count, type), count,
           type);
    }
  }
  team_.Meet();
  return ranks_ > 1 ? mpi_.Alltoall(lane_, blocks, y, count * members_, type) : Outcome{};
}

}  // namespace pycollective
