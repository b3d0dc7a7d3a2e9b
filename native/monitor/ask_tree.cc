// Implementation of ask_tree.h.

#include "monitor/ask_tree.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <set>
#include <utility>

#include "monitor/rank_runs.h"

namespace pycollective {
namespace {

constexpr TreeLimits kTellLimits{700000000, 2000000000, 3000000000};
constexpr int64_t kTellOneNs = 1000000000;

int64_t HostOf(const std::vector<Process>& processes, int rank) { return processes[static_cast<size_t>(rank)].host; }

// What a head of TellAll replies: the ranks of its part to which the request has not come.
bool ReadUntold(const Part& part, int size, std::vector<int>* untold) {
  if (!part.reply.came) return false;
  Reader reader(part.reply.text);
  *untold = RanksFrom(reader, size);
  // The head itself has answered. It speaks of its part alone.
  return reader.ok() && std::includes(part.ranks.begin() + 1, part.ranks.end(), untold->begin(), untold->end());
}

// One pass of TellAll. Adds the heads that have not replied to `asked`.
std::vector<int> TellParts(const SideChannel& channel, const std::vector<Process>& processes, int own,
                           const std::vector<int>& ranks, int64_t kind, const std::string& text, std::set<int>* asked,
                           LostHosts* lost) {
  std::vector<int> untold;
  for (const Part& part : AskParts(channel, processes, own, ranks, kind, text, kTellLimits)) {
    // A head that replies without an answer, for lack of memory or threads, is asked again, by itself in the end.
    if (!part.reply.came) asked->insert(part.ranks.front());
    lost->Add(part.ranks.front(), part.reply);
    std::vector<int> of_part;
    if (!ReadUntold(part, static_cast<int>(processes.size()), &of_part)) of_part = part.ranks;
    untold.insert(untold.end(), of_part.begin(), of_part.end());
  }
  SortRanks(&untold);
  return untold;
}

std::vector<int> Without(const std::vector<int>& ranks, const std::set<int>& others) {
  std::vector<int> left;
  std::set_difference(ranks.begin(), ranks.end(), others.begin(), others.end(), std::back_inserter(left));
  return left;
}

}  // namespace

std::vector<std::vector<int>> PartsOf(const std::vector<Process>& processes, int own, const std::vector<int>& ranks) {
  std::vector<std::vector<int>> parts;
  std::map<int64_t, std::vector<int>> by_host;
  for (const int rank : ranks) {
    if (HostOf(processes, rank) == HostOf(processes, own)) {
      parts.push_back({rank});
    } else {
      by_host[HostOf(processes, rank)].push_back(rank);
    }
  }
  const size_t count = std::min(by_host.size(), kMostParts);
  size_t at = 0;
  for (auto& [host, of_host] : by_host) {
    // Part i has the hosts from i H / count on.
    const size_t part = at * count / by_host.size();
    const bool is_new = at == 0 || part != (at - 1) * count / by_host.size();
    if (is_new) parts.emplace_back();
    parts.back().insert(parts.back().end(), of_host.begin(), of_host.end());
    ++at;
  }
  for (std::vector<int>& part : parts) SortRanks(&part);
  return parts;
}

std::vector<Part> AskParts(const SideChannel& channel, const std::vector<Process>& processes, int own,
                           const std::vector<int>& ranks, int64_t kind, const std::string& text, const TreeLimits& limits) {
  std::vector<Part> parts;
  std::vector<int> heads;
  std::vector<std::string> texts;
  int64_t limit_ns = limits.rank_ns;
  for (std::vector<int>& part : PartsOf(processes, own, ranks)) {
    const int64_t host = HostOf(processes, part.front());
    const bool is_far = host != HostOf(processes, own);
    const bool has_several =
        std::any_of(part.begin(), part.end(), [&](int rank) { return HostOf(processes, rank) != host; });
    limit_ns = std::max(limit_ns, has_several ? limits.hosts_ns : is_far ? limits.host_ns : limits.rank_ns);
    Writer writer;
    PutRanks(writer, {part.begin() + 1, part.end()});
    heads.push_back(part.front());
    texts.push_back(writer.Append(text).text());
    parts.push_back({std::move(part), {}});
  }
  std::vector<Reply> replies = channel.Ask(heads, kind, texts, limit_ns);
  for (size_t i = 0; i < parts.size(); ++i) parts[i].reply = std::move(replies[i]);
  return parts;
}

std::vector<int> TellAll(const SideChannel& channel, const std::vector<Process>& processes, int own,
                         const std::vector<int>& ranks, int64_t kind, const std::string& text) {
  std::set<int> asked;
  LostHosts lost(processes);
  std::vector<int> untold = TellParts(channel, processes, own, ranks, kind, text, &asked, &lost);
  const std::vector<int> by_others = Without(untold, asked);
  std::set<int> told(by_others.begin(), by_others.end());
  if (!by_others.empty()) {
    for (const int rank : TellParts(channel, processes, own, by_others, kind, text, &asked, &lost)) told.erase(rank);
  }
  untold = Without(untold, told);
  std::vector<int> left;
  for (const int rank : Without(untold, asked)) {
    if (!lost.Has(rank)) left.push_back(rank);
  }
  if (left.empty()) return untold;
  Writer writer;
  PutRanks(writer, {});
  const std::vector<Reply> replies = channel.Ask(left, kind, writer.Append(text).text(), kTellOneNs);
  told.clear();
  for (size_t i = 0; i < left.size(); ++i) {
    if (replies[i].came) told.insert(left[i]);
  }
  return Without(untold, told);
}

std::string HandOn(const SideChannel& channel, const std::vector<Process>& processes, int own, const std::vector<int>& ranks,
                   int64_t kind, const std::string& text) {
  std::set<int> asked;
  LostHosts lost(processes);
  Writer writer;
  PutRanks(writer, ranks.empty() ? ranks : TellParts(channel, processes, own, ranks, kind, text, &asked, &lost));
  return writer.text();
}

void LostHosts::Add(int rank, const Reply& reply) {
  const bool is_there = reply.came || reply.accepted || reply.refused;
  (is_there ? there_ : silent_).push_back(HostOf(processes_, rank));
}

bool LostHosts::Has(int rank) const {
  const auto has = [&](const std::vector<int64_t>& hosts) {
    return std::find(hosts.begin(), hosts.end(), HostOf(processes_, rank)) != hosts.end();
  };
  return has(silent_) && !has(there_);
}

}  // namespace pycollective
