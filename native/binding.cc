// The C interface that transport/native.py calls through ctypes.

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>

#include "base/exports.h"
#include "base/operations.h"
#include "calls/call.h"
#include "calls/communicators.h"
#include "calls/settings.h"
#include "devices/device.h"
#include "devices/team_collectives.h"
#include "monitor/monitor.h"
#include "mpi/collectives.h"
#include "mpi/wait.h"
#include "records/recorder.h"
#include "shared_memory/combining_tree.h"
#include "shared_memory/process_memory.h"
#include "shared_memory/shared_arrays.h"

using pycollective::FindCommunicator;
using pycollective::Lane;

// Names ----------------------------------------------------------------------------------------------------------
//
// Python reads each table of names from index 0 on; null ends it.

namespace {

template <size_t kCount>
const char* NameAt(const char* const (&names)[kCount], int64_t index) {
  return index >= 0 && index < static_cast<int64_t>(kCount) ? names[index] : nullptr;
}

// The message of a failure, which stays valid until the next failure; null for a success.
const char* FailureText(const pycollective::Outcome& outcome) {
  static auto& text = *new std::string;
  if (outcome.ok()) return nullptr;
  text = std::string(outcome.call) + ": " + outcome.detail;
  return text.c_str();
}

}  // namespace

// The MPI functions to look up: "MPI_Allgather", ...
PYCOLLECTIVE_EXPORT const char* pycollective_function_name(int64_t index) {
  return NameAt(pycollective::kFunctionNames, index);
}

// The element types, as mpi4py names them: "INT8_T", ...
PYCOLLECTIVE_EXPORT const char* pycollective_type_name(int64_t index) {
  return NameAt(pycollective::kTypeNames, index);
}

// The reductions that MPI has, as mpi4py names them: "SUM", ...
PYCOLLECTIVE_EXPORT const char* pycollective_mpi_op_name(int64_t index) {
  return NameAt(pycollective::kMpiOpNames, index);
}

// All reductions, as Python names them: "sum", ... The attribute op of a handler is the index.
PYCOLLECTIVE_EXPORT const char* pycollective_op_name(int64_t index) {
  return NameAt(pycollective::kOpNames, index);
}

// The number of a dtype by its name, as the attribute comm of a handler holds it (call.h); -1: it is unknown.
PYCOLLECTIVE_EXPORT int32_t pycollective_dtype_number(const char* name) { return pycollective::DtypeNumber(name); }

// The operations: "allreduce", ... Each has the handlers pycollective_NAME and pycollective_device_NAME.
PYCOLLECTIVE_EXPORT const char* pycollective_operation_name(int64_t index) {
  return NameAt(pycollective::kOperationNames, index);
}

// The operations that have a handler for accelerators alone, pycollective_device_NAME.
PYCOLLECTIVE_EXPORT const char* pycollective_device_operation_name(int64_t index) {
  return NameAt(pycollective::kDeviceOperationNames, index);
}

// The handlers around operations that another library carries out, pycollective_NAME.
PYCOLLECTIVE_EXPORT const char* pycollective_guard_name(int64_t index) {
  return NameAt(pycollective::kGuardNames, index);
}

// The functions of an accelerator's runtime to look up, by their names in CUDA or in HIP.
PYCOLLECTIVE_EXPORT const char* pycollective_runtime_name(int64_t index, int32_t hip) {
  if (index < 0 || index >= static_cast<int64_t>(pycollective::kRuntimeCount)) return nullptr;
  return pycollective::kRuntimeNames[index][hip != 0];
}

// Libraries ------------------------------------------------------------------------------------------------------

// Binds the handlers to an MPI library. `addresses`: those of its functions, in the order of
// pycollective_function_name. Returns null, or a message that stays valid.
PYCOLLECTIVE_EXPORT const char* pycollective_bind(const pycollective::Binding* binding,
                                                  void* const* addresses) {
  static auto& error = *new std::string;
  auto made = pycollective::MakeLibrary(*binding, addresses, &error);
  if (made == nullptr) return error.c_str();
  pycollective::library = made.release();
  return nullptr;
}

