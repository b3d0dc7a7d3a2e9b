// An allreduce of any number of arrays in one call.

#ifndef PYCOLLECTIVE_NATIVE_XLA_ALLREDUCE_H_
#define PYCOLLECTIVE_NATIVE_XLA_ALLREDUCE_H_

#include <cstdint>
#include <vector>

#include "calls/call.h"
#include "devices/buffers.h"
#include "devices/team_collectives.h"
#include "mpi/collectives.h"
#include "mpi/dtypes.h"
#include "mpi/packing.h"
#include "xla/decode.h"

namespace pycollective {

// The operands and results of an allreduce.
struct AllreduceArrays {
  std::vector<ArrayPair> arrays;
  Signature signature{kAllreduce};
  int64_t nbytes = 0;

  // Reads XLA's arguments. Returns an error if an operand cannot be reduced.
  ffi::Error Decode(const Call& call, const Participants& participants, const ffi::RemainingArgs& operands,
                    const ffi::RemainingRets& results, int64_t op) {
    signature.reduce_op = static_cast<int32_t>(op);
    for (size_t i = 0; i < operands.size(); ++i) {
      const auto x = operands.get<ffi::AnyBuffer>(i);
      auto y = results.get<ffi::AnyBuffer>(i);
      if (x.has_error()) return x.error();
      if (y.has_error()) return y.error();
      ArrayPair array{x->untyped_data(), (*y)->untyped_data(), Count(*x), Type::kUint8};
      if (!ReduceType(x->element_type(), op, &array.type)) return call.Unsupported(x->element_type());
      arrays.push_back(array);
      nbytes += NBytes(*x);
      signature.count += array.count;
      const int32_t dtype = participants.DtypeOf(i, x->element_type());
      if (i == 0) {
        signature.dtype = dtype;
        signature.dimensions = Dimensions(x->dimensions());
      } else {
        // A hash; unsigned, since it wraps around.
        const uint64_t one = Dimensions(x->dimensions()).Hash() * 64u + static_cast<uint64_t>(dtype) + 1;
        signature.pattern = static_cast<int64_t>(static_cast<uint64_t>(signature.pattern) * 1000003u + one);
      }
    }
    return ffi::Error::Success();
  }
};

// In host memory: small arrays of one type are joined into buckets of at most `bucket_bytes`. An array of half that size or more
// is a call of its own, since its copy would cost more than a call.
inline Outcome AllreduceIn(HostBuffers&, const Library& mpi, const Lane& lane, const std::vector<ArrayPair>& arrays,
                           Op op, int64_t bucket_bytes) {
  const auto of_array = [&](const ArrayPair& array) {
    const Arguments arguments{array.x, array.y, array.count, array.type, op};
    return lane.team != nullptr ? TeamCollective(mpi, lane.in_team()).Allreduce(arguments) : mpi.Allreduce(lane.channel, arguments);
  };
  const auto of_bucket = [&](const Bucket& bucket) -> Outcome {
    const ScatteredArray array{
        [&](int64_t first, int64_t count, void* to) { bucket.Bring(first, count, to); },
        [&](int64_t first, int64_t count, const void* from) { bucket.Take(first, count, from); },
    };
    const Arguments arguments{nullptr, nullptr, bucket.count(), bucket.front().type, op};
    if (lane.team == nullptr) return mpi.AllreduceScattered(lane.channel, arguments, array);
    return InOneArray(arguments, array, [&](const Arguments& whole) { return TeamCollective(mpi, lane.in_team()).Allreduce(whole); });
  };
  return CallPacked(arrays, bucket_bytes, of_array, of_bucket);
}

// On an accelerator: all arrays of one type are joined to one array, which is sent in pieces.
inline Outcome AllreduceIn(DeviceBuffers& buffers, const Library& mpi, const Lane& lane,
                           const std::vector<ArrayPair>& arrays, Op op, int64_t bucket_bytes) {
  Outcome all;
  for (int number = 0; number < kTypeCount; ++number) {
    const auto type = static_cast<Type>(number);
    std::vector<const ArrayPair*> of_type;
    for (const ArrayPair& array : arrays) {
      if (array.type == type && array.count > 0) of_type.push_back(&array);
    }
    if (of_type.empty()) continue;
    // After an error of MPI the remaining calls are made nevertheless, since other ranks wait in them.
    all.Add(buffers.ExchangeArrays(
        lane.channel, of_type, bucket_bytes, !mpi.IsOwn(op, type),
        [&](const Channel& channel, const void* x, void* y, int64_t count) {
          return mpi.Allreduce(channel, {x, y, count, type, op});
        }));
    if (all.of_runtime) return all;
  }
  return all;
}

}  // namespace pycollective

#endif  // PYCOLLECTIVE_NATIVE_XLA_ALLREDUCE_H_
