#include "moiety/comm/process.h"

#include <csignal>
#include <cstring>
#include <fstream>
#include <string>
#include <sys/wait.h>
#include <unistd.h>

#include <gtest/gtest.h>

namespace moiety::comm {
namespace {

TEST(Process, KnowsItself) {
  const ProcessIdentity& me = this_process();
  EXPECT_EQ(me.pid, getpid());
  EXPECT_NE(me.start_time, 0u);
  EXPECT_EQ(std::strlen(me.boot), 36u);
  EXPECT_EQ(std::strlen(me.build), 40u);
  EXPECT_TRUE(same_process(me, me));
  EXPECT_TRUE(is_visible(me));
  EXPECT_FALSE(has_ended(me));
  EXPECT_EQ(what_separates(me, me), "");
}

TEST(Process, WhatSeparatesTwo) {
  const ProcessIdentity& me = this_process();
  ProcessIdentity other = me;
  other.nonce[1] ^= 1;
  EXPECT_FALSE(same_process(me, other));
  EXPECT_EQ(what_separates(me, other), "");
  other.uid = me.uid + 1;
  EXPECT_EQ(what_separates(me, other), "they belong to users " + std::to_string(me.uid) + " and " +
                                           std::to_string(me.uid + 1));
  other.network_namespace ^= 1;
  EXPECT_EQ(what_separates(me, other), "their network namespaces differ");
  other.boot[0] = 'x';
  EXPECT_EQ(what_separates(me, other), "they are on different hosts");
  EXPECT_FALSE(is_visible(other));
}

TEST(Process, SeesTheEndOfAnother) {
  const pid_t child = fork();
  if (child == 0) {
    pause();
    _exit(0);
  }
  ProcessIdentity it = this_process();
  it.pid = child;
  it.start_time -= 1;
  EXPECT_TRUE(has_ended(it)) << "the process that has this id now started at another time";
  std::ifstream file("/proc/" + std::to_string(child) + "/stat");
  std::string field;
  for (int i = 0; i < 22; ++i) file >> field;
  it.start_time = std::stoull(field);
  EXPECT_FALSE(has_ended(it));

  kill(child, SIGKILL);
  siginfo_t info;
  ASSERT_EQ(waitid(P_PID, child, &info, WEXITED | WNOWAIT), 0);
  EXPECT_TRUE(has_ended(it)) << "a zombie";
  ASSERT_EQ(waitpid(child, nullptr, 0), child);
  EXPECT_TRUE(has_ended(it));
}

}  // namespace
}  // namespace moiety::comm
