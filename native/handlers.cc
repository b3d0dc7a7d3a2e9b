// XLA FFI handlers on CPU buffers: decode, check, call collectives.h, turn failures into errors.
//
// Every handler takes XLA's token first and returns one first: the token orders the calls of one program.
// Attributes are int64 and named as in transport/native.py.

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "buckets.h"
#include "collectives.h"
#include "communicators.h"
#include "handlers.h"
#include "hierarchy.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace pycollective {

std::unique_ptr<Library> library;
Check check = Check::kFirst;

namespace {

// What Signature::operation counts.
constexpr const char* kOperations[] = {
    "allreduce", "allgather", "alltoall", "reduce_scatter", "bcast",    "reduce", "gather", "scatter",
    "scan",      "exscan",    "ppermute", "barrier",        "sendrecv", "send",   "recv"};
enum Operation : int32_t {
  kAllreduce, kAllgather, kAlltoall, kReduceScatter, kBcast, kReduce, kGather, kScatter,
  kScan, kExscan, kPpermute, kBarrier, kSendrecv, kSend, kRecv
};
constexpr bool IsCollective(Operation operation) { return operation < kSendrecv; }

const char* OpName(int32_t op) {
  constexpr const char* kNames[] = {"sum", "prod", "min", "max", "sum_bfloat16"};
  return op >= 0 && op <= int32_t(Op::kSumBfloat16) ? kNames[op] : "?";
}

const char* DtypeName(int32_t dtype) {
  switch (static_cast<ffi::DataType>(dtype)) {
    case ffi::PRED: return "bool";
    case ffi::S8: return "int8";
    case ffi::S16: return "int16";
    case ffi::S32: return "int32";
    case ffi::S64: return "int64";
    case ffi::U8: return "uint8";
    case ffi::U16: return "uint16";
    case ffi::U32: return "uint32";
    case ffi::U64: return "uint64";
    case ffi::F16: return "float16";
    case ffi::BF16: return "bfloat16";
    case ffi::F32: return "float32";
    case ffi::F64: return "float64";
    case ffi::C64: return "complex64";
    case ffi::C128: return "complex128";
    default: return "an 8-bit float";
  }
}

// The type that moves `dtype` unchanged. False for types packed below a byte.
bool MoveType(ffi::DataType dtype, Type* type) {
  switch (dtype) {
    case ffi::PRED:
    case ffi::U8:
    case ffi::F8E5M2:
    case ffi::F8E4M3:
    case ffi::F8E4M3FN:
    case ffi::F8E4M3B11FNUZ:
    case ffi::F8E5M2FNUZ:
    case ffi::F8E4M3FNUZ:
    case ffi::F8E3M4:
    case ffi::F8E8M0FNU: *type = Type::kUint8; return true;
    case ffi::S8: *type = Type::kInt8; return true;
    case ffi::S16: *type = Type::kInt16; return true;
    case ffi::S32: *type = Type::kInt32; return true;
    case ffi::S64: *type = Type::kInt64; return true;
    case ffi::U16:
    case ffi::F16:
    case ffi::BF16: *type = Type::kUint16; return true;
    case ffi::U32: *type = Type::kUint32; return true;
    case ffi::U64: *type = Type::kUint64; return true;
    case ffi::F32: *type = Type::kFloat32; return true;
    case ffi::F64: *type = Type::kFloat64; return true;
    case ffi::C64: *type = Type::kComplex64; return true;
    case ffi::C128: *type = Type::kComplex128; return true;
    default: return false;
  }
}

// The type that MPI reduces `dtype` as. False where MPI's arithmetic would not be the dtype's.
bool ReduceType(ffi::DataType dtype, int64_t op, Type* type) {
  if (op == int64_t(Op::kSumBfloat16)) return dtype == ffi::F32 && MoveType(dtype, type);
  if (dtype == ffi::PRED) {  // bytes 0 and 1: min is "and", max is "or"
    *type = Type::kUint8;
    return op == int64_t(Op::kMin) || op == int64_t(Op::kMax);
  }
  if (dtype == ffi::C64 || dtype == ffi::C128) {
    return MoveType(dtype, type) && (op == int64_t(Op::kSum) || op == int64_t(Op::kProd));
  }
  switch (dtype) {
    case ffi::S8: case ffi::S16: case ffi::S32: case ffi::S64:
    case ffi::U8: case ffi::U16: case ffi::U32: case ffi::U64:
    case ffi::F32: case ffi::F64: return MoveType(dtype, type);
    default: return false;
  }
}

int64_t Count(const ffi::AnyBuffer& buffer) { return static_cast<int64_t>(buffer.element_count()); }
int64_t NBytes(const ffi::AnyBuffer& buffer) { return static_cast<int64_t>(buffer.size_bytes()); }

std::string Describe(const Signature& s) {
  std::string text = kOperations[s.operation];
  if (s.operation == kBarrier) return text;
  text += std::string("(") + std::to_string(s.count) + " x " + DtypeName(s.dtype);
  if (s.reduce_op >= 0) text += std::string(", op=") + OpName(s.reduce_op);
  if (s.root >= 0) text += ", root=" + std::to_string(s.root);
  if (s.operation == kAllreduce && s.pattern != 0) text += ", several arrays #" + std::to_string(s.pattern);
  if (s.operation == kPpermute) text += ", perm #" + std::to_string(s.pattern);
  return text + ")";
}

// Marks the lane as waiting inside MPI for as long as it lives.
class UnderWay {
 public:
  UnderWay(Lane& lane, const char* operation, int64_t nbytes) : lane_(lane) {
    lane_.nbytes.store(nbytes, std::memory_order_relaxed);
    lane_.started_ns.store(NowNs(), std::memory_order_relaxed);
    lane_.operation.store(operation, std::memory_order_release);
  }
  ~UnderWay() { lane_.operation.store(nullptr, std::memory_order_release); }
  UnderWay(const UnderWay&) = delete;
  UnderWay& operator=(const UnderWay&) = delete;

