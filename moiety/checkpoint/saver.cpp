#include "moiety/checkpoint/saver.h"

#include <algorithm>
#include <fcntl.h>
#include <random>
#include <tuple>
#include <utility>

#include "moiety/base/crc32c.h"
#include "moiety/base/log.h"
#include "moiety/base/parallel.h"
#include "moiety/checkpoint/checkpoint_error.h"
#include "moiety/checkpoint/digest.h"
#include "moiety/checkpoint/json.h"
#include "moiety/checkpoint/retention.h"
#include "moiety/checkpoint/together.h"

namespace moiety::checkpoint {
namespace {

std::string random_id() {
  std::random_device random;
  std::string id;
  for (int i = 0; i < 4; ++i) id += text("{:08x}", static_cast<uint32_t>(random()));
  return id;
}

// A part of a rank's state that becomes one tensor of its file.
struct OwnPiece {
  const StatePiece* of;
  Box box;
  uint64_t bytes() const { return static_cast<uint64_t>(byte_size(of->dtype, volume(box))); }
  // Pieces are cut along the first dimension with more than one index, so they lie in one run.
  std::string_view data() const {
    if (bytes() == 0) return {};
    const int64_t first = BoxRuns(of->box, box).outer_offset(0);
    return {static_cast<const char*>(of->data) + byte_size(of->dtype, first), bytes()};
  }
};

void cut(const StatePiece& of, const Box& box, int64_t limit, std::vector<OwnPiece>& out) {
  int d = 0;
  while (d < box.rank && box.size[d] == 1) ++d;
  const int64_t bytes = byte_size(of.dtype, volume(box));
  if (bytes <= limit || d == box.rank) {
    out.push_back({&of, box});
    return;
  }
  const int64_t step = std::max<int64_t>(1, limit / (bytes / box.size[d]));
  const int64_t end = box.start[d] + box.size[d];
  for (int64_t at = box.start[d]; at < end; at += step) {
    Box part = box;
    part.start[d] = at;
    part.size[d] = std::min(step, end - at);
    cut(of, part, limit, out);
  }
}

// In the order of the file: falling element size, so that each element is aligned to its size.
std::vector<OwnPiece> own_pieces(const StateView& view, int64_t limit) {
  std::vector<OwnPiece> pieces;
  for (const StatePiece& p : view) {
    const char* fault = name_fault(p.tensor);
    if (!fault) fault = name_fault(p.slot);
    if (!fault && p.slot.find('/') != std::string::npos) fault = "a slot with a slash";
    if (!fault) fault = shape_fault(p.shape);
    if (!fault && !contains(whole(p.shape), p.box)) fault = "a box outside of the shape";
    if (!fault && bits(p.dtype) < 8) fault = "elements of less than a byte";
    if (!fault && !p.data && volume(p.box) > 0) fault = "no memory";
    MOIETY_CHECK(!fault, "save: {}/{}: {}", p.slot, p.tensor, fault);
    // A box without elements says something only of a tensor without elements.
    if (volume(p.box) > 0 || volume(whole(p.shape)) == 0) cut(p, p.box, limit, pieces);
  }
  std::sort(pieces.begin(), pieces.end(), [](const OwnPiece& a, const OwnPiece& b) {
    const int wide_a = -bits(a.of->dtype), wide_b = -bits(b.of->dtype);
    return std::tie(wide_a, a.of->tensor, a.of->slot, a.box.start) <
           std::tie(wide_b, b.of->tensor, b.of->slot, b.box.start);
  });
  return pieces;
}

std::vector<Entry> entries_of(const std::vector<OwnPiece>& pieces) {
  std::vector<Entry> entries;
  uint64_t at = 0;
  for (const OwnPiece& p : pieces) {
    entries.push_back({piece_key(p.of->slot, p.of->tensor, p.of->shape, p.box),
                       &stored_type(p.of->dtype),
                       {p.box.size.begin(), p.box.size.begin() + p.box.rank},
                       at,
                       at + p.bytes()});
    at += p.bytes();
  }
  return entries;
}

// A rank's word, for rank 0, that its file is on the disk.
std::string done_path(const std::string& temporary, int rank) {
  return text("{}/rank-{}.done", temporary, rank);
}

void log_failure(const char* what, const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& e) {
    log(LogLevel::kWarning, "checkpoint: {}: {}", what, e.what());
  }
}

}  // namespace

Saver::Saver(std::string directory, comm::Bootstrap& bootstrap, SaveOptions options,
             FileSystem& files)
    : directory_(std::move(directory)), bootstrap_(bootstrap), options_(options), files_(files) {
  MOIETY_CHECK(options.keep_last >= 0 && options.keep_every >= 0 && options.piece_bytes > 0,
               "save: keep_last {}, keep_every {}, piece_bytes {}", options.keep_last,
               options.keep_every, options.piece_bytes);
}

