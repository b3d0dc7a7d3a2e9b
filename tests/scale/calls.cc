// Calls the handlers of the compiled library as XLA calls them, in processes without JAX, and counts the library's calls of MPI.

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "base/exports.h"
#include "mpi/mpi.h"
#include "xla/ffi/api/c_api.h"

struct XLA_FFI_Error {
  std::string message;
};

namespace {

using pycollective::kFunctionCount;

// MPI's functions ------------------------------------------------------------------------------------------------

std::array<std::atomic<int64_t>, kFunctionCount> counts{};
void* real[kFunctionCount];

// A function of MPI, number kIndex of kFunctionNames, that counts its calls.
template <size_t kIndex, typename... Arguments>
int Counted(Arguments... arguments) {
  counts[kIndex].fetch_add(1, std::memory_order_relaxed);
  return reinterpret_cast<int (*)(Arguments...)>(real[kIndex])(arguments...);
}

template <size_t kIndex, typename... Arguments>
void* AddressOf(int (*)(Arguments...)) {
  return reinterpret_cast<void*>(&Counted<kIndex, Arguments...>);
}

template <typename H, size_t... kIndices>
void CountAll(void** functions, std::index_sequence<kIndices...>) {
  using Of = pycollective::Functions<H>;
  void* counted[] = {
#define PYCOLLECTIVE_COUNTED(name, ...) AddressOf<offsetof(Of, name) / sizeof(void*)>(decltype(Of::name){}),
      PYCOLLECTIVE_MPI_FUNCTIONS(PYCOLLECTIVE_COUNTED)
#undef PYCOLLECTIVE_COUNTED
  };
  ((real[kIndices] = std::exchange(functions[kIndices], counted[kIndices])), ...);
}

// XLA's functions ------------------------------------------------------------------------------------------------

int64_t run_id = 0;

XLA_FFI_Error* CreateError(XLA_FFI_Error_Create_Args* args) { return new XLA_FFI_Error{args->message}; }

XLA_FFI_Error* GetRunId(XLA_FFI_RunId_Get_Args* args) {
  args->run_id = run_id;
  return nullptr;
}

XLA_FFI_Error* GetDeviceOrdinal(XLA_FFI_DeviceOrdinal_Get_Args* args) {
  args->device_ordinal = 0;
  return nullptr;
}

const XLA_FFI_Api& Api() {
  static const XLA_FFI_Api api = [] {
    XLA_FFI_Api made{};
    made.struct_size = XLA_FFI_Api_STRUCT_SIZE;
    made.api_version = {XLA_FFI_Api_Version_STRUCT_SIZE, nullptr, XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR};
    made.XLA_FFI_Error_Create = CreateError;
    made.XLA_FFI_RunId_Get = GetRunId;
    made.XLA_FFI_DeviceOrdinal_Get = GetDeviceOrdinal;
    return made;
  }();
  return api;
}

XLA_FFI_Buffer BufferOf(XLA_FFI_DataType dtype, void* data, int64_t* dimensions, int64_t number) {
  return {XLA_FFI_Buffer_STRUCT_SIZE, nullptr, dtype, data, number, dimensions};
}

}  // namespace

// Lets the functions of MPI at these addresses, in the order of kFunctionNames, be counted: puts others in their places.
PYCOLLECTIVE_EXPORT void scale_count(void** functions, int32_t handle_bytes) {
  constexpr auto kAll = std::make_index_sequence<kFunctionCount>();
  handle_bytes == sizeof(int) ? CountAll<int>(functions, kAll) : CountAll<void*>(functions, kAll);
}

// How often function number `index` was called.
PYCOLLECTIVE_EXPORT int64_t scale_calls(int32_t index) { return counts.at(static_cast<size_t>(index)); }

// Calls the handler of an allreduce, a sum of `count` float32. `comm`: the communicator's number and its fingerprint. `section`: as
// the attribute of programs. `run`: the number of the program's run. Returns null or the error, which stays valid until the next call.
PYCOLLECTIVE_EXPORT const char* scale_allreduce(XLA_FFI_Handler* handler, int64_t* comm, float* x, float* y, int64_t count,
                                                int64_t site, int64_t section, int64_t run) {
  run_id = run;
  XLA_FFI_Buffer token = BufferOf(XLA_FFI_DataType_TOKEN, nullptr, nullptr, 0);
  XLA_FFI_Buffer in = BufferOf(XLA_FFI_DataType_F32, x, &count, 1);
  XLA_FFI_Buffer out = BufferOf(XLA_FFI_DataType_F32, y, &count, 1);
  XLA_FFI_ArgType operand_types[] = {XLA_FFI_ArgType_BUFFER, XLA_FFI_ArgType_BUFFER};
  XLA_FFI_RetType result_types[] = {XLA_FFI_RetType_BUFFER, XLA_FFI_RetType_BUFFER};
  void* operands[] = {&token, &in};
  void* results[] = {&token, &out};

  struct Attribute {
    const char* name;
    int64_t value;
  };
  const Attribute named[] = {{"bucket_bytes", 1 << 20}, {"comm", 0}, {"devices", 1}, {"op", static_cast<int64_t>(pycollective::Op::kSum)},
                             {"order", 0}, {"replicated", 0}, {"section", section},
                             {"site", site}};  // sorted by name
  constexpr size_t kAttributes = std::size(named), kComm = 1;
  XLA_FFI_Array participants{XLA_FFI_DataType_S64, 2, comm};
  XLA_FFI_AttrType types[kAttributes];
  XLA_FFI_ByteSpan names[kAttributes];
  XLA_FFI_Scalar values[kAttributes];
  XLA_FFI_ByteSpan* name_of[kAttributes];
  void* attributes[kAttributes];
  for (size_t i = 0; i < kAttributes; ++i) {
    names[i] = {named[i].name, std::char_traits<char>::length(named[i].name)};
    values[i] = {XLA_FFI_DataType_S64, const_cast<int64_t*>(&named[i].value)};
    name_of[i] = &names[i];
    types[i] = i == kComm ? XLA_FFI_AttrType_ARRAY : XLA_FFI_AttrType_SCALAR;
    attributes[i] = i == kComm ? static_cast<void*>(&participants) : &values[i];
  }

  XLA_FFI_CallFrame frame{};
  frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
  frame.api = &Api();
  frame.stage = XLA_FFI_ExecutionStage_EXECUTE;
  frame.args = {XLA_FFI_Args_STRUCT_SIZE, nullptr, 2, operand_types, operands};
  frame.rets = {XLA_FFI_Rets_STRUCT_SIZE, nullptr, 2, result_types, results};
  frame.attrs = {XLA_FFI_Attrs_STRUCT_SIZE, nullptr, static_cast<int64_t>(kAttributes), types, name_of, attributes};
  XLA_FFI_Error* const error = handler(&frame);
  if (error == nullptr) return nullptr;
  static auto& message = *new std::string;
  message = std::move(error->message);
  delete error;
  return message.c_str();
}
