#include "moiety/checkpoint/saver.h"

#include <charconv>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <sys/resource.h>
#include <system_error>
#include <thread>
#include <utility>

#include "moiety/base/error.h"
#include "moiety/base/log.h"
#include "moiety/base/parallel.h"
#include "moiety/checkpoint/interrupt.h"
#include "moiety/checkpoint/retention.h"
#include "moiety/checkpoint/save_task.h"
#include "moiety/checkpoint/staging.h"
#include "moiety/checkpoint/together.h"

namespace moiety::checkpoint {
namespace {

using Clock = std::chrono::steady_clock;

uint64_t bytes_of(const StateView& view) {
  uint64_t bytes = 0;
  for (const StatePiece& p : view) {
    bytes += static_cast<uint64_t>(byte_size(p.dtype, volume(p.box)));
  }
  return bytes;
}

}  // namespace

// A save under way on this rank, on a thread of its own or on the caller's.
class Saver::Job {
 public:
  Job(Clock::time_point called, RankFile file, const Manifest& head, int rank,
      const std::string& directory, const SaveOptions& options, FileSystem& files)
      : task(std::move(file), head, rank, directory, options, files), called_(called) {
    report_.result.step = head.run.step;
    report_.result.id = head.id;
    report_.result.path = task.path();
  }
  ~Job() { join(); }

  SaveTask task;

  void run() {
    uint64_t bytes = 0;
    const std::string error = report_of([&] { bytes = task.run(); });
    const std::lock_guard lock(mutex_);
    report_.result.bytes = bytes;
    report_.result.seconds = elapsed();
    error_ = error;
    ended_ = true;
    wake_.notify_all();
  }

  // Starts the save on a thread of its own. In the background the cores belong to training: the
  // save uses one thread, which takes what training leaves (Linux has a nice value per thread).
  void start(bool background) {
    try {
      thread_ = std::thread([=, this, rank = log_rank(), budget = thread_budget()] {
        set_log_rank(rank);
        set_thread_budget(background ? 1 : budget);
        if (background) ::setpriority(PRIO_PROCESS, 0, 19);
        run();
      });
    } catch (const std::system_error& e) {
      log(LogLevel::kWarning, "checkpoint: no thread to write with ({}): training waits", e.what());
      run();
    }
  }

  void caller_goes_on() {
    const std::lock_guard lock(mutex_);
    report_.result.blocked_seconds = elapsed();
  }

  // Waits at most `limit`; whether the save has ended.
  bool ended_within(Seconds limit) const {
    std::unique_lock lock(mutex_);
    return wake_.wait_for(lock, limit, [&] { return ended_; });
  }

  // The result, once the save has ended.
  SaveReport report() const {
    SaveReport report = report_;
    if (!error_.empty()) report.error = error_.substr(1);
    return report;
  }
  const std::string& error() const { return error_; }
  int64_t step() const { return report_.result.step; }

  // Waits until the save has ended. When the run is over because of another rank, the save is given
  // up, since that rank's part would not come. Only the caller's thread looks at the ranks, never
  // the job.
  void wait(const comm::Bootstrap& bootstrap) {
    while (!ended_within(Seconds(0.05))) {
      if (bootstrap.aborted() || interrupted()) task.stop();
    }
    join();
  }

 private:
  void join() {
    if (thread_.joinable()) thread_.join();
  }
  double elapsed() const { return Seconds(Clock::now() - called_).count(); }

