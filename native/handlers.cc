// XLA FFI handlers: decode, and call collectives.h in the place where the arrays lie (place.h).
//
// Every handler takes XLA's token first and returns one first: the token orders the calls of one program. Attributes are
// int64 and named as in transport/native.py. There are two of each: pycollective_NAME for CPU devices, and
// pycollective_device_NAME for accelerators, which have an allreduce in two parts as well.

#include <algorithm>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "buckets.h"
#include "call.h"
#include "collectives.h"
#include "communicators.h"
#include "handlers.h"
#include "hierarchy.h"
#include "names.h"
#include "place.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace pycollective {

std::unique_ptr<Library> library;
Check check = Check::kFirst;

namespace {

using In = ffi::AnyBuffer;
using Out = ffi::Result<ffi::AnyBuffer>;
using InToken = ffi::Token;
using OutToken = ffi::Result<ffi::Token>;

int64_t Count(const ffi::AnyBuffer& buffer) { return static_cast<int64_t>(buffer.element_count()); }
int64_t NBytes(const ffi::AnyBuffer& buffer) { return static_cast<int64_t>(buffer.size_bytes()); }

View ViewOf(const ffi::AnyBuffer& buffer, Type type, int64_t blocks = 1) {
  return {buffer.untyped_data(), Count(buffer) / blocks, kTypeBytes[int(type)], blocks};
}

Written WrittenTo(const ffi::AnyBuffer& y) { return {y.untyped_data(), y.size_bytes()}; }

Signature Sign(Operation operation, const ffi::AnyBuffer& x, int64_t reduce_op = -1, int64_t root = -1,
               int64_t pattern = 0) {
  return {operation, static_cast<int32_t>(x.element_type()), Count(x), static_cast<int32_t>(reduce_op),
          static_cast<int32_t>(root), pattern};
}

template <typename Place>
Call CallIn(const Place& place, Operation operation, const Members& members) {
  return Call(operation, members, place.lane_id(), place.staging());
}

// allreduce: any number of arrays in one call.
struct Reductions {
  std::vector<Part> parts;
  Signature signature{kAllreduce};
  int64_t nbytes = 0;

  // Error, if an operand cannot be reduced.
  ffi::Error Decode(const Call& call, ffi::RemainingArgs operands, ffi::RemainingRets results, int64_t op) {
    signature.reduce_op = static_cast<int32_t>(op);
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
    return ffi::Error::Success();
  }
};

// Small arrays of a type travel together in buffers of at most `bucket_bytes`; from half that size on, an array goes by
// itself, since copying it would cost more than a call.
Outcome AllreduceParts(HostPlace&, const Library& mpi, const Lane& lane, const std::vector<Part>& parts, Op op,
                       int64_t bucket_bytes) {
  return InBuckets(parts, bucket_bytes, [&](const void* x, void* y, int64_t count, Type type) {
    if (lane.team != nullptr) return Hierarchy(mpi, lane).Allreduce(x, y, count, type, op);
    return mpi.Allreduce(lane.channel, x, y, count, type, op);
  });
}

// On an accelerator: all arrays of a type as one, in pieces.
Outcome AllreduceParts(DevicePlace& place, const Library& mpi, const Lane& lane, const std::vector<Part>& parts, Op op,
                       int64_t bucket_bytes) {
  Outcome first;
  for (int number = 0; number < kTypeCount; ++number) {
    const auto type = static_cast<Type>(number);
    std::vector<const Part*> of_type;
    for (const Part& part : parts) {
      if (part.type == type && part.count > 0) of_type.push_back(&part);
    }
    if (of_type.empty()) continue;
    // After an error the other calls are made all the same, since others wait in them.
    const Outcome outcome = place.ExchangeParts(
        lane, of_type, bucket_bytes, !mpi.IsOwn(op, type),
        [&](const Channel& channel, const void* x, void* y, int64_t count) {
          return mpi.Allreduce(channel, x, y, count, type, op);
        });
    if (first.ok()) first = outcome;
  }
  return first;
}

template <typename Place>
ffi::Error Allreduce(Place place, const Members& members, InToken, ffi::RemainingArgs operands, OutToken, ffi::RemainingRets results,
                     int64_t op, int64_t bucket_bytes) {
  Call call = CallIn(place, kAllreduce, members);
  Reductions all;
  const ffi::Error bad = all.Decode(call, operands, results, op);
  if (bad.failure()) return bad;
  std::vector<Written> written;
  if (members.spread < 0) {
    for (const Part& part : all.parts) written.push_back({part.y, static_cast<size_t>(part.nbytes())});
  }
  return call.Run(place, all.signature, all.nbytes, {written.data(), written.size()},
                  [&](const Library& mpi, const Lane& lane) {
                    return AllreduceParts(place, mpi, lane, all.parts, static_cast<Op>(op), bucket_bytes);
                  });
}

// An allreduce between its start and its end.
struct Started {
  Started(DevicePlace place, Call call) : place(place), call(call) {}