SaveResult Saver::save(const StateView& view, const RunState& run, Stream stream) {
  stream.synchronize();
  const auto proposals = gather(bootstrap_, text("{} {}", random_id(), run.step));
  Manifest head;
  head.id = proposals[0].substr(0, 32);
  head.run = run;
  const std::string temporary = text("{}/.tmp-{}-{}", directory_, step_name(run.step), head.id);
  SaveResult result{directory_ + "/" + step_name(run.step), head.id, 0};
  const bool first = bootstrap_.rank() == 0;
  try {
    together(bootstrap_, [&] {
      MOIETY_CHECK(run.layout.ranks == bootstrap_.size(), "save: a layout of {} ranks on {}",
                   run.layout.ranks, bootstrap_.size());
      MOIETY_CHECK(proposals[0].substr(32) == text(" {}", run.step),
                   "save: this rank is at step {}, rank 0 at{}", run.step, proposals[0].substr(32));
      if (!first) return;
      if (!size_of(files_, directory_)) {
        make_directory(files_, directory_);
        sync_directory(files_, directory_ + "/..");
      }
      make_directory(files_, temporary);
    });
    together(bootstrap_, [&] { report(write_file(view, head, temporary), temporary); });
    together(bootstrap_, [&] {
      if (first) commit(head, temporary, result);
    });
  } catch (const Error&) {
    if (first) log_failure("clearing a failed save", [&] { remove(files_, temporary); });
    throw;
  }
  if (first) tidy(head);
  result.bytes = sum_over_ranks(bootstrap_, {result.bytes})[0];
  return result;
}

Manifest Saver::write_file(const StateView& view, const Manifest& head,
                           const std::string& temporary) const {
  MOIETY_CHECK(size_of(files_, temporary),
               "save: rank 0 made {}, which is not to be seen here: the directory must be one file "
               "system for all ranks",
               temporary);
  const int rank = bootstrap_.rank();
  const std::string name = rank_file_name(rank, head.run.layout.ranks);
  const std::vector<OwnPiece> pieces = own_pieces(view, options_.piece_bytes);
  const std::vector<Entry> entries = entries_of(pieces);
  const std::string header = encode_header(entries, file_metadata(head, rank));
  const uint64_t bytes = header.size() + (entries.empty() ? 0 : entries.back().end);

  File file(files_, temporary + "/" + name, O_WRONLY | O_CREAT | O_EXCL);
  file.allocate(bytes);
  file.write(0, header);
  struct Sums {
    uint32_t crc32c;
    uint64_t digest;
  };
  std::vector<Sums> sums(pieces.size());
  parallel_tasks(static_cast<int64_t>(pieces.size()), [&](int64_t i) {
    const OwnPiece& p = pieces[i];
    const std::string_view data = p.data();
    sums[i] = {crc32c(data), digest(data.data(), p.of->dtype, p.box, p.of->shape)};
    file.write(header.size() + entries[i].begin, data);
  });
  file.sync_data();
  file.close();

  Manifest part;
  part.id = head.id;
  part.run.step = head.run.step;
  uint32_t crc = crc32c(header);
  for (size_t i = 0; i < pieces.size(); ++i) {
    const StatePiece& of = *pieces[i].of;
    SlotEntry& slot = slot_of(part, of.tensor, of.slot, of.shape, of.dtype);
    slot.digest += sums[i].digest;
    slot.pieces.push_back({0, pieces[i].box, entries[i].begin, entries[i].end, sums[i].crc32c});
    crc = crc32c_combine(crc, sums[i].crc32c, pieces[i].bytes());
  }
  part.files.push_back({name, bytes, crc});
  return part;
}

void Saver::report(const Manifest& part, const std::string& temporary) const {
  const FileEntry& file = part.files[0];
  if (options_.verify) {
    const std::string path = temporary + "/" + file.name;
    const uint32_t got = checksum(files_, path);
    if (got != file.crc32c) {
      fail(ErrorKind::kIo, "{} reads back with crc32c {:08x}, written was {:08x}", path, got,
           file.crc32c);
    }
  }
  const std::string done = done_path(temporary, bootstrap_.rank());
  write_text(files_, done + ".part", encode_manifest(part));
  rename(files_, done + ".part", done);
}

void Saver::commit(Manifest head, const std::string& temporary, SaveResult& result) const {
  for (int rank = 0; rank < head.run.layout.ranks; ++rank) {
    const std::string done = done_path(temporary, rank);
    merge(head, parse_manifest(read_text(files_, done, kLongestManifest), done));
  }
  check_tiling(head);
  const std::string json = encode_manifest(head);
  write_text(files_, temporary + "/manifest.json", json);
  write_text(files_, temporary + "/COMMIT", encode_commit(head, json));
  for (int rank = 0; rank < head.run.layout.ranks; ++rank)
    remove(files_, done_path(temporary, rank));
  sync_directory(files_, temporary);

  const std::string old = old_path(head);
  const bool replaces = size_of(files_, result.path).has_value();
  if (replaces) rename(files_, result.path, old);
  try {
    rename(files_, temporary, result.path);
  } catch (const Error&) {
    if (replaces)
      log_failure("putting the old one back", [&] { rename(files_, old, result.path); });
    throw;
  }
  sync_directory(files_, directory_);
  for (const FileEntry& file : head.files) result.bytes += file.bytes;
}

void Saver::tidy(const Manifest& head) const {
  log_failure("writing `latest`", [&] {
    const std::string latest = directory_ + "/.tmp-latest";
    write_text(files_, latest, step_name(head.run.step) + "\n");
    rename(files_, latest, directory_ + "/latest");
  });
  log_failure("removing the old one", [&] { remove(files_, old_path(head)); });
  log_failure("pruning", [&] {
    prune(directory_, options_.keep_last, options_.keep_every, head.run.step, files_);
  });
}

std::string Saver::old_path(const Manifest& head) const { return directory_ + "/.old-" + head.id; }

}  // namespace moiety::checkpoint
