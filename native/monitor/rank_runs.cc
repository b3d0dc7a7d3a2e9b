// Implementation of rank_runs.h.

#include "monitor/rank_runs.h"

#include <algorithm>
#include <cstdint>

namespace pycollective {
namespace {

struct Run {
  int first;
  int count;
  int distance;  // 1 for a single rank
};

// Each run takes as many ranks as it can. Every part of a run is a run, so no other cut has fewer.
std::vector<Run> RunsOf(const std::vector<int>& ranks) {
  std::vector<Run> runs;
  for (size_t first = 0; first < ranks.size();) {
    size_t last = first;
    const int distance = first + 1 < ranks.size() ? ranks[first + 1] - ranks[first] : 1;
    while (last + 1 < ranks.size() && ranks[last + 1] - ranks[last] == distance) ++last;
    runs.push_back({ranks[first], static_cast<int>(last - first + 1), distance});
    first = last + 1;
  }
  return runs;
}

}  // namespace

void SortRanks(std::vector<int>* ranks) {
  std::sort(ranks->begin(), ranks->end());
  ranks->erase(std::unique(ranks->begin(), ranks->end()), ranks->end());
}

size_t RunCount(const std::vector<int>& ranks) { return RunsOf(ranks).size(); }

void PutRanks(Writer& to, const std::vector<int>& ranks) {
  const std::vector<Run> runs = RunsOf(ranks);
  to.Put(static_cast<int64_t>(runs.size()));
  for (const Run& run : runs) to.Put(run.first).Put(run.count).Put(run.distance);
}

std::vector<int> RanksFrom(Reader& from, int size) {
  std::vector<int> ranks;
  for (int64_t left = from.Number(); left > 0 && from.ok(); --left) {
    const int64_t first = from.Number(), count = from.Number(), distance = from.Number();
    const int64_t least = ranks.empty() ? 0 : ranks.back() + 1;
    // The last rank of the run is below `size`. The division keeps the product in range.
    const bool fits = first >= least && first < size && count > 0 && distance > 0 && count - 1 <= (size - 1 - first) / distance;
    if (!fits) {
      from.Refuse();
      return {};
    }
    for (int64_t i = 0; i < count; ++i) ranks.push_back(static_cast<int>(first + i * distance));
  }
  return from.ok() ? ranks : std::vector<int>();
}

}  // namespace pycollective