  DevicePlace place;
  Call call;
  Reductions all;
  ffi::Error error;
};

// By the results' first byte, which is theirs alone until the end.
std::mutex started_mutex;
std::unordered_map<const void*, std::shared_ptr<Started>> started_calls;

const void* KeyOf(const std::vector<Part>& parts) {
  for (const Part& part : parts) {
    if (part.count > 0) return part.y;
  }
  return nullptr;
}

// Whether results lie where operands do.
bool InPlace(const std::vector<Part>& parts) {
  return std::all_of(parts.begin(), parts.end(), [](const Part& p) { return p.count == 0 || p.x == p.y; });
}

// Returns when the call is under way. Operands lie where results are, in buffers that XLA keeps until the end,
// AllreduceDone, and it may run meanwhile what does not depend on that.
ffi::Error AllreduceStart(DevicePlace place, const Members& members, InToken, ffi::RemainingArgs operands, OutToken,
                          ffi::RemainingRets results, int64_t op, int64_t bucket_bytes) {
  const auto started = std::make_shared<Started>(place, CallIn(place, kAllreduce, members));
  Reductions& all = started->all;
  const ffi::Error bad = all.Decode(started->call, operands, results, op);
  if (bad.failure()) return bad;
  const void* const key = KeyOf(all.parts);
  if (key == nullptr) return ffi::Error::Success();  // nothing but empty arrays: no rank makes a call
  if (!InPlace(all.parts)) {
    return started->call.Error(ffi::ErrorCode::kInternal, "expected operands in the results' buffers, got others",
                               "Please report this.");
  }
  const Outcome begun = started->place.Start([started, op, bucket_bytes] {
    const auto body = [&](const Library& mpi, const Lane& lane) {
      return AllreduceParts(started->place, mpi, lane, started->all.parts, static_cast<Op>(op), bucket_bytes);
    };
    started->error = Caught(kAllreduce, [&] {
      return started->call.RunNow(started->all.signature, started->all.nbytes, {}, body);
    });
  });
  if (!begun.ok()) return started->call.Failed(begun);
  const std::lock_guard<std::mutex> lock(started_mutex);
  started_calls[key] = started;
  return ffi::Error::Success();
}

// Operands are the results of the start, and results here.
ffi::Error AllreduceDone(DevicePlace place, const Members& members, ffi::RemainingArgs operands,
                         ffi::RemainingRets results) {
  const Call call = CallIn(place, kAllreduce, members);
  std::vector<Part> parts;
  for (size_t i = 0; i < results.size(); ++i) {
    const auto x = operands.get<ffi::AnyBuffer>(i);
    auto y = results.get<ffi::AnyBuffer>(i);
    if (x.has_error()) return x.error();
    if (y.has_error()) return y.error();
    parts.push_back({x->untyped_data(), (*y)->untyped_data(), Count(*x), Type::kUint8});
  }
  const void* const key = KeyOf(parts);
  if (key == nullptr) return ffi::Error::Success();
  std::shared_ptr<Started> started;
  {
    const std::lock_guard<std::mutex> lock(started_mutex);
    const auto found = started_calls.find(key);
    if (found != started_calls.end()) {
      started = found->second;
      started_calls.erase(found);
    }
  }
  if (started == nullptr || !InPlace(parts)) {
    place.Drain();  // it still reads and writes the memory
    return call.Error(ffi::ErrorCode::kInternal, "expected the results of a call that was started, got others",
                      "XLA has moved them in between. Please report this.");
  }
  const Outcome finished = started->place.Finish();
  return started->error.failure() || finished.ok() ? started->error : call.Failed(finished);
}

// scan, exscan, reduce_scatter: one array, one reduction. kTogether: Hierarchy's method for a lane with a team.
template <typename Place, Operation kOperation, auto kMethod, auto kTogether = nullptr>
ffi::Error Reduction(Place place, const Members& members, InToken, In x, OutToken, Out y, int64_t op) {
  Call call = CallIn(place, kOperation, members);
  Type type;
  if (!ReduceType(x.element_type(), op, &type)) return call.Unsupported(x.element_type());
  const Written written = WrittenTo(*y);
  return call.Run(place, Sign(kOperation, x, op), NBytes(x), {&written, 1}, [&](const Library& mpi, const Lane& lane) {
    if constexpr (Place::kPlain && kTogether != nullptr) {
      if (lane.team != nullptr) {
        return (Hierarchy(mpi, lane).*kTogether)(x.untyped_data(), y->untyped_data(), Count(*y), type,
                                                 static_cast<Op>(op));
      }
    }
    const int64_t blocks = Count(*y) > 0 ? Count(x) / Count(*y) : 1;
    const Liberties may{true, kOperation != kReduceScatter, !mpi.IsOwn(static_cast<Op>(op), type)};
    return place.Exchange(lane, ViewOf(x, type, blocks), ViewOf(*y, type), may,
                          [&](const Channel& channel, const void* in, void* out, int64_t count) {
                            return (mpi.*kMethod)(channel, in, out, count, type, static_cast<Op>(op));
                          });
  });
}

template <typename Place>
ffi::Error Reduce(Place place, const Members& members, InToken, In x, OutToken, Out y, int64_t op, int64_t root) {
  Call call = CallIn(place, kReduce, members);
  Type type;
  if (!ReduceType(x.element_type(), op, &type)) return call.Unsupported(x.element_type());
  const Written written = WrittenTo(*y);
  return call.Run(place, Sign(kReduce, x, op, root), NBytes(x), {&written, 1}, [&](const Library& mpi, const Lane& lane) {
    if constexpr (Place::kPlain) {
      if (lane.team != nullptr) {
        return Hierarchy(mpi, lane).Reduce(x.untyped_data(), y->untyped_data(), Count(x), type, static_cast<Op>(op),
                                           static_cast<int>(root));
      }
    }
    const Liberties may{true, true, !mpi.IsOwn(static_cast<Op>(op), type)};
    return place.Exchange(lane, ViewOf(x, type), ViewOf(*y, type), may,
                          [&](const Channel& channel, const void* in, void* out, int64_t count) {
                            return mpi.Reduce(channel, in, out, count, type, static_cast<Op>(op),
                                              static_cast<int>(root));
                          });
  });
}

// allgather, alltoall: blocks of equal size, no root.
template <typename Place, Operation kOperation, auto kMethod, auto kTogether>
ffi::Error Blocks(Place place, const Members& members, InToken, In x, OutToken, Out y) {
  Call call = CallIn(place, kOperation, members);
  Type type;
  if (!MoveType(x.element_type(), &type)) return call.Unsupported(x.element_type());
  const Written written = WrittenTo(*y);
  return call.Run(place, Sign(kOperation, x), NBytes(*y), {&written, 1}, [&](const Library& mpi, const Lane& lane) {
    if constexpr (Place::kPlain) {
      if (lane.team != nullptr) {
        const int64_t block = Count(*y) / (int64_t{lane.channel.size} * lane.team->size());
        return (Hierarchy(mpi, lane).*kTogether)(x.untyped_data(), y->untyped_data(), block, type);
      }
    }
    const int64_t size = lane.channel.size;
    const int64_t sent = Count(x) == Count(*y) ? size : 1;
    return place.Exchange(lane, ViewOf(x, type, sent), ViewOf(*y, type, size), {},
                          [&](const Channel& channel, const void* in, void* out, int64_t count) {
                            return (mpi.*kMethod)(channel, in, out, count, type);
                          });
  });
}

// bcast, gather, scatter: a root, and a block that is the smaller of operand and result.
template <typename Place, Operation kOperation, auto kMethod, auto kTogether = nullptr>
ffi::Error Rooted(Place place, const Members& members, InToken, In x, OutToken, Out y, int64_t root) {
  Call call = CallIn(place, kOperation, members);
  Type type;
  if (!MoveType(x.element_type(), &type)) return call.Unsupported(x.element_type());
  const int64_t block = std::max<int64_t>(1, std::min(Count(x), Count(*y)));
  const Written written = WrittenTo(*y);
  return call.Run(place, Sign(kOperation, x, -1, root), std::max(NBytes(x), NBytes(*y)), {&written, 1},
                  [&](const Library& mpi, const Lane& lane) {
                    if constexpr (Place::kPlain && kTogether != nullptr) {
                      if (lane.team != nullptr) {
                        return (Hierarchy(mpi, lane).*kTogether)(x.untyped_data(), y->untyped_data(), Count(x), type,
                                                                 static_cast<int>(root));
                      }
                    }
                    const Liberties may{true, kOperation == kBcast, true};
                    const View in = ViewOf(x, type, std::max<int64_t>(1, Count(x) / block));
                    const View out = ViewOf(*y, type, std::max<int64_t>(1, Count(*y) / block));
                    return place.Exchange(lane, in, out, may,
                                          [&](const Channel& channel, const void* from, void* to, int64_t count) {
                                            return (mpi.*kMethod)(channel, from, to, count, type,
                                                                  static_cast<int>(root));
                                          });
                  });
}

// dest, source: for each lane the number of a device, rank * lanes + lane, or -1 for none. Devices exchange directly,
// whatever their lanes: with a tag for each pair of them. A mesh's lanes have tags of their own, as they have channels.
template <typename Place>
ffi::Error Ppermute(Place place, const Members& members, InToken, In x, OutToken, Out y,
                    ffi::Span<const int64_t> dest, ffi::Span<const int64_t> source, int64_t pattern) {
  Call call = CallIn(place, kPpermute, members);
  Type type;
  if (!MoveType(x.element_type(), &type)) return call.Unsupported(x.element_type());
  const Written written = WrittenTo(*y);
  return call.Run(
      place, Sign(kPpermute, x, -1, -1, pattern), NBytes(x), {&written, 1}, [&](const Library& mpi, const Lane& lane) {
        const Communicator& communicator = call.communicator();
        const auto lanes = static_cast<int64_t>(communicator.lanes.size());
        const int64_t devices = communicator.ranks->devices();
        const int64_t to = dest[static_cast<size_t>(lane.index)];
        const int64_t from = source[static_cast<size_t>(lane.index)];
        const auto rank_of = [&](int64_t number) {
          return number < 0 ? mpi.proc_null() : communicator.ranks->InWhole(static_cast<int>(number / lanes));
        };
        const auto tag = [&](int64_t sender, int64_t receiver) {
          return int((communicator.by_position ? devices : 0) * devices + sender * devices + receiver);
        };
        return place.Exchange(lane, ViewOf(x, type), ViewOf(*y, type), {},
                              [&](const Channel& channel, const void* in, void* out, int64_t count) {
                                return mpi.Permute(channel, in, out, count, type, rank_of(to),
                                                   to < 0 ? 0 : tag(lane.index, to % lanes), rank_of(from),
                                                   from < 0 ? 0 : tag(from % lanes, lane.index));
                              });
      });
}

// Messages go whole: the other end may have other pieces, or none.
constexpr Liberties kWhole{false, false, true};

template <typename Place>
ffi::Error Send(Place place, const Members& members, InToken, In x, OutToken, int64_t dest, int64_t tag) {
  Call call = CallIn(place, kSend, members);
  Type type;
  if (!MoveType(x.element_type(), &type)) return call.Unsupported(x.element_type());
  return call.Run(place, {}, NBytes(x), {}, [&](const Library& mpi, const Lane& lane) {
    return place.Exchange(lane, ViewOf(x, type), {}, kWhole,
                          [&](const Channel& channel, const void* in, void*, int64_t) {
                            return mpi.Send(channel, in, Count(x), type, static_cast<int>(dest),
                                            static_cast<int>(tag));
                          });
  });
}

template <typename Place>
ffi::Error Recv(Place place, const Members& members, InToken, In, OutToken, Out y, int64_t source, int64_t tag) {
  Call call = CallIn(place, kRecv, members);
  Type type;
  if (!MoveType(y->element_type(), &type)) return call.Unsupported(y->element_type());
  const Written written = WrittenTo(*y);
  return call.Run(place, {}, NBytes(*y), {&written, 1}, [&](const Library& mpi, const Lane& lane) {
    return place.Exchange(lane, {}, ViewOf(*y, type), kWhole,
                          [&](const Channel& channel, const void*, void* out, int64_t) {
                            return mpi.Recv(channel, out, Count(*y), type, static_cast<int>(source),
                                            static_cast<int>(tag));
                          });
  });
}

template <typename Place>
ffi::Error Sendrecv(Place place, const Members& members, InToken, In x, OutToken, Out y, int64_t dest,
                    int64_t send_tag, int64_t source, int64_t recv_tag) {
  Call call = CallIn(place, kSendrecv, members);
  Type send_type, recv_type;
  if (!MoveType(x.element_type(), &send_type)) return call.Unsupported(x.element_type());
  if (!MoveType(y->element_type(), &recv_type)) return call.Unsupported(y->element_type());
  const Written written = WrittenTo(*y);
  return call.Run(place, {}, NBytes(x) + NBytes(*y), {&written, 1}, [&](const Library& mpi, const Lane& lane) {
    return place.Exchange(lane, ViewOf(x, send_type), ViewOf(*y, recv_type), kWhole,
                          [&](const Channel& channel, const void* in, void* out, int64_t) {
                            return mpi.Sendrecv(channel, in, Count(x), send_type, static_cast<int>(dest),
                                                static_cast<int>(send_tag), out, Count(*y), recv_type,
                                                static_cast<int>(source), static_cast<int>(recv_tag));
                          });
  });
}

template <typename Place>
ffi::Error Barrier(Place place, const Members& members, InToken, OutToken) {
  Call call = CallIn(place, kBarrier, members);
  return call.Run(place, {kBarrier}, 0, {}, [&](const Library& mpi, const Lane& lane) {
    return place.Exchange(lane, {}, {}, {},
                          [&](const Channel& channel, const void*, void*, int64_t) { return mpi.Barrier(channel); });
  });
}

// What XLA tells a handler of the place of its arrays, and a program of those who take part.
template <typename Place>
auto BindCall() {
  const auto with_members = [](auto binding) {
    return std::move(binding).template Attr<ffi::Span<const int64_t>>("comm").template Attr<int64_t>("spread");
  };
  if constexpr (Place::kPlain) {
    return with_members(ffi::Ffi::Bind().Ctx<ffi::DeviceOrdinal>());
  } else {
    return with_members(ffi::Ffi::Bind().Ctx<ffi::PlatformStream<void*>>());
  }
}
// token, x -> token, y
template <typename Place>
auto BindArray() {
  return BindCall<Place>().template Arg<InToken>().template Arg<In>().template Ret<ffi::Token>().template Ret<
      ffi::AnyBuffer>();
}
// token, xs -> token, ys
template <typename Place>
auto BindArrays() {
  return BindCall<Place>().template Arg<InToken>().RemainingArgs().template Ret<ffi::Token>().RemainingRets();
}

}  // namespace
}  // namespace pycollective

