// Small collectives whose operands are piggybacked on the comparison of the call: on the board of a host or in buffers beside it,
// or in the block that a rank sends to the ranks of other hosts (comparison.h). When a rank has compared the call with all others, it
// has their operands, too, or what they are reduced to.

#ifndef PYCOLLECTIVE_NATIVE_SHARED_MEMORY_PIGGYBACK_H_
#define PYCOLLECTIVE_NATIVE_SHARED_MEMORY_PIGGYBACK_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "base/operations.h"
#include "mpi/packing.h"
#include "shared_memory/combine.h"

namespace pycollective {

class PiggybackedCollective {
 public:
  using BytesOfRank = std::function<const char*(int rank)>;

  virtual ~PiggybackedCollective() = default;
  // The size of a rank's operand; a number beyond all limits if the call cannot be piggybacked. The shapes and dtypes alone
  // decide, so ranks whose calls match agree on it.
  virtual int64_t nbytes() const = 0;
  // Copies this rank's operand for the others; `to` begins at a multiple of 8.
  virtual void Pack(Member member, char* to) const = 0;
  // Whether the result of this rank depends on the operand of another rank.
  virtual bool Needs(Member member, int other) const = 0;
  // Computes the result of this rank from the operands of the ranks that it needs. False, on all ranks: the call must be made in
  // another way.
  virtual bool Complete(Member member, const BytesOfRank& of) const = 0;

  // How the operands of all ranks may be reduced on their way to this rank, element by element.
  struct Reduction {
    Type type;
    Op op;
  };
  // Nothing: a rank needs the operands themselves.
  virtual std::optional<Reduction> reduction() const { return {}; }
  // Computes the result of this rank from what the operands are reduced to. Only where reduction() has a value.
  virtual void CompleteReduced(Member, const char*) const {}
};

// An allreduce of arrays in host memory.
class PiggybackedAllreduce final : public PiggybackedCollective {
 public:
  // The arrays outlive this object. It is piggybacked where all have one type, and this package adds as MPI would.
  PiggybackedAllreduce(const std::vector<ArrayPair>& arrays, Op op) : arrays_(arrays), op_(op) {}
  int64_t nbytes() const override;
  void Pack(Member member, char* to) const override;
  bool Needs(Member member, int other) const override;
  bool Complete(Member member, const BytesOfRank& of) const override;

  std::optional<Reduction> reduction() const override { return Reduction{arrays_.front().type, op_}; }
  void CompleteReduced(Member member, const char* reduced) const override;

 private:
  const std::vector<ArrayPair>& arrays_;
  const Op op_;
};

// Another collective of one array in host memory, which holds `blocks` blocks of `a.count` elements.
class PiggybackedArrayCollective final : public PiggybackedCollective {
 public:
  PiggybackedArrayCollective(Operation operation, const Arguments& a, int64_t blocks)
      : operation_(operation), a_(a), blocks_(blocks) {}
  int64_t nbytes() const override;
  void Pack(Member member, char* to) const override;
  bool Needs(Member member, int other) const override;
  bool Complete(Member member, const BytesOfRank& of) const override;
  std::optional<Reduction> reduction() const override;
  void CompleteReduced(Member member, const char* reduced) const override;

 private:
  const Operation operation_;
  const Arguments a_;
  const int64_t blocks_;
};

}  // namespace pycollective

#endif  // PYCOLLECTIVE_NATIVE_SHARED_MEMORY_PIGGYBACK_H_
