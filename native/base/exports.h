// The table of what Python may call: the name and the types of each function, from its declaration.
//
// A file that defines such functions lists them at its end:
//
//     const pycollective::Listed listed{PYCOLLECTIVE_TYPED(board_bytes), PYCOLLECTIVE_TYPED(board_open)};

#ifndef PYCOLLECTIVE_NATIVE_BASE_EXPORTS_H_
#define PYCOLLECTIVE_NATIVE_BASE_EXPORTS_H_

#include <cstdint>
#include <initializer_list>
#include <string>
#include <type_traits>

// Marks a C symbol that the shared library exports; all others are hidden.
#define PYCOLLECTIVE_EXPORT extern "C" __attribute__((visibility("default")))

// A function of the table: "board_bytes" for pycollective_board_bytes.
#define PYCOLLECTIVE_TYPED(name) pycollective::Typed(#name, &pycollective_##name)

namespace pycollective {

template <typename T, typename To>
constexpr bool kPointsTo = std::is_pointer_v<T> && std::is_same_v<std::remove_const_t<std::remove_pointer_t<T>>, To>;

// The letter of a type, as transport/native_library.py reads it.
template <typename T>
constexpr char LetterOf() {
  if constexpr (std::is_void_v<T>) return 'v';
  else if constexpr (std::is_same_v<T, bool>) return 'b';
  else if constexpr (std::is_same_v<T, int32_t>) return 'i';
  else if constexpr (std::is_same_v<T, int64_t>) return 'l';
  else if constexpr (std::is_same_v<T, double>) return 'd';
  else if constexpr (std::is_same_v<T, const char*>) return 's';  // a char* is the caller's to free: an address
  else if constexpr (kPointsTo<T, int32_t>) return 'I';
  else if constexpr (kPointsTo<T, uint32_t>) return 'U';
  else if constexpr (kPointsTo<T, int64_t>) return 'L';
  else {
    static_assert(std::is_pointer_v<T>, "no letter for this type: give it one in LetterOf and in native_library.py");
    return 'p';
  }
}

// "board_bytes li": the name, the type of the result, the types of the arguments.
template <typename Result, typename... Arguments>
std::string Typed(const char* name, Result (*)(Arguments...)) {
  return std::string(name) + ' ' + std::string{LetterOf<Result>(), LetterOf<Arguments>()...};
}

// Adds functions to the table.
struct Listed {
  Listed(std::initializer_list<std::string> functions);
};

}  // namespace pycollective

#endif  // PYCOLLECTIVE_NATIVE_BASE_EXPORTS_H_
