// Implementation of exports.h.

#include "base/exports.h"

#include <vector>


namespace pycollective {
namespace {

std::vector<std::string>& Table() {
  static auto* const table = new std::vector<std::string>;  // the files of the library fill it in any order
  return *table;
}

}  // namespace

Listed::Listed(std::initializer_list<std::string> functions) {
  Table().insert(Table().end(), functions.begin(), functions.end());
}

}  // namespace pycollective

// The table, as Typed has its entries, from index 0 on; null ends it.
PYCOLLECTIVE_EXPORT const char* pycollective_functions(int64_t index) {
  const std::vector<std::string>& table = pycollective::Table();
  return index >= 0 && index < static_cast<int64_t>(table.size()) ? table[static_cast<size_t>(index)].c_str() : nullptr;
}
