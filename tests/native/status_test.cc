// Tests of a rank's status, and of the report on all ranks.

#include <algorithm>
#include <string>
#include <vector>

#include "base/operations.h"
#include "harness.h"
#include "monitor/rank_runs.h"
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
  CHECK(status.ranks == std::vector<int>{5} && status.last.empty() && !status.has_all && status.under_way.size() == 5);
  const std::vector<CallStatus>& calls = status.under_way;
  CHECK(calls[0].operation == kAllreduce && calls[0].group == 7 && calls[0].channel == 1 && calls[0].seq == 3);
  CHECK(calls[0].group_name == "world" && calls[0].members == (std::vector<int>{4, 5, 6}) && calls[0].state == kStarted);
  CHECK(calls[0].group_size == 3 && calls[1].group_size == 0 && calls[4].group_size == 3);
  CHECK(calls[0].site.empty() && calls[0].description.substr(0, 10) == "allreduce(");
  CHECK(calls[1].members == std::vector<int>{6} && calls[1].site == "train.py:3 (step)");
  CHECK(calls[2].description == "split" && calls[2].members.empty() && calls[2].group_name.empty());
  CHECK(calls[3].members.empty());
  CHECK(calls[4].state == kScheduled && calls[4].members == (std::vector<int>{4, 5, 6}));
  for (size_t i = 0; i + 1 < calls.size(); ++i) CHECK(calls[i].age_ns >= calls[i + 1].age_ns && calls[i + 1].age_ns >= 0);
}

Record End() { return RecordOf(kEnd, 0, 0, 0); }

// At the end: of each channel the last call that has ended, collectives and messages apart, the latest in front.
void TestLastCalls() {
  AddGroup(7, {"world", {4, 5, 6}});
  const auto make = [](Record record, CallState end = kCompleted) { Recorded(record).Finish(end); };
  make(RecordOf(kAllreduce, 7, 0, 1));
  make(RecordOf(kAllreduce, 7, 0, 2));
  make(RecordOf(kSend, 7, 0, 1));
  make(RecordOf(kAllreduce, 7, 1, 1), kFailed);
  make(RecordOf(kAllreduce, 8, 0, 1));
  make(RecordOf(kSplit, 7, 0, 0));
  const Status idle = StatusOfThisProcess(0);
  CHECK(idle.under_way.empty() && !idle.has_all && idle.last.size() == 1 && idle.last[0].group == 8);
  CHECK(idle.last[0].description.substr(0, 9) == "allreduce");
  {
    Recorded under_way(RecordOf(kAllreduce, 7, 0, 3));
    CHECK(StatusOfThisProcess(0).last.empty());  // what it waits for tells enough
  }
  Recorded under_way(End());
  const Status status = StatusOfThisProcess(0);
  CHECK(status.under_way.size() == 1 && status.has_all && status.last.size() == 4);
  const std::vector<CallStatus>& last = status.last;
  CHECK(last[0].group == 7 && last[0].seq == 3);  // it has just ended
  CHECK(last[1].group == 8 && last[2].channel == 1 && last[3].operation == kSend);
  CHECK(last[0].members.empty() && last[0].group_size == 0 && !last[0].description.empty());
  CHECK(last[2].state == kFailed && last[3].age_ns >= last[0].age_ns);
  for (size_t i = 1; i < 4; ++i) CHECK(last[i].description.empty() && last[i].site.empty() && last[i].group_name.empty());
}

// More channels than a status has, and more calls than the ring has.
void TestNotAllIsKnown() {
  Recorded end(End());
  for (int64_t channel = 0; channel < 256; ++channel) Recorded(RecordOf(kBarrier, 7, channel, 1)).Finish(kCompleted);
  CHECK(StatusOfThisProcess(0).has_all && StatusOfThisProcess(0).last.size() == 256);
  Recorded(RecordOf(kBarrier, 7, 256, 1)).Finish(kCompleted);
  const Status many = StatusOfThisProcess(0);
  CHECK(!many.has_all && many.last.size() == 256 && many.last.front().channel == 256 && many.last.back().channel == 1);
  for (size_t i = 0; i < kRecords; ++i) Recorded(RecordOf(kBarrier, 7, 0, 2)).Finish(kCompleted);
  Recorded(RecordOf(kBarrier, 7, 0, 3)).Finish(kCompleted);
  const Status lost = StatusOfThisProcess(0);
  CHECK(!lost.has_all && lost.last.size() == 1);
}

