// Messages of programs: send, recv, sendrecv.
//
// A message goes in two: first a header that says what it is (`CallDescription`: dtype, shape, the line that sent it), then its
// data, under the same tag. Few data lie in the header, and nothing comes after it. MPI keeps the order of messages of one sender with
// one tag, so the receiver knows what comes before it takes the data. A message of another dtype or shape is an error there,
// which names both lines.

#ifndef PYCOLLECTIVE_NATIVE_CALLS_MESSAGES_H_
#define PYCOLLECTIVE_NATIVE_CALLS_MESSAGES_H_

#include "mpi/collectives.h"
#include "shared_memory/board.h"

namespace pycollective {

// What ranks tell each other of a call, where they share no memory.
struct CallDescription {
  Post post;
  char line[kLineBytes] = {};

  CallDescription() = default;
  explicit CallDescription(const Post& post);
};

// A message that this rank sends, or one that it expects. `post` has its dtype, its shape and the line that makes the call.
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
// Neither message waits for the other.
Outcome Sendrecv(const Library& mpi, const Channel& channel, const SentMessage& sent, const ExpectedMessage& expected);

}  // namespace pycollective

#endif  // PYCOLLECTIVE_NATIVE_CALLS_MESSAGES_H_
