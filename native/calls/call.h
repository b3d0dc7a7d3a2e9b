// One call as the handlers see it: finds the lane, compares the call with those of the other ranks, runs it, and makes
// an error of a failure.

#ifndef PYCOLLECTIVE_NATIVE_CALLS_CALL_H_
#define PYCOLLECTIVE_NATIVE_CALLS_CALL_H_

#include <cstring>
#include <exception>
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

// Who takes part in a call, and where the user made it, as attributes of the program say it.
struct Participants {
  // The attribute comm: the communicator's number and its fingerprint. Then, where an operand travels in another dtype than the
  // one that the user passed, the dtype of each operand as the user passed it; kEmptyTree for a tree without arrays. Last,
  // of a call with a root whose operand is a leaf of a tree, a hash of the tree's structure.
  xla::ffi::Span<const int64_t> comm;
  // The devices of this process on which the program runs. Each makes the call itself, on a channel of its own, unless they are
  // `replicated`: then all have the same data; they meet, one makes the call as a single device would, and its results are
  // copied to the others. So ranks may have their arrays on different numbers of devices.
  int64_t devices;
  bool replicated = false;
  // The line of the user's code (recorder.h); 0: unknown.
  int64_t site = 0;
  // The place of this reduction among those of the line, as in Post; 0: unknown.
  int64_t order = 0;

  int64_t number() const { return comm.size() > 0 ? comm[0] : -1; }
  int64_t fingerprint() const { return comm.size() > 1 ? comm[1] : 0; }
  // The devices that make the call, each for itself.
  int64_t callers() const { return replicated ? 1 : devices; }
  // The structure of the tree around the one operand; 0: it is no leaf of a tree, or nobody compares that.
  int64_t tree() const { return comm.size() > 3 ? comm[3] : 0; }
  // The dtype of an operand as the user passed it. `travels`: the one in which it travels.
  int32_t DtypeOf(size_t operand, xla::ffi::DataType travels) const {
    return comm.size() > 2 + operand ? static_cast<int32_t>(comm[2 + operand]) : static_cast<int32_t>(travels);
  }
};

// The results of a call. Replicas copy them from each other. The caller keeps the list.
struct ResultMemory {
  void* data;
  size_t nbytes;
};
struct Results {
  const ResultMemory* first = nullptr;
  size_t count = 0;
};

// Remembers how the last call of this process has ended. XLA reports the error of a call only when a result of its program is
// read. We keep the error, so that the exit of the process can report it.
void NoteEnd(const xla::ffi::Error& error);
// The message of the last call's error, "" if it has succeeded.
std::string LastFailure();

