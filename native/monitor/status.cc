// Implementation of status.h.

#include "monitor/status.h"

#include <algorithm>
#include <cstdio>
#include <iterator>
#include <map>
#include <set>
#include <sstream>
#include <tuple>

#include "base/clock.h"
#include "monitor/side_channel.h"

namespace pycollective {
namespace {

constexpr size_t kLastChannels = 256;
constexpr size_t kStackLines = 8;
constexpr char kBySignal[] = " (read without the interpreter's lock, which a thread in C code keeps)";
constexpr int64_t kLongNs = 5000000000;  // a wait so long is no message that is about to come

CallStatus CallStatusOf(const Record& record, int64_t now) {
  CallStatus call;
  call.group = record.group;
  call.channel = record.channel;
  call.operation = record.operation;
  call.seq = record.seq;
  call.state = record.state;
  call.age_ns = now - (record.is_under_way() ? record.created_ns : record.completed_ns);
  call.description = Describe(record);
  call.site = SiteText(record.site);
  if (const auto group = FindGroup(record.group)) {
    call.group_name = group->name;
    if (record.is_under_way() && call.is_for_all()) call.members = group->ranks;
    for (const int64_t peer : {record.dest, record.source}) {
      if (record.is_under_way() && 0 <= peer && peer < static_cast<int64_t>(group->ranks.size())) {
        call.members.push_back(group->ranks[static_cast<size_t>(peer)]);
      }
    }
  }
  return call;
}

void Put(Writer& to, const CallStatus& call) {
  to.Put(call.group).Put(call.channel).Put(call.operation).Put(call.seq).Put(call.state).Put(call.age_ns);
  to.Put(call.description).Put(call.site).Put(call.group_name);
  to.Put(static_cast<int64_t>(call.members.size()));
  for (const int member : call.members) to.Put(member);
}

CallStatus CallFrom(Reader& from) {
  CallStatus call;
  call.group = from.Number();
  call.channel = from.Number();
  call.operation = from.Number();
  call.seq = from.Number();
  call.state = from.Number();
  call.age_ns = from.Number();
  call.description = from.Text();
  call.site = from.Text();
  call.group_name = from.Text();
  for (int64_t left = from.Number(); left > 0 && from.ok(); --left) call.members.push_back(static_cast<int>(from.Number()));
  return call;
}

void Put(Writer& to, const std::vector<CallStatus>& calls) {
  to.Put(static_cast<int64_t>(calls.size()));
  for (const CallStatus& call : calls) Put(to, call);
}

std::vector<CallStatus> CallsFrom(Reader& from) {
  std::vector<CallStatus> calls;
  for (int64_t left = from.Number(); left > 0 && from.ok(); --left) calls.push_back(CallFrom(from));
  return calls;
}

}  // namespace

Status StatusOfThisProcess(int rank) {
  Status status;
  status.rank = rank;
  const int64_t now = NowNs();
  for (const Record& record : RecordsUnderWay()) status.under_way.push_back(CallStatusOf(record, now));
  std::set<std::tuple<int64_t, int64_t, bool>> seen;
  const std::vector<Record> records = Records();
  status.has_all = records.empty() || records.front().id == 0;
  for (auto record = records.rbegin(); record != records.rend(); ++record) {
    if (record->is_under_way() || record->operation >= kFirstWait) continue;
    if (!seen.emplace(record->group, record->channel, record->is_collective()).second) continue;
    if (status.last.size() == kLastChannels) {
      status.has_all = false;
      break;
    }
    status.last.push_back(CallStatusOf(*record, now));
  }
  return status;
}

std::string Packed(const Status& status) {
  Writer writer;
  writer.Put(status.rank);
  Put(writer, status.under_way);
  Put(writer, status.last);
  writer.Put(status.has_all ? 1 : 0);
  return writer.text();
}

bool Unpack(const std::string& text, Status* status) {
  Reader reader(text);
  status->rank = static_cast<int>(reader.Number());
  status->under_way = CallsFrom(reader);
  status->last = CallsFrom(reader);
  status->has_all = reader.Number() != 0;
  return reader.ok();
}

std::string Packed(const PythonFrames& frames) {
  return Writer().Put(frames.main_thread).Put(frames.callbacks).Put(frames.by_signal ? 1 : 0).text();
}

bool Unpack(const std::string& text, PythonFrames* frames) {
  Reader reader(text);
  frames->main_thread = reader.Text();
  frames->callbacks = reader.Text();
  frames->by_signal = reader.Number() != 0;
  return reader.ok();
}

// Texts ----------------------------------------------------------------------------------------------------------

std::string RankList(std::vector<int> ranks) {
  std::sort(ranks.begin(), ranks.end());
  std::string text;
  for (size_t first = 0; first < ranks.size();) {
    size_t last = first;
    while (last + 1 < ranks.size() && ranks[last + 1] == ranks[last] + 1) ++last;
    text += (text.empty() ? "" : ", ") + std::to_string(ranks[first]);
    if (last == first + 1) text += ", " + std::to_string(ranks[last]);
    if (last > first + 1) text += "-" + std::to_string(ranks[last]);
    first = last + 1;
  }
  return (ranks.size() == 1 ? "rank " : "ranks ") + text;
}

std::string LimitText(int64_t ns) {
  char text[32];
  std::snprintf(text, sizeof(text), "%g s", static_cast<double>(ns) / 1e9);
  return text;
}

std::string Seconds(int64_t ns) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.1f s", static_cast<double>(ns) / 1e9);
  return text;
}

