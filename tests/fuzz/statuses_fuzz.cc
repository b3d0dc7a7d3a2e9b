// Statuses and frames of Python that other ranks send, and the report on them: whatever a rank says, it is read to its end or
// refused, and a report is made.

#include <string>
#include <vector>

#include "base/operations.h"
#include "input.h"
#include "monitor/side_channel.h"
#include "monitor/status.h"

using namespace pycollective;

namespace {

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
  for (int members = input.Below(6); members > 0; --members) call.members.push_back(static_cast<int>(input.Number()));
  return call;
}

Status StatusOf(Input& input) {
  Status status;
  status.rank = static_cast<int>(input.Number());
  for (int calls = input.Below(4); calls > 0; --calls) status.under_way.push_back(Call(input));
  for (int calls = input.Below(4); calls > 0; --calls) status.last.push_back(Call(input));
  status.has_all = input.Below(2) == 0;
  return status;
}

// What was read is written and read again as the same. The text may be longer.
void Read(const std::string& text, std::vector<Status>* statuses) {
  Status status, again;
  if (!Unpack(text, &status)) return;
  const std::string packed = Packed(status);
  ALWAYS(Unpack(packed, &again) && Packed(again) == packed);
  ALWAYS(packed.size() <= text.size());
  for (size_t cut : {size_t{0}, packed.size() / 2, packed.size() - 1}) ALWAYS(!Unpack(packed.substr(0, cut), &again));
  statuses->push_back(status);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Input input(data, size);
  std::vector<Status> statuses;
  std::vector<SilentRank> silent;
  while (!input.is_over() && statuses.size() < 8) {
    const int way = input.Below(8);
    if (way == 0) {
      silent.push_back({static_cast<int>(input.Number()), input.Text(8), input.Below(2) == 0});
    } else if (way == 1) {
      Read(input.Text(255), &statuses);
    } else if (way == 2) {  // a status, of which a byte is changed
      std::string text = Packed(StatusOf(input));
      text[static_cast<size_t>(input.Number()) % text.size()] = static_cast<char>(input.Byte());
      Read(text, &statuses);
    } else {
      Read(Packed(StatusOf(input)), &statuses);
    }
    if (!statuses.empty() && input.Below(4) == 0) {
      PythonFrames frames;
      const std::string text = input.Text(255);
      if (Unpack(text, &frames)) statuses.back().stacks = frames;
      frames = {input.Text(40), input.Text(40), input.Below(2) == 0};
      ALWAYS(Unpack(Packed(frames), &statuses.back().stacks));
    }
  }
  const std::string report = DescribeAll(statuses, silent);
  ALWAYS(report.empty() || report.back() == '\n');
  ALWAYS(RanksWithoutPlace(statuses).size() <= statuses.size());
  WaitForEnded(statuses, silent);
  ALWAYS(!IsLongWait(statuses, 0));
  IsLongWait(statuses, 1);
  return 0;
}
