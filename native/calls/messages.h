// Messages of programs: send, recv, sendrecv.
//
// A message begins with a header: a description (`CallDescription`: dtype, shape, the line of the sender). Data of at most
// kEnclosedBytes follow it in the same message of MPI. Larger data, and data in an accelerator's memory, are a second message with
// the same tag. MPI keeps the order of messages of one sender with one tag, so the receiver knows the description before it
// receives the second message. If the dtype or shape differs, the receiver returns an error that names both lines.

#ifndef PYCOLLECTIVE_NATIVE_CALLS_MESSAGES_H_
#define PYCOLLECTIVE_NATIVE_CALLS_MESSAGES_H_

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "calls/comparison.h"
#include "mpi/collectives.h"
#include "shared_memory/board.h"

namespace pycollective {

// A message that this rank sends or expects. `post` has its dtype, its shape and the line of the call.
struct SentMessage {
  Outgoing data;
  Post post;
};
struct ExpectedMessage {
  Incoming data;
  Post post;
};

Outcome Send(const Library& mpi, const Channel& channel, const SentMessage& sent);
Outcome Recv(const Library& mpi, const Channel& channel, const ExpectedMessage& expected);
// Sends and receives at the same time: neither message waits for the other.
Outcome Sendrecv(const Library& mpi, const Channel& channel, const SentMessage& sent, const ExpectedMessage& expected);

// Messages under way between their start and their wait, and their data, in memory of this library: XLA may give the arrays of a
// program away in between.
//
// A thread of this library lets MPI make progress with large messages, since MPI may move data only while it is called.
class StartedMessages {
 public:
  // `sends`, `receives`: false if there is no such message.
  StartedMessages(bool sends, const SentMessage& sent, bool receives, const ExpectedMessage& expected);
  StartedMessages(const StartedMessages&) = delete;
  StartedMessages& operator=(const StartedMessages&) = delete;

  bool sends() const { return sends_; }
  bool receives() const { return receives_; }
  const SentMessage& sent() const { return sent_; }
  const ExpectedMessage& expected() const { return expected_; }
  // Whether the data that arrive have this length and type.
  bool Brings(int64_t count, Type type) const { return receives_ && expected_.data.count == count && expected_.data.type == type; }

  // Copies the data of the sent message, and starts all messages. It waits for nobody. Also after an error MPI may use the memory of
  // this object.
  Outcome Start(const Library& mpi, const Channel& channel, const void* data);
  // Waits for all messages, and returns the data that have arrived.
  Outcome Wait(const Library& mpi, const Channel& channel, const void** arrived);
  // Lets MPI make progress. Returns whether more is needed.
  bool Progress(const Library& mpi);
  // Ends the messages that MPI can end without other ranks: receives are cancelled. Returns what they were.
  std::string Abandon(const Library& mpi);

 private:
  Outcome StartSend(const Library& mpi, const Channel& channel, const Outgoing& out);
  Outcome StartRecv(const Library& mpi, const Channel& channel, const Incoming& in);
  // `has_next`: whether the sender sends the data in a second message.
  Outcome CheckHeader(const Library& mpi, const Channel& channel, bool* has_next);

  const bool sends_, receives_;
  SentMessage sent_;
  ExpectedMessage expected_;
  bool has_headers_ = false;
  std::unique_ptr<char[]> outgoing_, incoming_;  // the header, if there are headers, and the data
  std::mutex mutex_;                             // MPI may not end one request in two threads
  std::vector<MessageUnderWay> under_way_;
  Outcome failed_;
};

// The started messages that nobody has waited for yet, by the numbers that programs have for them. Numbers are whole, from 1 on, and
// a float32 holds each of them. Any thread may call these functions.
int64_t AddStartedMessages(std::shared_ptr<StartedMessages> started);
std::shared_ptr<StartedMessages> FindStartedMessages(int64_t number);
// Removes and returns the messages; null: there are none of this number.
std::shared_ptr<StartedMessages> TakeStartedMessages(int64_t number);

}  // namespace pycollective

#endif  // PYCOLLECTIVE_NATIVE_CALLS_MESSAGES_H_
