// What a rank tells of several ranks: of its own status, and of those that it has asked for another rank.

#ifndef PYCOLLECTIVE_NATIVE_MONITOR_HEARD_H_
#define PYCOLLECTIVE_NATIVE_MONITOR_HEARD_H_

#include <cstdint>
#include <string>
#include <vector>

#include "monitor/status.h"

namespace pycollective {

// A rank without a status, as the rank knows it that has asked it, or that should have been told of it.
struct Unheard {
  int rank;
  bool is_asked = false;  // whether a rank has asked it; else the head of its part did not answer
  bool refused = false;   // see Reply
  bool accepted = false;
  int64_t state = kUnknownState;  // of its process: StateOf

  static constexpr int64_t kUnknownState = -1;
};

// What has been heard of some ranks. Each of them is in one status, or unheard.
struct Heard {
  std::vector<Status> statuses;
  std::vector<Unheard> unheard;

  // All ranks, ascending.
  std::vector<int> ranks() const;
};
std::string Packed(const Heard& heard);
// Returns whether `text` tells of these ranks, which ascend, of each of them once, and of no others. The first of them has
// written it, so it has a status.
bool Unpack(const std::string& text, int size, const std::vector<int>& ranks, Heard* heard);

}  // namespace pycollective

#endif  // PYCOLLECTIVE_NATIVE_MONITOR_HEARD_H_
