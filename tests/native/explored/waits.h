// How waits of a scenario give their core away. They do not spin.

#ifndef PYCOLLECTIVE_TESTS_NATIVE_EXPLORED_WAITS_H_
#define PYCOLLECTIVE_TESTS_NATIVE_EXPLORED_WAITS_H_

#include <functional>
#include <utility>

#include "explored.h"
#include "mpi/backoff.h"
#include "mpi/wait.h"

namespace explore {

constexpr int64_t kSliceNs = 3'000'000;  // of a neighbour: then more waits sleep than an execution has

// They yield. A patient thread asks in each round whether a rank has failed.
inline void YieldInWaits() {
  pycollective::spins_of_wait = 0;
  pycollective::is_patient = true;
  pycollective::longest_sleep = 0;
  pycollective::neighbours = pycollective::Neighbours();
}

inline void SleepInWaits() {
  pycollective::spins_of_wait = 0;
  pycollective::is_patient = false;
  pycollective::neighbours.Learn(kSliceNs);
}

inline Scenario Sleeping(Scenario scenario) {
  scenario.name += ", asleep";
  scenario.sleeps = true;
  scenario.begin = [begin = std::move(scenario.begin)] {
    begin();
    SleepInWaits();
  };
  return scenario;
}

}  // namespace explore

#endif  // PYCOLLECTIVE_TESTS_NATIVE_EXPLORED_WAITS_H_
