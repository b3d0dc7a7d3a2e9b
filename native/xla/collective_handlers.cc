// XLA FFI handlers of the collectives of one array: the rows COLLECTIVE of operations.h.

#include <algorithm>
#include <cstdint>

#include "base/operations.h"
#include "calls/call.h"
#include "devices/team_collectives.h"
#include "mpi/collectives.h"
#include "mpi/dtypes.h"
#include "shared_memory/host_collectives.h"
#include "xla/decode.h"

namespace pycollective {
namespace {

struct Row {
  Operation operation;
  bool is_reduction;
  Outcome (Library::*call)(const Channel&, const Arguments&) const;
  Outcome (TeamCollective::*on_team)(const Arguments&);
};

// Runs the collective of a row. `op` and `root` are -1 if it has none.
template <typename Buffers>
ffi::Error Run(const Row& row, Buffers buffers, const Participants& participants, const ffi::AnyBuffer& x,
               const ffi::AnyBuffer& y, int64_t op, int64_t root) {
  Call call = CallIn(buffers, row.operation, participants);
  Type type;
  const bool has_type = row.is_reduction ? ReduceType(x.element_type(), op, &type) : MoveType(x.element_type(), &type);
  if (!has_type) return call.Unsupported(x.element_type());
  Arguments arguments{x.untyped_data(), y.untyped_data(), 0, type};
  if (op >= 0) arguments.op = static_cast<Op>(op);
  if (root >= 0) arguments.root = static_cast<int>(root);
  const ResultMemory result = ResultOf(y);
  call.AddOperandForNanCheck(x);
  const int64_t size = call.size();
  const Traits& traits = TraitsOf(row.operation);
  const int64_t blocks_in = traits.operand == kBlocks ? size : 1;
  const Arguments of_rank = arguments.On(arguments.send, arguments.recv, Count(x) / blocks_in);
  const PiggybackedArrayCollective piggybacked(row.operation, of_rank, blocks_in);
  if (Buffers::kInHostMemory) {
    call.AllowPiggyback(piggybacked, HostCollective::GoesWithComparison(row.operation, of_rank, static_cast<int>(size)));
  }
  const View in = ViewOf(x, type, blocks_in);
  const View out = ViewOf(y, type, traits.result == kBlocks ? size : 1);
  const int64_t count = Count(x);
  return call.Run(
      buffers, SignatureOf(row.operation, participants, x, op, root, participants.tree()), std::max(NBytes(x), NBytes(y)),
      {&result, 1},
      [=](Buffers& on, const Library& mpi, const Lane& lane) {
        const Traits& traits = TraitsOf(row.operation);
        if constexpr (Buffers::kInHostMemory) {
          if (lane.team != nullptr) {
            if (row.on_team == nullptr) return NotOnTeams();
            const int64_t blocks = traits.operand == kBlocks ? lane.channel.size * lane.team->size() : 1;
            const Arguments of_team = arguments.On(arguments.send, arguments.recv, count / blocks);
            return (TeamCollective(mpi, lane.in_team()).*row.on_team)(of_team);
          }
        }
        const bool in_place = traits.operand == kWhole && traits.result == kWhole;
        const bool is_own = row.is_reduction && mpi.IsOwn(arguments.op, type);
        return on.Exchange(lane.channel, in, out, {true, in_place, !is_own},
                           [&](const Channel& channel, const void* send, void* recv, int64_t n) {
                             return (mpi.*row.call)(channel, arguments.On(send, recv, n));
                           });
      });
}

// Makes the handler of a row, for buffers of one kind. XLA passes exactly the attributes that the row names.
template <typename Buffers, int kAttributes>
ffi::Ffi* NewHandlerOf(const Row& row) {
  constexpr bool kHasOp = (kAttributes & kOp) != 0;
  constexpr bool kHasRoot = (kAttributes & kRoot) != 0;
  const auto run = [row](Buffers buffers, const Participants& participants, InToken, In x, OutToken, Out y,
                         auto... attributes) {
    const int64_t values[] = {attributes..., -1};
    return Run(row, buffers, participants, x, *y, kHasOp ? values[0] : -1, kHasRoot ? values[kHasOp ? 1 : 0] : -1);
  };
  if constexpr (kHasOp && kHasRoot) {
    return NewHandler<Buffers>(row.operation, BindArray<Buffers>("op", "root"), run);
  } else if constexpr (kHasOp) {
    return NewHandler<Buffers>(row.operation, BindArray<Buffers>("op"), run);
  } else if constexpr (kHasRoot) {
    return NewHandler<Buffers>(row.operation, BindArray<Buffers>("root"), run);
  } else {
    return NewHandler<Buffers>(row.operation, BindArray<Buffers>(), run);
  }
}

}  // namespace

#define PYCOLLECTIVE_COLLECTIVE(name, Name, attributes, operand, result, dataflow, host_exchange, hierarchy, on_team) \
  PYCOLLECTIVE_EXPORT_HANDLERS(                                                                                        \
      name, NewHandlerOf<Buffers, attributes>({k##Name, ((attributes) & kOp) != 0, &Library::Name, on_team}))
#define PYCOLLECTIVE_NOTHING(...)
PYCOLLECTIVE_OPERATIONS(PYCOLLECTIVE_COLLECTIVE, PYCOLLECTIVE_NOTHING)

}  // namespace pycollective
