// Implementation of side_channel.h: the asking side and the serving side. side_connection.h has the protocol.

#include "monitor/side_channel.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <exception>
#include <future>
#include <list>
#include <memory>
#include <utility>

#include "base/clock.h"
#include "monitor/hmac.h"
#include "monitor/side_connection.h"

namespace pycollective {
namespace {

constexpr size_t kAtOnce = 128;                    // connections of one Ask
constexpr int64_t kConnectNs = 1000000000;         // for one address
constexpr int64_t kAgainNs = 20000000;             // until it tries again where too many wait to be accepted
constexpr size_t kMostUnproven = 256;              // connections that Serve has at a time, of others than this job's
constexpr int64_t kProofNs = 2000000000;           // for a proof to arrive
constexpr int64_t kRoomNs = 100000000;             // for a proof to arrive if others wait to be accepted
constexpr int64_t kRequestNs = 10000000000;        // for a request to arrive after its proof, and for its reply to leave
constexpr int kLookMs = 200, kLookSoonMs = 20;     // how often Serve looks around

// One request of Ask.
class Asking {
 public:
  Asking(const std::vector<Address>& addresses, int64_t rank, int64_t kind, const std::string& text,
         const std::string& secret, Reply* reply)
      : addresses_(addresses), rank_(rank), kind_(kind), text_(text), secret_(secret), reply_(reply) {
    TryNext();
  }

  bool over() const { return !connection_.is_open() && again_ns_ == 0; }
  pollfd waits_for() const {
    return state_ == kConnecting ? pollfd{connection_.fd(), POLLOUT, 0} : connection_.waits_for();
  }

  // The socket is ready, or time has passed.
  void Step(bool ready) {
    const int64_t now = NowNs();
    if (again_ns_ != 0) {
      if (now < again_ns_) return;
      --tried_;
      return TryNext();
    }
    if (!ready) {
      if (state_ == kConnecting && now > connect_until_ns_) TryNext();
      return;
    }
    if (state_ == kConnecting) return Greet();
    if (!connection_.Step()) return TryNext();
    if (!connection_.is_sending()) Read();
  }

 private:
  enum State { kConnecting, kGreets, kAsks };

