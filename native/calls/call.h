// One call of a handler: finds the lane, compares the call with the calls of the other ranks, runs it, and returns a
// failure as an error.

#ifndef PYCOLLECTIVE_NATIVE_CALLS_CALL_H_
#define PYCOLLECTIVE_NATIVE_CALLS_CALL_H_

#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/operations.h"
#include "calls/communicators.h"
#include "calls/comparison.h"
#include "calls/numbers.h"
#include "calls/settings.h"
#include "mpi/collectives.h"
#include "mpi/dtypes.h"
#include "records/recorder.h"
#include "records/signature.h"
#include "xla/ffi/api/ffi.h"

namespace pycollective {

// The participants of a call and the line of the user's code, from the attributes of the program.
struct Participants {
  // The attribute comm: the communicator's number and its fingerprint. If an operand is sent in another dtype than the user
  // passed, the dtype of each operand as the user passed it follows; kEmptyTree for a tree without arrays. The last item is a
  // hash of the tree's structure, for a call with a root whose operand is a leaf of a tree.
  xla::ffi::Span<const int64_t> comm;
  // The number of this process's devices on which the program runs. If they are not `replicated`, each device makes the call
  // itself, on a channel of its own. Replicated devices all have the same data: they meet, one of them makes the call like a
  // single device, and its results are copied to the others. So ranks may have their arrays on different numbers of devices.
  int64_t devices;
  bool replicated = false;
  // The number of the line of the user's code (recorder.h); 0: unknown.
  int64_t site = 0;
  // The order of this reduction among the reductions of the line, as in Post; 0: unknown.
  int64_t order = 0;
  // The section of the program to which the call belongs (comparison.h).
  Section section = {};

  int64_t number() const { return comm.size() > 0 ? comm[0] : -1; }
  int64_t fingerprint() const { return comm.size() > 1 ? comm[1] : 0; }
  // The number of devices that make the call themselves.
  int64_t callers() const { return replicated ? 1 : devices; }
  // The hash of the structure of the operand's tree; 0: the operand is no leaf of a tree, or the structure is not compared.
  int64_t tree() const { return comm.size() > 3 ? comm[3] : 0; }
  // The dtype of an operand as the user passed it. `travels`: the dtype on the wire.
  int32_t DtypeOf(size_t operand, xla::ffi::DataType travels) const {
    return comm.size() > 2 + operand ? static_cast<int32_t>(comm[2 + operand]) : static_cast<int32_t>(travels);
  }
};

// The results of a call, for copies between replicas. The caller owns the list.
struct ResultMemory {
  void* data;
  size_t nbytes;
};
struct Results {
  const ResultMemory* first = nullptr;
  size_t count = 0;
};

// Remembers the error of the last call of this process, if it failed. XLA reports the error of a call only when a result of its
// program is read. We keep the error, so that the exit of the process can report it.
void NoteEnd(const xla::ffi::Error& error);
// The message of the last call's error; "" if the call succeeded.
std::string LastFailure();

// Returns the result of work(), or an Error if work() throws: an exception must neither pass through XLA nor end one of
// our threads.
template <typename Work>
xla::ffi::Error CatchAsError(Operation operation, Work work) {
  const auto error = [&](xla::ffi::ErrorCode code, const std::string& what, const std::string& remedy) {
    const std::string where = std::string("pycollective.") + kOperationNames[operation];
    return xla::ffi::Error(code, where + ": " + what + ". " + remedy);
  };
  try {
    return work();
  } catch (const std::exception& exception) {
    const Outcome outcome = OutcomeOfException(exception);
    return error(xla::ffi::ErrorCode::kResourceExhausted, outcome.detail, outcome.remedy);
  } catch (const Team::Broken&) {
    return error(xla::ffi::ErrorCode::kFailedPrecondition,
                 "expected all devices of this rank in the call, got an exception on one of them",
                 "Start the ranks again: their calls do not match any more.");
  }
}

class Call {
 public:
  // `lane_id`: the calling device's id in lanes. `staging`, `piece_bytes`: the way of its arrays to MPI, as in Signature.
  Call(Operation operation, const Participants& participants, int64_t lane_id, Staging staging, int64_t piece_bytes);
  // If an exception ends the call, it ends the waits of the program's other devices for this device.
  ~Call() {
    if (std::uncaught_exceptions() > exceptions_) BreakTeams();
  }
  Call(const Call&) = default;
  Call& operator=(const Call&) = delete;

