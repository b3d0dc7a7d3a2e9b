// Implementation of side_channel.h.
//
// A request: the secret of requests, then kind, rank of the receiver and length, then the text. A reply: the secret of
// replies, then rank of the sender and length, then the text. Another host may have the same address, in a network of
// its own: the secret and the rank show that.

#include "side_channel.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <utility>

#include "recorder.h"

namespace pycollective {
namespace {

constexpr size_t kAtOnce = 128;                    // connections of one Ask
constexpr int64_t kConnectNs = 1000000000;         // for one address
constexpr int64_t kMostBytes = int64_t{16} << 20;  // of one text
constexpr int64_t kServeSeconds = 1;               // for one request to arrive
constexpr char kLeaves[] = "-";                    // the last byte on a connection of kStay

// A numeric address as sockets take it. Returns its length, 0 if it is none.
socklen_t ParseAddress(const std::string& host, int port, sockaddr_storage* parsed) {
  std::memset(parsed, 0, sizeof(*parsed));
  auto* const v4 = reinterpret_cast<sockaddr_in*>(parsed);
  auto* const v6 = reinterpret_cast<sockaddr_in6*>(parsed);
  if (inet_pton(AF_INET, host.c_str(), &v4->sin_addr) == 1) {
    v4->sin_family = AF_INET;
    v4->sin_port = htons(static_cast<uint16_t>(port));
    return sizeof(*v4);
  }
  if (inet_pton(AF_INET6, host.c_str(), &v6->sin6_addr) == 1) {
    v6->sin6_family = AF_INET6;
    v6->sin6_port = htons(static_cast<uint16_t>(port));
    return sizeof(*v6);
  }
  return 0;
}

// Equal, in a time that does not tell how far.
bool SameSecret(const std::string& expected, const char* got) {
  unsigned char difference = 0;
  for (size_t i = 0; i < expected.size(); ++i) difference |= static_cast<unsigned char>(expected[i] ^ got[i]);
  return difference == 0;
}

std::string Numbers(std::initializer_list<int64_t> numbers) {
  Writer writer;
  for (const int64_t number : numbers) writer.Put(number);
  return writer.text();
}

// Reads exactly `size` bytes; false if the other side ends or is too slow.
bool ReadAll(int fd, char* to, size_t size) {
  for (size_t done = 0; done < size;) {
    const ssize_t n = recv(fd, to + done, size - done, 0);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    done += static_cast<size_t>(n);
  }
  return true;
}

bool WriteAll(int fd, const std::string& text) {
  for (size_t done = 0; done < text.size();) {
    const ssize_t n = send(fd, text.data() + done, text.size() - done, MSG_NOSIGNAL);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    done += static_cast<size_t>(n);
  }
  return true;
}

// One request of Ask.
class Asking {
 public:
  Asking(const std::vector<Address>& addresses, int64_t rank, const std::string& request, bool stays,
         const std::string& secret, Reply* reply)
      : addresses_(addresses), rank_(rank), request_(request), stays_(stays), secret_(secret), reply_(reply) {
    TryNext(false);
  }
  ~Asking() { Close(); }
  Asking(const Asking&) = delete;
  Asking& operator=(const Asking&) = delete;

  bool over() const { return fd_ < 0; }
  pollfd waits_for() const { return {fd_, static_cast<short>(sent_ < request_.size() ? POLLOUT : POLLIN), 0}; }

  // The socket is ready, or time has passed.
  void Step(bool ready) {
    if (!ready) {
      if (sent_ == 0 && NowNs() > connect_until_ns_) TryNext(false);
      return;
    }
    if (sent_ < request_.size()) {
      if (sent_ == 0) {
        int error = 0;
        socklen_t size = sizeof(error);
        getsockopt(fd_, SOL_SOCKET, SO_ERROR, &error, &size);
        if (error != 0) return TryNext(error == ECONNREFUSED);
        reply_->accepted = true;
      }
      const ssize_t n = send(fd_, request_.data() + sent_, request_.size() - sent_, MSG_NOSIGNAL);
      if (n > 0) sent_ += static_cast<size_t>(n);
      if (n < 0 && errno != EAGAIN && errno != EINTR) TryNext(false);
      return;
    }
    char part[1 << 16];
    const ssize_t n = recv(fd_, part, sizeof(part), 0);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (n <= 0) return TryNext(false);
    received_.append(part, static_cast<size_t>(n));
    const size_t head = secret_.size() + 2 * sizeof(int64_t);
    if (received_.size() < head) return;
    const std::string numbers = received_.substr(secret_.size(), 2 * sizeof(int64_t));
    Reader reader(numbers);
    const int64_t from = reader.Number(), length = reader.Number();
    if (!SameSecret(secret_, received_.data()) || from != rank_ || length < 0 || length > kMostBytes) {
      return TryNext(false);
    }
    if (received_.size() < head + static_cast<size_t>(length)) return;
    reply_->came = true;
    reply_->refused = false;
    reply_->text = received_.substr(head, static_cast<size_t>(length));
    if (stays_) reply_->connection = std::exchange(fd_, -1);
    Close();
  }

 private:
  void Close() {
    if (fd_ >= 0) close(fd_);
    fd_ = -1;
  }

