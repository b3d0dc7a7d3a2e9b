// What a record costs: the time of a call that the recorder notes and that does nothing else, outside a trace and in one.

#include <algorithm>
#include <array>
#include <cstdio>

#include "records/recorder.h"

namespace pycollective {
namespace {

constexpr int kCalls = 100000;
constexpr int kRounds = 41;
using Rounds = std::array<double, kRounds>;

// Nanoseconds of a call.
double Round() {
  const int64_t start = NowNs();
  for (int i = 0; i < kCalls; ++i) {
    Record record;
    record.operation = kAllreduce;
    record.seq = i + 1;
    record.count = 1;
    record.nbytes = 4;
    record.state = kStarted;
    Recorded recorded(record);
    recorded.Finish(kCompleted);
  }
  return static_cast<double>(NowNs() - start) / kCalls;
}

void Print(const char* name, Rounds times) {
  std::sort(times.begin(), times.end());
  std::printf("%s: median %.0f ns a call, %.0f to %.0f\n", name, times[kRounds / 2], times[0], times[kRounds - 1]);
}

}  // namespace
}  // namespace pycollective

int main() {
  using namespace pycollective;
  Rounds plain, traced;
  for (int i = 0; i < kRounds; ++i) {
    plain[i] = Round();
    StartTrace(kCalls);
    traced[i] = Round();
    if (StopTrace().records.size() != kCalls) return 1;
  }
  Print("a record", plain);
  Print("a record in a trace", traced);
  return 0;
}
