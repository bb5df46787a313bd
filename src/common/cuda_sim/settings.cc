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

constexpr int kMost = 999999;

// The variable's number, or `unset`.
int number_of(const char* variable, int unset, int least, int most, const char* accepted) {
  const std::string value = value_of(variable);
  if (value.empty()) return unset;
  if (is_number(value, 6))
    if (const int n = std::stoi(value); n >= least && n <= most) return n;
  throw refused(variable, accepted);
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

int compute_capability() { return number_of("NEEDLE_SIM_SM", 90, 75, kMost, "75, 80, 90, ..."); }

int multiprocessors() {
  return number_of("NEEDLE_SIM_MULTIPROCESSORS", 4, 0, kMost, "0, 1, 2, ...");
}

int memory_mib() { return number_of("NEEDLE_SIM_MEMORY", 0, 1, kMost, "1 to 999999"); }

int wanted_workers() { return number_of("NEEDLE_NUM_THREADS", 0, 1, 4096, "1 to 4096"); }

}  // namespace needle::sim
