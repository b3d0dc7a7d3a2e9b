// Implementation of record_writers.h.

#include "monitor/record_writers.h"

#include <algorithm>
#include <numeric>

#include "monitor/rank_runs.h"

namespace pycollective {
namespace {

// Adds `most` of `ranks` at equal distances, or all of them.
void AddSpread(const std::vector<int>& ranks, size_t most, std::vector<int>* to) {
  const size_t count = std::min(most, ranks.size());
  for (size_t i = 0; i < count; ++i) to->push_back(ranks[i * ranks.size() / count]);
}

}  // namespace

std::vector<int> RecordWriters(int size, int own, const std::vector<Status>& statuses, const std::vector<int>& silent) {
  std::vector<int> all(static_cast<size_t>(size));
  std::iota(all.begin(), all.end(), 0);
  if (size <= kAllWrite) return all;
  std::vector<int> writers{own};
  AddSpread(silent, kMostSilent, &writers);
  std::vector<const std::vector<int>*> by_count;  // the rarest status in front
  for (const Status& status : statuses) by_count.push_back(&status.ranks);
  std::stable_sort(by_count.begin(), by_count.end(), [](const auto* a, const auto* b) { return a->size() < b->size(); });
  AddSpread(by_count.empty() ? all : *by_count.back(), kMostUsual, &writers);
  if (!by_count.empty()) by_count.pop_back();
  std::vector<size_t> counts(by_count.size(), 0);
  size_t left = kMostOthers;
  for (bool has_more = true; has_more && left > 0;) {
    has_more = false;
    for (size_t i = 0; i < counts.size() && left > 0; ++i) {
      if (counts[i] == by_count[i]->size()) continue;
      ++counts[i], --left;
      has_more = true;
    }
  }
  for (size_t i = 0; i < counts.size(); ++i) AddSpread(*by_count[i], counts[i], &writers);
  SortRanks(&writers);
  return writers;
}

}  // namespace pycollective
