// Implementation of collectives.h over either kind of MPI handle.

#include "collectives.h"

#include <algorithm>
#include <cstring>
#include <initializer_list>

#include "bfloat16.h"
#include "reduction.h"

namespace pycollective {
namespace {

// Returns from the enclosing function if an MPI call fails.
#define PYCOLLECTIVE_CALL(name, ...)                                   \
  do {                                                                 \
    const int code_ = functions_.name(__VA_ARGS__);                    \
    if (code_ != 0) return Outcome{"MPI_" #name, code_, {}};           \
  } while (false)

// MPI_Status is opaque here: at most 40 bytes in any known implementation.
struct alignas(16) Status {
  char bytes[256] = {};
};

// An operation of MPI's, as XLA defines it.
template <Op kOp, typename T, typename H>
void Combine(void* in, void* in_out, int* count, H*) {
  const T* a = static_cast<const T*>(in);
  T* b = static_cast<T*>(in_out);
  for (int i = 0; i < *count; ++i) b[i] = Apply<kOp>(a[i], b[i]);
}

template <typename H>
class LibraryOf final : public Library {
 public:
  LibraryOf(const Binding& binding, const Functions<H>& functions)
      : functions_(functions),
        in_place_(reinterpret_cast<const void*>(static_cast<intptr_t>(binding.in_place))),
        errors_return_(Handle(binding.errors_return)),
        proc_null_(static_cast<int>(binding.proc_null)),
        any_tag_(static_cast<int>(binding.any_tag)),
        largest_tag_(binding.largest_tag) {
    for (int i = 0; i < kTypeCount; ++i) types_[i] = Handle(binding.types[i]);
    for (int op = 0; op < kOpCount; ++op) std::fill_n(ops_[op], kTypeCount, Handle(binding.ops[op]));
  }

  // Puts our own operations where MPI's differ from XLA's: MPI_MIN and MPI_MAX are compiled as `a < b ? a : b`, which
  // loses NaN on one side, so that ranks could even disagree; and Open MPI adds short integers with saturation
  // (open-mpi/ompi#8045).
  Outcome MakeOps() {
    const auto make = [&](Op op, Type type, auto* function) -> Outcome {
      constexpr int kCommutes = 1;
      own_[int(op)][int(type)] = true;
      PYCOLLECTIVE_CALL(Op_create, function, kCommutes, &ops_[int(op)][int(type)]);
      return {};
    };
    for (const Outcome& outcome : {
             make(Op::kMin, Type::kFloat32, Combine<Op::kMin, float, H>),
             make(Op::kMin, Type::kFloat64, Combine<Op::kMin, double, H>),
             make(Op::kMax, Type::kFloat32, Combine<Op::kMax, float, H>),
             make(Op::kMax, Type::kFloat64, Combine<Op::kMax, double, H>),
             make(Op::kSum, Type::kInt8, Combine<Op::kSum, int8_t, H>),
             make(Op::kSum, Type::kInt16, Combine<Op::kSum, int16_t, H>),
             make(Op::kSum, Type::kUint8, Combine<Op::kSum, uint8_t, H>),
             make(Op::kSum, Type::kUint16, Combine<Op::kSum, uint16_t, H>),
         }) {
      if (!outcome.ok()) return outcome;
    }
    return {};
  }

  Outcome Allreduce(const Channel& channel, const void* send, void* recv, int64_t count, Type type,
                    Op op) const override {
    if (op == Op::kSumBfloat16) return SumBfloat16(channel, send, recv, count);
    return InChunks(count, [&](int64_t first, int n) -> Outcome {
      PYCOLLECTIVE_CALL(Allreduce, SendOrInPlace(send, recv, first, type), At(recv, first, type), n,
                        types_[int(type)], ReduceOp(op, type), Handle(channel.collective));
      return {};
    });
  }

  Outcome Reduce(const Channel& channel, const void* send, void* recv, int64_t count, Type type, Op op,
                 int root) const override {
    const bool is_root = channel.rank == root;
    PYCOLLECTIVE_RETURN_IF_FAILED(InChunks(count, [&](int64_t first, int n) -> Outcome {
      // MPI allows IN_PLACE at the root alone; elsewhere the receive buffer is ignored.
      const void* from = is_root ? SendOrInPlace(send, recv, first, type) : At(send, first, type);
      PYCOLLECTIVE_CALL(Reduce, from, is_root ? At(recv, first, type) : nullptr, n, types_[int(type)],
                        ReduceOp(op, type), root, Handle(channel.collective));
      return {};
    }));
    return is_root ? Outcome{} : Clear(channel, recv, count, type);
  }

  Outcome Scan(const Channel& channel, const void* send, void* recv, int64_t count, Type type,
               Op op) const override {
    return InChunks(count, [&](int64_t first, int n) -> Outcome {
      PYCOLLECTIVE_CALL(Scan, SendOrInPlace(send, recv, first, type), At(recv, first, type), n,
                        types_[int(type)], ReduceOp(op, type), Handle(channel.collective));
      return {};
    });
  }

  Outcome Exscan(const Channel& channel, const void* send, void* recv, int64_t count, Type type,
                 Op op) const override {
    PYCOLLECTIVE_RETURN_IF_FAILED(InChunks(count, [&](int64_t first, int n) -> Outcome {
      PYCOLLECTIVE_CALL(Exscan, SendOrInPlace(send, recv, first, type), At(recv, first, type), n,
                        types_[int(type)], ReduceOp(op, type), Handle(channel.collective));
      return {};
    }));
    return channel.rank == 0 ? Clear(channel, recv, count, type) : Outcome{};  // undefined in MPI
  }

  Outcome Bcast(const Channel& channel, const void* send, void* recv, int64_t count, Type type,
                int root) const override {
    if (channel.rank == root && send != recv && count > 0) {
      PYCOLLECTIVE_RETURN_IF_FAILED(MemoryOf(channel).Copy(recv, send, Bytes(count, type)));
    }
    return InChunks(count, [&](int64_t first, int n) -> Outcome {
      PYCOLLECTIVE_CALL(Bcast, At(recv, first, type), n, types_[int(type)], root,
                        Handle(channel.collective));
      return {};
    });
  }

  Outcome ReduceScatter(const Channel& channel, const void* send, void* recv, int64_t count, Type type,
                        Op op) const override {
    if (count == 0) return {};
    if (count <= max_count) {
      PYCOLLECTIVE_CALL(Reduce_scatter_block, send, recv, static_cast<int>(count), types_[int(type)],
                        ReduceOp(op, type), Handle(channel.collective));
      return {};
    }
    // No derived datatype works with MPI's own operations: each rank in turn is the root of its block.
    for (int root = 0; root < channel.size; ++root) {
      PYCOLLECTIVE_RETURN_IF_FAILED(InChunks(count, [&](int64_t first, int n) -> Outcome {
        PYCOLLECTIVE_CALL(Reduce, At(send, root * count + first, type),
                          channel.rank == root ? At(recv, first, type) : nullptr, n, types_[int(type)],
                          ReduceOp(op, type), root, Handle(channel.collective));
        return {};
      }));
    }
    return {};
  }

  Outcome Allgather(const Channel& channel, const void* send, void* recv, int64_t count,
                    Type type) const override {
    return InBlocks(count, type, [&](int n, H block) -> Outcome {
      PYCOLLECTIVE_CALL(Allgather, send, n, block, recv, n, block, Handle(channel.collective));
      return {};
    });
  }

  Outcome Alltoall(const Channel& channel, const void* send, void* recv, int64_t count,
                   Type type) const override {
    return InBlocks(count, type, [&](int n, H block) -> Outcome {
      PYCOLLECTIVE_CALL(Alltoall, send, n, block, recv, n, block, Handle(channel.collective));
      return {};
    });
  }

  Outcome Gather(const Channel& channel, const void* send, void* recv, int64_t count, Type type,
                 int root) const override {
    PYCOLLECTIVE_RETURN_IF_FAILED(InBlocks(count, type, [&](int n, H block) -> Outcome {
      PYCOLLECTIVE_CALL(Gather, send, n, block, recv, n, block, root, Handle(channel.collective));
      return {};
    }));
    return channel.rank == root ? Outcome{} : Clear(channel, recv, count * channel.size, type);
  }

  Outcome Scatter(const Channel& channel, const void* send, void* recv, int64_t count, Type type,
                  int root) const override {
    return InBlocks(count, type, [&](int n, H block) -> Outcome {
      PYCOLLECTIVE_CALL(Scatter, send, n, block, recv, n, block, root, Handle(channel.collective));
      return {};
    });
  }

  Outcome Send(const Channel& channel, const void* send, int64_t count, Type type, int dest,
               int tag) const override {
    PYCOLLECTIVE_RETURN_IF_FAILED(Travels(channel, &tag));
    const Block block(*this, count, type);
    PYCOLLECTIVE_RETURN_IF_FAILED(block.made());
    PYCOLLECTIVE_CALL(Send, send, block.count(), block.type(), dest, tag, Handle(channel.messages));
    return {};
  }

  Outcome Recv(const Channel& channel, void* recv, int64_t count, Type type, int source,
               int tag) const override {
    PYCOLLECTIVE_RETURN_IF_FAILED(Travels(channel, &tag));
    const Block block(*this, count, type);
    PYCOLLECTIVE_RETURN_IF_FAILED(block.made());
    Status status;
    PYCOLLECTIVE_CALL(Recv, recv, block.count(), block.type(), source, tag, Handle(channel.messages), &status);
    return CheckReceived("MPI_Recv", channel, recv, count, type, source, block, status);
  }

  Outcome Sendrecv(const Channel& channel, const void* send, int64_t send_count, Type send_type, int dest,
                   int send_tag, void* recv, int64_t recv_count, Type recv_type, int source,
                   int recv_tag) const override {
    PYCOLLECTIVE_RETURN_IF_FAILED(Travels(channel, &send_tag));
    PYCOLLECTIVE_RETURN_IF_FAILED(Travels(channel, &recv_tag));
    return Exchange(channel, Handle(channel.messages), send, send_count, send_type, dest, send_tag, recv, recv_count,
                    recv_type, source, recv_tag);
  }

  Outcome Permute(const Channel& channel, const void* send, void* recv, int64_t count, Type type, int dest,
                  int send_tag, int source, int recv_tag) const override {
    if (count == 0) return {};
    return Exchange(channel, Handle(channel.permute), send, count, type, dest, send_tag, recv, count, type,
                    source, recv_tag);
  }

  Outcome Barrier(const Channel& channel) const override {
    PYCOLLECTIVE_CALL(Barrier, Handle(channel.collective));
    return {};
  }

  Outcome MakeChannel(int64_t from, const std::vector<int>& ranks, int tag, int64_t* made) const override {
    H all{}, group{}, channel{};
    PYCOLLECTIVE_CALL(Comm_group, Handle(from), &all);
    if (!ranks.empty()) {
      const int code = functions_.Group_incl(all, static_cast<int>(ranks.size()), ranks.data(), &group);
      functions_.Group_free(&all);
      if (code != 0) return Outcome{"MPI_Group_incl", code, {}};
    }
    H& members = ranks.empty() ? all : group;
    const int code = functions_.Comm_create_group(Handle(from), members, tag, &channel);
    functions_.Group_free(&members);
    if (code != 0) return Outcome{"MPI_Comm_create_group", code, {}};
    PYCOLLECTIVE_CALL(Comm_set_errhandler, channel, errors_return_);
    *made = Wide(channel);
    return {};
  }

  Outcome FreeChannel(int64_t channel) const override {
    H handle = Handle(channel);
    PYCOLLECTIVE_CALL(Comm_free, &handle);
    return {};
  }

  bool IsOwn(Op op, Type type) const override {
    return op == Op::kSumBfloat16 || own_[int(op)][int(type)];
  }

  int proc_null() const override { return proc_null_; }

  std::string ErrorString(int code) const override {
    char text[4096] = {};  // MPI_MAX_ERROR_STRING is at most 1024 in any known implementation
    int length = 0;
    if (functions_.Error_string(code, text, &length) != 0) return "unknown MPI error";
    return std::string(text, static_cast<size_t>(length));
  }

 private:
  static H Handle(int64_t wide) {
    if constexpr (std::is_pointer_v<H>) {
      return reinterpret_cast<H>(static_cast<intptr_t>(wide));
    } else {
      return static_cast<H>(wide);
    }
  }

  static int64_t Wide(H handle) {
    if constexpr (std::is_pointer_v<H>) {
      return static_cast<int64_t>(reinterpret_cast<intptr_t>(handle));
    } else {
      return static_cast<int64_t>(handle);
    }
  }

  // A message's tag, as it travels between those devices.
  Outcome Travels(const Channel& channel, int* tag) const {
    if (channel.tag_step == 1) return {};
    const int64_t largest = (largest_tag_ - channel.first_tag) / channel.tag_step;
    if (*tag == any_tag_ || *tag > largest) {
      Outcome outcome{"MPI_Send or MPI_Recv", 0, {}};
      outcome.detail = "expected a tag from 0 to " + std::to_string(largest) + " in a program on several devices, got " +
                       (*tag == any_tag_ ? std::string("any") : std::to_string(*tag));
      outcome.remedy = "Name the tag of the message: each device receives those of its like.";
      return outcome;
    }
    *tag = channel.first_tag + *tag * channel.tag_step;
    return {};
  }

  static size_t Bytes(int64_t count, Type type) {
    return static_cast<size_t>(count * kTypeBytes[int(type)]);
  }
  static void* At(void* base, int64_t index, Type type) {
    return static_cast<char*>(base) + Bytes(index, type);
  }
  static const void* At(const void* base, int64_t index, Type type) {
    return static_cast<const char*>(base) + Bytes(index, type);
  }
  static const Memory& MemoryOf(const Channel& channel) {
    static const Memory plain;
    return channel.memory != nullptr ? *channel.memory : plain;
  }
  static Outcome Clear(const Channel& channel, void* base, int64_t count, Type type) {
    return count > 0 ? MemoryOf(channel).Clear(base, Bytes(count, type)) : Outcome{};
  }

  const void* SendOrInPlace(const void* send, const void* recv, int64_t first, Type type) const {
    return send == recv ? in_place_ : At(send, first, type);
  }

  H ReduceOp(Op op, Type type) const { return ops_[int(op)][int(type)]; }

  // The sum of float32, each operand and the sum rounded to bfloat16 on the way between ranks: half the bytes. Each
  // rank adds up one block of all ranks in float32, in the order of the ranks, so that all get the same bits.
  Outcome SumBfloat16(const Channel& channel, const void* send, void* recv, int64_t count) const {
    const auto* x = static_cast<const float*>(send);
    auto* y = static_cast<float*>(recv);
    if (channel.size == 1) {
      if (send != recv && count > 0) std::memcpy(recv, send, Bytes(count, Type::kFloat32));
      return {};
    }
    constexpr int64_t kAtOnce = 1 << 20;  // elements: 4 MiB that stay in the caches between the steps
    const int64_t ranks = channel.size;
    const int64_t most = (std::min(count, kAtOnce) + ranks - 1) / ranks * ranks;
    const std::unique_ptr<uint16_t[]> scratch(new uint16_t[static_cast<size_t>(2 * most)]);
    uint16_t* const mine = scratch.get();
    uint16_t* const theirs = mine + most;
    for (int64_t first = 0; first < count; first += kAtOnce) {
      const int64_t n = std::min(count - first, kAtOnce);
      const int64_t block = (n + ranks - 1) / ranks;
      for (int64_t i = 0; i < n; ++i) mine[i] = ToBfloat16(x[first + i]);
      std::fill(mine + n, mine + block * ranks, uint16_t{0});
      PYCOLLECTIVE_RETURN_IF_FAILED(Alltoall(channel, mine, theirs, block, Type::kUint16));
      for (int64_t i = 0; i < block; ++i) {
        float sum = FromBfloat16(theirs[i]);
        for (int64_t rank = 1; rank < ranks; ++rank) sum += FromBfloat16(theirs[rank * block + i]);
        mine[i] = ToBfloat16(sum);
      }
      PYCOLLECTIVE_RETURN_IF_FAILED(Allgather(channel, mine, theirs, block, Type::kUint16));
      for (int64_t i = 0; i < n; ++i) y[first + i] = FromBfloat16(theirs[i]);
    }
    return {};
  }

  // Elementwise operations: call(first, n) for consecutive pieces of at most max_count. Nothing for an
  // empty array: every rank sees the same count, so none of them waits.
  template <typename Call>
  Outcome InChunks(int64_t count, Call call) const {
    for (int64_t first = 0; first < count; first += max_count) {
      PYCOLLECTIVE_RETURN_IF_FAILED(call(first, static_cast<int>(std::min(max_count, count - first))));
    }
    return {};
  }

  // `count` elements as (count(), type()) that fits MPI's int: the plain type, or one element of a
  // derived datatype of that many, which lives as long as this object.
  class Block {
   public:
    Block(const LibraryOf& library, int64_t count, Type type)
        : library_(library), count_(static_cast<int>(count)), type_(library.types_[int(type)]) {
      if (count > library.max_count) made_ = Derive(count, type);
    }
    ~Block() {
      if (derived_) library_.functions_.Type_free(&type_);
    }
    Block(const Block&) = delete;
    Block& operator=(const Block&) = delete;

    const Outcome& made() const { return made_; }
    int count() const { return count_; }
    H type() const { return type_; }

   private:
    // struct { chunk[whole]; element[rest] }, a chunk being max_count elements.
    Outcome Derive(int64_t count, Type type) {
      const Functions<H>& functions_ = library_.functions_;
      const H element = type_;
      const int64_t whole = count / library_.max_count;
      const int64_t rest = count % library_.max_count;
      H chunk{}, parts[2]{};
      PYCOLLECTIVE_CALL(Type_contiguous, static_cast<int>(library_.max_count), element, &chunk);
      const int lengths[2] = {static_cast<int>(whole), static_cast<int>(rest)};
      const ptrdiff_t offsets[2] = {0, static_cast<ptrdiff_t>(Bytes(whole * library_.max_count, type))};
      parts[0] = chunk;
      parts[1] = element;
      const int code = functions_.Type_create_struct(2, lengths, offsets, parts, &type_);
      functions_.Type_free(&chunk);
      if (code != 0) return Outcome{"MPI_Type_create_struct", code, {}};
      derived_ = true;
      count_ = 1;
      PYCOLLECTIVE_CALL(Type_commit, &type_);
      return {};
    }

    const LibraryOf& library_;
    int count_;
    H type_;
    bool derived_ = false;
    Outcome made_;
  };

  template <typename Call>
  Outcome InBlocks(int64_t count, Type type, Call call) const {
    if (count == 0) return {};
    const Block block(*this, count, type);
    PYCOLLECTIVE_RETURN_IF_FAILED(block.made());
    return call(block.count(), block.type());
  }

  Outcome Exchange(const Channel& channel, H comm, const void* send, int64_t send_count, Type send_type, int dest, int send_tag,
                   void* recv, int64_t recv_count, Type recv_type, int source, int recv_tag) const {
    const Block out(*this, send_count, send_type);
    PYCOLLECTIVE_RETURN_IF_FAILED(out.made());
    const Block in(*this, recv_count, recv_type);
    PYCOLLECTIVE_RETURN_IF_FAILED(in.made());
    Status status;
    PYCOLLECTIVE_CALL(Sendrecv, send, out.count(), out.type(), dest, send_tag, recv, in.count(), in.type(),
                      source, recv_tag, comm, &status);
    return CheckReceived("MPI_Sendrecv", channel, recv, recv_count, recv_type, source, in, status);
  }

  // A longer message is MPI's own error (truncation); a shorter one would leave the tail unwritten.
  Outcome CheckReceived(const char* call, const Channel& channel, void* recv, int64_t count, Type type, int source,
                        const Block& block, const Status& status) const {
    if (source == proc_null_) return Clear(channel, recv, count, type);
    int received = 0;
    PYCOLLECTIVE_CALL(Get_count, &status, block.type(), &received);
    if (received != block.count()) {
      Outcome outcome{call, 0, {}};
      outcome.detail = "expected " + std::to_string(count) + " elements, got a shorter message" +
                       (received >= 0 ? " of " + std::to_string(received) : std::string());
      return outcome;
    }
    return {};
  }

  const Functions<H> functions_;
  const void* in_place_;
  const H errors_return_;
  int proc_null_;
  int any_tag_;
  int64_t largest_tag_;
  H types_[kTypeCount];
  H ops_[kOpCount][kTypeCount];
  bool own_[kOpCount][kTypeCount] = {};
};

template <typename H>
std::unique_ptr<Library> Make(const Binding& binding, void* const* addresses, std::string* error) {
  Functions<H> functions;
  static_assert(sizeof(functions) == kFunctionCount * sizeof(void*), "the table holds pointers alone");
  std::memcpy(&functions, addresses, sizeof(functions));
  auto library = std::make_unique<LibraryOf<H>>(binding, functions);
  const Outcome outcome = library->MakeOps();
  if (!outcome.ok()) {
    *error = std::string(outcome.call) + ": " + library->ErrorString(outcome.code);
    return nullptr;
  }
  return library;
}

}  // namespace

Outcome Memory::Clear(void* to, size_t nbytes) const {
  std::memset(to, 0, nbytes);
  return {};
}

Outcome Memory::Copy(void* to, const void* from, size_t nbytes) const {
  std::memcpy(to, from, nbytes);
  return {};
}

std::unique_ptr<Library> MakeLibrary(const Binding& binding, void* const* addresses, std::string* error) {
  if (binding.handle_bytes == sizeof(int)) return Make<int>(binding, addresses, error);
  if (binding.handle_bytes == sizeof(void*)) return Make<void*>(binding, addresses, error);
  *error = "expected MPI handles of 4 or 8 bytes, got " + std::to_string(binding.handle_bytes);
  return nullptr;
}

}  // namespace pycollective
