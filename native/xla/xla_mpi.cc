// The MPI library that XLA's own collectives call, for global arrays on CPU devices (pycollective.distributed).
//
// XLA contains MPItrampoline. When XLA is loaded, MPItrampoline opens this library, which MPITRAMPOLINE_LIB names, looks up
// the names of xla_mpi_names.h, and reads the constants. MPI has not started by then, so the constants are tokens of our
// own. The functions are called later, when pycollective has bound MPI. Each function makes the call that a handler would
// make (call.h), so ranks compare new calls, and the watchdog sees waits.
//
// When XLA first needs a communicator for a set of devices, a "clique", it calls MPI_Comm_split on the world, with the
// number of the first device and its own place. It does not name the other members. A real split would wait for all
// processes, and if processes ask for different cliques at the same time, it would make communicators with wrong members.
// So this library does not split. pycollective_xla_learn names the members of a clique while XLA runs a program over this
// clique only. The allgather of that program is not made; its only purpose is that XLA asks for the communicator. The first
// real call makes the communicator, by its members only, like any channel (communicators.h).

#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "base/exports.h"
#include "calls/call.h"
#include "xla/xla_mpi_names.h"

namespace ffi = xla::ffi;

namespace pycollective {
namespace {

// Constants ------------------------------------------------------------------------------------------------------
//
// The token of a datatype or a reduction is the number of its row in the table, counted from 1. Constants that XLA does not
// use have other tokens. The token of MPI's world is kWorld, that of another communicator the address of a Clique.

using Token = uintptr_t;

enum : Token {
  kNoDatatype,
#define PYCOLLECTIVE_ROW(name, ...) kDatatype##name,
  PYCOLLECTIVE_XLA_TYPES(PYCOLLECTIVE_ROW)
#undef PYCOLLECTIVE_ROW
};

enum : Token {
  kNoReduction,
#define PYCOLLECTIVE_ROW(name, ...) kReduction##name,
  PYCOLLECTIVE_XLA_OPS(PYCOLLECTIVE_ROW)
#undef PYCOLLECTIVE_ROW
};

enum : Token {
  kWorld = 100,
#define PYCOLLECTIVE_ROW(name) kHandle##name,
  PYCOLLECTIVE_XLA_OTHER_HANDLES(PYCOLLECTIVE_ROW)
#undef PYCOLLECTIVE_ROW
};

enum : int {
  kFirstInteger = 100,
#define PYCOLLECTIVE_ROW(name) kInteger##name,
  PYCOLLECTIVE_XLA_OTHER_INTS(PYCOLLECTIVE_ROW)
#undef PYCOLLECTIVE_ROW
};

constexpr struct {
  Type type;
  ffi::DataType dtype;
} kDatatypes[] = {
#define PYCOLLECTIVE_ROW(name, type, dtype) {Type::type, ffi::dtype},
    PYCOLLECTIVE_XLA_TYPES(PYCOLLECTIVE_ROW)
#undef PYCOLLECTIVE_ROW
};

constexpr Op kReductions[] = {
#define PYCOLLECTIVE_ROW(name, op) Op::op,
    PYCOLLECTIVE_XLA_OPS(PYCOLLECTIVE_ROW)
#undef PYCOLLECTIVE_ROW
};

// Errors ---------------------------------------------------------------------------------------------------------

constexpr int kSuccess = 0;
constexpr int kFailure = 1;
constexpr size_t kErrorBytes = 512;  // XLA's buffer for the text of an error is at least this large

// XLA asks for the text of an error in the thread that got the error, before it makes another call.
thread_local std::string last_error;

int Failure(std::string text) {
  last_error = std::move(text);
  return kFailure;
}

int CodeOf(const ffi::Error& error) { return error.success() ? kSuccess : Failure(error.message()); }

// For a call that cannot return an error. The launcher ends the other ranks.
[[noreturn]] void EndProcess(const std::string& what) {
  std::fprintf(stderr, "pycollective.distributed: %s\n", what.c_str());
  std::fflush(stderr);
  _exit(1);
}

[[noreturn]] void NotProvided(const char* name) {
  EndProcess(std::string("expected XLA to call the functions of MPI that it called when this was written, got ") +
             name + ". Use pycollective.distributed.initialize(collectives=\"gloo\"), and please report this.");
}

// Cliques --------------------------------------------------------------------------------------------------------

// A communicator of XLA: the number and the fingerprint of ours. It lives as long as the process. XLA keeps the communicator,
// rank and size of its first request, so a clique whose members are not named yet also has an object.
struct Clique {
  bool is_known() const { return comm[0] >= 0; }
  int64_t comm[2] = {-1, 0};
  int rank;  // the rank that XLA got
  int size;
};

struct World {
  int rank;
  int size;
};
const World* world = nullptr;  // null: pycollective.distributed.initialize was not called

constexpr size_t kMarkCount = 4;
constexpr size_t kMarkBytes = kMarkCount * sizeof(uint32_t);

// While `is_learning`: the clique for which XLA will ask. Another program may ask for another clique at the same time, so the
// members are only given to the program that gathers the mark.
std::atomic<bool> is_learning{false};
Clique learned;
uint32_t mark[kMarkCount];  // the operand of the program that makes XLA ask

Clique* CliqueOf(Token comm) { return reinterpret_cast<Clique*>(comm); }

constexpr char kUnlearned[] =
    "pycollective.distributed: expected a program that jax.jit has compiled in this process, got another one. Compile "
    "it here, or use pycollective.distributed.initialize(collectives=\"gloo\").";

constexpr char kAskedBefore[] =
    "pycollective.distributed: expected a set of processes that a program compiled in this process has named first, got "
    "one that another program has used before. Compile that program here, or use "
    "pycollective.distributed.initialize(collectives=\"gloo\").";

// Makes a call as a handler would make it. body(library, lane) returns its outcome. `operand`: this rank's operand, for the
// numbers guard; null: no check.
template <typename Body>
int Run(Token comm, Operation operation, const Signature& signature, const Operand* operand, int64_t nbytes, Body body) {
  const Clique* clique = CliqueOf(comm);
  if (!clique->is_known()) return Failure(kUnlearned);
  return CodeOf(CatchAsError(operation, [&] {
    Call call(operation, {{clique->comm, 2}, 1}, 0, Staging::kHostMemory, 0);
    if (operand != nullptr) call.AddOperandForNanCheck(*operand);
    return call.RunNow(signature, nbytes, {}, [&](const Library& mpi, Lane& lane) { return body(call, mpi, lane); });
  }));
}

bool IsKnown(Token datatype) { return datatype != kNoDatatype && datatype <= std::size(kDatatypes); }

constexpr char kUnknown[] =
    "pycollective.distributed: expected a datatype and a reduction that XLA used when this was written, got others. "
    "Please report this.";

// XLA's counts have 64 bits, and XLA cuts them to MPI's int. A count below 2^32 can be recovered from the lower half.
int64_t CountOf(int count) { return static_cast<uint32_t>(count); }

int64_t NBytes(int count, Token datatype) {
  return CountOf(count) * kTypeBytes[static_cast<int>(kDatatypes[datatype - 1].type)];
}

// Makes a collective of `count` elements, which all members call.
int RunCollective(Token comm, Operation operation, Token datatype, Token reduction, const void* send, void* recv,
                  int count, Outcome (Library::*call)(const Channel&, const Arguments&) const) {
  if (!IsKnown(datatype) || reduction > std::size(kReductions)) return Failure(kUnknown);
  const auto& known = kDatatypes[datatype - 1];
  Signature signature;
  signature.operation = operation;
  signature.dtype = static_cast<int32_t>(known.dtype);
  signature.count = CountOf(count);
  signature.dimensions = Dimensions(std::array<int64_t, 1>{signature.count});
  Arguments arguments{send, recv, signature.count, known.type};
  if (reduction != kNoReduction) {
    arguments.op = kReductions[reduction - 1];
    signature.reduce_op = static_cast<int32_t>(arguments.op);
  }
  const int64_t blocks = operation == kReduceScatter ? CliqueOf(comm)->size : 1;
  const Operand operand{send, signature.count * blocks, signature.dtype, signature.dimensions};
  return Run(comm, operation, signature, &operand, NBytes(count, datatype),
             [&](const Call&, const Library& mpi, const Lane& lane) { return (mpi.*call)(lane.channel, arguments); });
}

// A message between two members. It uses the communicator of all processes: the clique's own communicator can only be made by
// all its members, and a member may take part in no message.
struct Peers {
  explicit Peers(const Call& call)
      : clique(*call.communicator()->ranks),
        channel((call.communicator()->whole != nullptr ? call.communicator()->whole->ranks : call.communicator()->ranks)
                    ->channel(0)) {}
  const RankGroup& clique;
  const Channel& channel;
  Outgoing To(const void* data, int count, Token datatype, int dest, int tag) const {
    return {data, CountOf(count), kDatatypes[datatype - 1].type, clique.RankInWhole(dest), tag};
  }
  Incoming From(void* data, int count, Token datatype, int source, int tag) const {
    return {data, CountOf(count), kDatatypes[datatype - 1].type, clique.RankInWhole(source), tag};
  }
};

// A message in progress: MPI's request, and the clique that waits for it.
struct Request {
  Token comm;
  int64_t handle;
};

template <typename Start>
int StartMessage(Token comm, Operation operation, int count, Token datatype, Token* request, Start start) {
  if (!IsKnown(datatype)) return Failure(kUnknown);
  auto made = std::make_unique<Request>(Request{comm, 0});
  const int code = Run(comm, operation, {}, nullptr, NBytes(count, datatype),
                       [&](const Call& call, const Library& mpi, const Lane&) {
                         return start(mpi, Peers(call), &made->handle);
                       });
  if (code == kSuccess) *request = reinterpret_cast<Token>(made.release());
  return code;
}

}  // namespace
}  // namespace pycollective

