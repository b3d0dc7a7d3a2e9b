// Implementation of messages.h.

#include "calls/messages.h"

#include <pthread.h>
#include <sys/prctl.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <system_error>
#include <thread>
#include <unordered_map>
#include <vector>

#include "base/clock.h"
#include "base/exports.h"
#include "calls/settings.h"
#include "mpi/collectives.h"
#include "mpi/dtypes.h"
#include "mpi/elements.h"
#include "records/recorder.h"

namespace pycollective {
namespace {

// Where the data of a header are. The values are no numbers that data are likely to have: bytes without a header must not be taken
// for one.
enum class DataPlace : int64_t { kNone = 0, kEnclosed = 0x70636d7367656e63, kNextMessage = 0x70636d7367736570 };

struct MessageHeader {
  CallDescription call;
  int64_t count;  // of the elements that MPI sends, and their type; `call` has the program's
  int32_t type;
  int32_t data_tag;  // of the second message; 0: there is none
  DataPlace place;  // the last member: it is there only if the whole header is

  bool exists() const { return place == DataPlace::kEnclosed || place == DataPlace::kNextMessage; }
};
static_assert(sizeof(MessageHeader) == 272, "ranks send it as bytes, so it must have no padding");

// Larger data are a message of their own. A copy of them takes longer than a second message: on one host, where a message takes
// 2 us, from some 16 KiB on; over TCP, where it takes 10 us, from some 256 KiB on.
constexpr size_t kEnclosedBytes = 256 << 10;
constexpr size_t kEnclosedOnOneHost = 16 << 10;
size_t MostEnclosed(const Channel& channel) { return channel.exchange != nullptr ? kEnclosedOnOneHost : kEnclosedBytes; }
// Larger data are received where they belong, and smaller ones copied there: MPI needs a datatype for two places.
constexpr size_t kCopiedBytes = 32 << 10;

// The memory of a thread for one message that it sends and one that it receives.
struct MessageMemory {
  struct Message {
    MessageHeader header;
    char data[kEnclosedBytes];
  };
  Message sent;
  Message received;

