// Implementation of call.h.

#include "call.h"

namespace ffi = xla::ffi;

namespace pycollective {

// The first time this lane meets a signature, the ranks compare theirs: a wrong order, shape or dtype then ends in an
// error on every rank instead of a hang or a wrong sum.
ffi::Error Call::Agree(const Signature& mine) {
  if (check == Check::kNever) return ffi::Error::Success();
  const std::lock_guard<std::mutex> lock(lane_->mutex);
  if (check == Check::kFirst && lane_->agreed.count(mine) != 0) return ffi::Error::Success();
  const Channel& channel = lane_->channel;
  std::vector<Signature> all(static_cast<size_t>(channel.size));
  const Outcome outcome = library->Allgather(channel, &mine, all.data(), sizeof(Signature), Type::kUint8);
  if (!outcome.ok()) return Failed(outcome);
  for (size_t rank = 0; rank < all.size(); ++rank) {
    const Signature& theirs = all[rank];
    if (theirs == mine) continue;
    const bool known = IsCollective(theirs.operation);
    const bool staging = known && theirs.staging != mine.staging;
    return Error(ffi::ErrorCode::kInvalidArgument,
                 "expected the same call on every rank, got " + Describe(mine, staging) + " here and " +
                     (known ? Describe(theirs, staging) : std::string("another call")) + " on rank " +
                     std::to_string(rank),
                 staging ? "All ranks must use devices of one kind, with the same settings."
                         : "All ranks must run the same collectives in the same order, with the same shapes, dtypes "
                           "and pytrees.");
  }
  lane_->agreed.insert(mine);
  return ffi::Error::Success();
}

ffi::Error Call::Failed(const Outcome& outcome) const {
  if (outcome.of_runtime) {
    return Error(ffi::ErrorCode::kInternal,
                 std::string("expected ") + outcome.call + " of the accelerator's runtime to succeed, got \"" +
                     outcome.detail + "\"",
                 "The cause may be an earlier error of this program on the device.");
  }
  if (!outcome.detail.empty()) {
    return Error(ffi::ErrorCode::kDataLoss, std::string(outcome.call) + ": " + outcome.detail,
                 "Give both ends the same shape and dtype.");
  }
  return Error(ffi::ErrorCode::kInternal,
               std::string("expected ") + outcome.call + " to succeed, got \"" + library->ErrorString(outcome.code) +
                   "\"",
               "Check that all ranks run the same calls in the same order.");
}

ffi::Error Call::Error(ffi::ErrorCode code, const std::string& what, const std::string& remedy) const {
  std::string where;
  if (communicator_ != nullptr && !communicator_->lanes.empty()) {
    const Channel& channel = communicator_->lanes[0]->channel;
    where = " (rank " + std::to_string(channel.rank) + " of " + std::to_string(channel.size) + ", communicator " +
            communicator_->name + ")";
  }
  return ffi::Error(code,
                    std::string("pycollective.") + kOperations[operation_] + ": " + what + where + ". " + remedy);
}

}  // namespace pycollective
