// Implementation of combine.h.

#include "shared_memory/combine.h"

#include <cstring>
#include <string>

#include "mpi/elements.h"
#include "mpi/reduction.h"

namespace pycollective {
namespace {

Outcome HasNoCase(Operation operation) {
  const std::string name = kOperationNames[operation];
  Outcome outcome{kOperationNames[operation], 0, "expected a collective that has a case in combine.cc, got " + name};
  outcome.remedy = "Write its case, or give its row in native/base/operations.h kByMpi.";
  return outcome;
}

}  // namespace

bool Reads(Operation operation, const Arguments& a, Member member, int other) {
  switch (TraitsOf(operation).dataflow) {
    case kFromRoot: return other == a.root;
    case kToRoot: return member.rank == a.root;
    case kFromLower: return other < member.rank;
    case kPermuted: return other == a.from;
    default: return true;
  }
}

bool IsReadBy(Operation operation, const Arguments& a, Member member, int other) {
  if (TraitsOf(operation).dataflow == kPermuted) return other == a.to;  // only the other one knows where its array comes from
  return IsRead(operation, a, member) && Reads(operation, a, {other, member.size}, member.rank);
}

bool IsRead(Operation operation, const Arguments& a, Member member) {
  const Dataflow dataflow = TraitsOf(operation).dataflow;
  if (dataflow == kPermuted) return a.to >= 0;
  return dataflow != kFromRoot || member.rank == a.root;
}

Outcome CopyInMemory(int, void* to, const void* from, size_t nbytes) {
  if (to != from) std::memcpy(to, from, nbytes);
  return {};
}

Outcome Combine(Operation operation, const Arguments& a, Member member, int64_t first, int64_t count, const BlocksOfRank& of,
                const CopyOfRank& copy) {
  const auto block = [&](int rank, int number) {
    const Blocks operand = of(rank);
    return At(operand.data, number * operand.stride, a.type);
  };
  const auto move = [&](int64_t to, int rank, int number) {
    return copy(rank, At(a.recv, to, a.type), block(rank, number), Bytes(count, a.type));
  };
  // Of the first `operands` ranks.
  const auto reduce = [&](int operands, int number) -> Outcome {
    ReduceInOrder(operands, [&](int rank) { return block(rank, number); }, count, At(a.recv, first, a.type), a.type, a.op);
    return {};
  };
  const auto clear = [&](int64_t to) -> Outcome {
    std::memset(At(a.recv, to, a.type), 0, Bytes(count, a.type));
    return {};
  };
  const bool is_root = member.rank == a.root;
  switch (operation) {
    case kAllreduce: return reduce(member.size, 0);
    case kReduce: return is_root ? reduce(member.size, 0) : clear(first);
    case kReduceScatter: return reduce(member.size, member.rank);
    case kScan: return reduce(member.rank + 1, 0);
    case kExscan: return member.rank > 0 ? reduce(member.rank, 0) : clear(first);
    case kBcast: return move(first, a.root, 0);
    case kScatter: return move(first, a.root, member.rank);
    case kPpermute: return a.from >= 0 ? move(first, a.from, 0) : clear(first);
    case kAllgather:
    case kAlltoall:
    case kGather:
      for (int step = 0; step < member.size; ++step) {
        const int rank = (member.rank + step) % member.size;  // no two ranks read from the same one at once
        const int64_t to = rank * a.count + first;
        const bool gets = operation != kGather || is_root;
        PYCOLLECTIVE_RETURN_IF_FAILED(gets ? move(to, rank, operation == kAlltoall ? member.rank : 0) : clear(to));
      }
      return {};
    default: return HasNoCase(operation);
  }
}

}  // namespace pycollective
