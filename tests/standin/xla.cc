// Lets XLA's CPU runtime call the handlers for accelerators, which use the stand-in for CUDA's runtime (cudart.h).
//
// A handler sees what it would see on a GPU: a stream, operands that earlier work of the stream writes, and results
// that later work of the stream reads. So each call gets copies of XLA's operands, which the stream makes late, and
// afterwards the stream copies the call's results to XLA's results.

#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "cudart.h"
#include "base/operations.h"
#include "xla/ffi/api/ffi.h"

namespace {

void* native = nullptr;  // the package's compiled library, as dlopen returns it

size_t BytesOf(const XLA_FFI_Buffer& buffer) {
  size_t nbytes = xla::ffi::ByteWidth(static_cast<xla::ffi::DataType>(buffer.dtype));
  for (int64_t i = 0; i < buffer.rank; ++i) nbytes *= static_cast<size_t>(buffer.dims[i]);
  return nbytes;
}

// Returns the device's only stream.
void* StreamOf(int device) {
  static std::mutex mutex;
  static auto* streams = new std::map<int, void*>;
  const std::lock_guard<std::mutex> lock(mutex);
  void*& stream = (*streams)[device];
  if (stream == nullptr) cudaStreamCreateWithFlags(&stream, 0);
  return stream;
}

thread_local void* current_stream = nullptr;

XLA_FFI_Error* GetStream(XLA_FFI_Stream_Get_Args* args) {
  args->stream = current_stream;
  return nullptr;
}

// Returns XLA's functions, where GetStream replaces XLA's own function.
const XLA_FFI_Api* WithStream(const XLA_FFI_Api* api) {
  static std::vector<char>* made = [api] {
    auto* bytes = new std::vector<char>(reinterpret_cast<const char*>(api),
                                        reinterpret_cast<const char*>(api) + api->struct_size);
    reinterpret_cast<XLA_FFI_Api*>(bytes->data())->XLA_FFI_Stream_Get = GetStream;
    return bytes;
  }();
  return reinterpret_cast<const XLA_FFI_Api*>(made->data());
}

// The memory of the device that replaces XLA's buffers, by their addresses: an operand and a result that share a buffer
// of XLA share one here, too.
class Buffers {
 public:
  ~Buffers() {
    for (auto& [address, memory] : by_address_) standin_free(memory.data, memory.nbytes);
  }
  void* For(void* address, size_t nbytes) {
    Memory& memory = by_address_[address];
    if (memory.data == nullptr) {
      memory = {standin_malloc(nbytes), nbytes};
      std::memset(standin_view(memory.data), 0x5A, nbytes);
    }
    return memory.data;
  }
  bool Has(void* address) const { return by_address_.count(address) != 0; }

  // Gives the memory to another program, which writes it: checks later whether the writes are still there.
  void Reuse() {
    for (auto& [address, memory] : by_address_) std::memset(standin_view(memory.data), kReused, memory.nbytes);
  }
  bool IsAsReused() const {
    return std::all_of(by_address_.begin(), by_address_.end(), [&](const auto& each) {
      const char* const first = static_cast<char*>(standin_view(each.second.data));
      return std::all_of(first, first + each.second.nbytes, [](char byte) { return byte == kReused; });
    });
  }

 private:
  static constexpr char kReused = 0x77;

