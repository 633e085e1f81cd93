// Checkpoints and Hugging Face folders, from and to tensors of the caller, by one process.
#include <algorithm>
#include <filesystem>
#include <limits>
#include <vector>

#include <nlohmann/json.hpp>

#include "moiety/base/parallel.h"
#include "moiety/capi/guarded.h"
#include "moiety/capi/interrupt.h"
#include "moiety/checkpoint/interrupt.h"
#include "moiety/checkpoint/loader.h"
#include "moiety/checkpoint/saver.h"
#include "moiety/checkpoint/whole_directory.h"
#include "moiety/hf/export.h"
#include "moiety/hf/load.h"
#include "moiety/hf/side_tensors.h"
#include "moiety/train/checkpoints.h"
#include "moiety/train/inference_model.h"

namespace moiety::capi {
namespace {

using nlohmann::json;

// Runs f(request parsed); what it returns is the answer, if one is asked for.
template <class F>
int answer(const char* operation, const char* request, char** out, F&& f) {
  return interruptible([&] {
    return guarded([&] {
      MOIETY_CHECK(request, "{}: the request is null", operation);
      json said;
      try {
        said = f(json::parse(request));
      } catch (const json::exception& e) {
        fail(ErrorKind::kInvalidArgument, "{}: the request is no request: {}", operation, e.what());
      }
      if (out) give(out, said.dump());
    });
  });
}

checkpoint::StateView view_of(const json& pieces) {
  checkpoint::StateView view;
  for (const json& p : pieces) {
    checkpoint::StatePiece piece;
    piece.tensor = p.at("tensor");
    piece.slot = p.at("slot");
    piece.shape = p.at("shape").get<std::vector<int64_t>>();
    const auto start = p.at("start").get<std::vector<int64_t>>();
    const auto size = p.at("size").get<std::vector<int64_t>>();
    MOIETY_CHECK(start.size() == piece.shape.size() && size.size() == piece.shape.size() &&
                     piece.shape.size() <= checkpoint::StatePiece{}.box.start.size(),
                 "checkpoint: the box of {} has {} and {} dimensions, the tensor {}", piece.tensor,
                 start.size(), size.size(), piece.shape.size());
    piece.box.rank = static_cast<int>(piece.shape.size());
    std::copy(start.begin(), start.end(), piece.box.start.begin());
    std::copy(size.begin(), size.end(), piece.box.size.begin());
    piece.data = reinterpret_cast<void*>(p.at("data").get<uintptr_t>());
    view.push_back(std::move(piece));
  }
  return view;
}

json run_json(const checkpoint::RunState& run) {
  return {{"step", run.step}, {"tokens", run.tokens}, {"adam_t", run.adam_t},
          {"seed", run.seed}, {"config", run.config}, {"state", run.state}};
}

checkpoint::RunState run_of(const json& x) {
  checkpoint::RunState run;
  run.step = x.at("step");
  run.tokens = x.at("tokens");
  run.adam_t = x.at("adam_t");
  run.seed = x.at("seed");
  run.config = x.at("config");
  run.state = x.at("state");
  return run;
}

std::string save(const std::string& directory, const checkpoint::StateView& view,
                 const checkpoint::RunState& run) {
  std::string path;
  checkpoint::SaveOptions options;
  options.keep.last = std::numeric_limits<int>::max();
  train::run_alone(thread_budget(), [&](comm::Communicator& world) {
    path = checkpoint::Saver(directory, world.bootstrap(), options).save(view, run, Stream()).path;
  });
  return path;
}

json save_folder(const json& asked) {
  std::vector<hf::SideFile> files;
  if (const std::string like = asked.value("like", ""); !like.empty()) {
    files = hf::read_side_files(like);
  } else {
    files.push_back({"config.json", asked.at("config")});
  }
  const auto text = std::find_if(files.begin(), files.end(),
                                 [](const hf::SideFile& f) { return f.name == "config.json"; });
  MOIETY_CHECK(text != files.end(), "save_hf: {} has no config.json", asked.value("like", ""));
  const model::Config config = hf::parse_config(text->bytes, "config.json").config;
  checkpoint::StateView view = view_of(asked.at("pieces"));
  for (hf::SideFile& file : files) view.push_back(hf::side_piece(file));

  hf::ExportOptions options;
  options.dtype = asked.at("dtype") == "float32" ? DType::kFloat32 : DType::kBFloat16;
  options.form = asked.at("stacked").get<bool>() ? hf::Form::kStacked : hf::Form::kOneByOne;
  options.replace = asked.at("replace");
  options.stop = &interrupt_wanted;
  const std::string out = asked.at("path");
  // The weights go through a checkpoint beside the folder.
  const std::string beside = out + ".tmp-checkpoint";
  struct Removed {
    const std::string& path;
    ~Removed() {
      std::error_code ignored;
      std::filesystem::remove_all(path, ignored);
    }
  } removed{beside};
  const hf::ExportResult made = hf::export_folder(save(beside, view, {}), config, out, options);
  return {{"family", hf::name(made.family)},
          {"keys", made.keys},
          {"files", made.files},
          {"bytes", made.bytes}};
}

}  // namespace
}  // namespace moiety::capi

