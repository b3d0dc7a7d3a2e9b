// Where Python stands: the frames of its threads, for reports.
//
// A thread of Python's waits here, without the interpreter's lock, until somebody asks. It takes the lock and reads the
// frames: no other thread changes them meanwhile. If it gets no lock for about a second, another thread holds it in C code
// that does not give it up, and so no frame changes. Then the handler of a signal, which Python's faulthandler has
// installed, reads the frames without the lock.

#ifndef PYCOLLECTIVE_NATIVE_MONITOR_PYTHON_STACKS_H_
#define PYCOLLECTIVE_NATIVE_MONITOR_PYTHON_STACKS_H_

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <string>

namespace pycollective {

// A line for each frame, the innermost first.
struct PythonFrames {
  std::string main_thread;
  std::string callbacks;  // threads in which XLA calls functions of the user's
  bool by_signal = false;  // whether they were read without the interpreter's lock
};

// The frames in a dump of Python's faulthandler: for each thread a line with its number, a line for each frame, and an empty
// line. A dump has at most a hundred threads, the newest; the main one may not be among them.
PythonFrames FramesIn(const std::string& dump, uint64_t main_thread);

class PythonStacks {
 public:
  // `signal`: its handler writes the frames of all threads to `file`; 0: there is none. `main_thread`: as pthread_self
  // shows it there.
  void SetSignal(int signal, int file, uint64_t main_thread);
  // The frames now; none if nobody can read them. Any thread may call it that does not hold the interpreter's lock.
  PythonFrames Now();

  // Python's thread calls these: NextAsk waits until somebody asks, and returns false after End. Then it calls Reads, which
  // keeps the interpreter's lock: so no frame changes while a signal reads them. Then Answer, with a dump; `without_main`: what
  // a report shows where the main thread is not in the dump.
  bool NextAsk();
  void Reads();
  void Answer(const std::string& dump, const std::string& without_main);
  // Nobody is answered from now on.
  void End();

 private:
  // What Python's thread does: it is not there; waits for an ask; wants the lock to read; reads with the lock; has
  // answered, and wants the lock to go on.
  enum Phase { kAbsent, kIdle, kWantsLock, kReads, kReturns };

  PythonFrames BySignal() const;

  std::mutex asking_;  // one asks at a time
  std::mutex mutex_;   // guards what follows
  std::condition_variable changed_;
  Phase phase_ = kAbsent;
  bool asked_ = false;
  bool ended_ = false;
  int64_t answers_ = 0;
  PythonFrames answer_;
  int signal_ = 0;
  int file_ = -1;
  uint64_t main_thread_ = 0;
};

// Those of this process.
PythonStacks& StacksOfPython();

}  // namespace pycollective

#endif  // PYCOLLECTIVE_NATIVE_MONITOR_PYTHON_STACKS_H_
