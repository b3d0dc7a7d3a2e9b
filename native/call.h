// One call as the handlers see it: finds the lane, checks that the ranks agree, runs, turns failures into errors.

#ifndef PYCOLLECTIVE_NATIVE_CALL_H_
#define PYCOLLECTIVE_NATIVE_CALL_H_

#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "collectives.h"
#include "communicators.h"
#include "handlers.h"
#include "names.h"
#include "xla/ffi/api/ffi.h"

namespace pycollective {

// What a program says of who takes part, in two attributes.
struct Members {
  // comm: the communicator's number and fingerprint.
  xla::ffi::Span<const int64_t> comm;
  // How the program lies on the devices of this process. 1: on one. n: on n, each of which makes the call itself, on the
  // channel of its number. -n: on n that have the same data; they meet, one makes the call as a single device would, and
  // its results are copied to the others. So ranks whose arrays lie on different numbers of devices match.
  int64_t spread;

  int64_t number() const { return comm.size() > 0 ? comm[0] : -1; }
  int64_t fingerprint() const { return comm.size() > 1 ? comm[1] : 0; }
};

// The results of a call, where devices with the same data take them from each other.
struct Written {
  void* data;
  size_t nbytes;
};
struct Results {
  const Written* first = nullptr;
  size_t count = 0;
};

// Runs work(), which returns an Error. An exception becomes one here: it must not unwind through XLA, or a thread of ours.
template <typename Work>
xla::ffi::Error Caught(Operation operation, Work work) {
  const auto error = [&](xla::ffi::ErrorCode code, const std::string& what, const std::string& remedy) {
    return xla::ffi::Error(code, std::string("pycollective.") + kOperations[operation] + ": " + what + ". " + remedy);
  };
  try {
    return work();
  } catch (const std::exception& exception) {
    const Outcome outcome = Thrown(exception);
    return error(xla::ffi::ErrorCode::kResourceExhausted, outcome.detail, outcome.remedy);
  } catch (const Team::Broken&) {
    return error(xla::ffi::ErrorCode::kFailedPrecondition,
                 "expected all devices of this rank in the call, got an exception on one of them",
                 "Start the ranks again: their calls do not match any more.");
  }
}

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
  Call(Operation operation, const Members& members, int64_t lane_id, int64_t staging);
  // After an exception: other devices of the program must not wait for this one.
  ~Call() {
    if (std::uncaught_exceptions() > exceptions_) Break();
  }
  Call(const Call&) = default;
  Call& operator=(const Call&) = delete;

  // Runs body(library, lane) in `place`, in its turn.
  template <typename Place, typename Body>
  xla::ffi::Error Run(Place& place, const Signature& signature, int64_t nbytes, const Results& results, Body body) {
    if constexpr (Place::kPlain) {
      return RunNow(signature, nbytes, results, body);
    } else {
      xla::ffi::Error error;
      const Outcome turn = place.Run([&] {  // perhaps in the device's thread
        error = Caught(operation_, [&] { return RunNow(signature, nbytes, results, body); });
      });
      return error.failure() || turn.ok() ? error : Failed(turn);
    }
  }

  template <typename Body>
  xla::ffi::Error RunNow(const Signature& signature, int64_t nbytes, const Results& results, Body body) {
    xla::ffi::Error wrong = Find();
    if (wrong.failure()) return wrong;
    const auto alone = [&] { return Alone(signature, nbytes, body); };
    return copies_ == nullptr ? alone() : ForAll(results, alone);
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
  // Finds the lane; or what keeps the program from running here at all, on any device of this rank.
  xla::ffi::Error Find();

  // The call of this device.
  template <typename Body>
  xla::ffi::Error Alone(Signature signature, int64_t nbytes, Body body) {
    const UnderWay under_way(*lane_, kOperations[operation_], nbytes);
    if (IsCollective(operation_)) {  // a message needs no channel that others would have to make as well
      const Outcome made = communicator_->ranks->Make(*library, lane_->number);
      if (!made.ok()) return Failed(made);
    }
    if (IsCollective(operation_) && lane_->channel.size > 1) {
      signature.staging = staging_;
      signature.devices = static_cast<int32_t>(members_.spread > 0 ? members_.spread : 1);
      signature.team = lane_->team != nullptr ? lane_->team->size() : 1;
      const xla::ffi::Error disagreement = Agree(signature);
      if (disagreement.failure()) return disagreement;
    }
    const Outcome outcome = body(*library, *lane_);
    return outcome.ok() ? xla::ffi::Error::Success() : Failed(outcome);
  }

  // The last to come of the devices with the same data makes the call for all.
  template <typename Work>
  xla::ffi::Error ForAll(const Results& results, Work work) {
    struct Copy {
      const Results& results;
      xla::ffi::Error error;
    };
    Copy own{results, {}};
    copies_->AddPost({nullptr, &own});
    copies_->Meet([&] {
      const xla::ffi::Error error = Caught(operation_, work);
      for (int member = 0; member < copies_->size(); ++member) {
        Copy& other = *static_cast<Copy*>(copies_->PostOf(member).out);
        other.error = error;
        for (size_t i = 0; i < results.count && &other != &own; ++i) {
          const Written& from = results.first[i];
          if (from.nbytes > 0) std::memcpy(other.results.first[i].data, from.data, from.nbytes);
        }
      }
    });
    return own.error;
  }

  xla::ffi::Error Agree(const Signature& mine);
  void Break() const;

  Operation operation_;
  Members members_;
  int64_t lane_id_;
  int64_t staging_;
  std::shared_ptr<Communicator> communicator_;
  Lane* lane_ = nullptr;
  Team* copies_ = nullptr;
  int exceptions_ = std::uncaught_exceptions();
};

}  // namespace pycollective

#endif  // PYCOLLECTIVE_NATIVE_CALL_H_