namespace {

// "collective 17 of world, allreduce(float32[2,3], op=sum), at train.py:12 (step)"
std::string Named(const CallStatus& call) {
  if (call.operation >= kFirstWait) {
    return call.description + (call.group_name.empty() ? "" : " on communicator " + call.group_name);
  }
  std::string text;
  if (call.seq > 0) text = (call.is_for_all() ? "collective " : "message ") + std::to_string(call.seq) + " of ";
  text += "communicator " + call.group_name;
  if (call.channel > 0) text += " (channel " + std::to_string(call.channel) + ")";
  text += ", " + call.description;
  return call.site.empty() ? text : text + ", at " + call.site;
}

// The innermost frames of a stack that are not JAX's or this package's; of all frames if there are no others.
std::string UsersFrames(const std::string& stack) {
  std::string users, all;
  size_t users_lines = 0, all_lines = 0;
  std::istringstream lines(stack);
  for (std::string line; std::getline(lines, line);) {
    if (all_lines++ < kStackLines) all += "    " + line + "\n";
    const bool is_library = line.find("/jax/_src/") != std::string::npos || line.find("/pycollective/") != std::string::npos;
    if (!is_library && users_lines++ < kStackLines) users += "    " + line + "\n";
  }
  return users.empty() ? all : users;
}

bool HasEnded(const Status& status) {
  return std::any_of(status.under_way.begin(), status.under_way.end(),
                     [](const CallStatus& call) { return call.is_wait(kEnd); });
}

// The verdict on two ranks in one collective, by the name that PyTorch gives it; "" if they match.
std::string Mismatch(const CallStatus& a, const CallStatus& b) {
  if (a.operation != b.operation) return "COLLECTIVE_TYPE_MISMATCH";
  if (a.description == b.description) return "";
  const auto dtype = [](const CallStatus& call) { return call.description.substr(0, call.description.find('[')); };
  return dtype(a) != dtype(b) ? "COLLECTIVE_DTYPE_MISMATCH" : "SIZE_OR_SYNTAX_MISMATCH";
}

// What is wrong with the calls on one channel of a group, as far as its ranks tell.
class ChannelReport {
 public:
  void Add(int rank, const CallStatus& call) {
    waiting_.emplace(rank, &call);
    for (const int member : call.members) members_.insert(member);
  }

  // The ranks that do not wait on this channel although others do.
  std::vector<int> Missing() const {
    std::vector<int> missing;
    for (const int member : members_) {
      if (waiting_.count(member) == 0) missing.push_back(member);
    }
    return missing;
  }
  std::vector<int> Waiting() const {
    std::vector<int> waiting;
    for (const auto& [rank, call] : waiting_) waiting.push_back(rank);
    return waiting;
  }

