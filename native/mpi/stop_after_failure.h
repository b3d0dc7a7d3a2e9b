// Calls by which ranks meet, each of which must end on this rank before the next one.

#ifndef PYCOLLECTIVE_NATIVE_MPI_STOP_AFTER_FAILURE_H_
#define PYCOLLECTIVE_NATIVE_MPI_STOP_AFTER_FAILURE_H_

#include "mpi/collectives.h"

namespace pycollective {

// If such a call fails on this rank, other ranks may wait for its next step. So each further call fails: its first step would be taken
// for that one.
class StopAfterFailure {
 public:
  template <typename Make>
  Outcome Run(Make make) {
    if (has_failed_) {
      Outcome outcome{"MPI", 0, "expected a communicator whose last call has ended on this rank, got one whose call has failed"};
      outcome.remedy = "Start the ranks again: their calls do not match any more.";
      return outcome;
    }
    has_failed_ = true;  // until the call has ended, also if an exception ends it
    const Outcome outcome = make();
    has_failed_ = !outcome.ok();
    return outcome;
  }

 private:
  bool has_failed_ = false;
};

}  // namespace pycollective

#endif  // PYCOLLECTIVE_NATIVE_MPI_STOP_AFTER_FAILURE_H_
