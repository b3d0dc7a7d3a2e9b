// Implementation of inquiry.h.

#include "monitor/inquiry.h"

#include <algorithm>
#include <string>

#include "monitor/python_stacks.h"

namespace pycollective {
namespace {

constexpr int64_t kAskNs = 3000000000;    // for all ranks to tell what they do
constexpr int64_t kStateNs = 1000000000;  // for one to tell whether another process of its host is there

// Why a rank does not answer, as far as the processes of its host can tell.
SilentRank WhySilent(const SideChannel& channel, const std::vector<Process>& processes, int rank, const Reply& no_reply,
                     const std::vector<Status>& statuses, int own) {
  const Process& process = processes[static_cast<size_t>(rank)];
  const auto is_on_its_host = [&](int other) { return processes[static_cast<size_t>(other)].host == process.host; };
  bool host_answers = no_reply.refused;
  int64_t state = -1;
  if (is_on_its_host(own)) {
    state = StateOf(process);
  } else {
    for (const Status& status : statuses) {
      if (!is_on_its_host(status.rank)) continue;
      const Reply reply = channel.Ask({status.rank}, kProcessState, Writer().Put(rank).text(), kStateNs)[0];
      if (!reply.came) continue;
      host_answers = true;
      state = Reader(reply.text).Number();
      break;
    }
  }
  const std::string name = "process " + std::to_string(process.pid) + " on host " + process.host_name;
  const bool is_stopped = state == 'T' || state == 't';
  const bool has_ended = state == 0 || state == 'Z' || (no_reply.refused && !is_stopped);
  std::string why;
  if (is_stopped) {
    why = "does not answer: " + name + " is stopped";
  } else if (has_ended) {
    why = "does not answer: " + name + " has ended";
  } else if (state > 0) {
    why = "does not answer, though " + name + " is alive";
  } else if (no_reply.accepted) {
    why = "does not answer, though its host does: " + name + " is stopped, or the host is overloaded";
  } else if (host_answers) {
    why = "does not answer: " + name;
  } else {
    why = "cannot be reached: host " + process.host_name + " does not answer";
  }
  return {rank, why, has_ended};
}

}  // namespace

Inquiry AskAll(const SideChannel& channel, const std::vector<Process>& processes, const std::vector<int>& others,
               const Status& own) {
  Inquiry inquiry{{own}, {}};
  const std::vector<Reply> replies = channel.Ask(others, kTellStatus, "", kAskNs);
  std::vector<size_t> without;
  for (size_t i = 0; i < others.size(); ++i) {
    Status status;
    if (replies[i].came && Unpack(replies[i].text, &status) && status.rank == others[i]) {
      inquiry.statuses.push_back(status);
    } else {
      without.push_back(i);
    }
  }
  std::sort(inquiry.statuses.begin(), inquiry.statuses.end(),
            [](const Status& a, const Status& b) { return a.rank < b.rank; });
  for (const size_t i : without) {
    inquiry.silent.push_back(WhySilent(channel, processes, others[i], replies[i], inquiry.statuses, own.rank));
  }
  return inquiry;
}

void AskForFrames(const SideChannel& channel, int own, std::vector<Status>* statuses) {
  std::vector<int> ranks = RanksWithoutPlace(*statuses);
  const auto status_of = [&](int rank) {
    return std::find_if(statuses->begin(), statuses->end(), [&](const Status& status) { return status.rank == rank; });
  };
  const auto is_own = std::find(ranks.begin(), ranks.end(), own);
  if (is_own != ranks.end()) {
    status_of(own)->stacks = StacksOfPython().Now();
    ranks.erase(is_own);
  }
  const std::vector<Reply> replies = channel.Ask(ranks, kTellFrames, "", kAskNs);
  for (size_t i = 0; i < ranks.size(); ++i) {
    if (replies[i].came) Unpack(replies[i].text, &status_of(ranks[i])->stacks);
  }
}

}  // namespace pycollective
