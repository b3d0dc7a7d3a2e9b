// One call as the handlers see it: finds the lane, checks that the ranks agree, runs, turns failures into errors.

#ifndef PYCOLLECTIVE_NATIVE_CALL_H_
#define PYCOLLECTIVE_NATIVE_CALL_H_

#include <mutex>
#include <string>
#include <vector>

#include "collectives.h"
#include "communicators.h"
#include "handlers.h"
#include "names.h"
#include "xla/ffi/api/ffi.h"

namespace pycollective {

// Marks the lane as waiting inside MPI for as long as it lives.
class UnderWay {
 public:
  UnderWay(Lane& lane, const char* operation, int64_t nbytes) : lane_(lane) {
    lane_.nbytes.store(nbytes, std::memory_order_relaxed);
    lane_.started_ns.store(NowNs(), std::memory_order_relaxed);
    lane_.operation.store(operation, std::memory_order_release);
  }
  ~UnderWay() { lane_.operation.store(nullptr, std::memory_order_release); }
  UnderWay(const UnderWay&) = delete;
  UnderWay& operator=(const UnderWay&) = delete;

 private:
  Lane& lane_;
};

class Call {
 public:
  // `lane_id`: of the device that calls; `staging`: how its arrays get to MPI, as Signature says it.
  Call(Operation operation, int64_t communicator, int64_t lane_id, int64_t staging)
      : operation_(operation), lane_id_(lane_id), staging_(staging), communicator_(FindCommunicator(communicator)) {}

  // Runs body(library, lane) in `place`, in its turn.
  template <typename Place, typename Body>
  xla::ffi::Error Run(Place& place, const Signature& signature, int64_t nbytes, Body body) {
    xla::ffi::Error error;
    const Outcome turn = place.Run([&] { error = RunNow(signature, nbytes, body); });
    return error.failure() || turn.ok() ? error : Failed(turn);
  }

  template <typename Body>
  xla::ffi::Error RunNow(Signature signature, int64_t nbytes, Body body) {
    if (library == nullptr || communicator_ == nullptr) {
      return Error(xla::ffi::ErrorCode::kInternal, "expected a communicator of this process, got an unknown one",
                   "Call pycollective.init() before running a compiled program.");
    }
    if (communicator_->IsFreed()) {
      return Error(xla::ffi::ErrorCode::kFailedPrecondition, "expected a live communicator, got a freed one",
                   "Do not run programs that name a communicator after its free().");
    }
    lane_ = communicator_->LaneOf(lane_id_);
    if (lane_ == nullptr) {
      return Error(xla::ffi::ErrorCode::kFailedPrecondition,
                   std::string("expected a device of pycollective.init(devices=...), got ") +
                       (staging_ == 0 ? "CPU device " : "accelerator ") + std::to_string(lane_id_ & 0xFFFFFFFF),
                   "Name that device in init, or run the program on one of its devices.");
    }
    const UnderWay under_way(*lane_, kOperations[operation_], nbytes);
    if (IsCollective(operation_) && lane_->channel.size > 1) {
      signature.staging = staging_;
      const xla::ffi::Error disagreement = Agree(signature);
      if (disagreement.failure()) return disagreement;
    }
    const Outcome outcome = body(*library, *lane_);
    return outcome.ok() ? xla::ffi::Error::Success() : Failed(outcome);
  }

  // Of the call under way.
  const Communicator& communicator() const { return *communicator_; }

  xla::ffi::Error Unsupported(xla::ffi::DataType dtype) const {
    return Error(xla::ffi::ErrorCode::kInvalidArgument,
                 std::string("expected a dtype that MPI can carry here, got ") +
                     DtypeName(static_cast<int32_t>(dtype)),
                 "Convert the array first.");
  }

  xla::ffi::Error Failed(const Outcome& outcome) const;
  xla::ffi::Error Error(xla::ffi::ErrorCode code, const std::string& what, const std::string& remedy) const;

 private:
  xla::ffi::Error Agree(const Signature& mine);

  Operation operation_;
  int64_t lane_id_;
  int64_t staging_;
  Communicator* communicator_;
  Lane* lane_ = nullptr;
};

}  // namespace pycollective

#endif  // PYCOLLECTIVE_NATIVE_CALL_H_