// Binds the handlers for accelerators to their runtime. `addresses`: those of its functions, in the order of
// pycollective_runtime_name. `direct`: whether MPI reads and writes the accelerators' memory; else it gets pieces of at
// most `stage_bytes`.
PYCOLLECTIVE_EXPORT void pycollective_bind_runtime(void* const* addresses, int32_t direct, int64_t stage_bytes) {
  static_assert(sizeof(pycollective::runtime) == pycollective::kRuntimeCount * sizeof(void*), "pointers alone");
  std::memcpy(&pycollective::runtime, addresses, sizeof(pycollective::runtime));
  pycollective::direct = direct != 0;
  pycollective::stage_bytes = stage_bytes;
}

// The functions for dispatch ahead to look up, in CUDA's runtime or its driver.
PYCOLLECTIVE_EXPORT const char* pycollective_ahead_name(int64_t index) { return NameAt(pycollective::kAheadNames, index); }

// Gives the handlers the addresses of those functions, in that order.
PYCOLLECTIVE_EXPORT void pycollective_bind_ahead(void* const* addresses) {
  static_assert(sizeof(pycollective::ahead_runtime) == sizeof(pycollective::kAheadNames), "pointers alone");
  std::memcpy(&pycollective::ahead_runtime, addresses, sizeof(pycollective::ahead_runtime));
}

// Tries dispatch ahead on a device, with `nbytes` bytes of its memory: see Device::TryAhead. Returns null, or why it does not work, which
// stays valid until the next call.
PYCOLLECTIVE_EXPORT const char* pycollective_try_ahead(int32_t ordinal, int64_t memory, int64_t nbytes) {
  return FailureText(pycollective::Device::Get(ordinal).TryAhead(reinterpret_cast<void*>(memory), nbytes));
}

// Says whether collectives are dispatched ahead, the same on all ranks.
PYCOLLECTIVE_EXPORT void pycollective_set_ahead(bool ahead) { pycollective::ahead = ahead; }

// Makes the page-locked buffers of a device. Returns null, or the message of a failure, which stays valid until the next call.
PYCOLLECTIVE_EXPORT const char* pycollective_reserve_buffers(int32_t ordinal, int64_t stage_bytes) {
  return FailureText(pycollective::Device::Get(ordinal).Reserve(stage_bytes));
}

// Communicators --------------------------------------------------------------------------------------------------

namespace {

// Null, or the message of a failure, which `text` keeps.
const char* ErrorOf(const pycollective::Outcome& outcome, std::string* text) {
  if (outcome.ok()) return nullptr;
  *text = std::string(outcome.call) + ": " + pycollective::library->ErrorString(outcome.code);
  return text->c_str();
}

}  // namespace

// Adds a communicator on `lane_count` devices of each rank, given by their ids. `main`, `auxiliary`, `identity`,
// `world_ranks`: see RankGroup. Returns its number.
PYCOLLECTIVE_EXPORT int64_t pycollective_communicator_add(const char* name, int64_t fingerprint, int32_t rank,
                                                          int32_t size, int32_t lane_count, const int64_t* device_ids,
                                                          int64_t main, int64_t auxiliary, int64_t identity,
                                                          const int32_t* world_ranks) {
  const std::vector<int> world(world_ranks, world_ranks + size);
  pycollective::AddGroup(identity, {name, world});
  const auto ranks =
      std::make_shared<pycollective::RankGroup>(rank, size, lane_count, main, auxiliary, identity, world);
  auto communicator = std::make_shared<pycollective::Communicator>(name, fingerprint, ranks);
  for (int i = 0; i < lane_count; ++i) {
    communicator->lanes.push_back(std::make_unique<Lane>(device_ids[i], i, ranks->channel(i), i));
  }
  return pycollective::AddCommunicator(std::move(communicator));
}

