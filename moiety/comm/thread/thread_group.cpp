#include "moiety/comm/thread_group.h"

#include <algorithm>
#include <exception>
#include <mutex>
#include <numeric>
#include <thread>
#include <vector>

#include "moiety/base/error.h"
#include "moiety/base/log.h"
#include "moiety/base/parallel.h"
#include "moiety/comm/thread/thread_endpoint.h"

namespace moiety::comm {
namespace {

// The exception of the rank that failed first.
struct FirstFailure {
  std::mutex mutex;
  std::exception_ptr exception;

  void take(Bootstrap& bootstrap, const char* what) {
    const std::lock_guard lock(mutex);
    if (!exception) exception = std::current_exception();
    bootstrap.abort(what);
  }
};

}  // namespace

void run_thread_ranks(int ranks, const ThreadGroupOptions& options,
                      const std::function<void(Communicator& world)>& body) {
  MOIETY_CHECK(ranks >= 1, "run_thread_ranks: {} ranks", ranks);
  std::vector<int> members(ranks);
  std::iota(members.begin(), members.end(), 0);
  const auto shared = std::make_shared<thread::World>();
  shared->map_memory = options.map_memory;
  shared->gpu_transport = options.gpu_transport;
  const auto group = std::make_shared<thread::Group>(shared, "world", members, options.deadline);
  const int budget = std::max(1, environment_threads(core_count()) / ranks);
  FirstFailure failure;
  const auto run_rank = [&](int rank) {
    set_thread_budget(budget);
    set_crowded(ranks > core_count());
    set_log_rank(rank);
    thread::ThreadBootstrap bootstrap(group, rank);
    // It outlives a failure, of which its end may ask.
    LaneCommunicator world(std::make_shared<thread::ThreadEndpoint>(group, rank),
                           std::make_shared<RankLanes>());
    try {
      body(world);
    } catch (const std::exception& e) {
      failure.take(bootstrap, e.what());
    } catch (...) {
      failure.take(bootstrap, "an exception without a text");
    }
  };
  std::vector<std::thread> threads;
  for (int r = 0; r < ranks; ++r) threads.emplace_back(run_rank, r);
  for (std::thread& t : threads) t.join();
  if (failure.exception) std::rethrow_exception(failure.exception);
}

}  // namespace moiety::comm
