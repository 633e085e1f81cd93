// Folders of transformers that are stored in golden/ (transformers_reference.py), and models with
// the weights of a checkpoint.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "moiety/checkpoint/loader.h"
#include "moiety/hf/import.h"
#include "moiety/train/inference_model.h"
#include "tests/model/harness.h"
#include "tests/support/files.h"

namespace moiety::hf {

inline const std::vector<std::string> kExpertCases{"qwen3_moe", "qwen3_moe_tied", "mixtral"};
inline const std::vector<std::string> kDenseCases{"llama", "mistral", "qwen3"};

inline std::string golden(const std::string& name) {
  return MOIETY_SOURCE_DIR "/tests/hf/golden/" + name;
}

// A copy of a stored folder, with its configuration in the words of transformers 4 or 5.
inline std::string copy_golden(const TemporaryDirectory& dir, const std::string& name,
                               const std::string& to, int generation = 5) {
  namespace fs = std::filesystem;
  const fs::path path = dir / to;
  fs::create_directories(path);
  for (const char* file : {"model.safetensors", "config.json", "generation_config.json"}) {
    fs::copy_file(golden(name) + "/" + file, path / file);
  }
  if (generation == 4) {
    fs::copy_file(golden(name) + "/config.4.json", path / "config.json",
                  fs::copy_options::overwrite_existing);
  }
  return path.string();
}

// All values of a stored tensor.
template <class T>
std::vector<T> stored_values(const std::string& file, const std::string& name) {
  const auto reader = checkpoint::SafetensorsReader::open(file);
  for (const checkpoint::Entry& entry : reader.entries()) {
    if (entry.name != name) continue;
    std::vector<T> out((entry.end - entry.begin) / sizeof(T));
    reader.read(entry.begin, std::as_writable_bytes(std::span(out)));
    return out;
  }
  ADD_FAILURE() << file << " has no " << name;
  return {};
}

// All elements of a tensor as the source gives them.
inline std::vector<float> values_of(const WeightSource& source, const ModelTensor& tensor) {
  const Box box = checkpoint::whole(tensor.shape);
  std::vector<float> out(static_cast<size_t>(checkpoint::volume(box)));
  source.read(tensor.name, box, out.data());
  return out;
}

// Sets the weights of the harness, all of whose tensors the checkpoint must have and no others.
inline void load_harness(const std::string& checkpoint_path, model::ModelHarness& h,
                         comm::Communicator& world) {
  std::map<std::string, std::vector<float>> memory;
  checkpoint::StateView view;
  const auto add = [&](const std::string& name, const std::vector<int64_t>& shape) {
    checkpoint::StatePiece piece;
    piece.tensor = name;
    piece.slot = "weight";
    piece.shape = shape;
    piece.box = checkpoint::whole(shape);
    memory[name].resize(static_cast<size_t>(checkpoint::volume(piece.box)));
    piece.data = memory[name].data();
    view.push_back(piece);
  };
  for (const optim::Parameter& p : h.parameters) {
    for (const optim::LogicalTensor& t : p.spec.tensors) add(t.name, t.shape);
  }
  for (const model::Transformer::State& s : h.model->states()) add(s.name, {s.view.numel()});
  checkpoint::load(checkpoint_path, view, {.may_leave = checkpoint::is_no_weight},
                   world.bootstrap());
  for (optim::Parameter& p : h.parameters) {
    model::for_each_element(p.spec, [&](int64_t at, int tensor, int64_t i) {
      put(p.weight, at, memory.at(p.spec.tensors[tensor].name)[static_cast<size_t>(i)]);
    });
  }
}

// A batch of the tokens of a reference, each predicting the next.
struct ReferenceBatch {
  explicit ReferenceBatch(const std::string& file, int64_t sequences = 2)
      : tokens(stored_values<int32_t>(file, "tokens")),
        seq_len(std::ssize(tokens) / sequences),
        token(DType::kInt32, {sequences, seq_len}),
        target(DType::kInt32, {sequences, seq_len}) {
    for (int64_t i = 0; i < std::ssize(tokens); ++i) {
      const bool last = (i + 1) % seq_len == 0;
      token.data<int32_t>()[i] = tokens[static_cast<size_t>(i)];
      target.data<int32_t>()[i] = last ? -100 : tokens[static_cast<size_t>(i + 1)];
    }
    batch.token_BS = token;
    batch.target_BS = target;
  }
  std::vector<int32_t> tokens;
  int64_t seq_len;
  Tensor token, target;
  model::Batch batch;
};

}  // namespace moiety::hf
