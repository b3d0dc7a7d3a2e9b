// Implementation of class Library (collectives.h), for both kinds of MPI handles.

#ifndef PYCOLLECTIVE_NATIVE_MPI_LIBRARY_OF_H_
#define PYCOLLECTIVE_NATIVE_MPI_LIBRARY_OF_H_

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "mpi/backoff.h"
#include "mpi/collectives.h"
#include "mpi/elements.h"
#include "mpi/large_counts.h"
#include "mpi/own_reductions.h"
#include "mpi/waiting_calls.h"

namespace pycollective {

// Returns from the enclosing function if `code`, which a call of MPI has returned, is an error.
#define PYCOLLECTIVE_CHECK_CODE(name, code)                            \
  do {                                                                 \
    const int code_ = code;                                            \
    if (code_ != 0) return Outcome{"MPI_" #name, code_, {}};           \
  } while (false)

// Three ways to call MPI: any function; a function that waits for other ranks (waiting_calls.h); a collective, by its blocking
// or its nonblocking function (backoff.h).
#define PYCOLLECTIVE_CALL(name, ...) PYCOLLECTIVE_CHECK_CODE(name, functions_.name(__VA_ARGS__))
#define PYCOLLECTIVE_CALL_WAITING(name, ...) PYCOLLECTIVE_CHECK_CODE(name, waiting_.name(__VA_ARGS__))
#define PYCOLLECTIVE_CALL_COLLECTIVE(name, nonblocking, ...)                             \
  do {                                                                                   \
    H request_{};                                                                        \
    if (!uses_nonblocking) PYCOLLECTIVE_CALL(name, __VA_ARGS__);                         \
    if (uses_nonblocking) PYCOLLECTIVE_CALL(nonblocking, __VA_ARGS__, &request_);        \
    if (uses_nonblocking) PYCOLLECTIVE_CHECK_CODE(name, waiting_.Complete(&request_));   \
  } while (false)

// Sets a result that MPI leaves undefined to zeros.
inline Outcome Clear(const Channel& channel, void* base, int64_t count, Type type) {
  return count > 0 ? MemoryOf(channel).Clear(base, Bytes(count, type)) : Outcome{};
}

template <typename H>
class LibraryOf : public Library {
 public:
  LibraryOf(const Binding& binding, const Functions<H>& functions)
      : functions_(functions),
        in_place_(reinterpret_cast<const void*>(static_cast<intptr_t>(binding.in_place))),
        errors_return_(Handle(binding.errors_return)),
        world_(Handle(binding.world)),
        proc_null_(static_cast<int>(binding.proc_null)),
        any_tag_(static_cast<int>(binding.any_tag)),
        status_source_(binding.status_source),
        status_tag_(binding.status_tag) {
    largest_tag = binding.largest_tag;
    for (int i = 0; i < kTypeCount; ++i) types_[i] = Handle(binding.types[i]);
    for (int op = 0; op < kMpiOpCount; ++op) std::fill_n(ops_[op], kTypeCount, Handle(binding.ops[op]));
  }

  // Replaces MPI's operations by ours where own_reductions.h says so.
  Outcome MakeOwnOps() {
    constexpr int kCommutes = 1;
#define PYCOLLECTIVE_OWN_OP(op, type, T)                                                                        \
  PYCOLLECTIVE_CALL(Op_create, OwnReduction<Op::op, T, H>, kCommutes, &ops_[int(Op::op)][int(Type::type)]);     \
  own_[int(Op::op)][int(Type::type)] = true;
    PYCOLLECTIVE_OWN_OPS(PYCOLLECTIVE_OWN_OP)
#undef PYCOLLECTIVE_OWN_OP
    return {};
  }

  // Reductions -----------------------------------------------------------------------------------------------------

  Outcome Allreduce(const Channel& channel, const Arguments& a) const override {
    if (a.op == Op::kSumBfloat16) return SumAsBfloat16(*this, channel, a);
    return InChunks(a, [&](const void* send, void* recv, int n) -> Outcome {
      PYCOLLECTIVE_CALL_COLLECTIVE(Allreduce, Iallreduce, SendOrInPlace(send, recv), recv, n, Datatype(a), MpiOp(a),
                                   Handle(channel.collective));
      return {};
    });
  }

  Outcome Scan(const Channel& channel, const Arguments& a) const override {
    return InChunks(a, [&](const void* send, void* recv, int n) -> Outcome {
      PYCOLLECTIVE_CALL_COLLECTIVE(Scan, Iscan, SendOrInPlace(send, recv), recv, n, Datatype(a), MpiOp(a),
                                   Handle(channel.collective));
      return {};
    });
  }

  Outcome Exscan(const Channel& channel, const Arguments& a) const override {
    PYCOLLECTIVE_RETURN_IF_FAILED(InChunks(a, [&](const void* send, void* recv, int n) -> Outcome {
      PYCOLLECTIVE_CALL_COLLECTIVE(Exscan, Iexscan, SendOrInPlace(send, recv), recv, n, Datatype(a), MpiOp(a),
                                   Handle(channel.collective));
      return {};
    }));
    return channel.rank == 0 ? Clear(channel, a.recv, a.count, a.type) : Outcome{};
  }

  Outcome Reduce(const Channel& channel, const Arguments& a) const override {
    const bool is_root = channel.rank == a.root;
    PYCOLLECTIVE_RETURN_IF_FAILED(InChunks(a, [&](const void* send, void* recv, int n) -> Outcome {
      // MPI allows IN_PLACE only at the root; on other ranks it ignores the receive buffer.
      PYCOLLECTIVE_CALL_COLLECTIVE(Reduce, Ireduce, is_root ? SendOrInPlace(send, recv) : send,
                                   is_root ? recv : nullptr, n, Datatype(a),
                                   MpiOp(a), a.root, Handle(channel.collective));
      return {};
    }));
    return is_root ? Outcome{} : Clear(channel, a.recv, a.count, a.type);
  }

  Outcome ReduceScatter(const Channel& channel, const Arguments& a) const override {
    if (a.count == 0) return {};
    if (a.count <= max_count) {
      PYCOLLECTIVE_CALL_COLLECTIVE(Reduce_scatter_block, Ireduce_scatter_block, a.send, a.recv,
                                   static_cast<int>(a.count), Datatype(a), MpiOp(a),
                                   Handle(channel.collective));
      return {};
    }
    // MPI's own operations do not work on derived datatypes, so each rank in turn is the root for its block.
    for (int root = 0; root < channel.size; ++root) {
      const bool is_root = channel.rank == root;
      const Arguments block = a.On(At(a.send, root * a.count, a.type), a.recv, a.count);
      PYCOLLECTIVE_RETURN_IF_FAILED(InChunks(block, [&](const void* send, void* recv, int n) -> Outcome {
        PYCOLLECTIVE_CALL_COLLECTIVE(Reduce, Ireduce, send, is_root ? recv : nullptr, n, Datatype(a), MpiOp(a), root,
                          Handle(channel.collective));
        return {};
      }));
    }
    return {};
  }

  // Moves ----------------------------------------------------------------------------------------------------------

  Outcome Bcast(const Channel& channel, const Arguments& a) const override {
    if (channel.rank == a.root && a.send != a.recv && a.count > 0) {
      PYCOLLECTIVE_RETURN_IF_FAILED(MemoryOf(channel).Copy(a.recv, a.send, Bytes(a.count, a.type)));
    }
    return InChunks(a, [&](const void*, void* recv, int n) -> Outcome {
      PYCOLLECTIVE_CALL_COLLECTIVE(Bcast, Ibcast, recv, n, Datatype(a), a.root, Handle(channel.collective));
      return {};
    });
  }

  Outcome Allgather(const Channel& channel, const Arguments& a) const override {
    return InBlocks(a, [&](int n, H block) -> Outcome {
      PYCOLLECTIVE_CALL_COLLECTIVE(Allgather, Iallgather, a.send, n, block, a.recv, n, block,
                                   Handle(channel.collective));
      return {};
    });
  }

  Outcome Alltoall(const Channel& channel, const Arguments& a) const override {
    return InBlocks(a, [&](int n, H block) -> Outcome {
      PYCOLLECTIVE_CALL_COLLECTIVE(Alltoall, Ialltoall, a.send, n, block, a.recv, n, block, Handle(channel.collective));
      return {};
    });
  }

  Outcome Gather(const Channel& channel, const Arguments& a) const override {
    PYCOLLECTIVE_RETURN_IF_FAILED(InBlocks(a, [&](int n, H block) -> Outcome {
      PYCOLLECTIVE_CALL_COLLECTIVE(Gather, Igather, a.send, n, block, a.recv, n, block, a.root,
                                   Handle(channel.collective));
      return {};
    }));
    return channel.rank == a.root ? Outcome{} : Clear(channel, a.recv, a.count * channel.size, a.type);
  }

  Outcome Scatter(const Channel& channel, const Arguments& a) const override {
    return InBlocks(a, [&](int n, H block) -> Outcome {
      PYCOLLECTIVE_CALL_COLLECTIVE(Scatter, Iscatter, a.send, n, block, a.recv, n, block, a.root,
                                   Handle(channel.collective));
      return {};
    });
  }

  Outcome Barrier(const Channel& channel) const override {
    PYCOLLECTIVE_CALL_COLLECTIVE(Barrier, Ibarrier, Handle(channel.collective));
    return {};
  }

  // Messages -------------------------------------------------------------------------------------------------------

  Outcome CheckTag(const Channel& channel, int tag) const override {
    int found = 0;
    return FindTag(channel, tag, &found);
  }

  Outcome Send(const Channel& channel, const Outgoing& out) const override {
    int tag = 0;
    PYCOLLECTIVE_RETURN_IF_FAILED(FindTag(channel, out.tag, &tag));
    const Block<H> block = BlockOf(out.count, out.type);
    PYCOLLECTIVE_RETURN_IF_FAILED(block.made());
    PYCOLLECTIVE_CALL_WAITING(Send, out.data, block.count(), block.type(), out.dest, tag, Handle(channel.messages));
    return {};
  }

  Outcome Recv(const Channel& channel, const Incoming& in) const override {
    const Block<H> block = BlockOf(in.count, in.type);
    PYCOLLECTIVE_RETURN_IF_FAILED(block.made());
    Status own;
    void* status = in.status == nullptr ? &own : in.status;
    PYCOLLECTIVE_RETURN_IF_FAILED(Receive(channel, in, in.data, block.count(), block.type(), status));
    if (in.source == proc_null_) return Clear(channel, in.data, in.count, in.type);
    return CheckLength("MPI_Recv", in, block, status);
  }

  Outcome RecvInPlaces(const Channel& channel, const Incoming& in, const std::array<MemoryRange, 3>& places) const override {
    int lengths[3];
    ptrdiff_t offsets[3];
    H types[3];
    for (size_t i = 0; i < places.size(); ++i) {
      lengths[i] = static_cast<int>(places[i].nbytes);
      offsets[i] = reinterpret_cast<intptr_t>(places[i].data) - reinterpret_cast<intptr_t>(places[0].data);
      types[i] = types_[int(Type::kUint8)];
    }
    H whole{};
    PYCOLLECTIVE_CALL(Type_create_struct, 3, lengths, offsets, types, &whole);
    Status own;
    Outcome outcome;
    if (const int code = functions_.Type_commit(&whole); code != 0) outcome = {"MPI_Type_commit", code, {}};
    if (outcome.ok()) outcome = Receive(channel, in, places[0].data, 1, whole, in.status == nullptr ? &own : in.status);
    functions_.Type_free(&whole);
    return outcome;
  }

  Outcome CheckReceived(const char* call, const Incoming& in) const override {
    const Block<H> block = BlockOf(in.count, in.type);
    PYCOLLECTIVE_RETURN_IF_FAILED(block.made());
    return CheckLength(call, in, block, in.status);
  }

  Outcome SetReceived(const Incoming& in) const override {
    const Block<H> block = BlockOf(in.count, in.type);
    PYCOLLECTIVE_RETURN_IF_FAILED(block.made());
    PYCOLLECTIVE_CALL(Status_set_elements, in.status, block.type(), block.count());
    return {};
  }

  Outcome Sendrecv(const Channel& channel, const Outgoing& out, const Incoming& in) const override {
    int send_tag = 0, recv_tag = 0;
    PYCOLLECTIVE_RETURN_IF_FAILED(FindTag(channel, out.tag, &send_tag));
    PYCOLLECTIVE_RETURN_IF_FAILED(FindTag(channel, in.tag, &recv_tag));
    return Exchange(channel, Handle(channel.messages), out, send_tag, in, recv_tag);
  }

  Outcome Permute(const Channel& channel, const Outgoing& out, const Incoming& in, const Arguments*) const override {
    if (out.count == 0) return {};
    return Exchange(channel, Handle(channel.permute), out, out.tag, in, in.tag);
  }

  Outcome Isend(const Channel& channel, const Outgoing& out, int64_t* handle) const override {
    int tag = 0;
    PYCOLLECTIVE_RETURN_IF_FAILED(FindTag(channel, out.tag, &tag));
    const Block<H> block = BlockOf(out.count, out.type);  // MPI keeps the datatype until the message is sent
    PYCOLLECTIVE_RETURN_IF_FAILED(block.made());
    H request{};
    PYCOLLECTIVE_CALL(Isend, out.data, block.count(), block.type(), out.dest, tag, Handle(channel.messages), &request);
    *handle = Wide(request);
    return {};
  }

  Outcome Irecv(const Channel& channel, const Incoming& in, int64_t* handle) const override {
    int tag = 0;
    PYCOLLECTIVE_RETURN_IF_FAILED(FindTag(channel, in.tag, &tag));
    const Block<H> block = BlockOf(in.count, in.type);
    PYCOLLECTIVE_RETURN_IF_FAILED(block.made());
    H request{};
    PYCOLLECTIVE_CALL(Irecv, in.data, block.count(), block.type(), in.source, tag, Handle(channel.messages), &request);
    *handle = Wide(request);
    return {};
  }

  Outcome WaitAll(std::vector<int64_t>* handles) const override {
    std::vector<H> requests;
    for (const int64_t handle : *handles) requests.push_back(Handle(handle));
    std::vector<Status> statuses(requests.size());  // MPI's are smaller
    PYCOLLECTIVE_CALL_WAITING(Waitall, static_cast<int>(requests.size()), requests.data(), statuses.data());
    return {};
  }

  Outcome Finish(MessageUnderWay* message, bool waits) const override {
    if (message->is_done) return {};
    H request = Handle(message->handle);
    Status status;
    int done = 1;
    if (waits) {
      message->is_done = true;  // MPI has freed the request, also after an error
      PYCOLLECTIVE_CALL_WAITING(Complete, &request, &status);
    } else {
      const int code = functions_.Test(&request, &done, &status);
      message->is_done = code != 0 || done != 0;
      PYCOLLECTIVE_CHECK_CODE(Test, code);
    }
    if (done == 0 || !message->is_received) return {};
    const Incoming& in = message->incoming;
    const Block<H> block = BlockOf(in.count, in.type);
    PYCOLLECTIVE_RETURN_IF_FAILED(block.made());
    return CheckLength("MPI_Irecv", in, block, &status);
  }

  Outcome Cancel(MessageUnderWay* message) const override {
    if (message->is_done || !message->is_received) return {};
    H request = Handle(message->handle);
    message->is_done = true;
    PYCOLLECTIVE_CALL(Cancel, &request);
    PYCOLLECTIVE_CALL_WAITING(Complete, &request);
    return {};
  }

  // Communicators --------------------------------------------------------------------------------------------------

  Outcome CreateComm(int64_t from, const std::vector<int>& ranks, int tag, int64_t* made) const override {
    H all{}, group{}, comm{};
    PYCOLLECTIVE_CALL(Comm_group, Handle(from), &all);
    if (!ranks.empty()) {
      const int code = functions_.Group_incl(all, static_cast<int>(ranks.size()), ranks.data(), &group);
      functions_.Group_free(&all);
      if (code != 0) return Outcome{"MPI_Group_incl", code, {}};
    }
    H& members = ranks.empty() ? all : group;
    const int code = functions_.Comm_create_group(Handle(from), members, tag, &comm);
    functions_.Group_free(&members);
    if (code != 0) return Outcome{"MPI_Comm_create_group", code, {}};
    PYCOLLECTIVE_CALL(Comm_set_errhandler, comm, errors_return_);
    *made = Wide(comm);
    return {};
  }

  Outcome FreeComm(int64_t comm) const override {
    H handle = Handle(comm);
    PYCOLLECTIVE_CALL(Comm_free, &handle);
    return {};
  }

  Outcome Progress(const Channel& channel, int rank) const override {
    int found = 0;  // not used: a probe receives nothing
    Status status;
    PYCOLLECTIVE_CALL(Iprobe, rank, 0, Handle(channel.collective), &found, &status);
    return {};
  }

  void Abort(int status) const override { functions_.Abort(world_, status); }

  bool IsOwn(Op op, Type type) const override { return op == Op::kSumBfloat16 || own_[int(op)][int(type)]; }

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

  static int IntAt(const void* status, int64_t place) {
    int value = 0;
    std::memcpy(&value, static_cast<const char*>(status) + place, sizeof(value));
    return value;
  }

  H Datatype(const Arguments& a) const { return types_[int(a.type)]; }
  H MpiOp(const Arguments& a) const { return ops_[int(a.op)][int(a.type)]; }
  const void* SendOrInPlace(const void* send, const void* recv) const { return send == recv ? in_place_ : send; }

  // Calls call(send, recv, n) for consecutive chunks of whole arrays.
  template <typename Call>
  Outcome InChunks(const Arguments& a, Call call) const {
    return pycollective::InChunks(a.count, max_count, [&](int64_t first, int n) {
      return call(At(a.send, first, a.type), At(a.recv, first, a.type), n);
    });
  }

  Block<H> BlockOf(int64_t count, Type type) const {
    return Block<H>(functions_, max_count, count, kTypeBytes[int(type)], types_[int(type)]);
  }

  // Calls call(n, datatype) so that n elements of the datatype are one block.
  template <typename Call>
  Outcome InBlocks(const Arguments& a, Call call) const {
    if (a.count == 0) return {};
    const Block<H> block = BlockOf(a.count, a.type);
    PYCOLLECTIVE_RETURN_IF_FAILED(block.made());
    return call(block.count(), block.type());
  }

  // Finds the tag on the channel for a message with a program's `tag`.
  Outcome FindTag(const Channel& channel, int tag, int* found) const {
    *found = tag;
    if (channel.tag_step == 1) return {};
    const int64_t largest = (largest_tag - data_tags() - channel.first_tag) / channel.tag_step;
    if (tag == any_tag_ || tag > largest) {
      Outcome outcome{"MPI_Send or MPI_Recv", 0, {}};
      outcome.detail = "expected a tag from 0 to " + std::to_string(largest) +
                       " in a program on several devices, got " +
                       (tag == any_tag_ ? std::string("any") : std::to_string(tag));
      outcome.remedy = "Name the tag of the message: each device receives the messages of its lane.";
      return outcome;
    }
    *found = channel.first_tag + tag * channel.tag_step;
    return {};
  }

  // Receives `count` elements of `type` from the source of `in`, and sets the envelope of `in`.
  Outcome Receive(const Channel& channel, const Incoming& in, void* data, int count, H type, void* status) const {
    int tag = 0;
    PYCOLLECTIVE_RETURN_IF_FAILED(FindTag(channel, in.tag, &tag));
    PYCOLLECTIVE_CALL_WAITING(Recv, data, count, type, in.source, tag, Handle(channel.messages), status);
    if (in.envelope != nullptr) {
      *in.envelope = {IntAt(status, status_source_), channel.tag_step == 1 ? IntAt(status, status_tag_) : in.tag};
    }
    return {};
  }

  Outcome Exchange(const Channel& channel, H comm, const Outgoing& out, int send_tag, const Incoming& in,
                   int recv_tag) const {
    const Block<H> sent = BlockOf(out.count, out.type);
    PYCOLLECTIVE_RETURN_IF_FAILED(sent.made());
    const Block<H> received = BlockOf(in.count, in.type);
    PYCOLLECTIVE_RETURN_IF_FAILED(received.made());
    Status own;
    void* status = in.status == nullptr ? &own : in.status;
    PYCOLLECTIVE_CALL_WAITING(Sendrecv, out.data, sent.count(), sent.type(), out.dest, send_tag, in.data,
                              received.count(), received.type(), in.source, recv_tag, comm, status);
    if (in.source == proc_null_) return Clear(channel, in.data, in.count, in.type);
    return CheckLength("MPI_Sendrecv", in, received, status);
  }

  // MPI reports a longer message as an error (truncation). A shorter message would leave the end of the array unwritten.
  Outcome CheckLength(const char* call, const Incoming& in, const Block<H>& block, void* status) const {
    if (in.may_be_shorter) return {};
    int received = 0;
    PYCOLLECTIVE_CALL(Get_count, status, block.type(), &received);
    if (received != block.count()) {
      Outcome outcome{call, 0, {}};
      outcome.detail = "expected " + std::to_string(in.count) + " elements, got a shorter message" +
                       (received >= 0 ? " of " + std::to_string(received) : std::string());
      return outcome;
    }
    return {};
  }

  const Functions<H> functions_;
  const WaitingCalls<H> waiting_{functions_};
  const void* in_place_;
  const H errors_return_;
  const H world_;
  int proc_null_;
  int any_tag_;
  int64_t status_source_;
  int64_t status_tag_;
  H types_[kTypeCount];
  H ops_[kMpiOpCount][kTypeCount];
  bool own_[kMpiOpCount][kTypeCount] = {};  // the operations that our code makes
};

#undef PYCOLLECTIVE_CALL_COLLECTIVE
#undef PYCOLLECTIVE_CALL_WAITING
#undef PYCOLLECTIVE_CALL
#undef PYCOLLECTIVE_CHECK_CODE

}  // namespace pycollective

#endif  // PYCOLLECTIVE_NATIVE_MPI_LIBRARY_OF_H_
