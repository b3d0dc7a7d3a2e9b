// Tests of a rank's status, and of the report on all ranks.

#include <algorithm>
#include <string>
#include <vector>

#include "base/operations.h"
#include "harness.h"
#include "monitor/status.h"
#include "records/recorder.h"

namespace pycollective {
namespace {

constexpr int64_t kSecondNs = 1000000000;

Record RecordOf(int64_t operation, int64_t group, int64_t channel, int64_t seq, CallState state = kStarted) {
  Record record;
  record.operation = operation;
  record.group = group;
  record.channel = channel;
  record.seq = seq;
  record.state = state;
  record.dtype = 11;  // float32
  record.reduce_op = operation == kAllreduce ? 0 : -1;
  return record;
}

// The status of this process ----------------------------------------------------------------------------------------

void TestCallsUnderWay() {
  AddGroup(7, {"world", {4, 5, 6}});
  AddSite(9, "train.py:3 (step)");
  Record message = RecordOf(kSendrecv, 7, 0, 2);
  message.dest = 2;
  message.source = Record::kAnyPeer;
  message.site = 9;
  Record outside = RecordOf(kSend, 7, 0, 1);
  outside.dest = 3;  // there is no such rank in the group
  Recorded first(RecordOf(kAllreduce, 7, 1, 3)), second(message), third(RecordOf(kSplit, 8, 0, 0)), fourth(outside);
  Recorded scheduled(RecordOf(kBarrier, 7, 0, 5, kScheduled));
  const Status status = StatusOfThisProcess(5);
  CHECK(status.rank == 5 && status.last.empty() && status.has_all && status.under_way.size() == 5);
  const std::vector<CallStatus>& calls = status.under_way;
  CHECK(calls[0].operation == kAllreduce && calls[0].group == 7 && calls[0].channel == 1 && calls[0].seq == 3);
  CHECK(calls[0].group_name == "world" && calls[0].members == (std::vector<int>{4, 5, 6}) && calls[0].state == kStarted);
  CHECK(calls[0].site.empty() && calls[0].description.substr(0, 10) == "allreduce(");
  CHECK(calls[1].members == std::vector<int>{6} && calls[1].site == "train.py:3 (step)");
  CHECK(calls[2].description == "split" && calls[2].members.empty() && calls[2].group_name.empty());
  CHECK(calls[3].members.empty());
  CHECK(calls[4].state == kScheduled && calls[4].members == (std::vector<int>{4, 5, 6}));
  for (size_t i = 0; i + 1 < calls.size(); ++i) CHECK(calls[i].age_ns >= calls[i + 1].age_ns && calls[i + 1].age_ns >= 0);
}

// Of each channel the last call that has ended, collectives and messages apart, the latest in front.
void TestLastCalls() {
  AddGroup(7, {"world", {4, 5, 6}});
  const auto make = [](Record record, CallState end = kCompleted) { Recorded(record).Finish(end); };
  make(RecordOf(kAllreduce, 7, 0, 1));
  make(RecordOf(kAllreduce, 7, 0, 2));
  make(RecordOf(kSend, 7, 0, 1));
  make(RecordOf(kAllreduce, 7, 1, 1), kFailed);
  make(RecordOf(kAllreduce, 8, 0, 1));
  make(RecordOf(kSplit, 7, 0, 0));
  Recorded under_way(RecordOf(kAllreduce, 7, 0, 3));
  const Status status = StatusOfThisProcess(0);
  CHECK(status.under_way.size() == 1 && status.has_all && status.last.size() == 4);
  const std::vector<CallStatus>& last = status.last;
  CHECK(last[0].group == 8 && last[1].channel == 1 && last[2].operation == kSend);
  CHECK(last[3].operation == kAllreduce && last[3].seq == 2 && last[3].members.empty());
  CHECK(last[1].state == kFailed && last[3].age_ns >= last[0].age_ns);
}

// More channels than a status has, and more calls than the ring has.
void TestNotAllIsKnown() {
  for (int64_t channel = 0; channel < 256; ++channel) Recorded(RecordOf(kBarrier, 7, channel, 1)).Finish(kCompleted);
  CHECK(StatusOfThisProcess(0).has_all && StatusOfThisProcess(0).last.size() == 256);
  Recorded(RecordOf(kBarrier, 7, 256, 1)).Finish(kCompleted);
  const Status many = StatusOfThisProcess(0);
  CHECK(!many.has_all && many.last.size() == 256 && many.last.front().channel == 256 && many.last.back().channel == 1);
  for (size_t i = 0; i < kRecords; ++i) Recorded(RecordOf(kBarrier, 7, 0, 2)).Finish(kCompleted);
  const Status lost = StatusOfThisProcess(0);
  CHECK(!lost.has_all && lost.last.size() == 1);
}

// The report ---------------------------------------------------------------------------------------------------------

CallStatus Call(int64_t operation, std::vector<int> members, int64_t seq = 3, int64_t age_ns = 10 * kSecondNs) {
  CallStatus call;
  call.group = 7;
  call.operation = operation;
  call.seq = seq;
  call.state = kStarted;
  call.age_ns = age_ns;
  call.description = operation < kFirstWait ? std::string(kOperationNames[operation]) + "(float32[4])" : "split";
  call.site = "train.py:3 (step)";
  call.group_name = "world";
  call.members = std::move(members);
  return call;
}

Status In(int rank, std::vector<CallStatus> under_way, std::vector<CallStatus> last = {}, bool has_all = true) {
  return {rank, std::move(under_way), std::move(last), has_all, {}};
}

bool Is(const std::string& text, const std::string& expected) {
  if (text == expected) return true;
  std::fprintf(stderr, "expected:\n%sgot:\n%s", expected.c_str(), text.c_str());
  return false;
}

void TestReportOnARankThatIsElsewhere() {
  const CallStatus sum = Call(kAllreduce, {0, 1, 2});
  CallStatus before = Call(kAllgather, {}, 2, 3 * kSecondNs / 2);
  CallStatus longer = sum;
  longer.age_ns = 12 * kSecondNs;
  const std::string waits = "have waited in collective 3 of communicator world, allreduce(float32[4]), at train.py:3 (step) for ";
  CHECK(Is(DescribeAll({In(0, {longer}), In(1, {}, {before}), In(2, {sum})}, {}),
           "  ranks 0, 2 " + waits + "12.0 s.\n"
           "  rank 1 makes no call. Its last one was collective 2 of communicator world, allgather(float32[4]), at train.py:3"
           " (step), 1.5 s ago.\n"
           "  Look at rank 1: the others wait for it.\n"));
  CHECK(Is(DescribeAll({In(0, {Call(kAllreduce, {0, 1, 2, 3})})}, {{1, "is far", false}, {3, "is far", true}, {2, "is here", true}}),
           "  rank 0 has waited in collective 3 of communicator world, allreduce(float32[4]), at train.py:3 (step) for 10.0 s.\n"
           "  ranks 1, 3 is far.\n  rank 2 is here.\n  Look at ranks 1-3: the others wait for them.\n"));
  CHECK(Is(DescribeAll({In(0, {})}, {}), "  rank 0 makes no call. It has made none yet.\n"));
}

// The calls of two ranks on one channel.
std::string Differences(const CallStatus& one, const CallStatus& other) {
  const std::string text = DescribeAll({In(0, {one}), In(1, {other})}, {});
  const size_t begin = text.find("MATCH: ");
  return begin == std::string::npos ? "" : text.substr(text.rfind("  ", begin) + 2);
}

void TestCallsThatDiffer() {
  const CallStatus sum = Call(kAllreduce, {0, 1});
  const std::string who = ": rank 0 waits in collective 3 of communicator world, allreduce(float32[4]), at train.py:3 (step); "
                          "rank 1 in collective ";
  CHECK(Differences(sum, sum).empty());
  CallStatus other = sum;
  other.site = "train.py:4 (step)";
  CHECK(Differences(sum, other).empty());
  other.site = "";
  other.seq = 4;
  const std::string place = " of communicator world, ";
  CHECK(Is(Differences(sum, other), "COLLECTIVE_STATE_MISMATCH" + who + "4" + place + "allreduce(float32[4]).\n"));
  other.seq = 3;
  other.description = "allreduce(float32[5])";
  CHECK(Is(Differences(sum, other), "SIZE_OR_SYNTAX_MISMATCH" + who + "3" + place + "allreduce(float32[5]).\n"));
  other.description = "allreduce(int32[4])";
  CHECK(Is(Differences(sum, other), "COLLECTIVE_DTYPE_MISMATCH" + who + "3" + place + "allreduce(int32[4]).\n"));
  other.operation = kBcast;
  CHECK(Is(Differences(sum, other), "COLLECTIVE_TYPE_MISMATCH" + who + "3" + place + "allreduce(int32[4]).\n"));
  other.channel = 1;  // now each waits for the other
  CHECK(Differences(sum, other).empty());
  other.channel = 0, other.state = kScheduled;  // it does not wait for other ranks yet
  CHECK(Differences(sum, other).empty());
}

void TestCirclesOfCollectives() {
  CallStatus one = Call(kAllreduce, {0, 1}), other = Call(kAllreduce, {0, 1});
  other.group = 8;
  const auto circle = [](const CallStatus& a, const CallStatus& b) {
    return DescribeAll({In(0, {a}), In(1, {b})}, {}).find("The ranks wait for each other, in calls on different ") != std::string::npos;
  };
  CHECK(circle(one, other));
  CHECK(!circle(one, one));
  // Both ranks are in both calls, or one of them is in no call at all.
  CHECK(DescribeAll({In(0, {one}), In(1, {})}, {}).find("each other") == std::string::npos);
  // What waits outside programs, under one number and another one.
  CHECK(circle(Call(kSplit, {0, 1}), Call(kFree, {0, 1})));
  CHECK(!circle(Call(kSplit, {0, 1}), Call(kSplit, {0, 1})));
}

void TestFramesInTheReport() {
  std::string frames;
  for (int line = 1; line <= 9; ++line) {
    frames += "File \"/x/jax/_src/api.py\", line 1 in jit\nFile \"train.py\", line " + std::to_string(line) + " in step\n";
  }
  Status idle = In(1, {});
  idle.stacks = {frames, "File \"/x/pycollective/a.py\", line 2 in call\n", false};
  const std::string text = DescribeAll({In(0, {Call(kAllreduce, {0, 1})}), idle}, {});
  std::string shown = "  Python on rank 1:\n";
  for (int line = 1; line <= 8; ++line) shown += "    File \"train.py\", line " + std::to_string(line) + " in step\n";
  CHECK(text.find(shown + "  Look at") != std::string::npos);
  CHECK(text.find("  A callback of a program on rank 1:\n    File \"/x/pycollective/a.py\", line 2 in call\n") != std::string::npos);
  idle.stacks.by_signal = true;
  CHECK(DescribeAll({idle}, {}).find("Python on rank 1 (read without the interpreter's lock") != std::string::npos);
  CHECK(DescribeAll({idle}, {}).find("A callback") == std::string::npos);  // nobody waits for it
}

// Long waits ---------------------------------------------------------------------------------------------------------

void TestWaitsForEver() {
  const CallStatus sum = Call(kAllreduce, {0, 1, 2}), end = Call(kEnd, {});
  const auto of_ended = [&](const CallStatus& wait, std::vector<CallStatus> last, bool has_all = true) {
    return WaitForEnded({In(0, {wait}), In(1, {end}, std::move(last), has_all)}, {});
  };
  CHECK(of_ended(sum, {}));
  CHECK(!of_ended(sum, {}, false));  // it may have made the call, and its records have lost it
  CHECK(of_ended(sum, {Call(kAllreduce, {}, 2)}, false));
  CHECK(!of_ended(sum, {Call(kAllreduce, {}, 3)}));  // it has made the call
  CallStatus elsewhere = Call(kAllreduce, {}, 9);
  elsewhere.channel = 1;
  CHECK(of_ended(sum, {elsewhere}));
  CHECK(of_ended(Call(kRecv, {1}), {Call(kSend, {}, 9)}));  // who has ended sends nothing more
  CHECK(of_ended(Call(kRecv, {1}), {}, false));
  CHECK(!of_ended(Call(kRecv, {2}), {}));
  CHECK(!of_ended(Call(kAllreduce, {0, 1, 2}, 3, kSecondNs), {}));  // it is young
  CHECK(!of_ended(Call(kEnd, {1}), {}));
  CallStatus scheduled = sum;
  scheduled.state = kScheduled;
  CHECK(!of_ended(scheduled, {}));
  CHECK(!WaitForEnded({In(0, {sum}), In(1, {})}, {}));
  CHECK(WaitForEnded({In(0, {sum})}, {{2, "has ended", true}}));
  CHECK(!WaitForEnded({In(0, {sum})}, {{2, "is stopped", false}, {3, "has ended", true}}));
}

void TestLongWaits() {
  const Status waits = In(0, {Call(kAllreduce, {0, 1}, 3, kSecondNs), Call(kAllreduce, {0, 1}, 3, 2 * kSecondNs)});
  CHECK(IsLongWait({In(1, {}), waits}, 2 * kSecondNs - 1));
  CHECK(!IsLongWait({waits}, 2 * kSecondNs));
  CHECK(!IsLongWait({waits}, 0));
  CHECK(!IsLongWait({In(0, {Call(kEnd, {}, 0, 100 * kSecondNs)})}, kSecondNs));
}

void TestTexts() {
  CHECK(RankList({1}) == "rank 1" && RankList({}) == "ranks ");
  CHECK(RankList({5, 0, 1}) == "ranks 0, 1, 5" && RankList({3, 2, 0, 4, 8, 9}) == "ranks 0, 2-4, 8, 9");
  CHECK(Seconds(1260000000) == "1.3 s" && LimitText(600 * kSecondNs) == "600 s" && LimitText(kSecondNs / 2) == "0.5 s");
}

}  // namespace
}  // namespace pycollective

int main(int argc, char** argv) {
  using namespace pycollective;
  return RunOne({{"calls_under_way", TestCallsUnderWay},
                 {"last_calls", TestLastCalls},
                 {"not_all_is_known", TestNotAllIsKnown},
                 {"report_on_a_rank_that_is_elsewhere", TestReportOnARankThatIsElsewhere},
                 {"calls_that_differ", TestCallsThatDiffer},
                 {"circles_of_collectives", TestCirclesOfCollectives},
                 {"frames_in_the_report", TestFramesInTheReport},
                 {"waits_for_ever", TestWaitsForEver},
                 {"long_waits", TestLongWaits},
                 {"texts", TestTexts}},
                argc, argv);
}
