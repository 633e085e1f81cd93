#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <fcntl.h>
#include <fstream>
#include <map>
#include <optional>
#include <poll.h>
#include <string>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>
#include <utility>
#include <vector>

#include "moiety/base/error.h"
#include "moiety/comm/local/started.h"
#include "moiety/comm/local_group.h"
#include "moiety/comm/process.h"

namespace moiety::comm {
namespace local {
namespace {

constexpr std::array<int, 7> kSignals{SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGTSTP, SIGCONT, SIGCHLD};
// A handler writes the signal's number here, so that what waits in poll() hears of it.
int g_heard[2] = {-1, -1};

void hear(int signal) {
  const int error = errno;
  const auto byte = static_cast<unsigned char>(signal);
  // A full pipe has enough to wake the reader.
  [[maybe_unused]] const ssize_t written = ::write(g_heard[1], &byte, 1);
  errno = error;
}

[[noreturn]] void fail_with_errno(const std::string& what) {
  fail(ErrorKind::kIo, "{}: {}{}", what, std::strerror(errno),
       errno == EMFILE ? " (raise the limit: ulimit -n)" : "");
}

// The parent's signals, from here on read from a pipe.
class Signals {
 public:
  Signals() {
    if (::pipe2(g_heard, O_CLOEXEC | O_NONBLOCK) != 0) fail_with_errno("starting ranks: a pipe");
    for (size_t i = 0; i < kSignals.size(); ++i) {
      ::sigaction(kSignals[i], nullptr, &previous_[i]);
      if (kSignals[i] == SIGHUP && previous_[i].sa_handler == SIG_IGN) continue;  // nohup
      struct sigaction action {};
      action.sa_handler = hear;
      action.sa_flags = SA_RESTART;
      sigemptyset(&action.sa_mask);
      ::sigaction(kSignals[i], &action, nullptr);
    }
  }
  ~Signals() {
    for (size_t i = 0; i < kSignals.size(); ++i) {
      ::sigaction(kSignals[i], &previous_[i], nullptr);
    }
    for (int& end : g_heard) ::close(std::exchange(end, -1));
  }
  Signals(const Signals&) = delete;
  Signals& operator=(const Signals&) = delete;

  // The signals that have come since; waits for one, at most so long, or without an end for -1.
  std::vector<int> wait(int milliseconds) {
    pollfd end{g_heard[0], POLLIN, 0};
    ::poll(&end, 1, milliseconds);
    std::array<unsigned char, 64> bytes;
    const ssize_t count = ::read(g_heard[0], bytes.data(), bytes.size());
    return {bytes.begin(), bytes.begin() + std::max<ssize_t>(0, count)};
  }

 private:
  std::array<struct sigaction, kSignals.size()> previous_;
};

// Two connected sockets.
struct Pair {
  int ends[2] = {-1, -1};
  explicit Pair(int type) {
    if (::socketpair(AF_UNIX, type | SOCK_CLOEXEC, 0, ends) != 0) {
      fail_with_errno("starting ranks: a pair of sockets");
    }
  }
};

// What a child needs between fork and exec, where nothing may be allocated.
struct Child {
  std::vector<std::string> arguments, environment;
  std::vector<char*> argv, envp;
  std::vector<int> inherited;

  Child(const StartOptions& options, const Started& place) : inherited(place.sockets) {
    arguments.push_back("moiety");
    arguments.insert(arguments.end(), options.arguments.begin(), options.arguments.end());
    for (char** variable = environ; *variable; ++variable) environment.emplace_back(*variable);
    environment.push_back(text("{}={}", kVariable, to_text(place)));
    for (std::string& argument : arguments) argv.push_back(argument.data());
    for (std::string& variable : environment) envp.push_back(variable.data());
    argv.push_back(nullptr);
    envp.push_back(nullptr);
    inherited.push_back(place.report);
  }

  [[noreturn]] void run(pid_t parent, int report) const {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (::getppid() != parent) ::_exit(1);  // it is gone already
    ::setpgid(0, 0);
    std::signal(SIGTTOU, SIG_IGN);  // it writes to the terminal from the background
    for (const int descriptor : inherited) {
      if (descriptor >= 0) ::fcntl(descriptor, F_SETFD, 0);
    }
    ::execve("/proc/self/exe", argv.data(), envp.data());
    constexpr std::string_view kText = "the program could not be started again";
    ::send(report, kText.data(), kText.size(), MSG_NOSIGNAL);
    ::_exit(1);
  }
};

bool is_stopped(pid_t pid) {
  std::ifstream file(text("/proc/{}/stat", pid));
  std::string line;
  std::getline(file, line);
  const size_t name = line.rfind(')');  // a name may hold anything
  return name != std::string::npos && line.size() > name + 2 && line[name + 2] == 'T';
}

class Parent {
 public:
  Parent(int ranks, const StartOptions& options) : ranks_(ranks), options_(options) {}
  // Kills what is left, where an error ends the parent's work.
  ~Parent() {
    tell(SIGKILL);
    for (const auto& [peers, socket] : waiting_) ::close(socket);
    for (const Running& child : running_) {
      ::waitpid(child.pid, nullptr, 0);
      ::close(child.report);
    }
  }
  Parent(const Parent&) = delete;
  Parent& operator=(const Parent&) = delete;

