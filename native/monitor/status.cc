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
#include "monitor/rank_runs.h"
#include "monitor/side_channel.h"

namespace pycollective {
namespace {

constexpr size_t kLastChannels = 256;
constexpr size_t kStackLines = 8;
constexpr size_t kMostLines = 16;   // of a report, on one matter
constexpr size_t kMostPieces = 32;  // of a list of ranks
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
    SortRanks(&call.members);
    if (call.is_for_all()) call.group_size = static_cast<int64_t>(call.members.size());
  }
  return call;
}

void Put(Writer& to, const CallStatus& call) {
  to.Put(call.group).Put(call.channel).Put(call.operation).Put(call.seq).Put(call.state).Put(call.age_ns);
  to.Put(call.description).Put(call.site).Put(call.group_name).Put(call.group_size);
  PutRanks(to, call.group_size > 0 && RunCount(call.members) > kMostRuns ? std::vector<int>() : call.members);
}

CallStatus CallFrom(Reader& from, int size) {
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
  call.group_size = from.Number();
  call.members = RanksFrom(from, size);
  return call;
}

void Put(Writer& to, const std::vector<CallStatus>& calls) {
  to.Put(static_cast<int64_t>(calls.size()));
  for (const CallStatus& call : calls) Put(to, call);
}

std::vector<CallStatus> CallsFrom(Reader& from, int size) {
  std::vector<CallStatus> calls;
  for (int64_t left = from.Number(); left > 0 && from.ok(); --left) calls.push_back(CallFrom(from, size));
  return calls;
}

// The last call of each channel that has ended, the latest in front. `has_all`: whether there are no others.
std::vector<CallStatus> LastCalls(int64_t now, bool* has_all) {
  std::vector<CallStatus> last;
  std::set<std::tuple<int64_t, int64_t, bool>> seen;
  const std::vector<Record> records = Records();
  // No slot has been used twice. The record with number 0 may be there all the same: a call under way keeps its slot.
  *has_all = records.empty() || records.back().id < static_cast<int64_t>(kRecords);
  for (auto record = records.rbegin(); record != records.rend(); ++record) {
    if (record->is_under_way() || record->operation >= kFirstWait) continue;
    if (!seen.emplace(record->group, record->channel, record->is_collective()).second) continue;
    if (last.size() == kLastChannels) {
      *has_all = false;
      break;
    }
    last.push_back(CallStatusOf(*record, now));
  }
  return last;
}

bool HasEnded(const Status& status) {
  return std::any_of(status.under_way.begin(), status.under_way.end(),
                     [](const CallStatus& call) { return call.is_wait(kEnd); });
}

// What statuses have in common that are joined: all but their ranks and times.
std::string Common(Status status) {
  status.ranks.clear();
  for (std::vector<CallStatus>* calls : {&status.under_way, &status.last}) {
    for (CallStatus& call : *calls) call.age_ns = 0;
  }
  Writer writer;
  Put(writer, {status});
  return writer.text();
}

// Joins calls that differ in times alone. `newer`: of ages the least counts.
void Join(const std::vector<CallStatus>& calls, bool newer, std::vector<CallStatus>* to) {
  for (size_t i = 0; i < to->size(); ++i) {
    CallStatus& call = (*to)[i];
    call.age_ns = newer ? std::min(call.age_ns, calls[i].age_ns) : std::max(call.age_ns, calls[i].age_ns);
    if (call.lacks_members()) call.members = calls[i].members;
  }
}

}  // namespace

Status StatusOfThisProcess(int rank) {
  Status status;
  status.ranks = {rank};
  const int64_t now = NowNs();
  for (const Record& record : RecordsUnderWay()) status.under_way.push_back(CallStatusOf(record, now));
  const bool has_ended = HasEnded(status);
  if (!status.under_way.empty() && !has_ended) return status;
  bool has_all = false;
  std::vector<CallStatus> last = LastCalls(now, &has_all);
  if (!has_ended && last.size() > 1) last.resize(1);
  for (size_t i = 1; i < last.size(); ++i) {
    for (std::string* text : {&last[i].description, &last[i].site, &last[i].group_name}) text->clear();
  }
  status.last = std::move(last);
  status.has_all = has_ended && has_all;
  return status;
}

