#include "apps/moiety/config/resume.h"

#include "apps/moiety/exit_code.h"

namespace moiety::app {

std::vector<std::string> compare_for_resume(const Options& saved, const Options& now,
                                            const std::string& checkpoint) {
  std::vector<std::string> changes;
  std::string different;
  for (const Key& key : option_keys()) {
    const std::string before = value_text(key, saved), after = value_text(key, now);
    if (before == after) continue;
    if (key.resume == Resume::kMust) {
      different += text("\n  {:<24} {:>16} {:>16}", key.full_name(), before, after);
    } else if (key.resume == Resume::kMay) {
      changes.push_back(text("resume: {} was {}, is now {}", key.full_name(), before, after));
    }
  }
  if (different.empty()) return changes;
  throw CheckpointError(
      "{}: made with other values of keys that a resume must not change:\n  {:<24} {:>16} {:>16}{}",
      checkpoint, "key", "checkpoint", "now", different);
}

}  // namespace moiety::app