  // Returns the memory of this thread; null: there is no memory left.
  static MessageMemory* OfThisThread() {
    // Not initialized, so that the kernel gives pages only for what is used.
    static thread_local const std::unique_ptr<char[]> memory(new (std::nothrow) char[sizeof(MessageMemory)]);
    return reinterpret_cast<MessageMemory*>(memory.get());
  }
};

// The header of a message. The tags of data repeat only after so many messages of this process that none of them is under way.
MessageHeader HeaderOf(const Library& mpi, const SentMessage& sent, bool encloses) {
  static std::atomic<int64_t> last{0};
  const int64_t tag = encloses ? 0 : mpi.largest_tag - last.fetch_add(1, std::memory_order_relaxed) % mpi.data_tags();
  return {CallDescription(sent.post), sent.data.count, static_cast<int32_t>(sent.data.type), static_cast<int32_t>(tag),
          encloses ? DataPlace::kEnclosed : DataPlace::kNextMessage};
}

// The second message for `sent`, after its header.
Outgoing DataMessage(const SentMessage& sent, const MessageHeader& header) {
  Outgoing data = sent.data;
  data.tag = header.data_tag;
  return data;
}

// Writes the first message for `sent` at `to`. Larger data are not in it.
Outgoing FirstMessage(const Library& mpi, const Channel& channel, const SentMessage& sent, MessageMemory::Message* to) {
  const size_t nbytes = Bytes(sent.data.count, sent.data.type);
  const bool encloses = channel.memory == nullptr && nbytes <= MostEnclosed(channel);
  to->header = HeaderOf(mpi, sent, encloses);
  if (encloses && nbytes > 0) std::memcpy(to->data, sent.data.data, nbytes);
  const auto size = static_cast<int64_t>(sizeof(MessageHeader) + (encloses ? nbytes : 0));
  return {to, size, Type::kUint8, sent.data.dest, sent.data.tag};
}

Outcome NoMemory() { return OutcomeOfException(std::bad_alloc()); }

std::string DescribeMessage(const Post& post, const std::string& line) {
  const std::string array = DescribeArray(post.signature.dimensions, post.signature.dtype);
  return line.empty() ? array : array + " at " + line;
}

// Whether both ends have arrays of one dtype and shape.
bool AreAlike(const Post& here, const Post& there) {
  return here.signature.dtype == there.signature.dtype && here.signature.dimensions == there.signature.dimensions;
}

Outcome WithoutHeader(const char* function, int source) {
  Outcome outcome{function, 0, {}};
  outcome.detail = "expected a message that begins with its dtype and shape, got other bytes from rank " + std::to_string(source);
  outcome.remedy = "Set PYCOLLECTIVE_CHECK alike on all ranks. After an error in a message, end the program.";
  return outcome;
}

Outcome Mismatch(const char* function, const Post& expected, const CallDescription& got, int source) {
  Outcome outcome{function, 0, {}};
  outcome.detail = "CollectiveMismatch: expected a message of " + DescribeMessage(expected, SiteText(expected.site)) + ", got one of " +
                   DescribeMessage(got.post, got.line) + " from rank " + std::to_string(source);
  outcome.remedy = "Give both ends the same shape and dtype.";
  return outcome;
}

// Receives the data of an unexpected message and drops them, so that the sender does not wait without end.
Outcome Drop(const Library& mpi, const Channel& channel, const MessageHeader& header, int source) {
  const auto type = static_cast<Type>(header.type);
  Channel on_host = channel;
  on_host.memory = nullptr;
  try {
    std::vector<char> data(Bytes(header.count, type));
    return mpi.Recv(ChannelOfData(on_host), {data.data(), header.count, type, source, header.data_tag});
  } catch (const std::bad_alloc& error) {
    return OutcomeOfException(error);
  }
}

}  // namespace

Outcome Send(const Library& mpi, const Channel& channel, const SentMessage& sent) {
  if (check < Check::kEvery) return mpi.Send(channel, sent.data);
  MessageMemory* const memory = MessageMemory::OfThisThread();
  if (memory == nullptr) return NoMemory();
  const Outcome outcome = mpi.Send(channel, FirstMessage(mpi, channel, sent, &memory->sent));
  const bool is_sent = memory->sent.header.place == DataPlace::kEnclosed;
  return is_sent || !outcome.ok() ? outcome : mpi.Send(ChannelOfData(channel), DataMessage(sent, memory->sent.header));
}

Outcome Recv(const Library& mpi, const Channel& channel, const ExpectedMessage& expected) {
  Incoming data = expected.data;
  if (check < Check::kEvery || data.source == mpi.proc_null()) return mpi.Recv(channel, data);
  MessageMemory* const memory = MessageMemory::OfThisThread();
  if (memory == nullptr) return NoMemory();
  MessageMemory::Message& received = memory->received;
  const size_t nbytes = Bytes(data.count, data.type);
  const bool in_place = channel.memory == nullptr && nbytes > kCopiedBytes && nbytes <= kEnclosedBytes;
  Envelope envelope;
  Incoming first{&received, sizeof(received), Type::kUint8, data.source, data.tag, data.status, &envelope, true};
  // The sender may have other data than this rank expects. So there is room for the largest first message.
  const std::array<MemoryRange, 3> places{{{&received.header, sizeof(MessageHeader)},
                                           {data.data, static_cast<int64_t>(nbytes)},
                                           {received.data + nbytes, static_cast<int64_t>(kEnclosedBytes - nbytes)}}};
  received.header.place = DataPlace::kNone;
  PYCOLLECTIVE_RETURN_IF_FAILED(in_place ? mpi.RecvInPlaces(channel, first, places) : mpi.Recv(channel, first));
  data.source = envelope.source;  // the data have the header's source, even if the program receives from any rank
  if (!received.header.exists()) return WithoutHeader("MPI_Recv", data.source);
  const bool is_enclosed = received.header.place == DataPlace::kEnclosed;
  if (AreAlike(expected.post, received.header.call.post)) {
    if (!is_enclosed) {
      PYCOLLECTIVE_RETURN_IF_FAILED(
          mpi.Recv(ChannelOfData(channel), {data.data, data.count, data.type, data.source, received.header.data_tag}));
    }
    if (is_enclosed && !in_place && nbytes > 0) PYCOLLECTIVE_RETURN_IF_FAILED(MemoryOf(channel).Copy(data.data, received.data, nbytes));
    return data.status != nullptr ? mpi.SetReceived(data) : Outcome{};
  }
  if (!is_enclosed) PYCOLLECTIVE_RETURN_IF_FAILED(Drop(mpi, channel, received.header, data.source));
  return Mismatch("MPI_Recv", expected.post, received.header.call, data.source);
}

Outcome Sendrecv(const Library& mpi, const Channel& channel, const SentMessage& sent, const ExpectedMessage& expected) {
  if (check < Check::kEvery) return mpi.Sendrecv(channel, sent.data, expected.data);
  // A message that has begun must be waited for until MPI has read it, so the tag of the receive is checked before.
  PYCOLLECTIVE_RETURN_IF_FAILED(mpi.CheckTag(channel, expected.data.tag));
  MessageMemory* const memory = MessageMemory::OfThisThread();
  if (memory == nullptr) return NoMemory();
  std::vector<int64_t> started;
  started.reserve(2);
  const auto start = [&](const Channel& on, const Outgoing& message) {
    int64_t handle = 0;
    const Outcome outcome = mpi.Isend(on, message, &handle);
    if (outcome.ok()) started.push_back(handle);
    return outcome;
  };
  Outcome outcome = start(channel, FirstMessage(mpi, channel, sent, &memory->sent));
  const MessageHeader& header = memory->sent.header;
  if (outcome.ok() && header.place == DataPlace::kNextMessage) outcome = start(ChannelOfData(channel), DataMessage(sent, header));
  try {
    if (outcome.ok()) outcome = Recv(mpi, channel, expected);
  } catch (const std::bad_alloc& error) {  // MPI still reads the messages
    outcome = OutcomeOfException(error);
  }
  const Outcome gone = mpi.WaitAll(&started);
  return outcome.ok() ? gone : outcome;
}

// Messages under way --------------------------------------------------------------------------------------------

namespace {

constexpr size_t kHeaderBytes = sizeof(MessageHeader);
// Smaller messages have left with their start. The least limit known is that of Open MPI between ranks of one host: 4 KiB with its
// own header.
constexpr size_t kLeastBytesOfProgress = 3 << 10;
// Started requests that MPI may keep waiting for a rank that comes late. MPI moves some 64 KiB in a step.
constexpr int64_t kShortestSleepNs = 10'000, kLongestSleepNs = 50'000;

struct Numbered {
  std::mutex mutex;
  std::condition_variable added;
  std::unordered_map<int64_t, std::shared_ptr<StartedMessages>> all;
  std::vector<std::weak_ptr<StartedMessages>> in_progress;  // for the thread
  int64_t last = 0;
  bool has_thread = false;
};
Numbered& numbered = *new Numbered;  // never destroyed: the thread outlives main

constexpr int64_t kNumbers = 1 << 24;  // that a float32 holds

// Lets MPI make progress with the messages under way, and sleeps while there are none.
[[noreturn]] void MakeProgress() {
  pthread_setname_np(pthread_self(), "pc-progress");
  prctl(PR_SET_TIMERSLACK, 1'000);  // nanoseconds
  for (int64_t since = NowNs();;) {
    std::vector<std::weak_ptr<StartedMessages>> own;
    {
      std::unique_lock<std::mutex> lock(numbered.mutex);
      if (numbered.in_progress.empty()) {
        numbered.added.wait(lock, [] { return !numbered.in_progress.empty(); });
        since = NowNs();
      }
      own = numbered.in_progress;
    }
    const auto is_done = [](const std::weak_ptr<StartedMessages>& each) {
      const std::shared_ptr<StartedMessages> started = each.lock();
      return started == nullptr || !started->Progress(*library);
    };
    std::vector<std::weak_ptr<StartedMessages>> done;
    std::copy_if(own.begin(), own.end(), std::back_inserter(done), is_done);
    if (!done.empty()) {
      const std::lock_guard<std::mutex> lock(numbered.mutex);
      const auto is_one_of_them = [&](const std::weak_ptr<StartedMessages>& each) {
        return std::any_of(done.begin(), done.end(), [&](const auto& ended) { return !ended.owner_before(each) && !each.owner_before(ended); });
      };
      auto& all = numbered.in_progress;
      all.erase(std::remove_if(all.begin(), all.end(), is_one_of_them), all.end());
      since = NowNs();
      continue;
    }
    const int64_t waited = NowNs() - since;
    std::this_thread::sleep_for(std::chrono::nanoseconds(std::clamp(waited / 64, kShortestSleepNs, kLongestSleepNs)));
  }
}

}  // namespace

StartedMessages::StartedMessages(bool sends, const SentMessage& sent, bool receives, const ExpectedMessage& expected)
    : sends_(sends), receives_(receives), sent_(sent), expected_(expected) {}

Outcome StartedMessages::StartSend(const Library& mpi, const Channel& channel, const Outgoing& out) {
  MessageUnderWay message;
  PYCOLLECTIVE_RETURN_IF_FAILED(mpi.Isend(channel, out, &message.handle));
  under_way_.push_back(message);
  return {};
}

Outcome StartedMessages::StartRecv(const Library& mpi, const Channel& channel, const Incoming& in) {
  MessageUnderWay message;
  PYCOLLECTIVE_RETURN_IF_FAILED(mpi.Irecv(channel, in, &message.handle));
  message.is_received = true;
  message.incoming = in;
  under_way_.push_back(message);
  return {};
}

Outcome StartedMessages::Start(const Library& mpi, const Channel& channel, const void* data) {
  PYCOLLECTIVE_RETURN_IF_FAILED(mpi.CheckTag(channel, sent_.data.tag));
  PYCOLLECTIVE_RETURN_IF_FAILED(mpi.CheckTag(channel, expected_.data.tag));
  const bool has_headers = check >= Check::kEvery;
  Channel on_host = channel;  // the data are in memory of this library
  on_host.memory = nullptr;
  const size_t header = has_headers ? kHeaderBytes : 0;
  // All memory comes first: MPI must not be left with messages whose memory is freed by an exception.
  under_way_.reserve(4);
  const size_t bytes_in = receives_ ? Bytes(expected_.data.count, expected_.data.type) : 0;
  const size_t bytes_out = sends_ ? Bytes(sent_.data.count, sent_.data.type) : 0;
  // Room for the largest first message, as in Recv.
  if (receives_) incoming_.reset(new char[header + std::max(bytes_in, has_headers ? kEnclosedBytes : 0)]);
  if (sends_) outgoing_.reset(new char[header + bytes_out]);
  const std::lock_guard<std::mutex> lock(mutex_);
  data_channel_ = ChannelOfData(on_host);
  // Receives go first, so that what this rank sends to itself, or gets at once, finds its place.
  if (receives_) {
    Incoming& in = expected_.data;
    in.data = incoming_.get() + header;
    Incoming first = in;
    if (has_headers) {
      std::memset(incoming_.get(), 0, header);
      first = {incoming_.get(), static_cast<int64_t>(header + kEnclosedBytes), Type::kUint8, in.source, in.tag};
      first.may_be_shorter = true;
    }
    PYCOLLECTIVE_RETURN_IF_FAILED(StartRecv(mpi, on_host, first));
    awaits_header_ = has_headers;
  }
  if (sends_) {
    char* const own = outgoing_.get() + header;
    if (bytes_out > 0) std::memcpy(own, data, bytes_out);
    sent_.data.data = own;
    if (!has_headers) return StartSend(mpi, on_host, sent_.data);
    const bool encloses = bytes_out <= MostEnclosed(channel);
    const MessageHeader first = HeaderOf(mpi, sent_, encloses);
    std::memcpy(outgoing_.get(), &first, header);
    const auto size = static_cast<int64_t>(header + (encloses ? bytes_out : 0));
    PYCOLLECTIVE_RETURN_IF_FAILED(StartSend(mpi, on_host, {outgoing_.get(), size, Type::kUint8, sent_.data.dest, sent_.data.tag}));
    if (!encloses) PYCOLLECTIVE_RETURN_IF_FAILED(StartSend(mpi, data_channel_, DataMessage(sent_, first)));
  }
  return {};
}

Outcome StartedMessages::Wait(const Library& mpi, const void** arrived) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (receives_ && !failed_.ok() && !under_way_.empty()) mpi.Cancel(&under_way_.front());  // if it has not come
  // MPI reads and writes the memory until all have ended, also after an error. The header adds the receive of its data.
  for (size_t i = 0; i < under_way_.size(); ++i) Finish(mpi, i, true);
  if (receives_) *arrived = expected_.data.data;
  return failed_;
}

void StartedMessages::Finish(const Library& mpi, size_t i, bool waits) {
  Outcome outcome = mpi.Finish(&under_way_[i], waits);
  if (i == 0 && awaits_header_ && under_way_[0].is_done) {
    awaits_header_ = false;
    if (outcome.ok()) outcome = ReceiveData(mpi);
  }
  if (failed_.ok()) failed_ = outcome;
}

Outcome StartedMessages::ReceiveData(const Library& mpi) {
  MessageHeader header;
  std::memcpy(&header, incoming_.get(), kHeaderBytes);
  Incoming data = expected_.data;
  if (!header.exists()) return WithoutHeader("MPI_Irecv", data.source);
  const bool is_alike = AreAlike(expected_.post, header.call.post);
  if (header.place == DataPlace::kNextMessage) {
    data.tag = header.data_tag;
    if (!is_alike) {  // its sender waits until it is received
      data.count = header.count;
      data.type = static_cast<Type>(header.type);
      other_.reset(new (std::nothrow) char[Bytes(data.count, data.type)]);
      if (other_ == nullptr) return NoMemory();
      data.data = other_.get();
    }
    PYCOLLECTIVE_RETURN_IF_FAILED(StartRecv(mpi, data_channel_, data));
  }
  return is_alike ? Outcome{} : Mismatch("MPI_Irecv", expected_.post, header.call, data.source);
}

bool StartedMessages::Progress(const Library& mpi) {
  const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock()) return false;  // somebody waits for them
  bool is_done = true;
  for (size_t i = 0; i < under_way_.size(); ++i) {
    Finish(mpi, i, false);
    is_done = is_done && under_way_[i].is_done;
  }
  return !is_done;
}