// Adds a part of communicator `whole`: `size` of its ranks, in the order of `members` (null: all of them); this process
// is number `rank` among them. Its devices are those of the whole (`lane_count` < 0), or those of a mesh, in the mesh's
// order: device i is number team_members[i] of team teams[i]. All teams have `team_size` devices. Returns the part's
// number.
PYCOLLECTIVE_EXPORT int64_t pycollective_part_add(const char* name, int64_t fingerprint, int64_t whole, int32_t rank,
                                                  int32_t size, const int32_t* members, int32_t lane_count,
                                                  const int64_t* device_ids, const int32_t* teams,
                                                  const int32_t* team_members, int32_t team_size) {
  const auto of = FindCommunicator(whole);
  const auto ranks = members == nullptr ? of->ranks : pycollective::PartOf(*of, {members, members + size}, rank);
  pycollective::AddGroup(ranks->identity(), {name, ranks->world()});
  auto part = std::make_shared<pycollective::Communicator>(name, fingerprint, ranks);
  part->whole = of;
  part->is_mesh = lane_count >= 0;
  if (!part->is_mesh) {
    for (const auto& lane : of->lanes) {
      part->lanes.push_back(
          std::make_unique<Lane>(lane->device_id, lane->index, ranks->channel(lane->index), lane->index));
    }
  }
  for (int i = 0; i < lane_count; ++i) {
    const int number = ranks->devices() + i;
    part->lanes.push_back(std::make_unique<Lane>(device_ids[i], i, ranks->channel(number), number));
    if (team_size > 1) {
      const auto team = static_cast<size_t>(teams[i]);
      while (part->teams.size() <= team) part->teams.push_back(std::make_unique<pycollective::Team>(team_size));
      part->lanes.back()->team = part->teams[team].get();
      part->lanes.back()->member = team_members[i];
    }
  }
  for (const auto& lane : part->lanes) {
    for (const auto& other : part->lanes) {
      if (other->team == lane->team && other->member == 0) lane->first = other.get();
    }
  }
  return pycollective::AddCommunicator(std::move(part));
}

// Lets the ranks of a communicator that was just added know their hosts: see RankGroup::JoinHosts. Returns null, or a message
// that stays valid until the next call.
PYCOLLECTIVE_EXPORT const char* pycollective_board_join(int64_t number) {
  static auto& error = *new std::string;
  const auto ranks = FindCommunicator(number)->ranks;
  return ErrorOf(ranks->JoinHosts(*pycollective::library, 0), &error);
}

// The bytes of the memory that so many ranks share: the trees in which they combine blocks, the board, and what they exchange arrays
// through.
PYCOLLECTIVE_EXPORT int64_t pycollective_board_bytes(int32_t ranks) {
  return static_cast<int64_t>(pycollective::CombiningTree::BytesOf(ranks) + pycollective::BoardSlot::BytesOf(ranks) +
                              pycollective::Exchange::BytesOf(ranks));
}

// Whether the ranks of a communicator or part are on several hosts.
PYCOLLECTIVE_EXPORT int32_t pycollective_spans_hosts(int64_t number) {
  const auto communicator = FindCommunicator(number);
  return communicator != nullptr && communicator->ranks->SpanHosts() ? 1 : 0;
}

// Whether the ranks of a communicator or part compare the calls of a section once in each run (comparison.h): there are several, and
// they do not post their calls on a board.
PYCOLLECTIVE_EXPORT int32_t pycollective_compares_in_sections(int64_t number) {
  const auto communicator = FindCommunicator(number);
  return communicator != nullptr && communicator->ranks->size() > 1 && !communicator->ranks->PostOnBoard() ? 1 : 0;
}

// How many comparisons this process has made, other than on the board.
PYCOLLECTIVE_EXPORT int64_t pycollective_comparisons() { return pycollective::Comparison::made(); }

// Says on which host each rank of MPI_COMM_WORLD is: see SetHosts.
PYCOLLECTIVE_EXPORT void pycollective_set_hosts(const int32_t* hosts, int32_t count, int32_t own) {
  pycollective::SetHosts({hosts, hosts + count}, own);
}

