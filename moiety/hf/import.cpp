#include "moiety/hf/import.h"

#include <algorithm>
#include <mutex>

#include "moiety/base/error.h"
#include "moiety/base/parallel.h"
#include "moiety/checkpoint/together.h"
#include "moiety/checkpoint/whole_directory.h"
#include "moiety/hf/side_tensors.h"

namespace moiety::hf {
namespace {

using namespace checkpoint;

class Import {
 public:
  Import(const Folder& folder, const model::Config& config, const ImportOptions& options,
         FileSystem& files)
      : folder_(folder),
        options_(options),
        files_(files),
        source_(folder, config,
                {.seed = options.seed,
                 .router_std = config.init_std,
                 .noise_std = options.noise * config.init_std}),
        side_files_(read_side_files(folder.path(), files)) {
    for (const ModelTensor& tensor : source_.tensors()) {
      StatePiece piece;
      piece.tensor = tensor.name;
      piece.slot = "weight";
      piece.shape = tensor.shape;
      piece.box = whole(tensor.shape);
      view_.push_back(std::move(piece));
    }
    weights_ = view_.size();
    for (SideFile& file : side_files_) view_.push_back(side_piece(file));
    head_.id = random_id();
    head_.run.seed = options.seed;
    head_.run.config = options.config;
    plan_ = plan_file(view_, file_metadata(head_, 0), options.piece_bytes);
  }

  Manifest write(const std::string& directory) {
    source_.check_tied_head();
    Manifest manifest =
        write_single_file(directory, head_, plan_, view_, options_.tokenizer, files_,
                          [&](const File& file, std::span<PieceSums> sums) { fill(file, sums); });
    check_stop();
    return manifest;
  }

 private:
  void check_stop() const {
    if (options_.stop && *options_.stop) {
      fail(ErrorKind::kIo, "import {}: interrupted", folder_.path());
    }
  }

  void fill(const File& file, std::span<PieceSums> sums) {
    parallel_tasks(std::ssize(plan_.pieces), [&](int64_t i) {
      check_stop();
      const FilePlan::Piece& piece = plan_.pieces[static_cast<size_t>(i)];
      const StatePiece& of = view_[static_cast<size_t>(piece.of)];
      if (static_cast<size_t>(piece.of) >= weights_) {
        const auto* data = static_cast<const std::byte*>(of.data);
        sums[static_cast<size_t>(i)] =
            write_piece(file, plan_, piece, of, data + piece.box.start[0]);
      } else {
        Buffer memory(piece.bytes(), "piece of a checkpoint");
        source_.read(of.tensor, piece.box, reinterpret_cast<float*>(memory.data()));
        sums[static_cast<size_t>(i)] = write_piece(file, plan_, piece, of, memory.data());
      }
      const std::scoped_lock lock(mutex_);
      done_ += piece.end - piece.begin;
      if (options_.progress) options_.progress(done_, plan_.data_bytes);
    });
  }

  const Folder& folder_;
  const ImportOptions& options_;
  FileSystem& files_;
  WeightSource source_;
  std::vector<SideFile> side_files_;
  StateView view_;  // weights without memory, then the side files
  size_t weights_ = 0;
  Manifest head_;
  FilePlan plan_;
  std::mutex mutex_;
  uint64_t done_ = 0;
};

}  // namespace

model::Config upcycled(const Description& description, const Upcycling& u) {
  model::Config c = description.config;
  if (has_experts(description.family)) {
    throw UsageError("--upcycle: a {} model has experts already", name(description.family));
  }
  for (const int64_t layer : u.layers) {
    if (layer < 0 || layer >= c.layers) {
      throw UsageError("--upcycle layers: layer {} of a model of {} layers", layer, c.layers);
    }
  }
  c.d_ffn = c.d_ffn_dense;
  c.router.experts = u.experts;
  c.router.top_k = u.top_k;
  c.router.renormalize = true;
  c.router.aux = moe::AuxLoss::kHf;
  c.router.aux_coef = 0.001f;
  c.dense_layers.clear();
  for (int64_t l = 0; l < c.layers; ++l) {
    if (!u.layers.empty() && !std::ranges::binary_search(u.layers, l)) c.dense_layers.push_back(l);
  }
  if (c.dense_layers.empty()) c.d_ffn_dense = 0;
  try {
    model::check(c);
  } catch (const Error& e) {
    throw UsageError("--upcycle: {}", e.what());
  }
  return c;
}

Manifest import_folder(const Folder& folder, const model::Config& config, const std::string& out,
                       const ImportOptions& options, FileSystem& files) {
  if (size_of(files, out)) throw UsageError("import: {}: is there already", out);
  Import work(folder, config, options, files);
  Manifest manifest;
  make_whole_directory("import", out, false, files,
                       [&](const std::string& directory) { manifest = work.write(directory); });
  return manifest;
}

}  // namespace moiety::hf
