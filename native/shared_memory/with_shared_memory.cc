// A library whose collectives between ranks of one host go through memory that they share, and between hosts in levels.

#include <cstring>
#include <memory>
#include <string>

#include "base/operations.h"
#include "mpi/collectives.h"
#include "mpi/library_of.h"
#include "shared_memory/host_collectives.h"
#include "shared_memory/host_levels.h"

namespace pycollective {
namespace {

// Does what the library `Mpi` does.
template <typename Mpi>
class WithSharedMemory final : public Mpi {
 public:
  using Mpi::Mpi;

  Outcome Allreduce(const Channel& channel, const Arguments& a) const override {
    // Within a host a sum in bfloat16 is one of float32. What is left is made of other collectives.
    if (a.op == Op::kSumBfloat16 && channel.levels == nullptr) return Mpi::Allreduce(channel, a);
    return Run(kAllreduce, channel, a, [&] { return Mpi::Allreduce(channel, a); });
  }
  Outcome AllreduceScattered(const Channel& channel, const Arguments& a, const ScatteredArray& array) const override {
    const bool shares = channel.memory == nullptr && channel.exchange != nullptr && a.op != Op::kSumBfloat16;
    if (shares && HostCollective::TakesScattered(a)) {
      HostCollective collective(*this, channel);
      bool has_buffers = false;
      PYCOLLECTIVE_RETURN_IF_FAILED(collective.HasBuffers(&has_buffers));
      if (has_buffers) return collective.AllreduceScattered(a, array);
    }
    return Mpi::AllreduceScattered(channel, a, array);
  }
#define PYCOLLECTIVE_SHARED(name, Name, ...)                                        \
  Outcome Name(const Channel& channel, const Arguments& a) const override {         \
    return Run(k##Name, channel, a, [&] { return Mpi::Name(channel, a); });         \
  }
#define PYCOLLECTIVE_NOTHING(...)
  PYCOLLECTIVE_OPERATIONS(PYCOLLECTIVE_SHARED, PYCOLLECTIVE_NOTHING)
#undef PYCOLLECTIVE_NOTHING
#undef PYCOLLECTIVE_SHARED
  Outcome Permute(const Channel& channel, const Outgoing& out, const Incoming& in, const Arguments* a) const override {
    const auto by_mpi = [&] { return Mpi::Permute(channel, out, in, a); };
    return a != nullptr ? Run(kPpermute, channel, *a, by_mpi) : by_mpi();
  }
  Outcome Barrier(const Channel& channel) const override {
    return channel.exchange != nullptr ? HostCollective(*this, channel).Barrier() : Mpi::Barrier(channel);
  }

 private:
  template <typename ByMpi>
  Outcome Run(Operation operation, const Channel& channel, const Arguments& a, ByMpi by_mpi) const {
    using Algorithm = HostCollective::Algorithm;
    if (channel.memory != nullptr) return by_mpi();
    if (channel.levels != nullptr && channel.levels->Has(operation, a)) {
      bool has_levels = false;
      PYCOLLECTIVE_RETURN_IF_FAILED(channel.levels->Make(*this, channel, &has_levels));
      if (has_levels) return channel.levels->Run(*this, operation, a);
    }
    if (channel.exchange == nullptr) return by_mpi();
    Algorithm algorithm = HostCollective::AlgorithmOf(operation, a, channel.size);
    if (algorithm == Algorithm::kByMpi) return by_mpi();
    HostCollective collective(*this, channel);
    const bool may_choose = algorithm == Algorithm::kByReading && operation == kAllreduce;
    bool has_buffers = false;
    if (may_choose || algorithm == Algorithm::kThroughBuffers) PYCOLLECTIVE_RETURN_IF_FAILED(collective.HasBuffers(&has_buffers));
    if (may_choose && has_buffers) algorithm = collective.FasterAlgorithm(a);
    if (algorithm == Algorithm::kByReading) return collective.ByReading(operation, a);
    return has_buffers ? collective.ThroughBuffers(operation, a) : by_mpi();
  }
};

template <typename H>
std::unique_ptr<Library> Make(const Binding& binding, void* const* addresses, std::string* error) {
  Functions<H> functions;
  static_assert(sizeof(functions) == kFunctionCount * sizeof(void*), "the table holds pointers alone");
  std::memcpy(&functions, addresses, sizeof(functions));
  auto library = std::make_unique<WithSharedMemory<LibraryOf<H>>>(binding, functions);
  const Outcome outcome = library->MakeOwnOps();
  if (!outcome.ok()) {
    *error = std::string(outcome.call) + ": " + library->ErrorString(outcome.code);
    return nullptr;
  }
  return library;
}

}  // namespace

std::unique_ptr<Library> MakeLibrary(const Binding& binding, void* const* addresses, std::string* error) {
  if (binding.handle_bytes == sizeof(int)) return Make<int>(binding, addresses, error);
  if (binding.handle_bytes == sizeof(void*)) return Make<void*>(binding, addresses, error);
  *error = "expected MPI handles of 4 or 8 bytes, got " + std::to_string(binding.handle_bytes);
  return nullptr;
}

}  // namespace pycollective
