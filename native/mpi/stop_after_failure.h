// Calls by which ranks meet, each of which must end on this rank before the next one.

#ifndef PYCOLLECTIVE_NATIVE_MPI_STOP_AFTER_FAILURE_H_
#define PYCOLLECTIVE_NATIVE_MPI_STOP_AFTER_FAILURE_H_

#include "mpi/collectives.h"

namespace pycollective {

// If such a call fails on this rank, other ranks may wait for its next step. So each further call fails in the same way: other ranks would
// take its first step for the missing one.
class StopAfterFailure {
 public:
  template <typename Make>
  Outcome Run(Make make) {
    if (has_failed_) return failure_;
    has_failed_ = true;  // until the call has ended, also if an exception ends it
    Outcome outcome = make();
    has_failed_ = !outcome.ok();
    if (has_failed_) failure_ = outcome;
    return outcome;
  }

 private:
  bool has_failed_ = false;
  Outcome failure_{"MPI", 0, "expected a call that ends, got an exception in it"};
};

}  // namespace pycollective

#endif  // PYCOLLECTIVE_NATIVE_MPI_STOP_AFTER_FAILURE_H_
