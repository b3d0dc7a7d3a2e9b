// The exchange of rows between all ranks, in slices whose sizes are known only when the program runs: ragged_alltoall.

#ifndef PYCOLLECTIVE_NATIVE_CALLS_RAGGED_ROWS_H_
#define PYCOLLECTIVE_NATIVE_CALLS_RAGGED_ROWS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "mpi/collectives.h"

namespace pycollective {

// The slices of one rank, as in jax.lax.ragged_all_to_all: for each rank, `each` slices that this rank sends it and receives from it.
struct RowSlices {
  // `all`: int32[4, ranks * each].
  RowSlices(const std::vector<int32_t>& all, int ranks)
      : each(static_cast<int64_t>(all.size()) / 4 / ranks),
        input_offsets(all.data()),
        send_sizes(all.data() + ranks * each),
        output_offsets(all.data() + 2 * ranks * each),
        recv_sizes(all.data() + 3 * ranks * each) {}

  int64_t each;
  const int32_t* input_offsets;   // where a sent slice begins in the operand
  const int32_t* send_sizes;
  const int32_t* output_offsets;  // where a sent slice begins in the receiver's result
  const int32_t* recv_sizes;
};

struct ConstRows {
  const void* data;
  int64_t count;
};
struct Rows {
  void* data;
  int64_t count;
};

// Sends the slices of `x`, and writes what arrives to its rows of `y`, or adds it to them. A row has `length` elements.
//
// The ranks first tell each other the sizes of the slices and their places, and agree that all slices fit: if they do not fit on some rank,
// all ranks return an error, and no slice is sent. Then each slice is a message.
Outcome ExchangeRows(const Library& mpi, const Channel& channel, const RowSlices& slices, ConstRows x, Rows y, int64_t length,
                     Type type, bool adds);

}  // namespace pycollective

#endif  // PYCOLLECTIVE_NATIVE_CALLS_RAGGED_ROWS_H_
