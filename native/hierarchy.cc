// Implementation of hierarchy.h. An error on one lane is returned after the last meeting: members never leave each
// other waiting.

#include "hierarchy.h"

#include <algorithm>
#include <complex>
#include <cstring>
#include <memory>

namespace pycollective {
namespace {

// Up to this size one member does all the work: the wake-ups of the others cost more than their help saves.
constexpr int64_t kSmallBytes = 32 << 10;

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

// Integer sums and products wrap around, as in XLA.
template <Op kOp, typename T>
T Apply(T a, T b) {
  if constexpr (std::is_integral_v<T> && (kOp == Op::kSum || kOp == Op::kProd)) {
    using U = std::make_unsigned_t<T>;
    using Wide = std::common_type_t<U, unsigned>;  // smaller types would be promoted to a signed int
    const Wide wide = kOp == Op::kSum ? Wide(U(a)) + Wide(U(b)) : Wide(U(a)) * Wide(U(b));
    return static_cast<T>(static_cast<U>(wide));
  } else if constexpr (kOp == Op::kSum) {
    return a + b;
  } else if constexpr (kOp == Op::kProd) {
    return a * b;
  } else {
    const bool keep_b = kOp == Op::kMax ? b >= a : b <= a;
    return (keep_b || b != b) ? b : a;  // NaN wins, as in collectives.cc
  }
}

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
    case Op::kSum: return CombineTyped<Op::kSum>(team, first, count, out);
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

Hierarchy::Slice Hierarchy::SliceOf(int member, int64_t count) const {
  const int64_t each = (count + team_.size() - 1) / team_.size();
  const int64_t first = std::min(count, each * member);
  return {first, std::min(each, count - first)};
}

Hierarchy::Slice Hierarchy::ShareOf(int64_t count, Type type) const {
  if (!IsSmall(count, type)) return SliceOf(member_, count);
  return {0, member_ == 0 ? count : 0};
}

void Hierarchy::CollectShares(void* y, int64_t count, Type type) const {
  if (IsSmall(count, type)) return Copy(y, team_.PostOf(0).out, count, type);
  for (int member = 0; member < team_.size(); ++member) {
    const Slice slice = SliceOf(member, count);
    Copy(At(y, slice.first, type), At(team_.PostOf(member).out, slice.first, type), slice.count, type);
  }
}

Outcome Hierarchy::Allreduce(const void* x, void* y, int64_t count, Type type, Op op) {
  Outcome outcome;
  team_.SetPost(member_, {x, y});
  team_.Meet();
  const Slice share = ShareOf(count, type);
  if (share.count > 0) {
    void* part = At(y, share.first, type);
    Combine(share.first, share.count, part, type, op);
    if (channel_.size > 1) outcome = mpi_.Allreduce(channel_, part, part, share.count, type, op);
  }
  team_.Meet();
  CollectShares(y, count, type);
  team_.Meet();
  return outcome;
}

Outcome Hierarchy::Reduce(const void* x, void* y, int64_t count, Type type, Op op, int root) {
  const int root_rank = root / team_.size();
  const bool is_root = channel_.rank == root_rank && member_ == root % team_.size();
  Outcome outcome;
  team_.SetPost(member_, {x, y});
  team_.Meet();
  const Slice share = ShareOf(count, type);
  if (share.count > 0) {
    void* part = At(y, share.first, type);
    Combine(share.first, share.count, part, type, op);
    if (channel_.size > 1) outcome = mpi_.Reduce(channel_, part, part, share.count, type, op, root_rank);
  }
  team_.Meet();
  if (is_root) CollectShares(y, count, type);
  team_.Meet();
  if (!is_root && count > 0) std::memset(y, 0, Bytes(count, type));
  return outcome;
}

Outcome Hierarchy::ReduceScatter(const void* x, void* y, int64_t count, Type type, Op op) {
  const auto scratch = Scratch(count * channel_.size, type);
  void* sums = channel_.size > 1 ? static_cast<void*>(scratch.get()) : y;
  team_.SetPost(member_, {x, y});
  team_.Meet();
  for (int rank = 0; rank < channel_.size; ++rank) {
    Combine((int64_t{rank} * team_.size() + member_) * count, count, At(sums, rank * count, type), type, op);
  }
  team_.Meet();
  if (channel_.size == 1) return {};
  return mpi_.ReduceScatter(channel_, sums, y, count, type, op);
}

Outcome Hierarchy::Allgather(const void* x, void* y, int64_t count, Type type) {
  const auto scratch = Scratch(count * channel_.size, type);
  Outcome outcome;
  const void* gathered = x;
  if (channel_.size > 1) {
    gathered = scratch.get();
    outcome = mpi_.Allgather(channel_, x, scratch.get(), count, type);
  }
  team_.SetPost(member_, {gathered, y});
  team_.Meet();
  for (int rank = 0; rank < channel_.size; ++rank) {
    for (int member = 0; member < team_.size(); ++member) {
      Copy(At(y, (int64_t{rank} * team_.size() + member) * count, type),
           At(team_.PostOf(member).in, rank * count, type), count, type);
    }
  }
  team_.Meet();
  return outcome;
}

Outcome Hierarchy::Alltoall(const void* x, void* y, int64_t count, Type type) {
  const auto scratch = Scratch(channel_.size > 1 ? count * team_.size() * channel_.size : 0, type);
  void* blocks = channel_.size > 1 ? static_cast<void*>(scratch.get()) : y;
  team_.SetPost(member_, {x, y});
  team_.Meet();
  for (int rank = 0; rank < channel_.size; ++rank) {
    for (int member = 0; member < team_.size(); ++member) {
      Copy(At(blocks, (int64_t{rank} * team_.size() + member) * count, type),
           At(team_.PostOf(member).in, (int64_t{rank} * team_.size() + member_) * count, type), count, type);
    }
  }
  team_.Meet();
  if (channel_.size == 1) return {};
  return mpi_.Alltoall(channel_, blocks, y, count * team_.size(), type);
}

Outcome Hierarchy::Bcast(const void* x, void* y, int64_t count, Type type, int root) {
  const int root_rank = root / team_.size();
  Outcome outcome;
  team_.SetPost(member_, {x, y});
  team_.Meet();
  const Slice share = ShareOf(count, type);
  if (share.count > 0) {
    void* part = At(y, share.first, type);
    if (channel_.rank == root_rank) {
      Copy(part, At(team_.PostOf(root % team_.size()).in, share.first, type), share.count, type);
    }
    if (channel_.size > 1) outcome = mpi_.Bcast(channel_, part, part, share.count, type, root_rank);
  }
  team_.Meet();
  CollectShares(y, count, type);
  team_.Meet();
  return outcome;
}

}  // namespace pycollective