 private:
  Lane& lane_;
};

// One call as the handlers see it: finds the lane, checks agreement, runs `body`, reports.
class Call {
 public:
  Call(Operation operation, int64_t communicator, int32_t device)
      : operation_(operation), device_(device), communicator_(FindCommunicator(communicator)) {}

  template <typename Body>
  ffi::Error Run(const Signature& signature, int64_t nbytes, Body body) {
    if (library == nullptr || communicator_ == nullptr) {
      return Error(ffi::ErrorCode::kInternal, "expected a communicator of this process, got an unknown one",
                   "Call pycollective.init() before running a compiled program.");
    }
    if (communicator_->IsFreed()) {
      return Error(ffi::ErrorCode::kFailedPrecondition, "expected a live communicator, got a freed one",
                   "Do not run programs that name a communicator after its free().");
    }
    lane_ = communicator_->LaneOf(device_);
    if (lane_ == nullptr) {
      return Error(ffi::ErrorCode::kFailedPrecondition,
                   "expected a device of pycollective.init(devices=...), got CPU device " +
                       std::to_string(device_),
                   "Name that device in init, or run the program on one of its devices.");
    }
    const UnderWay under_way(*lane_, kOperations[operation_], nbytes);
    if (IsCollective(operation_) && lane_->channel.size > 1) {
      const ffi::Error disagreement = Agree(signature);
      if (disagreement.failure()) return disagreement;
    }
    const Outcome outcome = body(*library, *lane_);
    return outcome.ok() ? ffi::Error::Success() : Failed(outcome);
  }

  // Of the call under way.
  const Communicator& communicator() const { return *communicator_; }

  ffi::Error Unsupported(ffi::DataType dtype) const {
    return Error(ffi::ErrorCode::kInvalidArgument,
                 std::string("expected a dtype that MPI can carry here, got ") +
                     DtypeName(static_cast<int32_t>(dtype)),
                 "Convert the array first.");
  }