  // Goes on to the next address.
  void TryNext() {
    connection_.Close();
    again_ns_ = 0;
    state_ = kConnecting;
    while (tried_ < addresses_.size()) {
      sockaddr_storage to;
      const socklen_t size = ParseAddress(addresses_[tried_++], &to);
      if (size == 0) continue;
      connection_.Open(socket(to.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
      if (!connection_.is_open()) continue;
      connect_until_ns_ = NowNs() + kConnectNs;
      if (connect(connection_.fd(), reinterpret_cast<sockaddr*>(&to), size) == 0 || errno == EINPROGRESS) return;
      const int error = errno;
      connection_.Close();
      if (error == EAGAIN && to.ss_family == AF_UNIX) {  // the process is there, and too many wait for it
        reply_->accepted = true;
        again_ns_ = NowNs() + kAgainNs;
        return;
      }
      reply_->refused = reply_->refused || error == ECONNREFUSED;
    }
  }

  void Greet() {
    int error = 0;
    socklen_t size = sizeof(error);
    getsockopt(connection_.fd(), SOL_SOCKET, SO_ERROR, &error, &size);
    reply_->refused = reply_->refused || error == ECONNREFUSED;
    if (error != 0 || !MayBeOfThisUser(connection_.fd())) return TryNext();
    reply_->accepted = true;
    state_ = kGreets;
    nonce_ = RandomBytes(kNonceBytes);
    if (nonce_.empty() || !connection_.Send(nonce_)) TryNext();
  }

  void Read() {
    const std::string& received = connection_.received();
    if (state_ == kGreets) {
      if (received.size() < kNonceBytes + kMacBytes) return;
      const Keys keys(secret_, rank_, nonce_, received.substr(0, kNonceBytes));
      if (!SameMac(keys.Answers(), received.substr(kNonceBytes))) return TryNext();
      of_reply_ = keys.Replies();
      farewell_ = keys.Farewell();
      state_ = kAsks;
      // A rank that has left says its farewell right after its reply. HasDied reads that.
      const size_t most = kind_ == SideChannel::kStay ? kEmptyFrameBytes : SIZE_MAX;
      if (!connection_.Send(Frame(keys.Requests(), kind_, text_), most)) TryNext();
      return;
    }
    int64_t kind = 0;
    const Came came = TakeFrame(of_reply_, received, &kind, &reply_->text);
    if (came == Came::kForged) return TryNext();
    if (came != Came::kAll) return;
    reply_->came = true;
    reply_->refused = false;
    if (kind_ == SideChannel::kStay) {
      reply_->connection = connection_.Release();
      reply_->farewell = farewell_;
    }
    connection_.Close();
  }

  const std::vector<Address>& addresses_;
  const int64_t rank_;
  const int64_t kind_;
  const std::string& text_;
  const std::string& secret_;
  Reply* const reply_;
  size_t tried_ = 0;
  State state_ = kConnecting;
  int64_t connect_until_ns_ = 0;
  int64_t again_ns_ = 0;  // when it tries the same address again; 0: it does not wait for that
  Connection connection_;
  std::string nonce_, of_reply_, farewell_;
};

// Makes answers that take long, each in a thread of its own.
class LongAnswers {
 public:
  LongAnswers(const SideChannel::Answer& answer, const SideChannel::TakesLong& takes_long)
      : answer_(answer), takes_long_(takes_long), event_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {}
  ~LongAnswers() {
    if (event_ >= 0) close(event_);
  }
  LongAnswers(const LongAnswers&) = delete;
  LongAnswers& operator=(const LongAnswers&) = delete;

  bool Takes(int64_t kind, const std::string& text) const { return takes_long_ && takes_long_(kind, text); }

  struct Later {
    std::future<std::string> answer;  // not valid if no thread makes one
    std::future<void> thread;         // its destructor waits for the thread's end
  };
  Later Begin(int64_t kind, const std::string& text) {
    if (running_ >= SideChannel::kMostLong) return {};
    ++running_;
    try {
      const auto made = std::make_shared<std::promise<std::string>>();
      Later later{made->get_future(), {}};
      later.thread = std::async(std::launch::async, [this, made, kind, text] { Make(kind, text, *made); });
      return later;
    } catch (const std::exception&) {
      --running_;
      return {};
    }
  }

  // Poll this, and call Seen after it: it is readable if an answer has come since.
  pollfd waits_for() const { return {event_, POLLIN, 0}; }
  void Seen() const {
    uint64_t count;
    if (event_ >= 0 && read(event_, &count, sizeof(count)) < 0) return;  // none has come
  }

 private:
  void Make(int64_t kind, const std::string& text, std::promise<std::string>& made) {
    std::string answer;
    try {
      answer = answer_(kind, text);
    } catch (const std::exception&) {
      answer.clear();  // there is no memory, say: an empty reply lets the other side ask other ranks
    }
    --running_;
    made.set_value(std::move(answer));
    const uint64_t one = 1;  // now Serve finds the answer
    if (event_ >= 0 && write(event_, &one, sizeof(one)) < 0) return;  // the count is at its end, so Serve wakes anyway
  }

  const SideChannel::Answer& answer_;
  const SideChannel::TakesLong& takes_long_;
  const int event_;  // -1: there was no descriptor; Serve looks from time to time
  std::atomic<int> running_{0};
};

// One request of Serve.
class Serving {
 public:
  Serving(int fd, int64_t rank, const std::string& secret)
      : connection_(fd), rank_(rank), secret_(secret), begun_ns_(NowNs()), until_ns_(begun_ns_ + kProofNs) {}

  bool over() const { return !connection_.is_open(); }
  bool is_proven() const { return is_proven_; }
  int64_t begun_ns() const { return begun_ns_; }
  pollfd waits_for() const { return state_ == kAnswers ? pollfd{-1, 0, 0} : connection_.waits_for(); }

  // The socket is ready, or time has passed. keep(fd, farewell) takes a connection of kStay.
  template <class Keep>
  void Step(bool ready, const SideChannel::Answer& answer, LongAnswers* long_answers, const Keep& keep) {
    if (state_ == kAnswers) {
      if (later_.answer.wait_for(std::chrono::seconds(0)) == std::future_status::ready) SendReply(later_.answer.get(), keep);
      return;
    }
    // The time counts for a side that is slow, not for a request that lay here while another one was answered: first it is
    // read. Until the proof one read gets all that may come.
    if (ready) {
      if (!connection_.Step()) return connection_.Close();
      if (!connection_.is_sending()) Go(answer, long_answers, keep);
    }
    if (!(ready && is_proven_) && NowNs() > until_ns_) connection_.Close();
  }

 private:
  enum State { kGreeted, kAsked, kAnswers, kAnswered };

  template <class Keep>
  void Go(const SideChannel::Answer& answer, LongAnswers* long_answers, const Keep& keep) {
    const std::string& received = connection_.received();
    if (state_ == kGreeted) {
      if (received.size() < kNonceBytes) return;
      const std::string own = RandomBytes(kNonceBytes);
      if (own.empty() || received.size() > kNonceBytes) return connection_.Close();
      const Keys keys(secret_, rank_, received, own);
      of_request_ = keys.Requests();
      of_reply_ = keys.Replies();
      farewell_ = keys.Farewell();
      state_ = kAsked;
      until_ns_ = NowNs() + kProofNs;
      if (!connection_.Send(own + keys.Answers())) connection_.Close();
    } else if (state_ == kAsked) {
      std::string text;
      const Came came = TakeFrame(of_request_, received, &kind_, &text);
      if (came == Came::kForged) return connection_.Close();
      if (came != Came::kPart && !std::exchange(is_proven_, true)) until_ns_ = NowNs() + kRequestNs;
      if (came != Came::kAll) return;
      if (kind_ == SideChannel::kStay) return SendReply("", keep);
      if (!long_answers->Takes(kind_, text)) return SendReply(answer(kind_, text), keep);
      later_ = long_answers->Begin(kind_, text);
      if (!later_.answer.valid()) return SendReply("", keep);
      state_ = kAnswers;
    } else {
      Finish(keep);
    }
  }

  template <class Keep>
  void SendReply(const std::string& reply, const Keep& keep) {
    until_ns_ = NowNs() + kRequestNs;
    state_ = kAnswered;
    if (!connection_.Send(Frame(of_reply_, kind_, reply))) return connection_.Close();
    if (!connection_.is_sending()) Finish(keep);
  }

  template <class Keep>
  void Finish(const Keep& keep) {
    if (kind_ == SideChannel::kStay) keep(connection_.Release(), farewell_);
    connection_.Close();
  }

  Connection connection_;
  const int64_t rank_;
  const std::string& secret_;
  const int64_t begun_ns_;
  int64_t until_ns_;
  State state_ = kGreeted;
  bool is_proven_ = false;
  int64_t kind_ = 0;
  std::string of_request_, of_reply_, farewell_;
  LongAnswers::Later later_;  // in kAnswers
};

// The connections of Serve.
class Servings {
 public:
  std::list<Serving> all;  // in the order in which they came

  bool IsFull() const {
    const auto unproven = [](const Serving& one) { return !one.is_proven(); };
    return static_cast<size_t>(std::count_if(all.begin(), all.end(), unproven)) >= kMostUnproven;
  }
  // Sends the oldest one away that has had time for a proof and brought none: others wait.
  void MakeRoom() {
    const auto is_late = [now = NowNs()](const Serving& one) { return !one.is_proven() && now - one.begun_ns() > kRoomNs; };
    const auto late = std::find_if(all.begin(), all.end(), is_late);
    if (late != all.end()) all.erase(late);
  }
};

}  // namespace

bool ListenOn(Address* address, int* fd) {
  sockaddr_storage own;
  const socklen_t size = ParseAddress(*address, &own);
  if (size == 0) return false;
  Connection listening(socket(own.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  sockaddr_storage bound;
  socklen_t bound_size = sizeof(bound);
  if (!listening.is_open() || bind(listening.fd(), reinterpret_cast<sockaddr*>(&own), size) != 0 ||
      listen(listening.fd(), SOMAXCONN) != 0 ||
      getsockname(listening.fd(), reinterpret_cast<sockaddr*>(&bound), &bound_size) != 0) {
    return false;
  }
  if (bound.ss_family == AF_INET) address->port = ntohs(reinterpret_cast<sockaddr_in*>(&bound)->sin_port);
  if (bound.ss_family == AF_INET6) address->port = ntohs(reinterpret_cast<sockaddr_in6*>(&bound)->sin6_port);
  *fd = listening.Release();
  return true;
}

SideChannel::SideChannel(int rank, std::vector<std::vector<Address>> addresses, std::string secret)
    : rank_(rank), addresses_(std::move(addresses)), secret_(std::move(secret)) {}

std::vector<Reply> SideChannel::Ask(const std::vector<int>& ranks, int64_t kind, const std::string& text,
                                    int64_t limit_ns) const {
  return Ask(ranks, kind, std::vector<std::string>(ranks.size(), text), limit_ns);
}

std::vector<Reply> SideChannel::Ask(const std::vector<int>& ranks, int64_t kind, const std::vector<std::string>& texts,
                                    int64_t limit_ns) const {
  std::vector<Reply> replies(ranks.size());
  std::vector<std::unique_ptr<Asking>> under_way;
  const int64_t until_ns = NowNs() + limit_ns;
  size_t begun = 0;
  while (NowNs() < until_ns) {
    under_way.erase(std::remove_if(under_way.begin(), under_way.end(), [](const auto& one) { return one->over(); }),
                    under_way.end());
    for (; begun < ranks.size() && under_way.size() < kAtOnce; ++begun) {
      const int rank = ranks[begun];
      under_way.push_back(
          std::make_unique<Asking>(addresses_[static_cast<size_t>(rank)], rank, kind, texts[begun], secret_, &replies[begun]));
    }
    if (under_way.empty() && begun == ranks.size()) break;
    std::vector<pollfd> sockets;
    for (const auto& one : under_way) sockets.push_back(one->waits_for());
    poll(sockets.data(), sockets.size(), 50);
    for (size_t i = 0; i < sockets.size(); ++i) under_way[i]->Step(sockets[i].revents != 0);
  }
  return replies;
}

void SideChannel::Serve(const std::vector<int>& listening, const Answer& answer, const std::function<bool()>& is_over,
                        const TakesLong& takes_long) const {
  const auto keep = [this](int fd, const std::string& farewell) { Keep(fd, farewell); };
  LongAnswers long_answers(answer, takes_long);  // it outlives the servings, which wait for their threads
  Servings servings;
  int64_t accept_from_ns = 0;
  while (!is_over()) {
    // A connection waits to be accepted while there is no room, no descriptor or no memory for it.
    const bool accepts = NowNs() >= accept_from_ns && !servings.IsFull();
    std::vector<pollfd> sockets;
    for (const Serving& one : servings.all) sockets.push_back(one.waits_for());
    for (const int fd : listening) sockets.push_back({accepts ? fd : -1, POLLIN, 0});
    sockets.push_back(long_answers.waits_for());
    poll(sockets.data(), sockets.size(), accepts ? kLookMs : kLookSoonMs);
    sockets.pop_back();
    long_answers.Seen();
    size_t at = 0;
    for (Serving& one : servings.all) one.Step(sockets[at++].revents != 0, answer, &long_answers, keep);
    servings.all.remove_if([](const Serving& one) { return one.over(); });
    if (servings.IsFull()) servings.MakeRoom();
    for (; at < sockets.size(); ++at) {
      while (sockets[at].revents != 0 && !servings.IsFull()) {
        const int fd = accept4(sockets[at].fd, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (fd < 0 && (errno == EINTR || errno == ECONNABORTED)) continue;
        if (fd < 0 && errno == EAGAIN) break;
        if (fd < 0) {
          servings.MakeRoom();
          accept_from_ns = NowNs() + kRoomNs;
          break;
        }
        if (MayBeOfThisUser(fd)) {
          servings.all.emplace_back(fd, rank_, secret_);
        } else {
          close(fd);
        }
      }
    }
  }
}

void SideChannel::Keep(int fd, const std::string& farewell) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!has_left_) return kept_.push_back({fd, farewell});
  send(fd, farewell.data(), farewell.size(), MSG_NOSIGNAL);
  close(fd);
}

bool SideChannel::HasDied(int connection, const std::string& farewell) {
  std::string word;
  while (word.size() < farewell.size()) {
    pollfd socket{connection, POLLIN, 0};
    poll(&socket, 1, -1);
    char part[kMacBytes];
    const ssize_t n = recv(connection, part, farewell.size() - word.size(), 0);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) continue;
    if (n <= 0) break;
    word.append(part, static_cast<size_t>(n));
  }
  return !SameMac(farewell, word);
}

void SideChannel::Leave() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  has_left_ = true;
  for (const Kept& kept : kept_) {  // nothing else was sent on it, so there is room for it
    send(kept.fd, kept.farewell.data(), kept.farewell.size(), MSG_NOSIGNAL);
    close(kept.fd);
  }
  kept_.clear();
}

// Texts ----------------------------------------------------------------------------------------------------------

Writer& Writer::Put(int64_t number) {
  for (int byte = 0; byte < 8; ++byte) text_ += static_cast<char>((static_cast<uint64_t>(number) >> (8 * byte)) & 255);
  return *this;
}

Writer& Writer::Put(const std::string& text) {
  Put(static_cast<int64_t>(text.size()));
  text_ += text;
  return *this;
}

Writer& Writer::Append(const std::string& written) {
  text_ += written;
  return *this;
}

void Reader::Refuse() {
  ok_ = false;
  at_ = text_.size();
}

int64_t Reader::Number() {
  if (text_.size() - at_ < sizeof(int64_t)) {
    Refuse();
    return 0;
  }
  uint64_t number = 0;
  for (int byte = 0; byte < 8; ++byte) number |= uint64_t{static_cast<unsigned char>(text_[at_++])} << (8 * byte);
  return static_cast<int64_t>(number);
}

std::string Reader::Rest() {
  const size_t begin = std::exchange(at_, text_.size());
  return text_.substr(begin);
}

std::string Reader::Text() {
  const int64_t length = Number();
  if (length < 0 || static_cast<uint64_t>(length) > text_.size() - at_) {
    Refuse();
    return "";
  }
  at_ += static_cast<size_t>(length);
  return text_.substr(at_ - static_cast<size_t>(length), static_cast<size_t>(length));
}

}  // namespace pycollective