  Clock::time_point called_;
  std::thread thread_;
  mutable std::mutex mutex_;
  mutable std::condition_variable wake_;
  bool ended_ = false;
  SaveReport report_;
  std::string error_;  // in the form of report_of
};

Saver::Saver(std::string directory, comm::Bootstrap& bootstrap, SaveOptions options,
             FileSystem& files)
    : directory_(std::move(directory)), bootstrap_(bootstrap), options_(options), files_(files) {
  const Keep& keep = options.keep;
  MOIETY_CHECK(keep.last >= 0 && keep.every >= 0 && keep.best >= 0 && options.piece_bytes > 0,
               "save: keep last {}, every {}, best {}, piece_bytes {}", keep.last, keep.every,
               keep.best, options.piece_bytes);
}

Saver::~Saver() {
  if (!job_) return;
  if (!job_->ended_within(Seconds(2))) {
    log(LogLevel::kWarning, "checkpoint: the save of step {} is given up: the run has ended",
        job_->step());
    job_->task.stop();
  }
  finish();
}

std::unique_ptr<Saver::Job> Saver::agree(const StateView& view, const RunState& run,
                                         const Stream& stream) {
  const Clock::time_point called = Clock::now();
  if (job_ && bootstrap_.rank() == 0 && !job_->ended_within(Seconds(0))) {
    log(LogLevel::kInfo, "checkpoint: the save of step {} waits for that of step {}", run.step,
        job_->step());
  }
  finish();
  const auto proposals = gather(bootstrap_, text("{} {}", random_id(), run.step));
  Manifest head;
  head.id = proposals[0].substr(0, 32);
  head.run = run;
  const std::string temporary = SaveTask::temporary_path(directory_, head);
  const int rank = bootstrap_.rank();
  SaveOptions options = options_;
  if (keeps_all_) options.keep.last = 0;
  std::unique_ptr<Job> job;
  try {
    together(bootstrap_, [&] {
      MOIETY_CHECK(run.layout.ranks == bootstrap_.size(), "save: a layout of {} ranks on {}",
                   run.layout.ranks, bootstrap_.size());
      MOIETY_CHECK(run.step >= 0 && run.tokens >= 0 && run.adam_t >= 0,
                   "save: step {}, tokens {}, adam_t {}", run.step, run.tokens, run.adam_t);
      const Device gpu = gpu_of("save", view);
      MOIETY_CHECK(gpu.type == DeviceType::kCpu || gpu == stream.device(),
                   "save: the state is on {}, the stream is of {}", name(gpu),
                   name(stream.device()));
      MOIETY_CHECK(proposals[0].substr(32) == text(" {}", run.step),
                   "save: this rank is at step {}, rank 0 at{}", run.step, proposals[0].substr(32));
      job = std::make_unique<Job>(called, RankFile(view, head, rank, options_.piece_bytes), head,
                                  rank, directory_, options, files_);
      if (rank > 0) return;
      if (!size_of(files_, directory_)) {
        make_directory(files_, directory_);
        sync_directory(files_, directory_ + "/..");
      }
      make_directory(files_, temporary);
    });
    together(bootstrap_, [&] {
      MOIETY_CHECK(size_of(files_, temporary),
                   "save: rank 0 made {}, which is not to be seen here: the directory must be one "
                   "file system for all ranks",
                   temporary);
    });
  } catch (const Error&) {
    if (job && rank == 0) job->task.discard();
    throw;
  }
  return job;
}

void Saver::start(const StateView& view, const RunState& run, Stream stream) {
  stream.synchronize();
  std::unique_ptr<Job> job = agree(view, run, stream);
  RankFile& file = job->task.file();
  if (reserve(file.data_bytes(), stream.device())) {
    file.take_copy(snapshot_.data(), stream);
    job->start(true);
  } else {
    log(LogLevel::kWarning,
        "checkpoint: no memory for a copy of {}: training waits until they are written",
        bytes_text(static_cast<int64_t>(file.data_bytes())));
    job->start(false);
    job->wait(bootstrap_);
  }
  job->caller_goes_on();
  job_ = std::move(job);
}

SaveResult Saver::save(const StateView& view, const RunState& run, Stream stream) {
  stream.synchronize();
  job_ = agree(view, run, stream);
  job_->start(false);
  job_->wait(bootstrap_);
  job_->caller_goes_on();
  return *wait();
}

std::optional<SaveReport> Saver::poll() {
  if (job_ && job_->ended_within(Seconds(0))) finish();
  if (std::exchange(told_, true)) return std::nullopt;
  return last_;
}

std::optional<SaveResult> Saver::wait() {
  finish();
  if (!last_) return std::nullopt;
  told_ = true;
  // Rank 0 has made the checkpoint or given it up.
  const std::string word = gather(bootstrap_, text("{} {}", last_->result.bytes, last_report_))[0];
  const size_t space = word.find(' ');
  std::from_chars(word.data(), word.data() + space, last_->result.bytes);
  if (space + 1 < word.size()) throw_report(std::string_view(word).substr(space + 1));
  return last_->result;
}

void Saver::finish() {
  if (!job_) return;
  job_->wait(bootstrap_);
  if (!told_ && !last_->error.empty()) {
    log(LogLevel::kWarning, "checkpoint: the save of step {} failed: {}", last_->result.step,
        last_->error);
  }
  last_ = job_->report();
  last_report_ = job_->error();
  told_ = false;
  job_.reset();
}

void Saver::reserve(const StateView& view) { reserve(bytes_of(view), gpu_of("save", view)); }

bool Saver::reserve(uint64_t bytes, Device device) {
  if (static_cast<uint64_t>(snapshot_.bytes()) >= bytes) return true;
  try {
    snapshot_ = {};
    const char* what = "copy of the training state";
    snapshot_ = Buffer::host_for(device, static_cast<int64_t>(bytes), what);
    return true;
  } catch (const Error& e) {
    if (e.kind() != ErrorKind::kOutOfMemory) throw;
    return false;
  }
}

}  // namespace moiety::checkpoint