  // Runs body(buffers, library, lane) after the earlier calls: in this thread for buffers in host memory, else by the device. The body of
  // a collective is copied, and may run when the handler has returned: so it holds values, and nothing of the handler's arguments.
  template <typename Buffers, typename Body>
  xla::ffi::Error Run(Buffers& buffers, const Signature& signature, int64_t nbytes, const Results& results, const Body& body) {
    const auto on_buffers = [&](const Library& mpi, const Lane& lane) { return body(buffers, mpi, lane); };
    if constexpr (Buffers::kInHostMemory) {
      return RunNow(signature, nbytes, results, on_buffers);
    } else {
      if (MayRunAhead(buffers)) {
        const xla::ffi::Error error = PostAhead(buffers, signature, nbytes, body);
        return error.failure() ? error : FinishAhead(buffers);
      }
      xla::ffi::Error error;
      const Outcome outcome = buffers.Run([&] {  // perhaps in the device's thread
        error = CatchAsError(operation_, [&] { return RunNow(signature, nbytes, results, on_buffers); });
      });
      return error.failure() || outcome.ok() ? error : ErrorOf(outcome);  // as in Begin of DeviceBuffers
    }
  }

  // Whether the call is dispatched ahead. A message has an error or a status of its own; a barrier moves no data.
  template <typename Buffers>
  bool MayRunAhead(const Buffers& buffers) const {
    return IsCollective(operation_) && operation_ != kBarrier && replicas_ == nullptr && buffers.runs_ahead();
  }

  // Checks and compares the call in this thread, and posts the rest to the device's thread: body(buffers, library, lane). An error
  // there ends the job, since the program has gone on. FinishAhead makes XLA's stream wait for it.
  template <typename Buffers, typename Body>
  xla::ffi::Error PostAhead(Buffers& buffers, const Signature& signature, int64_t nbytes, const Body& body) {
    const xla::ffi::Error wrong = CheckParticipants();
    if (wrong.failure()) return wrong;
    const Record record = RecordOf(signature, nbytes, kStarted);
    Recorded comparing(record);
    // Ranks that post no calls on a board compare them by MPI, on the channel of the data.
    const xla::ffi::Error differs = Prepare(signature, record.seq, [&] {
      comparing.Finish(kUnused);
      buffers.WaitForEarlier();
      comparing = Recorded(record);
    });
    if (differs.failure()) return differs;
    comparing.Finish(kUnused);  // the data have a record of their own
    const Outcome posted = buffers.PostAhead([call = WithoutFrame(), record, body](Buffers& own) {
      const xla::ffi::Error error = CatchAsError(call.operation_, [&] {
        const xla::ffi::Error made = call.MakeRecorded(record, [&](const Library& mpi, const Lane& lane) { return body(own, mpi, lane); });
        if (made.failure()) return made;
        const Outcome written = own.WriteNumber();
        return written.ok() ? made : call.ErrorOf(written);
      });
      if (error.failure()) call.EndAhead(error);
    });
    return posted.ok() ? xla::ffi::Error::Success() : ErrorOf(posted);
  }
  template <typename Buffers>
  xla::ffi::Error FinishAhead(Buffers& buffers) const {
    const Outcome waits = buffers.FinishAhead();
    if (waits.ok()) return xla::ffi::Error::Success();
    buffers.Drain();  // XLA gives the arrays away now
    return ErrorOf(waits);
  }

  // Runs it immediately, in this thread.
  template <typename Body>
  xla::ffi::Error RunNow(const Signature& signature, int64_t nbytes, const Results& results, Body body) {
    xla::ffi::Error wrong = CheckParticipants();
    if (wrong.failure()) return wrong;
    const auto work = [&] { return RunOnLane(signature, nbytes, body); };
    return replicas_ == nullptr ? work() : RunForReplicas(signature, nbytes, results, work);
  }

  // Returns an error if the program holds addresses of another process. `process` is 0 for a program without addresses.
  xla::ffi::Error CheckProcess(int64_t process) const;

