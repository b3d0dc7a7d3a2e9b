// Implementation of messages.h.

#include "calls/messages.h"

#include <array>
#include <cstdint>
#include <cstring>
#include <memory>
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

// Where the data of a header are. The values are no numbers that data are likely to have: bytes without a header must not be taken
// for one.
enum class DataPlace : int64_t { kNone = 0, kEnclosed = 0x70636d7367656e63, kNextMessage = 0x70636d7367736570 };

struct MessageHeader {
  CallDescription call;
  int64_t count;  // of the elements that MPI sends, and their type; `call` has the program's
  int64_t type;
  DataPlace place;  // the last member: it is there only if the whole header is

  bool exists() const { return place == DataPlace::kEnclosed || place == DataPlace::kNextMessage; }
};
static_assert(sizeof(MessageHeader) == 272, "ranks send it as bytes, so it must have no padding");

// Larger data are a message of their own. A copy of them takes longer than a second message: on one host, where a message takes
// 2 us, from some 16 KiB on; over TCP, where it takes 10 us, from some 256 KiB on.
constexpr size_t kEnclosedBytes = 256 << 10;
constexpr size_t kEnclosedOnOneHost = 16 << 10;
// Larger data are received where they belong, and smaller ones copied there: MPI needs a datatype for two places.
constexpr size_t kCopiedBytes = 32 << 10;

// The memory of a thread for one message that it sends and one that it receives.
struct MessageMemory {
  struct Message {
    MessageHeader header;
    char data[kEnclosedBytes];
  };
  Message sent;
  Message received;

  // Returns the memory of this thread; null: there is no memory left.
  static MessageMemory* OfThisThread() {
    // Not initialized, so that the kernel gives pages only for what is used.
    static thread_local const std::unique_ptr<char[]> memory(new (std::nothrow) char[sizeof(MessageMemory)]);
    return reinterpret_cast<MessageMemory*>(memory.get());
  }
};

// Writes the first message for `sent` at `to`. Larger data are not in it.
Outgoing FirstMessage(const Channel& channel, const SentMessage& sent, MessageMemory::Message* to) {
  const size_t nbytes = Bytes(sent.data.count, sent.data.type);
  const size_t limit = channel.exchange != nullptr ? kEnclosedOnOneHost : kEnclosedBytes;
  const bool encloses = channel.memory == nullptr && nbytes <= limit;
  to->header = {CallDescription(sent.post), sent.data.count, static_cast<int64_t>(sent.data.type),
                encloses ? DataPlace::kEnclosed : DataPlace::kNextMessage};
  if (encloses && nbytes > 0) std::memcpy(to->data, sent.data.data, nbytes);
  const auto size = static_cast<int64_t>(sizeof(MessageHeader) + (encloses ? nbytes : 0));
  return {to, size, Type::kUint8, sent.data.dest, sent.data.tag};
}

Outcome NoMemory() { return OutcomeOfException(std::bad_alloc()); }

std::string DescribeMessage(const Post& post, const std::string& line) {
  const std::string array = DescribeArray(post.signature.dimensions, post.signature.dtype);
  return line.empty() ? array : array + " at " + line;
}

// Receives the data of an unexpected message and drops them, so that the sender does not wait without end.
Outcome Drop(const Library& mpi, const Channel& channel, const MessageHeader& header, int source, int tag) {
  const auto type = static_cast<Type>(header.type);
  try {
    std::vector<char> data(Bytes(header.count, type));
    return mpi.Recv(channel, {data.data(), header.count, type, source, tag});
  } catch (const std::bad_alloc& error) {
    return OutcomeOfException(error);
  }
}

}  // namespace

Outcome Send(const Library& mpi, const Channel& channel, const SentMessage& sent) {
  if (check < Check::kEvery) return mpi.Send(channel, sent.data);
  MessageMemory* const memory = MessageMemory::OfThisThread();
  if (memory == nullptr) return NoMemory();
  const Outcome outcome = mpi.Send(channel, FirstMessage(channel, sent, &memory->sent));
  const bool is_sent = memory->sent.header.place == DataPlace::kEnclosed;
  return is_sent || !outcome.ok() ? outcome : mpi.Send(channel, sent.data);
}

