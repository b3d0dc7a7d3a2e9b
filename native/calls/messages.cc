// Implementation of messages.h.

#include "calls/messages.h"

#include <cstdint>
#include <cstring>
#include <new>
#include <string>
#include <vector>

#include "base/exports.h"
#include "calls/settings.h"
#include "mpi/collectives.h"
#include "mpi/dtypes.h"
#include "mpi/elements.h"
#include "records/recorder.h"

namespace pycollective {
namespace {

struct MessageHeader {
  CallDescription call;
  int64_t encloses = 0;  // 1: the data are in the header
  char data[256] = {};   // from host memory; each MPI library sends a header of 512 bytes eagerly

  MessageHeader() = default;
  MessageHeader(const Channel& channel, const SentMessage& sent) : call(sent.post) {
    const size_t nbytes = Bytes(sent.data.count, sent.data.type);
    if (channel.memory != nullptr || nbytes > sizeof(data)) return;
    encloses = 1;
    if (nbytes > 0) std::memcpy(data, sent.data.data, nbytes);
  }
};
static_assert(sizeof(MessageHeader) == 512, "ranks send it as bytes, so it must have no padding");

Outgoing Sent(const MessageHeader& header, const SentMessage& sent) {
  return {&header, sizeof(MessageHeader), Type::kUint8, sent.data.dest, sent.data.tag};
}

std::string DescribeMessage(const Post& post, const std::string& line) {
  const std::string array = DescribeArray(post.signature.dimensions, post.signature.dtype);
  return line.empty() ? array : array + " at " + line;
}

// Copies the data out of a header to where MPI_Recv would write them.
Outcome Take(const Library& mpi, const Channel& channel, const MessageHeader& header, const Incoming& to) {
  static const auto& host = *new Memory;
  const size_t nbytes = Bytes(to.count, to.type);
  if (nbytes > 0) {
    const Memory& memory = channel.memory != nullptr ? *channel.memory : host;
    PYCOLLECTIVE_RETURN_IF_FAILED(memory.Copy(to.data, header.data, nbytes));
  }
  return to.status != nullptr ? mpi.SetReceived(to) : Outcome{};
}

// Receives the data of an unexpected message and drops them, so that the sender does not wait without end.
Outcome Drop(const Library& mpi, const Channel& channel, const Post& post, int source, int tag) {
  Type type = Type::kUint8;
  const Signature& theirs = post.signature;
  const bool has_type = MoveType(static_cast<xla::ffi::DataType>(theirs.dtype), &type);
  if (!has_type && theirs.dtype != kEmptyTree) return {};
  try {
    std::vector<char> data(static_cast<size_t>(theirs.count * kTypeBytes[int(type)]));
    return mpi.Recv(channel, {data.data(), theirs.count, type, source, tag});
  } catch (const std::bad_alloc& error) {
    return OutcomeOfException(error);
  }
}

}  // namespace

Outcome Send(const Library& mpi, const Channel& channel, const SentMessage& sent) {
  if (check < Check::kEvery) return mpi.Send(channel, sent.data);
  const MessageHeader header(channel, sent);
  const Outcome outcome = mpi.Send(channel, Sent(header, sent));
  return header.encloses != 0 || !outcome.ok() ? outcome : mpi.Send(channel, sent.data);
}

Outcome Recv(const Library& mpi, const Channel& channel, const ExpectedMessage& expected) {
  Incoming data = expected.data;
  if (check < Check::kEvery || data.source == mpi.proc_null()) return mpi.Recv(channel, data);
  MessageHeader header;
  Envelope envelope;
  PYCOLLECTIVE_RETURN_IF_FAILED(
      mpi.Recv(channel, {&header, sizeof(MessageHeader), Type::kUint8, data.source, data.tag, data.status, &envelope}));
  data.source = envelope.source;  // the data have the header's source, even if the program receives from any rank
  data.tag = envelope.tag;
  const CallDescription& described = header.call;
  const Signature &here = expected.post.signature, &there = described.post.signature;
  if (there.dtype == here.dtype && there.dimensions == here.dimensions) {
    return header.encloses != 0 ? Take(mpi, channel, header, data) : mpi.Recv(channel, data);
  }
  if (header.encloses == 0) PYCOLLECTIVE_RETURN_IF_FAILED(Drop(mpi, channel, described.post, data.source, data.tag));
  Outcome outcome{"MPI_Recv", 0, {}};
  outcome.detail = "CollectiveMismatch: expected a message of " + DescribeMessage(expected.post, SiteText(expected.post.site)) +
                   ", got one of " + DescribeMessage(described.post, described.line) + " from rank " +
                   std::to_string(data.source);
  outcome.remedy = "Give both ends the same shape and dtype.";
  return outcome;
}

Outcome Sendrecv(const Library& mpi, const Channel& channel, const SentMessage& sent, const ExpectedMessage& expected) {
  if (check < Check::kEvery) return mpi.Sendrecv(channel, sent.data, expected.data);
  // A message that has begun must be waited for until MPI has read it, so the tag of the receive is checked before.
  PYCOLLECTIVE_RETURN_IF_FAILED(mpi.CheckTag(channel, expected.data.tag));
  const MessageHeader header(channel, sent);
  std::vector<int64_t> started;
  const auto start = [&](const Outgoing& message) {
    int64_t handle = 0;
    const Outcome outcome = mpi.Isend(channel, message, &handle);
    if (outcome.ok()) started.push_back(handle);
    return outcome;
  };
  Outcome outcome = start(Sent(header, sent));
  if (outcome.ok() && header.encloses == 0) outcome = start(sent.data);
  if (outcome.ok()) outcome = Recv(mpi, channel, expected);
  const Outcome gone = mpi.WaitAll(&started);
  return outcome.ok() ? gone : outcome;
}

}  // namespace pycollective

// Describes a message of a program, from the bytes of its header: "float32[3] at train.py:12 (step)"; "" for other bytes.
PYCOLLECTIVE_EXPORT const char* pycollective_message_header_text(const char* bytes, int64_t nbytes) {
  static thread_local std::string text;
  text.clear();
  if (nbytes == sizeof(pycollective::MessageHeader)) {
    pycollective::MessageHeader header;
    std::memcpy(&header, bytes, sizeof header);
    header.call.line[pycollective::kLineBytes - 1] = 0;
    text = pycollective::DescribeMessage(header.call.post, header.call.line);
  }
  return text.c_str();
}

// Whether the data are in the header, so that no second part follows.
PYCOLLECTIVE_EXPORT bool pycollective_message_header_encloses(const char* bytes) {
  pycollective::MessageHeader header;
  std::memcpy(&header, bytes, sizeof header);
  return header.encloses != 0;
}

namespace {
const pycollective::Listed listed{PYCOLLECTIVE_TYPED(message_header_text), PYCOLLECTIVE_TYPED(message_header_encloses)};
}  // namespace
