// The world of processes over a table of functions that is not MPI's: what MPI would have to break
// for.
#include <cstdio>
#include <cstring>
#include <deque>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "moiety/base/error.h"
#include "moiety/comm/mpi/mpi_endpoint.h"
#include "moiety/comm/mpi/transfers.h"
#include "moiety/comm/mpi/world.h"

namespace moiety::comm::mpi {
namespace {

constexpr int kBroken = 17;

// Rank 0 of a world whose other ranks are silent. Sends are complete at once unless `stuck`.
struct Fake {
  struct Sent {
    int peer, tag;
    std::string bytes;
    bool operator==(const Sent&) const = default;
  };
  std::vector<Sent> sent;
  std::deque<Sent> inbox;  // of any tag
  std::vector<int> received;
  int calls = 0;
  int code = 0;
  bool stuck = false;
};
Fake* g_fake = nullptr;

int send(const void* data, int bytes, int peer, int tag, Request* request) {
  ++g_fake->calls;
  *request = 0;
  g_fake->sent.push_back({peer, tag, std::string(static_cast<const char*>(data), bytes)});
  return g_fake->code;
}

int receive(void* data, int bytes, int peer, int tag, Request* request) {
  ++g_fake->calls;
  g_fake->received.push_back(bytes);
  *request = 1;  // nothing comes
  if (!g_fake->inbox.empty() && g_fake->inbox.front().tag == tag) {
    EXPECT_EQ(g_fake->inbox.front().peer, peer);
    std::memcpy(data, g_fake->inbox.front().bytes.data(), bytes);
    g_fake->inbox.pop_front();
    *request = 0;
  }
  return g_fake->code;
}

int test(Request* request, int* done) {
  ++g_fake->calls;
  *done = *request == 0 && !g_fake->stuck;
  return g_fake->code;
}

int cancel(Request* request) {
  ++g_fake->calls;
  *request = 0;
  return 0;
}

int probe(int tag, int* found, int* peer, int* bytes) {
  ++g_fake->calls;
  *found = !g_fake->inbox.empty() && g_fake->inbox.front().tag == tag;
  if (!*found) return 0;
  *peer = g_fake->inbox.front().peer;
  *bytes = static_cast<int>(g_fake->inbox.front().bytes.size());
  return 0;
}

void error_text(int code, char* out, int bytes) {
  std::snprintf(out, size_t(bytes), "code %d", code);
}

constexpr Functions kFunctions{.version = kFunctionsVersion,
                               .name = "MPI",
                               .library = nullptr,
                               .error_text = error_text,
                               .start = nullptr,
                               .finish = nullptr,
                               .send = send,
                               .receive = receive,
                               .test = test,
                               .cancel = cancel,
                               .probe = probe};

class MpiWorld : public ::testing::Test {
 protected:
  void SetUp() override { g_fake = &fake_; }
  std::shared_ptr<World> make(int size, MpiGroupOptions options = {}, int largest_tag = 1000) {
    return std::make_shared<World>(kFunctions, options, Processes{0, size}, largest_tag);
  }
  static std::string error_of(auto&& f) {
    try {
      f();
    } catch (const Error& e) {
      EXPECT_EQ(e.kind(), ErrorKind::kComm);
      return e.what();
    }
    return "no error";
  }
  Fake fake_;
};

TEST_F(MpiWorld, LongTensorsTravelInPieces) {
  const auto world = make(2, {.largest_message = 4});
  Transfers transfers(*world);
  transfers.send(1, 5, "0123456789", 10);
  transfers.send(1, 5, "", 0);
  const std::vector<Fake::Sent> expected{{1, 5, "0123"}, {1, 5, "4567"}, {1, 5, "89"}};
  EXPECT_EQ(fake_.sent, expected);
  EXPECT_TRUE(transfers.done());
  char room[9];
  transfers.receive(1, 5, room, 9);
  EXPECT_EQ(fake_.received, (std::vector<int>{4, 4, 1}));
  EXPECT_FALSE(transfers.done());
  EXPECT_EQ(transfers.peers(), std::vector<int>{1});
}

TEST_F(MpiWorld, AnErrorOfMpiIsAnError) {
  const auto world = make(2);
  fake_.code = kBroken;
  Transfers transfers(*world);
  EXPECT_EQ(error_of([&] { transfers.send(1, 0, "x", 1); }), "send: code 17");
  fake_.code = 0;
  char room;
  transfers.receive(1, 0, &room, 1);
  fake_.code = kBroken;
  EXPECT_EQ(error_of([&] { transfers.done(); }), "receive: code 17");
  fake_.code = 0;
}

TEST_F(MpiWorld, IsSilentAfterAMessageThatCannotBeTakenBack) {
  const auto world = make(2);
  {
    Transfers transfers(*world);
    char room;
    transfers.receive(1, 0, &room, 1);
  }
  EXPECT_EQ(error_of([&] { world->functions(); }), "no error");  // it was cancelled
  {
    Transfers transfers(*world);
    fake_.stuck = true;
    transfers.send(1, 0, "x", 1);
  }
  const std::string text = "rank 0 failed: messages to its peers could not be taken back";
  EXPECT_EQ(error_of([&] { world->functions(); }), "MPI is not used any more: " + text);
  const int calls = fake_.calls;
  world->abort("disk full");
  EXPECT_EQ(world->stopped(), text);
  EXPECT_EQ(error_of([&] { MpiEndpoint::whole(world)->bootstrap().all_gather("here"); }),
            "MPI is not used any more: " + text);
  EXPECT_EQ(fake_.calls, calls);
}

TEST_F(MpiWorld, TellsEveryoneOnceThatItFails) {
  const auto world = make(3);
  EXPECT_EQ(world->stopped(), std::nullopt);
  world->abort("disk full");
  world->abort("another reason");
  const std::vector<Fake::Sent> expected{{1, 0, "rank 0 failed: disk full"},
                                         {2, 0, "rank 0 failed: disk full"}};
  EXPECT_EQ(fake_.sent, expected);
  EXPECT_EQ(world->stopped(), "rank 0 failed: disk full");
}

TEST_F(MpiWorld, HearsThatAPeerFails) {
  const auto world = make(3);
  const Fake::Sent last{2, 0, "rank 2 failed: disk full"};
  fake_.inbox.push_back(last);
  EXPECT_EQ(world->stopped(), "rank 2 failed: disk full");
  world->abort("for that reason");
  EXPECT_TRUE(fake_.sent.empty());  // all know
  EXPECT_EQ(MpiEndpoint::whole(world)->bootstrap().aborted(), "rank 2 failed: disk full");
}

TEST_F(MpiWorld, ADeadPeerIsNamedToEveryone) {
  const auto world = make(3);
  ProcessIdentity gone = this_process();
  gone.pid = INT32_MAX;
  world->meet({this_process(), this_process(), gone});
  const std::string text = "rank 2 (process 2147483647) has ended";
  EXPECT_EQ(world->look_now(), text);
  EXPECT_EQ(world->stopped(), text);
  const std::vector<Fake::Sent> expected{{1, 0, text}, {2, 0, text}};
  EXPECT_EQ(fake_.sent, expected);
}

TEST_F(MpiWorld, LateRanksAreNamed) {
  const auto world = make(4, {.deadline = Seconds(0.05)});
  const auto endpoint = MpiEndpoint::whole(world);
  EXPECT_EQ(error_of([&] { endpoint->bootstrap().all_gather("here"); }),
            "bootstrap of \"world\": rank 0 waited 0.1 s for ranks 1, 2, 3");
}

TEST_F(MpiWorld, GroupsUseUpTheTags) {
  const auto world = make(1, {}, 4 * 3 + 2);
  EXPECT_EQ(world->tag(2, 3), 11);
  EXPECT_EQ(world->tag(3, 2), 14);
  EXPECT_THROW(world->tag(3, 3), Error);
}

}  // namespace
}  // namespace moiety::comm::mpi
