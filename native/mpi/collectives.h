// The plain collectives and messages: they use MPI and not XLA.
//
// Counts are int64. MPI 3's counts are int, so a longer array is sent in chunks (elementwise operations) or as one element
// of a derived datatype (blocks, messages). If MPI leaves a rank's result undefined, it is zeros here.

#ifndef PYCOLLECTIVE_NATIVE_MPI_COLLECTIVES_H_
#define PYCOLLECTIVE_NATIVE_MPI_COLLECTIVES_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/operations.h"
#include "mpi/mpi.h"

namespace pycollective {

// The outcome of a call. `call` names the function that failed; null on success.
struct Outcome {
  const char* call = nullptr;
  int code = 0;
  std::string detail;            // set instead of `code` if MPI succeeded but the result is unusable
  bool of_runtime = false;       // `call` is a function of an accelerator's runtime (runtime.h), `detail` its message
  const char* remedy = nullptr;  // set if `detail` is the whole message: the advice for the user
  bool ok() const { return call == nullptr; }
  // Adds the outcome of a later part of the call. The first error stays, but one of the runtime, which ends the call, goes before one of
  // MPI.
  void Add(const Outcome& later) {
    if (ok() || (later.of_runtime && !of_runtime)) *this = later;
  }
};

// The outcome of a call that ended in an exception.
inline Outcome OutcomeOfException(const std::exception& error) {
  Outcome outcome{"C++", 0, std::string("expected memory for the call, got the exception ") + error.what()};
  outcome.remedy = "Use smaller arrays, or fewer ranks on this host.";
  return outcome;
}

// Returns from the enclosing function if a call has failed.
#define PYCOLLECTIVE_RETURN_IF_FAILED(expression)      \
  do {                                                 \
    ::pycollective::Outcome outcome_ = (expression);   \
    if (!outcome_.ok()) return outcome_;               \
  } while (false)

class Exchange;
class CombiningTree;
class HostLevels;

// Writes zeros and copies in the memory of a call's arrays: here host memory; DeviceMemory (device.h) overrides it.
class Memory {
 public:
  virtual ~Memory() = default;
  virtual Outcome Clear(void* to, size_t nbytes) const;
  virtual Outcome Copy(void* to, const void* from, size_t nbytes) const;
};

// The MPI communicators of one device of this process; the handles are widened to 64 bits. They are private: no receive of a
// user can match a message here, and no receive with wildcards can match a message of ppermute.
struct Channel {
  int64_t collective = 0;
  int64_t messages = 0;
  int64_t permute = 0;  // the whole communicator: ranks of Permute are its ranks
  // For messages of this package between the ranks of the channel, with a tag of their own. 0: `collective`.
  int64_t own_messages = 0;
  int own_tag = 0;
  int rank = 0;
  int size = 1;
  int first_tag = 0;  // a message with tag t is sent with the tag first_tag + t * tag_step
  int tag_step = 1;
  const Memory* memory = nullptr;  // null: host memory
  Exchange* exchange = nullptr;    // memory that the ranks share; null: none
  CombiningTree* tree = nullptr;   // of ranks on one host, which compare their calls in it; null: otherwise
  HostLevels* levels = nullptr;    // for ranks on several hosts: the levels by which ranks of a host share memory
};

// The channel for messages of this package between the ranks of a channel, which have the tag `own_tag`. A rank sends them in the
// order of its calls on the channel, and receives them in that order.
inline Channel ChannelOfOwnMessages(const Channel& channel) {
  Channel own;
  own.messages = channel.own_messages != 0 ? channel.own_messages : channel.collective;
  own.own_tag = channel.own_tag;
  own.rank = channel.rank;
  own.size = channel.size;
  return own;
}

// The channel for the data of messages of programs that come after their headers (calls/messages.h). Each has a tag that its header
// tells, so no receive for another message takes it.
inline Channel ChannelOfData(const Channel& channel) {
  Channel data = channel;
  data.messages = channel.permute;
  data.first_tag = 0;
  data.tag_step = 1;
  return data;
}

// The memory of the arrays of calls on a channel.
inline const Memory& MemoryOf(const Channel& channel) {
  static const auto& host = *new Memory;
  return channel.memory != nullptr ? *channel.memory : host;
}

// The arguments of a collective. For an array of blocks, `count` is the size of one block; `channel.size` blocks are
// contiguous in the order of the ranks. If `send` equals `recv`, the collective works in place, if MPI can.
struct Arguments {
  const void* send;
  void* recv;
  int64_t count;
  Type type;
  Op op = Op::kSum;  // of reductions
  int root = 0;      // of collectives with a root
  int to = -1;       // of a permutation: this rank's destination and source; -1: none
  int from = -1;

