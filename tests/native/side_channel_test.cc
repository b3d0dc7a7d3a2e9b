// Tests of the side channel between ranks of one job: many at once, large texts, other addresses, and how a connection that
// stays tells the end of a rank.

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <list>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "harness.h"
#include "monitor/hmac.h"
#include "monitor/side_channel.h"
#include "monitor/side_connection.h"
#include "ranks.h"

namespace pycollective {
namespace {

constexpr int64_t kLongNs = 20 * kSecondNs;  // for what comes

Reply AskOne(const std::vector<Address>& addresses, int64_t kind, const std::string& text, int64_t limit_ns = kLongNs,
             const std::string& secret = kSecret) {
  return SideChannel(1, {addresses}, secret).Ask({0}, kind, text, limit_ns)[0];
}

// More ranks than connections at once; the replies have the order of the ranks that were asked.
void TestManyRanks() {
  constexpr int kRanks = 300;
  std::list<PlayedRank> ranks;
  std::vector<std::vector<Address>> addresses;
  for (int rank = 0; rank < kRanks; ++rank) {
    ranks.emplace_back(rank, [rank](int64_t, const std::string& text) { return text + std::to_string(rank); });
    addresses.push_back({ranks.back().address()});
  }
  std::vector<int> asked;
  for (int rank = kRanks - 1; rank >= 0; --rank) asked.push_back(rank);
  const std::vector<Reply> replies = SideChannel(0, addresses, kSecret).Ask(asked, 5, "I am ", kLongNs);
  CHECK(replies.size() == kRanks);
  for (size_t i = 0; i < asked.size(); ++i) {
    CHECK(replies[i].came && replies[i].text == "I am " + std::to_string(asked[i]));
    CHECK(replies[i].connection == -1 && !replies[i].refused && replies[i].accepted);
  }
  for (const PlayedRank& rank : ranks) CHECK(rank.requests() == std::vector<Asked>({{5, "I am "}}));
}

// Texts that no socket takes at once, in both directions.
void TestLargeTexts() {
  PlayedRank rank(0, [](int64_t, const std::string& text) { return text; });
  std::string text(size_t{2} << 20, 'a');
  for (size_t i = 0; i < text.size(); ++i) text[i] = static_cast<char>(i * i >> 7);
  const Reply reply = AskOne({rank.address()}, 7, text);
  CHECK(reply.came && reply.text == text);
}

// Nobody keeps more of a text than a text may have.
void TestTooLongTexts() {
  constexpr int64_t kMost = int64_t{16} << 20;
  for (const int64_t length : {int64_t{0}, kMost, kMost + 1, INT64_MAX, int64_t{-1}, INT64_MIN}) {
    const std::string head = Writer().Put(7).Put(length).text();
    int64_t kind = 0;
    std::string text;
    const Came came = TakeFrame("key", head + HmacSha256("key", head), &kind, &text);
    CHECK(came == (0 <= length && length <= kMost ? Came::kHead : Came::kForged));
  }
}

void TestWhoDoesNotKnowTheSecret() {
  PlayedRank rank(0), other(1);
  Reply reply = AskOne({rank.address()}, 7, "a", kLongNs, "x");
  CHECK(!reply.came && !reply.refused && reply.accepted && reply.text.empty());
  reply = AskOne({other.address()}, 7, "a");  // where rank 0 should be
  CHECK(!reply.came && reply.accepted);
  CHECK(rank.requests().empty() && other.requests().empty());
}

// An address that nobody has any more, one where another rank answers, none at all, and then the right one.
void TestOtherAddresses() {
  Address gone = NewAddress(), port{"127.0.0.1", 0};
  close(Listening(&gone));
  close(Listening(&port));
  PlayedRank rank(0), other(1);
  const Address nowhere{"no address", 0};
  CHECK(AskOne({nowhere, gone, port, other.address(), rank.address()}, 7, "a").text == "re: a");
  for (const Address& address : {gone, port}) {
    const Reply reply = AskOne({address}, 7, "a");
    CHECK(!reply.came && reply.refused && !reply.accepted);
  }
  CHECK(!AskOne({gone, rank.address()}, 7, "a").refused);
  const Reply nothing = AskOne({nowhere}, 7, "a");
  CHECK(!nothing.came && !nothing.refused && !nothing.accepted);
}

// A process that is stopped: its host accepts for it.
void TestLimit() {
  Address address = NewAddress();
  const int fd = Listening(&address);
  const int64_t begun = NowNs();
  const Reply reply = AskOne({address}, 7, "a", kSecondNs / 5);
  CHECK(NowNs() - begun >= kSecondNs / 5);
  CHECK(!reply.came && !reply.refused && reply.accepted);
  close(fd);
}

// Too many wait to be accepted: a rank that asks tries again until the other accepts.
void TestFullQueue() {
  Address address = NewAddress();
  const int fd = Listening(&address);
  CHECK(listen(fd, 0) == 0);
  sockaddr_storage to;
  const socklen_t size = ParseAddress(address, &to);
  const auto connected = [&](int flags) {
    const int made = socket(AF_UNIX, SOCK_STREAM | flags, 0);
    return connect(made, reinterpret_cast<sockaddr*>(&to), size) == 0 ? made : -1;
  };
  std::vector<int> waiting{connected(0)};
  for (int one; (one = connected(SOCK_NONBLOCK)) >= 0;) waiting.push_back(one);
  Reply reply = AskOne({address}, 7, "a", kSecondNs / 10);
  CHECK(!reply.came && !reply.refused && reply.accepted);
  std::atomic<bool> is_over{false};
  const SideChannel channel(0, {}, kSecret);
  std::thread server;
  std::thread asker([&] { reply = AskOne({address}, 7, "a"); });
  Sleep(50);
  for (const int one : waiting) close(one);
  server = std::thread([&] {
    channel.Serve({fd}, [](int64_t, const std::string& text) { return text; }, [&] { return is_over.load(); });
  });
  asker.join();
  is_over = true;
  server.join();
  CHECK(reply.came && reply.text == "a");
  close(fd);
}

// A peer that ends after so many bytes of what it should send keeps nobody from being answered.
void TestPeersThatEndInTheMiddle() {
  PlayedRank rank(0);
  sockaddr_storage to;
  const socklen_t size = ParseAddress(rank.address(), &to);
  const std::string own(kNonceBytes, 'n');
  for (const size_t bytes : {size_t{0}, size_t{1}, size_t{31}, size_t{32}, size_t{47}, size_t{48}, size_t{80}}) {
    const int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    CHECK(connect(fd, reinterpret_cast<sockaddr*>(&to), size) == 0);
    const size_t greeting = std::min(bytes, kNonceBytes);
    CHECK(send(fd, own.data(), greeting, 0) == static_cast<ssize_t>(greeting));
    if (bytes >= kNonceBytes) {
      char answer[kNonceBytes + kMacBytes];
      CHECK(recv(fd, answer, sizeof(answer), MSG_WAITALL) == sizeof(answer));
      const Keys keys(kSecret, 0, own, std::string(answer, kNonceBytes));
      const std::string frame = Frame(keys.Requests(), 7, "never");
      CHECK(send(fd, frame.data(), bytes - kNonceBytes, 0) == static_cast<ssize_t>(bytes - kNonceBytes));
    }
    close(fd);
    CHECK(AskOne({rank.address()}, 7, "a").came);
  }
  CHECK(rank.requests() == std::vector<Asked>(7, {7, "a"}));
}

// What the end of a rank says on a connection that stays.
void TestEndsOfRanks() {
  const auto stay = [](const PlayedRank& rank) {
    const Reply reply = AskOne({rank.address()}, SideChannel::kStay, "");
    CHECK(reply.came && reply.connection >= 0 && reply.farewell.size() == kMacBytes && reply.text.empty());
    return reply;
  };
  PlayedRank rank(0);
  const Reply first = stay(rank), second = stay(rank);
  CHECK(first.farewell != second.farewell);
  pollfd socket{first.connection, POLLIN, 0};
  CHECK(poll(&socket, 1, 50) == 0);  // it stays
  std::thread([&rank] {
    Sleep(20);
    rank.Leave();
  }).join();
  CHECK(!SideChannel::HasDied(first.connection, first.farewell));
  CHECK(SideChannel::HasDied(second.connection, first.farewell));  // the farewell of another connection
  close(first.connection);
  close(second.connection);
  const Reply late = stay(rank);  // it has left, and says so at once
  CHECK(!SideChannel::HasDied(late.connection, late.farewell));
  close(late.connection);
  CHECK(rank.requests().empty());
}

// A connection that ends within the farewell, with another one, or without any.
void TestDeaths() {
  const std::string farewell(kMacBytes, 'f');
  for (const std::string& said : {std::string(), farewell.substr(1), std::string(kMacBytes, 'g'), farewell}) {
    int ends[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends) == 0);
    std::thread sender([&] {
      for (const char& byte : said) CHECK(send(ends[1], &byte, 1, 0) == 1);
      close(ends[1]);
    });
    CHECK(SideChannel::HasDied(ends[0], farewell) == (said != farewell));
    sender.join();
    close(ends[0]);
  }
}

// While some answers take long the others come, and so many of them at most have a thread.
void TestLongAnswers() {
  constexpr int64_t kLong = 8, kShort = 9;
  std::atomic<bool> goes_on{false};
  std::atomic<int> under_way{0};
  const auto answer = [&](int64_t kind, const std::string& text) {
    if (kind == kShort) return text;
    ++under_way;
    while (!goes_on) Sleep(1);
    --under_way;
    if (text == "throws") throw std::bad_alloc();
    return "long " + text;
  };
  PlayedRank rank(0, answer, kSecret, [](int64_t kind, const std::string&) { return kind == kLong; });
  std::vector<Reply> replies(SideChannel::kMostLong + 2);
  std::vector<std::thread> asking;
  for (size_t i = 0; i < replies.size() - 2; ++i) {
    asking.emplace_back([&, i] { replies[i] = AskOne({rank.address()}, kLong, i == 0 ? "throws" : std::to_string(i)); });
  }
  CHECK(BecomesTrue([&] { return under_way == SideChannel::kMostLong; }));
  CHECK(AskOne({rank.address()}, kShort, "short").text == "short");
  const Reply one_more = AskOne({rank.address()}, kLong, "one more");
  CHECK(one_more.came && one_more.text.empty() && under_way == SideChannel::kMostLong);
  CHECK(!AskOne({rank.address()}, kShort, "", kSecondNs / 10, "x").came);  // nor do strangers keep it busy
  goes_on = true;
  for (std::thread& thread : asking) thread.join();
  CHECK(replies[0].came && replies[0].text.empty());
  for (size_t i = 1; i < replies.size() - 2; ++i) CHECK(replies[i].text == "long " + std::to_string(i));
  CHECK(BecomesTrue([&] { return AskOne({rank.address()}, kLong, "again").text == "long again"; }));
}

// The end of the service waits for the threads of answers, which use what belongs to its caller.
void TestEndOfServiceWaitsForLongAnswers() {
  std::atomic<bool> begun{false};
  bool is_over = false;
  std::thread asker;
  {
    PlayedRank rank(0, [&](int64_t, const std::string&) {
      begun = true;
      Sleep(100);
      is_over = true;
      return std::string();
    }, kSecret, [](int64_t, const std::string&) { return true; });
    asker = std::thread([address = rank.address()] { AskOne({address}, 7, ""); });
    CHECK(BecomesTrue([&] { return begun.load(); }));
    rank.End();
    CHECK(is_over);
  }
  asker.join();
}

// A text for each of the ranks.
void TestTextsOfRanks() {
  PlayedRank zero(0), one(1);
  const SideChannel channel(2, {{zero.address()}, {one.address()}}, kSecret);
  const std::vector<Reply> replies = channel.Ask({1, 0}, 7, std::vector<std::string>{"a", "b"}, kLongNs);
  CHECK(replies[0].text == "re: a" && replies[1].text == "re: b");
  CHECK(one.requests() == std::vector<Asked>({{7, "a"}}) && zero.requests() == std::vector<Asked>({{7, "b"}}));
}

void TestTexts() {
  const std::string text = Writer().Put(-2).Put("").Put("ab").Put(INT64_MAX).text();
  Reader reader(text);
  CHECK(reader.Number() == -2 && reader.Text().empty() && reader.Text() == "ab" && reader.Number() == INT64_MAX && reader.ok());
  CHECK(reader.Number() == 0 && !reader.ok());
  for (size_t cut = 0; cut < text.size(); ++cut) {
    const std::string part = text.substr(0, cut);
    Reader of_part(part);
    of_part.Number(), of_part.Text(), of_part.Text(), of_part.Number();
    CHECK(!of_part.ok());
  }
  for (const int64_t length : {int64_t{-1}, int64_t{3}, INT64_MAX, INT64_MIN}) {
    const std::string wrong = Writer().Put(length).text() + "ab";
    Reader of_wrong(wrong);
    CHECK(of_wrong.Text().empty() && !of_wrong.ok() && of_wrong.Number() == 0);
  }
}

}  // namespace
}  // namespace pycollective

int main(int argc, char** argv) {
  using namespace pycollective;
  return RunOne({{"many_ranks", TestManyRanks},
                 {"large_texts", TestLargeTexts},
                 {"too_long_texts", TestTooLongTexts},
                 {"who_does_not_know_the_secret", TestWhoDoesNotKnowTheSecret},
                 {"other_addresses", TestOtherAddresses},
                 {"limit", TestLimit},
                 {"full_queue", TestFullQueue},
                 {"peers_that_end_in_the_middle", TestPeersThatEndInTheMiddle},
                 {"ends_of_ranks", TestEndsOfRanks},
                 {"deaths", TestDeaths},
                 {"long_answers", TestLongAnswers},
                 {"end_of_service_waits_for_long_answers", TestEndOfServiceWaitsForLongAnswers},
                 {"texts_of_ranks", TestTextsOfRanks},
                 {"texts", TestTexts}},
                argc, argv);
}
