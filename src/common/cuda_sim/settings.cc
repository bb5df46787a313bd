#include "settings.h"

#include <cstdlib>
#include <stdexcept>
#include <string>

namespace needle::sim {

namespace {

std::string value_of(const char* variable) {
  const char* value = std::getenv(variable);
  return value ? value : "";
}

std::invalid_argument refused(const std::string& variable, const std::string& accepted) {
  return std::invalid_argument(variable + " is '" + value_of(variable.c_str()) +
                               "' (accepted: " + accepted + ")");
}

// Whether the variable has the second of its two values, the first of which is the default.
bool is_second(const char* variable, const std::string& first, const std::string& second) {
  const std::string value = value_of(variable);
  if (value.empty() || value == first) return false;
  if (value == second) return true;
  throw refused(variable, first + ", " + second);
}

bool is_number(const std::string& text, size_t most_digits) {
  return !text.empty() && text.size() <= most_digits &&
         text.find_first_not_of("0123456789") == std::string::npos;
}

}  // namespace

OrderOption order_option() {
  const std::string value = value_of("NEEDLE_SIM_ORDER"), random = "random:";
  if (value.empty()) return {};
  if (value == "forward") return {Order::kForward, 0, true};
  if (value == "reverse") return {Order::kReverse, 0, true};
  if (value.rfind(random, 0) == 0) {
    const std::string seed = value.substr(random.size());
    if (is_number(seed, 19)) return {Order::kRandom, std::stoull(seed), true};
  }
  throw refused("NEEDLE_SIM_ORDER", "forward, reverse, random:SEED");
}

bool async_copies_are_early() { return is_second("NEEDLE_SIM_CP_ASYNC", "late", "early"); }

bool streams_are_lazy() { return is_second("NEEDLE_SIM_STREAMS", "eager", "lazy"); }

int compute_capability() {
  const std::string value = value_of("NEEDLE_SIM_SM");
  if (value.empty()) return 90;
  if (!is_number(value, 6) || std::stoi(value) < 75)
    throw refused("NEEDLE_SIM_SM", "75, 80, 90, ...");
  return std::stoi(value);
}

int multiprocessors() {
  const std::string value = value_of("NEEDLE_SIM_MULTIPROCESSORS");
  if (value.empty()) return 4;
  if (!is_number(value, 6)) throw refused("NEEDLE_SIM_MULTIPROCESSORS", "0, 1, 2, ...");
  return std::stoi(value);
}

int wanted_workers() {
  const std::string value = value_of("NEEDLE_NUM_THREADS");
  if (value.empty()) return 0;
  if (!is_number(value, 4) || std::stoi(value) < 1 || std::stoi(value) > 4096)
    throw refused("NEEDLE_NUM_THREADS", "1 to 4096");
  return std::stoi(value);
}

}  // namespace needle::sim
