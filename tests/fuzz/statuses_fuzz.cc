// Statuses and frames of Python that other ranks send, and the report on them: whatever a rank says, it is read to its end or
// refused, and a report is made.

#include <algorithm>
#include <string>
#include <vector>

#include "base/operations.h"
#include "input.h"
#include "monitor/heard.h"
#include "monitor/rank_runs.h"
#include "monitor/side_channel.h"
#include "monitor/status.h"

using namespace pycollective;

namespace {

constexpr int kSize = 40;  // ranks of the job: enough for members in more than kMostRuns runs

// A call as a rank may send it. Numbers are often small, so that calls of several statuses meet.
CallStatus Call(Input& input) {
  CallStatus call;
  call.group = input.Number();
  call.channel = input.Number();
  call.operation = input.Below(2) == 0 ? input.Below(kFirstWait + 8) : input.Number();
  call.seq = input.Number();
  call.state = input.Below(2) == 0 ? int64_t{kStarted} : input.Number();
  call.age_ns = input.Number();
  call.description = input.Text(8);
  call.site = input.Text(4);
  call.group_name = input.Text(4);
  for (int members = input.Below(8) == 0 ? 60 : input.Below(6); members > 0; --members) call.members.push_back(input.Below(kSize));
  SortRanks(&call.members);
  if (input.Below(2) == 0) call.group_size = input.Below(4) == 0 ? input.Number() : static_cast<int64_t>(call.members.size());
  return call;
}

Status StatusOf(Input& input) {
  Status status;
  for (int ranks = 1 + input.Below(4); ranks > 0; --ranks) status.ranks.push_back(input.Below(kSize));
  SortRanks(&status.ranks);
  for (int calls = input.Below(4); calls > 0; --calls) status.under_way.push_back(Call(input));
  for (int calls = input.Below(4); calls > 0; --calls) status.last.push_back(Call(input));
  status.has_all = input.Below(2) == 0;
  return status;
}

// What was read is written and read again as the same. The text may be longer.
void Read(const std::string& text, std::vector<Status>* statuses) {
  Reader reader(text);
  const std::vector<Status> read = StatusesFrom(reader, kSize);
  if (!reader.ok()) return;
  const auto packed = [](const std::vector<Status>& some) {
    Writer writer;
    Put(writer, some);
    return writer.text();
  };
  const std::string again = packed(read);
  ALWAYS(again.size() <= text.size());
  Reader of_again(again);
  ALWAYS(packed(StatusesFrom(of_again, kSize)) == again && of_again.ok() && of_again.Rest().empty());
  for (size_t cut : {size_t{0}, again.size() / 2, again.size() - 1}) {
    const std::string part = again.substr(0, cut);
    Reader of_part(part);
    StatusesFrom(of_part, kSize);
    ALWAYS(!of_part.ok());
  }
  for (const Status& status : read) {
    ALWAYS(std::is_sorted(status.ranks.begin(), status.ranks.end()));
    ALWAYS(status.ranks.empty() || (status.ranks.front() >= 0 && status.ranks.back() < kSize));
  }
  statuses->insert(statuses->end(), read.begin(), read.end());
}

// What a head tells of its part.
Heard HeardOf(Input& input) {
  Heard heard;
  for (int statuses = input.Below(4); statuses > 0; --statuses) heard.statuses.push_back(StatusOf(input));
  for (int unheard = input.Below(4); unheard > 0; --unheard) {
    const int flags = input.Below(8);
    heard.unheard.push_back({input.Below(kSize), (flags & 1) != 0, (flags & 2) != 0, (flags & 4) != 0, input.Number()});
  }
  return heard;
}

void ReadHeard(const std::string& text, const std::vector<int>& ranks) {
  Heard heard, again;
  if (!Unpack(text, kSize, ranks, &heard)) return;
  ALWAYS(!ranks.empty() && heard.ranks() == ranks);
  for (const Unheard& one : heard.unheard) ALWAYS(one.rank != ranks.front());
  const std::string packed = Packed(heard);
  ALWAYS(Unpack(packed, kSize, ranks, &again) && Packed(again) == packed && packed.size() <= text.size());
}

// What the rank that answers for its host, or reports, does with what others say.
void Join(const std::vector<Status>& statuses) {
  const std::vector<Status> joined = Joined(statuses);
  std::vector<int> before, after;
  for (const Status& status : statuses) before.insert(before.end(), status.ranks.begin(), status.ranks.end());
  for (const Status& status : joined) after.insert(after.end(), status.ranks.begin(), status.ranks.end());
  SortRanks(&before);
  SortRanks(&after);
  ALWAYS(before == after && joined.size() <= statuses.size());
  for (const int64_t limit_ns : {int64_t{1}, int64_t{5}}) ALWAYS(IsLongWait(joined, limit_ns) == IsLongWait(statuses, limit_ns));
  ALWAYS(Joined(joined).size() == joined.size());
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Input input(data, size);
  std::vector<Status> statuses;
  std::vector<SilentRank> silent;
  std::vector<RankFrames> frames;
  while (!input.is_over() && statuses.size() < 8) {
    const int way = input.Below(8);
    if (way == 0) {
      silent.push_back({input.Below(kSize), input.Text(8), input.Below(2) == 0, input.Text(2)});
    } else if (way == 1) {
      Read(input.Text(255), &statuses);
    } else if (way == 3) {
      const Heard heard = HeardOf(input);
      std::string text = Packed(heard);
      if (input.Below(2) == 0) text[static_cast<size_t>(input.Number()) % text.size()] = static_cast<char>(input.Byte());
      ReadHeard(text, heard.ranks());
    } else if (way == 2) {  // a status, of which a byte is changed
      Writer writer;
      Put(writer, {StatusOf(input)});
      std::string text = writer.text();
      text[static_cast<size_t>(input.Number()) % text.size()] = static_cast<char>(input.Byte());
      Read(text, &statuses);
    } else {
      Writer writer;
      Put(writer, {StatusOf(input)});
      Read(writer.text(), &statuses);
    }
    if (!statuses.empty() && input.Below(4) == 0) {
      const std::string text = input.Text(255);
      RankFrames of_rank{input.Below(kSize), {}};
      if (Unpack(text, &of_rank.frames)) frames.push_back(of_rank);
      of_rank.frames = {input.Text(40), input.Text(40), input.Below(2) == 0};
      ALWAYS(Unpack(Packed(of_rank.frames), &of_rank.frames));
      frames.push_back(of_rank);
    }
  }
  const std::string report = DescribeAll(statuses, silent, frames);
  ALWAYS(report.empty() || report.back() == '\n');
  ALWAYS(RanksWithoutPlace(statuses).size() <= kMostFrames);
  Join(statuses);
  WaitForEnded(statuses, silent);
  ALWAYS(!IsLongWait(statuses, 0));
  IsLongWait(statuses, 1);
  return 0;
}
