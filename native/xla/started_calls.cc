// Implementation of started_calls.h.

#include "xla/started_calls.h"

#include <algorithm>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/exports.h"

namespace pycollective {
namespace {

namespace ffi = xla::ffi;

std::mutex started_mutex;
auto& started_calls = *new std::unordered_map<const void*, std::shared_ptr<StartedCall>>;

// Removes and returns the calls of which the condition is true.
template <typename Condition>
std::vector<std::shared_ptr<StartedCall>> TakeIf(Condition condition) {
  std::vector<std::shared_ptr<StartedCall>> taken;
  const std::lock_guard<std::mutex> lock(started_mutex);
  for (auto each = started_calls.begin(); each != started_calls.end();) {
    const bool takes = condition(*each->second);
    if (takes) taken.push_back(each->second);
    each = takes ? started_calls.erase(each) : std::next(each);
  }
  return taken;
}

}  // namespace

void AddStarted(const void* key, std::shared_ptr<StartedCall> started) {
  const std::lock_guard<std::mutex> lock(started_mutex);
  started_calls[key] = std::move(started);
}

std::shared_ptr<StartedCall> TakeStarted(const void* key) {
  const std::lock_guard<std::mutex> lock(started_mutex);
  const auto found = started_calls.find(key);
  if (found == started_calls.end()) return nullptr;
  const std::shared_ptr<StartedCall> started = std::move(found->second);
  started_calls.erase(found);
  return started;
}

ffi::Error FindAbandoned(const DeviceBuffers& buffers, int64_t run) {
  const auto abandoned = TakeIf(
      [&](const StartedCall& call) { return call.buffers.lane_id() == buffers.lane_id() && call.run != run; });
  if (abandoned.empty()) return ffi::Error::Success();
  for (const auto& call : abandoned) call->buffers.Drain();
  const auto has_others = [](const std::shared_ptr<StartedCall>& call) { return call->call.size() > 1; };
  const auto worst = std::find_if(abandoned.begin(), abandoned.end(), has_others);
  return (worst != abandoned.end() ? *worst : abandoned.front())->call.Fatal(
      "expected the end of each allreduce that a program starts, got a program that failed in between: XLA has given the "
      "arrays of the allreduce away while it used them",
      "Look at the first error of that program.");
}

void ForgetStarted(int64_t lane_id) {
  for (const auto& call : TakeIf([&](const StartedCall& call) { return call.buffers.lane_id() == lane_id; })) {
    call->buffers.Drain();
  }
}

void ForgetAllStarted() {
  for (const auto& call : TakeIf([](const StartedCall&) { return true; })) call->buffers.Drain();
}

}  // namespace pycollective

// Waits until no call that a failed program has started reads or writes arrays.
PYCOLLECTIVE_EXPORT void pycollective_forget_started() { pycollective::ForgetAllStarted(); }

namespace {
const pycollective::Listed listed{PYCOLLECTIVE_TYPED(forget_started)};
}  // namespace
