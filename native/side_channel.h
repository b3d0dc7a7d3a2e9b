// Messages between the processes of a job that need no MPI: TCP on the job's own hosts.
//
// Every process listens. A connection carries one request and its reply, and is made when there is something to ask; one
// kind of request keeps it, so that each side learns when the other process ends. Both sides show a secret of the job:
// others who connect get no reply.

#ifndef PYCOLLECTIVE_NATIVE_SIDE_CHANNEL_H_
#define PYCOLLECTIVE_NATIVE_SIDE_CHANNEL_H_

#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

namespace pycollective {

// Where a process listens.
struct Address {
  std::string host;  // IPv4 or IPv6, in digits
  int port = 0;
};

// Opens a socket that listens on an address. Returns its port and sets `fd`; 0 if there is none to be had.
int ListenOn(const std::string& host, int* fd);

// What came of a request.
struct Reply {
  bool came = false;
  bool refused = false;   // nobody listens there any more: the process has ended, its host answers
  bool accepted = false;  // its host has accepted the connection, as it does for a process that is stopped
  std::string text;
  int connection = -1;    // of a request kStay
};

class SideChannel {
 public:
  // The kind of a request that asks for a connection which stays open until one of the two processes ends.
  static constexpr int64_t kStay = 0;

  // `addresses`: for each rank where it may be reached; a rank tries them in turn. `secret`: the job's, of any length;
  // its halves are for requests and for replies.
  SideChannel(int rank, std::vector<std::vector<Address>> addresses, std::string secret);

  // Sends a request to each of `ranks`, to all at the same time, and waits for their replies, at most `limit_ns`. The
  // replies have the order of `ranks`. Any thread may call it.
  std::vector<Reply> Ask(const std::vector<int>& ranks, int64_t kind, const std::string& text, int64_t limit_ns) const;

  // Waits at a connection of kStay until the other process ends. Returns false if that one has called Leave; true if it
  // has died, or if somebody shuts the connection down. Closes it.
  static bool HasDied(int connection);
  // Tells those who wait in HasDied that this process ends in order.
  void Leave() const;

  // Waits at most `limit_ns` for one request on one of the sockets, and answers it with answer(kind, text).
  using Answer = std::function<std::string(int64_t kind, const std::string& text)>;
  void Serve(const std::vector<int>& listening, int64_t limit_ns, const Answer& answer) const;

 private:
  const int rank_;
  const std::vector<std::vector<Address>> addresses_;
  const std::string of_requests_;
  const std::string of_replies_;
  mutable std::mutex mutex_;  // guards what follows
  mutable std::vector<int> stay_;  // connections of kStay
  mutable bool has_left_ = false;
};

// A text of numbers and texts, for requests and replies.
class Writer {
 public:
  Writer& Put(int64_t number);
  Writer& Put(const std::string& text);
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
  bool ok() const { return ok_; }  // whether nothing was missing

 private:
  const std::string& text_;
  size_t at_ = 0;
  bool ok_ = true;
};

}  // namespace pycollective

#endif  // PYCOLLECTIVE_NATIVE_SIDE_CHANNEL_H_
