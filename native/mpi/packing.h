// Groups the small arrays of one operation into few calls.

#ifndef PYCOLLECTIVE_NATIVE_MPI_PACKING_H_
#define PYCOLLECTIVE_NATIVE_MPI_PACKING_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "mpi/collectives.h"
#include "mpi/elements.h"
#include "mpi/mpi.h"

namespace pycollective {

// An array of an elementwise operation: the operand `x` and the result `y`.
struct ArrayPair {
  const void* x;
  void* y;
  int64_t count;
  Type type;

  int64_t nbytes() const { return count * kTypeBytes[static_cast<int>(type)]; }
};

// Several arrays of one type as one array.
class Bucket {
 public:
  void Add(const ArrayPair& array) {
    arrays_.push_back(&array);
    count_ += array.count;
  }
  void Clear() {
    arrays_.clear();
    count_ = 0;
  }
  size_t size() const { return arrays_.size(); }
  int64_t count() const { return count_; }
  const ArrayPair& front() const { return *arrays_.front(); }
  int64_t nbytes() const { return size() == 0 ? 0 : count_ * kTypeBytes[static_cast<int>(front().type)]; }

  // Copies elements of the operands to `to`, in the order of the arrays.
  void Bring(int64_t first, int64_t count, void* to) const {
    ForEach(first, count, [&](const ArrayPair& array, int64_t begin, int64_t place, int64_t n) {
      std::memcpy(At(to, place, array.type), At(array.x, begin, array.type), Bytes(n, array.type));
    });
  }
  // Copies elements to the results.
  void Take(int64_t first, int64_t count, const void* from) const {
    ForEach(first, count, [&](const ArrayPair& array, int64_t begin, int64_t place, int64_t n) {
      std::memcpy(At(array.y, begin, array.type), At(from, place, array.type), Bytes(n, array.type));
    });
  }

 private:
  // Calls use(array, begin, place, n) for the n elements of each array, from `begin` on, that are at `place` of the range.
  template <typename Use>
  void ForEach(int64_t first, int64_t count, Use use) const {
    int64_t of_array = 0;  // the begin of the array in the bucket
    for (const ArrayPair* array : arrays_) {
      const int64_t begin = std::max(first, of_array), end = std::min(first + count, of_array + array->count);
      if (begin < end) use(*array, begin - of_array, begin - first, end - begin);
      of_array += array->count;
      if (of_array >= first + count) return;
    }
  }

  std::vector<const ArrayPair*> arrays_;
  int64_t count_ = 0;  // of all elements
};

// Makes an elementwise operation on all `arrays`. A bucket has several small arrays of one type, in their order, with at most
// `bucket_bytes` together. Calls of_bucket(bucket) for each bucket. Calls of_array(array) for each array of half that size or
// more, and for an array that would be alone in its bucket. The buckets depend only on the sizes, so they are the same on all
// ranks. After an error the remaining calls are made nevertheless, since other ranks wait in them. The first error is returned.
template <typename OfArray, typename OfBucket>
Outcome CallPacked(const std::vector<ArrayPair>& arrays, int64_t bucket_bytes, OfArray of_array, OfBucket of_bucket) {
  if (arrays.size() == 1) return arrays[0].count == 0 ? Outcome{} : of_array(arrays[0]);  // most calls: no lists needed
  Bucket bucket;
  Outcome first;
  const auto note = [&](const Outcome& outcome) {
    if (first.ok()) first = outcome;
  };
  const auto flush = [&] {
    if (bucket.size() > 0) note(bucket.size() == 1 ? of_array(bucket.front()) : of_bucket(bucket));
    bucket.Clear();
  };
  for (int type = 0; type < kTypeCount; ++type) {
    for (const ArrayPair& array : arrays) {
      if (static_cast<int>(array.type) != type || array.count == 0) continue;
      if (2 * array.nbytes() >= bucket_bytes) {
        note(of_array(array));
        continue;
      }
      if (bucket.nbytes() + array.nbytes() > bucket_bytes) flush();
      bucket.Add(array);
    }
    flush();
  }
  return first;
}

}  // namespace pycollective

#endif  // PYCOLLECTIVE_NATIVE_MPI_PACKING_H_