  // For a call that another library makes: checks and compares it as Run does, and begins its record.
  xla::ffi::Error Enter(const Signature& signature, int64_t nbytes);
  // Ends the record of Enter, when the other library's call has returned.
  void Leave() {
    if (communicator_ != nullptr) communicator_->entered.Finish(kCompleted);
  }

  // For a message: its destination and its source, as MPI ranks.
  void SetDest(int64_t dest) { dest_ = PeerOf(dest); }
  void SetSource(int64_t source) { source_ = PeerOf(source); }
  bool has_dest() const { return dest_ != Record::kNoPeer; }

  // Adds an operand of this rank that the numbers guard searches for NaN and Inf.
  void AddOperandForNanCheck(const xla::ffi::AnyBuffer& x) {
    if (!check_numbers) return;
    const auto count = static_cast<int64_t>(x.element_count());
    AddOperandForNanCheck({x.untyped_data(), count, static_cast<int32_t>(x.element_type()), Dimensions(x.dimensions())});
  }
  void AddOperandForNanCheck(const Operand& operand) {
    if (check_numbers) operands_.push_back(operand);
  }
  // Allows the comparison to carry the operands of the call, which are in host memory. `piggybacked` must live as long as the
  // call. `in_buffer`: operands that are too large for the board may be in the buffers of the ranks.
  void AllowPiggyback(const PiggybackedCollective& piggybacked, bool in_buffer) {
    piggybacked_ = &piggybacked;
    may_use_buffer_ = in_buffer;
  }
  // The number of ranks; 1 if the participants are wrong.
  int size() const { return lane_ == nullptr ? 1 : lane_->channel.size; }
  // For ppermute: the destination of each lane; -1: none.
  void SetRoutes(xla::ffi::Span<const int64_t> dest) { routes_ = dest; }

  // Valid while the call runs; null if the participants are wrong.
  const Communicator* communicator() const { return communicator_.get(); }
  // The index of its lane; 0 if the participants are wrong.
  size_t lane_index() const { return lane_ == nullptr ? 0 : static_cast<size_t>(lane_->index); }

  xla::ffi::Error Unsupported(xla::ffi::DataType dtype) const {
    return Error(xla::ffi::ErrorCode::kInvalidArgument,
                 std::string("expected a dtype that MPI can carry here, got ") +
                     DtypeName(static_cast<int32_t>(dtype)),
                 "Convert the array first.");
  }

  // Returns a failure as an error. A failure of an accelerator's runtime is fatal: other ranks wait for this rank's data, and
  // no data are sent that may be wrong.
  xla::ffi::Error ErrorOf(const Outcome& outcome) const;
  // Returns the error of a call whose data may be wrong. If the call has other ranks, it ends the job instead.
  xla::ffi::Error Fatal(const std::string& what, const std::string& remedy) const;
  xla::ffi::Error Error(xla::ffi::ErrorCode code, const std::string& what, const std::string& remedy) const;

 private:
  // Returns an error if the program cannot run on this device of this process.
  xla::ffi::Error CheckParticipants() const;

  template <typename Body>
  xla::ffi::Error RunOnLane(const Signature& signature, int64_t nbytes, Body body) {
    const Record record = RecordOf(signature, nbytes, kStarted);
    Recorded recorded(record);
    const xla::ffi::Error wrong = Prepare(signature, record.seq, [] {});
    return wrong.failure() ? wrong : Make(recorded, nbytes, body);
  }
  // The call after its comparison.
  template <typename Body>
  xla::ffi::Error Make(Recorded& recorded, int64_t nbytes, Body body) const {
    const Outcome outcome = is_done_ ? Outcome{} : [&] {
      BandwidthEstimate::Sample sample(&lane_->channel.bandwidth, nbytes);
      const Outcome made = body(*library, *lane_);
      if (made.ok()) sample.Succeed();
      return made;
    }();
    if (!outcome.ok()) return ErrorOf(outcome);
    recorded.Finish(kCompleted);
    return xla::ffi::Error::Success();
  }
  template <typename Body>
  xla::ffi::Error MakeRecorded(const Record& record, Body body) const {
    Recorded recorded(record);
    return Make(recorded, record.nbytes, body);
  }

