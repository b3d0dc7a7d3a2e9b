// Implementation of ragged_rows.h.

#include "calls/ragged_rows.h"

#include <algorithm>
#include <memory>
#include <new>
#include <string>
#include <utility>

#include "mpi/elements.h"
#include "mpi/reduction.h"

namespace pycollective {
namespace {

// What a rank tells another one of a slice that it sends.
struct Announced {
  int64_t size;  // rows
  int64_t offset;
};

std::string RowsText(int64_t first, int64_t count) {
  return std::to_string(count) + (count == 1 ? " row" : " rows") + " from row " + std::to_string(first) + " on";
}

bool IsOutside(int64_t offset, int64_t size, int64_t rows) { return size > 0 && (offset < 0 || offset + size > rows); }

// The first fault of the slices; "" if there is none.
std::string FaultOf(const RowSlices& slices, const std::vector<Announced>& arriving, int64_t x_rows, int64_t y_rows, bool adds) {
  const auto count = static_cast<int64_t>(arriving.size());
  const auto peer = [&](int64_t i) { return std::to_string(i / slices.each); };
  for (int64_t i = 0; i < count; ++i) {
    const int64_t size = slices.send_sizes[i], offset = slices.input_offsets[i];
    if (size < 0 || IsOutside(offset, size, x_rows)) {
      return "expected slices of the " + std::to_string(x_rows) + " rows of the operand, got " + RowsText(offset, size) + " for rank " + peer(i);
    }
  }
  std::vector<std::pair<Announced, int64_t>> places;
  for (int64_t i = 0; i < count; ++i) {
    const auto [size, offset] = arriving[static_cast<size_t>(i)];
    if (size < 0) continue;  // its sender refuses it
    if (size != slices.recv_sizes[i]) {
      return "expected " + std::to_string(slices.recv_sizes[i]) + " rows from rank " + peer(i) + ", as recv_sizes says, got " + std::to_string(size);
    }
    if (IsOutside(offset, size, y_rows)) {
      return "expected slices of the " + std::to_string(y_rows) + " rows of the result, got " + RowsText(offset, size) + " from rank " + peer(i);
    }
    if (size > 0) places.push_back({{size, offset}, i});
  }
  if (adds) return "";
  std::sort(places.begin(), places.end(), [](const auto& a, const auto& b) { return a.first.offset < b.first.offset; });
  for (size_t i = 1; i < places.size(); ++i) {
    const auto& [before, i_before] = places[i - 1];
    const auto& [next, i_next] = places[i];
    if (before.offset + before.size > next.offset) {
      return "expected at most one slice for each row of the result, got " + RowsText(before.offset, before.size) + " from rank " +
             peer(i_before) + " and " + RowsText(next.offset, next.size) + " from rank " + peer(i_next);
    }
  }
  return "";
}

Outcome Refused(const std::string& detail) {
  Outcome outcome{"ragged_alltoall", 0, detail};
  outcome.remedy = "Check the counts, offsets and capacities that the ranks pass.";
  return outcome;
}

// Returns the same verdict on all ranks: a failure if a rank has found a fault.
Outcome Agree(const Library& mpi, const Channel& channel, const std::string& fault) {
  const int64_t own = fault.empty() ? channel.size : channel.rank;
  int64_t first = 0;
  PYCOLLECTIVE_RETURN_IF_FAILED(mpi.Allreduce(channel, {&own, &first, 1, Type::kInt64, Op::kMin}));
  if (!fault.empty()) return Refused(fault);
  if (first < channel.size) return Refused("expected slices that fit the arrays of all ranks, got wrong ones on rank " + std::to_string(first));
  return {};
}

}  // namespace

Outcome ExchangeRows(const Library& mpi, const Channel& of_arrays, const RowSlices& slices, ConstRows x, Rows y, int64_t length,
                     Type type, bool adds) {
  Channel channel = of_arrays;
  channel.memory = nullptr;  // sizes are in the host's memory
  const int64_t count = channel.size * slices.each;
  std::vector<Announced> leaving(static_cast<size_t>(count)), arriving(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) leaving[static_cast<size_t>(i)] = {slices.send_sizes[i], slices.output_offsets[i]};
  PYCOLLECTIVE_RETURN_IF_FAILED(mpi.Alltoall(channel, {leaving.data(), arriving.data(), 2 * slices.each, Type::kInt64}));
  std::string fault = FaultOf(slices, arriving, x.count, y.count, adds);

  // Slices that are added arrive one behind the other in memory of their own.
  std::vector<int64_t> starts(static_cast<size_t>(count) + 1, 0);
  std::unique_ptr<char[]> own;
  if (adds && fault.empty()) {
    for (int64_t i = 0; i < count; ++i) starts[static_cast<size_t>(i) + 1] = starts[static_cast<size_t>(i)] + std::max<int64_t>(arriving[static_cast<size_t>(i)].size, 0);
    const size_t nbytes = Bytes(starts.back() * length, type);
    own.reset(new (std::nothrow) char[nbytes]);
    if (own == nullptr) fault = "expected memory for " + std::to_string(nbytes) + " B that arrive, got none";
  }
  PYCOLLECTIVE_RETURN_IF_FAILED(Agree(mpi, channel, fault));

  const auto place_of = [&](int64_t i) {
    return adds ? At(static_cast<void*>(own.get()), starts[static_cast<size_t>(i)] * length, type)
                : At(y.data, arriving[static_cast<size_t>(i)].offset * length, type);
  };
  const Channel messages = ChannelOfOwnMessages(channel);
  std::vector<int64_t> started;
  const auto start = [&](int from, int to) -> Outcome {
    for (int64_t i = from * slices.each; i < (from + 1) * slices.each; ++i) {
      const int64_t n = arriving[static_cast<size_t>(i)].size * length;
      if (n == 0) continue;
      int64_t handle = 0;
      PYCOLLECTIVE_RETURN_IF_FAILED(mpi.Irecv(messages, {place_of(i), n, type, from, channel.own_tag}, &handle));
      started.push_back(handle);
    }
    for (int64_t i = to * slices.each; i < (to + 1) * slices.each; ++i) {
      const int64_t n = slices.send_sizes[i] * length;
      if (n == 0) continue;
      int64_t handle = 0;
      const void* const data = At(x.data, slices.input_offsets[i] * length, type);
      PYCOLLECTIVE_RETURN_IF_FAILED(mpi.Isend(messages, {data, n, type, to, channel.own_tag}, &handle));
      started.push_back(handle);
    }
    return {};
  };
  // In a step each rank sends to the rank so far behind it, so that ranks do not all send to the same one at once.
  Outcome outcome;
  for (int step = 1; step < channel.size && outcome.ok(); ++step) {
    outcome = start((channel.rank - step + channel.size) % channel.size, (channel.rank + step) % channel.size);
  }
  const Outcome ended = started.empty() ? Outcome{} : mpi.WaitAll(&started);  // MPI reads and writes the rows until then
  PYCOLLECTIVE_RETURN_IF_FAILED(outcome);
  PYCOLLECTIVE_RETURN_IF_FAILED(ended);
  for (int64_t i = channel.rank * slices.each; i < (channel.rank + 1) * slices.each; ++i) {
    const int64_t n = slices.send_sizes[i] * length;
    const void* const data = At(x.data, slices.input_offsets[i] * length, type);
    if (n > 0) PYCOLLECTIVE_RETURN_IF_FAILED(MemoryOf(of_arrays).Copy(place_of(i), data, Bytes(n, type)));
  }
  for (int64_t i = 0; adds && i < count; ++i) {
    const auto [size, offset] = arriving[static_cast<size_t>(i)];
    if (size > 0) ReduceInPlace(At(y.data, offset * length, type), place_of(i), size * length, type, Op::kSum);
  }
  return {};
}

}  // namespace pycollective