  // "" if all that wait make the same call.
  std::string Difference() const {
    const auto& [first_rank, first] = *waiting_.begin();
    for (const auto& [rank, call] : waiting_) {
      const std::string who = "rank " + std::to_string(first_rank) + " waits in " + Named(*first) + "; rank " +
                              std::to_string(rank) + " in " + Named(*call);
      if (call->seq != first->seq) return "COLLECTIVE_STATE_MISMATCH: " + who;
      const std::string mismatch = Mismatch(*first, *call);
      if (!mismatch.empty()) return mismatch + ": " + who;
    }
    return "";
  }

 private:
  std::map<int, const CallStatus*> waiting_;
  std::set<int> members_;
};

using Channels = std::map<std::pair<int64_t, int64_t>, ChannelReport>;

Channels ChannelsOf(const std::vector<Status>& statuses) {
  Channels channels;
  for (const Status& status : statuses) {
    for (const CallStatus& call : status.under_way) {
      if (!call.is_for_all() || call.state != kStarted) continue;
      channels[{call.group, call.operation < kFirstWait ? call.channel : -call.operation}].Add(status.rank, call);
    }
  }
  return channels;
}

// Whether a rank has certainly not made a call that another rank waits in.
bool HasNotMade(const Status& status, const CallStatus& call) {
  for (const CallStatus& last : status.last) {
    if (last.group == call.group && last.channel == call.channel && last.is_for_all() == call.is_for_all()) {
      return !call.is_for_all() || last.seq < call.seq;
    }
  }
  return status.has_all || !call.is_for_all();
}

}  // namespace

bool WaitForEnded(const std::vector<Status>& statuses, const std::vector<SilentRank>& silent) {
  std::map<int, const Status*> ended;  // nullptr: nobody knows what it has done
  for (const Status& status : statuses) {
    if (HasEnded(status)) ended[status.rank] = &status;
  }
  for (const SilentRank& rank : silent) {
    if (rank.has_ended) ended[rank.rank] = nullptr;
  }
  for (const Status& status : statuses) {
    for (const CallStatus& call : status.under_way) {
      if (call.is_wait(kEnd) || call.state != kStarted || call.age_ns < kLongNs) continue;
      for (const int member : call.members) {
        const auto found = ended.find(member);
        if (found == ended.end()) continue;
        if (found->second == nullptr || HasNotMade(*found->second, call)) return true;
      }
    }
  }
  return false;
}

bool IsLongWait(const std::vector<Status>& statuses, int64_t limit_ns) {
  if (limit_ns == 0) return false;
  for (const Status& status : statuses) {
    for (const CallStatus& call : status.under_way) {
      if (!call.is_wait(kEnd) && call.age_ns > limit_ns) return true;
    }
  }
  return false;
}

namespace {

// Who makes the others wait.
struct Verdict {
  std::set<int> idle;       // make no call
  std::set<int> blamed;     // others wait for these, which do not wait themselves
  std::string differences;  // between calls that should match
  std::string circle;       // how ranks wait for each other; "" if they do not
};

// All ranks of a channel may be in one call that does not end, since a device of one of them waits for another device of
// that rank: such a rank does not wait for the others there.
//
// Whoever waits in a message is not to blame, but the rank at its other end, unless that one waits for others too. If all
// wait, it is those at the other end that are in no message: a send waits for a receive that is left out.
Verdict VerdictOn(const std::vector<Status>& statuses) {
  Verdict verdict;
  for (const Status& status : statuses) {
    if (status.under_way.empty()) verdict.idle.insert(status.rank);
  }
  const Channels channels = ChannelsOf(statuses);
  std::set<int> waiting;
  for (const auto& [key, channel] : channels) {
    if (channel.Missing().empty() && channel.Difference().empty()) continue;
    for (const int rank : channel.Waiting()) waiting.insert(rank);
  }
  std::set<int> in_message, other_ends;
  for (const Status& status : statuses) {
    for (const CallStatus& call : status.under_way) {
      if (call.is_for_all() || call.is_wait(kEnd)) continue;
      in_message.insert(status.rank);
      for (const int member : call.members) {
        if (member != status.rank) other_ends.insert(member);
      }
    }
  }
  waiting.insert(in_message.begin(), in_message.end());
  for (const auto& [key, channel] : channels) {
    const std::string difference = channel.Difference();
    if (!difference.empty()) verdict.differences += "  " + difference + ".\n";
    for (const int rank : channel.Missing()) {
      if (waiting.count(rank) == 0) verdict.blamed.insert(rank);
    }
  }
  for (const int rank : other_ends) {
    if (waiting.count(rank) == 0) verdict.blamed.insert(rank);
  }
  if (!verdict.blamed.empty() || !verdict.differences.empty()) return verdict;
  std::set_difference(other_ends.begin(), other_ends.end(), in_message.begin(), in_message.end(),
                      std::inserter(verdict.blamed, verdict.blamed.end()));
  if (!verdict.blamed.empty()) return verdict;
  if (channels.size() > 1) {
    verdict.circle = "in calls on different communicators or channels";
  } else if (!in_message.empty()) {
    verdict.circle = "in messages that no rank sends or no rank receives";
  }
  return verdict;
}

// Whether Python's frames tell where a rank stands, and nothing else does.
bool HasNoPlace(const Status& status, const Verdict& verdict) {
  if (HasEnded(status)) return false;
  if (verdict.blamed.count(status.rank) != 0) return true;
  return !status.under_way.empty() && std::all_of(status.under_way.begin(), status.under_way.end(),
                                                  [](const CallStatus& call) { return call.site.empty(); });
}

}  // namespace