using namespace pycollective;  // NOLINT: the functions below have C names

// What Python calls ----------------------------------------------------------------------------------------------

// Whether XLA has opened this library.
static bool is_open = false;

PYCOLLECTIVE_EXPORT bool pycollective_xla_is_open() { return is_open; }

// Allows XLA's calls: this process is `rank` of `size`. MPI must be bound.
PYCOLLECTIVE_EXPORT void pycollective_xla_start(int32_t rank, int32_t size) {
  world = new World{rank, size};
}

// Names the clique for whose communicator XLA will ask, until the next call of this function, in a program that gathers the
// kMarkCount numbers `of_program`. The clique is a communicator or a part of one, by its number and fingerprint. null: the
// program has run.
PYCOLLECTIVE_EXPORT void pycollective_xla_learn(int64_t number, int64_t fingerprint, const uint32_t* of_program) {
  if (of_program == nullptr) {
    is_learning.store(false, std::memory_order_release);
    return;
  }
  const auto ranks = FindCommunicator(number)->ranks;
  learned = {{number, fingerprint}, ranks->rank(), ranks->size()};
  std::memcpy(mark, of_program, kMarkBytes);
  is_learning.store(true, std::memory_order_release);
}

static const Listed listed{PYCOLLECTIVE_TYPED(xla_is_open), PYCOLLECTIVE_TYPED(xla_start), PYCOLLECTIVE_TYPED(xla_learn)};