 private:
  // The first time this lane meets a signature, the ranks compare theirs: a wrong order, shape or dtype
  // then ends in an error on every rank instead of a hang or a wrong sum.
  ffi::Error Agree(const Signature& mine) {
    if (check == Check::kNever) return ffi::Error::Success();
    const std::lock_guard<std::mutex> lock(lane_->mutex);
    if (check == Check::kFirst && lane_->agreed.count(mine) != 0) return ffi::Error::Success();
    const Channel& channel = lane_->channel;
    std::vector<Signature> all(static_cast<size_t>(channel.size));
    const Outcome outcome = library->Allgather(channel, &mine, all.data(), sizeof(Signature), Type::kUint8);
    if (!outcome.ok()) return Failed(outcome);
    for (size_t rank = 0; rank < all.size(); ++rank) {
      if (all[rank] == mine) continue;
      const bool known = all[rank].operation >= 0 && all[rank].operation < kSendrecv;
      return Error(ffi::ErrorCode::kInvalidArgument,
                   "expected the same call on every rank, got " + Describe(mine) + " here and " +
                       (known ? Describe(all[rank]) : std::string("another call")) + " on rank " +
                       std::to_string(rank),
                   "All ranks must run the same collectives in the same order, with the same shapes, dtypes "
                   "and pytrees.");
    }
    lane_->agreed.insert(mine);
    return ffi::Error::Success();
  }

  ffi::Error Failed(const Outcome& outcome) const {
    if (!outcome.detail.empty()) {
      return Error(ffi::ErrorCode::kDataLoss, std::string(outcome.call) + ": " + outcome.detail,
                   "Give both ends the same shape and dtype.");
    }
    return Error(ffi::ErrorCode::kInternal,
                 std::string("expected ") + outcome.call + " to succeed, got \"" +
                     library->ErrorString(outcome.code) + "\"",
                 "Check that all ranks run the same calls in the same order.");
  }

  ffi::Error Error(ffi::ErrorCode code, const std::string& what, const std::string& remedy) const {
    std::string where;
    if (communicator_ != nullptr && !communicator_->lanes.empty()) {
      const Channel& channel = communicator_->lanes[0]->channel;
      where = " (rank " + std::to_string(channel.rank) + " of " + std::to_string(channel.size) +
              ", communicator " + communicator_->name + ")";
    }
    return ffi::Error(code, std::string("pycollective.") + kOperations[operation_] + ": " + what + where +
                                ". " + remedy);
  }