  // Goes on to the next address.
  void TryNext(bool refused) {
    Close();
    reply_->refused = reply_->refused || refused;
    sent_ = 0;
    received_.clear();
    while (fd_ < 0 && tried_ < addresses_.size()) {
      const Address& address = addresses_[tried_++];
      sockaddr_storage to;
      const socklen_t size = ParseAddress(address.host, address.port, &to);
      if (size == 0) continue;
      fd_ = socket(to.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
      if (fd_ < 0) continue;
      connect_until_ns_ = NowNs() + kConnectNs;
      if (connect(fd_, reinterpret_cast<sockaddr*>(&to), size) != 0 && errno != EINPROGRESS) {
        reply_->refused = reply_->refused || errno == ECONNREFUSED;
        Close();
      }
    }
  }

  const std::vector<Address>& addresses_;
  const int64_t rank_;
  const std::string request_;
  const bool stays_;
  const std::string& secret_;
  Reply* const reply_;
  size_t tried_ = 0;
  int fd_ = -1;
  int64_t connect_until_ns_ = 0;
  size_t sent_ = 0;
  std::string received_;
};

}  // namespace

int ListenOn(const std::string& host, int* fd) {
  sockaddr_storage own;
  socklen_t size = ParseAddress(host, 0, &own);
  if (size == 0) return 0;
  *fd = socket(own.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (*fd < 0) return 0;
  sockaddr_storage bound;
  socklen_t bound_size = sizeof(bound);
  if (bind(*fd, reinterpret_cast<sockaddr*>(&own), size) != 0 || listen(*fd, SOMAXCONN) != 0 ||
      getsockname(*fd, reinterpret_cast<sockaddr*>(&bound), &bound_size) != 0) {
    close(*fd);
    *fd = -1;
    return 0;
  }
  return ntohs(bound.ss_family == AF_INET ? reinterpret_cast<sockaddr_in*>(&bound)->sin_port
                                          : reinterpret_cast<sockaddr_in6*>(&bound)->sin6_port);
}

SideChannel::SideChannel(int rank, std::vector<std::vector<Address>> addresses, std::string secret)
    : rank_(rank),
      addresses_(std::move(addresses)),
      of_requests_(secret.substr(0, secret.size() / 2)),
      of_replies_(secret.substr(secret.size() / 2)) {}

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
      const std::string head = Numbers({kind, rank, static_cast<int64_t>(text.size())});
      under_way.push_back(std::make_unique<Asking>(addresses_[static_cast<size_t>(rank)], rank,
                                                   of_requests_ + head + text, kind == kStay, of_replies_,
                                                   &replies[begun]));
    }
    if (under_way.empty() && begun == ranks.size()) break;
    std::vector<pollfd> sockets;
    for (const auto& one : under_way) sockets.push_back(one->waits_for());
    poll(sockets.data(), sockets.size(), 50);
    for (size_t i = 0; i < sockets.size(); ++i) under_way[i]->Step(sockets[i].revents != 0);
  }
  return replies;
}

void SideChannel::Serve(const std::vector<int>& listening, int64_t limit_ns, const Answer& answer) const {
  std::vector<pollfd> sockets;
  for (const int fd : listening) sockets.push_back({fd, POLLIN, 0});
  if (poll(sockets.data(), sockets.size(), static_cast<int>(limit_ns / 1000000)) <= 0) return;
  for (const pollfd& socket : sockets) {
    if (socket.revents == 0) continue;
    const int fd = accept4(socket.fd, nullptr, nullptr, SOCK_CLOEXEC);
    if (fd < 0) continue;
    bool stays = false;
    const timeval patience{kServeSeconds, 0};
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof(patience));
    std::string head(of_requests_.size() + 3 * sizeof(int64_t), '\0');
    if (ReadAll(fd, head.data(), head.size()) && SameSecret(of_requests_, head.data())) {
      const std::string numbers = head.substr(of_requests_.size());
      Reader reader(numbers);
      const int64_t kind = reader.Number(), to = reader.Number(), length = reader.Number();
      if (to == rank_ && 0 <= length && length <= kMostBytes) {
        std::string text(static_cast<size_t>(length), '\0');
        if (ReadAll(fd, text.data(), text.size())) {
          stays = kind == kStay;
          const std::string reply = stays ? "" : answer(kind, text);
          WriteAll(fd, of_replies_ + Numbers({rank_, static_cast<int64_t>(reply.size())}) + reply);
        }
      }
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    if (stays && !has_left_) {
      stay_.push_back(fd);
      continue;
    }
    if (stays) WriteAll(fd, kLeaves);
    close(fd);
  }
}

bool SideChannel::HasDied(int connection) {
  pollfd socket{connection, POLLIN, 0};
  while (poll(&socket, 1, -1) < 0 && errno == EINTR) {
  }
  char word;
  const bool leaves = recv(connection, &word, 1, 0) == 1;
  close(connection);
  return !leaves;
}

void SideChannel::Leave() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  has_left_ = true;
  for (const int fd : stay_) {
    WriteAll(fd, kLeaves);
    close(fd);
  }
  stay_.clear();
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
