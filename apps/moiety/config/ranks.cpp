#include "apps/moiety/config/ranks.h"

#include <algorithm>

#include <nlohmann/json.hpp>

#include "moiety/checkpoint/manifest.h"
#include "moiety/checkpoint/together.h"
#include "moiety/data/sha256.h"
#include "moiety/hf/folder.h"

namespace moiety::app {
namespace {

using nlohmann::json;

// The facts as a text that travels; sources may hold any bytes.
std::string encode(const std::vector<RankFact>& facts, bool with_sources) {
  json list = json::array();
  for (const RankFact& f : facts) {
    list.push_back({f.name, f.value, with_sources ? f.source : ""});
  }
  return list.dump(-1, ' ', false, json::error_handler_t::replace);
}

std::vector<RankFact> decode(const std::string& text) {
  std::vector<RankFact> facts;
  for (const json& f : json::parse(text)) facts.push_back({f[0], f[1], f[2]});
  return facts;
}

std::string digest(const std::vector<RankFact>& facts) {
  const data::Sha256 sum = data::sha256(encode(facts, false));
  return {reinterpret_cast<const char*>(sum.data()), sum.size()};
}

// Whether, and how, a rank's facts differ from rank 0's.
std::string difference(int rank, const std::vector<RankFact>& theirs,
                       const std::vector<RankFact>& first) {
  for (size_t i = 0; i < std::max(theirs.size(), first.size()); ++i) {
    if (i >= theirs.size() || i >= first.size() || theirs[i].name != first[i].name) {
      return text("rank {} runs another build of Moiety than rank 0, with other keys", rank);
    }
    if (theirs[i].value == first[i].value) continue;
    return text("rank {} has {} = {} ({}), rank 0 {}", rank, theirs[i].name, theirs[i].value,
                theirs[i].source, first[i].value);
  }
  return {};
}

void add_files(const std::string& key, const std::vector<std::string>& paths,
               const data::SampleSource* source, std::vector<RankFact>& facts) {
  facts.push_back({key, text("{} files", paths.size()), "their number"});
  if (!source) return;
  const std::vector<data::SamplerSource> sources = source->sources();
  for (size_t i = 0; i < paths.size(); ++i) {
    const data::SourceIdentity& is = sources.at(i).identity;
    facts.push_back({text("{}[{}]", key, i),
                     text("{} tokens of crc32c {:08x}, weight {:.6g}", is.tokens, is.crc32c,
                          double(is.weight) / double(uint64_t{1} << 32)),
                     paths[i]});
  }
}

}  // namespace

std::vector<RankFact> facts_of(const Config& config) {
  std::vector<RankFact> facts{{"the version of moiety", MOIETY_VERSION, "this build"}};
  const std::span<const Key> keys = option_keys();
  for (size_t i = 0; i < keys.size(); ++i) {
    if (keys[i].among_ranks == AmongRanks::kByHost) continue;
    facts.push_back({keys[i].full_name(), value_text(keys[i], config.options), config.source[i]});
  }
  return facts;
}

std::vector<RankFact> meanings_of(const Config& config, const train::TrainingPlan& plan) {
  const Options& o = config.options;
  std::vector<RankFact> facts;
  const bool gpu = plan.device.type == DeviceType::kCuda;
  facts.push_back({"run.device", gpu ? "a GPU" : "the CPU", o.run.device});
  std::vector<std::string> paths;
  for (const data::WeightedPath& file : o.data.train) paths.push_back(file.path);
  add_files("data.train", paths, plan.train.get(), facts);
  add_files("data.valid", o.data.valid, plan.valid.get(), facts);
  facts.push_back({"data.tokenizer", plan.tokenizer_identity, o.data.tokenizer});
  const std::string& origin = plan.init_from;
  const std::string identity = origin.empty()          ? "none"
                               : hf::is_folder(origin) ? hf::Folder::open(origin).identity()
                                                       : checkpoint::read_manifest(origin).id;
  facts.push_back({"run.init_from", identity, origin});
  return facts;
}

std::string first_difference(comm::Bootstrap& ranks, const std::vector<RankFact>& facts) {
  const std::vector<std::string> digests = checkpoint::gather(ranks, digest(facts));
  const auto same = [&](const std::string& d) { return d == digests[0]; };
  if (std::all_of(digests.begin(), digests.end(), same)) return {};
  const std::vector<std::string> all = checkpoint::gather(ranks, encode(facts, true));
  const std::vector<RankFact> first = decode(all[0]);
  for (int rank = 1; rank < ranks.size(); ++rank) {
    std::string found = difference(rank, decode(all[rank]), first);
    if (!found.empty()) return found;
  }
  return "the configurations of ranks differ";
}

}  // namespace moiety::app
