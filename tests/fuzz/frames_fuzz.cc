// Frames of the side channel: TakeFrame takes a whole frame that was made with its key, and nothing else, however the bytes
// are cut, changed or continued.

#include <string>

#include "input.h"
#include "monitor/hmac.h"
#include "monitor/side_channel.h"
#include "monitor/side_connection.h"

using pycollective::Came;
using pycollective::Frame;
using pycollective::HmacSha256;
using pycollective::kMacBytes;
using pycollective::TakeFrame;
using pycollective::Writer;

namespace {

constexpr size_t kHead = 16 + kMacBytes;

struct Taken {
  Came came;
  int64_t kind;
  std::string text;
};

Taken Take(const std::string& key, const std::string& received) {
  Taken taken{Came::kPart, 0, "nothing"};
  taken.came = TakeFrame(key, received, &taken.kind, &taken.text);
  ALWAYS(taken.came == Came::kAll || taken.text == "nothing");
  return taken;
}

// Bytes of somebody who does not know the key.
void OfStranger(const std::string& key, Input& input) {
  const std::string received = input.Rest();
  ALWAYS(Take(key, received).came == (received.size() < kHead ? Came::kPart : Came::kForged));
}

// A right frame, and what becomes of it.
void OfRank(const std::string& key, Input& input) {
  const int64_t kind = input.Number();
  const uint8_t place = input.Byte(), change = input.Byte();
  const std::string text = input.Rest(), frame = Frame(key, kind, text);
  const Taken whole = Take(key, frame);
  ALWAYS(whole.came == Came::kAll && whole.kind == kind && whole.text == text);
  ALWAYS(Take(key, frame + "x").came == Came::kForged);
  ALWAYS(Take(key + "x", frame).came == Came::kForged);
  const size_t cut = frame.size() * place / 256;
  ALWAYS(Take(key, frame.substr(0, cut)).came == (cut < kHead ? Came::kPart : Came::kHead));
  std::string changed = frame;
  changed[cut] = static_cast<char>(changed[cut] ^ (change == 0 ? 1 : change));
  ALWAYS(Take(key, changed).came == Came::kForged);
}

// A head that was made with the key and tells any length.
void OfHead(const std::string& key, Input& input) {
  const int64_t kind = input.Number(), length = input.Number();
  const bool has_mac = input.Below(2) == 0;
  const std::string text = input.Rest(), head = Writer().Put(kind).Put(length).text();
  std::string received = head + HmacSha256(key, head) + text;
  if (has_mac) received += HmacSha256(key, received);
  const size_t after = received.size() - kHead;
  const Came came = Take(key, received).came;
  if (length < 0 || length > (16 << 20)) {
    ALWAYS(came == Came::kForged);
  } else if (after < static_cast<size_t>(length) + kMacBytes) {
    ALWAYS(came == Came::kHead);
  } else {
    ALWAYS(came == (has_mac && static_cast<size_t>(length) == text.size() ? Came::kAll : Came::kForged));
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Input input(data, size);
  const int way = input.Below(3);
  const std::string key = HmacSha256("secret", input.Text(4));
  if (way == 0) OfStranger(key, input);
  if (way == 1) OfRank(key, input);
  if (way == 2) OfHead(key, input);
  return 0;
}