  const Operation operation_;
  const int32_t device_;
  Communicator* const communicator_;
  Lane* lane_ = nullptr;
};

Signature Sign(Operation operation, const ffi::AnyBuffer& x, int64_t reduce_op = -1, int64_t root = -1,
               int64_t pattern = 0) {
  return {operation, static_cast<int32_t>(x.element_type()), Count(x), static_cast<int32_t>(reduce_op),
          static_cast<int32_t>(root), pattern};
}

using In = ffi::AnyBuffer;
using Out = ffi::Result<ffi::AnyBuffer>;
using InToken = ffi::Token;
using OutToken = ffi::Result<ffi::Token>;

// allreduce: any number of arrays in one call. Small ones of a type travel together in buffers of at most
// `bucket_bytes`; from half that size on, an array goes by itself, since copying it would cost more than a call.
ffi::Error Allreduce(int32_t device, InToken, ffi::RemainingArgs operands, OutToken, ffi::RemainingRets results,
                     int64_t comm, int64_t op, int64_t bucket_bytes) {
  Call call(kAllreduce, comm, device);
  std::vector<Part> parts;
  Signature signature{kAllreduce, 0, 0, static_cast<int32_t>(op), -1, 0};
  int64_t nbytes = 0;
  for (size_t i = 0; i < operands.size(); ++i) {
    const auto x = operands.get<ffi::AnyBuffer>(i);
    auto y = results.get<ffi::AnyBuffer>(i);
    if (x.has_error()) return x.error();
    if (y.has_error()) return y.error();
    Part part{x->untyped_data(), (*y)->untyped_data(), Count(*x), Type::kUint8};
    if (!ReduceType(x->element_type(), op, &part.type)) return call.Unsupported(x->element_type());
    parts.push_back(part);
    nbytes += NBytes(*x);
    signature.count += part.count;
    if (i == 0) {
      signature.dtype = static_cast<int32_t>(x->element_type());
    } else {
      // Unsigned, since it wraps around.
      const uint64_t one = static_cast<uint64_t>(part.count * kTypeCount + static_cast<int64_t>(part.type) + 1);
      signature.pattern = static_cast<int64_t>(static_cast<uint64_t>(signature.pattern) * 1000003u + one);
    }
  }
  return call.Run(signature, nbytes, [&](const Library& mpi, const Lane& lane) {
    return InBuckets(parts, bucket_bytes, [&](const void* x, void* y, int64_t count, Type type) {
      if (lane.team != nullptr) return Hierarchy(mpi, lane).Allreduce(x, y, count, type, static_cast<Op>(op));
      return mpi.Allreduce(lane.channel, x, y, count, type, static_cast<Op>(op));
    });
  });
}

// scan, exscan, reduce_scatter: one array, one reduction. kTogether: Hierarchy's method for a lane with a team.
template <Operation kOperation, auto kMethod, auto kTogether = nullptr>
ffi::Error Reduction(int32_t device, InToken, In x, OutToken, Out y, int64_t comm, int64_t op) {
  Call call(kOperation, comm, device);
  Type type;
  if (!ReduceType(x.element_type(), op, &type)) return call.Unsupported(x.element_type());
  return call.Run(Sign(kOperation, x, op), NBytes(x), [&](const Library& mpi, const Lane& lane) {
    if constexpr (kTogether != nullptr) {
      if (lane.team != nullptr) {
        return (Hierarchy(mpi, lane).*kTogether)(x.untyped_data(), y->untyped_data(), Count(*y), type,
                                                 static_cast<Op>(op));
      }
    }
    return (mpi.*kMethod)(lane.channel, x.untyped_data(), y->untyped_data(), Count(*y), type, static_cast<Op>(op));
  });
}

ffi::Error Reduce(int32_t device, InToken, In x, OutToken, Out y, int64_t comm, int64_t op, int64_t root) {
  Call call(kReduce, comm, device);
  Type type;
  if (!ReduceType(x.element_type(), op, &type)) return call.Unsupported(x.element_type());
  return call.Run(Sign(kReduce, x, op, root), NBytes(x), [&](const Library& mpi, const Lane& lane) {
    if (lane.team != nullptr) {
      return Hierarchy(mpi, lane).Reduce(x.untyped_data(), y->untyped_data(), Count(x), type, static_cast<Op>(op),
                                         static_cast<int>(root));
    }
    return mpi.Reduce(lane.channel, x.untyped_data(), y->untyped_data(), Count(x), type, static_cast<Op>(op),
                      static_cast<int>(root));
  });
}

// allgather, alltoall: blocks of equal size, no root.
template <Operation kOperation, auto kMethod, auto kTogether>
ffi::Error Blocks(int32_t device, InToken, In x, OutToken, Out y, int64_t comm) {
  Call call(kOperation, comm, device);
  Type type;
  if (!MoveType(x.element_type(), &type)) return call.Unsupported(x.element_type());
  return call.Run(Sign(kOperation, x), NBytes(*y), [&](const Library& mpi, const Lane& lane) {
    if (lane.team != nullptr) {
      const int64_t block = Count(*y) / (int64_t{lane.channel.size} * lane.team->size());
      return (Hierarchy(mpi, lane).*kTogether)(x.untyped_data(), y->untyped_data(), block, type);
    }
    return (mpi.*kMethod)(lane.channel, x.untyped_data(), y->untyped_data(), Count(*y) / lane.channel.size, type);
  });
}

// bcast, gather, scatter: a root, and a block that is the smaller of operand and result.
template <Operation kOperation, auto kMethod, auto kTogether = nullptr>
ffi::Error Rooted(int32_t device, InToken, In x, OutToken, Out y, int64_t comm, int64_t root) {
  Call call(kOperation, comm, device);
  Type type;
  if (!MoveType(x.element_type(), &type)) return call.Unsupported(x.element_type());
  const int64_t block = std::min(Count(x), Count(*y));
  return call.Run(Sign(kOperation, x, -1, root), std::max(NBytes(x), NBytes(*y)),
                  [&](const Library& mpi, const Lane& lane) {
                    if constexpr (kTogether != nullptr) {
                      if (lane.team != nullptr) {
                        return (Hierarchy(mpi, lane).*kTogether)(x.untyped_data(), y->untyped_data(), block, type,
                                                                 static_cast<int>(root));
                      }
                    }
                    return (mpi.*kMethod)(lane.channel, x.untyped_data(), y->untyped_data(), block, type,
                                          static_cast<int>(root));
                  });
}

// dest, source: for each lane the number of a device, rank * lanes + lane, or -1 for none. Devices exchange directly,
// whatever their lanes: on the first lane's communicator, with a tag for each pair of lanes.
ffi::Error Ppermute(int32_t device, InToken, In x, OutToken, Out y, int64_t comm, ffi::Span<const int64_t> dest,
                    ffi::Span<const int64_t> source, int64_t pattern) {
  Call call(kPpermute, comm, device);
  Type type;
  if (!MoveType(x.element_type(), &type)) return call.Unsupported(x.element_type());
  return call.Run(Sign(kPpermute, x, -1, -1, pattern), NBytes(x), [&](const Library& mpi, const Lane& lane) {
    const auto lanes = static_cast<int64_t>(call.communicator().lanes.size());
    const int64_t to = dest[static_cast<size_t>(lane.index)];
    const int64_t from = source[static_cast<size_t>(lane.index)];
    const auto rank_of = [&](int64_t number) { return number < 0 ? mpi.proc_null() : int(number / lanes); };
    const auto tag = [&](int64_t sender, int64_t receiver) { return int(sender * lanes + receiver); };
    return mpi.Permute(call.communicator().lanes[0]->channel, x.untyped_data(), y->untyped_data(), Count(x), type,
                       rank_of(to), to < 0 ? 0 : tag(lane.index, to % lanes), rank_of(from),
                       from < 0 ? 0 : tag(from % lanes, lane.index));
  });
}

ffi::Error Send(int32_t device, InToken, In x, OutToken, int64_t comm, int64_t dest, int64_t tag) {
  Call call(kSend, comm, device);
  Type type;
  if (!MoveType(x.element_type(), &type)) return call.Unsupported(x.element_type());
  return call.Run({}, NBytes(x), [&](const Library& mpi, const Lane& lane) {
    return mpi.Send(lane.channel, x.untyped_data(), Count(x), type, static_cast<int>(dest), static_cast<int>(tag));
  });
}

ffi::Error Recv(int32_t device, InToken, In, OutToken, Out y, int64_t comm, int64_t source, int64_t tag) {
  Call call(kRecv, comm, device);
  Type type;
  if (!MoveType(y->element_type(), &type)) return call.Unsupported(y->element_type());
  return call.Run({}, NBytes(*y), [&](const Library& mpi, const Lane& lane) {
    return mpi.Recv(lane.channel, y->untyped_data(), Count(*y), type, static_cast<int>(source),
                    static_cast<int>(tag));
  });
}

ffi::Error Sendrecv(int32_t device, InToken, In x, OutToken, Out y, int64_t comm, int64_t dest,
                    int64_t send_tag, int64_t source, int64_t recv_tag) {
  Call call(kSendrecv, comm, device);
  Type send_type, recv_type;
  if (!MoveType(x.element_type(), &send_type)) return call.Unsupported(x.element_type());
  if (!MoveType(y->element_type(), &recv_type)) return call.Unsupported(y->element_type());
  return call.Run({}, NBytes(x) + NBytes(*y), [&](const Library& mpi, const Lane& lane) {
    return mpi.Sendrecv(lane.channel, x.untyped_data(), Count(x), send_type, static_cast<int>(dest),
                        static_cast<int>(send_tag), y->untyped_data(), Count(*y), recv_type,
                        static_cast<int>(source), static_cast<int>(recv_tag));
  });
}

ffi::Error Barrier(int32_t device, InToken, OutToken, int64_t comm) {
  return Call(kBarrier, comm, device)
      .Run({kBarrier, 0, 0, -1, -1, 0}, 0,
           [&](const Library& mpi, const Lane& lane) { return mpi.Barrier(lane.channel); });
}

auto BindCall() { return ffi::Ffi::Bind().Ctx<ffi::DeviceOrdinal>(); }
// token, x -> token, y
auto BindArray() { return BindCall().Arg<InToken>().Arg<In>().Ret<ffi::Token>().Ret<ffi::AnyBuffer>(); }

}  // namespace
}  // namespace pycollective

