// Small programs whose outcomes under the memory model are known. They test the explorer itself.
//
// The names are those of the literature (Alglave et al., "Herding cats", TOPLAS 2014).

#include <sched.h>

#include <atomic>
#include <chrono>
#include <string>

#include "base/futex.h"
#include "explored.h"

namespace explore {
namespace {

using Order = std::memory_order;
using pycollective::SleepWhile;
using pycollective::WakeAll;

constexpr Order kRelaxed = std::memory_order_relaxed, kAcquire = std::memory_order_acquire, kRelease = std::memory_order_release,
                kAcqRel = std::memory_order_acq_rel, kSeqCst = std::memory_order_seq_cst;

std::atomic<uint64_t> x, y;
alignas(64) int64_t data[16];
uint64_t r[4];

std::string Text(int results) {
  std::string text;
  for (int i = 0; i < results; ++i) text += std::to_string(r[i]);
  return text;
}

Litmus Of(const std::string& name, int threads, int results, std::set<std::string> outcomes, std::function<void(int)> run) {
  Scenario scenario;
  scenario.name = name;
  scenario.threads = threads;
  scenario.begin = [] {
    x = y = 0;
    for (uint64_t& result : r) result = 0;
    data[0] = 0;
    Track(data, sizeof(data));
  };
  scenario.run = std::move(run);
  scenario.outcome = [results] { return Text(results); };
  return {scenario, std::move(outcomes)};
}

Litmus Wrong(const std::string& violation, Litmus litmus) {
  litmus.violation = violation;
  return litmus;
}

Litmus StoreBuffering(const std::string& name, Order store, Order load, std::set<std::string> outcomes) {
  return Of(name, 2, 2, std::move(outcomes), [=](int thread) {
    (thread == 0 ? x : y).store(1, store);
    r[thread] = (thread == 0 ? y : x).load(load);
  });
}

Litmus MessagePassing(const std::string& name, Order store, Order load, std::set<std::string> outcomes) {
  return Of(name, 2, 2, std::move(outcomes), [=](int thread) {
    if (thread == 0) {
      x.store(1, kRelaxed);
      y.store(1, store);
    } else {
      r[0] = y.load(load);
      r[1] = x.load(kRelaxed);
    }
  });
}

// The message is not atomic.
Litmus Publishing(const std::string& name, Order store, Order load, Order before, Order after) {
  return Of(name, 2, 2, {"00", "17"}, [=](int thread) {
    if (thread == 0) {
      data[0] = 7;
      std::atomic_thread_fence(before);
      y.store(1, store);
    } else {
      r[0] = y.load(load);
      std::atomic_thread_fence(after);
      if (r[0] == 1) r[1] = static_cast<uint64_t>(data[0]);
    }
  });
}

// Two writers, two readers that see both.
Litmus IndependentReads(const std::string& name, Order store, Order load, bool may_differ) {
  std::set<std::string> all;
  for (int bits = 0; bits < 16; ++bits) {
    std::string text;
    for (const int bit : {8, 4, 2, 1}) text += (bits & bit) != 0 ? '1' : '0';
    if (may_differ || text != "1010") all.insert(text);
  }
  return Of(name, 4, 4, std::move(all), [=](int thread) {
    if (thread < 2) {
      (thread == 0 ? x : y).store(1, store);
    } else {
      std::atomic<uint64_t>& first = thread == 2 ? x : y;
      std::atomic<uint64_t>& second = thread == 2 ? y : x;
      r[2 * thread - 4] = first.load(load);
      r[2 * thread - 3] = second.load(load);
    }
  });
}

}  // namespace

std::vector<Litmus> LitmusTests() {
  std::vector<Litmus> all;
  all.push_back(StoreBuffering("SB, relaxed", kRelaxed, kRelaxed, {"00", "01", "10", "11"}));
  all.push_back(StoreBuffering("SB, release and acquire", kRelease, kAcquire, {"00", "01", "10", "11"}));
  all.push_back(StoreBuffering("SB, seq_cst", kSeqCst, kSeqCst, {"01", "10", "11"}));
  all.push_back(StoreBuffering("SB, seq_cst stores alone", kSeqCst, kAcquire, {"00", "01", "10", "11"}));
  all.push_back(StoreBuffering("SB, seq_cst loads alone", kRelease, kSeqCst, {"00", "01", "10", "11"}));
  for (const Order fence : {kSeqCst, kAcqRel}) {
    const bool orders = fence == kSeqCst;
    all.push_back(Of(orders ? "SB, seq_cst fences" : "SB, fences of release and acquire", 2, 2,
                     orders ? std::set<std::string>{"01", "10", "11"} : std::set<std::string>{"00", "01", "10", "11"},
                     [=](int thread) {
                       (thread == 0 ? x : y).store(1, kRelaxed);
                       std::atomic_thread_fence(fence);
                       r[thread] = (thread == 0 ? y : x).load(kRelaxed);
                     }));
  }
  all.push_back(MessagePassing("MP, relaxed", kRelaxed, kRelaxed, {"00", "01", "10", "11"}));
  all.push_back(MessagePassing("MP, release alone", kRelease, kRelaxed, {"00", "01", "10", "11"}));
  all.push_back(MessagePassing("MP, acquire alone", kRelaxed, kAcquire, {"00", "01", "10", "11"}));
  all.push_back(MessagePassing("MP, release and acquire", kRelease, kAcquire, {"00", "01", "11"}));
  all.push_back(Publishing("MP of data, release and acquire", kRelease, kAcquire, kRelaxed, kRelaxed));
  all.push_back(Publishing("MP of data, fences", kRelaxed, kRelaxed, kRelease, kAcquire));
  all.push_back(Publishing("MP of data, a fence and a load", kRelaxed, kAcquire, kRelease, kRelaxed));
  all.push_back(Publishing("MP of data, a store and a fence", kRelease, kRelaxed, kRelaxed, kAcquire));
  all.push_back(Wrong("race", Publishing("MP of data, release alone", kRelease, kRelaxed, kRelaxed, kRelaxed)));
  all.push_back(Wrong("race", Publishing("MP of data, acquire alone", kRelaxed, kAcquire, kRelaxed, kRelaxed)));
  all.push_back(Wrong("race", Publishing("MP of data, a fence behind alone", kRelaxed, kRelaxed, kRelaxed, kAcquire)));
  all.push_back(Of("CoRR: reads of one location keep its order", 2, 2, {"00", "01", "02", "11", "12", "22"}, [](int thread) {
    if (thread == 0) {
      x.store(1, kRelaxed);
      x.store(2, kRelaxed);
    } else {
      r[0] = x.load(kRelaxed);
      r[1] = x.load(kRelaxed);
    }
  }));
  all.push_back(Of("2+2W: the last writes", 2, 2, {"11", "12", "21", "22"}, [](int thread) {
    (thread == 0 ? x : y).store(1, kRelaxed);
    (thread == 0 ? y : x).store(2, kRelaxed);
    Meet();  // now each thread reads what is last
    r[thread] = (thread == 0 ? x : y).load(kRelaxed);
  }));
  all.push_back(IndependentReads("IRIW, acquire", kRelease, kAcquire, true));
  all.push_back(IndependentReads("IRIW, seq_cst", kSeqCst, kSeqCst, false));
  all.push_back(Of("WRC: what was seen is passed on", 3, 3, {"000", "001", "100", "101", "111", "010", "011"}, [](int thread) {
    if (thread == 0) x.store(1, kRelaxed);
    if (thread == 1) {
      r[0] = x.load(kRelaxed);
      y.store(1, kRelease);
    }
    if (thread == 2) {
      r[1] = y.load(kAcquire);
      r[2] = x.load(kRelaxed);
    }
  }));
  all.push_back(Of("two updates lose nothing", 2, 2, {"01", "10"}, [](int thread) { r[thread] = x.fetch_add(1, kRelaxed); }));
  all.push_back(Of("a release sequence goes through an update", 3, 1, {"0", "7"}, [](int thread) {
    if (thread == 0) {
      data[0] = 7;
      x.store(1, kRelease);
    } else if (thread == 1) {
      uint64_t one = x.load(kRelaxed);
      if (one == 1) x.fetch_add(1, kRelaxed);
    } else if (x.load(kAcquire) == 2) {
      r[0] = static_cast<uint64_t>(data[0]);
    }
  }));
  all.push_back(Wrong("race", Of("a store of another thread ends a release sequence", 3, 1, {}, [](int thread) {
    if (thread == 0) {
      data[0] = 7;
      x.store(1, kRelease);
    } else if (thread == 1) {
      if (x.load(kRelaxed) == 1) x.store(2, kRelaxed);
    } else if (x.load(kAcquire) == 2) {
      r[0] = static_cast<uint64_t>(data[0]);
    }
  })));
  for (const Order load : {kAcquire, kRelaxed}) {
    const char* const name = load == kAcquire ? "a wait for a message" : "a wait for a message, relaxed";
    Litmus waiting = Of(name, 2, 1, {"7"}, [load](int thread) {
      if (thread == 0) {
        data[0] = 7;
        y.store(1, kRelease);
      } else {
        while (y.load(load) == 0) sched_yield();
        r[0] = static_cast<uint64_t>(data[0]);
      }
    });
    all.push_back(load == kAcquire ? waiting : Wrong("race", waiting));
  }
  all.push_back(Wrong("deadlock", Of("two waits for each other", 2, 0, {}, [](int thread) {
    while ((thread == 0 ? x : y).load(kAcquire) == 0) sched_yield();
    (thread == 0 ? y : x).store(1, kRelease);
  })));
  // A futex: x is the word. A rank that wakes others must have written it before, and nobody sleeps who could not be woken.
  for (const bool wakes_late : {true, false}) {
    Litmus sleeping = Of(wakes_late ? "a sleep, and a wake-up after the store" : "a sleep, and a wake-up before the store", 2, 1, {"1"},
                         [wakes_late](int thread) {
                           if (thread == 1) {
                             while (x.load(kRelaxed) == 0) SleepWhile(&x, 0, 1);
                             r[0] = 1;
                             return;
                           }
                           if (!wakes_late) WakeAll(&x);
                           x.store(1, kRelaxed);
                           if (wakes_late) WakeAll(&x);
                         });
    all.push_back(wakes_late ? sleeping : Wrong("deadlock", sleeping));
  }
  all.push_back(Of("two sleeps, and one wake-up", 3, 2, {"11"}, [](int thread) {
    if (thread == 2) {
      x.store(1, kRelaxed);
      WakeAll(&x);
      return;
    }
    while (x.load(kRelaxed) == 0) SleepWhile(&x, 0, 1);
    r[thread] = 1;
  }));
  // y says that somebody may sleep. It is store buffering: only fences with memory_order_seq_cst will do.
  for (const Order fence : {kSeqCst, kAcqRel}) {
    const bool orders = fence == kSeqCst;
    Litmus flag = Of(orders ? "a sleeper's flag in another word, seq_cst fences" : "a sleeper's flag in another word, weaker fences", 2, 1,
                     {"1"}, [fence](int thread) {
                       if (thread == 0) {
                         x.store(1, kRelaxed);
                         std::atomic_thread_fence(fence);
                         if (y.load(kRelaxed) != 0) WakeAll(&x);
                         return;
                       }
                       y.store(1, kRelaxed);
                       std::atomic_thread_fence(fence);
                       while (x.load(kRelaxed) == 0) SleepWhile(&x, 0, 1);
                       r[0] = 1;
                     });
    all.push_back(orders ? flag : Wrong("deadlock", flag));
  }
  all.push_back(Of("a wait for a number that never comes, with a limit", 1, 1, {"1"}, [](int) {
    using Clock = std::chrono::steady_clock;
    const Clock::time_point end = Clock::now() + std::chrono::seconds(2);
    while (x.load(kAcquire) == 0 && Clock::now() < end) sched_yield();
    r[0] = 1;
  }));
  return all;
}

}  // namespace explore
