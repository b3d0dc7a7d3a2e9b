// The records of a rank as JSON: whatever the names of files, functions, communicators and the reason of the end are, it is
// JSON, and holds them.

#include <array>
#include <cctype>
#include <cstdint>
#include <string>

#include "base/operations.h"
#include "input.h"
#include "records/recorder.h"

using namespace pycollective;

namespace {

// The grammar of RFC 8259.
class Json {
 public:
  static bool Holds(const std::string& text) {
    Json json(text);
    json.Space();
    const bool has_value = json.Value();
    json.Space();
    return has_value && json.at_ == text.size();
  }

 private:
  explicit Json(const std::string& text) : text_(text) {}

  char Next() const { return at_ < text_.size() ? text_[at_] : '\0'; }
  bool Take(char wanted) { return Next() == wanted && ++at_; }
  bool Take(const std::string& word) {
    if (text_.compare(at_, word.size(), word) != 0) return false;
    at_ += word.size();
    return true;
  }
  void Space() {
    while (at_ < text_.size() && std::string(" \n\t\r").find(text_[at_]) != std::string::npos) ++at_;
  }
  bool Digits() {
    const size_t begin = at_;
    while (std::isdigit(static_cast<unsigned char>(Next()))) ++at_;
    return at_ > begin;
  }
  bool Number() {
    Take('-');
    if (!Take('0') && !Digits()) return false;
    return !std::isdigit(static_cast<unsigned char>(Next())) && (!Take('.') || Digits());
  }
  bool String() {
    if (!Take('"')) return false;
    while (at_ < text_.size()) {
      const char c = text_[at_++];
      if (c == '"') return true;
      if (static_cast<unsigned char>(c) < 0x20) return false;
      if (c != '\\') continue;
      if (Take('u')) {
        for (int digit = 0; digit < 4; ++digit) {
          if (!std::isxdigit(static_cast<unsigned char>(Next()))) return false;
          ++at_;
        }
      } else if (std::string("\"\\/bfnrt").find(Next()) == std::string::npos) {
        return false;
      } else {
        ++at_;
      }
    }
    return false;
  }
  bool Members(char close, bool named) {
    ++at_;
    Space();
    if (Take(close)) return true;
    do {
      Space();
      if (named && (!String() || !Take(':'))) return false;
      Space();
      if (!Value()) return false;
      Space();
    } while (Take(','));
    return Take(close);
  }
  bool Value() {
    switch (Next()) {
      case '{': return Members('}', true);
      case '[': return Members(']', false);
      case '"': return String();
      case 't': return Take(std::string("true"));
      case 'f': return Take(std::string("false"));
      case 'n': return Take(std::string("null"));
      default: return Number();
    }
  }

  const std::string& text_;
  size_t at_ = 0;
};

int64_t names = 1000;  // the next number of a line or a group: a number keeps its first name

Record RecordOf(Input& input) {
  Record record;
  record.id = input.Number();
  record.group = names;
  record.channel = input.Number();
  record.operation = input.Below(kFirstWait + 10);
  record.seq = input.Number();
  record.dtype = input.Number();
  record.reduce_op = input.Number();
  record.root = input.Number();
  record.dest = input.Number();
  record.source = input.Number();
  record.count = input.Number();
  record.dimensions.rank = input.Below(7);
  for (int64_t& size : record.dimensions.first) size = input.Number();
  record.dimensions.rest = input.Number();
  record.nbytes = input.Number();
  record.site = names;
  record.state = input.Below(kFailed + 1);
  record.created_ns = input.Number() / 4;
  record.started_ns = input.Number() / 4;
  record.completed_ns = input.Number() / 4;
  return record;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Input input(data, size);
  ++names;
  const int way = input.Below(4);
  const std::string file = input.Text(20), function = input.Text(20), line = std::to_string(input.Byte());
  const std::string site = way == 0 ? file : file + ":" + line + " (" + function + ")";
  AddSite(names, site);
  Group group{input.Text(20), {}};
  for (int ranks = input.Below(4); ranks > 0; --ranks) group.ranks.push_back(static_cast<int>(input.Number()));
  if (input.Below(2) == 0) AddGroup(names, group);
  const Record record = RecordOf(input);
  const std::string json = RecordJson(record);
  ALWAYS(Json::Holds(json));
  // Unless the function has such a number in its name, too, the frame has this one.
  if (way != 0 && function.find(" (") == std::string::npos) {
    ALWAYS(json.find("\"line\": " + line + "}]}") != std::string::npos);
  }
  ALWAYS(Json::Holds(GroupJson(names)));
  static int recorded = 0;
  if (recorded < 16 && record.state != kUnused) {
    ++recorded;
    Recorded(record).Finish(static_cast<CallState>(record.state));
  }
  if (input.Below(16) == 0) ALWAYS(Json::Holds(RecorderJson(0, 2, {input.Rest(), "job", {0, 1}})));  // it takes as long as a hundred others
  return 0;
}
