// Messages of programs: send, recv, sendrecv.
//
// A message begins with a header: a description (`CallDescription`: dtype, shape, the line of the sender). Data of at most
// kEnclosedBytes follow it in the same message of MPI. Larger data, and data in an accelerator's memory, are a second message with
// the same tag. MPI keeps the order of messages of one sender with one tag, so the receiver knows the description before it
// receives the second message. If the dtype or shape differs, the receiver returns an error that names both lines.

#ifndef PYCOLLECTIVE_NATIVE_CALLS_MESSAGES_H_
#define PYCOLLECTIVE_NATIVE_CALLS_MESSAGES_H_

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

}  // namespace pycollective

#endif  // PYCOLLECTIVE_NATIVE_CALLS_MESSAGES_H_
