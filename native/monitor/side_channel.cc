// Implementation of side_channel.h: the asking side and the serving side. side_connection.h has the protocol.

#include "monitor/side_channel.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
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

// One request of Serve.
class Serving {
 public:
  Serving(int fd, int64_t rank, const std::string& secret)
      : connection_(fd), rank_(rank), secret_(secret), begun_ns_(NowNs()), until_ns_(begun_ns_ + kProofNs) {}

  bool over() const { return !connection_.is_open(); }
  bool is_proven() const { return is_proven_; }
  int64_t begun_ns() const { return begun_ns_; }
  pollfd waits_for() const { return connection_.waits_for(); }

  // The socket is ready, or time has passed. keep(fd, farewell) takes a connection of kStay.
  template <class Keep>
  void Step(bool ready, const SideChannel::Answer& answer, const Keep& keep) {
    // The time counts for a side that is slow, not for a request that lay here while another one was answered: first it is
    // read. Until the proof one read gets all that may come.
    if (ready) {
      if (!connection_.Step()) return connection_.Close();
      if (!connection_.is_sending()) Go(answer, keep);
    }
    if (!(ready && is_proven_) && NowNs() > until_ns_) connection_.Close();
  }

 private:
  enum State { kGreeted, kAsked, kAnswered };

  template <class Keep>
  void Go(const SideChannel::Answer& answer, const Keep& keep) {
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
      const std::string reply = kind_ == SideChannel::kStay ? "" : answer(kind_, text);
      until_ns_ = NowNs() + kRequestNs;
      state_ = kAnswered;
      if (!connection_.Send(Frame(of_reply_, kind_, reply))) return connection_.Close();
      if (!connection_.is_sending()) Go(answer, keep);
    } else {
      if (kind_ == SideChannel::kStay) keep(connection_.Release(), farewell_);
      connection_.Close();
    }
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
          std::make_unique<Asking>(addresses_[static_cast<size_t>(rank)], rank, kind, text, secret_, &replies[begun]));
    }
    if (under_way.empty() && begun == ranks.size()) break;
    std::vector<pollfd> sockets;
    for (const auto& one : under_way) sockets.push_back(one->waits_for());
    poll(sockets.data(), sockets.size(), 50);
    for (size_t i = 0; i < sockets.size(); ++i) under_way[i]->Step(sockets[i].revents != 0);
  }
  return replies;
}

void SideChannel::Serve(const std::vector<int>& listening, const Answer& answer,
                        const std::function<bool()>& is_over) const {
  const auto keep = [this](int fd, const std::string& farewell) { Keep(fd, farewell); };
  Servings servings;
  int64_t accept_from_ns = 0;
  while (!is_over()) {
    // A connection waits to be accepted while there is no room, no descriptor or no memory for it.
    const bool accepts = NowNs() >= accept_from_ns && !servings.IsFull();
    std::vector<pollfd> sockets;
    for (const Serving& one : servings.all) sockets.push_back(one.waits_for());
    for (const int fd : listening) sockets.push_back({accepts ? fd : -1, POLLIN, 0});
    poll(sockets.data(), sockets.size(), accepts ? kLookMs : kLookSoonMs);
    size_t at = 0;
    for (Serving& one : servings.all) one.Step(sockets[at++].revents != 0, answer, keep);
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

int64_t Reader::Number() {
  if (text_.size() - at_ < sizeof(int64_t)) {
    ok_ = false;
    at_ = text_.size();
    return 0;
  }
  uint64_t number = 0;
  for (int byte = 0; byte < 8; ++byte) number |= uint64_t{static_cast<unsigned char>(text_[at_++])} << (8 * byte);
  return static_cast<int64_t>(number);
}

std::string Reader::Text() {
  const int64_t length = Number();
  if (length < 0 || static_cast<uint64_t>(length) > text_.size() - at_) {
    ok_ = false;
    at_ = text_.size();
    return "";
  }
  at_ += static_cast<size_t>(length);
  return text_.substr(at_ - static_cast<size_t>(length), static_cast<size_t>(length));
}

}  // namespace pycollective