// Returns what work() returns. If work() ends in an exception, returns an Error that says so: no exception may pass
// through XLA, or end a thread of ours.
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
  // `lane_id`: the device that calls, as lanes know it. `staging`, `piece_bytes`: how its arrays reach MPI, as in Signature.
  Call(Operation operation, const Participants& participants, int64_t lane_id, Staging staging, int64_t piece_bytes);
  // If an exception ends the call, the other devices of the program must not wait for this one.
  ~Call() {
    if (std::uncaught_exceptions() > exceptions_) BreakTeams();
  }
  Call(const Call&) = default;
  Call& operator=(const Call&) = delete;

  // Runs body(library, lane) where the buffers lie, when the calls before it are done.
  template <typename Buffers, typename Body>
  xla::ffi::Error Run(Buffers& buffers, const Signature& signature, int64_t nbytes, const Results& results, Body body) {
    if constexpr (Buffers::kInHostMemory) {
      return RunNow(signature, nbytes, results, body);
    } else {
      xla::ffi::Error error;
      const Outcome outcome = buffers.Run([&] {  // perhaps in the device's thread
        error = CatchAsError(operation_, [&] { return RunNow(signature, nbytes, results, body); });
      });
      return error.failure() || outcome.ok() ? error : ErrorOf(outcome);
    }
  }

  // The same at once, in this thread.
  template <typename Body>
  xla::ffi::Error RunNow(const Signature& signature, int64_t nbytes, const Results& results, Body body) {
    xla::ffi::Error wrong = CheckParticipants();
    if (wrong.failure()) return wrong;
    const auto work = [&] { return RunOnLane(signature, nbytes, body); };
    return replicas_ == nullptr ? work() : RunForReplicas(signature, nbytes, results, work);
  }

  // Returns an error if the program holds addresses of another process; 0: it holds none.
  xla::ffi::Error CheckProcess(int64_t process) const;

  // For a call that another library makes: checks and compares as Run does. The record is under way until Leave.
  xla::ffi::Error Enter(const Signature& signature, int64_t nbytes);
  // That call has returned.
  void Leave() {
    if (communicator_ != nullptr) communicator_->entered.Finish(kCompleted);
  }

  // For a message: the rank to which it goes, and the rank from which one comes, as MPI numbers them.
  void SetDest(int64_t dest) { dest_ = PeerOf(dest); }
  void SetSource(int64_t source) { source_ = PeerOf(source); }
  bool has_dest() const { return dest_ != Record::kNoPeer; }

  // Adds an operand of this rank, in which the numbers guard looks for NaN and Inf.
  void AddOperandForNanCheck(const xla::ffi::AnyBuffer& x) {
    if (!check_numbers) return;
    const auto count = static_cast<int64_t>(x.element_count());
    AddOperandForNanCheck({x.untyped_data(), count, static_cast<int32_t>(x.element_type()), Dimensions(x.dimensions())});
  }
  void AddOperandForNanCheck(const Operand& operand) {
    if (check_numbers) operands_.push_back(operand);
  }
  // The operands of the call, in host memory, may be piggybacked on its comparison. `piggybacked` lives as long as the call.
  // `in_buffer`: operands that are too large for the board may lie in the buffers of the ranks.
  void AllowPiggyback(const PiggybackedCollective& piggybacked, bool in_buffer) {
    piggybacked_ = &piggybacked;
    may_use_buffer_ = in_buffer;
  }
  // The number of ranks, if the participants are right.
  int size() const { return lane_ == nullptr ? 1 : lane_->channel.size; }
  // For ppermute: where each lane sends to; -1: nowhere.
  void SetRoutes(xla::ffi::Span<const int64_t> dest) { routes_ = dest; }

  // Valid while the call runs.
  const Communicator& communicator() const { return *communicator_; }

  xla::ffi::Error Unsupported(xla::ffi::DataType dtype) const {
    return Error(xla::ffi::ErrorCode::kInvalidArgument,
                 std::string("expected a dtype that MPI can carry here, got ") +
                     DtypeName(static_cast<int32_t>(dtype)),
                 "Convert the array first.");
  }

  xla::ffi::Error ErrorOf(const Outcome& outcome) const;
  xla::ffi::Error Error(xla::ffi::ErrorCode code, const std::string& what, const std::string& remedy) const;

 private:
  // Returns an error if the program cannot run here, on any device of this rank.
  xla::ffi::Error CheckParticipants() const;

  template <typename Body>
  xla::ffi::Error RunOnLane(const Signature& signature, int64_t nbytes, Body body) {
    const Record record = RecordOf(signature, nbytes, kStarted);
    Recorded recorded(record);
    const xla::ffi::Error wrong = Prepare(signature, record.seq);
    if (wrong.failure()) return wrong;
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

  // What comes before the call itself: its channel, and the comparison with the other ranks.
  // `seq`: its number on the channel.
  xla::ffi::Error Prepare(Signature signature, int64_t seq);
  // The error of a call that another rank makes differently.
  xla::ffi::Error Differs(const Post& mine, const Difference& found) const;

  Record RecordOf(const Signature& signature, int64_t nbytes, CallState state) const;
  static int64_t PeerOf(int64_t rank);  // as records name it

  // Replicas, devices that have the same data, meet. The last to come runs work() and copies its results to the others.
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

  // Returns an error if another rank makes another call on the channel: a wrong order, shape or dtype ends in an error on
  // every rank instead of a hang or a wrong sum. It may make the call itself (comparison.h).
  xla::ffi::Error CompareWithRanks(const Signature& mine, int64_t seq);
  xla::ffi::Error CompareOnBoard(const Signature& mine);
  // Whether the operands may be piggybacked on the comparison.
  bool MayPiggyback() const { return piggybacked_ != nullptr && lane_->team == nullptr && !check_numbers; }
  // Returns an error if a rank brings a NaN or an Inf. All ranks of a collective get it, before they call MPI; of a message
  // only the rank that sends.
  xla::ffi::Error CheckNumbers(const Signature& mine);
  // Lets all ranks, or all devices of all ranks, have what the first of them has found that has found any.
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
  Team* replicas_ = nullptr;  // the devices that have the same data
  int64_t dest_ = Record::kNoPeer;
  int64_t source_ = Record::kNoPeer;
  std::vector<Operand> operands_;  // if the numbers guard looks at them
  xla::ffi::Span<const int64_t> routes_;
  const PiggybackedCollective* piggybacked_ = nullptr;
  bool may_use_buffer_ = false;
  bool is_done_ = false;  // the comparison has made the call
  int exceptions_ = std::uncaught_exceptions();
};

}  // namespace pycollective

#endif  // PYCOLLECTIVE_NATIVE_CALLS_CALL_H_
