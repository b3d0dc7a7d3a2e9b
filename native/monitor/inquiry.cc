// Implementation of inquiry.h.

#include "monitor/inquiry.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <set>
#include <string>
#include <utility>

#include "monitor/python_stacks.h"
#include "monitor/rank_runs.h"

namespace pycollective {
namespace {

constexpr int64_t kAskNs = 3000000000;    // for a rank that is asked by itself
constexpr int64_t kStateNs = 1000000000;  // for a rank to tell whether other processes of its host are there
constexpr TreeLimits kRootLimits{kAskNs, kAskNs, 5000000000};      // of the rank that reports
constexpr size_t kMostGroups = 64;  // whose members a report asks for

bool IsStopped(int64_t state) { return state == 'T' || state == 't'; }
bool IsGone(int64_t state) { return state == 0 || state == 'Z'; }

// Asks `ranks` by their heads. Adds heads that have not replied to `asked` and `lost`, if these are not null.
Heard HearParts(const SideChannel& channel, const std::vector<Process>& processes, int own, const std::vector<int>& ranks,
                int64_t reason, const TreeLimits& limits, std::set<int>* asked = nullptr, LostHosts* lost = nullptr) {
  Heard all;
  if (ranks.empty()) return all;
  const int64_t own_host = processes[static_cast<size_t>(own)].host;
  for (const Part& part : AskParts(channel, processes, own, ranks, kTellStatus, Writer().Put(reason).text(), limits)) {
    const int head = part.ranks.front();
    if (asked != nullptr && !part.reply.came) asked->insert(head);
    if (lost != nullptr) lost->Add(head, part.reply);
    Heard heard;
    if (part.reply.came && Unpack(part.reply.text, static_cast<int>(processes.size()), part.ranks, &heard)) {
      std::move(heard.statuses.begin(), heard.statuses.end(), std::back_inserter(all.statuses));
      std::move(heard.unheard.begin(), heard.unheard.end(), std::back_inserter(all.unheard));
      continue;
    }
    const Process& process = processes[static_cast<size_t>(head)];
    const int64_t state = process.host == own_host ? StateOf(process) : Unheard::kUnknownState;
    all.unheard.push_back({head, true, part.reply.refused, part.reply.accepted, state});
    for (size_t i = 1; i < part.ranks.size(); ++i) all.unheard.push_back({part.ranks[i]});
  }
  all.statuses = Joined(all.statuses);
  return all;
}

// The ranks of a report that have no status yet.
class Missing {
 public:
  explicit Missing(const std::vector<Unheard>& unheard) { Set(unheard); }

  void Set(const std::vector<Unheard>& unheard) {
    for (const Unheard& one : unheard) by_rank_[one.rank] = one;
  }
  void Erase(const std::vector<Status>& statuses) {
    for (const Status& status : statuses) {
      for (const int rank : status.ranks) by_rank_.erase(rank);
    }
  }
  template <typename Choice>
  std::vector<int> Those(const Choice& choice) const {
    std::vector<int> ranks;
    for (const auto& [rank, one] : by_rank_) {
      if (choice(one)) ranks.push_back(rank);
    }
    return ranks;
  }
  std::map<int, Unheard>& by_rank() { return by_rank_; }

