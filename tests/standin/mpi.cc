// Looks at the memory that MPI gets from the handlers. MPI reads and writes any memory of the stand-in's process that the host can access.
// On a GPU memory of the wrong kind would be an error of MPI, or would take the slow way without anybody's notice.

#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <set>
#include <string_view>
#include <type_traits>

#include "cudart.h"
#include "mpi/mpi.h"

namespace {

struct OpaqueHandle;  // not void: a handle must differ from an address of data

// What all functions share.
struct Watch {
  bool direct = false;
  bool strict = false;  // the arrays of an allreduce and of messages are watched as well
  const void* in_place = nullptr;
  std::set<int64_t> types;  // the datatypes of data, in the direct mode
  std::mutex mutex;
  std::set<int64_t> own_operations;  // they need memory of the host; guarded by `mutex`
};
auto& watch = *new Watch;

template <typename H>
int64_t Wide(H handle) {
  if constexpr (std::is_pointer_v<H>) {
    return reinterpret_cast<intptr_t>(handle);
  } else {
    return handle;
  }
}

constexpr bool Has(std::string_view name, std::string_view part) { return name.find(part) != std::string_view::npos; }
constexpr bool MayBeOnHost(std::string_view name) {
  return Has(name, "llreduce") || name == "MPI_Recv" || name == "MPI_Irecv" || name == "MPI_Isend";
}
constexpr bool IsReduction(std::string_view name) { return Has(name, "educe") || Has(name, "can"); }
constexpr bool HasData(std::string_view name) { return !Has(name, "Status") && !Has(name, "Get_count"); }

[[noreturn]] void Fail(const char* function, const char* expected, const char* got, const void* memory) {
  std::fprintf(stderr, "standin: expected memory of the %s for %s, got memory of the %s, %p\n", expected, function, got, memory);
  std::abort();
}

// The arguments of one call, in their order: one or two addresses of arrays, their number of elements, their datatype, and the operation if it
// is a reduction; the same for a second array; others.
class Arguments {
 public:
  explicit Arguments(const char* function) : function_(function) {}

  void Add(const void* data) {
    if (after_arrays_ > 0) count_ = after_arrays_ = 0;
    arrays_[count_++ % arrays_.size()] = data;
  }
  void Add(int number) { AddAfterArrays(number); }
  void Add(OpaqueHandle* handle) { AddAfterArrays(Wide(handle)); }
  template <typename Other>
  void Add(Other*) {}
  void Add(void* data) { Add(static_cast<const void*>(data)); }

  void Check() const {
    if (of_host_ == nullptr || !watch.direct || is_own_ || (MayBeOnHost(function_) && !watch.strict)) return;
    Fail(function_, "device", "host", of_host_);
  }

 private:
  void AddAfterArrays(int64_t number) {
    ++after_arrays_;
    if (after_arrays_ == 1) is_empty_ = number == 0;
    if (after_arrays_ == 2 && !is_empty_) SetType(number);
    if (after_arrays_ == 3 && IsReduction(function_)) {
      const std::lock_guard<std::mutex> lock(watch.mutex);
      is_own_ = watch.own_operations.count(number) > 0;
    }
  }
  void SetType(int64_t type) {
    for (size_t i = 0; i < count_; ++i) {
      const void* const data = arrays_[i];
      if (data == nullptr || data == watch.in_place) continue;
      if (standin_view(data) != data && !watch.direct) Fail(function_, "host", "device", data);
      if (standin_view(data) == data && watch.types.count(type) > 0) of_host_ = data;
    }
  }

  const char* const function_;
  std::array<const void*, 2> arrays_{};
  size_t count_ = 0;
  int after_arrays_ = 0;
  bool is_empty_ = false;  // any address will do
  bool is_own_ = false;
  const void* of_host_ = nullptr;
};

template <typename H, size_t kNumber, typename... Parameters>
struct Watched {
  static inline int (*real)(Parameters...) = nullptr;

  static int Call(Parameters... parameters) {
    constexpr const char* kName = pycollective::kFunctionNames[kNumber];
    if constexpr (HasData(kName)) {
      Arguments arguments(kName);
      (arguments.Add(parameters), ...);
      arguments.Check();
    }
    const int code = real(parameters...);
    if constexpr (std::string_view(kName) == "MPI_Op_create") (Made(parameters), ...);
    return code;
  }

 private:
  static void Made(H* operation) {
    const std::lock_guard<std::mutex> lock(watch.mutex);
    watch.own_operations.insert(Wide(*operation));
  }
  template <typename Other>
  static void Made(Other) {}
};

template <typename H>
void WatchAll(pycollective::Functions<H>* functions) {
  enum Number : size_t {
#define STANDIN_NUMBER(name, ...) k##name,
    PYCOLLECTIVE_MPI_FUNCTIONS(STANDIN_NUMBER)
#undef STANDIN_NUMBER
  };
#define STANDIN_WATCH(name, ...)                                \
  {                                                             \
    using Function = Watched<H, k##name, __VA_ARGS__>;          \
    Function::real = functions->name;                           \
    functions->name = &Function::Call;                          \
  }
  PYCOLLECTIVE_MPI_FUNCTIONS(STANDIN_WATCH)
#undef STANDIN_WATCH
}

}  // namespace

extern "C" {

void standin_watch_mpi(void** functions, int64_t handle_bytes, int64_t in_place, bool direct, bool strict, const int64_t* types,
                       int64_t count) {
  watch.direct = direct;
  watch.strict = strict;
  watch.in_place = reinterpret_cast<const void*>(static_cast<intptr_t>(in_place));
  for (int64_t i = 0; i < count; ++i) watch.types.insert(handle_bytes == sizeof(int) ? static_cast<int>(types[i]) : types[i]);
  if (handle_bytes == sizeof(int)) {
    WatchAll(reinterpret_cast<pycollective::Functions<int>*>(functions));
  } else {
    WatchAll(reinterpret_cast<pycollective::Functions<OpaqueHandle*>*>(functions));
  }
}
}