std::vector<int> RanksWithoutPlace(const std::vector<Status>& statuses) {
  const Verdict verdict = VerdictOn(statuses);
  std::vector<int> ranks;
  for (const Status& status : statuses) {
    if (HasNoPlace(status, verdict)) ranks.push_back(status.rank);
  }
  return ranks;
}

std::string DescribeAll(const std::vector<Status>& statuses, const std::vector<SilentRank>& silent) {
  const Verdict verdict = VerdictOn(statuses);
  std::string text;
  // Who waits where: one line for all ranks that say the same.
  std::map<std::string, std::pair<std::vector<int>, int64_t>> waits;
  for (const Status& status : statuses) {
    for (const CallStatus& call : status.under_way) {
      auto& [ranks, age_ns] = waits[call.is_wait(kEnd) ? "ended, and waited for the others" : "waited in " + Named(call)];
      ranks.push_back(status.rank);
      age_ns = std::max(age_ns, call.age_ns);
    }
  }
  for (const auto& [what, wait] : waits) {
    text += "  " + RankList(wait.first) + (wait.first.size() == 1 ? " has " : " have ") + what + " for " +
            Seconds(wait.second) + ".\n";
  }
  for (const Status& status : statuses) {
    if (verdict.idle.count(status.rank) == 0) continue;
    text += "  " + RankList({status.rank}) + " makes no call. ";
    if (status.last.empty()) {
      text += "It has made none yet.";
    } else {
      text += "Its last one was " + Named(status.last.front()) + ", " + Seconds(status.last.front().age_ns) + " ago.";
    }
    text += "\n";
  }
  std::map<std::pair<std::string, std::string>, std::vector<int>> stacks;
  for (const Status& status : statuses) {
    const std::string how = status.stacks.by_signal ? kBySignal : "";
    const std::string frames = UsersFrames(status.stacks.main_thread);
    if (!frames.empty()) stacks[{"Python on ", how + ":\n" + frames}].push_back(status.rank);
    const bool is_blamed = verdict.blamed.count(status.rank) != 0;
    const std::string callbacks = is_blamed ? UsersFrames(status.stacks.callbacks) : "";
    if (!callbacks.empty()) stacks[{"A callback of a program on ", how + ":\n" + callbacks}].push_back(status.rank);
  }
  for (const auto& [what, ranks] : stacks) text += "  " + what.first + RankList(ranks) + what.second;
  std::map<std::string, std::vector<int>> without;
  for (const SilentRank& rank : silent) without[rank.why].push_back(rank.rank);
  for (const auto& [why, ranks] : without) text += "  " + RankList(ranks) + " " + why + ".\n";

  text += verdict.differences;
  if (!verdict.blamed.empty()) {
    text += "  Look at " + RankList({verdict.blamed.begin(), verdict.blamed.end()}) + ": the others wait for " +
            (verdict.blamed.size() == 1 ? "it" : "them") + ".\n";
  } else if (!verdict.circle.empty()) {
    text += "  The ranks wait for each other, " + verdict.circle + ".\n";
  }
  return text;
}

}  // namespace pycollective
