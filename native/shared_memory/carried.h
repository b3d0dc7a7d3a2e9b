// Small collectives whose operands travel with the comparison of the call: on the board of a host or in buffers beside it, or in
// the block that a rank sends to the ranks of other hosts. When a rank has compared the call with all others, it has their
// operands, too.

#ifndef PYCOLLECTIVE_NATIVE_SHARED_MEMORY_CARRIED_H_
#define PYCOLLECTIVE_NATIVE_SHARED_MEMORY_CARRIED_H_

#include <cstdint>
#include <functional>
#include <vector>

#include "base/operations.h"
#include "mpi/packing.h"
#include "shared_memory/combine.h"

namespace pycollective {

class Carried {
 public:
  using BytesOfRank = std::function<const char*(int rank)>;

  virtual ~Carried() = default;
  // Of what a rank brings; a number beyond all limits if the call is not carried. The shapes and dtypes alone decide, so
  // ranks whose calls match agree on it.
  virtual int64_t nbytes() const = 0;
  // Copies what this rank brings to the others; `to` begins at a multiple of 8.
  virtual void Bring(Member member, char* to) const = 0;
  // Whether this rank's result depends on what another one brings.
  virtual bool Needs(Member member, int other) const = 0;
  // Makes the result of what the ranks have brought that it needs.
  virtual void Take(Member member, const BytesOfRank& of) const = 0;
};

// An allreduce of arrays in host memory.
class CarriedReduction final : public Carried {
 public:
  // The arrays outlive this object. It is carried where all have one type, and this package adds as MPI would.
  CarriedReduction(const std::vector<ArrayPair>& arrays, Op op) : arrays_(arrays), op_(op) {}
  int64_t nbytes() const override;
  void Bring(Member member, char* to) const override;
  bool Needs(Member member, int other) const override;
  void Take(Member member, const BytesOfRank& of) const override;

 private:
  const std::vector<ArrayPair>& arrays_;
  const Op op_;
};

// Another collective of one array in host memory, which holds `blocks` blocks of `a.count` elements.
class CarriedCollective final : public Carried {
 public:
  CarriedCollective(Operation operation, const Arguments& a, int64_t blocks)
      : operation_(operation), a_(a), blocks_(blocks) {}
  int64_t nbytes() const override;
  void Bring(Member member, char* to) const override;
  bool Needs(Member member, int other) const override;
  void Take(Member member, const BytesOfRank& of) const override;

 private:
  const Operation operation_;
  const Arguments a_;
  const int64_t blocks_;
};

}  // namespace pycollective

#endif  // PYCOLLECTIVE_NATIVE_SHARED_MEMORY_CARRIED_H_