namespace pc = pycollective;

// `function` and `binding` for a Place.
#define PYCOLLECTIVE_HANDLER_IN(name, operation, PlaceType, function, binding)                              \
  PYCOLLECTIVE_EXPORT XLA_FFI_Error* name(XLA_FFI_CallFrame* call_frame) {                                  \
    using Place = PlaceType;                                                                                \
    static auto* handler =                                                                                  \
        (binding)                                                                                           \
            .To([](auto where, ffi::Span<const int64_t> comm, int64_t spread, auto... rest) {               \
              return pc::Caught(operation, [&] { return function(Place(where), {comm, spread}, rest...); }); \
            })                                                                                              \
            .release();                                                                                     \
    return handler->Call(call_frame);                                                                       \
  }
#define PYCOLLECTIVE_HANDLER(name, operation, function, binding)                                \
  PYCOLLECTIVE_HANDLER_IN(pycollective_##name, operation, pc::HostPlace, function, binding)     \
  PYCOLLECTIVE_HANDLER_IN(pycollective_device_##name, operation, pc::DevicePlace, function, binding)

PYCOLLECTIVE_HANDLER(allreduce, pc::kAllreduce, pc::Allreduce<Place>,
                     pc::BindArrays<Place>().Attr<int64_t>("op").Attr<int64_t>("bucket_bytes"))
PYCOLLECTIVE_HANDLER_IN(pycollective_device_allreduce_start, pc::kAllreduce, pc::DevicePlace, pc::AllreduceStart,
                        pc::BindArrays<Place>().Attr<int64_t>("op").Attr<int64_t>("bucket_bytes"))
PYCOLLECTIVE_HANDLER_IN(pycollective_device_allreduce_done, pc::kAllreduce, pc::DevicePlace, pc::AllreduceDone,
                        pc::BindCall<Place>().RemainingArgs().RemainingRets())
PYCOLLECTIVE_HANDLER(scan, pc::kScan, (pc::Reduction<Place, pc::kScan, &pc::Library::Scan>),
                     pc::BindArray<Place>().Attr<int64_t>("op"))
PYCOLLECTIVE_HANDLER(exscan, pc::kExscan, (pc::Reduction<Place, pc::kExscan, &pc::Library::Exscan>),
                     pc::BindArray<Place>().Attr<int64_t>("op"))
PYCOLLECTIVE_HANDLER(reduce_scatter, pc::kReduceScatter,
                     (pc::Reduction<Place, pc::kReduceScatter, &pc::Library::ReduceScatter,
                                    &pc::Hierarchy::ReduceScatter>),
                     pc::BindArray<Place>().Attr<int64_t>("op"))
PYCOLLECTIVE_HANDLER(reduce, pc::kReduce, pc::Reduce<Place>,
                     pc::BindArray<Place>().Attr<int64_t>("op").Attr<int64_t>("root"))
PYCOLLECTIVE_HANDLER(allgather, pc::kAllgather,
                     (pc::Blocks<Place, pc::kAllgather, &pc::Library::Allgather, &pc::Hierarchy::Allgather>),
                     pc::BindArray<Place>())
PYCOLLECTIVE_HANDLER(alltoall, pc::kAlltoall,
                     (pc::Blocks<Place, pc::kAlltoall, &pc::Library::Alltoall, &pc::Hierarchy::Alltoall>),
                     pc::BindArray<Place>())
PYCOLLECTIVE_HANDLER(bcast, pc::kBcast,
                     (pc::Rooted<Place, pc::kBcast, &pc::Library::Bcast, &pc::Hierarchy::Bcast>),
                     pc::BindArray<Place>().Attr<int64_t>("root"))
PYCOLLECTIVE_HANDLER(gather, pc::kGather, (pc::Rooted<Place, pc::kGather, &pc::Library::Gather>),
                     pc::BindArray<Place>().Attr<int64_t>("root"))
PYCOLLECTIVE_HANDLER(scatter, pc::kScatter, (pc::Rooted<Place, pc::kScatter, &pc::Library::Scatter>),
                     pc::BindArray<Place>().Attr<int64_t>("root"))
PYCOLLECTIVE_HANDLER(ppermute, pc::kPpermute, pc::Ppermute<Place>,
                     pc::BindArray<Place>().Attr<ffi::Span<const int64_t>>("dest")
                         .Attr<ffi::Span<const int64_t>>("source").Attr<int64_t>("pattern"))
PYCOLLECTIVE_HANDLER(sendrecv, pc::kSendrecv, pc::Sendrecv<Place>,
                     pc::BindArray<Place>().Attr<int64_t>("dest").Attr<int64_t>("send_tag").Attr<int64_t>("source")
                         .Attr<int64_t>("recv_tag"))
PYCOLLECTIVE_HANDLER(send, pc::kSend, pc::Send<Place>,
                     pc::BindCall<Place>().Arg<pc::InToken>().Arg<pc::In>().Ret<ffi::Token>().Attr<int64_t>("dest")
                         .Attr<int64_t>("tag"))
PYCOLLECTIVE_HANDLER(recv, pc::kRecv, pc::Recv<Place>,
                     pc::BindArray<Place>().Attr<int64_t>("source").Attr<int64_t>("tag"))
PYCOLLECTIVE_HANDLER(barrier, pc::kBarrier, pc::Barrier<Place>,
                     pc::BindCall<Place>().Arg<pc::InToken>().Ret<ffi::Token>())
