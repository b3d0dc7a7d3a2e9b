// Collectives on plain memory: knows MPI, not XLA.
//
// Every function takes counts as int64. MPI 3's counts are int, so a longer array goes in chunks
// (elementwise operations) or as one element of a derived datatype (block operations). `send == recv`
// asks for the in-place form where MPI has one. Where MPI leaves a rank's result undefined, it is zeros.

#ifndef PYCOLLECTIVE_NATIVE_COLLECTIVES_H_
#define PYCOLLECTIVE_NATIVE_COLLECTIVES_H_

#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "mpi.h"

namespace pycollective {

// The outcome of an MPI call. `call` names the function that failed; null on success.
struct Outcome {
  const char* call = nullptr;
  int code = 0;
  std::string detail;  // set instead of `code` when MPI succeeded but the result cannot be used
  bool of_runtime = false;  // `call` is one of an accelerator's runtime (runtime.h) and `detail` what it says of it
  const char* remedy = nullptr;  // set: `detail` is the whole of what is wrong, and this is what to do
  bool ok() const { return call == nullptr; }
};

// Of an exception in the midst of a call.
inline Outcome Thrown(const std::exception& error) {
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

// What a library itself does to the memory that it is handed. Plain memory; others override it.
class Memory {
 public:
  virtual ~Memory() = default;
  virtual Outcome Clear(void* to, size_t nbytes) const;
  virtual Outcome Copy(void* to, const void* from, size_t nbytes) const;
};

// A communicator as seen from this process, and as one device uses it. Handles are widened; they are private ones, so
// wildcard receives can match neither user traffic nor ppermute's.
struct Channel {
  int64_t collective = 0;
  int64_t messages = 0;
  int64_t permute = 0;  // of the whole communicator, whose ranks it counts
  int rank = 0;
  int size = 1;
  int first_tag = 0;  // a message's tag t travels as first_tag + t * tag_step
  int tag_step = 1;
  const Memory* memory = nullptr;  // null: plain
};

class Library {
 public:
  virtual ~Library() = default;

  // recv[i] = op over ranks of send[i].
  virtual Outcome Allreduce(const Channel&, const void* send, void* recv, int64_t count, Type, Op) const = 0;
  virtual Outcome Reduce(const Channel&, const void* send, void* recv, int64_t count, Type, Op, int root) const = 0;
  virtual Outcome Scan(const Channel&, const void* send, void* recv, int64_t count, Type, Op) const = 0;
  virtual Outcome Exscan(const Channel&, const void* send, void* recv, int64_t count, Type, Op) const = 0;
  virtual Outcome Bcast(const Channel&, const void* send, void* recv, int64_t count, Type, int root) const = 0;
  // `count` is one rank's block; the other side holds `size` of them in rank order.
  virtual Outcome ReduceScatter(const Channel&, const void* send, void* recv, int64_t count, Type, Op) const = 0;
  virtual Outcome Allgather(const Channel&, const void* send, void* recv, int64_t count, Type) const = 0;
  virtual Outcome Alltoall(const Channel&, const void* send, void* recv, int64_t count, Type) const = 0;
  virtual Outcome Gather(const Channel&, const void* send, void* recv, int64_t count, Type, int root) const = 0;
  virtual Outcome Scatter(const Channel&, const void* send, void* recv, int64_t count, Type, int root) const = 0;
  // Ranks may be MPI_PROC_NULL: nothing is sent, zeros are received. A message whose length is not
  // `count` is an error.
  virtual Outcome Send(const Channel&, const void* send, int64_t count, Type, int dest, int tag) const = 0;
  virtual Outcome Recv(const Channel&, void* recv, int64_t count, Type, int source, int tag) const = 0;
  virtual Outcome Sendrecv(const Channel&, const void* send, int64_t send_count, Type send_type, int dest,
                           int send_tag, void* recv, int64_t recv_count, Type recv_type, int source,
                           int recv_tag) const = 0;
  // As Sendrecv of equal arrays, where no program's own receive can match.
  virtual Outcome Permute(const Channel&, const void* send, void* recv, int64_t count, Type, int dest,
                          int send_tag, int source, int recv_tag) const = 0;
  virtual Outcome Barrier(const Channel&) const = 0;

  // A communicator of those ranks of `from` (all of them if empty), in their order. They alone must make this call; the
  // tag keeps apart what several threads make at once.
  virtual Outcome MakeChannel(int64_t from, const std::vector<int>& ranks, int tag, int64_t* made) const = 0;
  virtual Outcome FreeChannel(int64_t channel) const = 0;

  // Whether a reduction is one of our own, which works on plain memory alone.
  virtual bool IsOwn(Op, Type) const = 0;

  virtual std::string ErrorString(int code) const = 0;
  virtual int proc_null() const = 0;

  // Counts above this go in pieces. INT_MAX but in tests, which lower it to reach that code.
  int64_t max_count = INT32_MAX;
};

// `addresses` are those of kFunctionNames, in order. Null, with `error` set, if the binding is unusable.
std::unique_ptr<Library> MakeLibrary(const Binding& binding, void* const* addresses, std::string* error);

}  // namespace pycollective

#endif  // PYCOLLECTIVE_NATIVE_COLLECTIVES_H_
