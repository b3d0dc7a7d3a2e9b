// Requests that reach many ranks by few connections of each: a tree of hosts.
//
// The ranks that a request shall reach are cut into parts: a rank of the asking rank's own host is a part, another host is one,
// and more than kMostParts hosts are joined. The lowest rank of a part, its head, gets the request with the other ranks of
// the part, and asks these in the same way. So of n = H L ranks on H hosts one rank makes O(H + L) connections, at most kMostParts
// to other hosts.
//
// A head that does not answer has told nothing of its part. The rank that asked knows this of each rank, and tells it on; only the
// rank at the root asks again, by other heads.

#ifndef PYCOLLECTIVE_NATIVE_MONITOR_ASK_TREE_H_
#define PYCOLLECTIVE_NATIVE_MONITOR_ASK_TREE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "monitor/process.h"
#include "monitor/side_channel.h"

namespace pycollective {

inline constexpr size_t kMostParts = 64;

// How long a rank waits for the replies of the heads. A head waits for less than the rank that has asked it.
struct TreeLimits {
  int64_t rank_ns;   // if all parts are single ranks of its host
  int64_t host_ns;   // if a part is another host
  int64_t hosts_ns;  // if a part is several hosts
};

struct Part {
  std::vector<int> ranks;  // ascending; the first one is the head
  Reply reply;             // the head's
};

// Cuts `ranks`, which ascend, into parts, as the rank `own` does.
std::vector<std::vector<int>> PartsOf(const std::vector<Process>& processes, int own, const std::vector<int>& ranks);

// Sends a request to the heads of all parts: the other ranks of the part (PutRanks), and after these `text`.
std::vector<Part> AskParts(const SideChannel& channel, const std::vector<Process>& processes, int own,
                           const std::vector<int>& ranks, int64_t kind, const std::string& text, const TreeLimits& limits);

// Sends a request to all ranks by a tree; where it has not come by it, by a second tree with other heads; and then to each
// rank that it has not come to, unless nothing of its host can be reached. Each head hands it on by HandOn. Returns the ranks of which
// nobody knows that it has come to them.
std::vector<int> TellAll(const SideChannel& channel, const std::vector<Process>& processes, int own,
                         const std::vector<int>& ranks, int64_t kind, const std::string& text);
// Hands a request of TellAll on to `ranks`. Returns the reply of this head.
std::string HandOn(const SideChannel& channel, const std::vector<Process>& processes, int own, const std::vector<int>& ranks,
                   int64_t kind, const std::string& text);

// Hosts of which no rank can be connected to. A host that runs accepts a connection or refuses it.
class LostHosts {
 public:
  explicit LostHosts(const std::vector<Process>& processes) : processes_(processes) {}
  // What has come of a request to a rank of this host.
  void Add(int rank, const Reply& reply);
  // Whether requests were made to ranks of this rank's host, and none of them has been accepted or refused.
  bool Has(int rank) const;

 private:
  const std::vector<Process>& processes_;
  std::vector<int64_t> silent_, there_;  // numbers of hosts
};

}  // namespace pycollective

#endif  // PYCOLLECTIVE_NATIVE_MONITOR_ASK_TREE_H_
