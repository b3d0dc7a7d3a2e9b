// Calls by which ranks meet, each of which must end on this rank before the next one.

#ifndef PYCOLLECTIVE_NATIVE_MPI_STOP_AFTER_FAILURE_H_
#define PYCOLLECTIVE_NATIVE_MPI_STOP_AFTER_FAILURE_H_

#include "mpi/collectives.h"

namespace pycollective {

// If such a call fails on this rank, other ranks may wait for its next step. So each further call fails in the same way: its first step
// would be taken for that one.
class StopAfterFailure {
 public:
  template <typename Make>
  Outcome Run(Make make) {
    if (!last_.ok()) return last_;
    last_ = {"MPI", 0, "expected a call that ends, got an exception in it"};  // until it has ended
    last_ = make();
    return last_;
  }

 private:
  Outcome last_;
};

}  // namespace pycollective

#endif  // PYCOLLECTIVE_NATIVE_MPI_STOP_AFTER_FAILURE_H_
