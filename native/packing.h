// Packs the small arrays of one operation into few MPI calls.

#ifndef PYCOLLECTIVE_NATIVE_PACKING_H_
#define PYCOLLECTIVE_NATIVE_PACKING_H_

#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "collectives.h"
#include "mpi.h"

namespace pycollective {

// An array of an elementwise operation: the operand `x` and the result `y`.
struct ArrayPair {
  const void* x;
  void* y;
  int64_t count;
  Type type;

  int64_t nbytes() const { return count * kTypeBytes[static_cast<int>(type)]; }
};

// Makes an elementwise operation on all `arrays`. A bucket is a buffer of at most `bucket_bytes` that packs several
// small arrays of one type, in their order. Calls call(x, y, count, type) for each bucket, and for each array of half a
// bucket or more. The sizes alone decide which arrays share a bucket, so ranks agree on it. After an error the other
// calls are made all the same, since other ranks wait in them; the first error is returned.
template <typename Call>
Outcome CallPacked(const std::vector<ArrayPair>& arrays, int64_t bucket_bytes, Call call) {
  if (arrays.size() == 1) {  // most calls: spare them the lists
    const ArrayPair& array = arrays[0];
    return array.count == 0 ? Outcome{} : call(array.x, array.y, array.count, array.type);
  }
  std::unique_ptr<char[]> buffer;
  std::vector<const ArrayPair*> bucket;
  Outcome first;
  const auto note = [&](const Outcome& outcome) {
    if (first.ok()) first = outcome;
  };
  for (int type = 0; type < kTypeCount; ++type) {
    int64_t filled = 0;  // bytes
    const auto flush = [&] {
      if (bucket.size() == 1) {
        note(call(bucket[0]->x, bucket[0]->y, bucket[0]->count, bucket[0]->type));
      } else if (!bucket.empty()) {
        if (buffer == nullptr) buffer.reset(new char[static_cast<size_t>(bucket_bytes)]);
        char* to = buffer.get();
        for (const ArrayPair* array : bucket) {
          std::memcpy(to, array->x, static_cast<size_t>(array->nbytes()));
          to += array->nbytes();
        }
        note(call(buffer.get(), buffer.get(), filled / kTypeBytes[type], static_cast<Type>(type)));
        const char* from = buffer.get();
        for (const ArrayPair* array : bucket) {
          std::memcpy(array->y, from, static_cast<size_t>(array->nbytes()));
          from += array->nbytes();
        }
      }
      bucket.clear();
      filled = 0;
    };
    for (const ArrayPair& array : arrays) {
      if (static_cast<int>(array.type) != type || array.count == 0) continue;
      if (2 * array.nbytes() >= bucket_bytes) {
        note(call(array.x, array.y, array.count, array.type));
        continue;
      }
      if (filled + array.nbytes() > bucket_bytes) flush();
      bucket.push_back(&array);
      filled += array.nbytes();
    }
    flush();
  }
  return first;
}

}  // namespace pycollective

#endif  // PYCOLLECTIVE_NATIVE_PACKING_H_
