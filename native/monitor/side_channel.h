// Messages between the processes of a job that need no MPI: sockets of the kernel on one host, TCP between hosts.
//
// Every process listens. A connection carries one request and its reply, and is made when there is something to ask; one
// kind of request keeps it, so that each side learns when the other process ends. Both sides prove that they know a secret
// of the job, which itself is never sent; the request and the reply carry proofs of their own (side_connection.h).

#ifndef PYCOLLECTIVE_NATIVE_MONITOR_SIDE_CHANNEL_H_
#define PYCOLLECTIVE_NATIVE_MONITOR_SIDE_CHANNEL_H_

#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

namespace pycollective {

// Where a process listens.
struct Address {
  std::string host;  // IPv4 or IPv6, in digits; or "@" and a name: a socket of this host, of the abstract namespace
  int port = 0;      // 0 for a name
};

// Opens a socket that listens on an address, with the port that the kernel chooses. Returns false if there is none to be had.
bool ListenOn(Address* address, int* fd);

// What came of a request.
struct Reply {
  bool came = false;
  bool refused = false;   // nobody listens there any more: the process has ended, its host answers
  bool accepted = false;  // its host has accepted the connection, as it does for a process that is stopped
  std::string text;
  int connection = -1;    // of a request kStay
  std::string farewell;   // what the other process says on it when it ends in order
};

class SideChannel {
 public:
  // The kind of a request that asks for a connection which stays open until one of the two processes ends.
  static constexpr int64_t kStay = 0;

  // `addresses`: for each rank where it may be reached; a rank tries them in turn. `secret`: the job's, of any length.
  SideChannel(int rank, std::vector<std::vector<Address>> addresses, std::string secret);

  // Sends a request to each of `ranks`, to all at the same time, and waits for their replies, at most `limit_ns`. The
  // replies have the order of `ranks`. Any thread may call it.
  std::vector<Reply> Ask(const std::vector<int>& ranks, int64_t kind, const std::string& text, int64_t limit_ns) const;
  // The same with a text for each of the ranks.
  std::vector<Reply> Ask(const std::vector<int>& ranks, int64_t kind, const std::vector<std::string>& texts,
                         int64_t limit_ns) const;

  // Waits at a connection of kStay until the other process ends. Returns false if the other process has said its farewell,
  // which Leave sends; true if it has died, or if somebody shuts the connection down.
  static bool HasDied(int connection, const std::string& farewell);
  // Tells those who wait in HasDied that this process ends in order.
  void Leave() const;

  // Answers the requests that come on the sockets with answer(kind, text), until is_over(), for which it looks a few times
  // a second. One thread calls it. A connection without a proof of this job is sent away in time, however many there are;
  // none of them keeps others from being answered.
  //
  // An answer that takes_long(kind, text) is made in a thread of its own, so that the others are answered meanwhile. If there are
  // kMostLong such answers, or no thread can be made, the reply is empty. Serve returns when these threads have ended.
  using Answer = std::function<std::string(int64_t kind, const std::string& text)>;
  using TakesLong = std::function<bool(int64_t kind, const std::string& text)>;
  static constexpr int kMostLong = 8;
  void Serve(const std::vector<int>& listening, const Answer& answer, const std::function<bool()>& is_over,
             const TakesLong& takes_long = {}) const;

 private:
  // Keeps a connection of kStay.
  void Keep(int fd, const std::string& farewell) const;

  struct Kept {
    int fd;
    std::string farewell;
  };
  const int rank_;
  const std::vector<std::vector<Address>> addresses_;
  const std::string secret_;
  mutable std::mutex mutex_;  // guards what follows
  mutable std::vector<Kept> kept_;  // connections of kStay
  mutable bool has_left_ = false;
};

// A text of numbers and texts, for requests and replies.
class Writer {
 public:
  Writer& Put(int64_t number);
  Writer& Put(const std::string& text);
  // What another Writer has written.
  Writer& Append(const std::string& written);
  const std::string& text() const { return text_; }

 private:
  std::string text_;
};
class Reader {
 public:
  explicit Reader(const std::string& text) : text_(text) {}
  // What was put, in the same order. After the end of the text: 0 and "".
  int64_t Number();
  std::string Text();
  std::string Rest();  // all that is left
  bool ok() const { return ok_; }  // whether nothing was missing, or refused
  // What was read is no such text: nothing more is read of it.
  void Refuse();

 private:
  const std::string& text_;
  size_t at_ = 0;
  bool ok_ = true;
};

}  // namespace pycollective

#endif  // PYCOLLECTIVE_NATIVE_MONITOR_SIDE_CHANNEL_H_