// Opens the memory of this host: `file` is open, has so many bytes, and is shared by `count` ranks. `crowded`: they have fewer
// cores than that. Returns whether it could be mapped.
PYCOLLECTIVE_EXPORT bool pycollective_board_open(int32_t file, int32_t count, bool crowded) {
  const auto nbytes = static_cast<size_t>(pycollective_board_bytes(count));
  void* const mapped = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (mapped == MAP_FAILED) return false;
  char* const trees = static_cast<char*>(mapped);
  char* const board = trees + pycollective::CombiningTree::BytesOf(count);
  pycollective::spins_of_wait = crowded ? pycollective::kSpinsOnSharedCore : pycollective::kSpinsOnOwnCore;
  pycollective::CombiningTree::OpenMemory(trees, count);
  pycollective::BoardSlot::OpenBoard(board, count);
  pycollective::Exchange::OpenMemory(board + pycollective::BoardSlot::BytesOf(count), count);
  return true;
}

// Rank number `rank` of this host shows the others where to try to read its memory.
PYCOLLECTIVE_EXPORT void pycollective_board_show_memory(int32_t rank) { pycollective::Exchange::ShowMemory(rank); }

// How many bytes the arrays of a call may have that this rank reads where they are: what the caches hold; 0 if it cannot read
// the memory of all ranks of this host. All have shown where to try.
PYCOLLECTIVE_EXPORT int64_t pycollective_board_read_bytes() {
  return pycollective::Exchange::ReadsAll() ? pycollective::CacheBytesOfHost() : 0;
}

// The same, as all ranks of this host have agreed.
PYCOLLECTIVE_EXPORT void pycollective_board_set_read_bytes(int64_t nbytes) { pycollective::Exchange::SetReadBytes(nbytes); }

// Whether ranks of this host read each other's arrays.
PYCOLLECTIVE_EXPORT bool pycollective_board_may_read() {
  return pycollective::BoardSlot::HasBoard() && pycollective::Exchange::MayRead();
}