// What MPItrampoline looks up ------------------------------------------------------------------------------------

#define PYCOLLECTIVE_CONSTANT(type, name, value) PYCOLLECTIVE_EXPORT type name; type name = value;

PYCOLLECTIVE_CONSTANT(int, mpiwrapper_version_major, 2)
PYCOLLECTIVE_CONSTANT(int, mpiwrapper_version_minor, 0)
PYCOLLECTIVE_CONSTANT(int, mpiwrapper_version_patch, 0)
PYCOLLECTIVE_CONSTANT(int, mpiabi_version_major, 2)
PYCOLLECTIVE_CONSTANT(int, mpiabi_version_minor, 9)
PYCOLLECTIVE_CONSTANT(int, mpiabi_version_patch, 0)

PYCOLLECTIVE_CONSTANT(Token, MPIABI_COMM_WORLD, kWorld)
#define PYCOLLECTIVE_ROW(name, value) PYCOLLECTIVE_CONSTANT(int, MPIABI_##name, value)
PYCOLLECTIVE_XLA_INTS(PYCOLLECTIVE_ROW)
#undef PYCOLLECTIVE_ROW
#define PYCOLLECTIVE_ROW(name, ...) PYCOLLECTIVE_CONSTANT(Token, MPIABI_##name, kDatatype##name)
PYCOLLECTIVE_XLA_TYPES(PYCOLLECTIVE_ROW)
#undef PYCOLLECTIVE_ROW
#define PYCOLLECTIVE_ROW(name, ...) PYCOLLECTIVE_CONSTANT(Token, MPIABI_##name, kReduction##name)
PYCOLLECTIVE_XLA_OPS(PYCOLLECTIVE_ROW)
#undef PYCOLLECTIVE_ROW
#define PYCOLLECTIVE_ROW(name) PYCOLLECTIVE_CONSTANT(int, MPIABI_##name, kInteger##name)
PYCOLLECTIVE_XLA_OTHER_INTS(PYCOLLECTIVE_ROW)
#undef PYCOLLECTIVE_ROW
#define PYCOLLECTIVE_ROW(name) PYCOLLECTIVE_CONSTANT(Token, MPIABI_##name, kHandle##name)
PYCOLLECTIVE_XLA_OTHER_HANDLES(PYCOLLECTIVE_ROW)
#undef PYCOLLECTIVE_ROW

