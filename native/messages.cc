// Implementation of messages.h.

#include "messages.h"

#include <cstdint>
#include <new>
#include <string>
#include <vector>

#include "dtypes.h"
#include "recorder.h"
#include "settings.h"

namespace pycollective {
namespace {

constexpr int64_t kToldBytes = sizeof(Told);

std::string DescribeMessage(const Post& post, const std::string& line) {
  const std::string array = DescribeArray(post.signature.dimensions, post.signature.dtype);
  return line.empty() ? array : array + " at " + line;
}

// Takes the data of a message that is not the expected one, so that its sender does not wait for ever.
Outcome Drop(const Library& mpi, const Channel& channel, const Post& post, int source, int tag) {
  Type type;
  const Signature& theirs = post.signature;
  if (!MoveType(static_cast<xla::ffi::DataType>(theirs.dtype), &type)) return {};
  try {
    std::vector<char> data(static_cast<size_t>(theirs.count * kTypeBytes[int(type)]));
    return mpi.Recv(channel, {data.data(), theirs.count, type, source, tag});
  } catch (const std::bad_alloc& error) {
    return OutcomeOfException(error);
  }
}

}  // namespace

Told::Told(const Post& post) : post(post) { CopyLine(SiteText(post.site), line); }

Outcome Send(const Library& mpi, const Channel& channel, const SentMessage& sent) {
  if (check >= Check::kEvery) {
    const Told told(sent.post);
    PYCOLLECTIVE_RETURN_IF_FAILED(
        mpi.Send(channel, {&told, kToldBytes, Type::kUint8, sent.data.dest, sent.data.tag}));
  }
  return mpi.Send(channel, sent.data);
}

Outcome Recv(const Library& mpi, const Channel& channel, const ExpectedMessage& expected) {
  Incoming data = expected.data;
  if (check < Check::kEvery || data.source == mpi.proc_null()) return mpi.Recv(channel, data);
  Told told;
  Envelope envelope;
  PYCOLLECTIVE_RETURN_IF_FAILED(
      mpi.Recv(channel, {&told, kToldBytes, Type::kUint8, data.source, data.tag, nullptr, &envelope}));
  data.source = envelope.source;  // the data come from there, even if the program takes a message from any rank
  data.tag = envelope.tag;
  const Signature &here = expected.post.signature, &there = told.post.signature;
  if (there.dtype == here.dtype && there.dimensions == here.dimensions) return mpi.Recv(channel, data);
  PYCOLLECTIVE_RETURN_IF_FAILED(Drop(mpi, channel, told.post, data.source, data.tag));
  Outcome outcome{"MPI_Recv", 0, {}};
  outcome.detail = "CollectiveMismatch: expected a message of " + DescribeMessage(expected.post, SiteText(expected.post.site)) +
                   ", got one of " + DescribeMessage(told.post, told.line) + " from rank " +
                   std::to_string(data.source);
  outcome.remedy = "Give both ends the same shape and dtype.";
  return outcome;
}

Outcome Sendrecv(const Library& mpi, const Channel& channel, const SentMessage& sent, const ExpectedMessage& expected) {
  if (check < Check::kEvery) return mpi.Sendrecv(channel, sent.data, expected.data);
  // Once a message has begun, this call must wait until MPI has read it: the receive must not fail before it waits, too.
  PYCOLLECTIVE_RETURN_IF_FAILED(mpi.CheckTag(channel, expected.data.tag));
  const Told told(sent.post);
  std::vector<int64_t> started;
  const auto start = [&](const Outgoing& message) {
    int64_t handle = 0;
    const Outcome outcome = mpi.Isend(channel, message, &handle);
    if (outcome.ok()) started.push_back(handle);
    return outcome;
  };
  Outcome outcome = start({&told, kToldBytes, Type::kUint8, sent.data.dest, sent.data.tag});
  if (outcome.ok()) outcome = start(sent.data);
  if (outcome.ok()) outcome = Recv(mpi, channel, expected);
  const Outcome gone = mpi.WaitAll(&started);
  return outcome.ok() ? gone : outcome;
}

}  // namespace pycollective