  struct Memory {
    void* data = nullptr;
    size_t nbytes = 0;
  };
  std::unordered_map<void*, Memory> by_address_;
};

struct Copy {
  void* to;
  std::vector<char> snapshot;  // `from` may lie in it
  const void* from;
  size_t nbytes;
};

void Enqueue(void* stream, Copy* copy) {
  standin_launch(
      stream,
      [](void* argument) {
        const std::unique_ptr<Copy> copy(static_cast<Copy*>(argument));
        std::memcpy(standin_view(copy->to), standin_view(copy->from), copy->nbytes);
      },
      copy);
}

// Copies when the stream has done its earlier work. `as_it_is_now`: copies what `from` holds now, even if it changes
// until then.
void CopyLater(void* stream, void* to, const void* from, size_t nbytes, bool as_it_is_now) {
  auto* copy = new Copy{to, {}, from, nbytes};
  if (as_it_is_now) {
    copy->snapshot.assign(static_cast<const char*>(from), static_cast<const char*>(from) + nbytes);
    copy->from = copy->snapshot.data();
  }
  Enqueue(stream, copy);
}

// Writes over an operand when the stream has done its earlier work. On a GPU a later kernel may do so, since XLA reuses
// the memory of an array that nothing reads any more.
void SpoilLater(void* stream, void* memory, size_t nbytes) {
  auto* copy = new Copy{memory, std::vector<char>(nbytes, 0x69), nullptr, nbytes};
  copy->from = copy->snapshot.data();
  Enqueue(stream, copy);
}

// The buffers of allreduces that have started and not ended, by the address of XLA's first result.
std::mutex begun_mutex;
auto& reused = *new std::vector<std::shared_ptr<Buffers>>;
std::atomic<int> device_shift{0};
std::unordered_map<void*, std::shared_ptr<Buffers>>* begun = new std::unordered_map<void*, std::shared_ptr<Buffers>>;

// What a handler does: a whole call, or one half of an allreduce.
enum Part { kWhole, kAllreduceStart, kAllreduceDone };

// Calls the package's handler of this name as described at the top.
XLA_FFI_Error* Call(const char* name, Part part, XLA_FFI_CallFrame* frame) {
  auto* handler = reinterpret_cast<XLA_FFI_Handler*>(dlsym(native, name));
  if (frame->extension_start != nullptr || frame->stage != XLA_FFI_ExecutionStage_EXECUTE) return handler(frame);
  XLA_FFI_DeviceOrdinal_Get_Args ordinal{XLA_FFI_DeviceOrdinal_Get_Args_STRUCT_SIZE, nullptr, frame->ctx, 0};
  if (XLA_FFI_Error* error = frame->api->XLA_FFI_DeviceOrdinal_Get(&ordinal)) return error;
  cudaSetDevice(ordinal.device_ordinal + device_shift);
  void* const stream = current_stream = StreamOf(ordinal.device_ordinal);

  const auto buffer_of = [](void* buffer) -> XLA_FFI_Buffer& { return *static_cast<XLA_FFI_Buffer*>(buffer); };
  void* first = nullptr;
  for (int64_t i = 0; i < frame->rets.size; ++i) {
    const XLA_FFI_Buffer& result = buffer_of(frame->rets.rets[i]);
    if (first == nullptr && BytesOf(result) > 0) first = result.data;
  }
  auto buffers = std::make_shared<Buffers>();
  if (part == kAllreduceDone) {
    const std::lock_guard<std::mutex> lock(begun_mutex);
    if (begun->count(first) != 0) {
      buffers = (*begun)[first];
      begun->erase(first);
    }
  }

  std::vector<XLA_FFI_Buffer> args(static_cast<size_t>(frame->args.size)), rets(static_cast<size_t>(frame->rets.size));
  std::vector<void*> arg_pointers, ret_pointers;
  for (size_t i = 0; i < args.size(); ++i) {
    args[i] = buffer_of(frame->args.args[i]);
    if (const size_t nbytes = BytesOf(args[i])) {
      const bool known = buffers->Has(args[i].data);
      void* own = buffers->For(args[i].data, nbytes);
      if (!known) CopyLater(stream, own, args[i].data, nbytes, true);
      args[i].data = own;
    }
    arg_pointers.push_back(&args[i]);
  }
  std::vector<XLA_FFI_Buffer> results;  // as XLA handed them over
  for (size_t i = 0; i < rets.size(); ++i) {
    rets[i] = buffer_of(frame->rets.rets[i]);
    results.push_back(rets[i]);
    if (const size_t nbytes = BytesOf(rets[i])) rets[i].data = buffers->For(rets[i].data, nbytes);
    ret_pointers.push_back(&rets[i]);
  }
  XLA_FFI_CallFrame own = *frame;
  own.api = WithStream(frame->api);
  own.args.args = arg_pointers.data();
  own.rets.rets = ret_pointers.data();
  XLA_FFI_Error* error = handler(&own);
  for (const XLA_FFI_Buffer& arg : args) {
    const bool is_result =
        std::any_of(rets.begin(), rets.end(), [&](const XLA_FFI_Buffer& ret) { return ret.data == arg.data; });
    if (const size_t nbytes = BytesOf(arg); nbytes > 0 && !is_result) SpoilLater(stream, arg.data, nbytes);
  }
  if (part == kAllreduceStart && error == nullptr && first != nullptr) {
    const std::lock_guard<std::mutex> lock(begun_mutex);
    (*begun)[first] = buffers;
    return nullptr;
  }
  for (size_t i = 0; i < rets.size(); ++i) {
    if (const size_t nbytes = BytesOf(rets[i])) CopyLater(stream, results[i].data, rets[i].data, nbytes, false);
  }
  // The descriptions of the arrays end with the handler, though the call may go on.
  for (auto* list : {&args, &rets}) {
    for (XLA_FFI_Buffer& each : *list) each = {XLA_FFI_Buffer_STRUCT_SIZE, nullptr, each.dtype, nullptr, 0, nullptr};
  }
  cudaStreamSynchronize(stream);
  return error;
}

}  // namespace

// Sets the package's compiled library. Returns whether this process has loaded it.
extern "C" bool standin_use(const char* path) {
  native = dlopen(path, RTLD_NOW | RTLD_NOLOAD);
  return native != nullptr;
}

// Makes another device current in the handlers' threads than XLA's.
extern "C" void standin_shift_device(int shift) { device_shift = shift; }

// XLA's part after a program has failed between a start and its end: another program gets the arrays at once, and writes them.
// Returns the number of such calls.
extern "C" int64_t standin_reuse() {
  const std::lock_guard<std::mutex> lock(begun_mutex);
  for (auto& [address, buffers] : *begun) {
    buffers->Reuse();
    reused.push_back(buffers);
  }
  begun->clear();
  return static_cast<int64_t>(reused.size());
}

// Returns for how many of them a late copy has written over what that program wrote.
extern "C" int64_t standin_spoilt() {
  const std::lock_guard<std::mutex> lock(begun_mutex);
  return std::count_if(reused.begin(), reused.end(), [](const auto& buffers) { return !buffers->IsAsReused(); });
}

// Defines a handler for each of the package's handlers for accelerators, with the same name.
#define STANDIN(name, part)                                                               \
  extern "C" XLA_FFI_Error* pycollective_device_##name(XLA_FFI_CallFrame* call_frame) {   \
    return Call("pycollective_device_" #name, part, call_frame);                          \
  }
#define STANDIN_WHOLE(name, ...) STANDIN(name, kWhole)
#define STANDIN_HALF(name, Name, ...) STANDIN(name, k##Name)
PYCOLLECTIVE_OPERATIONS(STANDIN_WHOLE, STANDIN_WHOLE)
PYCOLLECTIVE_DEVICE_OPERATIONS(STANDIN_HALF)