#define PYCOLLECTIVE_ROW(name) \
  PYCOLLECTIVE_EXPORT int MPIABI_##name() { NotProvided("MPI_" #name); }
PYCOLLECTIVE_XLA_OTHER_FUNCTIONS(PYCOLLECTIVE_ROW)
#undef PYCOLLECTIVE_ROW
#define PYCOLLECTIVE_ROW(name) \
  PYCOLLECTIVE_EXPORT int MPIXABI_##name() { NotProvided("MPIX_" #name); }
PYCOLLECTIVE_XLA_EXTENSIONS(PYCOLLECTIVE_ROW)
#undef PYCOLLECTIVE_ROW

// MPItrampoline calls it after it has opened the library. There are no Fortran constants.
PYCOLLECTIVE_EXPORT void mpiwrapper_export_fortran_constants_() { is_open = true; }

// mpi4py starts and ends MPI, so these functions do neither.

PYCOLLECTIVE_EXPORT int MPIABI_Init_thread(int*, char***, int, int* provided) {
  if (world == nullptr) {
    EndProcess("expected pycollective.distributed.initialize() before XLA's collectives by MPI, got XLA without it. "
               "Call it instead of jax.distributed.initialize().");
  }
  *provided = MPIABI_THREAD_MULTIPLE;
  return kSuccess;
}

PYCOLLECTIVE_EXPORT int MPIABI_Query_thread(int* provided) {
  *provided = MPIABI_THREAD_MULTIPLE;
  return kSuccess;
}

PYCOLLECTIVE_EXPORT int MPIABI_Initialized(int* flag) {
  *flag = world != nullptr;
  return kSuccess;
}

PYCOLLECTIVE_EXPORT int MPIABI_Finalized(int* flag) {
  *flag = 0;
  return kSuccess;
}

PYCOLLECTIVE_EXPORT int MPIABI_Finalize() { return kSuccess; }

// XLA makes communicators only in a thread for which this returns true. With THREAD_MULTIPLE it is true for all threads.
PYCOLLECTIVE_EXPORT int MPIABI_Is_thread_main(int* flag) {
  *flag = 1;
  return kSuccess;
}

PYCOLLECTIVE_EXPORT int MPIABI_Error_string(int, char* text, int* length) {
  *length = static_cast<int>(std::min(last_error.size(), kErrorBytes - 1));
  std::memcpy(text, last_error.data(), static_cast<size_t>(*length));
  text[*length] = '\0';
  return kSuccess;
}

PYCOLLECTIVE_EXPORT int MPIABI_Comm_rank(Token comm, int* rank) {
  *rank = comm == kWorld ? world->rank : CliqueOf(comm)->rank;
  return kSuccess;
}

PYCOLLECTIVE_EXPORT int MPIABI_Comm_size(Token comm, int* size) {
  *size = comm == kWorld ? world->size : CliqueOf(comm)->size;
  return kSuccess;
}

// The members of the new communicator are unknown. Calls on it return an error until the program that gathers the mark has named
// them. `key` is the rank of this process in the clique. XLA ignores the code that this function returns.
PYCOLLECTIVE_EXPORT int MPIABI_Comm_split(Token, int, int key, Token* made) {
  const int size = is_learning.load(std::memory_order_acquire) ? learned.size : world->size;
  *made = reinterpret_cast<Token>(new Clique{{-1, 0}, key, size});  // as long as the process lives
  return kSuccess;
}