  // The arguments with other arrays.
  Arguments On(const void* other_send, void* other_recv, int64_t other_count) const {
    Arguments other = *this;
    other.send = other_send;
    other.recv = other_recv;
    other.count = other_count;
    return other;
  }
};

// The operand and the result of an allreduce that are not one array in memory. `bring` writes a range of the operand's elements,
// and `take` reads a range of the result's elements. They are called for all elements, in pieces, in any order. `take` of some
// elements may come before `bring` of others. So the result may overlap with the operand only element by element.
struct ScatteredArray {
  std::function<void(int64_t first, int64_t count, void* to)> bring;
  std::function<void(int64_t first, int64_t count, const void* from)> take;
};

// Makes call(arguments), in place, on one array with all elements: `a.recv`, or new memory if it is null.
template <typename Call>
Outcome InOneArray(const Arguments& a, const ScatteredArray& array, Call call) {
  std::unique_ptr<char[]> own;
  if (a.recv == nullptr) own.reset(new char[static_cast<size_t>(a.count * kTypeBytes[int(a.type)])]);
  void* const whole = a.recv == nullptr ? own.get() : a.recv;
  array.bring(0, a.count, whole);
  PYCOLLECTIVE_RETURN_IF_FAILED(call(a.On(whole, whole, a.count)));
  array.take(0, a.count, whole);
  return {};
}

// A message that this rank sends. `dest` may be MPI_PROC_NULL: then nothing is sent.
struct Outgoing {
  const void* data;
  int64_t count;
  Type type;
  int dest;
  int tag;
};

// The source and the tag of a message.
struct Envelope {
  int source;
  int tag;
};

// A message that this rank receives. `source` may be MPI_PROC_NULL: then zeros are received. MPI writes the caller's
// MPI_Status at `status`, and `envelope` is set; both may be null. A message whose length is not `count` is an error, unless
// `may_be_shorter`.
struct Incoming {
  void* data;
  int64_t count;
  Type type;
  int source;
  int tag;
  void* status = nullptr;
  Envelope* envelope = nullptr;
  bool may_be_shorter = false;
};

// A message under way, as Isend and Irecv start it.
struct MessageUnderWay {
  int64_t handle = 0;
  bool is_received = false;  // else it is sent
  Incoming incoming = {};    // of a message that is received
  bool is_done = false;
};

// Consecutive bytes in memory.
struct MemoryRange {
  void* data;
  int64_t nbytes;
};

// The MPI library.
class Library {
 public:
  virtual ~Library() = default;

  // recv[i] = op over ranks of send[i].
  virtual Outcome Allreduce(const Channel&, const Arguments&) const = 0;
  // The same operation on elements that are not in one array. `send` is not used; `recv`: memory for all elements, or null.
  virtual Outcome AllreduceScattered(const Channel& channel, const Arguments& a, const ScatteredArray& array) const {
    return InOneArray(a, array, [&](const Arguments& whole) { return Allreduce(channel, whole); });
  }
  // The collectives of one array in the table: Outcome Allgather(const Channel&, const Arguments&) const, ...
#define PYCOLLECTIVE_DECLARE(name, Name, ...) virtual Outcome Name(const Channel&, const Arguments&) const = 0;
#define PYCOLLECTIVE_NOTHING(...)
  PYCOLLECTIVE_OPERATIONS(PYCOLLECTIVE_DECLARE, PYCOLLECTIVE_NOTHING)
#undef PYCOLLECTIVE_NOTHING
#undef PYCOLLECTIVE_DECLARE
  virtual Outcome Barrier(const Channel&) const = 0;