namespace pc = pycollective;
#define PYCOLLECTIVE_HANDLER(name, function, binding)                                          \
  PYCOLLECTIVE_EXPORT XLA_FFI_Error* pycollective_##name(XLA_FFI_CallFrame* call_frame) {      \
    static auto* handler = (binding).To(function).release();                                   \
    return handler->Call(call_frame);                                                          \
  }

PYCOLLECTIVE_HANDLER(allreduce, pc::Allreduce,
                     pc::BindCall().Arg<pc::InToken>().RemainingArgs().Ret<ffi::Token>().RemainingRets()
                         .Attr<int64_t>("comm").Attr<int64_t>("op").Attr<int64_t>("bucket_bytes"))
PYCOLLECTIVE_HANDLER(scan, (pc::Reduction<pc::kScan, &pc::Library::Scan>),
                     pc::BindArray().Attr<int64_t>("comm").Attr<int64_t>("op"))
PYCOLLECTIVE_HANDLER(exscan, (pc::Reduction<pc::kExscan, &pc::Library::Exscan>),
                     pc::BindArray().Attr<int64_t>("comm").Attr<int64_t>("op"))
PYCOLLECTIVE_HANDLER(reduce_scatter, (pc::Reduction<pc::kReduceScatter, &pc::Library::ReduceScatter,
                                    &pc::Hierarchy::ReduceScatter>),
                     pc::BindArray().Attr<int64_t>("comm").Attr<int64_t>("op"))
