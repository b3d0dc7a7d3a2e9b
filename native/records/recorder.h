// The flight recorder: the last calls of this process, and those under way.
//
// It is always on. A call writes its record when it begins and adds the time when it ends: some tens of nanoseconds. Any
// thread may read all records at any time; nobody waits for a lock. What reads them: pycollective.recorder.dump(), the
// file that each rank writes when a job fails, and the report of a long wait.

#ifndef PYCOLLECTIVE_NATIVE_RECORDS_RECORDER_H_
#define PYCOLLECTIVE_NATIVE_RECORDS_RECORDER_H_

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "records/signature.h"

namespace pycollective {

// What this process may wait for besides the operations of programs: a row's constant, and its name.
#define PYCOLLECTIVE_WAITS(X)                                                         \
  X(kFirstCall, "the first call of a function")                                       \
  X(kSplit, "split")                                                                  \
  X(kFree, "free")                                                                    \
  X(kStart, "init")                                                                   \
  X(kTrace, "trace")                                                                  \
  X(kGoOn, "elastic.run")                                                             \
  X(kEnd, "the end of the other ranks")

// Record::operation: an Operation, or kFirstWait + the number of a row above.
enum Wait : int64_t {
  kBeforeFirstWait = kFirstWait - 1,
#define PYCOLLECTIVE_CONSTANT(constant, name) constant,
  PYCOLLECTIVE_WAITS(PYCOLLECTIVE_CONSTANT)
#undef PYCOLLECTIVE_CONSTANT
};
inline constexpr const char* kWaitNames[] = {
#define PYCOLLECTIVE_NAME(constant, name) name,
    PYCOLLECTIVE_WAITS(PYCOLLECTIVE_NAME)
#undef PYCOLLECTIVE_NAME
};

enum CallState : int64_t {
  kUnused,     // the slot holds no record
  kScheduled,  // the call waits for other devices of this rank
  kStarted,    // it waits for other ranks
  kCompleted,
  kFailed,
};
inline constexpr const char* kStateNames[] = {"unused", "scheduled", "started", "completed", "failed"};

// One call. All fields have 64 bits: the recorder copies a record word by word.
struct Record {
  int64_t id = 0;         // the number of the record in this process, from 0
  int64_t group = 0;      // RankGroup::identity; 0: none
  int64_t channel = 0;    // its number in the RankGroup
  int64_t operation = 0;  // Operation or Wait
  int64_t seq = 0;        // the number of the call among the collectives of the channel, or among its messages; from 1
  int64_t dtype = 0;      // XLA's number
  int64_t reduce_op = -1;
  int64_t root = -1;
  int64_t dest = kNoPeer;    // of a message: ranks of the group
  int64_t source = kNoPeer;
  int64_t count = 0;         // elements of the operand
  Dimensions dimensions;     // of the operand
  int64_t nbytes = 0;        // of the larger of operand and result
  int64_t site = 0;          // where the user made the call (AddSite); 0: unknown
  int64_t state = kUnused;
  // Times are those of NowNs; in a slot they are ticks (recorder.cc).
  int64_t created_ns = 0;    // when the program came to the call
  int64_t started_ns = 0;    // when the call began to wait for other ranks
  int64_t completed_ns = 0;

  static constexpr int64_t kNoPeer = -1;
  static constexpr int64_t kAnyPeer = -2;

  bool is_under_way() const { return state == kScheduled || state == kStarted; }
  bool is_collective() const;
  const char* name() const;
};

// The words of a record, by their names.
inline constexpr const char* kRecordWords[] = {
    "id",   "group", "channel", "operation", "seq",  "dtype", "reduce_op", "root",   "dest", "source", "count", "ndim",
    "dim0", "dim1",  "dim2",    "dim3",      "rest", "nbytes", "site",     "state",  "created", "started", "completed"};
static_assert(sizeof(Record) == sizeof(int64_t) * (sizeof(kRecordWords) / sizeof(kRecordWords[0])));

// Where a record lies. Words are atomic, since a reader may copy them while the call ends.
struct Slot {
  static constexpr size_t kWords = sizeof(Record) / sizeof(int64_t);
  std::array<std::atomic<int64_t>, kWords> words{};
  std::atomic<uint64_t> version{0};  // odd while a record is written

  // Makes this thread the one that writes a record here: the version is odd from now on. Returns false if another thread
  // writes, or if the slot's record is under way. It is one step: a record gets under way only between two versions.
  bool Claim();
};

// Begins a record, and ends it when this object is destroyed.
class Recorded {
 public:
  Recorded() = default;
  explicit Recorded(Record record);
  Recorded(Recorded&& other) noexcept : slot_(std::exchange(other.slot_, nullptr)) {}
  Recorded& operator=(Recorded&& other) noexcept {
    Finish(kCompleted);
    slot_ = std::exchange(other.slot_, nullptr);
    return *this;
  }
  ~Recorded() { Finish(kFailed); }

  // The call ends, as kCompleted or kFailed. kUnused: it leaves no record.
  void Finish(CallState state);

 private:
  Slot* slot_ = nullptr;  // null: nothing is under way
};

// The records that the recorder still has, the oldest first. A record that is under way is always among them.
std::vector<Record> Records();

// The calls under way, the one that began first in front.
std::vector<Record> RecordsUnderWay();

// How many calls the recorder keeps.
inline constexpr size_t kRecords = 2048;

// A trace: from StartTrace to StopTrace the recorder also keeps each call that ends, in the order of the ends, so that none is
// lost when there are more than the ring holds. It keeps `most` of them, and counts the others. While there is no trace, a
// call reads one flag for it.
struct Trace {
  std::vector<Record> records;
  int64_t dropped = 0;  // calls that came when `most` were kept
};
void StartTrace(int64_t most);
Trace StopTrace();

// Lines of programs: the place in the user's code that made a call, "train.py:12 (step)". `site` has a hash of the function, the
// number of the line in it, and a hash of the collective's name. This process knows the lines of the programs that it has
// lowered.
inline int64_t FunctionOf(int64_t site) { return site >> 40; }
inline int64_t CollectiveOf(int64_t site) { return site & 0xFFFFF; }
void AddSite(int64_t site, const std::string& text);
std::string SiteText(int64_t site);  // "" if it is not known

// Groups of ranks, by RankGroup::identity.
struct Group {
  std::string name;
  std::vector<int> ranks;  // in MPI_COMM_WORLD
};
void AddGroup(int64_t identity, Group group);
std::shared_ptr<const Group> FindGroup(int64_t identity);  // null if it is not known

// What the call is, for messages: "allreduce(float32[2,3], op=sum)".
std::string Describe(const Record& record);

// One record as a JSON object, as RecorderJson has it among its entries.
std::string RecordJson(const Record& record);
// A group as RecorderJson has it in pg_config; "null" if it is not known.
std::string GroupJson(int64_t identity);

// What a job's end says to the ranks that write their records.
struct End {
  std::string reason;
  std::string job;           // the job's name, which no other job has
  std::vector<int> writers;  // the ranks that are asked to write; empty: there is no end
};

// All that the recorder knows, as one JSON object. The fields are those of PyTorch's flight recorder, and `complete_from`: all records
// with this number or a greater one are among the entries.
std::string RecorderJson(int rank, int size, const End& end);

}  // namespace pycollective

#endif  // PYCOLLECTIVE_NATIVE_RECORDS_RECORDER_H_