std::string StartedMessages::Abandon(const Library* mpi) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (MessageUnderWay& message : under_way_) {
    if (mpi != nullptr && message.is_received) mpi->Cancel(&message);
  }
  under_way_.clear();  // so no thread calls MPI for them any more
  std::string text;
  if (sends_) text = DescribeMessage(sent_.post, SiteText(sent_.post.site)) + " to rank " + std::to_string(sent_.data.dest);
  if (receives_) {
    text += (sends_ ? " and of " : "") + DescribeMessage(expected_.post, SiteText(expected_.post.site)) + " from rank " +
            std::to_string(expected_.data.source);
  }
  return text;
}

int64_t AddStartedMessages(const std::shared_ptr<StartedMessages>& started) {
  const std::lock_guard<std::mutex> lock(numbered.mutex);
  do {
    numbered.last = numbered.last % (kNumbers - 1) + 1;
  } while (numbered.all.count(numbered.last) != 0);
  numbered.all.emplace(numbered.last, started);
  return numbered.last;
}

void LetProgress(const std::shared_ptr<StartedMessages>& started) {
  const auto nbytes = [](bool has, int64_t count, Type type) { return has ? Bytes(count, type) : 0; };
  const size_t most = std::max(nbytes(started->sends(), started->sent().data.count, started->sent().data.type),
                               nbytes(started->receives(), started->expected().data.count, started->expected().data.type));
  if (most <= kLeastBytesOfProgress) return;
  const std::lock_guard<std::mutex> lock(numbered.mutex);
  if (!numbered.has_thread) {
    try {
      std::thread(MakeProgress).detach();
      numbered.has_thread = true;
    } catch (const std::system_error&) {  // the messages make progress while somebody waits for them
    }
  }
  numbered.in_progress.push_back(started);
  numbered.added.notify_one();
}

