// Reductions by our own code: those for which MPI's arithmetic differs from XLA's, and the sum in bfloat16, which MPI does
// not have.

#ifndef PYCOLLECTIVE_NATIVE_MPI_OWN_REDUCTIONS_H_
#define PYCOLLECTIVE_NATIVE_MPI_OWN_REDUCTIONS_H_

#include "mpi/collectives.h"
#include "mpi/mpi.h"
#include "mpi/reduction.h"

namespace pycollective {

// One row for each operation that we define for MPI. MPI_MIN and MPI_MAX are compiled as `a < b ? a : b`, which drops a NaN
// of one operand, so that ranks may even get different results. Open MPI adds short integers with saturation
// (open-mpi/ompi#8045).
#define PYCOLLECTIVE_OWN_OPS(X) \
  X(kMin, kFloat32, float)      \
  X(kMin, kFloat64, double)     \
  X(kMax, kFloat32, float)      \
  X(kMax, kFloat64, double)     \
  X(kSum, kInt8, int8_t)        \
  X(kSum, kInt16, int16_t)      \
  X(kSum, kUint8, uint8_t)      \
  X(kSum, kUint16, uint16_t)

// An MPI_User_function with XLA's arithmetic.
template <Op kOp, typename T, typename H>
void OwnReduction(void* in, void* in_out, int* count, H*) {
  const T* a = static_cast<const T*>(in);
  T* b = static_cast<T*>(in_out);
  for (int i = 0; i < *count; ++i) b[i] = Apply<kOp>(a[i], b[i]);
}

// Allreduce with Op::kSumBfloat16: the sum of float32 arrays. Operands and sum are rounded to bfloat16 when they are sent
// between ranks, which halves the bytes. Each rank adds one block of all ranks in float32, in the order of the ranks, so all
// ranks get the same bits. In levels of hosts the operands are the sums of the hosts (host_levels.h).
Outcome SumAsBfloat16(const Library& library, const Channel& channel, const Arguments& arguments);

}  // namespace pycollective

#endif  // PYCOLLECTIVE_NATIVE_MPI_OWN_REDUCTIONS_H_