  // Whether a program may use the tag on the channel.
  virtual Outcome CheckTag(const Channel&, int tag) const = 0;
  virtual Outcome Send(const Channel&, const Outgoing&) const = 0;
  virtual Outcome Recv(const Channel&, const Incoming&) const = 0;
  // Receives a message of bytes into three places, one after the other. The memory, the length and the type of `in` are not used,
  // and the message may be shorter.
  virtual Outcome RecvInPlaces(const Channel&, const Incoming& in, const std::array<MemoryRange, 3>& places) const = 0;
  virtual Outcome Sendrecv(const Channel&, const Outgoing&, const Incoming&) const = 0;
  // Whether a message of another library has the length of `in`; that library has written the status of `in`.
  virtual Outcome CheckReceived(const char* call, const Incoming& in) const = 0;
  // Sets the status of `in` as for a message of its length and type.
  virtual Outcome SetReceived(const Incoming& in) const = 0;
  // Sendrecv of equal arrays on a communicator of its own, on which no receive of a program can match. `on_channel`: the
  // same call on the channel, if all sources and destinations are on it; else null.
  virtual Outcome Permute(const Channel&, const Outgoing&, const Incoming&, const Arguments* on_channel) const = 0;

  // Starts a message and sets its handle. WaitAll ends started messages, by their handles.
  virtual Outcome Isend(const Channel&, const Outgoing&, int64_t* handle) const = 0;
  virtual Outcome Irecv(const Channel&, const Incoming&, int64_t* handle) const = 0;
  virtual Outcome WaitAll(std::vector<int64_t>* handles) const = 0;
  // Ends one started message. If not `waits`, it lets MPI make progress, and ends the message if it is complete.
  virtual Outcome Finish(MessageUnderWay* message, bool waits) const = 0;
  // Takes the receive of a started message back, and ends it.
  virtual Outcome Cancel(MessageUnderWay* message) const = 0;

  // Makes a communicator of these ranks of `from` (empty: all ranks), in their order. Only these ranks make this call. The
  // tag distinguishes communicators that several threads make at the same time.
  virtual Outcome CreateComm(int64_t from, const std::vector<int>& ranks, int tag, int64_t* made) const = 0;
  virtual Outcome FreeComm(int64_t comm) const = 0;

  // Whether our own code makes the reduction (own_reductions.h), which needs host memory.
  virtual bool IsOwn(Op, Type) const = 0;

  // Lets MPI make progress. Fails if `rank` of the channel has failed, or if the channel's communicator was revoked. Only an
  // MPI library with fault tolerance reports this.
  virtual Outcome Progress(const Channel&, int rank) const = 0;

  // Ends all processes of MPI_COMM_WORLD.
  virtual void Abort(int status) const = 0;

  virtual std::string ErrorString(int code) const = 0;
  virtual int proc_null() const = 0;

  // Larger counts are sent in pieces. It is INT_MAX; tests lower it to reach the code for larger counts.
  int64_t max_count = INT32_MAX;
  // The largest tag that MPI allows. The upper half of the tags is for the data of messages (ChannelOfData).
  int64_t largest_tag = 32767;
  int64_t data_tags() const { return (largest_tag + 1) / 2; }
};

// Binds to an MPI library. `addresses`: the addresses of the functions in kFunctionNames, in this order. Returns null and
// sets `error` if the library cannot be used.
std::unique_ptr<Library> MakeLibrary(const Binding& binding, void* const* addresses, std::string* error);

// The MPI library of this process. It is set before the first program runs; null before that.
extern Library* library;

}  // namespace pycollective

#endif  // PYCOLLECTIVE_NATIVE_MPI_COLLECTIVES_H_
