// Arrays with more elements than MPI's int can count.

#ifndef PYCOLLECTIVE_NATIVE_MPI_LARGE_COUNTS_H_
#define PYCOLLECTIVE_NATIVE_MPI_LARGE_COUNTS_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "mpi/collectives.h"
#include "mpi/mpi.h"

namespace pycollective {

// For elementwise operations: calls call(first, n) for consecutive pieces of at most `max_count` elements. An empty
// array needs no call: its count is the same on every rank, so no rank waits.
template <typename Call>
Outcome InChunks(int64_t count, int64_t max_count, Call call) {
  for (int64_t first = 0; first < count; first += max_count) {
    PYCOLLECTIVE_RETURN_IF_FAILED(call(first, static_cast<int>(std::min(max_count, count - first))));
  }
  return {};
}

// For blocks and messages: `count` elements as count() elements of the datatype type(), where count() fits MPI's int.
// The datatype is that of the elements, or a derived one with all of them, which lives as long as this object.
template <typename H>
class Block {
 public:
  Block(const Functions<H>& functions, int64_t max_count, int64_t count, int64_t element_bytes, H element)
      : functions_(functions), count_(static_cast<int>(count)), type_(element) {
    if (count > max_count) made_ = Derive(max_count, count, element_bytes);
  }
  ~Block() {
    if (derived_) functions_.Type_free(&type_);
  }
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  const Outcome& made() const { return made_; }
  int count() const { return count_; }
  H type() const { return type_; }

 private:
  // struct { chunk[chunks]; element[rest] }, where a chunk has max_count elements.
  Outcome Derive(int64_t max_count, int64_t count, int64_t element_bytes) {
    const H element = type_;
    const int64_t chunks = count / max_count;
    const int64_t rest = count % max_count;
    H chunk{};
    int code = functions_.Type_contiguous(static_cast<int>(max_count), element, &chunk);
    if (code != 0) return Outcome{"MPI_Type_contiguous", code, {}};
    const int lengths[2] = {static_cast<int>(chunks), static_cast<int>(rest)};
    const ptrdiff_t offsets[2] = {0, static_cast<ptrdiff_t>(chunks * max_count * element_bytes)};
    const H parts[2] = {chunk, element};
    code = functions_.Type_create_struct(2, lengths, offsets, parts, &type_);
    functions_.Type_free(&chunk);
    if (code != 0) return Outcome{"MPI_Type_create_struct", code, {}};
    derived_ = true;
    count_ = 1;
    code = functions_.Type_commit(&type_);
    if (code != 0) return Outcome{"MPI_Type_commit", code, {}};
    return {};
  }

  const Functions<H>& functions_;
  int count_;
  H type_;
  bool derived_ = false;
  Outcome made_;
};

}  // namespace pycollective

#endif  // PYCOLLECTIVE_NATIVE_MPI_LARGE_COUNTS_H_
