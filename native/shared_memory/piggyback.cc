// Implementation of piggyback.h.

#include "shared_memory/piggyback.h"

#include <cstring>
#include <limits>

#include "mpi/elements.h"
#include "mpi/reduction.h"

namespace pycollective {

namespace {

constexpr int64_t kTooMany = std::numeric_limits<int64_t>::max();

}  // namespace

int64_t PiggybackedAllreduce::nbytes() const {
  if (arrays_.empty() || op_ == Op::kSumBfloat16) return kTooMany;
  int64_t nbytes = 0;
  for (const ArrayPair& array : arrays_) {
    if (array.type != arrays_.front().type) return kTooMany;
    nbytes += array.nbytes();
  }
  return nbytes;
}

void PiggybackedAllreduce::Pack(Member, char* to) const {
  for (const ArrayPair& array : arrays_) {
    if (array.count > 0) std::memcpy(to, array.x, static_cast<size_t>(array.nbytes()));
    to += array.nbytes();
  }
}

bool PiggybackedAllreduce::Needs(Member, int) const { return true; }

void PiggybackedAllreduce::CompleteReduced(Member, const char* reduced) const {
  for (const ArrayPair& array : arrays_) {
    if (array.count > 0) std::memcpy(array.y, reduced, static_cast<size_t>(array.nbytes()));
    reduced += array.nbytes();
  }
}

bool PiggybackedAllreduce::Complete(Member member, const BytesOfRank& of) const {
  int64_t first = 0;  // of the array, in bytes
  for (const ArrayPair& array : arrays_) {
    const auto operand_of = [&](int rank) -> const void* { return rank == member.rank ? array.x : of(rank) + first; };
    ReduceInOrder(member.size, operand_of, array.count, array.y, array.type, op_);
    first += array.nbytes();
  }
  return true;
}

int64_t PiggybackedArrayCollective::nbytes() const {
  const bool is_carried = TraitsOf(operation_).host_exchange != kByMpi && a_.op != Op::kSumBfloat16;
  return is_carried ? blocks_ * static_cast<int64_t>(Bytes(a_.count, a_.type)) : kTooMany;
}

void PiggybackedArrayCollective::Pack(Member member, char* to) const {
  if (a_.count == 0) return;
  for (int64_t block = 0; block < blocks_; ++block) {
    if (blocks_ > 1 && block == member.rank && operation_ != kReduceScatter) continue;  // no other rank needs it
    std::memcpy(At(to, block * a_.count, a_.type), At(a_.send, block * a_.count, a_.type), Bytes(a_.count, a_.type));
  }
}

bool PiggybackedArrayCollective::Needs(Member member, int other) const { return Reads(operation_, a_, member, other); }

bool PiggybackedArrayCollective::Complete(Member member, const BytesOfRank& of) const {
  if (a_.count == 0) return true;
  const auto blocks_of = [&](int rank) { return Blocks{rank == member.rank ? a_.send : of(rank), a_.count}; };
  return Combine(operation_, a_, member, 0, a_.count, blocks_of).ok();
}

std::optional<PiggybackedCollective::Reduction> PiggybackedArrayCollective::reduction() const {
  if (operation_ != kReduceScatter) return {};
  return Reduction{a_.type, a_.op};
}

void PiggybackedArrayCollective::CompleteReduced(Member member, const char* reduced) const {
  if (a_.count > 0) std::memcpy(a_.recv, At(reduced, member.rank * a_.count, a_.type), Bytes(a_.count, a_.type));
}

}  // namespace pycollective