// XLA frees its communicators when its process ends, each process at another time. So this does nothing; MPI_Finalize frees
// them.
PYCOLLECTIVE_EXPORT int MPIABI_Comm_free(Token*) { return kSuccess; }

PYCOLLECTIVE_EXPORT int MPIABI_Allreduce(const void* send, void* recv, int count, Token datatype, Token reduction,
                                         Token comm) {
  return RunCollective(comm, kAllreduce, datatype, reduction, send, recv, count, &Library::Allreduce);
}

PYCOLLECTIVE_EXPORT int MPIABI_Allgather(const void* send, int count, Token datatype, void* recv, int, Token,
                                         Token comm) {
  if (is_learning.load(std::memory_order_acquire) && IsKnown(datatype) &&
      NBytes(count, datatype) == static_cast<int64_t>(kMarkBytes) && std::memcmp(send, mark, kMarkBytes) == 0) {
    Clique* const clique = CliqueOf(comm);
    // XLA may have asked for this communicator before, in a program that was refused.
    if (clique->rank != learned.rank || clique->size != learned.size) return Failure(kAskedBefore);
    *clique = learned;
    return kSuccess;
  }
  return RunCollective(comm, kAllgather, datatype, kNoReduction, send, recv, count, &Library::Allgather);
}

// In XLA's call each rank gets a block of the same size.
PYCOLLECTIVE_EXPORT int MPIABI_Reduce_scatter(const void* send, void* recv, const int* counts, Token datatype,
                                              Token reduction, Token comm) {
  return RunCollective(comm, kReduceScatter, datatype, reduction, send, recv, counts[0], &Library::ReduceScatter);
}

PYCOLLECTIVE_EXPORT int MPIABI_Sendrecv(const void* send, int send_count, Token sent, int dest, int send_tag,
                                        void* recv, int recv_count, Token received, int source, int recv_tag,
                                        Token comm, void*) {
  if (!IsKnown(sent) || !IsKnown(received)) return Failure(kUnknown);
  return Run(comm, kSendrecv, {}, nullptr, NBytes(send_count, sent), [&](const Call& call, const Library& mpi, const Lane&) {
    const Peers peers(call);
    return mpi.Sendrecv(peers.channel, peers.To(send, send_count, sent, dest, send_tag),
                        peers.From(recv, recv_count, received, source, recv_tag));
  });
}

PYCOLLECTIVE_EXPORT int MPIABI_Isend(const void* data, int count, Token datatype, int dest, int tag, Token comm,
                                     Token* request) {
  return StartMessage(comm, kSend, count, datatype, request,
                      [&](const Library& mpi, const Peers& peers, int64_t* handle) {
                        return mpi.Isend(peers.channel, peers.To(data, count, datatype, dest, tag), handle);
                      });
}

PYCOLLECTIVE_EXPORT int MPIABI_Irecv(void* data, int count, Token datatype, int source, int tag, Token comm,
                                     Token* request) {
  return StartMessage(comm, kRecv, count, datatype, request,
                      [&](const Library& mpi, const Peers& peers, int64_t* handle) {
                        return mpi.Irecv(peers.channel, peers.From(data, count, datatype, source, tag), handle);
                      });
}

PYCOLLECTIVE_EXPORT int MPIABI_Waitall(int count, Token* requests, void*) {
  if (count == 0) return kSuccess;
  std::vector<int64_t> handles;
  const Token comm = reinterpret_cast<Request*>(requests[0])->comm;
  for (int i = 0; i < count; ++i) {
    const std::unique_ptr<Request> request(reinterpret_cast<Request*>(requests[i]));
    handles.push_back(request->handle);
    requests[i] = MPIABI_REQUEST_NULL;
  }
  return Run(comm, kSendrecv, {}, nullptr, 0,
             [&](const Call&, const Library& mpi, const Lane&) { return mpi.WaitAll(&handles); });
}

PYCOLLECTIVE_EXPORT int MPIABI_Wait(Token* request, void* status) { return MPIABI_Waitall(1, request, status); }
