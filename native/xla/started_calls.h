// The calls on accelerators between their start and their end (allreduce_halves.cc).
//
// XLA keeps the arrays of such a call until its end. If its program fails in between, XLA gives them away at once, while the
// device's thread and its copies still use them. A handler of this package that fails waits for the calls first, so its own
// errors leave none behind. What another library's handler leaves behind is found by the next handler on the device, and by
// Python, which waits when it forgets failed programs.

#ifndef PYCOLLECTIVE_NATIVE_XLA_STARTED_CALLS_H_
#define PYCOLLECTIVE_NATIVE_XLA_STARTED_CALLS_H_

#include <cstdint>
#include <memory>

#include "calls/call.h"
#include "devices/buffers.h"
#include "xla/ffi/api/ffi.h"

namespace pycollective {

// A call between its start and its end.
struct StartedCall {
  StartedCall(DeviceBuffers buffers, Call call, int64_t run) : buffers(buffers), call(call), run(run) {}

  DeviceBuffers buffers;
  Call call;
  int64_t run;  // XLA's number of the run of the program
  xla::ffi::Error error;
};

// Adds a call under the address of its first result, which no other call uses until its end; removes and returns it; null:
// there is none.
void AddStarted(const void* key, std::shared_ptr<StartedCall> started);
std::shared_ptr<StartedCall> TakeStarted(const void* key);

// A handler calls it first. Returns an error if an earlier program has failed between the start and the end of a call on this
// device. Others may have got wrong sums, and this program's operands may be overwritten; so with other ranks it ends the job.
xla::ffi::Error FindAbandoned(const DeviceBuffers& buffers, int64_t run);
// Waits until no started call of a device (DeviceBuffers::lane_id), or of any, reads or writes arrays, and forgets them.
void ForgetStarted(int64_t lane_id);
void ForgetAllStarted();

}  // namespace pycollective

#endif  // PYCOLLECTIVE_NATIVE_XLA_STARTED_CALLS_H_