PYCOLLECTIVE_HANDLER(reduce, pc::Reduce,
                     pc::BindArray().Attr<int64_t>("comm").Attr<int64_t>("op").Attr<int64_t>("root"))
PYCOLLECTIVE_HANDLER(allgather, (pc::Blocks<pc::kAllgather, &pc::Library::Allgather, &pc::Hierarchy::Allgather>),
                     pc::BindArray().Attr<int64_t>("comm"))
PYCOLLECTIVE_HANDLER(alltoall, (pc::Blocks<pc::kAlltoall, &pc::Library::Alltoall, &pc::Hierarchy::Alltoall>),
                     pc::BindArray().Attr<int64_t>("comm"))
PYCOLLECTIVE_HANDLER(bcast, (pc::Rooted<pc::kBcast, &pc::Library::Bcast, &pc::Hierarchy::Bcast>),
                     pc::BindArray().Attr<int64_t>("comm").Attr<int64_t>("root"))
PYCOLLECTIVE_HANDLER(gather, (pc::Rooted<pc::kGather, &pc::Library::Gather>),
                     pc::BindArray().Attr<int64_t>("comm").Attr<int64_t>("root"))
PYCOLLECTIVE_HANDLER(scatter, (pc::Rooted<pc::kScatter, &pc::Library::Scatter>),
                     pc::BindArray().Attr<int64_t>("comm").Attr<int64_t>("root"))
PYCOLLECTIVE_HANDLER(ppermute, pc::Ppermute,
                     pc::BindArray().Attr<int64_t>("comm").Attr<ffi::Span<const int64_t>>("dest")
                         .Attr<ffi::Span<const int64_t>>("source").Attr<int64_t>("pattern"))
PYCOLLECTIVE_HANDLER(sendrecv, pc::Sendrecv,
                     pc::BindArray().Attr<int64_t>("comm").Attr<int64_t>("dest").Attr<int64_t>("send_tag")
                         .Attr<int64_t>("source").Attr<int64_t>("recv_tag"))
PYCOLLECTIVE_HANDLER(send, pc::Send,
                     pc::BindCall().Arg<pc::InToken>().Arg<pc::In>().Ret<ffi::Token>().Attr<int64_t>("comm")
                         .Attr<int64_t>("dest").Attr<int64_t>("tag"))
PYCOLLECTIVE_HANDLER(recv, pc::Recv,
                     pc::BindArray().Attr<int64_t>("comm").Attr<int64_t>("source").Attr<int64_t>("tag"))
PYCOLLECTIVE_HANDLER(barrier, pc::Barrier,
                     pc::BindCall().Arg<pc::InToken>().Ret<ffi::Token>().Attr<int64_t>("comm"))
