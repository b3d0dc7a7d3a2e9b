// Implementation of side_connection.h.

#include "monitor/side_connection.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <utility>

#include "monitor/hmac.h"

namespace pycollective {
namespace {

constexpr size_t kHeadBytes = 2 * sizeof(int64_t);
constexpr int64_t kMostBytes = int64_t{16} << 20;  // of one text

}  // namespace

socklen_t ParseAddress(const Address& address, sockaddr_storage* parsed) {
  std::memset(parsed, 0, sizeof(*parsed));
  auto* const v4 = reinterpret_cast<sockaddr_in*>(parsed);
  auto* const v6 = reinterpret_cast<sockaddr_in6*>(parsed);
  auto* const local = reinterpret_cast<sockaddr_un*>(parsed);
  if (!address.host.empty() && address.host[0] == '@') {
    if (address.host.size() > sizeof(local->sun_path)) return 0;
    local->sun_family = AF_UNIX;
    std::memcpy(local->sun_path + 1, address.host.data() + 1, address.host.size() - 1);  // after a zero
    return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + address.host.size());
  }
  if (inet_pton(AF_INET, address.host.c_str(), &v4->sin_addr) == 1) {
    v4->sin_family = AF_INET;
    v4->sin_port = htons(static_cast<uint16_t>(address.port));
    return sizeof(*v4);
  }
  if (inet_pton(AF_INET6, address.host.c_str(), &v6->sin6_addr) == 1) {
    v6->sin6_family = AF_INET6;
    v6->sin6_port = htons(static_cast<uint16_t>(address.port));
    return sizeof(*v6);
  }
  return 0;
}

bool MayBeOfThisUser(int fd) {
  int domain = 0;
  socklen_t size = sizeof(domain);
  if (getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &size) != 0) return false;
  if (domain != AF_UNIX) return true;
  ucred peer{};
  size = sizeof(peer);
  return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 && peer.uid == geteuid();
}

std::string Keys::Key(const std::string& role) const { return HmacSha256(secret_, Writer().Put(role).text() + about_); }

std::string Frame(const std::string& key, int64_t kind, const std::string& text) {
  const std::string head = Writer().Put(kind).Put(static_cast<int64_t>(text.size())).text();
  const std::string all = head + HmacSha256(key, head) + text;
  return all + HmacSha256(key, all);
}

Came TakeFrame(const std::string& key, const std::string& received, int64_t* kind, std::string* text) {
  if (received.size() < kHeadBytes + kMacBytes) return Came::kPart;
  const std::string head = received.substr(0, kHeadBytes);
  if (!SameMac(HmacSha256(key, head), received.substr(kHeadBytes, kMacBytes))) return Came::kForged;
  Reader reader(head);
  *kind = reader.Number();
  const int64_t length = reader.Number();
  if (length < 0 || length > kMostBytes) return Came::kForged;
  const size_t before_mac = kHeadBytes + kMacBytes + static_cast<size_t>(length);
  if (received.size() < before_mac + kMacBytes) return Came::kHead;
  if (received.size() > before_mac + kMacBytes) return Came::kForged;
  if (!SameMac(HmacSha256(key, received.substr(0, before_mac)), received.substr(before_mac))) return Came::kForged;
  *text = received.substr(kHeadBytes + kMacBytes, static_cast<size_t>(length));
  return Came::kAll;
}

void Connection::Open(int fd) {
  Close();
  fd_ = fd;
}

void Connection::Close() {
  if (fd_ >= 0) close(fd_);
  Release();
}

int Connection::Release() {
  sends_.clear();
  received_.clear();
  sent_ = 0;
  return std::exchange(fd_, -1);
}

bool Connection::Send(std::string text, size_t most) {
  sends_ = std::move(text);
  most_ = most;
  sent_ = 0;
  received_.clear();
  return Step();
}

bool Connection::Step() {
  if (is_sending()) {
    const ssize_t n = send(fd_, sends_.data() + sent_, sends_.size() - sent_, MSG_NOSIGNAL);
    if (n > 0) sent_ += static_cast<size_t>(n);
    return n >= 0 || errno == EAGAIN || errno == EINTR;
  }
  char part[1 << 16];
  const ssize_t n = recv(fd_, part, std::min(sizeof(part), most_ - received_.size()), 0);
  if (n < 0) return errno == EAGAIN || errno == EINTR;
  received_.append(part, static_cast<size_t>(n));
  return n > 0;
}

}  // namespace pycollective
