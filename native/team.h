// The threads that run one program on several devices of this process, where they meet.

#ifndef PYCOLLECTIVE_NATIVE_TEAM_H_
#define PYCOLLECTIVE_NATIVE_TEAM_H_

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <vector>

#include "collectives.h"

namespace pycollective {

// Members share an address space, so they read each other's buffers instead of sending them.
//
// A member that cannot come, since memory has run out, breaks the team: whoever waits for it, or comes later, gets the
// exception Broken out of Meet(), from then on. That is safe before a call's first meeting, for nobody reads the others' buffers then; so
// behind it members must not fail but in an Outcome, as Tried() makes one of an exception.
class Team {
 public:
  struct Broken {};

  // What a member brings to a collective.
  struct Post {
    const void* in = nullptr;
    void* out = nullptr;
  };

  explicit Team(int size) : posts_(static_cast<size_t>(size)) {}

  int size() const { return static_cast<int>(posts_.size()); }

  // Of what one member did for all: written in Meet(work), read after it.
  Outcome outcome;

  // Posts are valid from the next Meet() to the one after the last read.
  void SetPost(int member, Post post) { posts_[static_cast<size_t>(member)] = post; }
  // The same for members that are all alike: the next free place.
  void AddPost(Post post) {
    if (broken_) throw Broken();
    SetPost(posted_.fetch_add(1, std::memory_order_acq_rel), post);
  }
  const Post& PostOf(int member) const { return posts_[static_cast<size_t>(member)]; }

  // Returns when every member has called it; what they wrote before is then visible to all.
  void Meet() {
    Meet([] {});
  }
  // The same; the last to come runs `work` before anybody returns: for small work, which would end before another
  // member woke up.
  template <typename Work>
  void Meet(Work work) {
    if (broken_) throw Broken();  // so nobody is the last of those who came before
    const uint32_t phase = phase_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size()) {
      work();
      posted_.store(0, std::memory_order_relaxed);
      arrived_.store(0, std::memory_order_relaxed);
      Release(phase + 1);
    } else {
      WaitFor(phase + 1);
    }
  }

  void Break();

 private:
  void Release(uint32_t phase);
  void WaitFor(uint32_t phase);

  std::vector<Post> posts_;
  std::atomic<int> posted_{0};
  std::atomic<int> arrived_{0};
  std::atomic<uint32_t> phase_{0};  // counts completed meetings
  std::atomic<bool> broken_{false};
  std::mutex mutex_;
  std::condition_variable met_;
};

// work(), or the exception that it ends with.
template <typename Work>
Outcome Tried(Work work) {
  try {
    return work();
  } catch (const std::exception& error) {
    return Thrown(error);
  }
}

}  // namespace pycollective

#endif  // PYCOLLECTIVE_NATIVE_TEAM_H_
