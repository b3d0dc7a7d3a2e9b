// Implementation of team_collectives.h. A member returns an error only after the last meeting, so that no other member
// waits for it.

#include "devices/team_collectives.h"

#include <algorithm>
#include <cstring>
#include <memory>

#include "mpi/elements.h"
#include "mpi/reduction.h"

namespace pycollective {

namespace {

// Up to this size of a member's array the last member does all the work: two more meetings would take more time than the
// work of the other members saves (docs/performance.md).
constexpr int64_t kSmallBytes = 256 << 10;

// The size of the pieces in which one lane sends a large array.
constexpr int64_t kPieceBytes = 2 << 20;

// An array of `count` elements in equal slices; the last ones may be shorter.
struct Slices {
  int64_t count;
  int64_t slices;
  int64_t First(int64_t slice) const { return std::min(count, (count + slices - 1) / slices * slice); }
};

bool IsSmall(int64_t count, Type type) { return count * kTypeBytes[int(type)] <= kSmallBytes; }

void Copy(void* to, const void* from, int64_t count, Type type) {
  if (count > 0 && to != from) std::memcpy(to, from, Bytes(count, type));
}

std::unique_ptr<char[]> Scratch(int64_t count, Type type) {
  return std::unique_ptr<char[]>(new char[std::max<size_t>(Bytes(count, type), 1)]);
}

}  // namespace

Outcome NotOnTeams() {
  Outcome outcome{"TeamCollective", 0, "expected a collective over ranks, got one over several devices of each rank"};
  outcome.remedy = "Write a function of class TeamCollective for it; native/base/operations.h says how.";
  return outcome;
}

void TeamCollective::ReduceMembers(int64_t first, int64_t count, void* y, Type type, Op op) const {
  ReduceInOrder(team_.size(), [&](int member) { return At(team_.BuffersOf(member).in, first, type); }, count, y, type, op);
}

template <typename Work>
Outcome TeamCollective::ByLastMember(Work work) {
  team_.Meet([&] { team_.outcome = CatchAsOutcome(work); });
  return team_.outcome;
}

template <typename Local, typename InterRankStep>
Outcome TeamCollective::BySlices(const Arguments& a, bool wants_result, Local local, InterRankStep inter_rank_step) {
  return ranks_ == 1 ? WithinRank(a, wants_result, local) : OnOneLane(a, wants_result, local, inter_rank_step);
}

template <typename Local>
Outcome TeamCollective::WithinRank(const Arguments& a, bool wants_result, Local local) {
  const Slices slices{a.count, members_};
  const int64_t own = slices.First(member_);
  team_.Meet();
  local(own, slices.First(member_ + 1) - own, At(a.recv, own, a.type));
  team_.Meet();
  for (int member = 0; wants_result && member < members_; ++member) {
    const int64_t start = slices.First(member);
    Copy(At(a.recv, start, a.type), At(Out(member), start, a.type), slices.First(member + 1) - start, a.type);
  }
  team_.Meet();
  return Outcome{};
}

template <typename Local, typename InterRankStep>
Outcome TeamCollective::OnOneLane(const Arguments& a, bool wants_result, Local local, InterRankStep inter_rank_step) {
  const int64_t at_once = kPieceBytes / kTypeBytes[int(a.type)];
  const int64_t pieces = (a.count + at_once - 1) / at_once;
  const auto first = [&](int64_t piece) { return std::min(a.count, piece * at_once); };
  const auto size = [&](int64_t piece) { return first(piece + 1) - first(piece); };
  Outcome outcome;
  team_.Meet();
  void* const whole = Out(0);
  // In step i piece i is computed, piece i - 1 is sent between ranks, and piece i - 2 is copied.
  for (int64_t step = 0; step < pieces + 2; ++step) {
    if (member_ == 0) {
      // After an error no further call is made: with or without it the other ranks' calls would have no partner here. The
      // team continues to the end.
      if (outcome.ok() && step >= 1 && step <= pieces) {
        const int64_t piece = step - 1;
        outcome =
            CatchAsOutcome([&] { return inter_rank_step(first_channel_, At(whole, first(piece), a.type), size(piece)); });
      }
    } else {
      if (step < pieces) {
        const Slices slices{size(step), members_ - 1};
        const int64_t own = slices.First(member_ - 1);
        const int64_t start = first(step) + own;
        local(start, slices.First(member_) - own, At(whole, start, a.type));
      }
      if (wants_result && step >= 2) {
        const int64_t start = first(step - 2);
        Copy(At(a.recv, start, a.type), At(whole, start, a.type), size(step - 2), a.type);
      }
    }
    if (member_ == 0 && step == pieces + 1) team_.outcome = outcome;
    team_.Meet();
  }
  return team_.outcome;
}

Outcome TeamCollective::Allreduce(const Arguments& a) {
  team_.SetBuffers(member_, {a.send, a.recv});
  if (IsSmall(a.count, a.type)) {
    return ByLastMember([&]() -> Outcome {
      const ScatteredArray members{
          [&](int64_t first, int64_t count, void* to) { ReduceMembers(first, count, to, a.type, a.op); },
          [&](int64_t first, int64_t count, const void* from) {
            for (int member = 0; member < members_; ++member) Copy(At(Out(member), first, a.type), from, count, a.type);
          },
      };
      if (ranks_ > 1) return mpi_.AllreduceScattered(first_channel_, a, members);
      return InOneArray(a, members, [](const Arguments&) { return Outcome{}; });
    });
  }
  return BySlices(
      a, true, [&](int64_t first, int64_t n, void* slice) { ReduceMembers(first, n, slice, a.type, a.op); },
      [&](const Channel& channel, void* slice, int64_t n) { return mpi_.Allreduce(channel, a.On(slice, slice, n)); });
}

Outcome TeamCollective::Reduce(const Arguments& a) {
  Arguments of_ranks = a;
  of_ranks.root = static_cast<int>(a.root / members_);
  const int root_member = static_cast<int>(a.root % members_);
  const bool is_root = channel_.rank == of_ranks.root && member_ == root_member;
  team_.SetBuffers(member_, {a.send, a.recv});
  Outcome outcome;
  if (IsSmall(a.count, a.type)) {
    outcome = ByLastMember([&]() -> Outcome {
      const auto sum = Scratch(a.count, a.type);
      ReduceMembers(0, a.count, sum.get(), a.type, a.op);
      const Outcome reduced =
          ranks_ > 1 ? mpi_.Reduce(first_channel_, of_ranks.On(sum.get(), sum.get(), a.count)) : Outcome{};
      if (channel_.rank == of_ranks.root) Copy(Out(root_member), sum.get(), a.count, a.type);
      return reduced;
    });
  } else {
    outcome = BySlices(
        a, is_root, [&](int64_t first, int64_t n, void* slice) { ReduceMembers(first, n, slice, a.type, a.op); },
        [&](const Channel& channel, void* slice, int64_t n) {
          return mpi_.Reduce(channel, of_ranks.On(slice, slice, n));
        });
  }
  if (!is_root && a.count > 0) std::memset(a.recv, 0, Bytes(a.count, a.type));
  return outcome;
}

Outcome TeamCollective::Bcast(const Arguments& a) {
  Arguments of_ranks = a;
  of_ranks.root = static_cast<int>(a.root / members_);
  const int root_member = static_cast<int>(a.root % members_);
  const bool has_root = channel_.rank == of_ranks.root;
  team_.SetBuffers(member_, {a.send, a.recv});
  if (IsSmall(a.count, a.type)) {
    return ByLastMember([&]() -> Outcome {
      if (has_root) Copy(a.recv, In(root_member), a.count, a.type);
      const Outcome outcome =
          ranks_ > 1 ? mpi_.Bcast(first_channel_, of_ranks.On(a.recv, a.recv, a.count)) : Outcome{};
      for (int member = 0; member < members_; ++member) Copy(Out(member), a.recv, a.count, a.type);
      return outcome;
    });
  }
  return BySlices(
      a, true,
      [&](int64_t first, int64_t n, void* slice) {
        if (has_root) Copy(slice, At(In(root_member), first, a.type), n, a.type);
      },
      [&](const Channel& channel, void* slice, int64_t n) { return mpi_.Bcast(channel, of_ranks.On(slice, slice, n)); });
}

Outcome TeamCollective::Allgather(const Arguments& a) {
  const int64_t count = a.count;
  if (IsSmall(count * members_ * ranks_, a.type)) {
    team_.SetBuffers(member_, {a.send, a.recv});
    return ByLastMember([&]() -> Outcome {
      const auto own = Scratch(count * members_, a.type);
      for (int member = 0; member < members_; ++member) {
        Copy(At(own.get(), member * count, a.type), In(member), count, a.type);
      }
      Outcome outcome;
      if (ranks_ > 1) {
        outcome = mpi_.Allgather(first_channel_, a.On(own.get(), a.recv, count * members_));
      } else {
        Copy(a.recv, own.get(), count * members_, a.type);
      }
      for (int member = 0; member < members_; ++member) {
        Copy(Out(member), a.recv, count * members_ * ranks_, a.type);
      }
      return outcome;
    });
  }
  const auto scratch = Scratch(ranks_ > 1 ? count * ranks_ : 0, a.type);
  Outcome outcome;
  const void* gathered = a.send;
  if (ranks_ > 1) {
    gathered = scratch.get();
    outcome = mpi_.Allgather(channel_, a.On(a.send, scratch.get(), count));
  }
  team_.SetBuffers(member_, {gathered, a.recv});
  team_.Meet();
  for (int64_t rank = 0; rank < ranks_; ++rank) {
    for (int member = 0; member < members_; ++member) {
      Copy(At(a.recv, (rank * members_ + member) * count, a.type), At(In(member), rank * count, a.type), count, a.type);
    }
  }
  team_.Meet();
  return outcome;
}

Outcome TeamCollective::ReduceScatter(const Arguments& a) {
  const int64_t count = a.count;
  team_.SetBuffers(member_, {a.send, a.recv});
  if (IsSmall(count * members_ * ranks_, a.type)) {
    return ByLastMember([&]() -> Outcome {
      const auto sums = Scratch(count * members_ * ranks_, a.type);
      ReduceMembers(0, count * members_ * ranks_, sums.get(), a.type, a.op);
      const auto own = Scratch(count * members_, a.type);
      const char* blocks = sums.get();
      Outcome outcome;
      if (ranks_ > 1) {
        outcome = mpi_.ReduceScatter(first_channel_, a.On(sums.get(), own.get(), count * members_));
        blocks = own.get();
      }
      for (int member = 0; member < members_; ++member) {
        Copy(Out(member), At(blocks, member * count, a.type), count, a.type);
      }
      return outcome;
    });
  }
  const auto scratch = Scratch(ranks_ > 1 ? count * ranks_ : 0, a.type);
  void* sums = ranks_ > 1 ? static_cast<void*>(scratch.get()) : a.recv;
  team_.Meet();
  for (int64_t rank = 0; rank < ranks_; ++rank) {
    ReduceMembers((rank * members_ + member_) * count, count, At(sums, rank * count, a.type), a.type, a.op);
  }
  team_.Meet();
  return ranks_ > 1 ? mpi_.ReduceScatter(channel_, a.On(sums, a.recv, count)) : Outcome{};
}

Outcome TeamCollective::Alltoall(const Arguments& a) {
  const int64_t count = a.count;
  const auto number = [&](int64_t rank, int64_t member) { return rank * members_ + member; };
  team_.SetBuffers(member_, {a.send, a.recv});
  if (IsSmall(count * members_ * ranks_, a.type)) {
    return ByLastMember([&]() -> Outcome {
      // In the order of MPI's blocks, [rank][to][from]: for each rank, the data of each of our members for each of its members.
      const int64_t total = count * members_ * members_ * ranks_;
      const auto sent = Scratch(total, a.type);
      const auto received = Scratch(total, a.type);
      const auto at = [&](int64_t rank, int64_t to, int64_t from) {
        return (number(rank, to) * members_ + from) * count;
      };
      for (int64_t rank = 0; rank < ranks_; ++rank) {
        for (int to = 0; to < members_; ++to) {
          for (int from = 0; from < members_; ++from) {
            Copy(At(sent.get(), at(rank, to, from), a.type), At(In(from), number(rank, to) * count, a.type), count,
                 a.type);
          }
        }
      }
      const char* blocks = sent.get();
      Outcome outcome;
      if (ranks_ > 1) {
        outcome = mpi_.Alltoall(first_channel_, a.On(sent.get(), received.get(), count * members_ * members_));
        blocks = received.get();
      }
      for (int64_t rank = 0; rank < ranks_; ++rank) {
        for (int to = 0; to < members_; ++to) {
          Copy(At(Out(to), number(rank, 0) * count, a.type), At(blocks, at(rank, to, 0), a.type), count * members_,
               a.type);
        }
      }
      return outcome;
    });
  }
  const auto scratch = Scratch(ranks_ > 1 ? count * members_ * ranks_ : 0, a.type);
  void* blocks = ranks_ > 1 ? static_cast<void*>(scratch.get()) : a.recv;
  team_.Meet();
  for (int64_t rank = 0; rank < ranks_; ++rank) {
    for (int member = 0; member < members_; ++member) {
      Copy(At(blocks, number(rank, member) * count, a.type), At(In(member), number(rank, member_) * count, a.type),
           count, a.type);
    }
  }
  team_.Meet();
  return ranks_ > 1 ? mpi_.Alltoall(channel_, a.On(blocks, a.recv, count * members_)) : Outcome{};
}

}  // namespace pycollective
