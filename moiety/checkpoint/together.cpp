#include "moiety/checkpoint/together.h"

#include <cstring>
#include <new>
#include <random>

#include "moiety/checkpoint/checkpoint_error.h"

namespace moiety::checkpoint {
namespace {

// A report is the kind of the error, as a character, and its text.
std::string report_line(ErrorKind kind, const char* what) {
  return std::string(1, static_cast<char>('0' + static_cast<int>(kind))) + what;
}

}  // namespace

std::string report_of(const std::function<void()>& body) {
  try {
    body();
    return {};
  } catch (const Error& e) {
    return report_line(e.kind(), e.what());
  } catch (const std::bad_alloc&) {
    return report_line(ErrorKind::kOutOfMemory, "checkpoint: out of memory");
  } catch (const std::exception& e) {
    return report_line(ErrorKind::kInvalidArgument, e.what());
  }
}

void throw_report(std::string_view report, const std::string& prefix) {
  const std::string what = prefix + std::string(report.substr(1));
  throw_error(static_cast<ErrorKind>(report[0] - '0'), what);
}

void together(comm::Bootstrap& bootstrap, const std::function<void()>& body) {
  const auto reports = gather(bootstrap, report_of(body));
  for (size_t rank = 0; rank < reports.size(); ++rank) {
    if (reports[rank].empty()) continue;
    throw_report(reports[rank], reports.size() > 1 ? text("rank {}: ", rank) : "");
  }
}

std::string random_id() {
  std::random_device random;
  std::string id;
  for (int i = 0; i < 4; ++i) id += text("{:08x}", static_cast<uint32_t>(random()));
  return id;
}

std::vector<std::string> gather(comm::Bootstrap& bootstrap, std::string_view bytes) {
  constexpr size_t kPart = 32 << 10;  // bytes that one call surely carries
  std::vector<std::string> out(static_cast<size_t>(bootstrap.size()));
  for (bool more = true; more;) {
    // A part begins with a letter that tells whether another one follows.
    const std::string_view part = bytes.substr(0, kPart);
    bytes.remove_prefix(part.size());
    const auto parts = bootstrap.all_gather((bytes.empty() ? "-" : "+") + std::string(part));
    more = false;
    for (size_t rank = 0; rank < parts.size(); ++rank) {
      more = more || parts[rank][0] == '+';
      out[rank] += parts[rank].substr(1);
    }
  }
  return out;
}

std::vector<uint64_t> sum_over_ranks(comm::Bootstrap& bootstrap,
                                     const std::vector<uint64_t>& words) {
  const size_t bytes = words.size() * sizeof(uint64_t);
  std::vector<uint64_t> sum(words.size(), 0);
  for (const std::string& theirs :
       gather(bootstrap, {reinterpret_cast<const char*>(words.data()), bytes})) {
    MOIETY_CHECK(theirs.size() == bytes, "checkpoint: ranks sum {} and {} bytes", bytes,
                 theirs.size());
    for (size_t i = 0; i < sum.size(); ++i) {
      uint64_t word;
      std::memcpy(&word, theirs.data() + i * sizeof word, sizeof word);
      sum[i] += word;
    }
  }
  return sum;
}

}  // namespace moiety::checkpoint
