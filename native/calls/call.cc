// Implementation of call.h.

#include "calls/call.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <random>

#include "monitor/monitor.h"
#include "shared_memory/host_collectives.h"

namespace ffi = xla::ffi;

namespace pycollective {

Check check = Check::kEvery;
bool check_numbers = false;

namespace {

int64_t RandomNumber() {
  std::random_device device;
  return static_cast<int64_t>((uint64_t{device()} << 32 | device()) | 1);  // not 0, the number of programs without addresses
}

}  // namespace

const int64_t this_process = RandomNumber();

namespace {

std::mutex failure_mutex;
auto& last_failure = *new std::string;
std::atomic<bool> has_failed{false};

}  // namespace

void NoteEnd(const ffi::Error& error) {
  if (error.success() && !has_failed.load(std::memory_order_relaxed)) return;
  const std::lock_guard<std::mutex> lock(failure_mutex);
  last_failure = error.success() ? "" : error.message();
  has_failed = error.failure();
}

std::string LastFailure() {
  const std::lock_guard<std::mutex> lock(failure_mutex);
  return last_failure;
}

Call::Call(Operation operation, const Participants& participants, int64_t lane_id, Staging staging, int64_t piece_bytes)
    : operation_(operation),
      participants_(participants),
      lane_id_(lane_id),
      staging_(staging),
      piece_bytes_(piece_bytes),
      communicator_(FindCommunicator(participants.number())) {
  if (communicator_ == nullptr) return;
  const bool has_replicas = participants.replicated && participants.devices > 1;
  if (has_replicas) replicas_ = &communicator_->ReplicaTeam(static_cast<int>(participants.devices));
  lane_ = participants.callers() > 1 ? communicator_->LaneOf(lane_id) : &communicator_->single_lane;
}

ffi::Error Call::CheckParticipants() const {
  if (library == nullptr || (communicator_ == nullptr && !WasCommunicator(participants_.number()))) {
    return Error(ffi::ErrorCode::kInternal, "expected a communicator of this process, got an unknown one",
                 "Call pycollective.init() before running a program. A program of another process needs the communicators of that process, "
                 "made in the same order; those of axis_index_groups and parts of meshes are made where a program is traced, so compile it here.");
  }
  if (communicator_ != nullptr && communicator_->lost) {
    return Error(ffi::ErrorCode::kFailedPrecondition,
                 "expected a live communicator, got one that has lost a rank, or that MPI.Finalize() has ended",
                 "After a loss, trace the program again, with pycollective.world() as it is now.");
  }
  if (communicator_ == nullptr || communicator_->freed) {
    return Error(ffi::ErrorCode::kFailedPrecondition, "expected a live communicator, got a freed one",
                 "Do not run programs that name a communicator after its free().");
  }
  if (communicator_->fingerprint != participants_.fingerprint()) {
    return Error(ffi::ErrorCode::kFailedPrecondition,
                 "expected the communicator that this program was compiled for, got one of other ranks or devices, or another build of the "
                 "package",
                 "Compile it again in this process.");
  }
  if (lane_ == nullptr) {
    return Error(ffi::ErrorCode::kFailedPrecondition,
                 std::string("expected a device of pycollective.init(devices=...), got ") +
                     (lane_id_ >> 32 == 0 ? "CPU device " : "accelerator ") + std::to_string(lane_id_ & 0xFFFFFFFF),
                 "Name that device in init, or run the program on one of its devices.");
  }
  if (participants_.callers() <= 1 && !communicator_->teams.empty()) {
    return Error(ffi::ErrorCode::kFailedPrecondition,
                 "expected a program on the devices of its mesh, got one on a single device", "Please report this.");
  }
  return ffi::Error::Success();
}

ffi::Error Call::CheckProcess(int64_t process) const {
  if (process == 0 || process == this_process) return ffi::Error::Success();
  return Error(ffi::ErrorCode::kFailedPrecondition,
               "expected a program of this process, since it holds addresses of its own process, got another one's",
               "Compile it again in this process.");
}

ffi::Error Call::Enter(const Signature& signature, int64_t nbytes) {
  // The communicator of the last such call. These calls come one after another. If a program fails before Leave, XLA does
  // not run Leave, so the record of that call ends here.
  static std::mutex mutex;
  static auto& last = *new std::shared_ptr<Communicator>;
  const std::lock_guard<std::mutex> lock(mutex);
  if (last != nullptr) last->entered.Finish(kFailed);
  const ffi::Error wrong = CheckParticipants();
  if (wrong.failure()) return wrong;
  const Record record = RecordOf(signature, nbytes, kStarted);
  Recorded recorded(record);
  const ffi::Error error = Prepare(signature, record.seq, [] {});
  if (error.failure()) return error;
  communicator_->entered = std::move(recorded);
  last = communicator_;
  return error;
}

int64_t Call::PeerOf(int64_t rank) {
  if (rank >= 0) return rank;
  return library == nullptr || rank == library->proc_null() ? Record::kNoPeer : Record::kAnyPeer;
}

Record Call::RecordOf(const Signature& signature, int64_t nbytes, CallState state) const {
  Record record;
  record.group = communicator_->ranks->identity();
  record.channel = lane_->channel_number;
  record.operation = operation_;
  if (state == kStarted) {
    std::atomic<int64_t>& calls = IsCollective(operation_) ? lane_->channel.collectives : lane_->channel.messages_made;
    record.seq = calls.fetch_add(1, std::memory_order_relaxed) + 1;
  }
  record.dtype = signature.dtype;
  record.reduce_op = signature.reduce_op;
  record.root = signature.root;
  record.dest = dest_;
  record.source = source_;
  record.count = signature.count;
  record.dimensions = signature.dimensions;
  record.nbytes = nbytes;
  record.site = participants_.site;
  record.state = state;
  return record;
}

ffi::Error Call::Prepare(Signature signature, int64_t seq, const std::function<void()>& before_messages) {
  if (IsCollective(operation_)) {  // not for a message: the other ranks would not take part in making the channel
    if (!lane_->channel.made.load(std::memory_order_acquire)) before_messages();
    const Outcome made = communicator_->ranks->MakeChannel(*library, lane_->channel_number);
    if (!made.ok()) return ErrorOf(made);
    signature.staging = staging_;
    signature.piece_bytes = piece_bytes_;
    signature.devices = static_cast<int32_t>(participants_.callers());
    signature.team = static_cast<int16_t>(lane_->team != nullptr ? lane_->team->size() : 1);
    if (lane_->channel.size > 1) {
      const ffi::Error differs = CompareWithRanks(signature, seq, before_messages);
      if (differs.failure()) return differs;
    }
  }
  return check_numbers ? CheckNumbers(signature) : ffi::Error::Success();
}

ffi::Error Call::CheckNumbers(const Signature& mine) {
  const Channel& own = lane_->channel;
  const int64_t number = lane_->team != nullptr ? int64_t{own.rank} * lane_->team->size() + lane_->member : own.rank;
  const bool is_roots = TraitsOf(mine.operation).dataflow == kFromRoot;
  const bool sends = routes_.size() == 0 || routes_[static_cast<size_t>(lane_->index)] >= 0;
  BadNumbers bad;
  if (sends && (!is_roots || number == mine.root)) bad = FindBadNumbers(operands_, mine.reduce_op);
  bad.rank = own.rank;
  Outcome outcome;
  if (IsCollective(operation_)) outcome = lane_->team != nullptr ? TellTeam(&bad) : TellRanks(own, &bad);
  if (!outcome.ok()) return ErrorOf(outcome);
  if (bad.count == 0) return ffi::Error::Success();
  const std::string line = SiteText(participants_.site);
  const std::string who = "rank " + std::to_string(bad.rank);
  return Error(ffi::ErrorCode::kInvalidArgument,
               "expected finite numbers, got " + Describe(bad) + ", in " + Describe(mine, false) +
                   (line.empty() ? "" : " at " + line),
               "Look at what " + who + " has computed before this call. PYCOLLECTIVE_CHECK=nan finds such numbers.");
}

Outcome Call::TellRanks(const Channel& channel, BadNumbers* bad) {
  if (channel.size == 1) return {};
  std::vector<int64_t> counts(static_cast<size_t>(channel.size));
  PYCOLLECTIVE_RETURN_IF_FAILED(library->Allgather(channel, {&bad->count, counts.data(), 1, Type::kInt64}));
  const auto first = std::find_if(counts.begin(), counts.end(), [](int64_t count) { return count > 0; });
  if (first == counts.end()) return {};
  Arguments shared{bad, bad, sizeof(BadNumbers), Type::kUint8};
  shared.root = static_cast<int>(first - counts.begin());
  return library->Bcast(channel, shared);
}

Outcome Call::TellTeam(BadNumbers* bad) {
  Team& team = *lane_->team;
  bad->device = lane_->member;
  team.SetBuffers(lane_->member, {nullptr, bad});
  team.Meet([&] {
    const auto of = [&](int member) { return static_cast<BadNumbers*>(team.BuffersOf(member).out); };
    BadNumbers first = *of(0);
    for (int member = 1; member < team.size() && first.count == 0; ++member) first = *of(member);
    team.outcome = CatchAsOutcome([&] { return TellRanks(lane_->first->channel, &first); });
    for (int member = 0; member < team.size(); ++member) *of(member) = first;
  });
  return team.outcome;
}

ffi::Error Call::CompareOnBoard(const Signature& mine) {
  LazyChannel& channel = lane_->channel;
  Outcome progress;
  const auto make_progress = [&](int rank) {
    progress = library->Progress(channel, rank);
    return progress.ok();
  };
  Post post{mine, participants_.site, 0, participants_.order};
  if (channel.is_out_of_step) {
    post.seq = Post::kOutOfStep;
    channel.board.Compare(post, false, make_progress);  // tells the others
    return progress.ok() ? OutOfStep(post, channel.rank) : ErrorOf(progress);
  }
  const bool synchronizes = IsSynchronizing(mine.operation);
  const bool waits = synchronizes || channel.agreed.count(mine) == 0;
  const bool in_cell = MayPiggyback() && BoardSlot::FitsCell(*piggybacked_, channel.size);
  bool in_buffer = false;
  if (!in_cell && synchronizes && MayPiggyback() && may_use_buffer_ && channel.exchange != nullptr &&
      piggybacked_->nbytes() <= Exchange::kBufferBytes) {
    const Outcome outcome = HostCollective(*library, channel).FreeBuffer(channel.board.next_call(), &in_buffer);
    if (!outcome.ok()) return ErrorOf(outcome);
  }
  const BoardSlot::BufferOfRank buffer_of = [&](int rank, uint64_t call) { return channel.exchange->BufferOf(rank, call); };
  const Difference found = channel.board.Compare(post, waits, make_progress, in_cell || in_buffer ? piggybacked_ : nullptr,
                                                 in_buffer ? &buffer_of : nullptr);
  if (!progress.ok()) return ErrorOf(progress);
  if (found.rank >= 0) {
    channel.is_out_of_step = found.others_may_go_on;
    return Differs(post, found);
  }
  if (waits && !synchronizes) channel.agreed.insert(mine);
  is_done_ = found.is_made || (mine.operation == kBarrier && lane_->team == nullptr);  // no rank continues before all have arrived
  return ffi::Error::Success();
}

void Call::BreakTeams() const {
  if (replicas_ != nullptr) replicas_->Break();
  if (lane_ != nullptr && lane_->team != nullptr) lane_->team->Break();
}

ffi::Error Call::OutOfStep(const Post& mine, int rank) const {
  const std::string line = SiteText(mine.site);
  return Error(ffi::ErrorCode::kInvalidArgument,
               "CollectiveMismatch: expected ranks that have made the same calls, got " + Describe(mine.signature, false) +
                   (line.empty() ? "" : " at " + line) + " after a call that differed on rank " + std::to_string(rank) +
                   ", and that another rank may have made",
               "Start the ranks again, and look at the first error: from then on each call on this communicator fails.");
}

ffi::Error Call::Differs(const Post& mine, const Difference& found) const {
  const Post& theirs = found.theirs;
  if (theirs.seq == Post::kOutOfStep) return OutOfStep(mine, found.rank);
  const bool known = IsCollective(theirs.signature.operation);
  const bool same_call = theirs.signature == mine.signature, same_number = theirs.seq == mine.seq;
  const bool reordered = same_call && same_number && mine.site == theirs.site && mine.HasReorderedOperands(theirs);
  Signature as_staged_here = theirs.signature;
  as_staged_here.staging = mine.signature.staging;
  as_staged_here.piece_bytes = mine.signature.piece_bytes;
  const bool only_staging = !same_call && as_staged_here == mine.signature;  // nothing else differs
  // A rank that has not found the difference sends no line. If this rank has the same line, it knows the text.
  const std::string line_of_theirs = found.line.empty() ? SiteText(theirs.site) : found.line;
  const auto text = [&](const Post& post, const std::string& line) {
    return Describe(post.signature, only_staging) + (line.empty() ? "" : " at " + line) +
           (same_number ? "" : ", collective " + std::to_string(post.seq) + " of its ranks,") +
           (reordered ? ", of operand #" + std::to_string(static_cast<uint64_t>(post.order) >> 48) + "," : "");
  };
  return Error(ffi::ErrorCode::kInvalidArgument,
               "CollectiveMismatch: expected the same call on every rank, got " + text(mine, SiteText(mine.site)) +
                   " here and " + (known ? text(theirs, line_of_theirs) : std::string("another call")) + " on rank " +
                   std::to_string(found.rank),
               reordered ? "Sum in the same order on all ranks. A set of strings has another order in each process: sort it."
               : same_call && same_number
                   ? "All ranks must make such calls in the same order of lines, by the same function, and over a named axis in "
                     "programs with the same collectives: else data of one is taken for data of another. "
                     "PYCOLLECTIVE_CHECK=first compares no lines."
               : only_staging ? "All ranks must use devices of one kind, with the same settings."
                         : "All ranks must run the same collectives in the same order, with the same shapes, dtypes and "
                           "pytrees.");
}

Section Call::SectionOfCall() const {
  // The guard of numbers needs to know that all ranks make the call.
  if (participants_.section.id == 0 || check != Check::kEvery || check_numbers) return {};
  Section section = participants_.section;
  uint64_t hash = static_cast<uint64_t>(section.id);
  for (const int64_t word : {lane_id_ >> 32, participants_.devices, int64_t{participants_.replicated}}) {
    hash = Mix(hash, static_cast<uint64_t>(word));
  }
  section.id = static_cast<int64_t>(hash | 1);
  return section;
}

ffi::Error Call::CompareWithRanks(const Signature& mine, int64_t seq, const std::function<void()>& before_messages) {
  if (check == Check::kNever) return ffi::Error::Success();
  LazyChannel& channel = lane_->channel;
  const std::lock_guard<std::mutex> lock(channel.mutex);
  if (check >= Check::kEvery && channel.board.exists()) return CompareOnBoard(mine);
  // Ranks of one host, in a tree, compare broadcasts and the like too, as they do on a board.
  const bool each = check == Check::kAlways || (check == Check::kEvery && (IsSynchronizing(mine.operation) || channel.tree != nullptr));
  const bool is_known = !each && channel.agreed.count(mine) != 0;
  const bool piggybacks = each && MayPiggyback() && channel.comparison.Carries(channel, *piggybacked_);
  // A reduction travels with a comparison also where the call is covered: MPI may add in another order, and equal calls must have
  // equal bits.
  const bool also_if_covered = piggybacks && piggybacked_->reduction().has_value();
  const Post post = check == Check::kFirst ? Post{mine, 0, seq} : Post{mine, participants_.site, seq, participants_.order};
  using Coverage = Sections::Coverage;
  const Coverage coverage = channel.comparison.sections.Enter(SectionOfCall(), post.DigestWithoutNumber());
  if (coverage == Coverage::kDiffers) {
    return Error(ffi::ErrorCode::kInternal,
                 "expected the call that this program has made here in earlier runs, got " + Describe(mine, true) + " at " +
                     SiteText(participants_.site),
                 "Please report this. PYCOLLECTIVE_CHECK=always compares each call.");
  }
  if (is_known) channel.comparison.sections.Known(mine.Digest());
  if (is_known || (coverage == Coverage::kCovered && !also_if_covered)) return ffi::Error::Success();
  before_messages();
  Difference found;
  const Outcome outcome = channel.comparison.Compare(*library, channel, post, piggybacks ? piggybacked_ : nullptr, &found);
  if (!outcome.ok()) return ErrorOf(outcome);
  if (found.rank >= 0) return Differs(post, found);
  is_done_ = found.is_made || (mine.operation == kBarrier && lane_->team == nullptr);  // no rank continues before all have arrived
  if (!each) channel.agreed.insert(mine);
  return ffi::Error::Success();
}

ffi::Error Call::ErrorOf(const Outcome& outcome) const {
  if (outcome.of_runtime) {
    return Fatal(std::string("expected ") + outcome.call + " of the accelerator's runtime to succeed, got \"" +
                     outcome.detail + "\"",
                 "The cause may be an earlier error of this program on the device.");
  }
  if (outcome.remedy != nullptr) {
    return Error(ffi::ErrorCode::kInvalidArgument, outcome.detail, outcome.remedy);
  }
  if (!outcome.detail.empty()) {
    return Error(ffi::ErrorCode::kDataLoss, std::string(outcome.call) + ": " + outcome.detail,
                 "Give both ends the same shape and dtype.");
  }
  return Error(ffi::ErrorCode::kInternal,
               std::string("expected ") + outcome.call + " to succeed, got \"" + library->ErrorString(outcome.code) +
                   "\"",
               "Check that all ranks run the same calls in the same order.");
}

ffi::Error Call::Fatal(const std::string& what, const std::string& remedy) const {
  const std::string line = SiteText(participants_.site);
  const ffi::Error error = Error(ffi::ErrorCode::kInternal, what + (line.empty() ? "" : " at " + line), remedy);
  if (size() > 1) {
    EndJob("pycollective: " + error.message() + " Ending all ranks: they wait for data of this rank, or have got wrong data.\n");
  }
  return error;
}

void Call::EndAhead(const ffi::Error& error) const {
  const std::string line = SiteText(participants_.site);
  EndJob("pycollective: " + error.message() + (line.empty() ? "" : " The call is at " + line + ".") +
         " Ending all ranks: the program was dispatched ahead of the call, so no result can raise the error. With "
         "PYCOLLECTIVE_GPU_DISPATCH=wait the program raises it.\n");
}

ffi::Error Call::Error(ffi::ErrorCode code, const std::string& what, const std::string& remedy) const {
  std::string where;
  if (communicator_ != nullptr) {
    where = " (rank " + std::to_string(communicator_->ranks->rank()) + " of " +
            std::to_string(communicator_->ranks->size()) + ", communicator " + communicator_->name + ")";
  }
  return ffi::Error(code,
                    std::string("pycollective.") + kOperationNames[operation_] + ": " + what + where + ". " + remedy);
}

}  // namespace pycollective
