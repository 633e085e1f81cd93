// Messages over sockets, between two ends in one process: the meaning that MPI gives to tags, and
// what becomes of messages that come early, are given up, or never come.
#include "moiety/comm/local/connections.h"

#include <optional>
#include <sys/socket.h>
#include <vector>

#include <gtest/gtest.h>

namespace moiety::comm::local {
namespace {

// Rank 0's and rank 1's ends.
class ConnectionsTest : public ::testing::Test {
 protected:
  ConnectionsTest() {
    int ends[2];
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
    zero.emplace(std::vector<int>{-1, ends[0]});
    one.emplace(std::vector<int>{ends[1], -1});
  }
  // Whether the request completes within some calls, in which the other end moves too; the code must
  // be 0.
  static bool completes(Connections& here, Connections::Request request, Connections* other) {
    int ignored = 0, sender = 0;
    for (int i = 0; i < 2000; ++i) {
      int code = -1;
      if (here.test(request, &code)) {
        EXPECT_EQ(code, 0);
        return true;
      }
      if (other) other->probe(kNoTag, &sender, &ignored);
    }
    return false;
  }
  static constexpr int kNoTag = 99;
  std::optional<Connections> zero, one;
};

std::vector<uint8_t> bytes(size_t n, int seed) {
  std::vector<uint8_t> out(n);
  for (size_t i = 0; i < n; ++i) out[i] = uint8_t(i * 31 + i / 251 + size_t(seed));
  return out;
}

TEST_F(ConnectionsTest, TagsDoNotHoldEachOtherUpAndKeepTheirOrder) {
  const auto a = bytes(10, 1), b = bytes(70000, 2), c = bytes(3, 3);
  std::vector<Connections::Request> sent;
  sent.push_back(zero->send(a.data(), 10, 1, 5));
  sent.push_back(zero->send(b.data(), 70000, 1, 6));
  sent.push_back(zero->send(c.data(), 3, 1, 5));
  std::vector<uint8_t> x(10), y(70000), z(3);
  EXPECT_TRUE(completes(*one, one->receive(y.data(), 70000, 0, 6), &*zero));
  EXPECT_TRUE(completes(*one, one->receive(x.data(), 10, 0, 5), &*zero));
  EXPECT_TRUE(completes(*one, one->receive(z.data(), 3, 0, 5), &*zero));
  EXPECT_EQ(x, a);
  EXPECT_EQ(y, b);
  EXPECT_EQ(z, c);
  for (const auto request : sent) EXPECT_TRUE(completes(*zero, request, nullptr));
}

// More than the sockets and the place for early messages hold: it waits, and what comes behind it
// as well, until there is a receive.
TEST_F(ConnectionsTest, ALongMessageWaitsForItsReceive) {
  const size_t n = 12 << 20;
  const auto a = bytes(n, 4), b = bytes(5, 5);
  const auto first = zero->send(a.data(), int(n), 1, 1), second = zero->send(b.data(), 5, 1, 2);
  std::vector<uint8_t> x(n), y(5);
  const auto late = one->receive(y.data(), 5, 0, 2);
  EXPECT_FALSE(completes(*one, late, &*zero));
  const auto wanted = one->receive(x.data(), int(n), 0, 1);
  EXPECT_TRUE(completes(*one, wanted, &*zero));
  EXPECT_TRUE(completes(*one, late, &*zero));
  EXPECT_TRUE(completes(*zero, first, nullptr));
  EXPECT_TRUE(completes(*zero, second, nullptr));
  EXPECT_EQ(x, a);
  EXPECT_EQ(y, b);
}

TEST_F(ConnectionsTest, AReceiveMayBeLongerAndNeverShorter) {
  const auto a = bytes(8, 6);
  zero->send(a.data(), 8, 1, 1);
  zero->send(a.data(), 8, 1, 1);
  zero->send(a.data(), 0, 1, 1);
  std::vector<uint8_t> x(20), y(7);
  EXPECT_TRUE(completes(*one, one->receive(x.data(), 20, 0, 1), &*zero));
  EXPECT_EQ(x[7], a[7]);
  int code = 0;
  EXPECT_TRUE(one->test(one->receive(y.data(), 7, 0, 1), &code));
  EXPECT_EQ(code, Connections::kTooLong);
  EXPECT_TRUE(completes(*one, one->receive(nullptr, 0, 0, 1), &*zero));
}

TEST_F(ConnectionsTest, AReceiveThatIsGivenUpLeavesItsMemoryAlone) {
  const size_t n = 24 << 20;  // more than is read in one turn
  std::vector<uint8_t> x(n), y(4);
  const auto never = one->receive(y.data(), 4, 0, 3);
  one->cancel(never);
  EXPECT_TRUE(completes(*one, never, nullptr));
  // One that has begun: the rest of the message goes nowhere.
  const auto a = bytes(n, 7), b = bytes(4, 8);
  const auto begun = one->receive(x.data(), int(n), 0, 1);
  const auto sent = zero->send(a.data(), int(n), 1, 1);
  int code = 0;
  EXPECT_FALSE(one->test(begun, &code));
  EXPECT_EQ(x[0], a[0]);
  one->cancel(begun);
  EXPECT_TRUE(completes(*one, begun, nullptr));
  EXPECT_TRUE(completes(*zero, sent, &*one));
  zero->send(b.data(), 4, 1, 1);
  EXPECT_TRUE(completes(*one, one->receive(y.data(), 4, 0, 1), &*zero));
  EXPECT_EQ(y, b);
  EXPECT_EQ(x.back(), 0);
}

TEST_F(ConnectionsTest, WhatWasSentBeforeAnEndIsStillHeard) {
  const auto a = bytes(30, 9);
  const auto unread = one->send(a.data(), 30, 0, 8);
  EXPECT_TRUE(completes(*one, unread, nullptr));
  zero->send(a.data(), 30, 1, 0);
  zero.reset();
  int peer = -1, length = 0;
  EXPECT_FALSE(one->probe(7, &peer, &length));
  EXPECT_TRUE(one->probe(0, &peer, &length));
  EXPECT_EQ(peer, 0);
  EXPECT_EQ(length, 30);
  std::vector<uint8_t> x(30);
  EXPECT_TRUE(completes(*one, one->receive(x.data(), 30, 0, 0), nullptr));
  EXPECT_EQ(x, a);
  // Nothing comes, and nothing fails.
  EXPECT_FALSE(completes(*one, one->receive(x.data(), 30, 0, 0), nullptr));
  EXPECT_FALSE(completes(*one, one->send(a.data(), 30, 0, 0), nullptr));
}

}  // namespace
}  // namespace moiety::comm::local