std::vector<Status> Joined(const std::vector<Status>& statuses) {
  std::map<std::string, Status> by_common;
  for (const Status& status : statuses) {
    const auto [place, is_new] = by_common.try_emplace(Common(status), status);
    if (is_new) continue;
    Status& joined = place->second;
    joined.ranks.insert(joined.ranks.end(), status.ranks.begin(), status.ranks.end());
    Join(status.under_way, false, &joined.under_way);
    Join(status.last, true, &joined.last);
  }
  std::vector<Status> all;
  for (auto& [common, status] : by_common) {
    SortRanks(&status.ranks);
    all.push_back(std::move(status));
  }
  std::sort(all.begin(), all.end(), [](const Status& a, const Status& b) { return a.ranks < b.ranks; });
  return all;
}

void Put(Writer& to, const std::vector<Status>& statuses) {
  to.Put(static_cast<int64_t>(statuses.size()));
  for (const Status& status : statuses) {
    PutRanks(to, status.ranks);
    Put(to, status.under_way);
    Put(to, status.last);
    to.Put(status.has_all ? 1 : 0);
  }
}

std::vector<Status> StatusesFrom(Reader& from, int size) {
  std::vector<Status> statuses;
  for (int64_t left = from.Number(); left > 0 && from.ok(); --left) {
    Status status;
    status.ranks = RanksFrom(from, size);
    status.under_way = CallsFrom(from, size);
    status.last = CallsFrom(from, size);
    status.has_all = from.Number() != 0;
    statuses.push_back(std::move(status));
  }
  return statuses;
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
  size_t pieces = 0;
  for (size_t first = 0; first < ranks.size();) {
    if (pieces++ == kMostPieces) return "ranks " + text + " and " + std::to_string(ranks.size() - first) + " others";
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

// The verdict on two ranks in one collective, by the name that PyTorch gives it; "" if they match.
std::string Mismatch(const CallStatus& a, const CallStatus& b) {
  if (a.operation != b.operation) return "COLLECTIVE_TYPE_MISMATCH";
  if (a.description == b.description) return "";
  const auto dtype = [](const CallStatus& call) { return call.description.substr(0, call.description.find('[')); };
  return dtype(a) != dtype(b) ? "COLLECTIVE_DTYPE_MISMATCH" : "SIZE_OR_SYNTAX_MISMATCH";
}

// "rank 1 waits", "ranks 0, 2 wait"
std::string WaitsText(const std::vector<int>& ranks) { return RankList(ranks) + (ranks.size() == 1 ? " waits" : " wait"); }

// What is wrong with the calls on one channel of a group, as far as its ranks tell.
class ChannelReport {
 public:
  void Add(const Status& status, const CallStatus& call) {
    waits_.push_back({&status, &call});
    waiting_.insert(status.ranks.begin(), status.ranks.end());
    members_.insert(call.members.begin(), call.members.end());
    if (call.lacks_members()) {
      size_ = std::max(size_, static_cast<size_t>(call.group_size));
      name_ = call.group_name;
    }
  }

  // The ranks that do not wait on this channel although others do.
  std::vector<int> Missing() const {
    std::vector<int> missing;
    std::set_difference(members_.begin(), members_.end(), waiting_.begin(), waiting_.end(), std::back_inserter(missing));
    return missing;
  }
  // How many members neither wait nor are known: nobody has told which ranks the group has.
  size_t UnknownCount() const {
    std::set<int> known = members_;
    known.insert(waiting_.begin(), waiting_.end());
    return size_ > known.size() ? size_ - known.size() : 0;
  }
  const std::string& name() const { return name_; }
  const std::set<int>& waiting() const { return waiting_; }

  // "" if all that wait make the same call.
  std::string Difference() const {
    const CallStatus& first = *waits_.front().call;
    for (const Wait& wait : waits_) {
      const std::string mismatch =
          wait.call->seq != first.seq ? "COLLECTIVE_STATE_MISMATCH" : Mismatch(first, *wait.call);
      if (mismatch.empty()) continue;
      return mismatch + ": " + WaitsText(InCall(first)) + " in " + Named(first) + "; " + RankList(InCall(*wait.call)) + " in " +
             Named(*wait.call);
    }
    return "";
  }

 private:
  struct Wait {
    const Status* status;
    const CallStatus* call;
  };
  // The ranks whose call is the same but for its line.
  std::vector<int> InCall(const CallStatus& call) const {
    std::vector<int> ranks;
    for (const Wait& wait : waits_) {
      if (wait.call->seq != call.seq || !Mismatch(*wait.call, call).empty()) continue;
      ranks.insert(ranks.end(), wait.status->ranks.begin(), wait.status->ranks.end());
    }
    SortRanks(&ranks);
    return ranks;
  }

  std::vector<Wait> waits_;  // in the order of the lowest ranks
  std::set<int> waiting_;
  std::set<int> members_;
  size_t size_ = 0;
  std::string name_;
};

using Channels = std::map<std::pair<int64_t, int64_t>, ChannelReport>;

// Whether a rank makes an earlier collective of the same channel: a call that is dispatched ahead is compared while the data of the earlier
// ones are under way.
bool ComesAfterAnother(const CallStatus& call, const Status& status) {
  return std::any_of(status.under_way.begin(), status.under_way.end(), [&](const CallStatus& other) {
    return other.is_for_all() && other.state == kStarted && other.operation < kFirstWait && call.operation < kFirstWait &&
           other.group == call.group && other.channel == call.channel && other.seq < call.seq;
  });
}

Channels ChannelsOf(const std::vector<Status>& statuses) {
  Channels channels;
  for (const Status& status : statuses) {
    for (const CallStatus& call : status.under_way) {
      if (!call.is_for_all() || call.state != kStarted || ComesAfterAnother(call, status)) continue;
      channels[{call.group, call.operation < kFirstWait ? call.channel : -call.operation}].Add(status, call);
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
    if (!HasEnded(status)) continue;
    for (const int rank : status.ranks) ended[rank] = &status;
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
  std::set<int> blamed;     // others wait for these, which do not wait themselves
  std::string differences;  // between calls that should match
  std::string circle;       // how ranks wait for each other; "" if they do not
  std::string unknown;      // of which groups nobody knows who is missing
};

// All ranks of a channel may be in one call that does not end, since a device of one of them waits for another device of
// that rank: such a rank does not wait for the others there.
//
// A rank that waits in a message is not to blame, but the rank at its other end, unless that rank waits for others too. If all
// wait, it is those at the other end that are in no message: a send waits for a receive that is left out.
Verdict VerdictOn(const std::vector<Status>& statuses) {
  Verdict verdict;
  const Channels channels = ChannelsOf(statuses);
  std::set<int> waiting;
  for (const auto& [key, channel] : channels) {
    if (channel.Missing().empty() && channel.UnknownCount() == 0 && channel.Difference().empty()) continue;
    waiting.insert(channel.waiting().begin(), channel.waiting().end());
  }
  std::set<int> in_message, other_ends;
  for (const Status& status : statuses) {
    for (const CallStatus& call : status.under_way) {
      if (call.is_for_all() || call.is_wait(kEnd)) continue;
      in_message.insert(status.ranks.begin(), status.ranks.end());
      const bool is_of_one = status.ranks.size() == 1;  // a rank that waits for itself is to blame by no other
      for (const int member : call.members) {
        if (!is_of_one || member != status.ranks.front()) other_ends.insert(member);
      }
    }
  }
  waiting.insert(in_message.begin(), in_message.end());
  size_t differences = 0, unknown = 0;
  for (const auto& [key, channel] : channels) {
    const std::string difference = channel.Difference();
    if (!difference.empty() && differences++ < kMostLines) verdict.differences += "  " + difference + ".\n";
    if (const size_t count = channel.UnknownCount(); count > 0 && unknown++ < kMostLines) {
      verdict.unknown += "  " + std::to_string(count) + (count == 1 ? " rank" : " ranks") + " of communicator " + channel.name() +
                         (count == 1 ? " is" : " are") + " not in this call; the ranks that answer do not know which.\n";
    }
    for (const int rank : channel.Missing()) {
      if (waiting.count(rank) == 0) verdict.blamed.insert(rank);
    }
  }
  if (differences > kMostLines) {
    verdict.differences += "  Calls differ on " + std::to_string(differences - kMostLines) + " more channels.\n";
  }
  for (const int rank : other_ends) {
    if (waiting.count(rank) == 0) verdict.blamed.insert(rank);
  }
  if (!verdict.blamed.empty() || !verdict.differences.empty()) return verdict;
  std::set_difference(other_ends.begin(), other_ends.end(), in_message.begin(), in_message.end(),
                      std::inserter(verdict.blamed, verdict.blamed.end()));
  if (!verdict.blamed.empty() || !verdict.unknown.empty()) return verdict;
  if (channels.size() > 1) {
    verdict.circle = "in calls on different communicators or channels";
  } else if (!in_message.empty()) {
    verdict.circle = "in messages that no rank sends or no rank receives";
  }
  return verdict;
}

// The ranks of a status where Python's frames tell where they stand, and nothing else does.
std::vector<int> WithoutPlace(const Status& status, const Verdict& verdict) {
  if (HasEnded(status)) return {};
  const auto lacks_line = [](const CallStatus& call) { return call.site.empty(); };
  if (!status.under_way.empty() && std::all_of(status.under_way.begin(), status.under_way.end(), lacks_line)) return status.ranks;
  std::vector<int> blamed;
  for (const int rank : status.ranks) {
    if (verdict.blamed.count(rank) != 0) blamed.push_back(rank);
  }
  return blamed;
}

// A call as it stands in a report on many calls: without its number, and a message without the ranks at its ends.
std::string BrieflyNamed(const CallStatus& call) {
  const size_t shape_end = call.is_for_all() ? std::string::npos : call.description.rfind(')');
  const std::string what = call.description.substr(0, shape_end == std::string::npos ? shape_end : shape_end + 1);
  return call.site.empty() ? what : what + ", at " + call.site;
}

// Ranks of which a report says the same.
struct Line {
  std::vector<int> ranks;
  int64_t age_ns = 0;
  std::set<std::string> groups;
};
using Lines = std::map<std::string, Line>;

// Adds ranks to a line. `newer`: of ages the least counts.
Line& AddTo(Lines* lines, const std::string& what, const Status& status, int64_t age_ns, bool newer) {
  const auto [place, is_new] = lines->try_emplace(what);
  Line& line = place->second;
  line.ranks.insert(line.ranks.end(), status.ranks.begin(), status.ranks.end());
  line.age_ns = is_new ? age_ns : newer ? std::min(line.age_ns, age_ns) : std::max(line.age_ns, age_ns);
  return line;
}

// Writes each line by text(what, line); of many the lines with the fewest ranks, and which ranks the others have.
template <typename Text>
std::string Written(const Lines& lines, const std::string& others_do, const Text& text_of) {
  std::vector<Lines::const_iterator> order;
  for (auto line = lines.begin(); line != lines.end(); ++line) order.push_back(line);
  if (order.size() > kMostLines) {
    std::stable_sort(order.begin(), order.end(),
                     [](const auto& a, const auto& b) { return a->second.ranks.size() < b->second.ranks.size(); });
  }
  std::string text;
  std::vector<int> others;
  for (size_t i = 0; i < order.size(); ++i) {
    std::vector<int> ranks = order[i]->second.ranks;
    if (i < kMostLines) {
      SortRanks(&ranks);
      text += "  " + text_of(order[i]->first, ranks, order[i]->second) + "\n";
    } else {
      others.insert(others.end(), ranks.begin(), ranks.end());
    }
  }
  if (others.empty()) return text;
  SortRanks(&others);
  return text + "  " + RankList(others) + (others.size() == 1 ? " has " : " have ") + others_do + ".\n";
}

constexpr char kEndedText[] = "ended, and waited for the others";

// Who waits where: one line for all ranks that say the same.
std::string DescribeWaits(const std::vector<Status>& statuses) {
  Lines full, brief;
  for (const Status& status : statuses) {
    for (const CallStatus& call : status.under_way) {
      const bool is_end = call.is_wait(kEnd);
      AddTo(&full, is_end ? kEndedText : "waited in " + Named(call), status, call.age_ns, false);
      Line& line = AddTo(&brief, is_end ? kEndedText : "waited in " + BrieflyNamed(call), status, call.age_ns, false);
      if (!is_end && !call.group_name.empty()) line.groups.insert(call.group_name);
    }
  }
  const auto text_of = [](const std::string& what, const std::vector<int>& ranks, const Line& line) {
    const std::string on = line.groups.empty()       ? ""
                           : line.groups.size() == 1 ? " on communicator " + *line.groups.begin()
                                                     : " on " + std::to_string(line.groups.size()) + " communicators";
    return RankList(ranks) + (ranks.size() == 1 ? " has " : " have ") + what + on + " for " + Seconds(line.age_ns) + ".";
  };
  return Written(full.size() > kMostLines ? brief : full, "waited in other calls", text_of);
}

std::string DescribeIdle(const std::vector<Status>& statuses) {
  Lines idle;
  for (const Status& status : statuses) {
    if (!status.under_way.empty()) continue;
    if (status.last.empty()) {
      AddTo(&idle, "", status, 0, true);
    } else {
      AddTo(&idle, Named(status.last.front()), status, status.last.front().age_ns, true);
    }
  }
  return Written(idle, "made no call, after other calls", [](const std::string& what, const std::vector<int>& ranks, const Line& line) {
    const bool is_one = ranks.size() == 1;
    const std::string begin = RankList(ranks) + (is_one ? " makes no call. " : " make no call. ");
    if (what.empty()) return begin + (is_one ? "It has made none yet." : "They have made none yet.");
    return begin + (is_one ? "Its last one was " : "Their last one was ") + what + ", " + Seconds(line.age_ns) +
           (is_one ? " ago." : " ago or more.");
  });
}

std::string DescribeFrames(const std::vector<Status>& statuses, const std::vector<RankFrames>& frames, const Verdict& verdict) {
  std::map<std::pair<std::string, std::string>, std::vector<int>> stacks;
  for (const RankFrames& of_rank : frames) {
    const std::string how = of_rank.frames.by_signal ? kBySignal : "";
    const std::string shown = UsersFrames(of_rank.frames.main_thread);
    if (!shown.empty()) stacks[{"Python on ", how + ":\n" + shown}].push_back(of_rank.rank);
    const bool is_blamed = verdict.blamed.count(of_rank.rank) != 0;
    const std::string callbacks = is_blamed ? UsersFrames(of_rank.frames.callbacks) : "";
    if (!callbacks.empty()) stacks[{"A callback of a program on ", how + ":\n" + callbacks}].push_back(of_rank.rank);
  }
  std::string text;
  for (const auto& [what, ranks] : stacks) text += "  " + what.first + RankList(ranks) + what.second;
  size_t without_place = 0;
  for (const Status& status : statuses) without_place += WithoutPlace(status, verdict).size();
  if (!text.empty() && without_place > kMostFrames) {
    text += "  Of " + std::to_string(without_place) + " ranks whose place in Python matters, " + std::to_string(kMostFrames) +
            " were asked.\n";
  }
  return text;
}

std::string DescribeSilent(const std::vector<SilentRank>& silent) {
  constexpr size_t kSingly = 4;  // so many ranks of one kind have a line of their own
  std::map<std::string, size_t> counts;
  for (const SilentRank& rank : silent) ++counts[rank.why_of_many];
  std::map<std::string, std::vector<int>> without;
  for (const SilentRank& rank : silent) {
    const bool is_of_many = !rank.why_of_many.empty() && counts[rank.why_of_many] > kSingly;
    without[is_of_many ? rank.why_of_many : rank.why].push_back(rank.rank);
  }
  Lines lines;
  for (auto& [why, ranks] : without) lines[why].ranks = ranks;
  return Written(lines, "not answered either", [](const std::string& why, const std::vector<int>& ranks, const Line&) {
    return RankList(ranks) + " " + why + ".";
  });
}

}  // namespace

std::vector<int> RanksWithoutPlace(const std::vector<Status>& statuses) {
  const Verdict verdict = VerdictOn(statuses);
  std::vector<std::vector<int>> all;
  size_t longest = 0;
  for (const Status& status : statuses) {
    all.push_back(WithoutPlace(status, verdict));
    longest = std::max(longest, all.back().size());
  }
  std::vector<int> ranks;
  for (size_t turn = 0; turn < longest; ++turn) {
    for (const std::vector<int>& of_status : all) {
      if (turn < of_status.size() && ranks.size() < kMostFrames) ranks.push_back(of_status[turn]);
    }
  }
  SortRanks(&ranks);
  return ranks;
}

std::string DescribeAll(const std::vector<Status>& statuses, const std::vector<SilentRank>& silent,
                        const std::vector<RankFrames>& frames) {
  const Verdict verdict = VerdictOn(statuses);
  std::string text = DescribeWaits(statuses) + DescribeIdle(statuses) + DescribeFrames(statuses, frames, verdict) +
                     DescribeSilent(silent) + verdict.differences + verdict.unknown;
  if (!verdict.blamed.empty()) {
    text += "  Look at " + RankList({verdict.blamed.begin(), verdict.blamed.end()}) + ": the others wait for " +
            (verdict.blamed.size() == 1 ? "it" : "them") + ".\n";
  } else if (!verdict.circle.empty()) {
    text += "  The ranks wait for each other, " + verdict.circle + ".\n";
  }
  return text;
}

}  // namespace pycollective