 private:
  std::map<int, Unheard> by_rank_;
};

void Append(const std::vector<Status>& statuses, std::vector<Status>* to) {
  to->insert(to->end(), statuses.begin(), statuses.end());
}

// Asks a rank of each host that has answered for the states of processes of its host.
void AskForStates(const SideChannel& channel, const std::vector<Process>& processes, const std::vector<Status>& statuses,
                  Missing* missing) {
  std::map<int64_t, std::vector<int>> unknown;  // by host
  for (const auto& [rank, one] : missing->by_rank()) {
    if (one.state == Unheard::kUnknownState) unknown[processes[static_cast<size_t>(rank)].host].push_back(rank);
  }
  std::map<int64_t, int> helpers;
  for (const Status& status : statuses) {
    for (const int rank : status.ranks) {
      const int64_t host = processes[static_cast<size_t>(rank)].host;
      if (unknown.count(host) != 0) helpers.emplace(host, rank);
    }
  }
  std::vector<int> asked;
  std::vector<std::string> texts;
  for (const auto& [host, helper] : helpers) {
    Writer writer;
    PutRanks(writer, unknown[host]);
    asked.push_back(helper);
    texts.push_back(writer.text());
  }
  const std::vector<Reply> replies = channel.Ask(asked, kProcessState, texts, kStateNs);
  for (size_t i = 0; i < asked.size(); ++i) {
    Reader reader(replies[i].text);
    for (const int rank : unknown[processes[static_cast<size_t>(asked[i])].host]) {
      const int64_t state = reader.Number();
      if (replies[i].came && reader.ok()) missing->by_rank()[rank].state = state;
    }
  }
}

// Why a rank does not answer, as far as the processes of its host can tell. `host_answers`: whether other ranks of its host do.
SilentRank WhySilent(const Process& process, const Unheard& one, bool host_answers) {
  const std::string name = "process " + std::to_string(process.pid) + " on host " + process.host_name;
  const std::string names = "their processes on host " + process.host_name;
  const bool has_ended = IsGone(one.state) || (one.refused && !IsStopped(one.state));
  if (IsStopped(one.state)) {
    return {one.rank, "does not answer: " + name + " is stopped", false, "do not answer: " + names + " are stopped"};
  }
  if (has_ended) return {one.rank, "does not answer: " + name + " has ended", true, "do not answer: " + names + " have ended"};
  if (one.state > 0) {
    return {one.rank, "does not answer, though " + name + " is alive", false, "do not answer, though " + names + " are alive"};
  }
  if (one.accepted) {
    return {one.rank, "does not answer, though its host does: " + name + " is stopped, or the host is overloaded", false,
            "do not answer, though their host does: " + names + " are stopped, or the host is overloaded"};
  }
  if (host_answers) return {one.rank, "does not answer: " + name, false, "do not answer: " + names};
  return {one.rank, "cannot be reached: host " + process.host_name + " does not answer", false, ""};
}

// Finds the members of groups that are too irregular for a status: this rank knows them, or one of the ranks that wait there does.
void FindMembers(const SideChannel& channel, int size, std::vector<Status>* statuses) {
  struct Lacking {
    std::vector<CallStatus*> calls;
    std::vector<int> waiting;
  };
  std::map<int64_t, Lacking> groups;
  for (Status& status : *statuses) {
    for (CallStatus& call : status.under_way) {
      if (!call.lacks_members()) continue;
      if (const auto group = FindGroup(call.group)) {
        call.members = group->ranks;
        SortRanks(&call.members);
        continue;
      }
      Lacking& lacking = groups[call.group];
      lacking.calls.push_back(&call);
      for (const int rank : status.ranks) {
        if (lacking.waiting.size() < 2) lacking.waiting.push_back(rank);
      }
    }
  }
  for (size_t turn = 0; turn < 2; ++turn) {
    std::vector<int64_t> identities;
    std::vector<int> asked;
    std::vector<std::string> texts;
    for (const auto& [identity, lacking] : groups) {
      if (!lacking.calls.front()->lacks_members() || turn >= lacking.waiting.size() || asked.size() == kMostGroups) continue;
      identities.push_back(identity);
      asked.push_back(lacking.waiting[turn]);
      texts.push_back(Writer().Put(identity).text());
    }
    const std::vector<Reply> replies = channel.Ask(asked, kTellGroup, texts, kStateNs);
    for (size_t i = 0; i < asked.size(); ++i) {
      Reader reader(replies[i].text);
      const std::vector<int> members = RanksFrom(reader, size);
      if (!replies[i].came || !reader.ok()) continue;
      for (CallStatus* call : groups[identities[i]].calls) {
        if (call->group_size == static_cast<int64_t>(members.size())) call->members = members;
      }
    }
  }
}

}  // namespace

Heard HearFor(const SideChannel& channel, const std::vector<Process>& processes, const Status& own, const std::vector<int>& ranks,
              int64_t reason, const TreeLimits& limits) {
  Heard heard = HearParts(channel, processes, own.ranks.front(), ranks, reason, limits);
  heard.statuses.push_back(own);
  heard.statuses = Joined(heard.statuses);
  return heard;
}

Inquiry AskAll(const SideChannel& channel, const std::vector<Process>& processes, const std::vector<int>& others,
               const Status& own, int64_t reason) {
  const int own_rank = own.ranks.front();
  std::set<int> asked;  // by this rank itself, in vain
  LostHosts lost(processes);
  Heard heard = HearParts(channel, processes, own_rank, others, reason, kRootLimits, &asked, &lost);
  heard.statuses.push_back(own);
  Missing missing(heard.unheard);
  // Deputies: the next heads of those parts whose heads were silent.
  const std::vector<int> unasked = missing.Those([](const Unheard& one) { return !one.is_asked; });
  const Heard by_deputies = HearParts(channel, processes, own_rank, unasked, reason, kRootLimits, &asked, &lost);
  missing.Erase(by_deputies.statuses);
  missing.Set(by_deputies.unheard);
  Append(by_deputies.statuses, &heard.statuses);
  AskForStates(channel, processes, heard.statuses, &missing);
  // Directly: those that no rank has asked, and those that had little time for their leader, or gave no whole answer.
  const std::vector<int> left = missing.Those([&](const Unheard& one) {
    return asked.count(one.rank) == 0 && !lost.Has(one.rank) && !IsStopped(one.state) && !IsGone(one.state);
  });
  Writer writer;
  PutRanks(writer, {});
  const std::vector<Reply> replies = channel.Ask(left, kTellStatus, writer.Put(reason).text(), kAskNs);
  for (size_t i = 0; i < left.size(); ++i) {
    Heard of_rank;
    if (replies[i].came && Unpack(replies[i].text, static_cast<int>(processes.size()), {left[i]}, &of_rank)) {
      Append(of_rank.statuses, &heard.statuses);
      missing.Erase(of_rank.statuses);
    } else {
      Unheard& one = missing.by_rank()[left[i]];
      one.refused = one.refused || replies[i].refused;
      one.accepted = one.accepted || replies[i].accepted;
    }
  }
  Inquiry inquiry{Joined(heard.statuses), {}};
  std::set<int64_t> hosts;  // that answer
  for (const Status& status : inquiry.statuses) {
    for (const int rank : status.ranks) hosts.insert(processes[static_cast<size_t>(rank)].host);
  }
  for (const auto& [rank, one] : missing.by_rank()) {
    const Process& process = processes[static_cast<size_t>(rank)];
    inquiry.silent.push_back(WhySilent(process, one, one.refused || hosts.count(process.host) != 0));
  }
  FindMembers(channel, static_cast<int>(processes.size()), &inquiry.statuses);
  return inquiry;
}

std::string StatesOf(const std::vector<Process>& processes, int own, const std::string& text) {
  Reader reader(text);
  const int64_t host = processes[static_cast<size_t>(own)].host;
  Writer states;
  for (const int rank : RanksFrom(reader, static_cast<int>(processes.size()))) {
    const Process& process = processes[static_cast<size_t>(rank)];
    states.Put(process.host == host ? StateOf(process) : Unheard::kUnknownState);
  }
  return states.text();
}

std::string MembersOf(const std::string& text) {
  Reader reader(text);
  const auto group = FindGroup(reader.Number());
  std::vector<int> members;
  if (reader.ok() && group != nullptr) members = group->ranks;
  SortRanks(&members);
  Writer writer;
  PutRanks(writer, members);
  return writer.text();
}

std::vector<RankFrames> AskForFrames(const SideChannel& channel, int own, const std::vector<Status>& statuses) {
  std::vector<int> ranks = RanksWithoutPlace(statuses);
  std::vector<RankFrames> frames;
  const auto is_own = std::find(ranks.begin(), ranks.end(), own);
  if (is_own != ranks.end()) {
    frames.push_back({own, StacksOfPython().Now()});
    ranks.erase(is_own);
  }
  const std::vector<Reply> replies = channel.Ask(ranks, kTellFrames, "", kAskNs);
  for (size_t i = 0; i < ranks.size(); ++i) {
    RankFrames of_rank{ranks[i], {}};
    if (replies[i].came && Unpack(replies[i].text, &of_rank.frames)) frames.push_back(std::move(of_rank));
  }
  return frames;
}

}  // namespace pycollective
