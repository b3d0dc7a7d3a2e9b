// A rank that asks, at two addresses where a rank, a stranger or somebody who ends in the middle answers: a reply comes if, and
// only if, one of them proves that it is the rank, and sends a whole one.

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "input.h"
#include "monitor/hmac.h"
#include "monitor/side_channel.h"
#include "monitor/side_connection.h"

using namespace pycollective;

namespace {

constexpr int64_t kLimitNs = 10000000000;
const std::string secret(64, 's');

// How the other side behaves on one connection, before it ends that.
struct Script {
  enum Way { kEnds, kJunk, kWrongProof, kProofAlone, kJunkReply, kCutReply, kChangedReply, kWrongKey, kTooMuch, kRight };

  Script() = default;
  explicit Script(Input& input)
      : way(static_cast<Way>(input.Below(kRight + 1))), place(input.Byte()), kind(input.Number()), text(input.Text(255)) {}

  Way way = kEnds;
  size_t place = 0;
  int64_t kind = 0;  // of the reply
  std::string text;
};

// Whether the reply to a request comes. After that to kStay, which has no text, a farewell may come.
bool IsRight(const Script& script, int64_t kind) {
  if (kind != SideChannel::kStay) return script.way == Script::kRight;
  return (script.way == Script::kRight || script.way == Script::kTooMuch) && script.text.empty();
}

std::string ReadFrom(int fd, size_t count) {
  std::string text(count, '\0');
  const ssize_t n = recv(fd, text.data(), count, MSG_WAITALL);
  text.resize(n < 0 ? 0 : static_cast<size_t>(n));
  return text;
}

void SendTo(int fd, const std::string& text) { (void)!send(fd, text.data(), text.size(), MSG_NOSIGNAL); }

void Play(const Script& script, int fd, size_t request_bytes) {
  if (script.way == Script::kEnds) return;
  const std::string theirs = ReadFrom(fd, kNonceBytes), own(kNonceBytes, 'n');
  if (script.way == Script::kJunk) return SendTo(fd, script.text);
  const Keys keys(secret, script.way == Script::kWrongProof ? 1 : 0, theirs, own);
  SendTo(fd, own + keys.Answers());
  if (script.way == Script::kProofAlone) return;
  if (ReadFrom(fd, request_bytes).size() < request_bytes) return;  // it has seen through this
  std::string frame = Frame(script.way == Script::kWrongKey ? keys.Requests() : keys.Replies(), script.kind, script.text);
  const size_t at = frame.size() * script.place / 256;
  if (script.way == Script::kJunkReply) frame = script.text;
  if (script.way == Script::kCutReply) frame.resize(at);
  if (script.way == Script::kChangedReply) frame[at] = static_cast<char>(frame[at] ^ 4);
  if (script.way == Script::kTooMuch) frame += "x";
  const size_t first = script.way == Script::kRight ? at : frame.size();
  SendTo(fd, frame.substr(0, first));
  if (first < frame.size()) SendTo(fd, frame.substr(first));
  // The rank that asked has seen that this is forged, and ends the connection.
  if (script.way == Script::kChangedReply || script.way == Script::kWrongKey) ReadFrom(fd, 1);
}

// Who listens, in a thread that never ends.
class Listener {
 public:
  Listener() : address_{"@pycollective-fuzz-asking-" + std::to_string(getpid()), 0} {
    int fd = -1;
    ALWAYS(ListenOn(&address_, &fd));
    std::thread([this, fd] { Listen(fd); }).detach();
  }

  const Address& address() const { return address_; }
  void Prepare(std::vector<Script> scripts, size_t request_bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    scripts_ = std::move(scripts);
    std::reverse(scripts_.begin(), scripts_.end());
    request_bytes_ = request_bytes;
  }

 private:
  void Listen(int listening) {
    while (true) {
      pollfd socket{listening, POLLIN, 0};
      poll(&socket, 1, -1);
      const int fd = accept4(listening, nullptr, nullptr, SOCK_CLOEXEC);
      if (fd < 0) continue;
      Script script;
      size_t request_bytes;
      {
        const std::lock_guard<std::mutex> lock(mutex_);
        script = scripts_.back();
        scripts_.pop_back();
        request_bytes = request_bytes_;
      }
      Play(script, fd, request_bytes);
      close(fd);
    }
  }

  Address address_;
  std::mutex mutex_;  // guards what follows
  std::vector<Script> scripts_;  // the next one last
  size_t request_bytes_ = 0;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static Listener& listener = *new Listener;
  Input input(data, size);
  const int64_t kind = input.Number();
  const std::string text = input.Text(40);
  const std::vector<Script> scripts = {Script(input), Script(input)};
  listener.Prepare(scripts, Frame("", kind, text).size());
  const SideChannel channel(1, {{listener.address(), listener.address()}}, secret);
  const Reply reply = channel.Ask({0}, kind, text, kLimitNs)[0];
  const auto right = std::find_if(scripts.begin(), scripts.end(), [&](const Script& one) { return IsRight(one, kind); });
  ALWAYS(reply.came == (right != scripts.end()));
  ALWAYS(reply.text == (reply.came ? right->text : ""));
  ALWAYS((reply.connection >= 0) == (reply.came && kind == SideChannel::kStay));
  ALWAYS(reply.accepted);
  if (reply.connection < 0) return 0;
  ALWAYS(SideChannel::HasDied(reply.connection, reply.farewell));
  close(reply.connection);
  return 0;
}
