// One connection of a side channel: where it leads, what both sides prove, and what travels on it.
//
// K is the job's secret, r the rank that is asked, a and b are random numbers of the asking and of the answering side, new for
// each connection. key(role) = HMAC-SHA-256(K, role, r, a, b).
//
//   1. asking side:     a
//   2. answering side:  b, key("answers")         proves that it is rank r of this job
//   3. asking side:     frame(key("requests"))    proves that it is of this job, too
//   4. answering side:  frame(key("replies"))
//
// frame(k): kind and length of a text, HMAC(k, these), the text, HMAC(k, all of these). Nobody reads a text before the proof
// of its head has come. A proof is of no use elsewhere: roles differ, so what one side says cannot be sent back to it; ranks
// differ, so one rank's proof is not another's; and each side has chosen a number of the connection itself. An asking side sends
// nothing that means anything before it knows who listens, since the port of a rank that has died may be another program's, and
// another host may have the same address in a network of its own.
//
// On a socket of this host both sides look first whether the other process belongs to the same user.

#ifndef PYCOLLECTIVE_NATIVE_MONITOR_SIDE_CONNECTION_H_
#define PYCOLLECTIVE_NATIVE_MONITOR_SIDE_CONNECTION_H_

#include <poll.h>
#include <sys/socket.h>

#include <cstdint>
#include <string>

#include "monitor/hmac.h"
#include "monitor/side_channel.h"

namespace pycollective {

constexpr size_t kNonceBytes = 32;
constexpr size_t kEmptyFrameBytes = 2 * sizeof(int64_t) + 2 * kMacBytes;  // of a frame without a text

// An address as sockets take it. Returns its length, 0 if it is none.
socklen_t ParseAddress(const Address& address, sockaddr_storage* parsed);

// Whether the process at the other end belongs to the user of this one. Nobody can tell this of another host's.
bool MayBeOfThisUser(int fd);

// The keys of a connection.
class Keys {
 public:
  Keys(const std::string& secret, int64_t rank, const std::string& of_asking, const std::string& of_answering)
      : secret_(secret), about_(Writer().Put(rank).text() + of_asking + of_answering) {}
  std::string Answers() const { return Key("answers"); }
  std::string Requests() const { return Key("requests"); }
  std::string Replies() const { return Key("replies"); }
  std::string Farewell() const { return Key("farewell"); }

 private:
  std::string Key(const std::string& role) const;

  const std::string& secret_;
  const std::string about_;
};

std::string Frame(const std::string& key, int64_t kind, const std::string& text);

enum class Came { kPart, kHead, kAll, kForged };

// How much of a frame has come; sets `kind` and `text` when that is all.
Came TakeFrame(const std::string& key, const std::string& received, int64_t* kind, std::string* text);

// A connection that does not block.
class Connection {
 public:
  explicit Connection(int fd = -1) : fd_(fd) {}
  ~Connection() { Close(); }
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  bool is_open() const { return fd_ >= 0; }
  int fd() const { return fd_; }
  pollfd waits_for() const { return {fd_, static_cast<short>(is_sending() ? POLLOUT : POLLIN), 0}; }
  bool is_sending() const { return sent_ < sends_.size(); }
  const std::string& received() const { return received_; }

  void Open(int fd);
  void Close();
  int Release();  // the socket stays open, and is the caller's

  // Sends a text, as far as the socket takes it, and forgets what was received before. Step() sends the rest. Of what comes
  // then it takes at most so many bytes: the others are for who gets the socket by Release().
  bool Send(std::string text, size_t most = SIZE_MAX);
  // Goes on to send, or receives what is there. Returns false if the connection has ended.
  bool Step();

 private:
  int fd_;
  std::string sends_;
  size_t sent_ = 0;
  std::string received_;
  size_t most_ = SIZE_MAX;  // bytes of received_
};

}  // namespace pycollective

#endif  // PYCOLLECTIVE_NATIVE_MONITOR_SIDE_CONNECTION_H_
