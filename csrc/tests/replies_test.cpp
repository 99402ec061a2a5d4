#include "worker/execute/replies.h"

#include <doctest/doctest.h>

#include <memory>
#include <string>
#include <vector>

#include "wire/codec.h"
#include "wire/replies.h"

using shoal::wire::ErrorKind;
using shoal::wire::ErrorReply;
using shoal::wire::Kind;
using shoal::worker::Failure;
using shoal::worker::Replies;

namespace {

class Sink final : public shoal::worker::ReplySink {
 public:
  void send(Kind kind, ErrorKind error, uint64_t sequence,
            const std::vector<uint64_t>& payload) override {
    std::string line = std::to_string(sequence) + ":";
    if (error == ErrorKind::kNone) {
      line += " " + std::to_string(payload.size()) + " words";
    } else {
      const auto reply = shoal::wire::readBody<ErrorReply>(payload);
      line += " " + std::string(reply.text()) + " of " + std::to_string(reply.sequence) + " in " +
              std::string(reply.name()) + ", shown in " + std::to_string(reply.shown_in);
    }
    sent.push_back(line);
  }
  void sendBytes(Kind, uint64_t sequence, std::span<const std::byte> bytes) override {
    sent.push_back(std::to_string(sequence) + ": " + std::to_string(bytes.size()) + " bytes");
  }

  std::vector<std::string> sent;
};

std::shared_ptr<const Failure> failure(uint64_t sequence, const std::string& text) {
  return std::make_shared<const Failure>(Failure{ErrorKind::kRuntime, sequence, "aten::mm", text});
}

using Lines = std::vector<std::string>;

}  // namespace

TEST_CASE("replies: a message gets one reply, if it expects one") {
  Sink sink;
  Replies replies(sink);
  replies.begin(Kind::kCall, 1, /*expected=*/false);
  replies.finish();
  CHECK(sink.sent.empty());
  replies.begin(Kind::kSync, 2, /*expected=*/true);
  replies.finish();
  replies.begin(Kind::kStats, 3, /*expected=*/true);
  replies.reply({7, 8});
  replies.finish();
  CHECK(sink.sent == Lines{"2: 0 words", "3: 2 words"});
}

TEST_CASE("replies: a failure that nobody waits for comes with the next reply, and once") {
  Sink sink;
  Replies replies(sink);
  replies.begin(Kind::kCall, 4, /*expected=*/false);
  replies.fail(failure(3, "first"));
  replies.begin(Kind::kCall, 5, /*expected=*/false);
  replies.fail(failure(5, "second"));
  CHECK(sink.sent.empty());
  CHECK(replies.hasFailed());
  replies.begin(Kind::kSync, 6, /*expected=*/true);
  replies.finish();
  CHECK_FALSE(replies.hasFailed());
  replies.begin(Kind::kSync, 7, /*expected=*/true);
  replies.finish();
  CHECK(sink.sent == Lines{"6: first of 3 in aten::mm, shown in 4", "7: 0 words"});
}

TEST_CASE("replies: a request that fails reports the older failure, else its own") {
  Sink sink;
  Replies replies(sink);
  replies.begin(Kind::kCall, 1, /*expected=*/false);
  replies.fail(failure(1, "older"));
  replies.begin(Kind::kRead, 2, /*expected=*/true);
  replies.fail(failure(2, "own"));
  replies.begin(Kind::kRead, 3, /*expected=*/true);
  replies.fail(failure(3, "own"));
  CHECK(sink.sent ==
        Lines{"2: older of 1 in aten::mm, shown in 1", "3: own of 3 in aten::mm, shown in 0"});
}

TEST_CASE("replies: a message that fails after its reply keeps the failure for the next one") {
  Sink sink;
  Replies replies(sink);
  replies.begin(Kind::kRead, 1, /*expected=*/true);
  replies.reply({1});
  replies.fail(failure(1, "late"));
  CHECK(sink.sent == Lines{"1: 1 words"});
  CHECK(replies.hasFailed());
}

TEST_CASE("replies: long texts are cut to what a reply may hold") {
  Sink sink;
  Replies replies(sink);
  replies.begin(Kind::kRead, 1, /*expected=*/true);
  replies.fail(failure(1, std::string(size_t{1} << 20, 'x')));
  REQUIRE(sink.sent.size() == 1);  // the sink has decoded it
  CHECK(sink.sent[0].size() < (size_t{1} << 20));
}