  // This call for a thread that goes on when the handler has returned: without what lies in XLA's memory.
  Call WithoutFrame() const {
    Call call = *this;
    call.participants_.comm = {};
    call.routes_ = {};
    return call;
  }
  // Ends the job, for an error that comes when the handler has returned.
  [[noreturn]] void EndAhead(const xla::ffi::Error& error) const;

  // Makes the channel if it does not exist, and compares the call with the other ranks. `seq`: its number on the channel.
  // `before_messages`: called before the ranks make the channel, or compare the call by messages, perhaps with the lock of the comparison.
  xla::ffi::Error Prepare(Signature signature, int64_t seq, const std::function<void()>& before_messages);
  // The error for a call that differs on another rank.
  xla::ffi::Error Differs(const Post& mine, const Difference& found) const;
  // The error of each call after one that a rank has refused and others may have made. `rank`: that has refused it.
  xla::ffi::Error OutOfStep(const Post& mine, int rank) const;

  Record RecordOf(const Signature& signature, int64_t nbytes, CallState state) const;
  static int64_t PeerOf(int64_t rank);  // the number of a peer in records

  // The replicas, devices with the same data, meet. The last one to arrive runs work() and copies its results to the others.
  template <typename Work>
  xla::ffi::Error RunForReplicas(const Signature& signature, int64_t nbytes, const Results& results, Work work) {
    struct Replica {
      const Results& results;
      xla::ffi::Error error;
    };
    Replica own{results, {}};
    Recorded meeting(RecordOf(signature, nbytes, kScheduled));
    replicas_->AddBuffers({nullptr, &own});
    replicas_->Meet([&] {
      meeting.Finish(kUnused);  // the call has a record of its own
      const xla::ffi::Error error = CatchAsError(operation_, work);
      for (int member = 0; member < replicas_->size(); ++member) {
        Replica& other = *static_cast<Replica*>(replicas_->BuffersOf(member).out);
        other.error = error;
        for (size_t i = 0; i < results.count && &other != &own; ++i) {
          const ResultMemory& from = results.first[i];
          if (from.nbytes > 0) std::memcpy(other.results.first[i].data, from.data, from.nbytes);
        }
      }
    });
    meeting.Finish(kUnused);
    return own.error;
  }

  // Returns an error if another rank makes another call on the channel. So a wrong order, shape or dtype is an error on all
  // ranks instead of a hang or a wrong sum. The comparison may also make the call (comparison.h).
  xla::ffi::Error CompareWithRanks(const Signature& mine, int64_t seq, const std::function<void()>& before_messages);
  xla::ffi::Error CompareOnBoard(const Signature& mine);
  // The section of the call, if calls of sections need not be compared. One program may run on devices of several kinds.
  Section SectionOfCall() const;
  // Whether the comparison may carry the operands.
  bool MayPiggyback() const { return piggybacked_ != nullptr && lane_->team == nullptr && !check_numbers; }
  // Returns an error if an operand has a NaN or an Inf. In a collective all ranks return it, before they call MPI; for a message
  // only the sender.
  xla::ffi::Error CheckNumbers(const Signature& mine);
  // Sends the findings of the first rank (TellTeam: device) that has any to all ranks (all devices of all ranks).
  static Outcome TellRanks(const Channel& channel, BadNumbers* bad);
  Outcome TellTeam(BadNumbers* bad);
  void BreakTeams() const;

  Operation operation_;
  Participants participants_;
  int64_t lane_id_;
  Staging staging_;
  int64_t piece_bytes_;
  std::shared_ptr<Communicator> communicator_;
  Lane* lane_ = nullptr;
  Team* replicas_ = nullptr;  // the devices with the same data
  int64_t dest_ = Record::kNoPeer;
  int64_t source_ = Record::kNoPeer;
  std::vector<Operand> operands_;  // for the numbers guard; empty if it is off
  xla::ffi::Span<const int64_t> routes_;
  const PiggybackedCollective* piggybacked_ = nullptr;
  bool may_use_buffer_ = false;
  bool is_done_ = false;  // the comparison has made the call
  int exceptions_ = std::uncaught_exceptions();
};

}  // namespace pycollective

#endif  // PYCOLLECTIVE_NATIVE_CALLS_CALL_H_
