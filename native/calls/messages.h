// Messages of programs: send, recv, sendrecv.
//
// A message begins with a header: a description (`CallDescription`: dtype, shape, the line of the sender). Data of at most
// kEnclosedBytes follow it in the same message of MPI. Larger data, and data in an accelerator's memory, are a second message on
// another communicator, with a tag that the header tells, so that no receive of another message takes them. If the dtype or shape
// differs, the receiver takes the data out of MPI, and returns an error that names both lines.

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
  Outcome Wait(const Library& mpi, const void** arrived);
  // Lets MPI make progress. Returns whether more is needed.
  bool Progress(const Library& mpi);
  // Ends the messages that MPI can end without other ranks: receives are cancelled. Returns what they were. `mpi`: null: without a
  // call of MPI.
  std::string Abandon(const Library* mpi);
  // Whether the communicator `Channel::permute` of their channel is `comm`.
  bool IsOn(int64_t comm) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return data_channel_.messages == comm;
  }

 private:
  Outcome StartSend(const Library& mpi, const Channel& channel, const Outgoing& out);
  Outcome StartRecv(const Library& mpi, const Channel& channel, const Incoming& in);
  // Finishes message i (Library::Finish). If it is the header, starts the receive of the data that come after it.
  void Finish(const Library& mpi, size_t i, bool waits);
  Outcome ReceiveData(const Library& mpi);

  const bool sends_, receives_;
  SentMessage sent_;
  ExpectedMessage expected_;
  bool awaits_header_ = false;                   // the first message under way
  Channel data_channel_;
  std::unique_ptr<char[]> outgoing_, incoming_;  // the header, if there are headers, and the data
  std::unique_ptr<char[]> other_;                // data of another array than expected
  std::mutex mutex_;                             // MPI may not end one request in two threads
  std::vector<MessageUnderWay> under_way_;
  Outcome failed_;
};

// The started messages that nobody has waited for yet, by the numbers that programs have for them. Numbers are whole, from 1 on, and
// a float32 holds each of them. Any thread may call these functions. Messages are added before their start, so that their memory
// stays after an exception.
int64_t AddStartedMessages(const std::shared_ptr<StartedMessages>& started);
// Passes messages that have started to the thread of progress, if they are large.
void LetProgress(const std::shared_ptr<StartedMessages>& started);
std::shared_ptr<StartedMessages> FindStartedMessages(int64_t number);
// Removes and returns the messages; null: there are none of this number.
std::shared_ptr<StartedMessages> TakeStartedMessages(int64_t number);
// Ends the messages on a communicator (IsOn), which is about to be freed. `mpi`: null: the communicator is lost; its messages are
// forgotten without a call of MPI.
void EndStartedMessages(const Library* mpi, int64_t comm);
// The number that a program has for messages, as an integer; -1: it is none.
inline int64_t NumberOfMessages(float number) {
  const bool is_whole = number >= 0 && number < (1 << 24) && number == static_cast<float>(static_cast<int64_t>(number));
  return is_whole ? static_cast<int64_t>(number) : -1;
}

}  // namespace pycollective

#endif  // PYCOLLECTIVE_NATIVE_CALLS_MESSAGES_H_