  std::vector<RankEnd> run() {
    for (int r = 0; r < ranks_; ++r) start(r);
    while (!running_.empty()) {
      const int most = patience_ ? 50 : -1;
      for (const int signal : signals_.wait(most)) pass_on(signal);
      collect();
      if (patience_) kill_stopped();
      if (patience_ && patience_->expired()) {
        killed_ = true;
        tell(SIGKILL);
      }
    }
    return std::move(ends_);
  }

 private:
  struct Running {
    int rank;
    pid_t pid;
    int report;
    bool killed = false;
  };

  // Kills ranks that stand still: they hear of nothing.
  void kill_stopped() {
    for (Running& child : running_) {
      if (child.killed || !is_stopped(child.pid)) continue;
      child.killed = true;
      ::kill(child.pid, SIGKILL);
    }
  }

  void start(int rank) {
    Started place{.rank = rank, .report = -1, .sockets = std::vector<int>(size_t(ranks_), -1)};
    for (int r = 0; r < ranks_; ++r) {
      if (r < rank) place.sockets[size_t(r)] = waiting_.extract({r, rank}).mapped();
      if (r <= rank) continue;
      const Pair pair(SOCK_STREAM);
      place.sockets[size_t(r)] = pair.ends[0];
      waiting_[{rank, r}] = pair.ends[1];
    }
    const Pair report(SOCK_SEQPACKET);
    place.report = report.ends[1];
    const Child child(options_, place);
    const pid_t parent = ::getpid();
    const pid_t pid = ::fork();
    if (pid == 0) child.run(parent, place.report);
    const int error = errno;
    for (const int socket : child.inherited) {
      if (socket >= 0) ::close(socket);
    }
    if (pid < 0) {
      ::close(report.ends[0]);
      errno = error;
      fail_with_errno(text("starting rank {}: a process", rank));
    }
    running_.push_back({rank, pid, report.ends[0]});
  }

  void tell(int signal) {
    for (const Running& child : running_) ::kill(child.pid, signal);
  }

  void pass_on(int signal) {
    if (signal == SIGCHLD) return;
    if (signal == SIGTSTP) {  // they stand as long as this process does
      tell(SIGSTOP);
      ::raise(SIGSTOP);
      tell(SIGCONT);
      return;
    }
    told_.push_back(signal);
    tell(signal);
  }

  void collect() {
    for (size_t i = 0; i < running_.size();) {
      int status = 0;
      if (::waitpid(running_[i].pid, &status, WNOHANG) != running_[i].pid) {
        ++i;
        continue;
      }
      ended(running_[i], status);
      running_.erase(running_.begin() + std::ptrdiff_t(i));
    }
  }

  void ended(const Running& child, int status) {
    RankEnd end;
    end.rank = child.rank;
    end.pid = child.pid;
    end.killed = killed_ || child.killed;
    if (WIFSIGNALED(status)) {
      end.signal = WTERMSIG(status);
    } else {
      end.code = WEXITSTATUS(status);
    }
    end.told = std::find(told_.begin(), told_.end(), end.signal) != told_.end();
    std::string said(64 << 10, ' ');
    const ssize_t bytes = ::recv(child.report, said.data(), said.size(), MSG_DONTWAIT);
    if (bytes > 0) end.text = said.substr(0, size_t(bytes));
    ::close(child.report);
    const auto& good = options_.good_codes;
    const bool well =
        end.signal == 0 && std::find(good.begin(), good.end(), end.code) != good.end();
    if (!well && !patience_) patience_.emplace(options_.patience);
    ends_.push_back(std::move(end));
  }

  const int ranks_;
  const StartOptions& options_;
  Signals signals_;
  // Ends of pairs whose second rank has not been started.
  std::map<std::pair<int, int>, int> waiting_;
  std::vector<Running> running_;
  std::vector<RankEnd> ends_;
  std::vector<int> told_;
  std::optional<Deadline> patience_;
  bool killed_ = false;
};

}  // namespace
}  // namespace local

std::vector<RankEnd> start_ranks(int ranks, const StartOptions& options) {
  MOIETY_CHECK(ranks >= 1 && ranks <= 1024, "start_ranks: {} ranks, 1 to 1024 are possible", ranks);
  return local::Parent(ranks, options).run();
}

const RankEnd* first_failure(const std::vector<RankEnd>& ends, const StartOptions& options) {
  const RankEnd* out = nullptr;
  for (const RankEnd& end : ends) {
    const auto& good = options.good_codes;
    if (end.killed ||
        (end.signal == 0 && std::find(good.begin(), good.end(), end.code) != good.end())) {
      continue;
    }
    if (!out || (out->signal == 0 && end.signal != 0)) out = &end;
  }
  return out;
}

std::string failure_text(const RankEnd& failure, const std::vector<RankEnd>& ends) {
  if (failure.signal == 0) {
    return failure.text.empty() ? text("rank {} (pid {}) has ended with exit code {}", failure.rank,
                                       failure.pid, failure.code)
                                : failure.text;
  }
  std::string out = text("rank {} (pid {}) is gone (signal {}, {})", failure.rank, failure.pid,
                         failure.signal, ::strsignal(failure.signal));
  for (const RankEnd& end : ends) {
    if (end.text.empty()) continue;
    return text("{}; rank {}: {}", out, end.rank, end.text);
  }
  return out;
}

}  // namespace moiety::comm