Outcome Recv(const Library& mpi, const Channel& channel, const ExpectedMessage& expected) {
  Incoming data = expected.data;
  if (check < Check::kEvery || data.source == mpi.proc_null()) return mpi.Recv(channel, data);
  MessageMemory* const memory = MessageMemory::OfThisThread();
  if (memory == nullptr) return NoMemory();
  MessageMemory::Message& received = memory->received;
  const size_t nbytes = Bytes(data.count, data.type);
  const bool in_place = channel.memory == nullptr && nbytes > kCopiedBytes && nbytes <= kEnclosedBytes;
  Envelope envelope;
  Incoming first{&received, sizeof(received), Type::kUint8, data.source, data.tag, data.status, &envelope, true};
  // The sender may have other data than this rank expects. So there is room for the largest first message.
  const std::array<MemoryRange, 3> places{{{&received.header, sizeof(MessageHeader)},
                                           {data.data, static_cast<int64_t>(nbytes)},
                                           {received.data + nbytes, static_cast<int64_t>(kEnclosedBytes - nbytes)}}};
  received.header.place = DataPlace::kNone;
  PYCOLLECTIVE_RETURN_IF_FAILED(in_place ? mpi.RecvInPlaces(channel, first, places) : mpi.Recv(channel, first));
  data.source = envelope.source;  // the data have the header's source, even if the program receives from any rank
  data.tag = envelope.tag;
  if (!received.header.exists()) {
    Outcome outcome{"MPI_Recv", 0, {}};
    outcome.detail = "expected a message that begins with its dtype and shape, got other bytes from rank " + std::to_string(data.source);
    outcome.remedy = "Set PYCOLLECTIVE_CHECK alike on all ranks. After an error in a message, end the program.";
    return outcome;
  }
  const bool is_enclosed = received.header.place == DataPlace::kEnclosed;
  const CallDescription& described = received.header.call;
  const Signature &here = expected.post.signature, &there = described.post.signature;
  if (there.dtype == here.dtype && there.dimensions == here.dimensions) {
    if (!is_enclosed) return mpi.Recv(channel, data);
    if (!in_place && nbytes > 0) PYCOLLECTIVE_RETURN_IF_FAILED(MemoryOf(channel).Copy(data.data, received.data, nbytes));
    return data.status != nullptr ? mpi.SetReceived(data) : Outcome{};
  }
  if (!is_enclosed) PYCOLLECTIVE_RETURN_IF_FAILED(Drop(mpi, channel, received.header, data.source, data.tag));
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
  MessageMemory* const memory = MessageMemory::OfThisThread();
  if (memory == nullptr) return NoMemory();
  std::vector<int64_t> started;
  started.reserve(2);
  const auto start = [&](const Outgoing& message) {
    int64_t handle = 0;
    const Outcome outcome = mpi.Isend(channel, message, &handle);
    if (outcome.ok()) started.push_back(handle);
    return outcome;
  };
  Outcome outcome = start(FirstMessage(channel, sent, &memory->sent));
  if (outcome.ok() && memory->sent.header.place == DataPlace::kNextMessage) outcome = start(sent.data);
  try {
    if (outcome.ok()) outcome = Recv(mpi, channel, expected);
  } catch (const std::bad_alloc& error) {  // MPI still reads the messages
    outcome = OutcomeOfException(error);
  }
  const Outcome gone = mpi.WaitAll(&started);
  return outcome.ok() ? gone : outcome;
}

}  // namespace pycollective

// Describes a message of a program, from its bytes: "float32[3] at train.py:12 (step)"; "" for bytes without a header.
PYCOLLECTIVE_EXPORT const char* pycollective_message_header_text(const char* bytes, int64_t nbytes) {
  static thread_local std::string text;
  text.clear();
  if (nbytes < int64_t{sizeof(pycollective::MessageHeader)}) return text.c_str();
  pycollective::MessageHeader header;
  std::memcpy(&header, bytes, sizeof header);
  if (header.exists()) {
    header.call.line[pycollective::kLineBytes - 1] = 0;
    text = pycollective::DescribeMessage(header.call.post, header.call.line);
  }
  return text.c_str();
}

// Whether the data follow their header in the same message, so that no second one comes.
PYCOLLECTIVE_EXPORT bool pycollective_message_header_encloses(const char* bytes) {
  pycollective::MessageHeader header;
  std::memcpy(&header, bytes, sizeof header);
  return header.place == pycollective::DataPlace::kEnclosed;
}

namespace {
const pycollective::Listed listed{PYCOLLECTIVE_TYPED(message_header_text), PYCOLLECTIVE_TYPED(message_header_encloses)};
}  // namespace