// Ranks of a group that were given in another order, and twice.
void TestMembersAscend() {
  AddGroup(11, {"turned", {6, 4, 5}});
  Record message = RecordOf(kSendrecv, 11, 0, 2);
  message.dest = 0;
  message.source = 0;
  Recorded first(RecordOf(kAllreduce, 11, 0, 1)), second(message);
  const Status status = StatusOfThisProcess(5);
  CHECK(status.under_way[0].members == (std::vector<int>{4, 5, 6}) && status.under_way[1].members == std::vector<int>{6});
}

std::string Packed(const std::vector<Status>& statuses) {
  Writer writer;
  Put(writer, statuses);
  return writer.text();
}

// Sets of ranks ------------------------------------------------------------------------------------------------------

std::vector<int> Every(int distance, int count, int first = 0) {
  std::vector<int> ranks;
  for (int i = 0; i < count; ++i) ranks.push_back(first + i * distance);
  return ranks;
}

std::string Packed(const std::vector<int>& ranks) {
  Writer writer;
  PutRanks(writer, ranks);
  return writer.text();
}

void TestRuns() {
  const auto runs = [](std::vector<int> ranks) {
    const std::string text = Packed(ranks);
    Reader reader(text);
    CHECK(RanksFrom(reader, ranks.empty() ? 0 : ranks.back() + 1) == ranks && reader.ok() && reader.Rest().empty());
    CHECK(text.size() == 8 + 24 * RunCount(ranks));
    return RunCount(ranks);
  };
  CHECK(runs({}) == 0 && runs({0}) == 1 && runs({7}) == 1 && runs({3, 9}) == 1);
  CHECK(runs(Every(1, 10240)) == 1 && runs(Every(8, 1280, 5)) == 1);
  CHECK(runs({0, 1, 3, 5, 7}) == 2 && runs({0, 1, 2, 8, 9, 10, 16, 17, 18}) == 3 && runs({0, 2, 4, 5, 6, 7}) == 2);
  std::vector<int> twice{5, 1, 5, 3, 1};
  SortRanks(&twice);
  CHECK(twice == (std::vector<int>{1, 3, 5}));
}

// Numbers that are no runs of ranks of the job, whose memory a reader must not reserve either.
void TestWrongRuns() {
  const auto refused = [](const std::vector<int64_t>& numbers, int size) {
    Writer writer;
    for (const int64_t number : numbers) writer.Put(number);
    const std::string text = writer.Put("more").text();
    Reader reader(text);
    const std::vector<int> ranks = RanksFrom(reader, size);
    return !reader.ok() && ranks.empty() && reader.Rest().empty();
  };
  CHECK(!refused({1, 0, 4, 1}, 4) && !refused({2, 0, 2, 1, 2, 2, 1}, 4));
  CHECK(refused({1, 0, 5, 1}, 4) && refused({1, 4, 1, 1}, 4) && refused({1, -1, 2, 1}, 4) && refused({1, 0, 0, 1}, 4));
  CHECK(refused({1, 0, 2, 0}, 4) && refused({1, 3, 2, -1}, 4) && refused({1, 0, 3, 2}, 4));
  CHECK(refused({2, 0, 2, 1, 1, 2, 1}, 4) && refused({2, 2, 1, 1, 0, 1, 1}, 4));
  CHECK(refused({1, 0, INT64_MAX, 1}, 4) && refused({1, 0, 2, INT64_MAX}, 4) && refused({1, INT64_MAX, 1, 1}, 4));
  CHECK(refused({1, 0, INT64_MAX, INT64_MAX}, 1 << 30));
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
  if (call.is_for_all()) call.group_size = static_cast<int64_t>(call.members.size());
  return call;
}