void EndStartedMessages(const Library* mpi, int64_t comm) {
  std::vector<std::shared_ptr<StartedMessages>> ended;
  {
    const std::lock_guard<std::mutex> lock(numbered.mutex);
    for (auto each = numbered.all.begin(); each != numbered.all.end();) {
      const bool is_on = each->second->IsOn(comm);
      if (is_on) ended.push_back(each->second);
      each = is_on && mpi == nullptr ? numbered.all.erase(each) : std::next(each);
    }
  }
  for (const auto& started : ended) started->Abandon(mpi);
  static auto& kept = *new std::vector<std::shared_ptr<StartedMessages>>;  // MPI may read and write their memory
  kept.insert(kept.end(), ended.begin(), ended.end());
}

std::shared_ptr<StartedMessages> FindStartedMessages(int64_t number) {
  const std::lock_guard<std::mutex> lock(numbered.mutex);
  const auto found = numbered.all.find(number);
  return found == numbered.all.end() ? nullptr : found->second;
}

std::shared_ptr<StartedMessages> TakeStartedMessages(int64_t number) {
  const std::lock_guard<std::mutex> lock(numbered.mutex);
  const auto found = numbered.all.find(number);
  if (found == numbered.all.end()) return nullptr;
  const std::shared_ptr<StartedMessages> started = std::move(found->second);
  numbered.all.erase(found);
  return started;
}

}  // namespace pycollective

