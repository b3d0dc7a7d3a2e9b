// A rank that serves, and connections of a rank of its job, of strangers and of those that end in the middle: exactly the
// requests are answered that carry their proof, and whatever came before, the next rank that asks gets its answer.

#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <cstdint>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "input.h"
#include "monitor/hmac.h"
#include "monitor/side_channel.h"
#include "monitor/side_connection.h"

using namespace pycollective;

namespace {

constexpr int64_t kLimitNs = 10000000000;
const std::string secret(64, 's');

using Request = std::pair<int64_t, std::string>;

std::string AnswerTo(const Request& request) { return std::to_string(request.first) + " " + request.second; }

// The rank that serves, in a thread that never ends.
class Server {
 public:
  Server() : address_{"@pycollective-fuzz-serving-" + std::to_string(getpid()), 0}, channel_(0, {{address_}}, secret) {
    int fd = -1;
    ALWAYS(ListenOn(&address_, &fd));
    channel_.Leave();  // it keeps no connection
    std::thread([this, fd] {
      channel_.Serve({fd}, [this](int64_t kind, const std::string& text) { return Answer({kind, text}); },
                     [] { return false; });
    }).detach();
  }

  const Address& address() const { return address_; }
  std::vector<Request> TakeAnswered() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return std::exchange(answered_, {});
  }

 private:
  std::string Answer(Request request) {
    const std::lock_guard<std::mutex> lock(mutex_);
    answered_.push_back(request);
    return AnswerTo(request);
  }

  Address address_;
  const SideChannel channel_;
  std::mutex mutex_;  // guards what follows
  std::vector<Request> answered_;
};

// Up to `count` bytes, or those that come before the end.
std::string ReadFrom(int fd, size_t count) {
  std::string text;
  while (text.size() < count) {
    char part[4096];
    const ssize_t n = recv(fd, part, std::min(sizeof(part), count - text.size()), 0);
    if (n <= 0) break;
    text.append(part, static_cast<size_t>(n));
  }
  return text;
}

// Sends a text in two parts. The other side may have closed the connection.
void SendTo(int fd, const std::string& text, size_t place) {
  const size_t cut = text.size() * place / 256;
  if (send(fd, text.data(), cut, MSG_NOSIGNAL) < 0) return;
  (void)!send(fd, text.data() + cut, text.size() - cut, MSG_NOSIGNAL);
}

int Connected(const Address& address) {
  sockaddr_storage to;
  const socklen_t size = ParseAddress(address, &to);
  const int fd = socket(to.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const timeval limit{kLimitNs / 1000000000, 0};
  ALWAYS(setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit)) == 0);
  ALWAYS(connect(fd, reinterpret_cast<sockaddr*>(&to), size) == 0);
  return fd;
}

// One connection. Adds the request to `expected` if it has its proof.
void OneConnection(const Address& address, Input& input, std::vector<Request>* expected) {
  const int fd = Connected(address);
  const int way = input.Below(8);
  const size_t place = input.Byte();
  if (way == 0) {  // a stranger; who says too much at once gets no answer
    const std::string text = input.Text(255);
    const bool is_at_once = place % 2 == 0;
    SendTo(fd, text, is_at_once ? 0 : place);
    if (is_at_once && text.size() > kNonceBytes) ALWAYS(ReadFrom(fd, 1).empty());
    close(fd);
    return;
  }
  const std::string own(kNonceBytes, static_cast<char>(input.Byte()));
  SendTo(fd, own, place);
  const std::string greeting = ReadFrom(fd, kNonceBytes + kMacBytes);
  ALWAYS(greeting.size() == kNonceBytes + kMacBytes);
  const Keys keys(secret, 0, own, greeting.substr(0, kNonceBytes));
  ALWAYS(keys.Answers() == greeting.substr(kNonceBytes));
  const int64_t kind = input.Number();
  const std::string text = input.Text(255), frame = Frame(keys.Requests(), kind, text);
  if (way == 1) {  // it ends in the middle
    SendTo(fd, frame.substr(0, frame.size() * place / 256), 128);
  } else if (way == 2) {
    SendTo(fd, input.Text(255), place);
  } else if (way == 3) {  // a byte is changed
    std::string changed = frame;
    char& byte = changed[frame.size() * place / 256];
    byte = static_cast<char>(byte ^ (1 + input.Below(255)));
    SendTo(fd, changed, input.Byte());
    ALWAYS(ReadFrom(fd, 1).empty());
  } else if (way == 4) {  // the key of another secret, another rank, another role
    const std::string wrong[] = {Keys("x", 0, own, greeting.substr(0, kNonceBytes)).Requests(),
                                 Keys(secret, 1, own, greeting.substr(0, kNonceBytes)).Requests(), keys.Replies()};
    SendTo(fd, Frame(wrong[input.Below(3)], kind, text), place);
    ALWAYS(ReadFrom(fd, 1).empty());
  } else {
    SendTo(fd, frame, place);
    const bool stays = kind == SideChannel::kStay;
    std::string reply = Frame(keys.Replies(), kind, stays ? "" : AnswerTo({kind, text}));
    if (stays) reply += keys.Farewell();
    ALWAYS(ReadFrom(fd, reply.size() + 1) == reply);
    if (!stays) expected->push_back({kind, text});
  }
  close(fd);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static Server& server = *new Server;
  Input input(data, size);
  std::vector<Request> expected;
  for (int connections = 0; connections < 4 && !input.is_over(); ++connections) {
    OneConnection(server.address(), input, &expected);
  }
  const Reply reply = SideChannel(1, {{server.address()}}, secret).Ask({0}, 7, "next", kLimitNs)[0];
  expected.push_back({7, "next"});
  ALWAYS(reply.came && reply.text == AnswerTo(expected.back()));
  ALWAYS(server.TakeAnswered() == expected);
  return 0;
}
