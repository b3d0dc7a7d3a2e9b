// Implementation of heard.h.

#include "monitor/heard.h"

#include <algorithm>

#include "monitor/side_channel.h"

namespace pycollective {

std::vector<int> Heard::ranks() const {
  std::vector<int> ranks;
  for (const Status& status : statuses) ranks.insert(ranks.end(), status.ranks.begin(), status.ranks.end());
  for (const Unheard& one : unheard) ranks.push_back(one.rank);
  std::sort(ranks.begin(), ranks.end());
  return ranks;
}

std::string Packed(const Heard& heard) {
  Writer writer;
  Put(writer, heard.statuses);
  writer.Put(static_cast<int64_t>(heard.unheard.size()));
  for (const Unheard& one : heard.unheard) {
    const int64_t flags = (one.is_asked ? 1 : 0) + (one.refused ? 2 : 0) + (one.accepted ? 4 : 0);
    writer.Put(one.rank).Put(flags).Put(one.state);
  }
  return writer.text();
}

bool Unpack(const std::string& text, int size, const std::vector<int>& ranks, Heard* heard) {
  Reader reader(text);
  heard->statuses = StatusesFrom(reader, size);
  heard->unheard.clear();
  for (int64_t left = reader.Number(); left > 0 && reader.ok(); --left) {
    const int64_t rank = reader.Number(), flags = reader.Number(), state = reader.Number();
    if (rank < 0 || rank >= size) return false;
    heard->unheard.push_back({static_cast<int>(rank), (flags & 1) != 0, (flags & 2) != 0, (flags & 4) != 0, state});
  }
  const auto is_head = [&](const Unheard& one) { return one.rank == ranks.front(); };
  return reader.ok() && !ranks.empty() && heard->ranks() == ranks && std::none_of(heard->unheard.begin(), heard->unheard.end(), is_head);
}

}  // namespace pycollective