// Opens memory for arrays of the ranks of this host: `file` is open and has `nbytes` bytes, of which `own_bytes` from `own_begin` on are
// this rank's. Returns whether it could be mapped, and the ranks have a board, on which they show where their arrays are.
PYCOLLECTIVE_EXPORT bool pycollective_arrays_open(int32_t file, int64_t nbytes, int64_t own_begin, int64_t own_bytes) {
  if (!pycollective::BoardSlot::HasBoard()) return false;
  void* const mapped = mmap(nullptr, static_cast<size_t>(nbytes), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (mapped == MAP_FAILED) return false;
  char* const memory = static_cast<char*>(mapped);
  pycollective::SharedArrays::Open(memory, static_cast<size_t>(nbytes), memory + own_begin, static_cast<size_t>(own_bytes));
  return true;
}

// There is none after all: another rank could not open it.
PYCOLLECTIVE_EXPORT void pycollective_arrays_close() { pycollective::SharedArrays::Close(); }

// There is no such memory after all.
PYCOLLECTIVE_EXPORT void pycollective_board_close() {
  pycollective::BoardSlot::OpenBoard(nullptr, 0);
  pycollective::Exchange::SetReadBytes(0);
}

// Frees a communicator: see FreeCommunicator. Returns null, or a message that stays valid until the next call.
PYCOLLECTIVE_EXPORT const char* pycollective_communicator_free(int64_t number) {
  static auto& error = *new std::string;
  return ErrorOf(pycollective::FreeCommunicator(*pycollective::library, number), &error);
}

// Writes the MPI communicators that calls have made to `comms`, at most `room`. Returns how many there are.
PYCOLLECTIVE_EXPORT int64_t pycollective_own_comms(int64_t* comms, int64_t room) {
  const std::vector<int64_t> all = pycollective::OwnCommsOfAll();
  std::copy_n(all.begin(), std::min<int64_t>(room, static_cast<int64_t>(all.size())), comms);
  return static_cast<int64_t>(all.size());
}

// Gives up all communicators, since a rank has failed: see AbandonAll.
PYCOLLECTIVE_EXPORT void pycollective_abandon_all() { pycollective::AbandonAll(); }

// Makes the slots and the memory of all those communicators free, on one rank of this host.
PYCOLLECTIVE_EXPORT void pycollective_board_clear() {
  pycollective::BoardSlot::ReleaseAll();
  if (pycollective::BoardSlot::HasBoard()) pycollective::Exchange::EndAll();
}

// Ends the process with a status, without MPI_Finalize: a function for Py_AtExit. Python has flushed its streams.
namespace {
int exit_status = 0;
void ExitNow() {
  std::fflush(nullptr);
  _exit(exit_status);
}
}  // namespace
PYCOLLECTIVE_EXPORT void* pycollective_exit_now(int32_t status) {
  exit_status = status;
  return reinterpret_cast<void*>(&ExitNow);
}

// The message of the last call's error, "" if it has succeeded: see LastFailure. The caller gives the text back to
// pycollective_text_free.
PYCOLLECTIVE_EXPORT char* pycollective_last_failure() { return strdup(pycollective::LastFailure().c_str()); }

// The recorder ---------------------------------------------------------------------------------------------------

// Names a line of the user's code: see AddSite.
PYCOLLECTIVE_EXPORT void pycollective_site_add(int64_t site, const char* text) { pycollective::AddSite(site, text); }

// Begins a record of a wait outside programs, for the ranks of a group: number `wait` of pycollective_wait_name. Returns
// what pycollective_wait_end needs.
PYCOLLECTIVE_EXPORT void* pycollective_wait_begin(int64_t wait, int64_t group) {
  pycollective::Record record;
  record.operation = pycollective::kFirstWait + wait;
  record.group = group;
  record.state = pycollective::kStarted;
  return new pycollective::Recorded(record);
}
PYCOLLECTIVE_EXPORT void pycollective_wait_end(void* begun, int32_t succeeded) {
  auto* const recorded = static_cast<pycollective::Recorded*>(begun);
  recorded->Finish(succeeded != 0 ? pycollective::kCompleted : pycollective::kFailed);
  delete recorded;
}

// The waits outside programs, by their numbers.
PYCOLLECTIVE_EXPORT const char* pycollective_wait_name(int64_t index) {
  return NameAt(pycollective::kWaitNames, index);
}

// All records as JSON: see RecorderJson. The caller gives the text back to pycollective_text_free.
PYCOLLECTIVE_EXPORT char* pycollective_recorder_json(int32_t rank, int32_t size, const char* reason) {
  return strdup(pycollective::RecorderJson(rank, size, {reason, "", {}}).c_str());
}
PYCOLLECTIVE_EXPORT void pycollective_text_free(char* text) { std::free(text); }

// Traces: see StartTrace. pycollective_trace_stop returns the words of the records one after another, and how many records
// there are and were dropped. The caller gives the words back to pycollective_text_free.
PYCOLLECTIVE_EXPORT void pycollective_trace_start(int64_t most) { pycollective::StartTrace(most); }
PYCOLLECTIVE_EXPORT void* pycollective_trace_stop(int64_t* count, int64_t* dropped) {
  const pycollective::Trace trace = pycollective::StopTrace();
  const size_t nbytes = trace.records.size() * sizeof(pycollective::Record);
  *count = static_cast<int64_t>(trace.records.size());
  *dropped = trace.dropped;
  void* const words = std::malloc(nbytes + 1);
  if (words == nullptr) return nullptr;
  std::memcpy(words, trace.records.data(), nbytes);
  return words;
}
// The words of a record, by their numbers.
PYCOLLECTIVE_EXPORT const char* pycollective_record_word(int64_t index) {
  return NameAt(pycollective::kRecordWords, index);
}
// A record as JSON, and a group: see RecordJson and GroupJson.
PYCOLLECTIVE_EXPORT char* pycollective_record_json(const void* words) {
  pycollective::Record record;
  std::memcpy(static_cast<void*>(&record), words, sizeof(record));
  return strdup(pycollective::RecordJson(record).c_str());
}
PYCOLLECTIVE_EXPORT char* pycollective_group_json(int64_t identity) {
  return strdup(pycollective::GroupJson(identity).c_str());
}

// The monitor ----------------------------------------------------------------------------------------------------

// Opens a socket that listens on an address. Returns whether there is one, and its number and its port.
PYCOLLECTIVE_EXPORT bool pycollective_monitor_listen(const char* host, int32_t* fd, int32_t* port) {
  pycollective::Address address{host, 0};
  const bool listens = pycollective::ListenOn(&address, fd);
  *port = address.port;
  return listens;
}

// Starts the monitor. `processes`: for each rank the number of its addresses, each address and its port, its pid,
// when it started, the number and the name of its host, packed as Writer packs them. The others: see MonitorSettings. Returns null, or why there is no monitor.
PYCOLLECTIVE_EXPORT const char* pycollective_monitor_start(int32_t rank, int32_t size, const char* processes, int64_t nbytes,
                                                    const int32_t* listening, int32_t listening_count,
                                                    const char* secret, int32_t secret_bytes, double warn_s,
                                                    double timeout_s, const char* folder, bool may_lose_ranks,
                                                    bool says_deaths) {
  const std::string packed(processes, static_cast<size_t>(nbytes));
  pycollective::Reader reader(packed);
  pycollective::MonitorSettings settings;
  settings.rank = rank;
  for (int32_t i = 0; i < size; ++i) {
    pycollective::Process process;
    for (int64_t left = reader.Number(); left > 0 && reader.ok(); --left) {
      const std::string host = reader.Text();
      process.addresses.push_back({host, static_cast<int>(reader.Number())});
    }
    process.pid = reader.Number();
    process.started = reader.Number();
    process.host = reader.Number();
    process.host_name = reader.Text();
    settings.processes.push_back(process);
  }
  settings.listening.assign(listening, listening + listening_count);
  settings.secret.assign(secret, static_cast<size_t>(secret_bytes));
  settings.warn_ns = static_cast<int64_t>(warn_s * 1e9);
  settings.timeout_ns = static_cast<int64_t>(timeout_s * 1e9);
  settings.folder = folder;
  settings.may_lose_ranks = may_lose_ranks;
  settings.says_deaths = says_deaths;
  static auto& error = *new std::string;
  error = pycollective::StartMonitor(std::move(settings));
  return error.empty() ? nullptr : error.c_str();
}
PYCOLLECTIVE_EXPORT void pycollective_monitor_set_timeout(double warn_s, double timeout_s) {
  pycollective::SetMonitorTimeout(static_cast<int64_t>(warn_s * 1e9), static_cast<int64_t>(timeout_s * 1e9));
}
PYCOLLECTIVE_EXPORT void pycollective_monitor_stop() { pycollective::StopMonitor(); }
PYCOLLECTIVE_EXPORT void pycollective_monitor_leave() { pycollective::LeaveMonitor(); }

// Leaves a rank out of all that the monitor does: it has failed, and the others go on.
PYCOLLECTIVE_EXPORT void pycollective_monitor_forget(int32_t rank) { pycollective::ForgetRank(rank); }

// See BeginEnd.
PYCOLLECTIVE_EXPORT bool pycollective_end_begin(int32_t status, const char* cause) {
  return pycollective::BeginEnd(status, cause);
}

// A random number of this process: the attribute `process` of programs that hold its addresses.
PYCOLLECTIVE_EXPORT int64_t pycollective_this_process() { return pycollective::this_process; }

// Settings -------------------------------------------------------------------------------------------------------

// Sets when ranks compare what they call, a Check (settings.h), and whether they look for NaN and Inf.
PYCOLLECTIVE_EXPORT void pycollective_set_check(int32_t when, int32_t numbers) {
  pycollective::check = static_cast<pycollective::Check>(when);
  pycollective::check_numbers = numbers != 0;
}

// For tests: counts above this take the way of counts beyond MPI's int.
PYCOLLECTIVE_EXPORT void pycollective_set_max_count(int64_t max_count) {
  pycollective::library->max_count = max_count;
}

// The table ------------------------------------------------------------------------------------------------------

namespace {
const pycollective::Listed listed{
    PYCOLLECTIVE_TYPED(function_name), PYCOLLECTIVE_TYPED(type_name), PYCOLLECTIVE_TYPED(mpi_op_name),
    PYCOLLECTIVE_TYPED(op_name), PYCOLLECTIVE_TYPED(dtype_number), PYCOLLECTIVE_TYPED(operation_name), PYCOLLECTIVE_TYPED(device_operation_name),
    PYCOLLECTIVE_TYPED(guard_name), PYCOLLECTIVE_TYPED(runtime_name), PYCOLLECTIVE_TYPED(bind),
    PYCOLLECTIVE_TYPED(bind_runtime), PYCOLLECTIVE_TYPED(ahead_name), PYCOLLECTIVE_TYPED(bind_ahead),
    PYCOLLECTIVE_TYPED(try_ahead), PYCOLLECTIVE_TYPED(set_ahead), PYCOLLECTIVE_TYPED(reserve_buffers), PYCOLLECTIVE_TYPED(communicator_add), PYCOLLECTIVE_TYPED(part_add),
    PYCOLLECTIVE_TYPED(board_join), PYCOLLECTIVE_TYPED(board_bytes), PYCOLLECTIVE_TYPED(spans_hosts),
    PYCOLLECTIVE_TYPED(compares_in_sections), PYCOLLECTIVE_TYPED(comparisons),
    PYCOLLECTIVE_TYPED(set_hosts), PYCOLLECTIVE_TYPED(board_open), PYCOLLECTIVE_TYPED(board_show_memory),
    PYCOLLECTIVE_TYPED(board_read_bytes), PYCOLLECTIVE_TYPED(board_set_read_bytes),
    PYCOLLECTIVE_TYPED(board_may_read), PYCOLLECTIVE_TYPED(board_close), PYCOLLECTIVE_TYPED(arrays_open),
    PYCOLLECTIVE_TYPED(arrays_close), PYCOLLECTIVE_TYPED(communicator_free),
    PYCOLLECTIVE_TYPED(own_comms), PYCOLLECTIVE_TYPED(abandon_all), PYCOLLECTIVE_TYPED(board_clear),
    PYCOLLECTIVE_TYPED(exit_now), PYCOLLECTIVE_TYPED(last_failure), PYCOLLECTIVE_TYPED(site_add),
    PYCOLLECTIVE_TYPED(wait_begin), PYCOLLECTIVE_TYPED(wait_end), PYCOLLECTIVE_TYPED(wait_name),
    PYCOLLECTIVE_TYPED(recorder_json), PYCOLLECTIVE_TYPED(text_free), PYCOLLECTIVE_TYPED(trace_start),
    PYCOLLECTIVE_TYPED(trace_stop), PYCOLLECTIVE_TYPED(record_word), PYCOLLECTIVE_TYPED(record_json),
    PYCOLLECTIVE_TYPED(group_json), PYCOLLECTIVE_TYPED(monitor_listen), PYCOLLECTIVE_TYPED(monitor_start),
    PYCOLLECTIVE_TYPED(monitor_set_timeout), PYCOLLECTIVE_TYPED(monitor_stop), PYCOLLECTIVE_TYPED(monitor_leave),
    PYCOLLECTIVE_TYPED(monitor_forget), PYCOLLECTIVE_TYPED(end_begin), PYCOLLECTIVE_TYPED(this_process),
    PYCOLLECTIVE_TYPED(set_check), PYCOLLECTIVE_TYPED(set_max_count)};
}  // namespace