Status In(int rank, std::vector<CallStatus> under_way, std::vector<CallStatus> last = {}, bool has_all = true) {
  return {{rank}, std::move(under_way), std::move(last), has_all};
}
Status AllIn(std::vector<int> ranks, std::vector<CallStatus> under_way, std::vector<CallStatus> last = {}) {
  return {std::move(ranks), std::move(under_way), std::move(last), true};
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
  const std::vector<SilentRank> silent = {{1, "is far", false, ""}, {3, "is far", true, ""}, {2, "is here", true, ""}};
  CHECK(Is(DescribeAll({In(0, {Call(kAllreduce, {0, 1, 2, 3})})}, silent),
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
  RankFrames frames_of_1{1, {frames, "File \"/x/pycollective/a.py\", line 2 in call\n", false}};
  const std::string text = DescribeAll({In(0, {Call(kAllreduce, {0, 1})}), In(1, {})}, {}, {frames_of_1});
  std::string shown = "  Python on rank 1:\n";
  for (int line = 1; line <= 8; ++line) shown += "    File \"train.py\", line " + std::to_string(line) + " in step\n";
  CHECK(text.find(shown + "  Look at") != std::string::npos);
  CHECK(text.find("  A callback of a program on rank 1:\n    File \"/x/pycollective/a.py\", line 2 in call\n") != std::string::npos);
  frames_of_1.frames.by_signal = true;
  const std::string alone = DescribeAll({In(1, {})}, {}, {frames_of_1});
  CHECK(alone.find("Python on rank 1 (read without the interpreter's lock") != std::string::npos);
  CHECK(alone.find("A callback") == std::string::npos);  // nobody waits for it
}

// Many ranks ---------------------------------------------------------------------------------------------------------

constexpr char kSumText[] = "waited in collective 3 of communicator world, allreduce(float32[4]), at train.py:3 (step) for ";

// As the ranks of a job tell it: a status of each.
std::vector<Status> Each(const std::vector<int>& ranks, const std::vector<CallStatus>& under_way,
                         const std::vector<CallStatus>& last = {}) {
  std::vector<Status> statuses;
  for (const int rank : ranks) statuses.push_back(In(rank, under_way, last));
  return statuses;
}

std::vector<int> AllBut(int size, const std::vector<int>& others) {
  std::vector<int> ranks;
  for (int rank = 0; rank < size; ++rank) {
    if (std::find(others.begin(), others.end(), rank) == others.end()) ranks.push_back(rank);
  }
  return ranks;
}

// A rank that compares a call while the data of the one before are under way waits where the others wait: in the first of both.
void TestACallThatIsComparedAhead() {
  const CallStatus sum = Call(kAllreduce, {0, 1, 2});
  CallStatus next = sum;
  next.seq = 4;
  const std::string text = DescribeAll({In(0, {sum, next}), In(1, {sum}), In(2, {})}, {});
  CHECK(text.find("MISMATCH") == std::string::npos);
  CHECK(text.find("  Look at rank 2: the others wait for it.\n") != std::string::npos);
}

std::vector<Status> operator+(std::vector<Status> a, const std::vector<Status>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

void TestOneRankOfAThousandIsElsewhere() {
  const CallStatus sum = Call(kAllreduce, Every(1, 1024));
  const auto statuses = Each(AllBut(1024, {512}), {sum}) + Each({512}, {}, {Call(kAllgather, {}, 2, kSecondNs)});
  const std::string expected =
      "  ranks 0-511, 513-1023 have " + std::string(kSumText) + "10.0 s.\n"
      "  rank 512 makes no call. Its last one was collective 2 of communicator world, allgather(float32[4]), at train.py:3"
      " (step), 1.0 s ago.\n"
      "  Look at rank 512: the others wait for it.\n";
  CHECK(Is(DescribeAll(Joined(statuses), {}), expected));
  CHECK(Is(DescribeAll(statuses, {}), expected));  // joined or not
  CHECK(RanksWithoutPlace(Joined(statuses)) == std::vector<int>{512});
}

void TestAThousandRanksInTwoCalls() {
  const CallStatus sum = Call(kAllreduce, Every(1, 1024));
  CallStatus next = sum;
  next.seq = 4;
  const std::string text = DescribeAll(Joined(Each(AllBut(1024, {7, 8}), {sum}) + Each({7, 8}, {next})), {});
  CHECK(text.find("  COLLECTIVE_STATE_MISMATCH: ranks 0-6, 9-1023 wait in collective 3 of communicator world, "
                  "allreduce(float32[4]), at train.py:3 (step); ranks 7, 8 in collective 4 of ") != std::string::npos);
  CHECK(std::count(text.begin(), text.end(), '\n') == 3);
}

// What is joined: ranks in one state. Of the ages of calls under way the greatest counts, of last calls the least.
void TestJoined() {
  CallStatus sum = Call(kAllreduce, {0, 1, 2, 3, 4, 5}), longer = sum, other = sum, last = Call(kAllgather, {}, 2);
  longer.age_ns = 12 * kSecondNs;
  other.site = "train.py:4 (step)";
  CallStatus later = last;
  later.age_ns = kSecondNs;
  const std::vector<Status> joined =
      Joined({In(5, {}, {last}), In(3, {sum}), In(0, {longer}), In(1, {other}), In(2, {sum}), In(4, {}, {later})});
  CHECK(joined.size() == 3);
  CHECK(joined[0].ranks == (std::vector<int>{0, 2, 3}) && joined[0].under_way[0].age_ns == 12 * kSecondNs);
  CHECK(joined[1].ranks == std::vector<int>{1} && joined[1].under_way[0].site == other.site);
  CHECK(joined[2].ranks == (std::vector<int>{4, 5}) && joined[2].last[0].age_ns == kSecondNs);
  CHECK(Packed(Joined(joined)) == Packed(joined));
  const auto differ = [&](const Status& a, const Status& b) { return Joined({a, b}).size() == 2; };
  CHECK(differ(In(0, {sum}), In(1, {})) && differ(In(0, {sum}), In(1, {sum, sum})) && differ(In(0, {}), In(1, {}, {last})));
  CHECK(differ(In(0, {}, {last}, true), In(1, {}, {last}, false)));
  CallStatus scheduled = sum, of_others = sum;
  scheduled.state = kScheduled;
  of_others.members = {0, 1};
  CHECK(differ(In(0, {sum}), In(1, {scheduled})) && differ(In(0, {sum}), In(1, {of_others})));
  // Whether a wait is long, and for ever, is the same of joined statuses.
  CHECK(IsLongWait(joined, 11 * kSecondNs) && !IsLongWait(joined, 12 * kSecondNs));
}

// A status of a rank does not grow with the ranks, nor does what a leader tells of ranks that do the same.
void TestBytesOfStatuses() {
  const auto bytes = [](int ranks, std::vector<int> members) {
    return Packed(Joined(Each(Every(1, ranks), {Call(kAllreduce, std::move(members))}))).size();
  };
  const size_t one = bytes(1, Every(1, 2));
  for (const int size : {4, 64, 1024, 10240}) {
    CHECK(bytes(1, Every(1, size)) == one && bytes(1, Every(8, size)) == one);
    CHECK(bytes(size, Every(1, size)) == one);
  }
  CHECK(one < 400);
  // Members in many runs, the least of them: their number alone.
  std::vector<int> irregular;
  for (int rank = 0; rank < 10240; rank += rank % 3 + 1) irregular.push_back(rank);
  CHECK(RunCount(irregular) > kMostRuns && bytes(1, irregular) < one);
  // A status of 10240 ranks, one of which is elsewhere: a run and a status more.
  const auto with_one_elsewhere =
      Joined(Each(AllBut(10240, {77}), {Call(kAllreduce, Every(1, 10240))}) + Each({77}, {}, {Call(kAllgather, {}, 2)}));
  CHECK(Packed(with_one_elsewhere).size() < 3 * one);
}

// Nobody has told which ranks the group has.
void TestUnknownMembers() {
  CallStatus sum = Call(kAllreduce, {});
  sum.group_size = 4;
  const auto text = [&](const std::vector<int>& ranks) { return DescribeAll({AllIn(ranks, {sum})}, {}); };
  CHECK(text({0, 1, 2}).find("  1 rank of communicator world is not in this call; the ranks that answer do not know which.\n") !=
        std::string::npos);
  CHECK(text({0, 3}).find("  2 ranks of communicator world are not in this call") != std::string::npos);
  CHECK(text({0, 1, 2, 3}).find("not in this call") == std::string::npos);
  CHECK(text({0, 3}).find("wait for each other") == std::string::npos);
}

// A ring of messages in which one rank does not take part: a description for each rank, and one line.
void TestLinesOfManyCalls() {
  constexpr int kSize = 1024;
  std::vector<Status> statuses;
  for (int rank = 0; rank < kSize; ++rank) {
    CallStatus ring = Call(kSendrecv, {(rank + 1) % kSize, (rank + kSize - 1) % kSize}, 5 + rank % 2);
    ring.description = "sendrecv(float32[4]) to rank " + std::to_string((rank + 1) % kSize) + " from rank " +
                       std::to_string((rank + kSize - 1) % kSize);
    SortRanks(&ring.members);
    statuses.push_back(In(rank, rank == 100 ? std::vector<CallStatus>() : std::vector<CallStatus>{ring}, {}));
  }
  CHECK(Is(DescribeAll(Joined(statuses), {}),
           "  ranks 0-99, 101-1023 have waited in sendrecv(float32[4]), at train.py:3 (step) on communicator world for 10.0 s.\n"
           "  rank 100 makes no call. It has made none yet.\n"
           "  Look at rank 100: the others wait for it.\n"));
  // Sums over as many communicators as there are pairs.
  statuses.clear();
  for (int rank = 0; rank < kSize; ++rank) {
    CallStatus pair = Call(kAllreduce, {rank / 2 * 2, rank / 2 * 2 + 1});
    pair.group = 1000 + rank / 2;
    pair.group_name = "world/" + std::to_string(rank / 2);
    statuses.push_back(In(rank, rank == 9 ? std::vector<CallStatus>() : std::vector<CallStatus>{pair}, {}));
  }
  const std::string pairs = DescribeAll(Joined(statuses), {});
  CHECK(pairs.find("  ranks 0-8, 10-1023 have waited in allreduce(float32[4]), at train.py:3 (step) on 512 communicators for ") == 0);
  CHECK(pairs.find("  Look at rank 9: ") != std::string::npos && std::count(pairs.begin(), pairs.end(), '\n') == 3);
}

// Nothing makes the text long: as many places, last calls, channels that differ and silent ranks as there are ranks.
void TestLengthOfTheText() {
  constexpr int kSize = 1024;
  std::vector<Status> statuses;
  std::vector<SilentRank> silent;
  for (int rank = 0; rank < kSize; ++rank) {
    CallStatus sum = Call(kAllreduce, {rank / 2 * 2, rank / 2 * 2 + 1}, 3 + rank % 2);
    sum.group = 1000 + rank / 2;
    sum.site = "train.py:" + std::to_string(rank) + " (step)";
    CallStatus last = Call(kAllgather, {}, rank);
    if (rank % 4 < 2) statuses.push_back(In(rank, {sum}, {}));
    if (rank % 4 == 2) statuses.push_back(In(rank, {}, {last}));
    if (rank % 4 == 3) silent.push_back({rank, "does not answer: process " + std::to_string(rank), false, ""});
  }
  const std::string text = DescribeAll(Joined(statuses), silent);
  const auto has = [&text](const std::string& part) { return text.find(part) != std::string::npos; };
  CHECK(std::count(text.begin(), text.end(), '\n') < 80 && text.size() < 20000);
  CHECK(has("  rank 0 has waited in allreduce(float32[4]), at train.py:0 (step) on communicator world for 10.0 s.\n"));
  CHECK(has(" have waited in other calls.\n") && has(" have made no call, after other calls.\n"));
  CHECK(has(" others have not answered either.\n"));
  CHECK(has("  Calls differ on 240 more channels.\n"));
}

// Silent ranks of one host: each by itself, or many at once.
void TestManySilentRanks() {
  std::vector<SilentRank> silent;
  for (int rank = 1; rank < 5; ++rank) silent.push_back({rank, "does not answer: process " + std::to_string(rank), false, "do not answer"});
  const std::string few = DescribeAll({}, silent);
  CHECK(std::count(few.begin(), few.end(), '\n') == 4 && few.find("  rank 3 does not answer: process 3.\n") != std::string::npos);
  silent.push_back({5, "does not answer: process 5", false, "do not answer"});
  silent.push_back({9, "cannot be reached", false, ""});
  CHECK(Is(DescribeAll({}, silent), "  rank 9 cannot be reached.\n  ranks 1-5 do not answer.\n"));
}

// Of many ranks without a place some are asked, of each status in turn.
void TestFramesOfMany() {
  const auto statuses = Joined(Each({0}, {Call(kAllreduce, Every(1, 1024))}) + Each(AllBut(512, {0}), {}) +
                               Each({700, 800}, {}, {Call(kAllgather, {}, 2)}));
  const std::vector<int> asked = RanksWithoutPlace(statuses);
  CHECK(asked.size() == kMostFrames && asked[0] == 1 && asked[13] == 14 && asked[14] == 700 && asked[15] == 800);
  const std::string text = DescribeAll(statuses, {}, {{1, {"File \"train.py\", line 3 in load\n", "", false}}});
  CHECK(text.find("  Of 513 ranks whose place in Python matters, 16 were asked.\n") != std::string::npos);
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
  CHECK(WaitForEnded({In(0, {sum})}, {{2, "has ended", true, ""}}));
  CHECK(!WaitForEnded({In(0, {sum})}, {{2, "is stopped", false, ""}, {3, "has ended", true, ""}}));
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
  std::vector<int> odd = Every(2, 512, 1);
  CHECK(RankList(odd).substr(0, 15) == "ranks 1, 3, 5, " && RankList(odd).size() < 200);
  CHECK(RankList(odd).find(", 63 and 480 others") != std::string::npos);
  odd.resize(32);
  CHECK(RankList(odd).find("others") == std::string::npos);
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
                 {"members_ascend", TestMembersAscend},
                 {"runs", TestRuns},
                 {"wrong_runs", TestWrongRuns},
                 {"report_on_a_rank_that_is_elsewhere", TestReportOnARankThatIsElsewhere},
                 {"calls_that_differ", TestCallsThatDiffer},
    {"a_call_that_is_compared_ahead", TestACallThatIsComparedAhead},
                 {"circles_of_collectives", TestCirclesOfCollectives},
                 {"frames_in_the_report", TestFramesInTheReport},
                 {"one_rank_of_a_thousand_is_elsewhere", TestOneRankOfAThousandIsElsewhere},
                 {"a_thousand_ranks_in_two_calls", TestAThousandRanksInTwoCalls},
                 {"joined", TestJoined},
                 {"bytes_of_statuses", TestBytesOfStatuses},
                 {"unknown_members", TestUnknownMembers},
                 {"lines_of_many_calls", TestLinesOfManyCalls},
                 {"length_of_the_text", TestLengthOfTheText},
                 {"many_silent_ranks", TestManySilentRanks},
                 {"frames_of_many", TestFramesOfMany},
                 {"waits_for_ever", TestWaitsForEver},
                 {"long_waits", TestLongWaits},
                 {"texts", TestTexts}},
                argc, argv);
}
