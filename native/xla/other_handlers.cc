// XLA FFI handlers of the operations that are not collectives of one array: the rows OTHER of operations.h.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/operations.h"
#include "calls/call.h"
#include "calls/communicators.h"
#include "calls/messages.h"
#include "calls/ragged_rows.h"
#include "devices/buffers.h"
#include "devices/team_collectives.h"
#include "mpi/collectives.h"
#include "mpi/dtypes.h"
#include "shared_memory/host_collectives.h"
#include "xla/allreduce.h"
#include "xla/decode.h"

namespace pycollective {
namespace {

template <typename Buffers>
ffi::Error Allreduce(Buffers buffers, const Participants& participants, InToken, ffi::RemainingArgs operands, OutToken,
                     ffi::RemainingRets results, int64_t op, int64_t bucket_bytes) {
  Call call = CallIn(buffers, kAllreduce, participants);
  AllreduceArrays all;
  const ffi::Error bad = all.Decode(call, participants, operands, results, op);
  if (bad.failure()) return bad;
  const PiggybackedAllreduce piggybacked(all.arrays, static_cast<Op>(op));
  const Arguments as_bytes{nullptr, nullptr, all.nbytes, Type::kUint8};
  if (Buffers::kInHostMemory) {
    call.AllowPiggyback(piggybacked, HostCollective::GoesWithComparison(kAllreduce, as_bytes, call.size()));
  }
  for (size_t i = 0; i < operands.size(); ++i) call.AddOperandForNanCheck(*operands.get<ffi::AnyBuffer>(i));
  std::vector<ResultMemory> written;
  if (participants.replicated) {
    for (const ArrayPair& array : all.arrays) written.push_back({array.y, static_cast<size_t>(array.nbytes())});
  }
  // A call in host memory ends before the handler returns, so it needs no copy of the list.
  using Kept = std::conditional_t<Buffers::kInHostMemory, std::reference_wrapper<const std::vector<ArrayPair>>, std::vector<ArrayPair>>;
  return call.Run(buffers, all.signature, all.nbytes, {written.data(), written.size()},
                  [arrays = Kept(all.arrays), op, bucket_bytes](Buffers& on, const Library& mpi, const Lane& lane) {
                    return AllreduceIn(on, mpi, lane, arrays, static_cast<Op>(op), bucket_bytes);
                  });
}

// dest, source: for each lane the number of a device, rank * lanes + lane, or -1 for none. Devices on different lanes also
// exchange their arrays directly: there is a tag for each pair of devices. A mesh has tags and channels of its own.
template <typename Buffers>
ffi::Error Ppermute(Buffers buffers, const Participants& participants, InToken, In x, OutToken, Out y,
                    ffi::Span<const int64_t> dest, ffi::Span<const int64_t> source, int64_t pattern) {
  Call call = CallIn(buffers, kPpermute, participants);
  Type type;
  if (!MoveType(x.element_type(), &type)) return call.Unsupported(x.element_type());
  const ResultMemory result = ResultOf(*y);
  call.AddOperandForNanCheck(x);
  call.SetRoutes(dest);
  // If each rank has one device, all arrays are sent on one channel.
  const bool on_channel = dest.size() == 1;
  Arguments whole{x.untyped_data(), y->untyped_data(), Count(x), type};
  if (on_channel) {
    whole.to = static_cast<int>(dest[0]);
    whole.from = static_cast<int>(source[0]);
  }
  const PiggybackedArrayCollective piggybacked(kPpermute, whole, 1);
  if (Buffers::kInHostMemory && on_channel) call.AllowPiggyback(piggybacked, false);  // it does not synchronize all ranks
  const Communicator* const shared = call.communicator();  // the call shares it
  const size_t lane_index = call.lane_index();
  const int64_t to = lane_index < dest.size() ? dest[lane_index] : -1;
  const int64_t from = lane_index < source.size() ? source[lane_index] : -1;
  const View in_view = ViewOf(x, type), out_view = ViewOf(*y, type);
  return call.Run(
      buffers, SignatureOf(kPpermute, participants, x, -1, -1, pattern), NBytes(x), {&result, 1},
      [=](Buffers& on, const Library& mpi, const Lane& lane) {
        const Communicator& communicator = *shared;
        const auto lanes = static_cast<int64_t>(communicator.lanes.size());
        const int64_t devices = communicator.ranks->devices();
        const auto rank_of = [&](int64_t number) {
          return number < 0 ? mpi.proc_null() : communicator.ranks->RankInWhole(static_cast<int>(number / lanes));
        };
        const auto tag_of = [&](int64_t sender, int64_t receiver) {
          return int((communicator.is_mesh ? devices : 0) * devices + sender * devices + receiver);
        };
        const int to_rank = rank_of(to), from_rank = rank_of(from);
        const int to_tag = to < 0 ? 0 : tag_of(lane.index, to % lanes);
        const int from_tag = from < 0 ? 0 : tag_of(from % lanes, lane.index);
        return on.Exchange(lane.channel, in_view, out_view, {},
                              [&](const Channel& channel, const void* in, void* out, int64_t count) {
                                const Arguments a = whole.On(in, out, count);
                                return mpi.Permute(channel, {in, count, type, to_rank, to_tag},
                                                   {out, count, type, from_rank, from_tag}, on_channel ? &a : nullptr);
                              });
      });
}

template <typename Buffers>
auto BindPpermute() {
  using Routes = ffi::Span<const int64_t>;
  auto binding = BindArray<Buffers>().template Attr<Routes>("dest").template Attr<Routes>("source");
  return std::move(binding).template Attr<int64_t>("pattern");
}

// slices: int32[4, K], the rows of `RowSlices`. If `adds`, what arrives is added to the rows of `output`.
template <typename Buffers>
ffi::Error RaggedAlltoall(Buffers buffers, const Participants& participants, InToken, In output, In x, In slices, OutToken,
                          Out y, int64_t adds) {
  Call call = CallIn(buffers, kRaggedAlltoall, participants);
  Type type;
  const bool has_type = adds != 0 ? ReduceType(x.element_type(), static_cast<int64_t>(Op::kSum), &type)
                                  : MoveType(x.element_type(), &type);
  if (!has_type) return call.Unsupported(x.element_type());
  const ResultMemory result = ResultOf(*y);
  uint64_t pattern = Mix(static_cast<uint64_t>(adds), static_cast<uint64_t>(Count(slices)));
  for (const int64_t length : x.dimensions()) pattern = Mix(pattern, static_cast<uint64_t>(length));
  pattern = Mix(pattern, static_cast<uint64_t>(participants.tree()));
  const View sent = ViewOf(x, type), kept = ViewOf(output, type), of_slices = ViewOf(slices, Type::kInt32), received = ViewOf(*y, type);
  const int64_t from = x.dimensions().front(), to = y->dimensions().front();
  const int64_t length = from > 0 ? Count(x) / from : to > 0 ? Count(*y) / to : 0;
  return call.Run(
      buffers, SignatureOf(kRaggedAlltoall, participants, output, -1, -1, static_cast<int64_t>(pattern)),
      NBytes(x) + NBytes(*y), {&result, 1}, [=](Buffers& on, const Library& mpi, const Lane& lane) -> Outcome {
        if (lane.team != nullptr) return NotOnTeams();
        // The sizes are read on the host. The rows may not be cut, and are added on the host.
        constexpr ExchangeOptions kOnHost{false, false, false};
        const auto read = [&](const View& view, void* copy) {
          return on.Exchange(lane.channel, view, {}, kOnHost, [&](const Channel&, const void* in, void*, int64_t) {
            std::memcpy(copy, in, static_cast<size_t>(view.count * view.element_bytes));
            return Outcome{};
          });
        };
        std::vector<int32_t> sizes(static_cast<size_t>(of_slices.count));
        PYCOLLECTIVE_RETURN_IF_FAILED(read(of_slices, sizes.data()));
        const auto nbytes = static_cast<size_t>(received.count * received.element_bytes);
        const bool may_direct = adds == 0;
        std::unique_ptr<char[]> fetched;  // the output, if it is on an accelerator that MPI does not read
        if (!Buffers::kInHostMemory && !(direct && may_direct) && nbytes > 0) {
          fetched.reset(new char[nbytes]);
          PYCOLLECTIVE_RETURN_IF_FAILED(read(kept, fetched.get()));
        }
        const void* const before = fetched != nullptr ? fetched.get() : kept.data;
        return on.Exchange(lane.channel, sent, received, {false, false, may_direct}, [&](const Channel& channel, const void* in, void* out, int64_t) {
          if (before != out && nbytes > 0) PYCOLLECTIVE_RETURN_IF_FAILED(MemoryOf(channel).Copy(out, before, nbytes));
          return ExchangeRows(mpi, channel, RowSlices(sizes, channel.size), {in, from}, {out, to}, length, type, adds != 0);
        });
      });
}

template <typename Buffers>
auto BindRaggedAlltoall() {
  const auto bind = [] {
    auto binding = BindCall<Buffers>().template Arg<InToken>().template Arg<In>().template Arg<In>();
    return std::move(binding).template Arg<In>().template Ret<ffi::Token>().template Ret<ffi::AnyBuffer>();
  };
  return WithAttributes(bind, "adds");
}

template <typename Buffers>
ffi::Error Barrier(Buffers buffers, const Participants& participants, InToken, OutToken) {
  Call call = CallIn(buffers, kBarrier, participants);
  const Signature signature{kBarrier, participants.DtypeOf(0, ffi::DataType::INVALID)};
  return call.Run(buffers, signature, 0, {}, [](Buffers& on, const Library& mpi, const Lane& lane) {
    return on.Exchange(lane.channel, {}, {}, {},
                          [&](const Channel& channel, const void*, void*, int64_t) { return mpi.Barrier(channel); });
  });
}

// Messages are sent as a whole: the peer may cut them into other pieces, or not at all.
constexpr ExchangeOptions kWholeMessage{false, false, true};

template <typename Buffers>
ffi::Error Send(Buffers buffers, const Participants& participants, InToken, In x, OutToken, int64_t dest, int64_t tag) {
  Call call = CallIn(buffers, kSend, participants);
  Type type;
  if (!MoveType(x.element_type(), &type)) return call.Unsupported(x.element_type());
  call.SetDest(dest);
  if (call.has_dest()) call.AddOperandForNanCheck(x);
  return call.Run(buffers, SignatureOf(kSend, participants, x), NBytes(x), {}, [&](Buffers& on, const Library& mpi, const Lane& lane) {
    return on.Exchange(lane.channel, ViewOf(x, type), {}, kWholeMessage,
                          [&](const Channel& channel, const void* in, void*, int64_t) {
                            return pycollective::Send(
                                mpi, channel,
                                {{in, Count(x), type, static_cast<int>(dest), static_cast<int>(tag)},
                                 {SignatureOf(kSend, participants, x), participants.site}});
                          });
  });
}

template <typename Buffers>
ffi::Error Recv(Buffers buffers, const Participants& participants, InToken, In, OutToken, Out y, int64_t source,
                int64_t tag, int64_t process, int64_t status) {
  Call call = CallIn(buffers, kRecv, participants);
  const ffi::Error foreign = call.CheckProcess(process);
  if (foreign.failure()) return foreign;
  Type type;
  if (!MoveType(y->element_type(), &type)) return call.Unsupported(y->element_type());
  const ResultMemory result = ResultOf(*y);
  call.SetSource(source);
  return call.Run(buffers, SignatureOf(kRecv, participants, *y), NBytes(*y), {&result, 1}, [&](Buffers& on, const Library& mpi, const Lane& lane) {
    return on.Exchange(lane.channel, {}, ViewOf(*y, type), kWholeMessage,
                          [&](const Channel& channel, const void*, void* out, int64_t) {
                            return pycollective::Recv(
                                mpi, channel,
                                {{out, Count(*y), type, static_cast<int>(source), static_cast<int>(tag),
                                  reinterpret_cast<void*>(status)},
                                 {SignatureOf(kRecv, participants, *y), participants.site}});
                          });
  });
}

template <typename Buffers>
ffi::Error Sendrecv(Buffers buffers, const Participants& participants, InToken, In x, OutToken, Out y, int64_t dest,
                    int64_t send_tag, int64_t source, int64_t recv_tag, int64_t process, int64_t status) {
  Call call = CallIn(buffers, kSendrecv, participants);
  const ffi::Error foreign = call.CheckProcess(process);
  if (foreign.failure()) return foreign;
  Type send_type, recv_type;
  if (!MoveType(x.element_type(), &send_type)) return call.Unsupported(x.element_type());
  if (!MoveType(y->element_type(), &recv_type)) return call.Unsupported(y->element_type());
  const ResultMemory result = ResultOf(*y);
  call.SetDest(dest);
  if (call.has_dest()) call.AddOperandForNanCheck(x);
  call.SetSource(source);
  const Signature signature = SignatureOf(kSendrecv, participants, x);
  const int64_t site = participants.site;
  return call.Run(buffers, signature, NBytes(x) + NBytes(*y), {&result, 1}, [&](Buffers& on, const Library& mpi, const Lane& lane) {
    return on.Exchange(
        lane.channel, ViewOf(x, send_type), ViewOf(*y, recv_type), kWholeMessage,
        [&](const Channel& channel, const void* in, void* out, int64_t) {
          return pycollective::Sendrecv(
              mpi, channel,
              {{in, Count(x), send_type, static_cast<int>(dest), static_cast<int>(send_tag)}, {signature, site}},
              {{out, Count(*y), recv_type, static_cast<int>(source), static_cast<int>(recv_tag),
                reinterpret_cast<void*>(status)},
               {SignatureOf(kSendrecv, participants, *y), site}});
        });
  });
}

// Messages under way: Isendrecv starts them, and its result is their number; WaitRequest has this number as an operand, and ends them. Under
// jax.vmap the number has the batch axes, and all its elements are equal. 0 stands for no message: JAX makes zeros of cotangents.

constexpr ExchangeOptions kCopied{false, false, false};  // to and from memory of this library

// shape, dtype: of the array that arrives.
template <typename Buffers>
ffi::Error Isendrecv(Buffers buffers, const Participants& participants, InToken, In x, OutToken, Out y, ffi::Span<const int64_t> shape,
                     int64_t dest, int64_t send_tag, int64_t source, int64_t recv_tag, int64_t dtype) {
  Call call = CallIn(buffers, kIsendrecv, participants);
  if (participants.callers() > 1) {
    return call.Error(ffi::ErrorCode::kUnimplemented, "expected a program in which one device of this rank starts messages, got one on " +
                                                          std::to_string(participants.callers()),
                      "Use sendrecv or ppermute there.");
  }
  Type send_type, recv_type;
  if (!MoveType(x.element_type(), &send_type)) return call.Unsupported(x.element_type());
  const auto expected_dtype = static_cast<ffi::DataType>(dtype);
  if (!MoveType(expected_dtype, &recv_type)) return call.Unsupported(expected_dtype);
  call.SetDest(dest);
  if (call.has_dest()) call.AddOperandForNanCheck(x);
  call.SetSource(source);
  const Signature sent = SignatureOf(kIsendrecv, participants, x);
  const Dimensions dimensions(shape);
  int64_t count = 1;
  for (const int64_t length : shape) count *= length;
  Signature expected{kIsendrecv, participants.DtypeOf(0, expected_dtype), count, -1, -1, 0};
  expected.dimensions = dimensions;
  const int64_t site = participants.site, numbers = Count(*y);
  const View in_view = ViewOf(x, send_type), out_view = ViewOf(*y, Type::kFloat32);
  const ResultMemory result = ResultOf(*y);
  return call.Run(buffers, call.has_dest() ? sent : expected, NBytes(x), {&result, 1}, [=](Buffers& on, const Library& mpi, const Lane& lane) -> Outcome {
    if (numbers == 0) return {};  // a batch of none
    const bool sends = dest != mpi.proc_null(), receives = source != mpi.proc_null();
    const SentMessage to{{nullptr, in_view.count, send_type, static_cast<int>(dest), static_cast<int>(send_tag)}, {sent, site}};
    const ExpectedMessage from{{nullptr, count, recv_type, static_cast<int>(source), static_cast<int>(recv_tag)}, {expected, site}};
    const auto started = std::make_shared<StartedMessages>(sends, to, receives, from);
    const int64_t number = AddStartedMessages(started);
    PYCOLLECTIVE_RETURN_IF_FAILED(on.Exchange(lane.channel, sends ? in_view : View{}, {}, kCopied, [&](const Channel& channel, const void* in, void*, int64_t) {
      return started->Start(mpi, channel, in);
    }));
    LetProgress(started);
    return on.Exchange(lane.channel, {}, out_view, kCopied, [&](const Channel&, const void*, void* out, int64_t) {
      std::fill_n(static_cast<float*>(out), numbers, static_cast<float>(number));
      return Outcome{};
    });
  });
}

template <typename Buffers>
auto BindIsendrecv() {
  const auto bind = [] { return BindArray<Buffers>().template Attr<ffi::Span<const int64_t>>("shape"); };
  return WithAttributes(bind, "dest", "send_tag", "source", "recv_tag", "dtype");
}

// operands: the number, and arrays that XLA is to have computed before.
template <typename Buffers>
ffi::Error WaitRequest(Buffers buffers, const Participants& participants, InToken, ffi::RemainingArgs operands, OutToken,
                       ffi::RemainingRets results) {
  Call call = CallIn(buffers, kWaitRequest, participants);
  auto operand = operands.get<ffi::AnyBuffer>(0);
  auto arriving = results.get<ffi::AnyBuffer>(0);
  if (operand.has_error()) return operand.error();
  if (arriving.has_error()) return arriving.error();
  const ffi::AnyBuffer x = *operand;
  Out y = *arriving;
  Type type;
  if (!MoveType(y->element_type(), &type)) return call.Unsupported(y->element_type());
  const View numbers = ViewOf(x, Type::kFloat32), arrives = ViewOf(*y, type);
  const ResultMemory result = ResultOf(*y);
  if (Buffers::kInHostMemory && numbers.count > 0) {  // for the record; a number on an accelerator is not known yet
    const auto started = FindStartedMessages(NumberOfMessages(*static_cast<const float*>(numbers.data)));
    if (started != nullptr && started->sends()) call.SetDest(started->sent().data.dest);
    if (started != nullptr && started->receives()) call.SetSource(started->expected().data.source);
  }
  return call.Run(buffers, SignatureOf(kWaitRequest, participants, *y), NBytes(*y), {&result, 1}, [=](Buffers& on, const Library& mpi, const Lane& lane) -> Outcome {
    if (numbers.count == 0) return {};
    int64_t number = 0;
    bool are_equal = true;
    PYCOLLECTIVE_RETURN_IF_FAILED(on.Exchange(lane.channel, numbers, {}, kCopied, [&](const Channel&, const void* in, void*, int64_t) {
      const float* const all = static_cast<const float*>(in);
      number = NumberOfMessages(*all);
      are_equal = std::all_of(all, all + numbers.count, [&](float each) { return NumberOfMessages(each) == number; });
      return Outcome{};
    }));
    if (!are_equal) {
      Outcome outcome{"wait", 0, {}};
      outcome.detail = "expected a batch whose elements have one request, since it is one message, got some that have others or none";
      outcome.remedy = "Under jax.vmap, wait for each request, and choose between the arrays.";
      return outcome;
    }
    const std::shared_ptr<StartedMessages> started = TakeStartedMessages(number);
    const void* arrived = nullptr;
    if (started != nullptr) PYCOLLECTIVE_RETURN_IF_FAILED(started->Wait(mpi, &arrived));
    const bool is_other = arrived != nullptr && !started->Brings(arrives.count, type);
    if (is_other || (started == nullptr && number != 0)) {
      Outcome outcome{"wait", 0, {}};
      outcome.detail = std::string("expected a request whose messages are under way, got one ") +
                       (is_other ? "for another array" : "that was waited for, or that this process has not started");
      outcome.remedy = "Wait once for each request, and change nothing in it.";
      return outcome;
    }
    return on.Exchange(lane.channel, {}, arrives, kCopied, [&](const Channel&, const void*, void* out, int64_t) {
      const auto nbytes = static_cast<size_t>(arrives.count * arrives.element_bytes);
      if (nbytes > 0 && arrived != nullptr) std::memcpy(out, arrived, nbytes);
      if (nbytes > 0 && arrived == nullptr) std::memset(out, 0, nbytes);
      return Outcome{};
    });
  });
}

}  // namespace

#define PYCOLLECTIVE_NOTHING(...)
#define PYCOLLECTIVE_OTHER(name, Name, dataflow, host_exchange, hierarchy, ...) \
  PYCOLLECTIVE_EXPORT_HANDLERS(name, NewHandler<Buffers>(k##Name, __VA_ARGS__, Name<Buffers>))
PYCOLLECTIVE_OPERATIONS(PYCOLLECTIVE_NOTHING, PYCOLLECTIVE_OTHER)

}  // namespace pycollective
