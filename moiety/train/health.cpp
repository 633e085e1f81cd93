#include "moiety/train/health.h"

#include <algorithm>
#include <chrono>
#include <unistd.h>

namespace moiety::train {

const char* name(Health health) {
  static constexpr const char* kNames[] = {"OK", "INFO", "WARN", "FAIL"};
  return kNames[static_cast<int>(health)];
}

bool all_well(const std::vector<HealthCheck>& checks) {
  return std::none_of(checks.begin(), checks.end(),
                      [](const HealthCheck& c) { return c.health == Health::kFail; });
}

std::string checks_json(const std::vector<HealthCheck>& checks) {
  std::string list;
  for (const HealthCheck& c : checks) {
    JsonLine json;
    json.add("name", c.name).add("status", name(c.health)).add("text", c.text);
    if (!c.fix.empty()) json.add("fix", c.fix);
    list += (list.empty() ? "" : ",") + json.append(c.facts).text();
  }
  char host[256] = "";
  ::gethostname(host, sizeof(host) - 1);
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return JsonLine()
      .add("v", 1)
      .add("version", MOIETY_VERSION)
      .add("t", std::chrono::duration<double>(now).count())
      .add("host", host)
      .add("ok", all_well(checks))
      .raw("checks", "[" + list + "]")
      .text();
}

}  // namespace moiety::train
