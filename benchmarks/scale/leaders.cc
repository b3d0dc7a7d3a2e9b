// Leaders of hosts that compare calls: the sources of native/calls/comparison.cc and native/mpi on the MPI of SimGrid, SMPI.
//
// A process of SMPI stands for the first rank of a host. It prints, in simulated seconds for a call: the comparison; the allgather
// of 128 bytes of each leader that a flat comparison needs; an allreduce of 16 bytes.

#include <mpi.h>

#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "calls/comparison.h"
#include "mpi/mpi.h"

namespace {

constexpr int kCalls = 2;
constexpr size_t kDescriptionBytes = 128;

template <typename Handle>
int64_t Wide(Handle handle) {
  return static_cast<int64_t>(reinterpret_cast<intptr_t>(handle));
}

// SMPI's functions, in the place of those that Python finds in the MPI library of a process.
std::unique_ptr<pycollective::Library> LibraryOfSmpi(std::string* error) {
  void* addresses[] = {
#define PYCOLLECTIVE_ADDRESS(name, ...) reinterpret_cast<void*>(&MPI_##name),
      PYCOLLECTIVE_MPI_FUNCTIONS(PYCOLLECTIVE_ADDRESS)
#undef PYCOLLECTIVE_ADDRESS
  };
  const int64_t types[] = {Wide(MPI_INT8_T),   Wide(MPI_INT16_T),  Wide(MPI_INT32_T),         Wide(MPI_INT64_T),
                           Wide(MPI_UINT8_T),  Wide(MPI_UINT16_T), Wide(MPI_UINT32_T),        Wide(MPI_UINT64_T),
                           Wide(MPI_FLOAT),    Wide(MPI_DOUBLE),   Wide(MPI_C_FLOAT_COMPLEX), Wide(MPI_C_DOUBLE_COMPLEX)};
  const int64_t ops[] = {Wide(MPI_SUM), Wide(MPI_PROD), Wide(MPI_MIN), Wide(MPI_MAX)};
  pycollective::Binding binding{};
  binding.handle_bytes = sizeof(MPI_Comm);
  binding.in_place = Wide(MPI_IN_PLACE);
  binding.errors_return = Wide(MPI_ERRORS_RETURN);
  binding.world = Wide(MPI_COMM_WORLD);
  binding.proc_null = MPI_PROC_NULL;
  binding.any_tag = MPI_ANY_TAG;
  binding.largest_tag = 1 << 20;
  binding.status_source = offsetof(MPI_Status, MPI_SOURCE);
  binding.status_tag = offsetof(MPI_Status, MPI_TAG);
  binding.types = types;
  binding.ops = ops;
  return pycollective::MakeLibrary(binding, addresses, error);
}

// The simulated seconds of a call in a row of calls: from the end of the first call to the end of the last one. A call has ended
// when it has ended on all ranks. The ranks have one clock, that of the simulation.
double SecondsOf(const std::function<void()>& call) {
  call();
  double own[2] = {MPI_Wtime(), 0}, last[2] = {};
  for (int i = 0; i < kCalls; ++i) call();
  own[1] = MPI_Wtime();
  MPI_Allreduce(own, last, 2, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
  return (last[1] - last[0]) / kCalls;
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int rank = 0, size = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  std::string error;
  const auto library = LibraryOfSmpi(&error);
  if (library == nullptr) {
    std::fprintf(stderr, "%s\n", error.c_str());
    return 1;
  }
  pycollective::Channel channel;
  channel.collective = channel.messages = Wide(MPI_COMM_WORLD);
  channel.rank = rank;
  channel.size = size;
  pycollective::Comparison comparison(Wide(MPI_COMM_WORLD), 7, false);
  int64_t number = 0;
  bool agree = true;
  const double compared = SecondsOf([&] {
    pycollective::Difference found;
    const pycollective::Post post{{pycollective::kAllreduce, 1, 1000}, 0, ++number, 0};
    agree = comparison.Compare(*library, channel, post, nullptr, &found).ok() && found.rank == -1 && agree;
  });
  const bool gathers = argc > 1 && std::string(argv[1]) == "flat";
  double gathered = 0;
  if (gathers) {
    std::vector<char> own(kDescriptionBytes), all(kDescriptionBytes * static_cast<size_t>(size));
    gathered = SecondsOf([&] {
      MPI_Allgather(own.data(), kDescriptionBytes, MPI_BYTE, all.data(), kDescriptionBytes, MPI_BYTE, MPI_COMM_WORLD);
    });
  }
  int64_t words[2] = {}, sums[2] = {};
  const double reduced = SecondsOf([&] { MPI_Allreduce(words, sums, 2, MPI_INT64_T, MPI_SUM, MPI_COMM_WORLD); });
  if (rank == 0) std::printf("%d %.9f %.9f %.9f\n", agree, compared, gathered, reduced);
  MPI_Finalize();
  return 0;
}
