// MPI functions that wait for other ranks, in a thread that may be patient (backoff.h).

#ifndef PYCOLLECTIVE_NATIVE_MPI_WAITING_CALLS_H_
#define PYCOLLECTIVE_NATIVE_MPI_WAITING_CALLS_H_

#include <sched.h>

#include <cstdint>

#include "mpi/backoff.h"
#include "mpi/mpi.h"
#include "mpi/wait.h"

namespace pycollective {

// MPI_Status is opaque here: at most 40 bytes in any known implementation.
struct alignas(16) Status {
  char bytes[256] = {};
};

// Each function has the arguments and the result of MPI's function of the same name: 0, or an error code.
template <typename H>
class WaitingCalls {
 public:
  explicit WaitingCalls(const Functions<H>& functions) : functions_(functions) {}

  int Send(const void* data, int count, H type, int dest, int tag, H comm) const {
    if (!is_patient) return functions_.Send(data, count, type, dest, tag, comm);
    H request{};
    const int code = functions_.Isend(data, count, type, dest, tag, comm, &request);
    return code != 0 ? code : Complete(&request);
  }

  int Recv(void* data, int count, H type, int source, int tag, H comm, void* status) const {
    if (!is_patient) return functions_.Recv(data, count, type, source, tag, comm, status);
    H request{};
    const int code = functions_.Irecv(data, count, type, source, tag, comm, &request);
    return code != 0 ? code : Complete(&request, status);
  }

  int Sendrecv(const void* sent, int send_count, H send_type, int dest, int send_tag, void* received, int recv_count,
               H recv_type, int source, int recv_tag, H comm, void* status) const {
    if (!is_patient) {
      return functions_.Sendrecv(sent, send_count, send_type, dest, send_tag, received, recv_count, recv_type, source,
                                 recv_tag, comm, status);
    }
    H requests[2] = {};
    const int code = functions_.Irecv(received, recv_count, recv_type, source, recv_tag, comm, &requests[0]);
    if (code != 0) return code;
    const int sending = functions_.Isend(sent, send_count, send_type, dest, send_tag, comm, &requests[1]);
    if (sending != 0) {  // MPI must not write to `received` after the return
      if (functions_.Cancel(&requests[0]) == 0) Complete(&requests[0]);
      return sending;
    }
    const int first = Complete(&requests[0], status);
    const int second = Complete(&requests[1]);
    return first != 0 ? first : second;
  }

  int Waitall(int count, H* requests, void* statuses) const {
    if (!is_patient) return functions_.Waitall(count, requests, statuses);
    int first = 0;
    for (int i = 0; i < count; ++i) {  // also after an error, since MPI still writes to the memory of the other requests
      const int code = Complete(&requests[i]);
      if (first == 0) first = code;
    }
    return first;
  }

  // Waits until the request is complete. `status`: the address for a message's MPI_Status; may be null.
  int Complete(H* request, void* status = nullptr) const {
    Status own;
    Backoff backoff;
    for (int64_t looks = 0;; ++looks) {
      int done = 0;
      const int code = functions_.Test(request, &done, status != nullptr ? status : &own);
      if (code != 0 || done != 0) return code;
      if (is_patient) {
        backoff.Sleep();
      } else if (looks >= spins_of_wait) {  // MPI's test does not yield the core, but its blocking calls do
        sched_yield();
      }
    }
  }

 private:
  const Functions<H>& functions_;
};

}  // namespace pycollective

#endif  // PYCOLLECTIVE_NATIVE_MPI_WAITING_CALLS_H_