// Ends the messages that no program has waited for, so that MPI can end, and returns what they were, a line for each.
PYCOLLECTIVE_EXPORT const char* pycollective_abandon_messages() {
  static auto& text = *new std::string;  // it is read when the library's end may have begun
  text.clear();
  std::unordered_map<int64_t, std::shared_ptr<pycollective::StartedMessages>> all;
  {
    const std::lock_guard<std::mutex> lock(pycollective::numbered.mutex);
    all.swap(pycollective::numbered.all);
    pycollective::numbered.in_progress.clear();
  }
  for (const auto& [number, started] : all) text += started->Abandon(pycollective::library) + "\n";
  static auto& kept = *new std::vector<decltype(all)>;  // MPI may read the data of sent messages until it ends
  kept.push_back(std::move(all));
  return text.c_str();
}

// Describes a message of a program, from its bytes: "float32[3] at train.py:12 (step)"; "" for bytes without a header.
PYCOLLECTIVE_EXPORT const char* pycollective_message_header_text(const char* bytes, int64_t nbytes) {
  static thread_local std::string text;
  text.clear();
  if (nbytes < int64_t{sizeof(pycollective::MessageHeader)}) return text.c_str();
  pycollective::MessageHeader header;
  std::memcpy(&header, bytes, sizeof header);
  if (header.exists()) {
    header.call.line[pycollective::kLineBytes - 1] = 0;
    text = pycollective::DescribeMessage(header.call.post, header.call.line);
  }
  return text.c_str();
}

namespace {
const pycollective::Listed listed{PYCOLLECTIVE_TYPED(message_header_text), PYCOLLECTIVE_TYPED(abandon_messages)};
}  // namespace
