// Tests native/devices/team.cc.

#include <atomic>
#include <thread>

#include "devices/team.h"
#include "harness.h"

namespace pc = pycollective;

namespace {

// If a member does not come, the members that wait for it get an exception, and so do those that come later. No member
// does the team's work.
void TestBrokenTeam() {
  pc::Team team(3);
  std::atomic<int> exceptions{0};
  const auto meets = [&] {
    try {
      team.AddBuffers({});
      team.Meet([] { CHECK(false); });
      CHECK(false);
    } catch (const pc::Team::Broken&) {
      ++exceptions;
    }
  };
  std::thread first(meets), second(meets);
  Sleep(20);
  CHECK(exceptions == 0);
  team.Break();
  first.join();
  second.join();
  CHECK(exceptions == 2);
  for (int i = 0; i < 5; ++i) meets();
  CHECK(exceptions == 7);

  // A meeting that was complete before the break stays complete.
  pc::Team pair(2);
  std::thread waits([&] { pair.Meet(); });
  pair.Meet();
  pair.Break();
  waits.join();
}

const Tests kTests = {
    {"broken_team", TestBrokenTeam},
};

}  // namespace

int main(int argc, char** argv) { return RunOne(kTests, argc, argv); }