using namespace moiety;        // NOLINT: the functions below are C's
using namespace moiety::capi;  // NOLINT

int moiety_checkpoint_describe(const char* request, char** out) {
  return answer("checkpoint_describe", request, out, [](const json& asked) {
    const std::string path = train::find_checkpoint(asked.at("path"));
    const checkpoint::Manifest manifest = checkpoint::read_manifest(path);
    json said = run_json(manifest.run);
    said["path"] = path;
    json& tensors = said["tensors"] = json::object();
    for (const auto& [name, tensor] : manifest.tensors) {
      json& slots = tensors[name] = {{"shape", tensor.shape}, {"slots", json::object()}};
      for (const auto& [slot, entry] : tensor.slots)
        slots["slots"][slot] = moiety::name(entry.dtype);
    }
    return said;
  });
}

int moiety_checkpoint_load(const char* request, char** out) {
  return answer("checkpoint_load", request, out, [](const json& asked) {
    const checkpoint::StateView view = view_of(asked.at("pieces"));
    const bool weights_only = asked.at("weights_only");
    checkpoint::LoadOptions options;
    options.may_leave = [weights_only](std::string_view slot) {
      return slot == hf::kSideSlot || slot == "amax_history" ||
             (weights_only && checkpoint::is_no_weight(slot));
    };
    json said;
    train::run_alone(thread_budget(), [&](comm::Communicator& world) {
      said = run_json(checkpoint::load(asked.at("path"), view, options, world.bootstrap()));
    });
    return said;
  });
}

int moiety_checkpoint_save(const char* request, char** out) {
  return answer("checkpoint_save", request, out, [](const json& asked) {
    const std::string path =
        save(asked.at("path"), view_of(asked.at("pieces")), run_of(asked.at("run")));
    return json{{"path", path}};
  });
}

int moiety_folder_describe(const char* request, char** out) {
  return answer("folder_describe", request, out, [](const json& asked) {
    const hf::Folder folder = hf::Folder::open(asked.at("path"));
    const hf::Description& d = folder.description();
    json shapes = json::object();
    for (const hf::ModelTensor& t : hf::model_tensors(d.config, d.family)) shapes[t.name] = t.shape;
    return json{
        {"family", hf::name(d.family)}, {"config", folder.config_text()}, {"tensors", shapes}};
  });
}

int moiety_folder_load(const char* request, char** out) {
  return answer("folder_load", request, out, [](const json& asked) {
    const hf::Folder folder = hf::Folder::open(asked.at("path"));
    hf::load_weights(folder, folder.description().config, view_of(asked.at("pieces")));
    return json::object();
  });
}

int moiety_folder_save(const char* request, char** out) {
  return answer("folder_save", request, out, save_folder);
}
