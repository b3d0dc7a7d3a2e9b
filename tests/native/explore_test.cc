// Explores the board, the combining tree and the exchange of arrays under the memory model of C++ (explore.h): all that ranks may see of each other, on
// processors with weaker orders than this one's, too.
//
// Besides the tests, for the mutants of tests/native/weakened.py:
//   PROGRAM sites: explores all scenarios, and writes the address in the program and the order of each atomic access.
//   PROGRAM weakened ORDER ADDRESS...: makes those accesses with that order, and says what is wrong then.

#include "explore.h"

#include <cinttypes>
#include <string>
#include <vector>

#include "explored/explored.h"
#include "harness.h"

namespace {

void Print(const explore::Scenario& scenario, const explore::Result& result) {
  std::printf("%-60s %8" PRId64 " executions, %8" PRId64 " redundant, %s\n", scenario.name.c_str(), result.executions,
              result.redundant, result.is_complete ? "complete" : "bounded");
  std::fflush(stdout);
}

// The verdicts are the known ones. Without sleep sets, too: each execution that is left off repeats another one.
void TestLitmus() {
  for (const bool has_sleep_sets : {true, false}) {
    explore::The().has_sleep_sets = has_sleep_sets;
    for (const explore::Litmus& litmus : explore::LitmusTests()) {
      const explore::Result result = explore::ExploreAll(litmus.scenario);
      Print(litmus.scenario, result);
      std::string outcomes;
      for (const std::string& outcome : result.outcomes) outcomes += outcome + " ";
      std::fprintf(stderr, "%s: %s%s\n", litmus.scenario.name.c_str(), outcomes.c_str(), result.violation.c_str());
      CHECK(result.violation.empty() == litmus.violation.empty() && result.violation.find(litmus.violation) == 0);
      if (!result.violation.empty()) continue;
      CHECK(result.is_complete);
      CHECK(result.outcomes == litmus.outcomes);
      CHECK(has_sleep_sets || result.redundant == 0);
    }
  }
}

void TestAll(const std::vector<explore::Scenario>& scenarios) {
  explore::The().says = true;
  for (const explore::Scenario& scenario : scenarios) {
    const explore::Result result = explore::ExploreAll(scenario);
    Print(scenario, result);
    if (!result.violation.empty()) std::fprintf(stderr, "%s: %s\n", scenario.name.c_str(), result.violation.c_str());
    CHECK(result.violation.empty());
    CHECK(result.is_complete && result.executions > 0);
  }
}

void TestBoard() { TestAll(explore::BoardScenarios()); }
void TestExchange() { TestAll(explore::ExchangeScenarios()); }
void TestTree() { TestAll(explore::TreeScenarios()); }
void TestSleepingWaits() { TestAll(explore::SleepingWaitScenarios()); }
void TestSleepingBoard() { TestAll(explore::SleepingBoardScenarios()); }
void TestSleepingExchange() { TestAll(explore::SleepingExchangeScenarios()); }
void TestSleepingTree() { TestAll(explore::SleepingTreeScenarios()); }

const Tests kTests = {
    {"litmus", TestLitmus},
    {"board", TestBoard},
    {"exchange", TestExchange},
    {"tree", TestTree},
    {"sleeping_waits", TestSleepingWaits},
    {"sleeping_board", TestSleepingBoard},
    {"sleeping_exchange", TestSleepingExchange},
    {"sleeping_tree", TestSleepingTree},
};

std::vector<explore::Scenario> AllScenarios() {
  std::vector<explore::Scenario> all;
  for (const auto& scenarios : {explore::BoardScenarios, explore::ExchangeScenarios, explore::TreeScenarios, explore::SleepingWaitScenarios,
                                explore::SleepingBoardScenarios, explore::SleepingExchangeScenarios, explore::SleepingTreeScenarios}) {
    for (explore::Scenario& scenario : scenarios()) all.push_back(std::move(scenario));
  }
  return all;
}

int Sites() {
  for (const explore::Scenario& scenario : AllScenarios()) explore::ExploreAll(scenario);
  for (const auto& [site, event] : explore::The().sites) std::printf("%p %d %d\n", site, event.kind, event.order);
  return 0;
}

int Weakened(int argc, char** argv) {
  for (int i = 3; i < argc; ++i) {
    const auto site = reinterpret_cast<const void*>(std::strtoull(argv[i], nullptr, 16));
    explore::The().weakened[site] = std::atoi(argv[2]);
  }
  for (const explore::Scenario& scenario : AllScenarios()) {
    const explore::Result result = explore::ExploreAll(scenario);
    if (result.violation.empty()) continue;
    std::printf("%s: %s\n", scenario.name.c_str(), result.violation.substr(0, result.violation.find('\n')).c_str());
    return 0;
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1 && std::string(argv[1]) == "sites") return Sites();
  if (argc > 3 && std::string(argv[1]) == "weakened") return Weakened(argc, argv);
  return RunOne(kTests, argc, argv);
}
